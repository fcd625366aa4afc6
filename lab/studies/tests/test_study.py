"""The study of methods: what it plans, how it judges, and that its smoke profile runs from a command to a page."""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from factories import log_probs_like, token_batch

from cepo.algorithms import build_estimator, load_plugin
from cepo.config import check_config, load_config
from lab.studies import study
from lab.studies.support.study_page import study_page
from lab.studies.support.study_parts import (
    comparison_parts,
    comparison_sentences,
    interval,
    speed_parts,
    steps_to_reach,
)
from lab.studies.support.study_plan import (
    ARMS,
    EQUAL_RATES,
    PROFILES,
    Arm,
    Run,
    arguments,
    comparisons,
    first_runs,
    own_rate_runs,
)
from lab.studies.support.study_statistics import Runs, adjusted_cells, best_rate, holm, p_text, p_value, tail, verdict

REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("name", PROFILES)
def test_a_plan_names_every_run_once_and_compares_equal_rollouts(name: str) -> None:
    profile = PROFILES[name]
    own = [run for world in profile.worlds for run in own_rate_runs(profile, world, {"grpo": 3e-4, "cepo": 1e-4})]
    runs = [*first_runs(profile), *own]
    folders = {run.folder for run in runs}
    assert len(folders) == len(set(runs))
    # What is tuned is never reported: other problems and other seeds.
    assert not {run.seed for run in runs if run.tuning} & {run.seed for run in runs if not run.tuning}
    compared = [other for world in profile.worlds for other in comparisons(profile, world)]
    assert {run.rollouts for run in runs} == {profile.rollouts, *(other.rollouts for other in compared)}
    assert len({(run.world, run.batch, run.rollouts) for run in runs}) == len({(run.world, run.batch) for run in runs})
    for world in profile.worlds:
        for other in comparisons(profile, world):
            size = world, EQUAL_RATES[world], other.batch, other.rollouts
            made = {(run.arm, run.seed) for run in runs if (run.world, run.rate, run.batch, run.rollouts) == size}
            assert set(itertools.product(other.arms, other.seeds)) <= made
    for run in runs:
        assert run.rollouts % run.batch == 0
        assert run.batch % ARMS[run.arm].group_size == 0
        # A dose of a world has its arms, and some of its own.
        assert {run.world, run.world.partition("-")[0]} & set(ARMS[run.arm].worlds)


@pytest.mark.parametrize(("world", "file"), [("shapes", "configs/microgeo/base"), ("chain", "lab/studies/chain")])
def test_the_equal_rate_of_a_world_is_its_configurations(world: str, file: str) -> None:
    config = load_config([f"config={REPOSITORY}/{file}.yaml"])
    assert config.worker.actor.optim.lr == EQUAL_RATES[world]
    rates = {run.rate for run in first_runs(PROFILES["small"]) if run.world == world and not run.tuning}
    assert sorted(rates) == pytest.approx([EQUAL_RATES[world], 5 * EQUAL_RATES[world]])


@pytest.mark.parametrize("arm", ARMS.values(), ids=lambda arm: arm.name)
def test_every_arm_has_a_method_and_settings_that_exist(arm: Arm, tmp_path: Path) -> None:
    world = tmp_path / "world"
    (world / "model").mkdir(parents=True)
    for name in ("train.parquet", "validation.parquet"):
        (world / name).touch()
    profile = PROFILES["full"]
    run = Run(world=arm.worlds[-1], arm=arm.name, rate=1e-4, batch=32, rollouts=profile.rollouts, seed=3)
    config = load_config(arguments(profile, run, world, tmp_path / "run"))
    assert check_config(config)
    assert config.algorithm.adv_estimator == arm.estimator
    assert config.worker.rollout.n * config.data.rollout_batch_size == 32
    assert config.trainer.max_steps == 400
    for key, value in arm.settings.items():
        found: Any = config.methods[arm.estimator]
        for part in key.split("."):
            found = found[part]
        assert found == {"half": 200, "fifth": 80, "all": 400}.get(value, value)


def test_students_test_and_holms_order_are_those_of_the_tables() -> None:
    # Quantiles of Student's t from printed tables: 2.776 at 4 degrees of freedom, 12.706 at 1.
    assert tail(2.776, 4) == pytest.approx(0.05, abs=1e-4)
    assert tail(12.706, 1) == pytest.approx(0.05, abs=1e-4)
    # Mean 2, standard error 1, so t = 2 with 4 degrees of freedom.
    spread = [2 + step * 5**0.5 / 2.5**0.5 for step in (-2, -1, 0, 1, 2)]
    assert p_value(spread) == pytest.approx(0.1161, abs=1e-4)
    assert holm([0.01, None, 0.04, 0.03]) == [pytest.approx(0.03), None, pytest.approx(0.06), pytest.approx(0.06)]


@pytest.mark.parametrize(
    ("differences", "said"),
    [
        ([0.05, 0.06, 0.04, 0.05, 0.05], "seen"),
        ([-0.05, -0.06, -0.04, -0.05, -0.05], "reversed"),
        ([0.05, -0.06, 0.04, -0.05, 0.05], "not seen"),
        ([0.05], "one run"),
        ([0.0, 0.0], "not seen"),
        ([], "not run"),
    ],
)
def test_a_verdict_follows_from_sign_and_noise(differences: list[float], said: str) -> None:
    assert verdict(differences) == said


def test_the_best_rate_is_the_lowest_of_the_best() -> None:
    finals = {1e-4: (0.5, 0.7), 3e-5: (0.6, 0.6), 3e-4: (0.4, 0.5)}
    records = [
        {"rate": rate, "steps": 2, "sampled": {"0": 0.9, "2": value}} for rate, ends in finals.items() for value in ends
    ]
    assert best_rate(records) == 3e-5


def records(arm: str, ends: list[float], *, first_seed: int = 1, **own: Any) -> list[dict[str, Any]]:
    """Runs of an arm in the small profile, one per seed."""
    plain = {
        "world": "shapes", "arm": arm, "rate": 1e-4, "batch": 64, "tuning": False, "steps": 30, "held_out": {}
    } | own  # fmt: skip
    half, last = str(plain["steps"] // 2), str(plain["steps"])
    cost = dict.fromkeys(("processor_seconds", "rollouts", "generate", "score", "teachers", "update"), 3600)
    evidence = {"positive": [0.1, 0.2, 0.3], "negative": [0.1, 0.1, 0.2], "clipped": [0.1, 0.1, 0.1]}
    return [
        {
            "trained": [0.5] * 20 + [end] * 10,
            **plain,
            **cost,
            "seed": seed,
            "sampled": {"0": 0.5, half: 0.6, last: end},
            "greedy": {"0": 0.9, half: 0.9, last: 0.8},
            "hint_gap_wrong": {"0": -0.2, last: None},
            "evidence": evidence,
        }
        for seed, end in enumerate(ends, start=first_seed)
    ]


def chain_runs(shares: dict[str, list[float]], *, before: float | None = None, **own: Any) -> list[dict[str, Any]]:
    """Runs of 60 steps: so many shares as seeds in the last 20 steps, and `before` (the same) in the first 40."""
    plain = {"world": "chain", "batch": 32, "rate": 3e-5, "steps": 60} | own
    return [
        record | {"trained": [end if before is None else before] * 40 + [end] * 20}
        for arm, ends in shares.items()
        for record, end in zip(records(arm, ends, **plain), ends, strict=True)
    ]


def of_chain(runs: list[dict[str, Any]]) -> Runs:
    return Runs(records=runs, world="chain", batch=32, own_rates={}, seeds=PROFILES["small"].seeds)


def test_the_speed_of_an_arm_is_its_accuracy_on_rollouts() -> None:
    """Over 60 steps grpo has 0.5 in the last 20 and 0.3 before; the other has 0.6, 0.61 and 0.62 there.

    In windows of 6 steps 0.3 is grpo's accuracy after 30, which both have from step 6. In windows of 12, four of 0.3 and
    eight of 0.61 are 0.507, the first mean of grpo's 0.5 or more, after step 48.
    """
    profile = PROFILES["small"]
    runs = of_chain(chain_runs({"grpo": [0.5] * 3, "cepo+hindsight": [0.6, 0.61, 0.62]}, before=0.3))
    arms = ["grpo", "cepo+hindsight", "oracle"]
    page = "\n".join([*speed_parts(runs, arms, profile), *comparison_parts(runs, profile)])
    for row in (
        "| grpo | 3 of 5 | 36.7 ± 0.0 |  |  | 6 | 6 to 6 | 52 | 52 to 52 |",
        "| cepo+hindsight | 3 of 5 | 40.3 ± 0.2 | +3.7 ± 0.2 | 0.003 | 6 | 6 to 6 | 48 | 48 to 48 |",
        "| oracle | 0 of 5 | not run | not run |  | not run |  | not run |  |",
        "| oracle | 0 of 10 | not run |",
    ):
        assert row in page


def test_a_further_comparison_takes_its_own_seeds_alone() -> None:
    """The first seeds say that the oracle is worse; of the fresh ones it is better by 10, 11 and 12 points."""
    profile = PROFILES["small"]
    first = chain_runs({"grpo": [0.9, 0.9], "oracle": [0.1, 0.1]})
    fresh = chain_runs({"grpo": [0.5] * 3, "oracle": [0.6, 0.61, 0.62]}, first_seed=21)
    runs = of_chain([*first, *fresh])
    main = "\n".join(speed_parts(runs, ["grpo", "oracle"], profile))
    further = "\n".join(comparison_parts(runs, profile))
    assert "| oracle | 2 of 5 | 10.0 ± 0.0 | -80.0 ± 0.0 |" in main
    assert "| oracle | 3 of 10 | 61.0 ± 0.6 | +11.0 ± 0.6 | 0.003 | 6 | 6 to 6 | 12 | 12 to 12 |" in further
    sentence = comparison_sentences(runs, profile)
    assert sentence.startswith(" With fresh seeds (3 of 10 seeds), ")
    assert sentence.endswith("in points: oracle +11.0 ± 0.6 (p 0.003 by Holm).")


def test_steps_are_counted_to_the_baselines_last_accuracy() -> None:
    """Over 10 steps means are over 2: the baseline ends at 0.9, which the other has over its steps 5 and 6."""
    base = numpy.array([[0.1 * step for step in range(10)], [0.1 * step for step in range(10)]])
    own = numpy.array([[0.1] * 4 + [0.9] * 6, [0.1] * 4 + [0.8] * 6])
    assert steps_to_reach(base, base) == 10
    assert steps_to_reach(own, base) == 6  # 0.85 on average, and the baseline's last two steps have 0.85
    assert steps_to_reach(own - 0.05, base) == math.inf
    assert steps_to_reach(own, base[:, :4]) == 5  # 0.3, over single steps
    assert interval(own, base) == (6, math.inf)  # draws of the second seed alone have 0.8


def test_a_small_p_is_said_to_be_below_its_last_digit() -> None:
    """Differences of 10.0, 10.1 and 10.2: t is 175 with 2 degrees of freedom, so p is 0.00003."""
    assert [p_text(p) for p in (0.157, 0.0005, 0.00049, 0.0)] == ["0.157", "0.001", "< 0.001", "< 0.001"]
    assert adjusted_cells({"oracle": [10.0, 10.1, 10.2], "alone": [1.0]}) == {"oracle": "< 0.001", "alone": ""}


def test_the_page_is_that_of_its_records() -> None:
    told = json.loads((REPOSITORY / "lab" / "studies" / "results" / "study.json").read_text(encoding="utf-8"))
    assert (REPOSITORY / "lab" / "notes" / "study.md").read_text(encoding="utf-8") == study_page(told)


def test_controls_have_cepos_credit_on_other_tokens_and_turned() -> None:
    for name in ("permuted_cepo", "inverted_cepo"):
        load_plugin(REPOSITORY / "lab" / "studies" / "support" / f"{name}.py")
    shape = (4, 9)
    views = {"correct": log_probs_like(shape, 1), "wrong": log_probs_like(shape, 2)}
    exchanged = {"correct": views["wrong"], "wrong": views["correct"]}
    given = {"rewards": [1.0, 0.0, 0.0, 1.0], "group_ids": [0, 0, 1, 1], "lengths": [9, 4, 7, 1]}
    batch, turned = (token_batch(**given, old=log_probs_like(shape, 3), views=view) for view in (views, exchanged))
    plain, permuted, inverted = (
        build_estimator(name, None).signal(batch, step=0).advantages
        for name in ("cepo", "permuted_cepo", "inverted_cepo")
    )
    assert not torch.equal(permuted, plain)
    assert torch.equal(permuted.sort(dim=1).values, plain.sort(dim=1).values)
    assert torch.equal(permuted[~batch.response_mask], plain[~batch.response_mask])
    assert torch.equal(inverted, build_estimator("cepo", None).signal(turned, step=0).advantages)


@pytest.mark.heavy
def test_the_smoke_study_runs_to_its_page_and_not_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results, page = tmp_path / "study.json", tmp_path / "study.md"
    environment = os.environ | {"CEPO_PYTHON": sys.executable, "OUT": str(tmp_path / "runs"), "PROCESSES": "1"}
    files = ["--results", str(results), "--page", str(page)]
    command = ["bash", str(REPOSITORY / "scripts" / "study.sh"), "smoke", *files]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True, timeout=600)
    done = json.loads(results.read_text(encoding="utf-8"))["runs"]
    assert [(run["arm"], run["steps"], run["rollouts"]) for run in done] == [("grpo", 2, 32), ("cepo", 2, 32)]
    assert done[0]["sampled"]["0"] == done[1]["sampled"]["0"]  # the same start
    assert done[0]["teachers"] == 0 < done[1]["teachers"]
    assert "All planned runs are done." in page.read_text(encoding="utf-8")
    assert (tmp_path / "images" / "study.png").stat().st_size > 0
    assert study.main(["run", "--profile", "smoke", "--out", str(tmp_path / "runs")]) == 0
    assert capsys.readouterr().out == "nothing is left to start\nfailed: none\n"
