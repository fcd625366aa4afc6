"""Trains methods with several seeds on microgeo and writes their learning curves: tables and charts of docs/results.md.

    python3 benchmarks/learning_curves.py --methods NAME ... --steps 100 --seeds 1 2 3 --out checkpoints/learning_curves
    python3 benchmarks/learning_curves.py --methods NAME chain_oracle --config configs/microgeo/chain.yaml \
        --settings "trainer.plugins=[benchmarks/support/chain_oracle.py]"

Interrupted runs are resumed. Each validation is sampled and greedy.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def train(folder: Path, method: str, seed: int, options: argparse.Namespace) -> None:
    """Runs a training in its own process with the given number of threads."""
    arguments = [
        f"config={options.config}",
        f"algorithm.adv_estimator={method}",
        f"data.seed={seed}",
        f"worker.rollout.seed={seed}",
        f"trainer.seed={seed}",
        f"trainer.max_steps={options.steps}",
        f"trainer.val_freq={options.val_freq}",
        "trainer.val_greedy=true",
        "trainer.rollouts_to_log=2",
        "trainer.logger=[console,file]",
        f"trainer.save_checkpoint_path={folder}",
        "trainer.save_freq=50",
        "trainer.save_limit=1",
        *options.settings,
    ]
    environment = os.environ | {"OMP_NUM_THREADS": str(options.threads), "PYTHONPATH": str(ROOT)}
    with folder.with_name(f"{folder.name}.log").open("a") as stream:
        subprocess.run(
            [sys.executable, "-m", "cepo.train", *arguments], check=True, env=environment, stdout=stream, stderr=stream
        )


def accuracies(folder: Path, metric: str) -> dict[int, float]:
    """Returns a metric of a run's validations by step."""
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {int(record["step"]): float(record[metric]) for record in records if metric in record}


def main() -> int:
    """Trains what is missing, then writes comparison.md, comparison.png and accuracy.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", required=True)
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "microgeo" / "base.yaml")
    parser.add_argument("--settings", nargs="*", default=[], help="further settings of every run")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--val-freq", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=ROOT / "checkpoints" / "learning_curves")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    sampled: dict[str, dict[str, dict[int, float]]] = {}
    greedy: dict[str, dict[str, float]] = {}
    folders = []
    for seed in options.seeds:
        for method in options.methods:
            folder = options.out / f"{method}-{seed}"
            print(f"{method}, seed {seed}", flush=True)
            train(folder, method, seed, options)
            sampled.setdefault(method, {})[str(seed)] = accuracies(folder, "val/accuracy")
            greedy.setdefault(method, {})[str(seed)] = [*accuracies(folder, "val/greedy_accuracy").values()][-1]
            folders.append(folder)
    record = {
        "sampled_accuracy": sampled,
        "greedy_accuracy": greedy,
        "settings": options.settings,
        "steps": options.steps,
        "python": platform.python_version(),
        "cpu": os.cpu_count(),
    }
    (options.out / "accuracy.json").write_text(json.dumps(record, indent=2) + "\n")
    command = [sys.executable, "-m", "cepo", "compare", *map(str, folders)]
    for name in ("comparison.md", "comparison.png"):
        command += ["--out", str(options.out / name)]
    return subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
