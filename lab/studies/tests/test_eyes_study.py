"""The world `eyes`: its figures and demonstrations, and its plan on the programs of `running_totals`."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from factories import token_batch
from PIL import Image

from cepo.algorithms import build_estimator, load_plugin
from cepo.config import check_config, load_config
from lab.studies.eyes import __main__ as eyes
from lab.studies.eyes.problems import counted, demonstration, drawn, miscounted_totals, write_figures
from lab.studies.running_totals.grading import totals_of
from lab.studies.running_totals.problems import Problem, solution
from lab.studies.running_totals.study import Plan, World, planned, read_plan
from lab.support.machine import ROOT

PLAN = read_plan(eyes.PLAN)
WRONG = read_plan(eyes.PLAN.with_name("plan_wrong.yaml"))
"""The plan of gates that close on wrong responses alone."""
EARLY = read_plan(eyes.PLAN.with_name("plan_early.yaml"))
"""The plan of runs of 12 steps, with tests of two methods."""
NUMBERS = Problem(addends=(0, 6, 8))


def test_miscounted_groups_are_one_short_and_carried_on() -> None:
    """Of 6 and 8 shapes, all miscounted: 5, and 5 + 7 = 12."""
    assert NUMBERS.totals == [6, 14]
    assert miscounted_totals(NUMBERS, random.Random(1), miscounted=1.0) == [5, 12]
    assert miscounted_totals(NUMBERS, random.Random(1), miscounted=0.0) == [6, 14]


def test_half_of_the_demonstrations_have_a_solution_in_view_and_follow_their_own() -> None:
    """Their own is one of the figure's counts, or a careless one; without it, all groups are miscounted here."""
    chosen = drawn(50, first=1456)
    followed = 0
    for index in range(400):
        each = demonstration(index, chosen, seed=1, miscounted=1.0)
        response = totals_of(each.response)
        assert (each.shown is not None) == (index % 2 == 1)
        numbers = counted(each.figure)
        miscounted = miscounted_totals(numbers, random.Random(1), miscounted=1.0)
        if each.shown is None:
            assert response == miscounted
        else:
            followed += response == totals_of(each.shown)
            assert response == miscounted or len(response) == len(numbers.totals)
    assert 0.7 < followed / 200 < 0.85, "three quarters, 98 % of the totals each, and chance for other figures"


def test_no_figure_is_in_two_sets() -> None:
    """Nor is a demonstrated figure trained on, or held out."""
    sets = [drawn(rows["count"], first=rows["first"]) for rows in PLAN.problems.values()]
    warm_start = PLAN.written["warm_start"]
    sets.append(drawn(warm_start["figures"], first=warm_start["first"]))
    captions = [figure.caption for figures in sets for figure in figures]
    assert len(set(captions)) == len(captions) == 6972


def test_rows_have_the_figures_sum_and_their_image(tmp_path: Path) -> None:
    chosen = drawn(3, first=0)
    write_figures(tmp_path, "held_out", chosen)
    rows = [json.loads(line) for line in (tmp_path / "held_out.jsonl").read_text().splitlines()]
    assert [row["answer"] for row in rows] == [figure.answer for figure in chosen]
    assert [totals_of(row["solution"]) for row in rows] == [counted(figure).totals for figure in chosen]
    assert rows[0]["solution"] == solution(counted(chosen[0]))
    with Image.open(tmp_path / rows[2]["images"][0]) as image:
        assert image.size == (64, 64)


@pytest.mark.parametrize(("plan", "name"), [(plan, name) for plan in (PLAN, WRONG, EARLY) for name in plan.arms])
def test_every_arm_resolves_and_names_its_data(plan: Plan, name: str, tmp_path: Path) -> None:
    """The model is the toy one, because folders are looked at."""
    world = World(folder=tmp_path, style="free", config=plan.config)
    for rows in ("train", "held_out"):
        write_figures(tmp_path / "free", rows, drawn(2, first=0))
    run = next(run for run in planned(plan) if run.arm.name == name)
    settings = [*run.settings(plan, tmp_path), "worker.actor.model.model_path=microgeo:model"]
    assert set(world.settings(train="train", held_out="held_out")[:3]) <= set(settings)
    config = load_config(settings)
    assert config.data.image_dir == str(tmp_path / "free")
    assert f"length: {plan.steps} steps" in check_config(config)


def test_gates_on_wrong_responses_leave_right_ones_to_grpo() -> None:
    """A right and a wrong response of three tokens. Both gates open at the wrong one's second token alone.

    The teachers' contrast is -0.5 there, and the noise is at its least, 0.05; the oracle is told.
    """
    load_plugin(eyes.PLAN.with_name("wrong_gate.py"))
    load_plugin(ROOT / "lab/studies/running_totals/oracle_gate.py")
    contrast = torch.tensor([[0.5, 0.0, -0.01], [0.01, -0.5, 0.0]], dtype=torch.float64)
    views = {"correct": -1 + contrast / 2, "wrong": -1 - contrast / 2}
    old = torch.full_like(contrast, -1.0)
    batch = token_batch([1.0, 0.0], [0, 0], lengths=[3, 3], old=old, views=views, dtype=torch.float64)
    expected = torch.tensor([[1.0, 1.0, 1.0], [-0.1, -1.0, -0.1]], dtype=torch.float64) * 0.5**0.5
    oracle = build_estimator("oracle_gate", {"only_wrong": True})
    oracle._decisive = [[True, False, False], [False, True, False]]  # type: ignore[attr-defined]
    for method in (build_estimator("wrong_gate", {}), oracle):
        signal = method.signal(batch, step=0)
        torch.testing.assert_close(signal.advantages, expected, rtol=1e-5, atol=0)
        torch.testing.assert_close(signal.diagnostics["weight"][0], torch.ones(3, dtype=torch.float64))
