"""The study of running totals: its plan resolves, its order, its statistics by hand, and its gates."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest

from cepo.config import check_config, load_config
from lab.studies.running_totals import tables
from lab.studies.running_totals.gates import Bound, Tokens, bounds_of, robust_deviation, verdicts
from lab.studies.running_totals.study import World, planned, read_plan, run_all
from lab.studies.support.compared_runs import Record, by_name_and_seed
from lab.studies.support.marked_tables import END, start_mark
from lab.studies.support.paired_test import compared, quantile
from lab.support.machine import ROOT

PLAN = read_plan()


def record(arm: str, seed: int, accuracy: float, held_out: float = 0.5) -> Record:
    """A run with this accuracy at each of its steps."""
    return {
        "arm": arm,
        "seed": seed,
        "trained": [accuracy] * PLAN.steps,
        "held_out": {"12": held_out, "24": held_out},
        "step_seconds": [30.0] * PLAN.steps,
        "tokens": {"generate": 1000, "score": 0, "teachers": 500, "update": 3000},
    }


def test_pairs_of_the_primary_comparison_come_first() -> None:
    runs = list(planned(PLAN))
    assert len(runs) == sum(len(arm.seeds) for arm in PLAN.arms.values())
    primary = PLAN.written["primary"]
    first = [(run.arm.name, run.seed) for run in runs[:4]]
    assert first == [("grpo", 1), (primary, 1), ("grpo", 2), (primary, 2)]
    assert {run.arm.name for run in runs[:16]} == {"grpo", primary}
    assert len({run.folder(Path("out")) for run in runs}) == len(runs)


def test_every_arm_resolves_and_names_its_data(tmp_path: Path) -> None:
    """The model is the toy one, because folders are looked at."""
    for style in ("free", "fixed"):
        World(folder=tmp_path, style=style).write_data(PLAN)  # type: ignore[arg-type]
    for run in planned(PLAN):
        if run.seed != 1:
            continue
        settings = run.settings(PLAN, tmp_path)
        settings.append("worker.actor.model.model_path=microgeo:model")
        plan = check_config(load_config(settings))
        assert f"length: {PLAN.steps} steps" in plan
        assert any(setting.endswith(f"{run.arm.style}/{run.arm.data}.jsonl") for setting in settings)


def test_recorded_and_finished_runs_are_not_trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All but two are recorded, one of these two is finished; no run is started as none may be."""
    runs = list(planned(PLAN))
    plan = replace(PLAN, results_folder=tmp_path)
    plan.results.write_text(json.dumps({"runs": [{"arm": run.arm.name, "seed": run.seed} for run in runs[2:]]}))
    done = runs[0].folder(tmp_path)
    done.mkdir()
    (done / "done").touch()
    assert run_all(plan, tmp_path, tmp_path, most=0) == 0
    assert "1 runs are left" in capsys.readouterr().out


@pytest.mark.parametrize(("freedom", "expected"), [(1, 12.706), (7, 2.365), (11, 2.201)])
def test_quantiles_are_those_of_tables(freedom: int, expected: float) -> None:
    assert quantile(freedom) == pytest.approx(expected, abs=2e-3)


def test_a_comparison_by_hand() -> None:
    """Differences of 2, 4 and 6 points: mean 4, deviation 2, error 1.155, interval 4.303 errors to each side."""
    found = compared([0.02, 0.04, 0.06])
    assert found is not None
    assert (found.mean, found.error) == pytest.approx((4.0, 1.1547), abs=1e-3)
    assert (found.low, found.high) == pytest.approx((4 - 4.969, 4 + 4.969), abs=5e-3)
    assert found.p == pytest.approx(0.0742, abs=1e-3)
    assert compared([0.02]) is None


def test_the_interaction_by_hand() -> None:
    """Means of 4 and 1 points; variances of 4 over 3 and 2 over 2 seeds: 3 points, error sqrt(4 / 3 + 2 / 2)."""
    found = tables.interaction([0.02, 0.04, 0.06], [0.0, 0.02])
    assert found == pytest.approx((3.0, (4 / 3 + 2 / 2) ** 0.5))


def test_the_table_pairs_an_arm_with_its_own_baseline() -> None:
    primary = PLAN.written["primary"]
    records = [
        record("grpo", 1, 0.40),
        record("grpo", 2, 0.50),
        record(primary, 1, 0.45),
        record(primary, 2, 0.57),
        record("grpo, one phrasing", 1, 0.60),
        record("gate, one phrasing", 1, 0.61),
    ]
    by_arm = by_name_and_seed(records, kind="arm", names=list(PLAN.arms))
    lines = tables.accuracy_table(PLAN, by_arm).splitlines()
    cells = {line.strip("| ").split(" | ")[0]: [text.strip() for text in line.strip("|").split("|")] for line in lines}
    assert cells[primary][1:4] == ["2 of 8", "51.0 ± 6.0", "+6.0 ± 1.0"]
    assert cells["gate, one phrasing"][3] == "+1.0"
    assert cells["grpo"][3] == ""
    assert cells["grpo, one phrasing"][3] == ""


def test_a_plan_that_validates_at_the_end_alone_tests_each_arm_it_names() -> None:
    plan = read_plan(ROOT / "lab" / "studies" / "eyes" / "plan_early.yaml")
    assert list(tables.measures(plan)) == ["rollouts %", "held out after 12 %"]
    records = [
        {"arm": arm, "seed": seed, "trained": [trained + 0.1 * seed], "held_out": {"12": 0.5}}
        for seed in (1, 2)
        for arm, trained in (("grpo", 0.4), ("visual", 0.5), ("gate on wrong", 0.3))
    ]
    lines = tables.lines_of_the_test(plan, by_name_and_seed(records, kind="arm", names=list(plan.arms)))
    assert [line.partition(", 95 %")[0] for line in lines] == [
        "- visual minus grpo, rollouts: +10.0 ± 0.0 points",
        "- visual minus grpo, held out after 12: +0.0 ± 0.0 points",
        "- gate on wrong minus grpo, rollouts: -10.0 ± 0.0 points",
        "- gate on wrong minus grpo, held out after 12: +0.0 ± 0.0 points",
    ]


def test_records_and_page_are_written(tmp_path: Path) -> None:
    plan = replace(PLAN, results_folder=tmp_path, charts_folder=tmp_path)
    page = tmp_path / "page.md"
    page.write_text(f"Before.\n{start_mark(plan.program)}{END}After.\n", encoding="utf-8")
    runs = [record(arm, seed, 0.4 + 0.01 * seed) for seed in (1, 2) for arm in ("grpo", PLAN.written["primary"])]
    plan.results.write_text(json.dumps({"runs": runs}), encoding="utf-8")
    tables.write_records(plan, tmp_path, page=page)
    assert len(json.loads(plan.results.read_text())["runs"]) == 4
    assert plan.chart.stat().st_size > 1000
    text = page.read_text(encoding="utf-8")
    assert text.startswith("Before.\n")
    assert text.endswith("After.\n")
    assert "contrast gate minus grpo, rollouts: +0.0 ± 0.0 points" in text


def test_bounds_hold_at_their_ends() -> None:
    bounds = bounds_of({"share": {"least": 0.25, "most": 0.45}, "below": {"most": 0}})
    assert verdicts({"share": 0.25, "below": 0.0}, bounds) == {"share": True, "below": True}
    assert verdicts({"share": 0.46, "below": 0.1}, bounds) == {"share": False, "below": False}
    assert not Bound(name="ratio", least=4).holds(float("nan"))


def test_style_is_what_states_no_number_and_had_an_alternative() -> None:
    """Of four tokens the first is a digit, the second was certain, and the third and fourth are style."""
    columns: dict[str, Any] = {
        "delta": [3.0, 0.0, 0.1, -0.3],
        "log_probs": numpy.log([0.5, 0.99, 0.3, 0.25]),
        "gate": [1.0, 0.1, 0.1, 0.1],
        "is_number": [True, False, False, False],
        "is_decisive": [True, False, False, False],
        "of_right": [True] * 4,
    }
    tokens = Tokens(**{name: numpy.array(values) for name, values in columns.items()})
    assert tokens.is_style.tolist() == [False, False, True, True]
    assert robust_deviation(tokens.delta[tokens.is_style]) == pytest.approx(0.2 / 0.6745)


def test_the_table_of_gates_marks_what_fails() -> None:
    """All figures are at their bounds, but for those of `stopped` and of the knowledge, which is undefined."""
    bounds = PLAN.written["gates"]["bounds"]
    figures: dict[str, float | None] = {name: next(iter(bound.values())) for name, bound in bounds.items()}
    figures["stopped"] = 0.5
    figures["knowledge_of_right_over_limit"] = None
    head, _, asked, row = tables.gates_table(PLAN, {"after": {"figures": figures}}).splitlines()
    cells = dict(zip(head.split(" | "), row.split(" | "), strict=True))
    assert asked.split(" | ")[head.split(" | ").index("stopped")] == "≥ 0.95"
    assert cells["stopped"] == "**0.50**"
    assert cells["knowledge of right over limit"] == "**undefined**"
    assert row.count("**") == 4
