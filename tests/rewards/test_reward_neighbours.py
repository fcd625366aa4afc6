"""A reward file imports what lies beside it, as a script does; a message advises nobody to install anything."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from cepo.config.worker_schema import RewardConfig
from cepo.errors import EngineError, RewardError
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


@pytest.mark.heavy
@pytest.mark.parametrize("name", CASES)
def test_what_lies_beside_a_reward_file_is_imported(name: str, results: dict[str, Any]) -> None:
    words = CASES[name].get("lacks")
    if words is None:
        assert results[name] == [0.25, "0.25"]
        return
    assert words in results[name]
    assert "pip install" not in results[name]


OF_FOLDER = """
REWARD_TYPE = "sequential"
from {module} import VALUE
def main(sample):
    import {module}_late
    return {{"overall": VALUE + {module}_late.VALUE}}
"""


def write_reward(folder: Path, name: str, module: str, value: int) -> str:
    """Writes a reward file with two modules beside it; returns its function's name."""
    folder.mkdir()
    (folder / f"{name}.py").write_text(OF_FOLDER.format(module=module))
    (folder / f"{module}.py").write_text(f"VALUE = {value}")
    (folder / f"{module}_late.py").write_text(f"VALUE = {10 * value}")
    return f"{folder / name}.py:main"


@pytest.mark.heavy
def test_each_of_several_files_has_its_own_neighbours(tmp_path: Path) -> None:
    """Imported at the beginning and at a call, in the processes of a pool."""
    functions = [
        write_reward(tmp_path / name, f"r_{name}", f"units_{name}", value) for name, value in (("a", 1), ("b", 2))
    ]
    with RewardPool(RewardConfig(reward_function=",".join(functions))) as pool:
        (score,) = pool.score([{"response": "x"}]).scores
        assert score["r_a"] == 11.0
        assert score["r_b"] == 22.0


@pytest.mark.heavy
def test_modules_of_one_name_beside_two_files_are_refused(tmp_path: Path) -> None:
    """One would be imported in place of the other."""
    functions = [write_reward(tmp_path / name, f"r_{name}", "units", value) for name, value in (("a", 1), ("b", 2))]
    with pytest.raises(RewardError, match=r"units\.py are modules of one name"):
        RewardPool(RewardConfig(reward_function=",".join(functions)))


@pytest.mark.heavy
def test_the_time_for_loading_a_file_is_a_setting(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(600)\n")
    config = RewardConfig(reward_function=f"{tmp_path}/slow.py:main", start_timeout_seconds=1.5)
    with pytest.raises(
        EngineError, match=r"took more than worker\.reward\.start_timeout_seconds=1\.5\. Raise the limit"
    ):
        RewardPool(config)


def test_a_file_of_two_functions_is_found_by_one_finder(tmp_path: Path) -> None:
    """A worker loads a file once for the reward and once for the answer; every later import asks each finder."""
    file = tmp_path / "reward.py"
    file.write_text(f"VALUE = 1\n{FUNCTIONS}")
    program = """
import sys
from cepo.rewards.contract import load_answer_function, load_reward
before = len(sys.meta_path), len(sys.path)
load_reward(f"{sys.argv[1]}:main", {}), load_answer_function(f"{sys.argv[1]}:answer")
print(len(sys.meta_path) - before[0], len(sys.path) - before[1])
"""
    done = subprocess.run([sys.executable, "-P", "-c", program, str(file)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "1"]
