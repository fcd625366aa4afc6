"""Runs reward functions in worker processes, so that no answer can end or block a run or affect another sample."""

from __future__ import annotations

import logging
import math
import os
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

from cepo.errors import EngineError, RewardError
from cepo.rewards.combined import function_names
from cepo.rewards.contract import RewardFailure, RewardOutcome, check_picklable
from cepo.rewards.process import START_SECONDS, WorkerProcess
from cepo.trees import Fields

if TYPE_CHECKING:
    from cepo.config.schema import RewardConfig

logger = logging.getLogger(__name__)

_Action = Literal["score", "extract", "match", "value"]
_SAMPLES_TOGETHER = 32


@dataclass(frozen=True)
class _Fault:
    kind: Literal["raised", "timed_out"]
    failure: RewardFailure


class RewardStream:
    """Scores the parts of a batch as they arrive; the outcome is that of one call for the whole batch.

    It is a context manager. Leaving it stops work that is not done.
    """

    def __init__(self, pool: RewardPool, action: _Action = "score") -> None:
        self.action, self.is_given_up = action, False
        self._pool = pool
        self._parts: dict[int, list[Future[list[Any]]]] = {}

    def __contains__(self, position: int) -> bool:
        return position in self._parts

    def add(self, position: int, samples: Sequence[Any]) -> None:
        """Queues the part of the batch at `position` and returns at once."""
        assert position not in self._parts, f"part {position} was added twice"
        self._parts[position] = self._pool.submit(self, samples)

    def outcome(self) -> RewardOutcome:
        """Waits for all parts and returns their scores in the order of their positions.

        Raises:
            RewardError: a sample cannot be pickled, or a batch function returned a wrong number of scores.
        """
        return self._pool.outcome(self.verdicts())

    def verdicts(self) -> list[Any]:
        """Waits for all parts and returns the worker's result, or a fault, for each sample."""
        futures = (future for position in sorted(self._parts) for future in self._parts[position])
        return [verdict for future in futures for verdict in _settled(future)]

    def __enter__(self) -> RewardStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.is_given_up = True
        self._pool.give_up(self)


def _settled(future: Future[list[Any]]) -> list[Any]:
    """Returns the future's verdicts, where samples that are tried again have futures of their own."""
    found: list[Any] = []
    for each in future.result():
        found += _settled(cast("Future[list[Any]]", each)) if isinstance(each, Future) else [each]
    return found


class RewardPool:
    """Runs a reward function in processes that are killed and replaced when they exceed the time limit.

    `spec` is `path/to/file.py:function` (see `cepo.rewards.functions`) and `kwargs` are its keywords. The scores of
    several functions are added with `weights` (see `cepo.rewards.combined`). `answer_function` names a function that
    finds the final answer in a response (see `load_answer_function`); its result is each sample's `extracted_answer`.

    Every call of the function has at most `timeout_seconds`. Sequential functions are called for one sample at a time,
    batch functions for up to 32. If a call for several samples raises, returns an invalid score, crashes or times out,
    its samples are tried again one by one, so that only the samples at fault fail; after a timeout later calls get half
    as many samples. A wrong number of scores cannot be assigned to samples and is a `RewardError`. A batch function
    must score samples independently, because it sees only a part of the batch, and some samples twice after a fault.

    A failed sample gets 0 in every field, is counted, and is logged as a warning.

    The constructor waits until the function is loaded. Raises `RewardError` if
    the function cannot be loaded, `EngineError` if a process cannot be started.
    """

    def __init__(
        self,
        spec: str,
        kwargs: Fields,
        *,
        weights: Sequence[float] | None = None,
        answer_function: str | None = None,
        num_workers: int,
        timeout_seconds: float,
    ) -> None:
        function_names(spec)
        self.spec = spec
        self.reward_name, self.reward_type, self.needs_images = "unknown", "batch", False
        self._setup = {"spec": spec, "kwargs": dict(kwargs), "weights": weights, "answer_function": answer_function}
        self._answer_function, self._timeout_seconds = answer_function, timeout_seconds
        self._samples_together = _SAMPLES_TOGETHER
        self._fields: dict[str, None] = {"overall": None}
        self._is_closed = self._has_scored = False
        self._owner = os.getpid()
        self._workers: list[WorkerProcess] = []
        self._idle: list[WorkerProcess] = []
        self._serving: dict[WorkerProcess, RewardStream] = {}
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="cepo-rewards")  # one waits for each worker
        self._finalizer = weakref.finalize(self, _end, self._workers, self._threads, self._owner)
        try:
            self._workers += [self._start_worker() for _ in range(num_workers)]
            for worker in self._workers:
                self.reward_name, self.reward_type, self.needs_images = self._functions(worker)
        except BaseException:
            self.close()
            raise
        self._idle += self._workers

    @classmethod
    def of(cls, config: RewardConfig) -> RewardPool:
        """Starts a pool with the settings of `worker.reward`."""
        return cls(
            config.reward_function,
            config.reward_function_kwargs,
            weights=config.reward_weights,
            answer_function=config.answer_function,
            num_workers=config.num_cpus,
            timeout_seconds=config.timeout_seconds,
        )

    def score(self, inputs: Sequence[Fields]) -> RewardOutcome:
        """Scores the samples; raises as `RewardStream.outcome` does."""
        return self.outcome(self._verdicts("score", inputs))

    def stream(self) -> RewardStream:
        """Returns a stream for a batch whose parts arrive at different times."""
        return RewardStream(self)

    def outcome(self, verdicts: Sequence[Any]) -> RewardOutcome:
        """Returns the outcome of a batch from its samples' verdicts."""
        faults = {index: verdict for index, verdict in enumerate(verdicts) if isinstance(verdict, _Fault)}
        for verdict in verdicts:
            if not isinstance(verdict, _Fault):
                self._fields.update(dict.fromkeys(verdict))
        _warn_of_faults(faults, len(verdicts), f"{self.spec} failed for %d of %d samples, which score 0")
        kinds = Counter(fault.kind for fault in faults.values())
        return RewardOutcome(
            scores=[
                dict.fromkeys(self._fields, 0.0) if index in faults else verdict
                for index, verdict in enumerate(verdicts)
            ],
            num_raised=kinds["raised"],
            num_timed_out=kinds["timed_out"],
            first_failure=faults[min(faults)].failure if faults else None,
        )

    def trial(self, sample: Fields) -> RewardFailure | None:
        """Returns why the function fails for `sample`, or None if it returns a score. Logs nothing."""
        (verdict,) = self._verdicts("score", [sample])
        return verdict.failure if isinstance(verdict, _Fault) else None

    def require_a_score(self, outcome: RewardOutcome) -> None:
        """Raises `RewardError` if no sample has a score, neither in `outcome` nor in any outcome passed here before."""
        failed = outcome.num_raised + outcome.num_timed_out
        if self._has_scored or failed < len(outcome.scores):
            self._has_scored = self._has_scored or bool(outcome.scores)
            return
        if outcome.first_failure is None:  # there were no samples
            return
        raise RewardError(
            f"{self.spec} failed for each of the first {failed} responses ({outcome.num_raised} raised or returned no score, "
            f"{outcome.num_timed_out} took more than worker.reward.timeout_seconds={self._timeout_seconds:g}): nothing "
            f"can be learnt from it. The first failure:\n{outcome.first_failure.details}"
        )

    def extracted_answers(self, responses: Sequence[str]) -> list[str | None]:
        r"""Returns each response's final answer or None, found by `answer_function`, or else by `extract_answer`.

        The result is None if `answer_function` hangs or raises.
        """
        if self._answer_function is None:
            from cepo.rewards.answers import extract_answer  # imports sympy, not needed otherwise

            return [extract_answer(response) for response in responses]
        return self._results("extract", responses, f"{self._answer_function} failed for %d of %d responses: no answer")

    def same_statements(self, pairs: Sequence[tuple[str, str]]) -> list[bool]:
        """Applies `cepo.rewards.answers.states_the_same` to each pair (prediction, ground truth), with the time limit.

        A comparison that hangs or raises counts as False and is logged as a warning.
        """
        found = self._results("match", pairs, "%d of %d comparisons failed and count as unequal")
        return [bool(same) for same in found]

    def value_keys(self, answers: Sequence[str]) -> list[str]:
        """Applies `cepo.rewards.answers.value_key` to each answer, within the limit; keeps the answer on failure."""
        keys = self._results("value", answers, "%d of %d answers have no value and are compared by spelling")
        return [answer if key is None else key for key, answer in zip(keys, answers, strict=True)]

    def _results(self, action: _Action, items: Sequence[Any], consequence: str) -> list[Any]:
        """Returns the worker's result for each item, None for failed items."""
        verdicts = self._verdicts(action, items)
        faults = {index: verdict for index, verdict in enumerate(verdicts) if isinstance(verdict, _Fault)}
        _warn_of_faults(faults, len(items), consequence)
        return [None if index in faults else verdict for index, verdict in enumerate(verdicts)]

    def _verdicts(self, action: _Action, items: Sequence[Any]) -> list[Any]:
        with RewardStream(self, action) as stream:
            stream.add(0, items)
            return stream.verdicts()

    def close(self) -> None:
        """Ends the worker processes. A closed pool cannot be used again; closing twice is allowed."""
        self._is_closed = True
        self._finalizer()

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(self, stream: RewardStream, items: Sequence[Any]) -> list[Future[list[Any]]]:
        """Queues a part of a stream; its futures have the verdicts in order."""
        if self._is_closed or os.getpid() != self._owner:
            state = "is closed" if self._is_closed else f"belongs to process {self._owner}, this is {os.getpid()}"
            raise EngineError(f"the reward pool of {self.spec!r} {state}. Create a pool where it is used.")
        items = [dict(item) for item in items] if stream.action == "score" else list(items)
        most = 1 if (stream.action, self.reward_type) == ("score", "sequential") else self._samples_together
        size = max(1, min(most, math.ceil(len(items) / len(self._workers))))
        starts = range(0, len(items), size)
        return [self._threads.submit(self._serve, stream, start, items[start : start + size]) for start in starts]

    def give_up(self, stream: RewardStream) -> None:
        """Stops the workers that still serve a stream that has been left; new ones replace them."""
        for worker, served in list(self._serving.items()):
            if served is stream:
                worker.stop()

    def _serve(self, stream: RewardStream, first: int, items: list[Any]) -> list[Any]:
        """Returns the verdicts on some items, of which `first` is the number of the first one in its part."""
        status: str
        value: Any
        worker = self._idle.pop()
        if not worker.is_alive:
            logger.warning("%s while it was idle; a new one replaces it.", worker.kill())
            worker = self._replaced(worker)
        self._serving[worker] = stream
        try:
            self._functions(worker)
            if stream.is_given_up:
                return []
            if stream.action == "score":
                check_picklable(items, first)
            status, value = worker.asked((stream.action, first, items), self._timeout_seconds)
        except (EOFError, TimeoutError) as error:
            is_late, ending = isinstance(error, TimeoutError), worker.kill()
            reason = f"no score within {self._timeout_seconds:g} s" if is_late else ending
            status, value = "timed_out" if is_late else "raised", RewardFailure(reason=reason, details=reason)
        finally:
            del self._serving[worker]
            self._idle.append(worker if worker.is_alive else self._replaced(worker))
        if status == "done":
            return value
        if status == "refused":
            raise RewardError(value)
        if len(items) == 1:
            return [_Fault("timed_out" if status == "timed_out" else "raised", value)]
        if status == "timed_out":
            self._call_with_fewer(len(items))
        return [self._threads.submit(self._serve, stream, first + index, [item]) for index, item in enumerate(items)]

    def _call_with_fewer(self, number: int) -> None:
        self._samples_together = max(1, min(self._samples_together, number // 2))
        logger.warning(
            f"A batch of {number} rewards took more than {self._timeout_seconds:g} s; its samples are tried one by one, and "
            f"later batches have at most {self._samples_together}."
        )

    def _functions(self, worker: WorkerProcess) -> tuple[str, str, bool]:
        """Waits until a worker has loaded its functions; returns their name, their type, and whether they need images."""
        if worker.functions is None:
            try:
                status, value = worker.received(START_SECONDS)
            except (EOFError, TimeoutError) as error:
                ending, is_late = worker.kill(), isinstance(error, TimeoutError)
                reason = f"took more than {START_SECONDS:g} s" if is_late else f"did not succeed: {ending}"
                raise EngineError(
                    f"starting a reward worker for {self.spec!r} {reason}. Its messages are on stderr."
                ) from error
            if status == "failed":
                raise RewardError(value)
            worker.functions = value
        assert worker.functions is not None
        return worker.functions

    def _replaced(self, worker: WorkerProcess) -> WorkerProcess:
        """Starts a worker instead of an ended one, unless the pool is closed."""
        if self._is_closed:
            return worker
        new = self._start_worker()
        self._workers[self._workers.index(worker)] = new
        return new

    def _start_worker(self) -> WorkerProcess:
        return WorkerProcess(self._setup, timeout_seconds=self._timeout_seconds)


def _warn_of_faults(faults: Mapping[int, _Fault], num_samples: int, consequence: str) -> None:
    if faults:
        examples = "; ".join(f"sample {index}: {fault.failure.reason}" for index, fault in list(faults.items())[:3])
        logger.warning(f"{consequence}. %s", len(faults), num_samples, examples)


def _end(workers: list[WorkerProcess], threads: ThreadPoolExecutor, owner: int) -> None:
    # A forked copy of the pool must leave the original's processes alone.
    if os.getpid() == owner:
        for worker in workers:
            worker.hang_up()
        for worker in workers:
            worker.close()
        threads.shutdown(wait=False, cancel_futures=True)
