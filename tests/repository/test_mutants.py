"""The script that plants errors: what it changes, what it leaves alone, and that it finds the test that notices."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from benchmarks import mutants

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
    found = [(mutant.line, mutant.before, mutant.after) for mutant in mutants.mutants_of("x.py", SOURCE)]
    assert sorted(found) == sorted(
        [
            (10, "3", "4"),
            (13, "False", "True"),
            (15, "not last", "(last)"),
            (17, "2.5", "5.0"),
            (
                18,
                "one - other if one < other else min(one, -other)",
                "min(one, -other) if one < other else one - other",
            ),
            (18, "one - other", "(one + other)"),
            (18, "one < other", "(one <= other)"),
            (18, "min", "max"),
            (18, "-other", "(other)"),
        ]
    )


def test_a_change_is_at_its_place_after_multibyte_letters() -> None:
    for mutant in mutants.mutants_of("x.py", SOURCE):
        assert SOURCE[mutant.start : mutant.end] == mutant.before
        changed = SOURCE[: mutant.start] + mutant.after + SOURCE[mutant.end :]
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(SOURCE))


def test_a_sample_is_a_function_of_its_seed() -> None:
    """Each package has the same share."""
    sample = mutants.sampled(20, 3, mutants.PACKAGES)
    assert sample == mutants.sampled(20, 3, mutants.PACKAGES) != mutants.sampled(20, 4, mutants.PACKAGES)
    counts = [sum(mutant.file.startswith(f"{name}/") for mutant in sample) for name in mutants.PACKAGES]
    assert counts == [4, 4, 4, 4, 4]
    for mutant in sample:
        source = (mutants.REPOSITORY / "cepo" / mutant.file).read_text(encoding="utf-8")
        ast.parse(source[: mutant.start] + mutant.after + source[mutant.end :])


def test_every_known_equivalent_is_current_and_has_a_reason() -> None:
    known = json.loads(mutants.EQUIVALENT.read_text(encoding="utf-8"))
    assert all(reason.strip() for reason in known.values())
    for key in known:
        file = key.partition(": ")[0]
        source = (mutants.REPOSITORY / "cepo" / file).read_text(encoding="utf-8")
        assert key in {mutant.key for mutant in mutants.mutants_of(file, source)}, key


def test_every_module_has_tests_that_exist() -> None:
    files = [
        str(path.relative_to(mutants.REPOSITORY / "cepo"))
        for name in mutants.PACKAGES
        for path in (mutants.REPOSITORY / "cepo" / name).rglob("*.py")
    ]
    assert len(files) > 60
    for file in files:
        stages = mutants.tests_for(file)
        assert len(stages) >= 2
        assert all((mutants.REPOSITORY / test).exists() for stage in stages for test in stage), file


@pytest.mark.heavy
def test_a_planted_error_is_killed_by_its_test_and_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = "algorithms/settings.py"
    source = (mutants.REPOSITORY / "cepo" / file).read_text(encoding="utf-8")
    (planted,) = (
        mutant
        for mutant in mutants.mutants_of(file, source)
        if mutant.before == "1.0 - (step - self.lambda_warmup_steps) / self.lambda_decay_steps"
    )
    monkeypatch.setattr(mutants, "tests_for", lambda file: [["tests/algorithms/test_schedules.py"]])
    place = mutants.Copy(tmp_path, seconds=300)
    assert place.failure(["tests/algorithms/test_schedules.py"]) is None
    killed = place.killed_by(planted)
    assert killed is not None
    assert killed.startswith("FAILED tests/algorithms/test_schedules.py::")
    assert (tmp_path / "cepo" / file).read_text(encoding="utf-8") == source
