"""Common mistakes end with their exit code, in seconds, without a traceback, and with what is wrong and what to do."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest
from isolation import own_caches, restored_process
from mistakes import MISTAKES, PAGE, Mistake, build_world, run_as_command

import cepo.train
from cepo.cli import main

pytestmark = pytest.mark.heavy

AS_COMMANDS = (
    "a YAML file without config=",
    "a missing library of the reward",
    pytest.param("a wrong image column", marks=pytest.mark.nightly("imports torch in a process of its own")),
)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mistakes")


@pytest.fixture(scope="module")
def run(world: Path, tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """The arguments of a run that is right."""
    with own_caches(tmp_path_factory.mktemp("caches")):
        yield build_world(world, tiny_model_folder)


def test_mistakes_have_names_of_their_own_and_messages() -> None:
    assert len({mistake.name for mistake in MISTAKES}) == len(MISTAKES)
    assert all(mistake.parts for mistake in MISTAKES)


@pytest.mark.parametrize("mistake", MISTAKES, ids=[mistake.name for mistake in MISTAKES])
def test_a_mistake_ends_soon_with_its_code_and_the_remedy(
    mistake: Mistake,
    run: list[str],
    world: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def no_model(*_: object) -> None:
        raise AssertionError("a model was about to be loaded")

    if not mistake.loads_model:
        monkeypatch.setattr(cepo.train, "build_backend", no_model)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    for name, value in {"HF_HUB_OFFLINE": "1", **mistake.variables}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(world)
    start = time.process_time()
    with restored_process():
        code = main(mistake.words(run, world))
    seconds = time.process_time() - start
    shown = capsys.readouterr()
    output = shown.out + shown.err + caplog.text
    assert mistake.faults(code, output, seconds, world) == [], output
    assert seconds < Mistake.limit_seconds
    if not mistake.loads_model:
        assert not (world / "run").exists()


@pytest.mark.parametrize("name", AS_COMMANDS)
def test_some_mistakes_as_commands_of_their_own_end_alike(name: str, run: list[str], world: Path) -> None:
    (mistake,) = [each for each in MISTAKES if each.name == name]
    code, output, seconds = run_as_command(mistake, run, world)
    assert mistake.faults(code, output, seconds, world) == [], output


def test_the_page_of_mistakes_has_a_row_for_each_with_its_code() -> None:
    rows = re.findall(r"^\| (.+?) \| (\d+) \| ([\d.]+) \|", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert [(name, int(code)) for name, code, _ in rows] == [(mistake.name, mistake.code) for mistake in MISTAKES]
    assert all(float(seconds) <= each.limit_seconds for (_, _, seconds), each in zip(rows, MISTAKES, strict=True))
