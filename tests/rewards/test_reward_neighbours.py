"""A reward file imports what lies beside it, as a script does; a message advises nobody to install what lies there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from cepo.config.worker_schema import RewardConfig
from cepo.errors import EngineError
from cepo.rewards.pool import RewardPool

CASES: dict[str, dict[str, Any]] = yaml.safe_load(
    Path(__file__).with_name("reward_neighbours.yaml").read_text(encoding="utf-8")
)
FUNCTIONS = """
REWARD_TYPE = "sequential"
def main(sample):
    return {"overall": value() if "value" in globals() else VALUE}
def answer(response):
    return str(value() if "value" in globals() else VALUE)
"""
PROGRAM = """
import json, os, sys
from cepo.answers import equal
from cepo.rewards.contract import load_answer_function, load_reward
equal("1/2", "0.5")  # as a worker does before it loads a file
for name, file in json.load(sys.stdin).items():
    if os.fork() > 0:
        os.wait()
        continue
    os.chdir("/")
    try:
        result = load_reward(f"{file}:main", {}).score([{}])[0]["overall"], load_answer_function(f"{file}:answer")("")
    except Exception as error:
        result = f"{type(error).__name__}: {error}"
    print(json.dumps([name, result]), flush=True)
    os._exit(0)
"""
"""Loads each file in a process of its own, whose modules no other case sees."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """By case: the reward and the answer, or the message of the error."""
    files = {name: str(written(name, tmp_path_factory.mktemp("rewards"))) for name in CASES}
    command = [sys.executable, "-P", "-c", PROGRAM]
    done = subprocess.run(command, input=json.dumps(files), capture_output=True, text=True, check=True)
    return dict(json.loads(line) for line in done.stdout.splitlines())


def written(name: str, folder: Path) -> Path:
    """Writes the files of a case and returns the reward file."""
    case = CASES[name]
    for place, source in case["files"].items():
        file = folder / place
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(str(source), encoding="utf-8")
    reward = folder / case.get("file", "r.py")
    reward.write_text(reward.read_text(encoding="utf-8") + FUNCTIONS, encoding="utf-8")
    return reward


@pytest.mark.parametrize("name", CASES)
def test_what_lies_beside_a_reward_file_is_imported(name: str, results: dict[str, Any]) -> None:
    words = CASES[name].get("lacks")
    if words is None:
        assert results[name] == [0.25, "0.25"]
        return
    assert words in results[name]
    is_library = "not_there_at_all" in words
    assert ("pip install" in results[name]) is is_library


OF_FOLDER = """
REWARD_TYPE = "sequential"
from units import VALUE
def main(sample):
    import late
    from units import again
    return {"overall": VALUE + late.VALUE + again()}
def answer(response):
    import late
    return f"{VALUE} {late.VALUE}"
"""


@pytest.mark.heavy
def test_each_of_several_files_has_its_own_neighbours(tmp_path: Path) -> None:
    """Of the same names, imported at the beginning and at a call, in the processes of a pool."""
    for number in (1, 2, 3):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / f"r{number}.py").write_text(OF_FOLDER)
        (folder / "units.py").write_text(f"VALUE = {number}\ndef again():\n    import later\n    return later.VALUE\n")
        (folder / "late.py").write_text(f"VALUE = {10 * number}")
        (folder / "later.py").write_text(f"VALUE = {100 * number}")
    config = RewardConfig(
        reward_function=f"{tmp_path}/1/r1.py:main,{tmp_path}/2/r2.py:main", answer_function=f"{tmp_path}/3/r3.py:answer"
    )
    with RewardPool(config) as pool:
        for _ in range(2):
            (score,) = pool.score([{"response": "x"}]).scores
            assert (score["r1"], score["r2"]) == (111.0, 222.0)
            assert pool.extracted_answers(["x"]) == ["3 30"]


@pytest.mark.heavy
def test_the_time_for_loading_a_file_is_a_setting(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(600)\n")
    config = RewardConfig(reward_function=f"{tmp_path}/slow.py:main", start_timeout_seconds=1.5)
    with pytest.raises(
        EngineError, match=r"took more than worker\.reward\.start_timeout_seconds=1\.5\. Raise the limit"
    ):
        RewardPool(config)
