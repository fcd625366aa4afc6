"""Reward files are found, loaded and checked before a run needs them; several functions with weights are one."""

import datetime
import decimal
import fractions
import os
from pathlib import Path

import numpy
import pytest
import sympy
import torch
import yaml

from cepo.config import load_config
from cepo.config.worker_schema import RewardConfig
from cepo.errors import RewardError
from cepo.rewards.contract import (
    ContractError,
    function_names,
    load_reward,
    load_reward_function,
    resolve_reward_path,
    validate_score,
)
from cepo.rewards.pool import RewardPool

BATCH = """
def main(samples):
    return [{"overall": 0.0} for sample in samples]

def by_length(samples, *, scale):
    return [{"overall": scale * sample["response_length"]} for sample in samples]

NOT_A_FUNCTION = 3
"""


@pytest.fixture
def batch_file(tmp_path: Path) -> Path:
    path = tmp_path / "batch_reward.py"
    path.write_text(BATCH)
    return path


def test_batches_and_single_samples_are_scored_with_keywords(batch_file: Path) -> None:
    reward = load_reward_function(f"{batch_file}:by_length", {"scale": 0.5})
    assert reward.reward_type == "batch"
    assert reward.function_name == "by_length"
    assert reward.score([{"response_length": 3}, {"response_length": 8}]) == [{"overall": 1.5}, {"overall": 4.0}]
    batch_file.write_text(
        "REWARD_TYPE = 'sequential'\ndef main(sample): return {'overall': 1.0, 'extra': sample['note']}"
    )
    reward = load_reward_function(f"{batch_file}:main", {})
    assert reward.reward_type == "sequential"
    assert reward.score([{"note": 2}, {"note": 5}]) == [{"overall": 1.0, "extra": 2.0}, {"overall": 1.0, "extra": 5.0}]


@pytest.mark.parametrize(
    ("score", "remedy"),
    [
        (
            "{'overall': float('7' in sample['response'])}",
            r"Write REWARD_TYPE = 'sequential' in \S+batch_reward\.py\.$",
        ),
        ("float('7' in sample['response'])", r", and return a dict such as \{'overall': 1\.0\}\.$"),
    ],
)
def test_a_function_of_one_sample_is_told_how_to_say_so(batch_file: Path, score: str, remedy: str) -> None:
    """It fails for a list, and its own error would say nothing of the contract."""
    batch_file.write_text(f"def main(sample): return {score}")
    reward = load_reward_function(f"{batch_file}:main", {})
    with pytest.raises(ContractError, match=f"takes one sample at a time, and was called with a list .*{remedy}"):
        reward.score([{"response": "7"}, {"response": "8"}])


def test_the_built_in_reward_is_found_from_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of the working directory precedes it."""
    monkeypatch.chdir(tmp_path)
    path, function_name = resolve_reward_path("cepo/rewards/math.py:compute_score")
    assert path.is_file()
    assert path.parts[-3:] == ("cepo", "rewards", "math.py")
    assert function_name == "compute_score"
    assert load_reward_function("cepo/rewards/math.py:compute_score", {"format_weight": 0.1}).path == path
    mine = tmp_path / "cepo" / "rewards" / "math.py"
    mine.parent.mkdir(parents=True)
    mine.write_text(BATCH)
    assert load_reward_function("cepo/rewards/math.py:main", {}).path == mine


@pytest.mark.parametrize(
    ("spec", "kwargs", "said"),
    [
        ("nowhere.py:main", {}, ["nowhere.py", "path/to/file.py:function"]),
        ("{file}:by_lenght", {"scale": 1}, ["by_lenght", "Did you mean 'by_length'?"]),
        ("{file}:NOT_A_FUNCTION", {}, ["has no function 'NOT_A_FUNCTION'"]),
        ("{file}:by_length", {"scael": 1}, ["scael", "['scale']"]),
        ("{file}:by_length", {}, ["scale"]),
        (":main", {}, ["path/to/file.py:function"]),
    ],
)
def test_a_bad_reward_setting_is_refused_with_the_accepted_ones(
    batch_file: Path, spec: str, kwargs: dict[str, float], said: list[str]
) -> None:
    with pytest.raises(RewardError) as caught:
        load_reward_function(spec.format(file=batch_file), kwargs)
    assert [words for words in said if words not in str(caught.value)] == []


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("REWARD_TYPE = 'group'\ndef main(samples): return []", ["'batch' or 'sequential'"]),
        ("import not_there", ["line 1, in <module> fails when it is loaded: ModuleNotFoundError", "PYTHONPATH"]),
        ("\nfrom mathruler.grader import it", ["line 2", "No module named 'mathruler'"]),
        ("def main(samples:", ["SyntaxError: '(' was never closed (broken.py, line 1)"]),
        ("raise ValueError('no licence')", ["no licence"]),
        ("\nraise SystemExit(2)", ["line 2", "SystemExit: 2. It ends the program; put what only a script needs under if"]),
        (
            "class main:\n    def __call__(self, samples): return []",
            ["main is a class; write a function that calls an instance of it"],
        ),
        ("async def main(samples): return []", ["main is async; write a function that returns asyncio.run(...) of it"]),
    ],
)  # fmt: skip
def test_a_reward_file_that_cannot_serve_is_refused(tmp_path: Path, source: str, said: list[str]) -> None:
    path = tmp_path / "broken.py"
    path.write_text(source)
    with pytest.raises(RewardError, match=r"broken\.py") as caught:
        load_reward_function(f"{path}:main", {})
    assert [words for words in said if words not in str(caught.value)] == []


def test_two_files_of_one_name_stay_apart(tmp_path: Path) -> None:
    rewards = []
    for number in (1, 2):
        path = tmp_path / str(number) / "reward.py"
        path.parent.mkdir()
        path.write_text(f"VALUE = {number}\ndef main(samples): return [{{'overall': VALUE}} for _ in samples]")
        rewards.append(load_reward_function(os.fspath(path), {}))
    assert [reward.score([{}])[0]["overall"] for reward in rewards] == [1.0, 2.0]


@pytest.mark.parametrize(
    ("score", "said"),
    [
        (1.0, "float"), ({"accuracy": 1.0}, "without 'overall'"), ({"overall": "1"}, "Return a number from"),
        ({"overall": None}, "Return a number from"), ({"overall": 1.0, "format": float("nan")}, "'format'"),
        ({"overall": 1.0, 3: 1.0}, "Keys are strings"),
    ],
)  # fmt: skip
def test_a_score_outside_the_contract_names_its_sample(score: object, said: str) -> None:
    with pytest.raises(RewardError, match="sample 41") as caught:
        validate_score(score, sample=41, source="my.py:main")
    assert said in str(caught.value)


VALUES = yaml.safe_load(Path(__file__).with_name("score_values.yaml").read_text(encoding="utf-8"))


class OwnNumber:
    def __init__(self, value: float) -> None:
        self.value = value

    def __float__(self) -> float:
        return self.value


class OwnInteger(int):
    """A number of a library's own."""


class Raising:
    def __float__(self) -> float:
        raise RuntimeError("no")

    __repr__ = __float__  # type: ignore[assignment]


NAMES = {
    "datetime": datetime, "decimal": decimal, "fractions": fractions, "numpy": numpy, "sympy": sympy, "torch": torch,
    "OwnNumber": OwnNumber, "OwnInteger": OwnInteger, "Raising": Raising,
}  # fmt: skip


@pytest.mark.parametrize(("expression", "number"), VALUES["accepted"].items())
def test_a_number_without_axes_is_a_score(expression: str, number: float) -> None:
    value: object = eval(expression, NAMES)
    score = validate_score({"overall": value, "accuracy": value}, sample=0, source="my.py:main")
    assert score == {"overall": number, "accuracy": number}
    assert {type(part) for part in score.values()} == {float}


@pytest.mark.parametrize("expression", VALUES["refused"])
def test_what_is_no_finite_number_is_no_score(expression: str) -> None:
    value: object = eval(expression, NAMES)
    with pytest.raises(ContractError, match=r"sample 3 'overall' = .*Return a number from -1e\+18 to 1e\+18"):
        validate_score({"overall": value}, sample=3, source="my.py:main")


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
    """2 * 1 + 0.5 * 0.5 = 2.25. Without weights each counts 1."""
    reward = load_reward(spec, {}, [2.0, 0.5])
    assert reward.reward_type == "sequential"
    assert reward.score(SAMPLES) == [
        {"overall": 2.25, "answers": 1.0, "accuracy": 1.0, "brevity": 0.5, "brevity.accuracy": 0.25, "length": 2.0},
        {"overall": 0.125, "answers": 0.0, "accuracy": 0.0, "brevity": 0.25, "brevity.accuracy": 0.25, "length": 4.0},
    ]
    scores = load_reward(spec, {"answers": {"full": 10.0}}).score(SAMPLES)
    assert [score["overall"] for score in scores] == [10.5, 0.25]
    first_part = spec.partition(",")[0]
    halved = load_reward(first_part, {"full": 3.0}, [0.5]).score(SAMPLES)
    assert [score["overall"] for score in halved] == [1.5, 0.0]
    unweighted = load_reward(first_part, {}).score(SAMPLES[:1])
    assert unweighted == [{"overall": 1.0, "accuracy": 1.0}]


def test_names_of_functions_are_unique_and_keywords_use_them(spec: str) -> None:
    file = spec.partition(":")[0]
    assert function_names(f"{file}:score, {file}:again") == ["answers.score", "answers.again"]
    with pytest.raises(RewardError, match=r"names answers\.score twice"):
        function_names(f"{file}:score,{file}:score")
    for kwargs, words in (
        ({"full": 2.0}, "give each its own section"),
        ({"answer": {"full": 2.0}}, "Did you mean 'answers'?"),
    ):
        with pytest.raises(RewardError) as caught:
            load_reward(spec, kwargs)
        assert words in str(caught.value)
    names = spec.split(",")
    config = load_config(["config=configs/microgeo/base.yaml", f"worker.reward.reward_function=[{', '.join(names)}]"])
    assert config.worker.reward.reward_functions == names


def test_one_raising_function_costs_its_own_sample_alone(spec: str) -> None:
    samples = [*SAMPLES, {"response": "raise", "ground_truth": "5", "response_length": 1}]
    with RewardPool(RewardConfig(reward_function=spec, reward_weights=[2.0, 0.5])) as pool:
        outcome = pool.score(samples)
    assert [score["overall"] for score in outcome.scores] == [2.25, 0.125, 0.0]
    assert outcome.num_raised == 1
    assert outcome.num_timed_out == 0
    assert outcome.scores[2]["brevity"] == 0.0
