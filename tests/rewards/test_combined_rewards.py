"""Several reward functions with weights are one."""

from __future__ import annotations

from pathlib import Path

import pytest

from cepo.config import load_config
from cepo.errors import RewardError
from cepo.rewards.functions import function_names, load_reward
from cepo.rewards.pool import RewardPool

ANSWERS = """
def score(samples, *, full=1.0):
    right = [float(sample["response"] == sample["ground_truth"]) for sample in samples]
    return [{"overall": full * each, "accuracy": each} for each in right]

def again(samples):
    return score(samples)
"""
BREVITY = """
REWARD_TYPE = "sequential"

def score(sample):
    if sample["response"] == "raise":
        raise ValueError("not this one")
    return {"overall": 1.0 / sample["response_length"], "accuracy": 0.25, "length": sample["response_length"]}
"""
SAMPLES = [
    {"response": "5", "ground_truth": "5", "response_length": 2},
    {"response": "6", "ground_truth": "5", "response_length": 4},
]


@pytest.fixture
def spec(tmp_path: Path) -> str:
    (tmp_path / "answers.py").write_text(ANSWERS)
    (tmp_path / "brevity.py").write_text(BREVITY)
    return f"{tmp_path}/answers.py:score,{tmp_path}/brevity.py:score"


def test_weighted_rewards_add_up_with_each_part_reported(spec: str) -> None:
    """2 * 1 + 0.5 * 0.5 = 2.25."""
    reward = load_reward(spec, {}, [2.0, 0.5])
    assert (reward.name, reward.reward_type) == ("answers+brevity", "sequential")
    assert reward.score(SAMPLES) == [
        {"overall": 2.25, "answers": 1.0, "accuracy": 1.0, "brevity": 0.5, "brevity.accuracy": 0.25, "length": 2.0},
        {"overall": 0.125, "answers": 0.0, "accuracy": 0.0, "brevity": 0.25, "brevity.accuracy": 0.25, "length": 4.0},
    ]


def test_rewards_count_1_without_weights_and_one_can_be_weighted(spec: str) -> None:
    reward = load_reward(spec, {"answers": {"full": 10.0}})
    assert [score["overall"] for score in reward.score(SAMPLES)] == [10.5, 0.25]
    alone = spec.partition(",")[0]
    assert [score["overall"] for score in load_reward(alone, {"full": 3.0}, [0.5]).score(SAMPLES)] == [1.5, 0.0]
    assert load_reward(alone, {}).score(SAMPLES[:1]) == [{"overall": 1.0, "accuracy": 1.0}]


def test_files_of_one_name_are_told_apart_by_the_function(spec: str) -> None:
    file = spec.partition(":")[0]
    assert function_names(f"{file}:score, {file}:again") == ["answers.score", "answers.again"]
    with pytest.raises(RewardError, match=r"names answers\.score twice"):
        function_names(f"{file}:score,{file}:score")


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [({"full": 2.0}, "give each its own section"), ({"answer": {"full": 2.0}}, "Did you mean 'answers'?")],
)
def test_keywords_that_name_no_function_are_refused(spec: str, kwargs: dict[str, object], words: str) -> None:
    with pytest.raises(RewardError) as caught:
        load_reward(spec, kwargs)
    assert words in str(caught.value)


def test_one_raising_function_costs_its_own_sample_alone(spec: str) -> None:
    samples = [*SAMPLES, {"response": "raise", "ground_truth": "5", "response_length": 1}]
    with RewardPool(spec, {}, weights=[2.0, 0.5], num_workers=1, timeout_seconds=10.0) as pool:
        outcome = pool.score(samples)
    assert [score["overall"] for score in outcome.scores] == [2.25, 0.125, 0.0]
    assert (outcome.num_raised, outcome.num_timed_out) == (1, 0)
    assert outcome.scores[2]["brevity"] == 0.0


def test_a_list_in_the_configuration_names_the_functions(spec: str) -> None:
    first, second = spec.split(",")
    config = load_config(["config=configs/microgeo/base.yaml", f"worker.reward.reward_function=[{first}, {second}]"])
    assert config.worker.reward.reward_functions == [first, second]
