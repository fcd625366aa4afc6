"""Starts, calls, monitors and ends the processes of all ranks."""

from __future__ import annotations

import logging
import os
import pickle
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cepo.config.schema import TrainerConfig
from cepo.errors import CepoError, EngineError, WorkerLostError
from cepo.progress import SECONDS_BETWEEN_LINES, phase
from cepo.runtime.ray.cluster import reserve, worker_environment
from cepo.runtime.ray.rank_process import Meeting, RankLocation, RankProcess
from cepo.tracking.run_folder import LOGS_FOLDER, require_own_records

logger = logging.getLogger(__name__)

_GRACE_SECONDS = 20.0  # to wait after one rank's exception for the death of another rank, which may be its cause
_STORAGE_SECONDS = 60.0  # for a new file to appear on a network file system
_LOOK_SECONDS = 5.0  # between looks at the clock


class Ranks:
    """The worker processes of a run, one per device of the cluster; they log to `logs/rank_<N>.log` in the run folder.

    `answers` has each rank's answer to `RankProcess.build`, which gets `content`.

    Raises:
        EngineError: devices are missing, a process does not start, or a machine does not share the run folder's storage.
    """

    def __init__(self, trainer: TrainerConfig, content: bytes) -> None:
        self._trainer = trainer
        self._run_folder = trainer.run_folder.absolute()
        self.number = trainer.nnodes * trainer.n_gpus_per_node
        require_own_records(self._run_folder, [LOGS_FOLDER])
        self._logs = [self._run_folder / LOGS_FOLDER / f"rank_{rank}.log" for rank in range(self.number)]
        self.locations: list[RankLocation] = []
        self._processes: list[Any] = []
        self.answers: list[Any] = []
        self._group, reserved = reserve(trainer)
        environment = {"env_vars": worker_environment(trainer.n_gpus_per_node)}
        for rank in range(self.number):
            machine = rank // trainer.n_gpus_per_node
            where = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=machine)
            options: Any = {**reserved, "scheduling_strategy": where, "runtime_env": environment}
            actor: Any = ray.remote(RankProcess).options(**options)
            self._processes.append(actor.remote(os.getcwd(), str(self._logs[rank])))
        try:
            self._locate()
            self.answers = self.build(content)
        except BaseException:
            self.end()
            raise

    def build(self, content: bytes) -> list[Any]:
        """Connects the ranks, builds their workers, and returns each rank's answer."""
        first = self.locations[0]
        # The timeout is longer than the driver's, because only the driver's error names the rank that hangs.
        seconds = self._trainer.stage_timeout_seconds + _GRACE_SECONDS
        calls = [
            process.build.remote(content, Meeting(rank, self.number, first.machine, first.free_port, seconds))
            for rank, process in enumerate(self._processes)
        ]
        logs = self._logs[0].parent
        with phase(f"{self.number} workers load the model and start their engines; their logs are in {logs}"):
            return self._answers(calls, what="building its worker", seconds=self._trainer.start_timeout_seconds)

    def call(
        self, method: str, messages: Sequence[bytes], *, arrived: Callable[[int, Any], None] | None = None
    ) -> list[Any]:
        """Calls a worker method on all ranks and returns each rank's result, which `arrived` gets as soon as it arrives.

        Raises:
            WorkerLostError: a process died, or did not finish within `trainer.stage_timeout_seconds`.
            CepoError: the method raised an exception.
        """
        seconds = self._trainer.stage_timeout_seconds
        calls = [
            process.call.remote(method, message) for process, message in zip(self._processes, messages, strict=True)
        ]
        return self._answers(calls, what=f"the call `{method}`", seconds=seconds, arrived=arrived)

    def end(self) -> None:
        """Releases the devices; within a second Ray then kills all processes there by SIGKILL, even stopped ones."""
        remove_placement_group(self._group)

    def _answers(
        self, calls: Sequence[object], *, what: str, seconds: float, arrived: Callable[[int, Any], None] | None = None
    ) -> list[Any]:
        start = said = time.monotonic()
        deadline = start + seconds
        results: dict[int, Any] = {}
        failures: dict[int, RayTaskError] = {}
        pending = {call: rank for rank, call in enumerate(calls)}
        while pending:
            left = deadline - time.monotonic()
            ready, _ = ray.wait(list(pending), timeout=min(max(left, 0.0), _LOOK_SECONDS))
            if not ready and left <= _LOOK_SECONDS:
                break
            if time.monotonic() - said >= SECONDS_BETWEEN_LINES:
                said = time.monotonic()
                logger.info("%s for %.0f s: %d of %d workers are done", what, said - start, len(results), self.number)
            for call in ready:
                rank = pending.pop(call)
                try:
                    results[rank] = pickle.loads(ray.get(call))
                except RayTaskError as error:
                    failures[rank] = error
                    # The death of another rank may have caused the exception, and Ray reports it a little later.
                    deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
                except RayError as error:
                    raise self._lost(rank, what, error) from error
                else:
                    if arrived is not None:
                        arrived(rank, results[rank])
        if failures:
            raise self._failed(failures, what, waiting=sorted(pending.values()))
        if pending:
            late = ", ".join(self._name(rank) for rank in sorted(pending.values()))
            raise WorkerLostError(
                f"{late}: {what} has not finished after {seconds:g} s (trainer.stage_timeout_seconds, or "
                "trainer.start_timeout_seconds while building)"
            )
        return [results[rank] for rank in range(self.number)]

    def _failed(self, failures: dict[int, RayTaskError], what: str, *, waiting: Sequence[int]) -> CepoError:
        """Chooses the exception to raise if calls failed on living ranks.

        A user's error comes first, but after `build` only if no rank still waits (`waiting`) for the failed ones. A
        failure of all ranks that concerns no connection is an `EngineError`, any other a `WorkerLostError`.
        """
        causes = {rank: error.cause for rank, error in failures.items()}
        for cause in causes.values():
            if isinstance(cause, CepoError) and (not waiting or not self.answers):
                return cause
        rank = min(failures)
        message = f"{self._name(rank)} failed in {what}: {type(causes[rank]).__name__}: {causes[rank]}"
        if len(failures) == self.number and "onnection" not in message:
            return EngineError(f"{message}\n{failures[rank]}")
        return WorkerLostError(message)

    def _lost(self, rank: int, what: str, error: RayError) -> WorkerLostError:
        died = "died" if isinstance(error, RayActorError) else f"does not answer ({type(error).__name__})"
        log = self._logs[rank]
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.is_file() else []
        last = "\n".join(lines[-8:])
        return WorkerLostError(f"{self._name(rank)} {died} during {what}; the last lines of {log}:\n{last}")

    def _name(self, rank: int) -> str:
        location = self.locations[rank]
        return f"rank {rank} (machine {location.machine}, process {location.process})"

    def _locate(self) -> None:
        """Waits for the processes to start, and checks that all see the run folder."""
        self._run_folder.mkdir(parents=True, exist_ok=True)
        probe, seconds = self._run_folder / f".probe-{uuid.uuid4().hex}", self._trainer.start_timeout_seconds
        probe.touch()
        try:
            calls = [process.location.remote(str(probe), _STORAGE_SECONDS) for process in self._processes]
            self.locations = ray.get(calls, timeout=seconds)
        except GetTimeoutError as error:
            raise EngineError(
                f"worker processes did not start within trainer.start_timeout_seconds={seconds:g}"
            ) from error
        except RayError as error:
            raise WorkerLostError(f"a worker process could not start: {error}") from error
        finally:
            probe.unlink(missing_ok=True)
        blind = [self._name(rank) for rank, location in enumerate(self.locations) if not location.sees_probe]
        if blind:
            raise EngineError(
                f"{', '.join(blind)} does not see {probe}, which this machine wrote {_STORAGE_SECONDS:g} s ago. Checkpoints "
                "need a run folder on storage that all machines share under the same path: set trainer.save_checkpoint_path"
            )
