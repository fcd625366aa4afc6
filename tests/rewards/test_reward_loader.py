"""Reward files are found, loaded and checked before a run needs them."""

import os
import sys
from pathlib import Path

import pytest

from cepo.errors import RewardError
from cepo.rewards.contract import validate_score
from cepo.rewards.functions import load_reward_function, resolve_reward_path

BATCH = """
REWARD_NAME = "length"

def main(samples):
    return [{"overall": 0.0} for sample in samples]

def by_length(samples, *, scale):
    return [{"overall": scale * sample["response_length"]} for sample in samples]

NOT_A_FUNCTION = 3
"""

SEQUENTIAL = """
REWARD_TYPE = "sequential"

def main(sample):
    return {"overall": 1.0, "extra": sample["note"]}
"""


@pytest.fixture
def batch_file(tmp_path: Path) -> Path:
    path = tmp_path / "batch_reward.py"
    path.write_text(BATCH)
    return path


def test_a_batch_function_gets_its_keywords_and_its_file_s_name(batch_file: Path) -> None:
    reward = load_reward_function(f"{batch_file}:by_length", {"scale": 0.5})
    assert (reward.name, reward.reward_type, reward.function_name) == ("length", "batch", "by_length")
    assert reward.score([{"response_length": 3}, {"response_length": 8}]) == [{"overall": 1.5}, {"overall": 4.0}]


def test_a_sequential_function_is_called_once_per_sample(tmp_path: Path) -> None:
    path = tmp_path / "one.py"
    path.write_text(SEQUENTIAL)
    reward = load_reward_function(f"{path}:main", {})
    assert (reward.name, reward.reward_type) == ("unknown", "sequential")
    assert reward.score([{"note": 2}, {"note": 5}]) == [{"overall": 1.0, "extra": 2.0}, {"overall": 1.0, "extra": 5.0}]


def test_the_built_in_reward_is_found_from_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path, function_name = resolve_reward_path("cepo/rewards/math.py:compute_score")
    assert path.is_file()
    assert path.parts[-3:] == ("cepo", "rewards", "math.py")
    assert function_name == "compute_score"
    assert load_reward_function("cepo/rewards/math.py:compute_score", {"format_weight": 0.1}).name == "math"


def test_a_file_of_the_working_directory_precedes_the_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = tmp_path / "cepo" / "rewards" / "math.py"
    mine.parent.mkdir(parents=True)
    mine.write_text(BATCH)
    monkeypatch.chdir(tmp_path)
    assert load_reward_function("cepo/rewards/math.py:main", {}).name == "length"


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
        ("REWARD_TYPE = 'group'\ndef main(samples): return []", "'batch' or 'sequential'"),
        ("import a_module_that_is_not_there", "line 1, in <module> fails when it is loaded: ModuleNotFoundError"),
        ("def main(samples:", "SyntaxError: '(' was never closed (broken.py, line 1)"),
        ("raise ValueError('no licence')", "no licence"),
    ],
)
def test_a_reward_file_that_cannot_serve_is_refused(tmp_path: Path, source: str, said: str) -> None:
    path = tmp_path / "broken.py"
    path.write_text(source)
    with pytest.raises(RewardError, match=r"broken\.py") as caught:
        load_reward_function(f"{path}:main", {})
    assert said in str(caught.value)


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
        (1.0, "float"), ({"accuracy": 1.0}, "without 'overall'"), ({"overall": float("nan")}, "nan"),
        ({"overall": float("inf")}, "inf"), ({"overall": "1"}, "Return a number from"),
        ({"overall": None}, "Return a number from"), ({"overall": 1.0, "format": float("nan")}, "'format'"),
        ({"overall": 1.0, 3: 1.0}, "Keys are strings"),
    ],
)  # fmt: skip
def test_a_score_outside_the_contract_names_its_sample(score: object, said: str) -> None:
    with pytest.raises(RewardError, match="sample 41") as caught:
        validate_score(score, sample=41, source="my.py:main")
    assert said in str(caught.value)


def test_whole_numbers_and_booleans_become_floats() -> None:
    score = validate_score({"overall": 1, "accuracy": True}, sample=0, source="my.py:main")
    assert score == {"overall": 1.0, "accuracy": 1.0}
    assert [type(value) for value in score.values()] == [float, float]


@pytest.mark.parametrize(
    ("source", "package"),
    [("from mathruler.grader import grade_answer", "mathruler"), ("import bs4.no_such_part", "beautifulsoup4")],
)
def test_a_missing_library_is_named_with_its_package(tmp_path: Path, source: str, package: str) -> None:
    path = tmp_path / "needs.py"
    path.write_text(f"\n{source}\n")
    with pytest.raises(RewardError, match=r"needs\.py, line 2") as caught:
        load_reward_function(f"{path}:main", {})
    assert f"Install it: {sys.executable} -m pip install {package}." in str(caught.value)
    assert ("examples/reward_function/math.py" in str(caught.value)) == (package == "mathruler")
