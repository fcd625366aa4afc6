"""The contract over each reward function that the package ships."""

import ast
from pathlib import Path

import pytest

import cepo.rewards
from cepo.errors import ConfigError, RewardError
from cepo.rewards import load_reward_function, validate_scores
from cepo.rewards.math import compute_score

FOLDER = Path(cepo.rewards.__file__).parent


def _shipped_rewards() -> list[str]:
    """Each file with a REWARD_NAME, at each of its functions whose first argument is `reward_inputs`."""
    specs = []
    for path in sorted(FOLDER.glob("*.py")):
        tree = ast.parse(path.read_text())
        names = {target.id for node in tree.body if isinstance(node, ast.Assign) for target in node.targets}  # type: ignore[attr-defined]
        if "REWARD_NAME" in names:
            functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
            specs += [
                f"cepo/rewards/{path.name}:{node.name}"
                for node in functions
                if node.args.args and node.args.args[0].arg == "reward_inputs"
            ]
    return specs


SHIPPED = _shipped_rewards()
RESPONSES = [r"so \boxed{5\sqrt{3}}", r"\boxed{3}", "no answer", "", r"\boxed{", "<answer>5√3</answer>"]
SAMPLES = [
    {"response": text, "response_length": len(text), "ground_truth": r"5 \sqrt { 3 }", "prompt": "Find x.", "id": 7}
    for text in RESPONSES
]


def test_the_default_reward_is_among_the_shipped_ones() -> None:
    assert "cepo/rewards/math.py:compute_score" in SHIPPED


@pytest.mark.parametrize("spec", SHIPPED)
def test_a_shipped_reward_returns_one_finite_score_per_sample_and_ignores_other_columns(spec: str) -> None:
    scores = load_reward_function(spec, {}).score(SAMPLES)
    assert len(scores) == len(SAMPLES) == 6
    assert {frozenset(score) for score in scores} == {frozenset({"overall", "accuracy", "format"})}


@pytest.mark.parametrize("spec", SHIPPED)
def test_a_shipped_reward_scores_each_sample_by_itself_and_changes_no_input(spec: str) -> None:
    before = [dict(sample) for sample in SAMPLES]
    reward = load_reward_function(spec, {})
    assert [reward.score([sample])[0] for sample in SAMPLES] == reward.score(SAMPLES)
    assert before == SAMPLES


@pytest.mark.parametrize("spec", SHIPPED)
def test_a_shipped_reward_takes_an_empty_batch(spec: str) -> None:
    assert load_reward_function(spec, {}).score([]) == []


def test_by_default_the_reward_is_the_accuracy() -> None:
    scores = validate_scores(compute_score(SAMPLES), 6, source="math")
    assert [score["overall"] for score in scores] == [1.0, 0.0, 0.0, 0.0, 0.0, 1.0]
    assert [score["accuracy"] for score in scores] == [1.0, 0.0, 0.0, 0.0, 0.0, 1.0]
    assert [score["format"] for score in scores] == [1.0, 1.0, 0.0, 0.0, 0.0, 1.0]


def test_a_format_weight_of_a_quarter_gives_1_and_a_quarter_and_0() -> None:
    scores = compute_score(SAMPLES, format_weight=0.25)
    assert [score["overall"] for score in scores] == [1.0, 0.25, 0.0, 0.0, 0.0, 1.0]


@pytest.mark.parametrize("format_weight", [-0.1, 1.1, float("nan")])
def test_a_format_weight_outside_0_to_1_is_refused(format_weight: float) -> None:
    with pytest.raises(ConfigError, match="format_weight"):
        compute_score(SAMPLES, format_weight=format_weight)


def test_an_unknown_keyword_of_the_default_reward_is_refused_when_it_is_loaded() -> None:
    with pytest.raises(RewardError, match="format_weight"):
        load_reward_function("cepo/rewards/math.py:compute_score", {"fromat_weight": 0.1})
