"""The comparison of configuration files over seeds."""

from __future__ import annotations

from pathlib import Path

from research.seeds import Outcome, arguments, differences_table


def test_files_and_settings_stand_on_both_sides_of_the_options() -> None:
    options = arguments(["first", "second", "--seeds", "4", "5", "--out", "runs", "trainer.max_steps=2"])
    assert options.words == ["first", "second", "trainer.max_steps=2"]
    assert (options.seeds, options.out) == ([4, 5], Path("runs"))


def test_differences_are_paired_by_seed_with_their_error() -> None:
    """Training: 0.5 and 0.6 against 0.4 and 0.3 gives +10 and +30 points: a mean of 20, with an error of 10."""
    first = [Outcome(training=0.4, validation=0.5), Outcome(training=0.3, validation=0.5)]
    second = [Outcome(training=0.5, validation=0.5), Outcome(training=0.6, validation=0.6)]
    lines = differences_table({"first": first, "second": second}).splitlines()
    assert lines[2] == "| first | 35.0 | +0.0 ± 0.0 | 50.0 | +0.0 ± 0.0 |"
    assert lines[3] == "| second | 55.0 | +20.0 ± 10.0 | 55.0 | +5.0 ± 5.0 |"


def test_one_seed_has_no_error() -> None:
    lines = differences_table({"first": [Outcome(training=0.4, validation=0.5)]}).splitlines()
    assert lines[2] == "| first | 40.0 | +0.0 | 50.0 | +0.0 |"
