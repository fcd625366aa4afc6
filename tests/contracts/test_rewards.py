from fractions import Fraction
from pathlib import Path

import pytest
from shipped_rewards import EXAMPLES, SHIPPED, needed

from cepo.errors import ConfigError, RewardError
from cepo.rewards.contract import ContractError, LoadedReward, load_reward_function, validate_score, validate_scores
from cepo.rewards.math import compute_score

RESPONSES = [r"so \boxed{5\sqrt{3}}", r"\boxed{3}", "no answer", "", r"\boxed{", "<answer>5√3</answer>"]
SAMPLES = [
    {"response": text, "response_length": len(text), "ground_truth": r"5 \sqrt { 3 }", "prompt": "Find x.", "id": 7}
    for text in RESPONSES
]


@pytest.fixture(params=SHIPPED, ids=lambda spec: "/".join(spec.split("/")[-2:]))
def shipped(request: pytest.FixtureRequest) -> LoadedReward:
    return load_reward_function(request.param, needed(request.param))


def test_all_shipped_rewards_that_read_text_alone_are_tested() -> None:
    files = [*Path("cepo/rewards").glob("*.py"), *EXAMPLES.glob("*.py")]
    rewards = {file.stem for file in files if "\nREWARD_NAME = " in file.read_text(encoding="utf-8")}
    assert rewards - {"judge", "reward_model"} == {Path(spec.partition(":")[0]).stem for spec in SHIPPED}


def test_a_shipped_reward_tells_right_from_wrong_by_the_sample(shipped: LoadedReward) -> None:
    copies = [dict(sample) for sample in SAMPLES]
    scores = shipped.score(SAMPLES)
    assert len(scores) == len(SAMPLES) == 6
    (fields,) = {frozenset(score) for score in scores}
    assert fields >= {"overall", "accuracy"}
    boxed_counts = shipped.path.name != "r1v.py"
    assert [score["accuracy"] >= 0.5 for score in scores] == [boxed_counts, False, False, False, False, True]
    assert scores == shipped.score([sample | {"id": 8, "family": "angle"} for sample in SAMPLES])
    assert scores == [shipped.score([sample])[0] for sample in SAMPLES]
    assert shipped.score([]) == []
    assert copies == SAMPLES


@pytest.mark.parametrize("spec", SHIPPED)
def test_an_unknown_keyword_of_a_reward_is_refused_at_loading(spec: str) -> None:
    with pytest.raises(RewardError, match="fromat_weight"):
        load_reward_function(spec, {**needed(spec), "fromat_weight": 0.1})


def test_by_default_the_reward_is_the_accuracy() -> None:
    scores = validate_scores(compute_score(SAMPLES), 6, source="math")
    assert [score["overall"] for score in scores] == [1.0, 0.0, 0.0, 0.0, 0.0, 1.0]
    assert [score["accuracy"] for score in scores] == [1.0, 0.0, 0.0, 0.0, 0.0, 1.0]
    assert [score["format"] for score in scores] == [1.0, 1.0, 0.0, 0.0, 0.0, 1.0]
    weighted = compute_score(SAMPLES, format_weight=0.25)
    assert [score["overall"] for score in weighted] == [1.0, 0.25, 0.0, 0.0, 0.0, 1.0]


@pytest.mark.parametrize("format_weight", [-0.1, 1.1, float("nan")])
def test_a_format_weight_outside_0_to_1_is_refused(format_weight: float) -> None:
    with pytest.raises(ConfigError, match="format_weight"):
        compute_score(SAMPLES, format_weight=format_weight)


HUGE = [1e300, -1e300, 1e19, float("inf"), float("nan"), 10**400, 10**5000, Fraction(10**400, 3)]


@pytest.mark.parametrize("value", HUGE, ids=range(len(HUGE)))
def test_a_reward_beyond_what_float32_can_square_is_none(value: float) -> None:
    with pytest.raises(ContractError, match=r"'overall' = .*Return a number from -1e\+18 to 1e\+18"):
        validate_score({"overall": value}, sample=3, source="f")


def test_a_key_of_a_class_of_its_own_becomes_a_plain_text() -> None:
    class Name(str):
        __slots__ = ()

    score = validate_score({Name("overall"): 1, Name("x"): 0.5}, sample=0, source="f")
    assert "x" in score
    assert {type(key) for key in score} == {str}
    assert validate_score({"overall": 1e18}, sample=0, source="f") == {"overall": 1e18}
