"""Runs reward functions in worker processes, so that no answer can end or block a run or affect another sample."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing import Pipe
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import cepo
from cepo.errors import EngineError, RewardError
from cepo.files.trees import Fields
from cepo.rewards.contract import RewardFailure, RewardOutcome, RewardScore

if TYPE_CHECKING:
    from cepo.config.worker_schema import RewardConfig

logger = logging.getLogger(__name__)

_SAMPLES_TOGETHER = 32
_LONGEST_LOOK_SECONDS = 1.0
_LATE_BEFORE_REFUSAL = 3
"""If so many calls for one sample are late, and none has ended yet, a function is refused."""
_ROUNDING = 1e-6
"""By how much a fraction may leave 0..1."""

_Action = Literal["score", "extract", "match", "value"]


class WorkerProcess:
    """Runs `python -m cepo.rewards.worker_process` and talks to it through a socket, which no output of a reward can disturb."""

    def __init__(self, setup: Mapping[str, object]) -> None:
        self._connection, workers_end = Pipe()
        package_parent = Path(cepo.__file__).resolve().parent.parent
        python_path = [str(package_parent)]
        if os.environ.get("PYTHONPATH"):
            python_path.append(os.environ["PYTHONPATH"])
        # One thread: numeric libraries must not take the trainer's cores.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(python_path), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            # -P: a file in the working directory must not shadow a module of the worker.
            [sys.executable, "-P", "-m", "cepo.rewards.worker_process", str(workers_end.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=2,
            pass_fds=[workers_end.fileno()],
            env=environment,
            # A process group of its own, so that killing it also ends processes that the reward function started.
            start_new_session=True,
        )
        workers_end.close()
        # An empty entry is the working directory, which the worker may leave.
        import_path = [entry or os.getcwd() for entry in sys.path]
        with contextlib.suppress(OSError):  # it has ended; the caller learns this when it waits for the functions
            self._connection.send({**setup, "sys_path": import_path})

    def asked(self, action: _Action, first: int, items: Sequence[object], seconds: float) -> tuple[str, Any]:
        """Sends items, numbered from `first` on, and returns the reply.

        Raises `RewardError` if pickle cannot copy an item, `TimeoutError` if the process does not take them or is late, and
        `EOFError` or `OSError` if it has ended.
        """
        try:
            message = pickle.dumps((action, first, items), protocol=pickle.HIGHEST_PROTOCOL)
        except Exception as error:  # whatever the object's own reduction raises
            raise RewardError(
                f"a sample from number {first} on cannot be sent to a reward worker: {error}. Reward inputs hold data that "
                "pickle can copy."
            ) from error
        with self._ended_after(seconds):
            self._connection.send_bytes(message)
        return self.received(seconds)

    def received(self, seconds: float) -> tuple[str, Any]:
        """Returns the next message. A pause of this process and the worker's costs 1 s of the time at most.

        Raises `TimeoutError` if it is late or stops within its message, `EOFError` or `OSError` if the process has ended.
        """
        while not self._connection.poll(min(seconds, _LONGEST_LOOK_SECONDS)):
            seconds -= _LONGEST_LOOK_SECONDS
            if seconds <= 0:
                raise TimeoutError
        with self._ended_after(seconds):
            return self._connection.recv()

    @contextlib.contextmanager
    def _ended_after(self, seconds: float) -> Generator[None]:
        """Kills a process that stops within a message, which would block us for ever; `TimeoutError` is raised then."""
        is_late = threading.Event()

        def end() -> None:
            is_late.set()
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)

        timer = threading.Timer(max(seconds, 0.1), end)
        timer.start()
        try:
            yield
        except (EOFError, OSError) as error:
            if is_late.is_set():
                raise TimeoutError from error
            raise
        finally:
            timer.cancel()

    def kill(self) -> str:
        """Kills the process and those of its group; describes how it ended."""
        # After a crash, a short wait yields its exit code instead of our signal.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(0.05)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        code = self.process.wait()
        ending = f"signal {-code}" if code < 0 else f"code {code}"
        return f"the worker process ended with {ending}"


class RewardStream:
    """Scores the parts of a batch as they arrive; leaving its context drops the work that has not begun."""

    def __init__(self, pool: RewardPool) -> None:
        self._pool = pool
        self._parts: dict[int, list[Future[list[Any]]]] = {}

    def __contains__(self, position: int) -> bool:
        return position in self._parts

    def add(self, position: int, samples: Sequence[Fields]) -> None:
        """Queues the part of the batch at `position` and returns at once."""
        assert position not in self._parts, f"part {position} was added twice"
        self._parts[position] = self._pool.submit("score", [dict(sample) for sample in samples])

    def outcome(self) -> RewardOutcome:
        """Waits for all parts and returns their scores, those of one call for the whole batch, by position.

        Raises `RewardError` if a sample cannot be pickled, or a batch function returned a wrong number of scores.
        """
        verdicts: list[Any] = []
        for position in sorted(self._parts):
            for future in self._parts[position]:
                verdicts += future.result()
        return self._pool.outcome(verdicts)

    def __enter__(self) -> RewardStream:
        return self

    def __exit__(self, *_: object) -> None:
        for futures in self._parts.values():
            for future in futures:
                future.cancel()


class RewardPool:
    """Runs the reward of `worker.reward` in processes that are killed and replaced when they exceed the time limit.

    Every call has at most `timeout_seconds`. Sequential functions are called for one sample at a time, batch functions
    for up to 32. If a call for several samples raises, returns an invalid score, crashes or times out, its samples are
    tried again one by one, so that only those at fault fail: they get 0 in every field, are counted and logged. A batch
    function must score samples independently, because it sees a part of the batch, and some samples twice.

    The constructor waits until the function is loaded. Raises `RewardError` if it cannot be loaded, `EngineError` if a
    process cannot be started.
    """

    def __init__(self, config: RewardConfig) -> None:
        self.spec = config.reward_function
        self.reward_type = "batch"
        self.needs_images = False
        self._setup = {
            "spec": self.spec,
            "kwargs": dict(config.reward_function_kwargs),
            "weights": config.reward_weights,
            "answer_function": config.answer_function,
            "start_seconds": config.start_timeout_seconds,
            "timeout_seconds": config.timeout_seconds,
        }
        self._answer_function = config.answer_function
        self._timeout_seconds = config.timeout_seconds
        self._start_seconds = config.start_timeout_seconds
        self._fields: dict[str, None] = {"overall": None}  # of all scores so far, in the order in which they came
        self._is_closed = False
        self._has_scored = False
        self._has_answered = False  # by a score or an error, be it for a trial
        self._num_late_alone = 0  # late calls for one sample
        self._reported: set[str] = set()  # what a warning has named, once for all calls
        self._report_lock = threading.Lock()
        self._num_workers = config.num_cpus
        self._workers: set[WorkerProcess] = set()
        self._idle: list[WorkerProcess] = []
        # A thread waits for each worker.
        self._threads = ThreadPoolExecutor(self._num_workers, thread_name_prefix="cepo-rewards")
        try:
            starting = [self._threads.submit(self._started) for _ in range(self._num_workers)]
            self._idle += [future.result() for future in starting]
        except BaseException:
            self.close()
            raise

    def score(self, inputs: Sequence[Fields]) -> RewardOutcome:
        """Scores the samples; raises as `RewardStream.outcome` does."""
        with self.stream() as stream:
            stream.add(0, inputs)
            return stream.outcome()

    def stream(self) -> RewardStream:
        """Returns a stream for a batch whose parts arrive at different times."""
        return RewardStream(self)

    def outcome(self, verdicts: Sequence[Any]) -> RewardOutcome:
        """Returns the outcome of a batch from each sample's score or failure."""
        failures = _warned(verdicts, f"{self.spec} failed for %d of %d samples, which score 0")
        for verdict in verdicts:
            if not isinstance(verdict, RewardFailure):
                self._fields.update(dict.fromkeys(verdict))
        scores: list[RewardScore] = []
        for verdict in verdicts:
            is_failure = isinstance(verdict, RewardFailure)
            scores.append(dict.fromkeys(self._fields, 0.0) if is_failure else verdict)
        num_timed_out = sum(failure.timed_out for failure in failures)
        if num_timed_out:
            self._report_late("score")
        return RewardOutcome(
            scores=scores,
            num_raised=len(failures) - num_timed_out,
            num_timed_out=num_timed_out,
            first_failure=failures[0] if failures else None,
        )

    def trial(self, sample: Fields) -> RewardFailure | None:
        """Returns why the function fails for `sample`, or None if it returns a score. Logs nothing."""
        (verdict,) = self._verdicts("score", [dict(sample)])
        return verdict if isinstance(verdict, RewardFailure) else None

    def require_a_score(self, outcome: RewardOutcome) -> None:
        """Raises `RewardError` if no sample has a score, neither in `outcome` nor in any outcome passed here before."""
        failed = outcome.num_raised + outcome.num_timed_out
        self._has_scored = self._has_scored or failed < len(outcome.scores)
        if self._has_scored or outcome.first_failure is None:
            return
        remedy = " Raise the limit if that is what a call takes." if outcome.num_timed_out else ""
        raise RewardError(
            f"{self.spec} failed for each of the first {failed} responses ({outcome.num_raised} raised or returned no score, "
            f"{outcome.num_timed_out} took more than worker.reward.timeout_seconds={self._timeout_seconds:g}): nothing "
            f"can be learnt from it.{remedy} The first failure:\n{outcome.first_failure.details}"
        )

    def report_percents(self, key: str, scores: Sequence[RewardScore], threshold: float) -> None:
        """Warns once of values of `key` outside 0..1 that are compared with a threshold within, as of 85 for 85 %.

        Nearly every value in percents exceeds such a threshold, and its response counts as right.
        """
        if not 0 <= threshold <= 1:
            return
        percents = [score[key] for score in scores if not -_ROUNDING <= score[key] <= 1 + _ROUNDING]
        if percents and self._is_first_report_of(key):
            logger.warning(
                f"{self.spec} returned {key}={percents[0]:g}, which is no fraction from 0 to 1; a response counts as right "
                f"from algorithm.correct_threshold={threshold:g} on. Return a fraction, or set "
                "algorithm.correct_threshold to a value of this scale."
            )

    def _report_late(self, action: _Action) -> None:
        """Warns once of a function that took longer than the limit, and says how to set it."""
        names: dict[_Action, str] = {"score": self.spec, "extract": self._answer_function or "marked_answer"}
        name = names.get(action, "the comparison of answers")
        if self._is_first_report_of(name):
            logger.warning(
                f"{name} took longer than worker.reward.timeout_seconds={self._timeout_seconds:g}. Raise the limit if that is "
                "what a call takes. Each late call costs its time: one for several samples is repeated sample by sample, and "
                "a sample that is late alone scores 0 (reward/num_timed_out). This warning appears once."
            )

    def _refuse_what_always_hangs(self) -> None:
        """Raises `RewardError` for a function that was late for each single sample so far.

        Else a first step would wait for each of its responses before `require_a_score` refuses the function.
        """
        with self._report_lock:
            self._num_late_alone += 1
        if not self._has_answered and self._num_late_alone >= _LATE_BEFORE_REFUSAL:
            raise RewardError(
                f"{self.spec} returned no score within worker.reward.timeout_seconds={self._timeout_seconds:g} for any of the "
                f"first {self._num_late_alone} samples, each alone: nothing can be learnt from it. Raise the limit if that is "
                "what a call takes, otherwise look for a loop that never ends, or a server that does not answer."
            )

    def _is_first_report_of(self, subject: str) -> bool:
        with self._report_lock:  # several calls may be late at the same time
            is_first = subject not in self._reported
            self._reported.add(subject)
        return is_first

    def extracted_answers(self, responses: Sequence[str]) -> list[str | None]:
        """Returns each response's final answer, found by `answer_function` or `marked_answer`; None if that failed."""
        finder = self._answer_function or "marked_answer"
        return self._results("extract", responses, f"{finder} failed for %d of %d responses: no answer")

    def same_statements(self, pairs: Sequence[tuple[str, str]]) -> list[bool]:
        """Applies `cepo.answers.states_the_same` to each pair (prediction, ground truth); False if that failed."""
        results = self._results("match", pairs, "%d of %d comparisons failed and count as unequal")
        return [bool(result) for result in results]

    def value_keys(self, answers: Sequence[str]) -> list[str]:
        """Applies `cepo.answers.value_key` to each answer; keeps the answer if that failed."""
        keys = self._results("value", answers, "%d of %d answers have no value and are compared by spelling")
        return [answer if key is None else key for key, answer in zip(keys, answers, strict=True)]

    def _results(self, action: _Action, items: Sequence[object], consequence: str) -> list[Any]:
        """Returns the result for each item; None for one that hung or raised, which a warning counts."""
        verdicts = self._verdicts(action, items)
        _warned(verdicts, consequence)
        return [None if isinstance(verdict, RewardFailure) else verdict for verdict in verdicts]

    def _verdicts(self, action: _Action, items: Sequence[object]) -> list[Any]:
        verdicts: list[Any] = []
        for future in self.submit(action, items):
            verdicts += future.result()
        return verdicts

    def close(self) -> None:
        """Ends the worker processes. A closed pool cannot be used again; closing twice is allowed."""
        self._is_closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in tuple(self._workers):
            worker.kill()

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(self, action: _Action, items: Sequence[object]) -> list[Future[list[Any]]]:
        """Queues an action on items; the futures have the results in order, each a value or a `RewardFailure`."""
        if self._is_closed:
            raise EngineError(f"the reward pool of {self.spec!r} is closed. Create a pool where it is used.")
        is_one_by_one = action == "score" and self.reward_type == "sequential"
        largest_size = 1 if is_one_by_one else _SAMPLES_TOGETHER
        size_for_each_worker = math.ceil(len(items) / self._num_workers)
        size = max(1, min(largest_size, size_for_each_worker))
        futures: list[Future[list[Any]]] = []
        for start in range(0, len(items), size):
            futures.append(self._threads.submit(self._serve, action, start, items[start : start + size]))
        return futures

    def _serve(self, action: _Action, first: int, items: Sequence[object]) -> list[Any]:
        """Lets an idle worker do an action on items; if that fails for several, for one after the other."""
        worker = self._idle.pop()
        status = ""
        value: Any
        try:
            if worker.process.poll() is not None:
                self._workers.discard(worker)
                worker = self._started()
            status, value = worker.asked(action, first, items, self._timeout_seconds)
        except (EOFError, OSError) as error:
            ending = worker.kill()
            is_late = isinstance(error, TimeoutError)
            reason = f"no score within {self._timeout_seconds:g} s" if is_late else ending
            status = "raised"
            value = RewardFailure(reason=reason, details=reason, timed_out=is_late)
        finally:
            self._idle.append(worker)
        if status == "done":
            self._has_answered = self._has_answered or action == "score"
            return value
        if status == "refused":
            raise RewardError(value)
        if len(items) == 1:
            if action == "score":
                self._has_answered = self._has_answered or not value.timed_out
                if value.timed_out:
                    self._refuse_what_always_hangs()
            return [value]
        if value.timed_out:
            self._report_late(action)
        verdicts: list[Any] = []
        for number, item in enumerate(items, start=first):
            verdicts += self._serve(action, number, [item])
        return verdicts

    def _started(self) -> WorkerProcess:
        """Starts a worker and waits until it has loaded the functions."""
        worker = WorkerProcess(self._setup)
        self._workers.add(worker)
        try:
            if self._is_closed:
                raise EOFError
            status, value = worker.received(self._start_seconds)
        except (EOFError, OSError) as error:
            ending = worker.kill()
            is_late = isinstance(error, TimeoutError)
            reason = f"did not succeed: {ending}. Its messages are on stderr."
            if is_late:
                reason = (
                    f"took more than worker.reward.start_timeout_seconds={self._start_seconds:g}. Raise the limit if that is "
                    "what loading its file takes."
                )
            raise EngineError(f"starting a reward worker for {self.spec!r} {reason}") from error
        if status == "failed":
            raise RewardError(value)
        self.reward_type, self.needs_images = value
        return worker


def _warned(verdicts: Sequence[Any], consequence: str) -> list[RewardFailure]:
    """Returns the failures among the verdicts and logs their number, with three examples."""
    failures: list[RewardFailure] = []
    descriptions: list[str] = []
    for index, verdict in enumerate(verdicts):
        if isinstance(verdict, RewardFailure):
            failures.append(verdict)
            descriptions.append(f"sample {index}: {verdict.reason}")
    if failures:
        logger.warning(f"{consequence}. %s", len(failures), len(verdicts), "; ".join(descriptions[:3]))
    return failures
