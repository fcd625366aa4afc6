"""Trains with rollouts sampled some steps ahead of the update that learns from them, and compares seed by seed.

    python3 -m lab.studies.rollouts_ahead microgeo/NAME ... --arms 0 1 1/truncate --seeds 1 2 --out FOLDER KEY=VALUE ...
    python3 -m lab.studies.rollouts_ahead microgeo/NAME ... --results FILE --page lab/notes/multi-node.md ...

An arm is a lag, or a lag and a kind of `worker.actor.rollout_is`. With lag n, step k samples with the weights with which
step k - n began, and the first n steps with the initial weights; everything else is the trainer's own. The validation after
the last step has the current weights. Lag 0 is a run of `cepo train`, bit for bit. A finished run is not trained again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from cepo import Callback
from cepo.config import load_config
from cepo.report.recorded_run import load_run
from cepo.rollout.generator import (
    AdapterWeights,
    FullWeights,
    Generation,
    GenerationRequest,
    Generator,
    OnFinished,
    SamplingSettings,
    Weights,
)
from cepo.train import build_trainer
from cepo.trainer.batches import ScoredBatch
from cepo.types import TokenSignal
from cepo.workers.worker import Worker
from lab.studies.support.compared_runs import Record, by_name_and_seed, differences_table, figures_of, names_in
from lab.studies.support.marked_tables import with_table
from lab.studies.support.seeded_runs import DONE, is_done
from lab.studies.support.study_statistics import cell, paired
from lab.support.machine import machine_record
from lab.support.tables import table

PROGRAM = "lab.studies.rollouts_ahead"
"""The name in the marks of the tables' place in a page."""
STALENESS = "staleness.jsonl"
"""The file of a run with the importance weights of some steps, in the order of the steps."""
MEASURED_EVERY = 4
"""The importance weights of each so many steps are measured, which costs a scoring pass of all rows."""
CAP = 2.0
"""The default of `worker.actor.rollout_is_threshold`."""
CLIP_RANGE = (0.8, 1.28)
"""The default range of PPO's ratio, which would clip the tokens outside if the ratio were to the sampling weights."""


class LaggedGenerator:
    """Samples with weights that were current `lag` synchronisations ago, and after the last one with the current ones."""

    def __init__(self, generator: Generator, *, lag: int, total_steps: int) -> None:
        self.name = generator.name
        self._generator = generator
        self._kept: deque[Weights] = deque(maxlen=lag + 1)
        self._num_left = total_steps + 1  # a synchronisation before the first step and one after each

    def generate(
        self, requests: Sequence[GenerationRequest], settings: SamplingSettings, on_finished: OnFinished | None = None
    ) -> list[list[Generation]]:
        return self._generator.generate(requests, settings, on_finished)

    def sync_weights(self, weights: Weights) -> None:
        self._kept.append(copied(weights))
        self._num_left -= 1
        self._generator.sync_weights(self._kept[0] if self._num_left else self._kept[-1])

    def rest(self) -> None:
        self._generator.rest()

    def close(self) -> None:
        self._generator.close()


def copied(weights: Weights) -> Weights:
    """Returns a copy that later updates do not change."""
    tensors = {name: tensor.detach().clone() for name, tensor in weights.tensors.items()}
    if isinstance(weights, AdapterWeights):
        return AdapterWeights(tensors=tensors, adapter_config=weights.adapter_config)
    return FullWeights(tensors=tensors)


class Staleness(Callback):
    """Writes how far the weights at the start of an update are from those that sampled, over all response tokens."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.worker: Worker | None = None

    def after_estimate(self, batch: ScoredBatch, signal: TokenSignal) -> None:
        rollouts = batch.rollouts
        if rollouts.step % MEASURED_EVERY != MEASURED_EVERY - 1:
            return
        assert self.worker is not None
        rows = [rollouts.scoring_row(row) for row in range(len(rollouts.generations))]
        scored = rollouts.padded(self.worker.score(rows))
        log_ratios = (scored - rollouts.sampled_log_probs)[rollouts.response_mask].double()
        ratios = log_ratios.exp()
        lowest, highest = CLIP_RANGE
        figures = {
            "step": rollouts.step + 1,
            "gap": float(log_ratios.abs().mean()),
            "kl": float((ratios - 1 - log_ratios).mean()),
            "above_cap": float((ratios > CAP).double().mean()),
            "outside_clip_range": float(((ratios < lowest) | (ratios > highest)).double().mean()),
            "largest": float(ratios.max()),
        }
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(figures) + "\n")


def train_ahead(words: Sequence[str], *, arm: str, seed: int, folder: Path) -> None:
    """Trains a run of an arm in `folder`, unless it is done."""
    if is_done(folder):
        return
    lag, _, correction = arm.partition("/")
    config = load_config(
        [
            f"trainer.seed={seed}",
            f"data.seed={seed}",
            f"worker.rollout.seed={seed}",
            f"worker.actor.rollout_is={correction or 'none'}",
            f"trainer.save_checkpoint_path={folder}",
            "trainer.logger=[file]",
            *words,
        ]
    )
    staleness = Staleness(folder / STALENESS)
    with ExitStack() as stack:
        trainer = build_trainer(config, stack, callback=staleness)
        (folder / STALENESS).unlink(missing_ok=True)  # of a run that was killed
        worker = trainer.backend
        assert isinstance(worker, Worker), "the weights are kept in this process"
        is_last_alone = trainer.settings.val_freq in (-1, trainer.total_steps)
        assert lag == "0" or is_last_alone, "only the validation after the last step has the current weights"
        worker.generator = LaggedGenerator(worker.generator, lag=int(lag), total_steps=trainer.total_steps)
        staleness.worker = worker
        trainer.fit()
    (folder / DONE).touch()


def record_of(folder: Path, *, arm: str, seed: int) -> Record:
    """Returns a run's accuracies, and means over the measured steps of how stale its rollouts are."""
    lines = (folder / STALENESS).read_text(encoding="utf-8").splitlines()
    measured = [json.loads(line) for line in lines]
    staleness = {key: statistics.fmean(step[key] for step in measured) for key in measured[0] if key != "step"}
    staleness["largest"] = max(step["largest"] for step in measured)
    gaps = load_run(folder).series("rollout/log_prob_gap_mean")[1]
    figures = figures_of(folder, trained="reward/correct")
    lag = int(arm.partition("/")[0])
    return {"arm": arm, "seed": seed, "lag": lag, **figures, "gaps": gaps, "staleness": staleness}


def of_equal_age(record: Record, *, longest_lag: int) -> float:
    """Returns the share of right rollouts of the weights of the first steps, which every arm samples with.

    With lag n the rollouts of step k + n are those of the weights with which step k begins.
    """
    trained = record["trained"]
    lag = record["lag"]
    return statistics.fmean(trained[lag : len(trained) - longest_lag + lag])


def tables_of(runs: Sequence[Record]) -> str:
    """Returns two tables for each file: accuracies with paired differences from its first arm, and staleness."""
    written: list[str] = []
    for file in names_in(runs, "file"):
        of_file = [run for run in runs if run["file"] == file]
        arms = names_in(of_file, "arm")
        by_arm = by_name_and_seed(of_file, kind="arm", names=arms)
        longest_lag = max(run["lag"] for run in of_file)
        for run in of_file:
            run["of_equal_age"] = of_equal_age(run, longest_lag=longest_lag)
        rows: list[list[str]] = []
        for arm in arms:
            records = list(by_arm[arm].values())
            age = [record["of_equal_age"] for record in records]
            differences = paired(by_arm[arms[0]], by_arm[arm], lambda record: record["of_equal_age"])
            row = [arm, cell(age), "" if arm == arms[0] else cell(differences, signed=True)]
            for key in ("above_cap", "outside_clip_range"):
                row.append(f"{100 * mean_of(records, key):.2f}")
            row += [f"{mean_of(records, key):.4f}" for key in ("gap", "kl")]
            row.append(f"{max(record['staleness']['largest'] for record in records):.1f}")
            rows.append(row)
        head = [f"{file}, lag", "rollouts of equal weights %", "minus the first", f"rho > {CAP:g}, %"]
        head += ["rho outside 0.8 to 1.28, %", "mean gap, nats", "KL, nats", "largest rho"]
        accuracies = differences_table(by_arm, kind="arm", baseline=arms[0])
        written += [f"{file}:", accuracies, table(head, rows)]
    return "\n\n".join(written)


def mean_of(records: Sequence[Record], key: str) -> float:
    """Returns the mean over runs of a figure of their staleness."""
    return statistics.fmean(record["staleness"][key] for record in records)


def main(argv: list[str] | None = None) -> int:
    """Trains what is not trained yet, and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="+", help="configuration files, and KEY=VALUE for all runs")
    parser.add_argument("--arms", nargs="+", default=["0", "1", "1/truncate"], help="the one to compare with first")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4])
    parser.add_argument("--out", type=Path, default=Path("checkpoints/rollouts_ahead"))
    parser.add_argument("--results", type=Path, help="JSON file to write")
    parser.add_argument("--page", type=Path, help="Markdown page with the marks, in which the tables are written")
    options = parser.parse_intermixed_args(argv)
    settings = [word for word in options.words if "=" in word]
    files = [Path(word) for word in options.words if "=" not in word]
    runs: list[Record] = []
    for seed in options.seeds:
        for file in files:
            for arm in options.arms:
                folder = options.out / f"{file.stem}-lag{arm.replace('/', '-')}-s{seed}"
                print(folder, flush=True)
                train_ahead([f"config={file}", *settings], arm=arm, seed=seed, folder=folder)
                runs.append({"file": file.stem, **record_of(folder, arm=arm, seed=seed)})
    written = tables_of(runs)
    if options.results is not None:
        record = {"settings": settings, "machine": machine_record(torch.get_num_threads()), "runs": runs}
        options.results.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if options.page is not None:
        page = options.page.read_text(encoding="utf-8")
        options.page.write_text(with_table(page, written, program=PROGRAM), encoding="utf-8")
    print(written)
    return 0


if __name__ == "__main__":
    sys.exit(main())
