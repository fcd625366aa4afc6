"""Trains sound and spoilt runs of the toy task, and records which fault the diagnosis names first.

    python3 -m lab.spoilt_runs --folder build/spoilt

Thirteen runs of TRL's own GRPOTrainer and four of `cepo train` have one fault each, and five are sound, which the
diagnosis must meet with silence. A run that has finished in the folder is not repeated. The command fails if another
fault is named first than `RUNS` says. `docs/look.md` shows the table; the figures beside the name are what the bounds
in `cepo/report/diagnosis.py` are from.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from cepo.look.reading import read_rollouts_of
from cepo.microgeo.world import ASSETS, SHAPES, split_problems, write_problems
from cepo.report.diagnosis import Observed, diagnosed
from cepo.report.responses import groups_of
from cepo.rewards.math import compute_score
from lab.support.machine import ROOT, environment, machine_record
from lab.support.tables import RESULTS, save, table

Reward = Callable[[str, str], float]
"""Of a response's text and the right answer."""


def is_right(text: str, answer: str) -> float:
    return compute_score([{"response": text, "ground_truth": answer}])[0]["overall"]


@dataclass(frozen=True, kw_only=True)
class TrlRun:
    """A run of TRL's GRPOTrainer: its fault's name, None if it is sound, and what differs from a sound run."""

    first: str | None
    steps: int
    reward: Reward = is_right
    prompt: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class OwnRun:
    """A run of `cepo train`, with further settings; `problems` limits its training problems, which are the toy task's."""

    first: str | None
    settings: tuple[str, ...]
    problems: int | None = None


CONSTANT, LENGTH, CUT = "the reward is constant", "length explains the reward", "responses are cut"
LR_ZERO = "the weights do not change"
RUNS: dict[str, TrlRun | OwnRun] = {
    "TRL, sound": TrlRun(first=None, steps=40),
    "TRL, sound, another seed and rate": TrlRun(first=None, steps=40, settings={"seed": 7, "learning_rate": 5e-5}),
    "TRL, sound, groups of 4": TrlRun(first=None, steps=40, settings={"seed": 3, "num_generations": 4}),
    "cepo, sound": OwnRun(first=None, settings=("trainer.max_steps=20",)),
    "cepo, sound, another seed": OwnRun(first=None, settings=("trainer.max_steps=20", "data.seed=3")),
    "TRL, a reward of 0": TrlRun(first=CONSTANT, steps=20, reward=lambda text, answer: 0.0),
    "TRL, tags that no response has": TrlRun(
        first=CONSTANT, steps=15, reward=lambda text, answer: float(f"<answer>{answer}</answer>" in text)
    ),
    "TRL, a wrong column of answers": TrlRun(
        first=CONSTANT, steps=15, reward=lambda text, answer: is_right(text, "7777")
    ),
    "TRL, learning rate 0": TrlRun(first=LR_ZERO, steps=30, settings={"learning_rate": 0.0}),
    "TRL, limit of 16 tokens": TrlRun(first=CUT, steps=20, settings={"max_completion_length": 16}),
    "TRL, end token suppressed": TrlRun(
        first="responses do not end", steps=15, settings={"generation_kwargs": {"min_new_tokens": 64}}
    ),
    "TRL, prompts without the problem": TrlRun(first=CUT, steps=20, prompt="zq xx " * 12),
    "TRL, the reward is the length": TrlRun(first=LENGTH, steps=40, reward=lambda text, answer: len(text) / 100),
    "TRL, the reward is minus the length": TrlRun(first=LENGTH, steps=40, reward=lambda text, answer: -len(text) / 100),
    "TRL, a reward for a sign": TrlRun(
        first="a phrase explains the reward", steps=30, reward=lambda text, answer: float("so" in text or "*" in text)
    ),
    "TRL, a reward for the format": TrlRun(
        first="groups have equal rewards", steps=30, reward=lambda text, answer: float("boxed" in text)
    ),
    "TRL, temperature 0.05": TrlRun(first="responses of a group are equal", steps=20, settings={"temperature": 0.05}),
    "TRL, learning rate 100 times too large": TrlRun(
        first="responses repeat themselves", steps=30, settings={"learning_rate": 1e-2}
    ),
    "cepo, learning rate 0": OwnRun(first=LR_ZERO, settings=("trainer.max_steps=6", "worker.actor.optim.lr=0")),
    "cepo, limit of 16 tokens": OwnRun(first=CUT, settings=("trainer.max_steps=6", "data.max_response_length=16")),
    "cepo, learning rate too large": OwnRun(first=CUT, settings=("trainer.max_steps=10", "worker.actor.optim.lr=1e-2")),
    "cepo, eight problems": OwnRun(
        first="held-out accuracy does not follow", settings=("trainer.max_steps=50", "trainer.val_freq=10"), problems=8
    ),
}


def train_in_trl(run: TrlRun, folder: Path) -> None:
    """Trains the embedded model on problems with images: 4 groups of 8, 64 tokens, learning rate 1e-4."""
    import trl
    from datasets import Dataset

    def reward(completions: list[Any], answer: list[str], **_: Any) -> list[float | None]:
        return [run.reward(each[0]["content"], truth) for each, truth in zip(completions, answer, strict=True)]

    rows: list[dict[str, Any]] = []
    for index in range(256):
        drawn = SHAPES.generate(0, index, stream="train")
        text = run.prompt or f"{drawn.question} Answer in \\boxed{{}}."
        rows.append(
            {"prompt": [{"role": "user", "content": text}], "images": [SHAPES.draw(drawn)], "answer": drawn.answer}
        )
    settings = {
        "output_dir": str(folder), "use_cpu": True, "bf16": False, "model_init_kwargs": {"dtype": "float32"},
        "report_to": "none", "save_strategy": "steps", "save_steps": run.steps, "save_only_model": True,
        "logging_steps": 1, "disable_tqdm": True, "max_steps": run.steps, "learning_rate": 1e-4,
        "per_device_train_batch_size": 32, "num_generations": 8, "max_completion_length": 64,
        "log_completions": True, "num_completions_to_print": 0,
    }  # fmt: skip
    trainer = trl.GRPOTrainer(
        model=str(ASSETS),
        reward_funcs=reward,
        args=trl.GRPOConfig(**settings | dict(run.settings)),
        train_dataset=Dataset.from_list(rows),
    )
    trainer.train()


def train_in_cepo(run: OwnRun, folder: Path) -> None:
    """Runs `cepo train` with the toy task's quickstart."""
    folder.mkdir(parents=True)
    settings = list(run.settings)
    if run.problems is not None:
        train, _ = split_problems(0, run.problems, 1)
        write_problems(folder / "train.parquet", train)
        settings.append(f"data.train_files={folder / 'train.parquet'}")
    command = [
        sys.executable, "-m", "cepo", "train", "config=microgeo/quickstart",
        f"trainer.save_checkpoint_path={folder / 'run'}",
        "trainer.save_freq=-1", "trainer.rollouts_to_log=32", "trainer.logger=[file]", *settings,
    ]  # fmt: skip
    with (folder / "log.txt").open("w") as log:
        environ = environment(1, folder / "cache")
        subprocess.run(command, cwd=ROOT, env=environ, check=True, stdout=log, stderr=subprocess.STDOUT)


def figures_of(place: Path) -> dict[str, Any]:
    """Returns the faults named, first to last, and shares that the bounds are about."""
    seen = read_rollouts_of(place)
    groups = groups_of(seen.responses)
    observed = Observed(groups, seen.metrics)
    findings = diagnosed(observed)
    texts = [[response.response for response in group.responses] for group in groups]
    return {
        "named": [finding.name for finding in findings],
        "figure": findings[0].figure if findings else "",
        "responses": len(seen.responses),
        "dead_groups": 1 - len(observed.mixed) / len(groups),
        "different_texts": fmean(len(set(of_group)) / len(of_group) for of_group in texts),
        "cut": observed.mean("response_length/clip_ratio"),
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="of the runs")
    parser.add_argument("--only", nargs="*", default=list(RUNS), help="names of runs")
    parser.add_argument("--out", type=Path, default=RESULTS / "spoilt_runs.json")
    options = parser.parse_args(argv)
    found: dict[str, dict[str, Any]] = {}
    for name in options.only:
        run, folder = RUNS[name], options.folder / name.replace(", ", "-").replace(" ", "_")
        finished = folder / "finished"
        if not finished.exists():
            if isinstance(run, TrlRun):
                train_in_trl(run, folder)
            else:
                train_in_cepo(run, folder)
            finished.touch()
        place = folder if isinstance(run, TrlRun) else folder / "run"
        found[name] = {"expected": run.first, **figures_of(place)}
        print(name, found[name]["named"], flush=True)
    rows: list[list[str]] = []
    for name, each in found.items():
        named = each["named"][0] if each["named"] else "nothing"
        rows.append([name, named, f"{each['dead_groups']:.2f}", f"{each['different_texts']:.2f}", each["figure"]])
    printed = table(["run", "named first", "equal rewards", "different texts", "figure"], rows)
    save({"runs": found, "machine": machine_record(1)}, [printed], options.out)
    return int(any((each["named"] or [None])[0] != each["expected"] for each in found.values()))


if __name__ == "__main__":
    sys.exit(main())
