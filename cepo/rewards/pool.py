"""Runs reward functions in worker processes, so that no answer can end or block a run or affect another sample."""

from __future__ import annotations

import logging
import math
import os
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any, Literal

from cepo.errors import ConfigError, EngineError, RewardError
from cepo.rewards.combined import function_names
from cepo.rewards.contract import Failure, RewardOutcome, check_picklable
from cepo.rewards.process import START_SECONDS, WorkerProcess
from cepo.rewards.stream import RewardStream

if TYPE_CHECKING:
    from cepo.config.schema import RewardConfig

logger = logging.getLogger(__name__)

_Action = Literal["score", "extract", "match", "value"]
_SAMPLES_TOGETHER = 32
_SAMPLES_ONE_BY_ONE = 8
_SAMPLES_RETRIED = 4
_SECONDS_BETWEEN_LOOKS = 0.2
_FULL_TIMEOUTS = 8
"""The number of samples of a call that may exceed the full limit; the call's later samples get a tenth of it."""


def _never() -> bool:
    return False


@dataclass(frozen=True)
class _Fault:
    kind: Literal["raised", "timed_out", "ungraded"]
    failure: Failure


@dataclass
class _Task:
    """A share of a call's items for one worker. `one_by_one`: one reply per item, else one reply for all.

    `limit`: the time limit of the current reply in seconds.
    """

    action: _Action
    one_by_one: bool
    indices: deque[int]
    limit: float = math.inf


class RewardPool:
    """Runs a reward function in processes that are killed and replaced when they exceed the time limit.

    `spec` is `path/to/file.py:function` (see `cepo.rewards.functions`) and `kwargs` are its keywords. The scores of
    several functions are added with `weights` (see `cepo.rewards.combined`). `answer_function` names a function that
    finds the final answer in a response (see `load_answer_function`); its result is each sample's `extracted_answer`.

    Sequential functions are called for one sample at a time, with a timeout of `timeout_seconds`. A batch function is
    called with up to 32 samples, with the same timeout for the whole call. If such a call raises, returns an invalid
    score, crashes or times out, its samples are retried one by one, each within `timeout_seconds`, so that only the
    samples at fault fail. If it was merely slow, the batches of later calls are halved. A wrong number of scores cannot
    be assigned to samples and is a `RewardError`. A batch function must score samples independently, because it sees
    only a part of the batch, and some samples twice after a fault.

    After 8 samples of a call have timed out, the call's other samples get a tenth of the limit each, so that a hostile
    batch cannot delay the run. Samples that exceed this reduced limit count as ungraded, not as timed out. Verdicts (a
    score, raised, timed out) therefore depend on the sample alone. A failed or ungraded sample gets 0 in every field,
    is counted, and is logged as a warning. Calls from several threads are served one after the other.

    The constructor waits until the function is loaded. Raises `ConfigError` for an invalid setting, `RewardError` if
    the function cannot be loaded, `EngineError` if a process cannot be started.
    """

    def __init__(
        self,
        spec: str,
        kwargs: Mapping[str, Any],
        *,
        weights: Sequence[float] | None = None,
        answer_function: str | None = None,
        num_workers: int,
        timeout_seconds: float,
    ) -> None:
        if num_workers < 1:
            raise ConfigError(f"num_workers = {num_workers}: give at least 1 reward worker.")
        if not (timeout_seconds > 0 and math.isfinite(timeout_seconds)):
            raise ConfigError(f"timeout_seconds = {timeout_seconds}: give a positive number of seconds.")
        function_names(spec)
        self.spec = spec
        self.reward_name = "unknown"
        self.reward_type = "batch"
        self._setup = {"spec": spec, "kwargs": dict(kwargs), "weights": weights, "answer_function": answer_function}
        self._answer_function = answer_function
        self._timeout_seconds = timeout_seconds
        self._samples_together = _SAMPLES_TOGETHER
        self._fields: dict[str, None] = {"overall": None}
        self._lock = threading.Lock()
        self._owner = os.getpid()
        self._is_closed = False
        self._has_scored = False
        self._overdue_batches: list[list[int]] = []
        self._num_overdue = 0
        self._workers: list[WorkerProcess] = []
        self._busy: dict[WorkerProcess, _Task] = {}
        self._finalizer = weakref.finalize(self, _end_workers, self._workers, self._owner)
        try:
            self._workers += [self._start_worker() for _ in range(num_workers)]
            while not all(worker.ready for worker in self._workers):
                self._handle_events(deque(), [])
        except BaseException:
            self.close()
            raise

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

    def score(self, inputs: Sequence[Mapping[str, Any]]) -> RewardOutcome:
        """Scores the samples. Raises `RewardError` if one cannot be pickled for another process."""
        return self._outcome(self._verdicts(inputs))

    def stream(self) -> RewardStream:
        """Returns a stream for a batch whose parts arrive at different times."""
        return RewardStream(self._verdicts, self._outcome)

    def _verdicts(self, inputs: Sequence[Mapping[str, Any]], is_given_up: Callable[[], bool] = _never) -> list[Any]:
        samples = [dict(reward_input) for reward_input in inputs]
        check_picklable(samples)
        return self._run("score", samples, one_by_one=self.reward_type == "sequential", is_given_up=is_given_up)

    def _outcome(self, verdicts: list[Any]) -> RewardOutcome:
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
            num_ungraded=kinds["ungraded"],
            first_failure=faults[min(faults)].failure if faults else None,
        )

    def trial(self, sample: Mapping[str, Any]) -> Failure | None:
        """Returns why the function fails for `sample`, or None if it returns a score. Logs nothing."""
        (verdict,) = self._verdicts([sample])
        return verdict.failure if isinstance(verdict, _Fault) else None

    def require_a_score(self, outcome: RewardOutcome) -> None:
        """Raises `RewardError` if no sample has a score, neither in `outcome` nor in any outcome passed here before."""
        failed = outcome.num_raised + outcome.num_timed_out + outcome.num_ungraded
        if self._has_scored or failed < len(outcome.scores):
            self._has_scored = self._has_scored or bool(outcome.scores)
            return
        if outcome.first_failure is None:  # there were no samples
            return
        raise RewardError(
            f"{self.spec} failed for each of the first {failed} responses ({outcome.num_raised} raised or returned no score, "
            f"{outcome.num_timed_out} took more than worker.reward.timeout_seconds={self._timeout_seconds:g}, "
            f"{outcome.num_ungraded} were not graded after those): nothing can be learnt from it. The first failure:\n"
            f"{outcome.first_failure.details}"
        )

    def extracted_answers(self, responses: Sequence[str]) -> list[str | None]:
        r"""Returns each response's final answer or None, found by `answer_function`, or else by `extract_answer`.

        Each call of `answer_function` is limited by `timeout_seconds`. The result is None if it hangs or raises.
        """
        if self._answer_function is None:
            from cepo.rewards.answers import extract_answer  # imports sympy, not needed otherwise

            return [extract_answer(response) for response in responses]
        return self._each("extract", responses, f"{self._answer_function} failed for %d of %d responses: no answer")

    def same_statements(self, pairs: Sequence[tuple[str, str]]) -> list[bool]:
        """Applies `cepo.rewards.answers.states_the_same` to each pair (prediction, ground truth), with the time limit.

        A comparison that hangs or raises counts as False and is logged as a warning.
        """
        return [bool(same) for same in self._each("match", pairs, "%d of %d comparisons failed and count as unequal")]

    def value_keys(self, answers: Sequence[str]) -> list[str]:
        """Applies `cepo.rewards.answers.value_key` to each answer, within the limit; keeps the answer on failure."""
        keys = self._each("value", answers, "%d of %d answers have no value and are compared by spelling")
        return [answer if key is None else key for key, answer in zip(keys, answers, strict=True)]

    def _each(self, action: _Action, items: Sequence[Any], consequence: str) -> list[Any]:
        """Returns the worker's result for each item, None for failed items."""
        verdicts = self._run(action, list(items), one_by_one=True)
        faults = {index: verdict for index, verdict in enumerate(verdicts) if isinstance(verdict, _Fault)}
        _warn_of_faults(faults, len(items), consequence)
        return [None if index in faults else verdict for index, verdict in enumerate(verdicts)]

    def close(self) -> None:
        """Ends the worker processes. A closed pool cannot be used again; closing twice is allowed."""
        self._is_closed = True
        self._finalizer()

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(
        self,
        action: _Action,
        items: list[Any],
        *,
        one_by_one: bool,
        is_given_up: Callable[[], bool] = _never,
    ) -> list[Any]:
        """Returns for each item the worker's result, or its `_Fault`."""
        if self._is_closed or os.getpid() != self._owner:
            state = "is closed" if self._is_closed else f"belongs to process {self._owner}, this is {os.getpid()}"
            raise EngineError(f"the reward pool of {self.spec!r} {state}. Create a pool where it is used.")
        verdicts: list[Any] = [None] * len(items)
        with self._lock:
            self._num_overdue = 0
            queue = deque(self._tasks(action, len(items), one_by_one))
            try:
                while queue or self._busy:
                    if is_given_up():
                        raise EngineError("the caller no longer wants these rewards")
                    self._assign(queue, items)
                    self._handle_events(queue, verdicts)
            except BaseException:
                # Late replies would be mistaken for replies to the next call.
                for worker in list(self._busy):
                    self._busy.pop(worker)
                    worker.kill()
                raise
            self._shrink_batches(verdicts)
        return verdicts

    def _shrink_batches(self, verdicts: list[Any]) -> None:
        """Halves the batches of later calls if one timed out although none of its samples fails alone."""
        batches, self._overdue_batches = self._overdue_batches, []
        if any(not any(isinstance(verdicts[index], _Fault) for index in batch) for batch in batches):
            self._samples_together = max(1, self._samples_together // 2)
            logger.warning(
                "A batch of rewards took more than %g s although no single sample did: from now on at most %d together.",
                self._timeout_seconds,
                self._samples_together,
            )

    def _tasks(self, action: _Action, num_items: int, one_by_one: bool) -> list[_Task]:
        largest = _SAMPLES_ONE_BY_ONE if one_by_one else self._samples_together
        size = max(1, min(largest, math.ceil(num_items / len(self._workers))))
        return _split(action, one_by_one, range(num_items), size)

    def _assign(self, queue: deque[_Task], items: list[Any]) -> None:
        for position, worker in enumerate(self._workers):
            if worker not in self._busy and not worker.is_alive and worker.ready:
                worker = self._replace_idle(position)
            if not queue or worker in self._busy or not worker.ready:
                continue
            task = queue[0]
            shares = [items[index] for index in task.indices]
            if worker.send((task.action, task.one_by_one, task.indices[0], shares)):
                self._busy[worker] = queue.popleft()
                self._start_clock(worker, task)
            else:
                self._replace_idle(position)

    def _handle_events(self, queue: deque[_Task], verdicts: list[Any]) -> None:
        waiting = [worker for worker in self._workers if worker in self._busy or not worker.ready]
        if not waiting:
            return
        patience = max(0.0, min(worker.seconds_left for worker in waiting))
        readable = wait([worker.connection for worker in waiting], min(patience, _SECONDS_BETWEEN_LOOKS))
        for worker in waiting:
            message: tuple[str, Any] | None = None
            has_ended, overdue = False, worker.is_overdue()
            if worker.connection in readable:
                try:
                    message = worker.receive()
                except EOFError:
                    has_ended = True
            if message is not None:
                self._handle_message(worker, *message, queue, verdicts)
            elif has_ended or overdue:
                self._handle_end(worker, queue, verdicts, overdue=not has_ended)

    def _handle_message(
        self, worker: WorkerProcess, status: str, value: Any, queue: deque[_Task], verdicts: list[Any]
    ) -> None:
        if not worker.ready:
            if status == "failed":
                raise RewardError(value)
            worker.ready = True
            self.reward_name, self.reward_type = value
            return
        task = self._busy[worker]
        answered = [task.indices.popleft() for _ in range(1 if task.one_by_one else len(task.indices))]
        if status == "done":
            for index, verdict in zip(answered, value, strict=True):
                verdicts[index] = verdict
        elif status == "refused":
            raise RewardError(value)
        elif len(answered) == 1:
            verdicts[answered[0]] = _Fault("raised", value)
        else:
            queue.extendleft(_split(task.action, True, answered, _SAMPLES_RETRIED))
        self._start_clock(worker, task)
        if not task.indices:
            del self._busy[worker]

    def _handle_end(self, worker: WorkerProcess, queue: deque[_Task], verdicts: list[Any], *, overdue: bool) -> None:
        """Replaces a process that has ended or is overdue. Its current item fails; the others are retried."""
        ending = worker.kill()
        if not worker.ready:
            reason = f"took more than {START_SECONDS:g} s" if overdue else f"did not succeed: {ending}"
            raise EngineError(f"starting a reward worker for {self.spec!r} {reason}. Its messages are on stderr.")
        task = self._busy.pop(worker)
        if task.one_by_one or len(task.indices) == 1:
            index = task.indices.popleft()
            reason = f"no score within {task.limit:g} s" if overdue else ending
            kind = "raised" if not overdue else "timed_out" if task.limit == self._timeout_seconds else "ungraded"
            self._note_overdue(overdue)
            verdicts[index] = _Fault(kind, Failure(reason=reason, details=reason))
        elif overdue:
            self._overdue_batches.append(list(task.indices))
        queue.extendleft(_split(task.action, True, task.indices, _SAMPLES_RETRIED))
        self._workers[self._workers.index(worker)] = self._start_worker()

    def _start_clock(self, worker: WorkerProcess, task: _Task) -> None:
        task.limit = self._timeout_seconds / (1 if self._num_overdue < _FULL_TIMEOUTS else 10)
        worker.allow(task.limit)

    def _note_overdue(self, overdue: bool) -> None:
        self._num_overdue += overdue
        if overdue and self._num_overdue == _FULL_TIMEOUTS:
            message = "%d samples of a batch took more than %g s; the rest of the batch gets %g s per sample."
            logger.warning(message, _FULL_TIMEOUTS, self._timeout_seconds, self._timeout_seconds / 10)

    def _replace_idle(self, position: int) -> WorkerProcess:
        ending = self._workers[position].kill()
        logger.warning("%s while it was idle; a new one replaces it.", ending)
        self._workers[position] = self._start_worker()
        return self._workers[position]

    def _start_worker(self) -> WorkerProcess:
        return WorkerProcess(self._setup, timeout_seconds=self._timeout_seconds)


def _split(action: _Action, one_by_one: bool, indices: Sequence[int] | deque[int], size: int) -> list[_Task]:
    ordered = list(indices)
    return [_Task(action, one_by_one, deque(ordered[start : start + size])) for start in range(0, len(ordered), size)]


def _warn_of_faults(faults: Mapping[int, _Fault], num_samples: int, consequence: str) -> None:
    if not faults:
        return
    examples = "; ".join(f"sample {index}: {fault.failure.reason}" for index, fault in list(faults.items())[:3])
    logger.warning(f"{consequence}. %s", len(faults), num_samples, examples)
    ungraded = sum(fault.kind == "ungraded" for fault in faults.values())
    if ungraded:
        logger.warning(
            "%d of %d samples were not graded: after %d timeouts in the batch the limit is one tenth, and they took "
            "longer (reward/num_ungraded)",
            ungraded,
            num_samples,
            _FULL_TIMEOUTS,
        )


def _end_workers(workers: list[WorkerProcess], owner: int) -> None:
    # A forked copy of the pool must leave the original's processes alone.
    if os.getpid() == owner:
        for worker in workers:
            worker.hang_up()
        for worker in workers:
            worker.close()
        workers.clear()
