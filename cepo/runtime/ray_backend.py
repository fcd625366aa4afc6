"""Implements the backend for many devices: it runs one process per rank, calls all of them and merges the results."""

from __future__ import annotations

import logging
import os
import pickle
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from torch import Tensor

from cepo.config.schema import TrainerConfig
from cepo.data.batch import CriticBatch, Kept, OptimizerBatch, ScoringRow
from cepo.data.row_settings import RowRules
from cepo.errors import CepoError, EngineError, WorkerLostError
from cepo.metrics import Metrics, max_value, mean_value, merge_metrics
from cepo.models.interface import ImageSource
from cepo.rollout.generator import Generation, GenerationRequest, OnFinished, SamplingSettings
from cepo.run_folder.layout import LOGS_FOLDER, require_own_records
from cepo.runtime import dispatch
from cepo.runtime.cluster import connect, reserve, worker_environment
from cepo.runtime.dispatch import Sender, encode
from cepo.runtime.rank_process import ProcessGroupAddress, RankLocation, RankProcess
from cepo.runtime.result_queue import Arrived, ResultQueue, start_queue
from cepo.terminal.progress import SECONDS_BETWEEN_LINES, phase
from cepo.workers.memory import Memory
from cepo.workers.worker import WorkerSpec

logger = logging.getLogger(__name__)

_GRACE_SECONDS = 20.0  # to wait after one rank's exception for the death of another rank, which may be its cause
_STORAGE_SECONDS = 60.0  # for a new file to appear on a network file system
_LOOK_SECONDS = 5.0  # between looks at the clock
_LOOK_AT_ARRIVALS_SECONDS = 0.5  # a group is sampled for many times this


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
        self.answers: list[Any] = []
        self._group, resources = reserve(trainer)
        self._arrivals = ResultQueue(start_queue())
        environment = {"env_vars": worker_environment(trainer.n_gpus_per_node)}
        self._processes: list[Any] = []
        for rank, log in enumerate(self._logs):
            machine = rank // trainer.n_gpus_per_node
            scheduling = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=machine)
            options: Any = {**resources, "scheduling_strategy": scheduling, "runtime_env": environment}
            actor: Any = ray.remote(RankProcess).options(**options)
            self._processes.append(actor.remote(os.getcwd(), str(log)))
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
        meeting_seconds = self._trainer.stage_timeout_seconds + _GRACE_SECONDS
        calls: list[object] = []
        for rank, process in enumerate(self._processes):
            meeting = ProcessGroupAddress(rank, self.number, first.machine, first.free_port, meeting_seconds)
            calls.append(process.build.remote(content, meeting, self._arrivals.queue))
        logs = self._logs[0].parent
        with phase(f"{self.number} workers load the model and start their engines; their logs are in {logs}"):
            return self._answers(calls, what="building its worker", seconds=self._trainer.start_timeout_seconds)

    def call(self, method: str, messages: Sequence[bytes]) -> list[Any]:
        """Calls a worker method on all ranks and returns each rank's result.

        Raises:
            WorkerLostError: a process died, or did not finish within `trainer.stage_timeout_seconds`.
            CepoError: the method raised an exception.
        """
        seconds = self._trainer.stage_timeout_seconds
        calls: list[object] = []
        for process, message in zip(self._processes, messages, strict=True):
            calls.append(process.call.remote(method, message))
        return self._answers(calls, what=f"the call `{method}`", seconds=seconds)

    def generate(self, messages: Sequence[bytes], *, ranks_per_engine: int, arrived: Arrived) -> None:
        """Samples on all ranks; `arrived` gets each group of responses as soon as it is finished. Raises as `call`."""
        number = self._arrivals.begin()
        calls: list[object] = []
        for rank, (process, message) in enumerate(zip(self._processes, messages, strict=True)):
            reports = rank % ranks_per_engine == 0
            calls.append(process.generate.remote(message, number, reports=reports))

        def take_arrivals() -> None:
            self._arrivals.take(arrived)

        seconds = self._trainer.stage_timeout_seconds
        self._answers(calls, what="the call `generate`", seconds=seconds, meanwhile=take_arrivals)
        take_arrivals()

    def end(self) -> None:
        """Releases the devices; within a second Ray then kills all processes there by SIGKILL, even stopped ones."""
        remove_placement_group(self._group)
        self._arrivals.close()

    def _answers(
        self, calls: Sequence[object], *, what: str, seconds: float, meanwhile: Callable[[], None] | None = None
    ) -> list[Any]:
        """Waits for the calls and returns their results; until then it calls `meanwhile` every moment."""
        look_seconds = _LOOK_SECONDS if meanwhile is None else _LOOK_AT_ARRIVALS_SECONDS
        start = time.monotonic()
        last_message = start
        deadline = start + seconds
        results: dict[int, Any] = {}
        failures: dict[int, RayTaskError] = {}
        pending = {call: rank for rank, call in enumerate(calls)}
        while pending:
            remaining_seconds = deadline - time.monotonic()
            ready, _ = ray.wait(list(pending), timeout=min(max(remaining_seconds, 0.0), look_seconds))
            if not ready and remaining_seconds <= look_seconds:
                break
            if meanwhile is not None:
                meanwhile()
            if time.monotonic() - last_message >= SECONDS_BETWEEN_LINES:
                last_message = time.monotonic()
                waited = last_message - start
                logger.info("%s for %.0f s: %d of %d workers are done", what, waited, len(results), self.number)
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
        cause = causes[rank]
        message = f"{self._name(rank)} failed in {what}: {type(cause).__name__}: {cause}"
        all_failed = len(failures) == self.number
        concerns_connection = "onnection" in message  # capitalised or not
        if all_failed and not concerns_connection:
            return EngineError(f"{message}\n{failures[rank]}")
        return WorkerLostError(message)

    def _lost(self, rank: int, what: str, error: RayError) -> WorkerLostError:
        how = "died" if isinstance(error, RayActorError) else f"does not answer ({type(error).__name__})"
        log = self._logs[rank]
        lines: list[str] = []
        if log.is_file():
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        last_lines = "\n".join(lines[-8:])
        return WorkerLostError(f"{self._name(rank)} {how} during {what}; the last lines of {log}:\n{last_lines}")

    def _name(self, rank: int) -> str:
        location = self.locations[rank]
        return f"rank {rank} (machine {location.machine}, process {location.process})"

    def _locate(self) -> None:
        """Waits for the processes to start, and checks that all see the run folder."""
        self._run_folder.mkdir(parents=True, exist_ok=True)
        probe = self._run_folder / f".probe-{uuid.uuid4().hex}"
        seconds = self._trainer.start_timeout_seconds
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


class RayBackend:
    """The backend with one worker process per device.

    Args:
        row_rules: how ranks read images themselves.
        memory: what the run needs on a GPU; None if no GPU can be in use.
        image_probe: one row of the training set; ranks that can read it read all images themselves. None: no data set.

    Raises:
        ConfigError, EngineError, WorkerLostError: see `connect` and `Ranks`.
    """

    def __init__(
        self,
        trainer: TrainerConfig,
        spec: WorkerSpec,
        *,
        row_rules: RowRules,
        memory: Memory | None,
        image_probe: ImageSource | None,
    ) -> None:
        connect(trainer)
        self.ranks = Ranks(trainer, encode((spec, row_rules, memory, image_probe)))
        self.generator_name: str = self.ranks.answers[0][0]
        self._senders = [Sender(by_source=reads_images) for _, reads_images in self.ranks.answers]
        self._ranks_per_engine = spec.generator.tensor_parallel_size
        self._prompts_per_update = spec.actor.global_batch_size
        self._begin_step()
        self._bytes = [0] * self.ranks.number
        self._tokens = [0] * self.ranks.number
        machines = sorted({location.machine for location in self.ranks.locations})
        engines = "each with its own"
        if self._ranks_per_engine > 1:
            engines = f"each {self._ranks_per_engine} sharing a"
        logger.info(
            "%d workers on %s, %s %s engine", self.ranks.number, ", ".join(machines), engines, self.generator_name
        )

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        settings: SamplingSettings,
        on_finished: OnFinished | None = None,
    ) -> list[list[Generation]]:
        self._begin_step()
        size = self._ranks_per_engine  # neighbouring ranks, which get the same requests and give the same responses
        indices = dispatch.request_indices(requests, settings, self.ranks.number // size)
        messages: list[object] = []
        for part in dispatch.select(requests, indices):
            messages += [(part, settings)] * size

        groups: list[list[Generation]] = [[] for _ in requests]

        def arrived(rank: int, number: int, group: list[Generation]) -> None:
            index = indices[rank // size][number]
            groups[index] = group
            if on_finished is not None:
                on_finished(index, group)

        self.ranks.generate(self._encoded(messages), ranks_per_engine=size, arrived=arrived)
        return groups

    def score(
        self, rows: Sequence[ScoringRow], *, keep: Kept | None = None, temperature: float | None = None
    ) -> list[Tensor]:
        return self._pass("score", rows, keep=keep, temperature=temperature)

    def score_teacher(self, rows: Sequence[ScoringRow], *, keep: Kept | None = None) -> list[Tensor]:
        return self._pass("score_teacher", rows, keep=keep)

    def score_initial(self, rows: Sequence[ScoringRow]) -> list[Tensor]:
        return self._pass("score_initial", rows)

    def entropies(self, rows: Sequence[ScoringRow]) -> list[Tensor]:
        return self._pass("entropies", rows)

    def values(self, rows: Sequence[ScoringRow]) -> list[Tensor]:
        return self._pass("values", rows)

    def update(self, batches: Sequence[OptimizerBatch], *, step: int) -> Metrics:
        parts = dispatch.split_batches(batches, self._assignment, self.ranks.number)
        metrics_of_ranks = self.call("update", [(part,) for part in parts], step=step)
        return merge_metrics([*metrics_of_ranks, self._work()])

    def update_critic(self, batches: Sequence[CriticBatch], *, step: int) -> Metrics:
        parts = dispatch.split_batches(batches, self._assignment, self.ranks.number)
        return merge_metrics(self.call("update_critic", [(part,) for part in parts], step=step))

    def forget_work(self) -> None:
        self._everywhere("forget_work")
        self._work()

    def finish_step(self, step: int) -> None:
        self._everywhere("finish_step", step)

    def synchronise_rollout(self) -> None:
        self._everywhere("synchronise_rollout")

    def save(self, folder: Path) -> None:
        self._everywhere("save", folder.absolute())

    def load(self, folder: Path) -> None:
        self._everywhere("load", folder.absolute())

    def close(self) -> None:
        self.ranks.end()  # the workers close nothing: what they hold ends with their processes

    def _begin_step(self) -> None:
        """Forgets the last step's assignment and images, because each step numbers its prompts from 0."""
        self._assignment = dispatch.Assignment(self.ranks.number, prompts_per_update=self._prompts_per_update)
        for sender in self._senders:
            sender.forget()

    def _pass(self, method: str, rows: Sequence[ScoringRow], **keywords: Any) -> list[Any]:
        indices = self._assignment.indices_of(rows)
        parts = dispatch.select(rows, indices)
        for rank, part in enumerate(parts):
            self._tokens[rank] += sum(row.num_tokens for row in part)
        results = self.call(method, [(part,) for part in parts], **keywords)
        return dispatch.in_order(results, indices)

    def _everywhere(self, method: str, *arguments: object) -> None:
        self.call(method, [arguments] * self.ranks.number)

    def call(self, method: str, arguments: Sequence[tuple[Any, ...]], **keywords: Any) -> list[Any]:
        """Calls a worker method on every rank with its own arguments and common keywords; see `Ranks.call`."""
        return self.ranks.call(method, self._encoded([(own_arguments, keywords) for own_arguments in arguments]))

    def _encoded(self, contents: Sequence[object]) -> list[bytes]:
        """Returns the message to each rank, and counts its bytes."""
        messages: list[bytes] = []
        for rank, (sender, content) in enumerate(zip(self._senders, contents, strict=True)):
            message = sender.encode(content)
            self._bytes[rank] += len(message)
            messages.append(message)
        return messages

    def _work(self) -> Metrics:
        metrics = {
            "work/bytes_sent_per_rank": mean_value(sum(self._bytes) / self.ranks.number),
            "work/bytes_sent_max": max_value(max(self._bytes)),
            "work/tokens_scored_per_rank": mean_value(sum(self._tokens) / self.ranks.number),
            "work/tokens_scored_max": max_value(max(self._tokens)),
        }
        self._bytes = [0] * self.ranks.number
        self._tokens = [0] * self.ranks.number
        return metrics
