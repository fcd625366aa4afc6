"""The pool with real processes: rewards that hang, raise, crash or lie cost their own sample and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import cepo
from cepo.config.worker_schema import RewardConfig
from cepo.errors import EngineError, RewardError
from cepo.rewards.contract import ContractError, load_answer_function
from cepo.rewards.pool import RewardPool

MATH = "cepo/rewards/math.py:compute_score"
pytestmark = pytest.mark.heavy  # starts processes and waits for time limits

ROOT = str(Path(cepo.__file__).resolve().parent.parent)
MISBEHAVING = Path(__file__).with_name("misbehaving.py")
BATCH = f"{MISBEHAVING}:batch"
RAISING_LINE = MISBEHAVING.read_text().splitlines().index('        raise KeyError("no such thing")') + 1


def _pool(spec: str = BATCH, *, workers: int = 1, limit: float = 1.0, **more: Any) -> RewardPool:
    return RewardPool(RewardConfig(reward_function=spec, num_cpus=workers, timeout_seconds=limit, **more))


@pytest.fixture(scope="module")
def math_pool() -> Iterator[RewardPool]:
    with _pool(MATH, workers=2) as pool:
        yield pool


@pytest.fixture(scope="module")
def one_worker() -> Iterator[RewardPool]:
    with _pool(limit=5.0) as pool:
        yield pool


def _samples(*responses: str, **columns: Any) -> list[dict[str, Any]]:
    return [
        {"response": response, "response_length": len(response), "ground_truth": "5 \\sqrt { 3 }", **columns}
        for response in responses
    ]


def _process_exists(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _wait_until_gone(*pids: int) -> None:
    """Fails after ten minutes, which other work on the machine does not explain."""
    start = time.monotonic()
    while any(map(_process_exists, pids)):
        assert time.monotonic() - start < 600, f"{pids} live on"
        time.sleep(0.05)


def _program(text: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": ROOT}
    command = [sys.executable, "-c", textwrap.dedent(text)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True)


def test_the_grader_runs_in_the_pool(math_pool: RewardPool) -> None:
    pairs = [("60°", "60"), ("9^{9^{9^9}}", "60"), ("61", "60"), (r"\sqrt{75}", r"5 \sqrt { 3 }")]
    assert math_pool.same_statements(pairs) == [True, False, False, True]
    assert math_pool.same_statements([]) == []
    assert math_pool.extracted_answers([r"\boxed{5}", "5"]) == ["5", None]


@pytest.mark.parametrize("kind", ["batch", "sequential"])
def test_each_fault_costs_its_own_sample_only(tmp_path: Path, kind: str) -> None:
    faults = ["raise", "crash", "hang", "exit", "no overall", "not finite", "sleep", "hang in C"]
    responses: list[str] = []
    for fault in faults:
        responses += ["good", fault, "better"]
    (tmp_path / "own.py").write_text(f"{MISBEHAVING.read_text()}\nREWARD_TYPE = {kind!r}\n")
    with _pool(f"{tmp_path}/own.py:{'batch' if kind == 'batch' else 'one'}", workers=2) as pool:
        outcome = pool.score(_samples(*responses))
        again = pool.score(_samples("good"))
    zero = {"overall": 0.0, "bonus": 0.0}
    good = {"overall": 4.0, "bonus": 1.0}
    better = {"overall": 6.0, "bonus": 1.0}
    assert outcome.scores == [good, zero, better] * 8
    assert outcome.num_raised == 5
    assert outcome.num_timed_out == 3
    assert again.scores == [good]


@pytest.mark.parametrize("function", ["short", "one_for_all"])
def test_another_number_of_scores_than_samples_is_refused(tmp_path: Path, function: str) -> None:
    calls = tmp_path / "calls"
    samples = _samples("good", "too few", "better", calls=str(calls))
    with _pool(f"{MISBEHAVING}:{function}", limit=5.0) as pool:
        with pytest.raises(RewardError) as caught:
            pool.score(samples)
        assert calls.read_text() == "3\n"
        assert pool.score(_samples("good")).scores == [{"overall": 4.0, "bonus": 1.0}]
    expected = {"short": "returned 2 scores for 3 samples", "one_for_all": "returned a dict for 3 samples"}
    assert expected[function] in str(caught.value)
    assert "REWARD_TYPE = 'sequential'" in str(caught.value)


def test_a_function_that_never_scored_is_refused_with_its_lines() -> None:
    with _pool(workers=2, limit=5.0) as pool:
        failed = pool.score(_samples("raise", "raise", "raise"))
        assert failed.scores == [{"overall": 0.0}] * 3
        assert failed.num_raised == 3
        with pytest.raises(RewardError) as caught:
            pool.require_a_score(failed)
        pool.require_a_score(pool.score([]))
        pool.require_a_score(pool.score(_samples("raise", "good")))
        pool.require_a_score(failed)  # once there was a score, a batch without one costs its samples alone
    words = str(caught.value)
    assert "failed for each of the first 3 responses (3 raised or returned no score, 0 took more" in words
    assert f'File "{MISBEHAVING}", line {RAISING_LINE}, in one' in words
    assert 'raise KeyError("no such thing")' in words
    assert words.endswith("KeyError: 'no such thing'")
    assert "loader.py" not in words, "the package's own lines are none of the user's"


def test_a_function_that_always_hangs_is_refused_at_once() -> None:
    """It waits for a trial, for a batch and for two samples of it, not for each of 32 samples."""
    with _pool(limit=0.5) as pool:
        assert pool.trial(_samples("hang")[0]) is not None
        with pytest.raises(RewardError, match=r"timeout_seconds=0\.5 for any of the first 3 samples, each alone"):
            pool.score(_samples(*["hang"] * 32))
        outcome = pool.score(_samples("good", "hang", "hang"))
        assert outcome.num_timed_out == 2, "once there was a score, a hang costs its own sample"


def test_a_worker_that_stops_within_its_reply_costs_the_limit() -> None:
    """A reply has begun, so that the connection has something to read, and never ends."""
    with _pool() as pool:
        outcome = pool.score(_samples("good", "part of a message"))
    assert [score["overall"] for score in outcome.scores] == [4.0, 0.0]
    assert outcome.num_raised == 0
    assert outcome.num_timed_out == 1
    assert outcome.first_failure is not None
    assert "no score within 1 s" in outcome.first_failure.reason


def test_a_stopped_worker_that_takes_no_samples_costs_the_limit(caplog: pytest.LogCaptureFixture) -> None:
    """Ten megabytes, as samples with images have, are more than the connection holds: to send them waits for the worker."""
    with _pool() as pool:
        pool.score(_samples("good"))
        (worker,) = pool._workers
        os.kill(worker.process.pid, signal.SIGSTOP)
        begin = time.monotonic()
        outcome = pool.score(_samples("good", "better", image=b"x" * 5_000_000))
        assert time.monotonic() - begin < 20
    assert [score["overall"] for score in outcome.scores] == [4.0, 6.0]
    assert f"{BATCH} took longer than worker.reward.timeout_seconds=1" in caplog.text


def test_a_trial_tells_what_raises_from_what_returns_no_score(
    one_worker: RewardPool, caplog: pytest.LogCaptureFixture
) -> None:
    good, raising, without = map(one_worker.trial, _samples("good", "raise", "no overall"))
    assert good is None
    assert raising is not None
    assert raising.breaks_contract is False
    assert raising.reason[:8] == "KeyError"
    assert without is not None
    assert without.breaks_contract
    assert "returned for sample 0 a dict without 'overall'" in without.details
    assert caplog.text == ""
    one_worker.score(_samples("good", "raise"))
    one_worker.score(_samples("crash"))
    assert f"sample 1: KeyError: 'no such thing' (misbehaving.py, line {RAISING_LINE})" in caplog.text
    assert "sample 0: the worker process ended with code 7" in caplog.text


def test_a_late_function_and_its_limit_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    """Of two batches the first is late as a whole and by one sample, the second by one sample alone."""
    with _pool(workers=2) as pool:
        pool.score(_samples("good", "hang", "better", "good"))
        pool.score(_samples("hang"))
    assert caplog.text.count("took longer than worker.reward.timeout_seconds=1. Raise the limit") == 1
    assert caplog.text.count("failed for 1 of") == 2


@pytest.mark.parametrize(
    ("values", "threshold", "value_reported"),
    [
        ([1.0, 0.0, 1.0000001], 0.5, None),
        ([0.0, 85.0, 100.0], 0.5, "accuracy=85,"),
        ([1.0, -1.0], 0.5, "accuracy=-1,"),
        ([0.0, 85.0], 50.0, None),
    ],
)
def test_percents_against_a_fraction_are_reported_once(
    one_worker: RewardPool,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    values: list[float],
    threshold: float,
    value_reported: str | None,
) -> None:
    monkeypatch.setattr(one_worker, "_reported", set())
    scores = [{"overall": 0.0, "accuracy": value} for value in values]
    for _ in range(2):
        one_worker.report_percents("accuracy", scores, threshold)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == (value_reported is not None)
    if value_reported is not None:
        assert value_reported in messages[0]


def test_what_a_reward_prints_does_not_reach_the_channel(one_worker: RewardPool) -> None:
    assert one_worker.score(_samples("print")).scores == [{"overall": 5.0, "bonus": 1.0}]


def test_what_a_killed_reward_had_started_ends_with_it(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    with _pool() as pool:
        failed = pool.score(_samples("child", pid_file=str(pid_file)))
        assert failed.num_timed_out == 1
        with pytest.raises(RewardError, match=r"1 took more than worker\.reward\.timeout_seconds=1\)"):
            pool.require_a_score(failed)
    _wait_until_gone(int(pid_file.read_text()))


def test_an_idle_worker_that_was_ended_from_outside_is_replaced(one_worker: RewardPool) -> None:
    first = next(iter(one_worker._workers)).process.pid
    os.kill(first, signal.SIGKILL)
    # Until all its threads have ended, which is later than the state Z: from then on the pool can see it.
    os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)
    outcome = one_worker.score(_samples("good"))
    assert next(iter(one_worker._workers)).process.pid != first
    assert outcome.scores == [{"overall": 4.0, "bonus": 1.0}]
    assert outcome.num_raised == 0


def test_a_call_that_is_interrupted_leaves_a_pool_that_works(one_worker: RewardPool) -> None:
    handler_before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    with pytest.raises(KeyboardInterrupt):
        one_worker.score(_samples("sleep"))
    signal.signal(signal.SIGALRM, handler_before)
    assert one_worker.score(_samples("good")).scores == [{"overall": 4.0, "bonus": 1.0}]


def test_closing_ends_the_processes_and_a_closed_pool_says_so() -> None:
    pool = _pool(MATH, workers=2)
    pids = [worker.process.pid for worker in pool._workers]
    assert [_process_exists(pid) for pid in pids] == [True, True]
    pool.close()
    pool.close()
    assert [_process_exists(pid) for pid in pids] == [False, False]
    with pytest.raises(EngineError, match="is closed"):
        pool.score(_samples("good"))


def test_a_file_that_exits_while_loading_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "ends.py"
    path.write_text("import os\nos._exit(9)")
    with pytest.raises(EngineError, match="code 9"):
        _pool(f"{path}:main")


def test_an_input_that_cannot_travel_is_named(math_pool: RewardPool) -> None:
    with pytest.raises(RewardError, match="from number 1 on cannot be sent"):
        math_pool.score([*_samples("good"), *_samples("good", hook=lambda: None)])


@pytest.mark.parametrize(
    "response",
    ["", "child", pytest.param("hang in C", marks=pytest.mark.nightly("waits for 14 seconds of processor time"))],
)
def test_workers_end_when_their_parent_is_killed(response: str, tmp_path: Path) -> None:
    # The parent has no __main__ guard, on purpose, and starts the hanging call in a thread.
    pid_file = tmp_path / "pid"
    program = f"""
        import threading, time
        from cepo.config.worker_schema import RewardConfig
        from cepo.rewards.pool import RewardPool
        limit = 600.0 if {response!r} == "child" else 1.5
        pool = RewardPool(RewardConfig(reward_function={BATCH!r}, timeout_seconds=limit))
        sample = {{"response": {response!r}, "response_length": 1, "ground_truth": "1", "pid_file": {str(pid_file)!r}}}
        if sample["response"]:
            threading.Thread(target=pool.score, args=([sample],), daemon=True).start()
            time.sleep(0.5)
        print(next(iter(pool._workers)).process.pid, flush=True)
        time.sleep(600)
    """
    parent = _program(program)
    assert parent.stdout is not None
    pids = [int(parent.stdout.readline())]
    if response == "child":
        while not (pid_file.exists() and pid_file.read_text()):
            time.sleep(0.05)
        pids.append(int(pid_file.read_text()))
    parent.kill()
    parent.wait()
    parent.stdout.close()
    _wait_until_gone(*pids)


def test_neither_side_of_the_pool_imports_torch(tmp_path: Path) -> None:
    path = tmp_path / "looks.py"
    path.write_text(
        "import sys\n"
        "def main(samples):\n"
        "    return [{'overall': 1.0, 'torch': float('torch' in sys.modules)} for _ in samples]\n"
    )
    program = f"""
        import sys
        from cepo.config.worker_schema import RewardConfig
        from cepo.rewards.pool import RewardPool
        with RewardPool(RewardConfig(reward_function={f"{path}:main"!r})) as pool:
            scores = pool.score([{{"response": ""}}]).scores
        print(scores, "torch" in sys.modules, "sympy" in sys.modules)
    """
    done, _ = _program(program).communicate(timeout=60)
    assert done.strip() == "[{'overall': 1.0, 'torch': 0.0}] False False"


def test_parts_out_of_order_get_the_outcome_of_one_call(caplog: pytest.LogCaptureFixture) -> None:
    parts = [["good", "better"], ["raise", "sleep"], ["crash", "best of all"], []]
    whole = _samples(*(word for part in parts for word in part))
    with _pool(workers=2) as pool:
        expected = pool.score(whole)
    with _pool(workers=2) as pool, pool.stream() as stream:
        for place in (1, 3, 2, 0):  # the faulty part first: its fields become known by the others
            stream.add(place, _samples(*parts[place]))
        assert 2 in stream
        assert 4 not in stream
        caplog.clear()
        assert stream.outcome() == expected
    assert [score["overall"] for score in expected.scores] == [4.0, 6.0, 0.0, 0.0, 0.0, 11.0]
    assert expected.scores[2] == {"overall": 0.0, "bonus": 0.0}
    assert "3 of 6 samples" in caplog.text
    assert "sample 2: KeyError" in caplog.text


HASHES = """
import time

def after_hashes(response):
    if response == "hang":
        time.sleep(600)
    if response == "raise":
        raise KeyError("no such thing")
    if response == "number":
        return 7
    head, mark, answer = response.rpartition("####")
    return answer if mark else None
"""


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("answers") / "hashes.py"
    path.write_text(HASHES)
    return f"{path}:after_hashes"


@pytest.fixture(scope="module")
def hashes_pool(spec: str) -> Iterator[RewardPool]:
    with _pool(MATH, answer_function=spec, workers=2) as opened:
        yield opened


def test_the_users_function_finds_the_answers_that_are_judged(hashes_pool: RewardPool) -> None:
    r"""White space around them is removed; `\boxed{}` means nothing to this function."""
    assert hashes_pool.extracted_answers(["6 + 6 #### 12 ", r"\boxed{12}", "12 ####  ", ""]) == ["12", None, None, None]
    responses = ["so #### 24/2", "so #### 13", r"\boxed{12}"]
    samples = [{"response": response, "response_length": 1, "ground_truth": "12"} for response in responses]
    assert hashes_pool.score(samples).scores == [
        {"overall": 1.0, "accuracy": 1.0, "format": 1.0},
        {"overall": 0.0, "accuracy": 0.0, "format": 1.0},
        {"overall": 0.0, "accuracy": 0.0, "format": 0.0},
    ]


def test_a_fault_of_the_function_costs_its_own_response(
    hashes_pool: RewardPool, caplog: pytest.LogCaptureFixture
) -> None:
    responses = ["#### 1", "hang", "#### 2", "raise", "number"]
    assert hashes_pool.extracted_answers(responses) == ["1", None, "2", None, None]
    assert "hashes.py:after_hashes failed for 3 of 5 responses: no answer" in caplog.text
    assert "sample 3: KeyError: 'no such thing' (hashes.py, line 8)" in caplog.text


def test_a_result_of_no_text_and_a_missing_function_are_named(spec: str) -> None:
    with pytest.raises(ContractError, match=r"answer_function=hashes\.py:after_hashes returned a int: 7\. Return the"):
        load_answer_function(spec)("number")
    with pytest.raises(RewardError, match=r"no function 'after_hash'.*Did you mean 'after_hashes'"):
        _pool(MATH, answer_function=spec[:-2])
