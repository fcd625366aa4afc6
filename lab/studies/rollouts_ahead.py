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
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from cepo import Callback
from cepo.config import load_config
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
from lab.studies.support.compared_runs import (
    Record,
    by_name_and_seed,
    figures_of,
    held_out_accuracy,
    names_in,
    rollout_accuracy,
)
from lab.studies.support.marked_tables import write_table
from lab.studies.support.seeded_runs import DONE, is_done
from lab.studies.support.study_statistics import cell, paired
from lab.support.machine import machine_record
from lab.support.tables import table

PROGRAM = "lab.studies.rollouts_ahead"
"""The name in the marks of the table's place in a page."""
STALENESS = "staleness.jsonl"
"""The file of a run with the importance weights of some steps, in the order of the steps."""
MEASURED_EVERY = 4
"""The importance weights of each so many steps are measured, which costs a scoring pass of all rows."""
LONGEST_LAG = 2
"""The greatest lag whose rollouts are compared with others of equally many updates."""
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


def record_of(folder: Path, *, file: str, arm: str, seed: int) -> Record:
    """Returns a run's accuracies, and means over the measured steps of how stale its rollouts are."""
    lines = (folder / STALENESS).read_text(encoding="utf-8").splitlines()
    measured = [json.loads(line) for line in lines]
    staleness = {key: statistics.fmean(step[key] for step in measured) for key in measured[0] if key != "step"}
    figures = figures_of(folder, trained="reward/correct")
    equal = of_equal_weights(figures["trained"], lag=int(arm.partition("/")[0]))
    return {"file": file, "arm": arm, "seed": seed, **figures, "of_equal_weights": equal, "staleness": staleness}


def of_equal_weights(trained: Sequence[float], *, lag: int) -> float:
    """Returns the mean over the steps that sample with weights after equally many updates, whatever the lag.

    With lag n the rollouts of step k + n are those of the weights with which step k begins.
    """
    return statistics.fmean(trained[lag : len(trained) - LONGEST_LAG + lag])


def recorded_without_lag(file: Path, runs: Sequence[Record]) -> list[Record]:
    """Returns runs of `cepo train` from a record of `lab.studies.seeds`, cut to as many steps as `runs` have.

    These are the runs of lag 0 that `runs` lack beside others of the same file and seed. The record has nothing else that
    can be compared: its validations are those after other steps.
    """
    num_steps = len(runs[0]["trained"])
    lagged = {(run["file"], run["seed"]) for run in runs}
    trained_here = {(run["file"], run["seed"]) for run in runs if run["arm"] == "0"}
    found: list[Record] = []
    for run in json.loads(file.read_text(encoding="utf-8"))["runs"]:
        if (run["file"], run["seed"]) in lagged - trained_here:
            trained = run["trained"][:num_steps]
            own = {key: run[key] for key in ("file", "seed")} | {"arm": "0", "trained": trained, "held_out": {}}
            found.append(own | {"of_equal_weights": of_equal_weights(trained, lag=0)})
    return found


MEASURES: Mapping[str, Callable[[Record], float | None]] = {
    "all rollouts %": rollout_accuracy,
    "of equally many updates %": lambda record: record["of_equal_weights"],
    "held out %": lambda record: held_out_accuracy(record) if record["held_out"] else None,
}
SHARES = {"outside_clip_range": "rho outside 0.8 to 1.28, %", "above_cap": f"rho > {CAP:g}, %"}
NATS = {"gap": "mean gap, nats", "kl": "KL, nats"}


def table_of(runs: Sequence[Record]) -> str:
    """Returns a table with means over seeds, differences from the file's least lag paired by seed, and staleness."""
    head = ["method, lag", "seeds"]
    for title in MEASURES:
        head += [title, "minus the first"]
    head += [*SHARES.values(), *NATS.values()]
    rows: list[list[object]] = []
    for file in names_in(runs, "file"):
        of_file = [run for run in runs if run["file"] == file]
        by_arm = by_name_and_seed(of_file, kind="arm", names=sorted(names_in(of_file, "arm")))
        first = next(iter(by_arm.values()))
        for arm, of_seeds in by_arm.items():
            records = list(of_seeds.values())
            row: list[object] = [f"{file}, {arm}", len(records)]
            for measure in MEASURES.values():
                values = [value for record in records if (value := measure(record)) is not None]
                differences = [] if of_seeds is first else paired(first, of_seeds, measure)
                row += [cell(values) if values else "", cell(differences, signed=True) if differences else ""]
            for key in (*SHARES, *NATS):
                measured = [record["staleness"][key] for record in records if "staleness" in record]
                if not measured:  # all are from a record
                    row.append("")
                    continue
                mean = statistics.fmean(measured)
                row.append(f"{100 * mean:.2f}" if key in SHARES else f"{mean:.4f}")
            rows.append(row)
    return table(head, rows)


def main(argv: list[str] | None = None) -> int:
    """Trains what is not trained yet, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="+", help="configuration files, and KEY=VALUE for all runs")
    parser.add_argument(
        "--arms", nargs="+", default=["0", "1", "1/truncate"], help="the one of the least lag is compared with"
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4])
    parser.add_argument("--out", type=Path, default=Path("checkpoints/rollouts_ahead"))
    parser.add_argument("--read", action="store_true", help="train nothing, and read the runs that are done")
    parser.add_argument("--recorded", type=Path, help="a record of lab.studies.seeds with runs of lag 0")
    parser.add_argument("--results", type=Path, help="JSON file to write")
    parser.add_argument("--page", type=Path, help="Markdown page with the marks, in which the table is written")
    options = parser.parse_intermixed_args(argv)
    settings = [word for word in options.words if "=" in word]
    files = [Path(word) for word in options.words if "=" not in word]
    runs: list[Record] = []
    for seed in options.seeds:
        for file in files:
            for arm in options.arms:
                folder = options.out / f"{file.stem}-lag{arm.replace('/', '-')}-s{seed}"
                if options.read and not is_done(folder):
                    continue
                print(folder, flush=True)
                train_ahead([f"config={file}", *settings], arm=arm, seed=seed, folder=folder)
                runs.append(record_of(folder, file=file.stem, arm=arm, seed=seed))
    if options.recorded is not None:
        runs += recorded_without_lag(options.recorded, runs)
    written = table_of(runs)
    if options.results is not None:
        record = {"settings": settings, "machine": machine_record(torch.get_num_threads()), "runs": runs}
        options.results.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if options.page is not None:
        write_table(options.page, written, program=PROGRAM)
    print(written)
    return 0


if __name__ == "__main__":
    sys.exit(main())
