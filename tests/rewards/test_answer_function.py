"""A user's own function finds the final answer: for rewards, for references, and within the limits of the pool."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cepo.errors import RewardError
from cepo.rewards.contract import ContractError
from cepo.rewards.functions import load_answer_function
from cepo.rewards.pool import RewardPool

pytestmark = pytest.mark.heavy  # a pool of processes

MATH = "cepo/rewards/math.py:compute_score"
FILE = """
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
    path.write_text(FILE)
    return f"{path}:after_hashes"


@pytest.fixture(scope="module")
def pool(spec: str) -> Iterator[RewardPool]:
    with RewardPool(MATH, {}, answer_function=spec, num_workers=2, timeout_seconds=1.0) as opened:
        yield opened


def test_the_users_function_finds_the_answers_that_are_judged(pool: RewardPool) -> None:
    r"""White space around them is removed; `\boxed{}` means nothing to this function."""
    assert pool.extracted_answers(["6 + 6 #### 12 ", r"\boxed{12}", "12 ####  ", ""]) == ["12", None, None, None]
    responses = ["so #### 24/2", "so #### 13", r"\boxed{12}"]
    samples = [{"response": response, "response_length": 1, "ground_truth": "12"} for response in responses]
    assert pool.score(samples).scores == [
        {"overall": 1.0, "accuracy": 1.0, "format": 1.0},
        {"overall": 0.0, "accuracy": 0.0, "format": 1.0},
        {"overall": 0.0, "accuracy": 0.0, "format": 0.0},
    ]


def test_a_fault_of_the_function_costs_its_own_response(pool: RewardPool, caplog: pytest.LogCaptureFixture) -> None:
    assert pool.extracted_answers(["#### 1", "hang", "#### 2", "raise", "number"]) == ["1", None, "2", None, None]
    assert "hashes.py:after_hashes failed for 3 of 5 responses: no answer" in caplog.text
    assert "sample 3: KeyError: 'no such thing' (hashes.py, line 8)" in caplog.text


def test_a_result_of_no_text_and_a_missing_function_are_named(spec: str) -> None:
    with pytest.raises(ContractError, match=r"answer_function=hashes\.py:after_hashes returned a int: 7\. Return the"):
        load_answer_function(spec)("number")
    with pytest.raises(RewardError, match=r"no function 'after_hash'.*Did you mean 'after_hashes'"):
        RewardPool(MATH, {}, answer_function=spec[:-2], num_workers=1, timeout_seconds=1.0)
