"""The scripts that plant errors and record which test runs which line: what they change, choose and find."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
from coverage import CoverageData

from lab import branches, mutants
from lab.support.mutations import lines_that_run_it, mutants_of

KNOWN = Path(__file__).with_name("known_mutants.json")
PLANTED = Path(__file__).with_name("planted_mutants.json")

SOURCE = '''"""A docstring with 1 + 1."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Bounds:
    """Nothing."""

    low: "int | None" = 3


def clipped(value: float, name: str = "é", *, last: bool = False) -> float:
    assert value > 0, f"{value + 1}"
    if not last:
        raise ValueError(1 - 2)
    for one, other in zip([value], [2.5], strict=True):
        value = one - other if one < other else min(one, -other)
    logger.info("%d", 7)
    return value
'''


def test_only_expressions_that_compute_are_changed() -> None:
    """Messages, types and decorators are not."""
    found = [(mutant.line, mutant.before, mutant.after) for mutant in mutants_of("x.py", SOURCE)]
    either = "one - other if one < other else min(one, -other)"
    assert sorted(found) == sorted([
        (10, "3", "4"), (13, "False", "True"), (15, "not last", "(last)"), (17, "2.5", "5.0"),
        (18, either, "min(one, -other) if one < other else one - other"), (18, "one - other", "(one + other)"),
        (18, "one < other", "(one <= other)"), (18, "min", "max"), (18, "-other", "(other)"),
    ])  # fmt: skip


def test_a_change_is_at_its_place_after_multibyte_letters() -> None:
    for mutant in mutants_of("x.py", SOURCE):
        assert SOURCE[mutant.start : mutant.end] == mutant.before
        changed = SOURCE[: mutant.start] + mutant.after + SOURCE[mutant.end :]
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(SOURCE))


def test_a_mutants_lines_are_those_of_its_statement() -> None:
    """Of a loop the head alone; none outside of functions, where every import runs it."""
    lines = {mutant.before: lines_that_run_it(mutant, SOURCE) for mutant in mutants_of("x.py", SOURCE)}
    assert lines["3"] is None
    assert lines["False"] is None
    assert lines["not last"] == range(15, 16)
    assert lines["2.5"] == range(17, 18)
    assert lines["one < other"] == range(18, 19)


def test_a_sample_is_a_function_of_its_seed() -> None:
    """Each room has the same share, and a room's sample does not depend on the others."""
    rooms = list(mutants.ROOMS)
    sample = mutants.sampled(24, 3, rooms)
    assert sample == mutants.sampled(24, 3, rooms) != mutants.sampled(24, 4, rooms)
    assert [mutants.room_of(mutant.file) for mutant in sample] == [room for room in rooms for _ in range(4)]
    assert mutants.sampled(8, 3, ["losses", "models"]) == sample[8:12] + sample[20:]
    for mutant in sample:
        source = (mutants.ROOT / "cepo" / mutant.file).read_text(encoding="utf-8")
        ast.parse(source[: mutant.start] + mutant.after + source[mutant.end :])


def test_rooms_and_the_core_name_files_that_exist() -> None:
    for name in (*branches.CORE, *mutants.LEFT_OUT, *(name for names in mutants.ROOMS.values() for name in names)):
        assert (mutants.ROOT / "cepo" / name).exists(), name
    assert mutants.room_of("algorithms/references.py") == "teacher"
    assert mutants.room_of("algorithms/grpo.py") == "algorithms"
    assert mutants.room_of("models/head_kernel.py") is mutants.room_of("report/page.py") is None


@pytest.fixture
def recorded(tmp_path: Path) -> mutants.Reach:
    """`-difference` in objective.py is run by one test, by a fixture of b.py, and by a child process of c.py."""
    seconds = {"tests/a.py::one": 3.0, "tests/b.py::one": 1.0, "tests/b.py::two[a - b]": 1.0, "tests/c.py::one": 9.0,
               "tests/c.py::two": 1.0, "tests/d.py::one": 0.1}  # fmt: skip
    (tmp_path / "seconds-1.json").write_text(json.dumps(seconds), encoding="utf-8")
    data = CoverageData(str(tmp_path / "data"))
    (planted,) = (mutant for mutant in objective_mutants() if mutant.before == "-difference")
    for context in ("tests/a.py::one", "tests/b.py", "tests/c.py::one (call)"):
        data.set_context(context)
        data.add_arcs({"/somewhere/cepo/losses/kl.py": [(planted.line - 1, planted.line), (planted.line, -1)]})
    data.set_context("tests/d.py::one")
    data.add_arcs({"/somewhere/cepo/losses/base.py": [(1, -1)]})
    data.write()
    return mutants.Reach(tmp_path)


def objective_mutants() -> list[mutants.Mutant]:
    return mutants_of("losses/kl.py", (mutants.ROOT / "cepo" / "losses" / "kl.py").read_text(encoding="utf-8"))


def test_quick_files_with_tests_of_the_line_come_first(recorded: mutants.Reach) -> None:
    """2 and 3 seconds fit into the first stage of 8; those of 9 take a second one, unless the budget is spent."""
    (planted,) = (mutant for mutant in objective_mutants() if mutant.before == "-difference")
    first = ["tests/b.py::one", "tests/b.py::two[a - b]", "tests/a.py::one"]
    assert recorded.stages(planted, 20, without=()) == [first, ["tests/c.py::one"]]
    assert recorded.stages(planted, 10, without=["tests/b.py::one"]) == [first[1:]]
    base = (mutants.ROOT / "cepo" / "losses" / "base.py").read_text(encoding="utf-8")
    constant = next(mutant for mutant in mutants_of("losses/base.py", base) if mutant.before == "20.0")
    assert "tests/d.py::one" in recorded.stages(constant, 20, without=())[0], "every test of a file runs its constants"
    assert recorded.test_in("FAILED tests/b.py::two[a - b] - AssertionError: 1 - 2") == "tests/b.py::two[a - b]"


def test_every_known_equivalent_is_current_and_has_a_reason() -> None:
    known = json.loads(mutants.EQUIVALENT.read_text(encoding="utf-8"))
    assert all(reason.strip() for reason in known.values())
    for key in known:
        file = key.partition(": ")[0]
        source = (mutants.ROOT / "cepo" / file).read_text(encoding="utf-8")
        assert key in {mutant.key for mutant in mutants_of(file, source)}, key


def test_tests_of_the_smoke_exist_and_name_20_mutants() -> None:
    known: dict[str, str] = json.loads(KNOWN.read_text(encoding="utf-8"))
    assert len(known) == 20
    for test in known.values():
        file, _, name = test.partition("::")
        assert f"def {name.partition('[')[0]}(" in (mutants.ROOT / file).read_text(encoding="utf-8"), test


def test_changes_made_by_hand_are_current_and_have_a_test() -> None:
    """Each text is once in its file; errors that tests once missed are among them."""
    planted = mutants.known_mutants(PLANTED)
    assert len(planted) == len(json.loads(PLANTED.read_text(encoding="utf-8")))
    for test in planted.values():
        file, _, name = test.partition("::")
        assert f"def {name.partition('[')[0]}(" in (mutants.ROOT / file).read_text(encoding="utf-8"), test


@pytest.mark.heavy
def test_every_change_made_by_hand_is_noticed() -> None:
    command = [sys.executable, str(mutants.ROOT / "lab" / "mutants.py"), "--known", str(PLANTED)]
    done = subprocess.run(command, cwd=mutants.ROOT, capture_output=True, text=True, check=False, timeout=600)
    verdicts = [line.split()[1] for line in done.stdout.splitlines() if line.partition("/")[0].isdigit()]
    assert verdicts == ["killed"] * len(mutants.known_mutants(PLANTED)), done.stdout + done.stderr
    assert done.returncode == 0


@pytest.mark.heavy
def test_20_known_mutants_are_killed_and_one_that_is_not_shows(tmp_path: Path) -> None:
    """One more is planted against a test of something else, which cannot notice it."""
    known: dict[str, str] = json.loads(KNOWN.read_text(encoding="utf-8"))
    (extra,) = (mutant.key for mutant in objective_mutants() if mutant.before == "-difference")
    assert extra not in known
    file = tmp_path / "known.json"
    file.write_text(
        json.dumps(known | {extra: "tests/files/test_trees.py::test_texts_change_in_mappings_and_lists_at_any_depth"}),
        encoding="utf-8",
    )
    command = [sys.executable, str(mutants.ROOT / "lab" / "mutants.py"), "--known", str(file)]
    done = subprocess.run(command, cwd=mutants.ROOT, capture_output=True, text=True, check=False, timeout=600)
    verdicts = [line.split()[1] for line in done.stdout.splitlines() if line.partition("/")[0].isdigit()]
    assert verdicts == ["killed"] * 20 + ["SURVIVED"], done.stdout + done.stderr
    assert done.returncode == 1


@pytest.mark.heavy
def test_branches_and_lines_of_a_test_file_are_recorded(tmp_path: Path) -> None:
    """test_trees.py takes every branch of trees.py; a mutant of it is given that file's tests."""
    command = [sys.executable, str(mutants.ROOT / "lab" / "branches.py"), "--folder", str(tmp_path)]
    done = subprocess.run(
        [*command, "tests/files/test_trees.py"], capture_output=True, text=True, check=True, timeout=300
    )
    assert "| ALL CORE | " in done.stdout
    assert branches.taken(tmp_path)["files/trees.py"][0] > 0
    source = (mutants.ROOT / "cepo" / "files" / "trees.py").read_text(encoding="utf-8")
    inside = [each for each in mutants_of("files/trees.py", source) if lines_that_run_it(each, source)]
    (stage,) = mutants.Reach(tmp_path).stages(inside[0], 60, without=())
    assert all(test.startswith("tests/files/test_trees.py::") for test in stage)
