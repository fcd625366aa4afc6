"""Training with rollouts sampled some steps ahead, by the real trainer and generator."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cepo.report.recorded_run import RunData, load_run
from cepo.train import main as train
from lab.studies.rollouts_ahead import STALENESS, of_equal_weights, recorded_without_lag, table_of, train_ahead
from lab.studies.seeds import LEARNING
from lab.studies.support.compared_runs import Record

SETTINGS = [
    "config=microgeo/grpo",
    "data.rollout_batch_size=4",
    "worker.actor.global_batch_size=4",
    "worker.actor.optim.lr=1e-3",
    "worker.rollout.name=transformers",
    "trainer.max_steps=4",
    "trainer.val_before_train=false",
    "trainer.val_max_samples=16",
]
EVERY_STEP = ["trainer.val_freq=1"]
LAST_STEP = ["trainer.val_freq=4"]


def run_of(folder: Path, arm: str, *settings: str) -> RunData:
    train_ahead([*SETTINGS, *settings], arm=arm, seed=1, folder=folder / "run")
    return load_run(folder / "run")


@pytest.fixture(scope="module")
def current(tmp_path_factory: pytest.TempPathFactory) -> RunData:
    """Lag 0, with a validation after each step."""
    return run_of(tmp_path_factory.mktemp("current"), "0", *EVERY_STEP)


@pytest.fixture(scope="module")
def frozen(tmp_path_factory: pytest.TempPathFactory) -> RunData:
    """All steps sample with the initial weights, because nothing is learnt."""
    return run_of(tmp_path_factory.mktemp("frozen"), "0", *EVERY_STEP, "worker.actor.optim.lr=0")


@pytest.fixture(scope="module")
def behind(tmp_path_factory: pytest.TempPathFactory) -> RunData:
    return run_of(tmp_path_factory.mktemp("behind"), "1", *LAST_STEP)


def checksums(run: RunData) -> dict[str, list[int]]:
    """The sizes and checksums of the weights, the optimizer's state and all else of the last checkpoint's actor."""
    files = json.loads((run.folder / "global_step_4" / "files.json").read_text(encoding="utf-8"))
    return {name: entry for name, entry in files.items() if name.startswith("actor/")}


def test_lag_0_is_the_plain_run_to_the_bit(current: RunData, tmp_path: Path) -> None:
    seeds = ["trainer.seed=1", "data.seed=1", "worker.rollout.seed=1"]
    places = [f"trainer.save_checkpoint_path={tmp_path}", "trainer.logger=[file]"]
    assert train([*SETTINGS, *EVERY_STEP, *seeds, *places]) == 0
    plain = load_run(tmp_path)
    assert len(checksums(plain)) > 0
    assert checksums(current) == checksums(plain)
    for metric in ("rollout/entropy", "reward/correct", "actor/grad_norm", "val/accuracy", "val/response_length"):
        assert current.series(metric) == plain.series(metric)


def test_lag_1_samples_with_the_weights_before(current: RunData, frozen: RunData, behind: RunData) -> None:
    """Steps 1 and 2 sample with the initial weights, so do all of a run that learns nothing; step 3 does not."""
    entropies = behind.series("rollout/entropy")[1]
    initial = frozen.series("rollout/entropy")[1]
    assert entropies[:2] == initial[:2]
    assert entropies[2] != initial[2]
    assert entropies[1] != current.series("rollout/entropy")[1][1]


def test_the_gap_of_log_probs_is_that_of_the_weights(current: RunData, behind: RunData) -> None:
    """Without a lag, and in the first step with one, sampler and trainer agree but for rounding."""
    gaps = behind.series("rollout/log_prob_gap_mean")[1]
    assert max(current.series("rollout/log_prob_gap_mean")[1]) < 1e-5
    assert gaps[0] < 1e-5
    assert min(gaps[1:]) > 1e-3
    (measured,) = (behind.folder / STALENESS).read_text(encoding="utf-8").splitlines()
    assert json.loads(measured)["step"] == 4
    assert json.loads(measured)["gap"] > 1e-3


def test_the_last_validation_has_the_current_weights(current: RunData, frozen: RunData, tmp_path: Path) -> None:
    """After one step a run with lag has the weights of a run without."""
    once = run_of(tmp_path, "1", "trainer.max_steps=1", "trainer.val_freq=1")
    after_one_step = current.values_by_step("val/response_length")[1]
    assert once.values_by_step("val/response_length")[1] == after_one_step
    assert frozen.values_by_step("val/response_length")[1] != after_one_step


def test_rollouts_after_equally_many_updates_are_compared() -> None:
    """With a longest lag of 2, four of six steps are compared: the first ones of lag 0, the last ones of lag 2."""
    trained = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert [of_equal_weights(trained, lag=lag) for lag in (0, 1, 2)] == [2.5, 3.5, 4.5]


def test_differences_are_paired_by_seed() -> None:
    """Rollouts: 0.5 and 0.6 against 0.4 and 0.3 are 20 points less, with an error of 10."""
    runs: list[Record] = []
    for arm, seed, accuracy in (("0", 1, 0.5), ("0", 2, 0.6), ("1", 1, 0.4), ("1", 2, 0.3)):
        staleness = {"gap": 0.01, "kl": 0.002, "above_cap": 0.0, "outside_clip_range": 0.05}
        measures = {"trained": [accuracy], "of_equal_weights": accuracy, "held_out": {"0": 0.1, "1": accuracy}}
        runs.append({"file": "first", "arm": arm, "seed": seed, "staleness": staleness, **measures})
    lines = table_of(runs).splitlines()
    assert lines[3].startswith("| first, 1 | 2 | 35.0 ± 5.0 | -20.0 ± 10.0 |")
    assert lines[3].endswith("| 35.0 ± 5.0 | -20.0 ± 10.0 | 5.00 | 0.00 | 0.0100 | 0.0020 |")


def test_runs_without_lag_come_from_a_record_where_none_is() -> None:
    """The record has seeds 1 to 3 of this file. Seed 1 is trained here, and seed 3 has nothing to be compared with."""
    runs: list[Record] = [{"file": "grpo", "arm": "0", "seed": 1, "trained": [0.5] * 4}]
    runs += [{"file": "grpo", "arm": "1", "seed": seed, "trained": [0.4] * 4} for seed in (1, 2)]
    (found,) = recorded_without_lag(LEARNING, runs)
    assert (found["file"], found["arm"], found["seed"]) == ("grpo", "0", 2)
    assert found["trained"] == [0.49219, 0.50391, 0.61719, 0.54297]
    assert found["of_equal_weights"] == pytest.approx((0.49219 + 0.50391) / 2)
