"""The study on a pretrained model: its plan resolves, its table is right by hand, and its control reads other answers."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import yaml
from factories import group, rollout
from PIL import Image

from cepo.algorithms import build_estimator, load_plugin
from cepo.config import check_config, load_config
from lab.studies.real_model import PAGE, PLANS, all_records, planned, read_study, run_all, tables_of, write_records
from lab.studies.support.compared_runs import Record, by_name_and_seed, work_table
from lab.studies.support.comparison_charts import comparison_charts
from lab.studies.support.marked_tables import END, start_mark, with_table
from lab.studies.support.seeded_runs import train_once

REPOSITORY = Path(__file__).parents[3]
STUDY = read_study("real_model")


def finished(arm: str, seed: int, trained: list[float], *, seconds: float = 30.0) -> Record:
    """The record of a run with these shares of right rollouts, the last of them held out too."""
    step_seconds = [seconds] * len(trained)
    held_out = {str(len(trained)): trained[-1]}
    tokens = {"generate": 1000 * seed, "score": 2000, "teachers": 500, "update": 3000}
    return {
        "arm": arm,
        "seed": seed,
        "trained": trained,
        "held_out": held_out,
        "step_seconds": step_seconds,
        "tokens": tokens,
    }


@pytest.mark.parametrize("name", PLANS)
def test_every_arm_of_a_plan_resolves(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    study = read_study(name)
    runs = [run for run in planned(study) if run.seed == study.seeds[0]]
    assert [run.arm.name for run in runs] == list(study.arms)
    for run in runs:
        plan = check_config(load_config(run.settings("microgeo:model")))
        assert f"length: {study.steps} steps" in plan


def test_a_repeated_arm_is_that_of_the_study() -> None:
    """No seed is used twice."""
    repeated = read_study("real_model_repeated")
    assert all(STUDY.arms[name] == arm for name, arm in repeated.arms.items())
    assert (repeated.baseline, repeated.steps) == (STUDY.baseline, STUDY.steps)
    assert set(repeated.seeds).isdisjoint(STUDY.seeds)


def test_differences_are_paired_by_seed() -> None:
    """cepo is 10 and 20 points above grpo over the rollouts of two seeds: +15 ± 5; p of t = 3 with 1 degree is 0.205."""
    records = [
        finished(arm, seed, [accuracy, accuracy])
        for arm, accuracies in {"grpo": (0.3, 0.5), "cepo": (0.4, 0.7)}.items()
        for seed, accuracy in zip((1, 2), accuracies, strict=True)
    ]
    accuracies, of_seeds, _ = tables_of(STUDY, records).split("\n\n")
    lines = accuracies.splitlines()
    [cepo_line] = [line for line in lines if line.startswith("| cepo |")]
    cells = [text.strip() for text in cepo_line.strip("|").split("|")]
    assert cells[:5] == ["cepo", "2 of 5", "55.0 ± 15.0", "+15.0 ± 5.0", "0.205"]
    [rlsd_line] = [line for line in lines if line.startswith("| rlsd |")]
    assert "not run" in rlsd_line
    assert "| grpo | 30.0 | 50.0 |" in of_seeds


def test_times_are_those_until_three_steps_are_half_right() -> None:
    """cepo's steps 2 to 4 have 50 %: 4 steps of 60 s. grpo's first seed needs 5 steps of 30 s, its second does not get there."""
    records = [
        finished("grpo", 1, [0.0, 0.2, 0.4, 0.5, 0.6]),
        finished("grpo", 2, [0.2] * 5),
        finished("cepo", 1, [0.2, 0.5, 0.5, 0.5, 0.1], seconds=60.0),
        finished("cepo", 2, [0.2, 0.4, 0.4, 0.7, 0.1], seconds=60.0),
    ]
    by_arm = by_name_and_seed(records, kind="arm", names=["grpo", "cepo", "rlsd"])
    head, _, *rows = work_table(by_arm, kind="arm").splitlines()
    assert head == "| arm | sampled | read | trained on | training, min | runs that reach 50 % | at step | after min |"
    assert rows == [
        "| grpo | 1.5 ± 0.5 | 2.5 ± 0.0 | 3.0 ± 0.0 | 2.5 ± 0.0 | 1 of 2 | 5.0 | 2.5 |",
        "| cepo | 1.5 ± 0.5 | 2.5 ± 0.0 | 3.0 ± 0.0 | 5.0 ± 0.0 | 2 of 2 | 4.0 ± 0.0 | 4.0 ± 0.0 |",
        "| rlsd | not run | not run | not run | not run | 0 of 0 |  |  |",
    ]


def test_the_chart_ends_at_the_differences_of_the_table() -> None:
    """cepo is 10 and 30 points above grpo after the first step of two seeds, and 20 and 40 over all three steps."""
    records = [
        finished("grpo", 1, [0.1, 0.1, 0.1]),
        finished("grpo", 2, [0.2, 0.2, 0.2]),
        finished("cepo", 1, [0.12, 0.14, 0.16]),
        finished("cepo", 2, [0.24, 0.26, 0.28]),
        finished("rlsd", 2, [0.28, 0.28, 0.64]),
    ]
    by_arm = by_name_and_seed(records, kind="arm", names=["grpo", "rlsd", "cepo", "cepo-permuted"])
    accuracy, difference = comparison_charts(by_arm, "grpo")
    assert [(series.label, series.steps) for series in accuracy.series] == [("grpo", [3]), ("rlsd", [3]), ("cepo", [3])]
    assert [series.values[-1] for series in accuracy.series] == pytest.approx([0.15, 0.4, 0.2])
    grpo, of_one_seed, cepo = difference.series
    assert (grpo.label, list(grpo.values)) == ("grpo", [0.0, 0.0, 0.0])
    assert (of_one_seed.label, of_one_seed.low) == ("rlsd", ())
    assert of_one_seed.values[:2] == pytest.approx([8.0, 8.0])
    assert math.isnan(of_one_seed.values[2]), "20 points are not drawn"
    assert cepo.values == pytest.approx([3.0, 4.0, 5.0])
    assert cepo.low == pytest.approx([2.0, 3.0, 4.0]), "the standard error of 2 and 4 is 1"
    assert cepo.high == pytest.approx([4.0, 5.0, 6.0])


@pytest.mark.parametrize("name", PLANS)
def test_the_page_has_the_records_tables(name: str) -> None:
    study = read_study(name)
    page = PAGE.read_text(encoding="utf-8")
    records = json.loads(study.results.read_text(encoding="utf-8"))["runs"]
    assert with_table(page, tables_of(study, records), program=study.program) == page


def test_records_reach_the_page_and_its_chart(tmp_path: Path) -> None:
    results, page, chart = tmp_path / "results.json", tmp_path / "page.md", tmp_path / "chart.png"
    runs = [finished("grpo", 1, [0.25, 0.5, 0.75])]
    results.write_text(json.dumps({"plan": STUDY.plan, "runs": runs}), encoding="utf-8")
    page.write_text(f"# Page\n\n{start_mark(STUDY.program)}{END}", encoding="utf-8")
    write_records(STUDY, tmp_path / "no runs here", results, page, chart)
    assert "| grpo | 1 of 5 | 50.0 |" in page.read_text(encoding="utf-8")
    with Image.open(chart) as drawn:
        assert len(drawn.getcolors(maxcolors=1_000_000)) > 10


def test_recorded_runs_are_neither_trained_nor_forgotten(tmp_path: Path) -> None:
    """Records of one machine stay when another adds its own, in the plan's order."""
    results = tmp_path / "results.json"
    earlier = [{"arm": "cepo", "seed": 1}, {"arm": "grpo", "seed": 1}]
    results.write_text(json.dumps({"plan": STUDY.plan, "runs": earlier}), encoding="utf-8")
    assert all_records(STUDY, tmp_path / "no runs here", results) == [earlier[1], earlier[0]]
    everything = [{"arm": run.arm.name, "seed": run.seed} for run in planned(STUDY)]
    results.write_text(json.dumps({"plan": STUDY.plan, "runs": everything}), encoding="utf-8")
    assert run_all(STUDY, tmp_path, "no model", seeds=STUDY.seeds, arms=list(STUDY.arms), most=1, results=results) == 0
    assert list(tmp_path.iterdir()) == [results], "a recorded run was trained"


def test_a_process_trains_the_runs_of_its_seeds_and_arms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes share a study if neither has a run of the other's arms."""
    trained: list[Path] = []
    monkeypatch.setattr("lab.studies.real_model.train_once", lambda settings, seed, folder: trained.append(folder) or 0)
    results = tmp_path / "real_model.json"
    assert run_all(STUDY, tmp_path, "a model", seeds=[2, 3], arms=["cepo", "grpo"], most=3, results=results) == 0
    assert [folder.name for folder in trained] == ["grpo-s2", "cepo-s2", "grpo-s3"]


def test_the_control_never_reads_the_true_answer() -> None:
    load_plugin(REPOSITORY / "lab" / "studies" / "support" / "permuted_references.py")
    method = build_estimator("permuted_references", {})
    read: set[str] = set()
    for step in range(50):
        right = rollout(0, 1.0, "14", correct=True)
        example = group(right, rollout(1, 0.0, "13"), ground_truth="14", step=step)
        [reference, same] = method.references(example)["correct"]
        assert reference == same
        assert reference is not None
        assert reference.text is not None
        read.add(reference.text)
    assert "14" not in read
    assert len(read) > 5


@pytest.mark.heavy
def test_a_run_that_is_done_is_not_trained_again(tmp_path: Path) -> None:
    """A step of 2 x 2 responses; the seed reaches weights, data and sampling."""
    settings = [
        "config=microgeo/base",
        "worker.rollout.name=transformers",
        "worker.rollout.n=2",
        "data.rollout_batch_size=2",
        "data.val_files=null",
        "trainer.val_before_train=false",
        "trainer.max_steps=1",
    ]
    folder = tmp_path / "run"
    assert train_once(settings, seed=7, folder=folder) == 0
    config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    assert (config["trainer"]["seed"], config["data"]["seed"], config["worker"]["rollout"]["seed"]) == (7, 7, 7)
    metrics = (folder / "metrics.jsonl").read_bytes()
    assert train_once(["config=nothing"], seed=7, folder=folder) == 0
    assert (folder / "metrics.jsonl").read_bytes() == metrics
