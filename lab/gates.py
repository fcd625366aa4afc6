"""Shows that a change of the code's arrangement changes no number: what the package computes, frozen before and compared after.

    python3 -m lab.gates freeze FOLDER --runs microgeo/NAME ... --problems geo3k=FILE.parquet --pairs PAIRS.jsonl
    python3 -m lab.gates check FOLDER

`freeze` writes what this checkout computes on this machine; `check`, in any later checkout on the same machine, computes it
again and prints `PASS` or the differences for each gate:

G1  two steps of each of `--runs`, in one piece and interrupted: metrics, recorded rollouts and weights to the bit
G2  parity with the second implementation and with the paper's released code (tests)
G3  `cepo config` of every shipped file, and EasyR1's scripts (tests)
G4  the frozen run folder still reports, merges and resumes
G5  verdicts of both rewards on answers of `--problems` and on `--pairs` (lines with response, ground_truth)
G6  rows of `--problems`: the digest of each problem's text, truth and pixels
G7  seconds of the quickstart, and of a first and a second start with `--rows` rows (printed, never compared)

`--only G3 G5` selects gates. Bits depend on the processor and on torch, so that a folder is for one machine.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PARITY_TESTS = ("tests/runs/test_reference_trainer.py", "tests/runs/test_golden_weights.py", "tests/algorithms")
EASYR1_TESTS = ("tests/config/test_easyr1_keys.py",)
RUN_SETTINGS = ("trainer.save_freq=1", "worker.rollout.name=transformers", "trainer.logger=[file]")
Frozen = dict[str, Any]
"""What a gate computed: texts and digests by name."""


def main() -> int:
    options = _arguments()
    folder: Path = options.folder
    if options.command == "freeze":
        folder.mkdir(parents=True, exist_ok=True)
        inputs = {
            "runs": options.runs,
            "problems": dict(source.split("=", 1) for source in options.problems),
            "pairs": [str(path.resolve()) for path in options.pairs],
            "rows": options.rows,
        }
        (folder / "inputs.json").write_text(json.dumps(inputs, indent=1) + "\n")
    inputs = json.loads((folder / "inputs.json").read_text())
    num_different = 0
    for name, gate in GATES.items():
        if options.only and name not in options.only:
            continue
        start = time.monotonic()
        computed = gate(folder, inputs)
        seconds = time.monotonic() - start
        kept = folder / f"{name}.json"
        if options.command == "freeze":
            kept.write_text(json.dumps(computed, indent=1, sort_keys=True) + "\n")
            print(f"{name} frozen: {len(computed)} values in {seconds:.0f} s", flush=True)
            continue
        differences = list(_differences(json.loads(kept.read_text()), computed))
        num_different += bool(differences)
        print(f"{name} {'FAIL' if differences else 'PASS'}: {len(computed)} values in {seconds:.0f} s", flush=True)
        for line in _grouped(differences)[: options.most]:
            print(f"    {line}", flush=True)
        if len(_grouped(differences)) > options.most:
            print(f"    and {len(_grouped(differences)) - options.most} more", flush=True)
    return 1 if num_different else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["freeze", "check"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--runs", nargs="*", default=["microgeo/base"], help="configurations to train two steps of")
    parser.add_argument("--problems", nargs="*", default=[], help="NAME=FILE of data sets with problem, answer, images")
    parser.add_argument(
        "--pairs", nargs="*", type=Path, default=[], help="files of lines with response and ground_truth"
    )
    parser.add_argument("--rows", type=int, default=0, help="number of rows of G7's starts; 0: quickstart alone")
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--most", type=int, default=20, help="number of differences to print")
    return parser.parse_args()


def _differences(frozen: Frozen, computed: Frozen) -> Iterator[str]:
    for name in sorted(frozen.keys() | computed.keys()):
        if name.startswith("seconds"):
            yield from ()
        elif name not in computed:
            yield f"{name}: gone, was {_short(frozen[name])}"
        elif name not in frozen:
            yield f"{name}: new, {_short(computed[name])}"
        elif frozen[name] != computed[name]:
            yield f"{name}: {_changed(frozen[name], computed[name])}"


def _grouped(differences: list[str]) -> list[str]:
    """Returns each kind of difference once, with the number of values that have it."""
    names: dict[str, list[str]] = {}
    for difference in differences:
        name, _, change = difference.partition(": ")
        names.setdefault(change, []).append(name)
    grouped: list[str] = []
    for change, changed in names.items():
        others = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        grouped.append(f"{changed[0]}{others}: {change}")
    return grouped


def _changed(was: object, now: object) -> str:
    """Returns both values, or of a text's lines those that differ."""
    if isinstance(was, dict) and isinstance(now, dict) and "text" in was and "text" in now:
        lines = difflib.unified_diff(was["text"], now["text"], lineterm="", n=0)
        return " ".join(line for line in lines if not line.startswith(("---", "+++", "@@")))
    return f"was {_short(was)}, is {_short(now)}"


def _short(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 100 else f"{text[:97]}..."


def trained(folder: Path, inputs: Frozen) -> Frozen:
    """G1: the digests of two steps, in one piece and resumed after the first."""
    values: Frozen = {}
    for name in inputs["runs"]:
        with tempfile.TemporaryDirectory() as place:
            whole = Path(place) / "whole"
            _train(whole, f"config={name}", "trainer.max_steps=2")
            values |= {f"{name} {entry}": value for entry, value in _run_digests(whole).items()}
            halves = Path(place) / "halves"
            _train(halves, f"config={name}", "trainer.max_steps=2", stop_after=1)
            _train(halves, f"config={name}", "trainer.max_steps=2")
            values[f"{name} resumed equals uninterrupted"] = _weights(whole, 2) == _weights(halves, 2)
    return values


def _train(folder: Path, *settings: str, stop_after: int | None = None) -> None:
    """Trains by the command; with `stop_after`, a checkpoint of that step is left as if the run had been killed there."""
    command = [sys.executable, "-m", "cepo.train", *settings, *RUN_SETTINGS, f"trainer.save_checkpoint_path={folder}"]
    _run(command)
    if stop_after is not None:
        _forget_steps_after(folder, stop_after)


def _forget_steps_after(folder: Path, step: int) -> None:
    tracker = folder / "checkpoint_tracker.json"
    state = json.loads(tracker.read_text())
    for checkpoint in folder.glob("global_step_*"):
        if int(checkpoint.name.rpartition("_")[2]) > step:
            shutil.rmtree(checkpoint)
    state["last_global_step"] = step
    if "last_actor_path" in state:
        state["last_actor_path"] = str(folder / f"global_step_{step}" / "actor")
    tracker.write_text(json.dumps(state))


def _run_digests(folder: Path) -> Frozen:
    """Returns the digests of what a run wrote, without times, paths and memory."""
    values: Frozen = {}
    for number, line in enumerate((folder / "metrics.jsonl").read_text().splitlines()):
        for name, value in json.loads(line).items():
            if not name.startswith(("timing", "perf", "memory", "throughput", "seconds")):
                values[f"metrics {number} {name}"] = value
    import pyarrow.parquet

    for path in sorted((folder / "rollouts").glob("*.parquet")):
        rows = pyarrow.parquet.read_table(path).to_pylist()
        values[f"rollouts {path.name}"] = _digest(json.dumps(rows, sort_keys=True, default=str))
    for step in (1, 2):
        values[f"weights {step}"] = _weights(folder, step)
    return values


def _weights(folder: Path, step: int) -> str:
    """Returns the digest of a checkpoint's tensors. The files' headers also name the run."""
    import torch
    from safetensors.torch import load_file

    found = hashlib.sha256()
    for path in sorted((folder / f"global_step_{step}").rglob("*.safetensors")):
        for name, tensor in sorted(load_file(path).items()):
            found.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
            found.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def parity(folder: Path, inputs: Frozen) -> Frozen:
    """G2: the outcome of the tests against the second implementation."""
    return _test_outcomes(PARITY_TESTS)


def configurations(folder: Path, inputs: Frozen) -> Frozen:
    """G3: the resolved text of every shipped file, and the outcome of the tests of EasyR1's scripts."""
    values = _test_outcomes(EASYR1_TESTS)
    for path in sorted((ROOT / "configs").rglob("*.yaml")):
        name = path.relative_to(ROOT).as_posix()
        result = _cepo("config", f"config={name}", check=False)
        values[name] = {"code": result.returncode, "text": result.stdout.splitlines()}
    return values


def old_folder(folder: Path, inputs: Frozen) -> Frozen:
    """G4: what reporting, merging and resuming make of a run that the frozen checkout wrote."""
    run = folder / "old_run"
    if not run.exists():
        _train(run, f"config={inputs['runs'][0]}", "trainer.max_steps=2", stop_after=1)
    values: Frozen = {}
    with tempfile.TemporaryDirectory() as place:
        copy = Path(place) / "run"
        shutil.copytree(run, copy)
        report = _cepo("report", str(copy), check=False)
        values["report"] = {"code": report.returncode, "lines": report.stdout.replace(str(place), "").splitlines()}
        merged = Path(place) / "merged"
        merge = _cepo("merge", str(copy / "global_step_1"), str(merged), check=False)
        values["merge"] = merge.returncode
        for path in sorted(merged.rglob("*.safetensors")):
            values[f"merged {path.name}"] = _digest(path.read_bytes())
        _train(copy, f"config={inputs['runs'][0]}", "trainer.max_steps=2")
        values["resumed"] = _weights(copy, 2)
    return values


def verdicts(folder: Path, inputs: Frozen) -> Frozen:
    """G5: the verdict of the math and of the benchmark reward on each pair, with seconds for all of them."""
    from cepo.rewards.benchmark import compute_score as benchmark_score
    from cepo.rewards.math import compute_score as math_score

    pairs = [*_problem_pairs(inputs), *_listed_pairs(inputs)]
    values: Frozen = {}
    for name, score in (("math", math_score), ("benchmark", benchmark_score)):
        start = time.monotonic()
        for response, truth in pairs:
            sample = {"response": response, "response_length": len(response), "ground_truth": truth}
            verdict = score([sample])[0]["accuracy"]
            values[f"{name} {truth!r} <- {response!r}"] = verdict
        values[f"seconds of {name}"] = time.monotonic() - start
    return values


def _problem_pairs(inputs: Frozen) -> Iterator[tuple[str, str]]:
    """Each answer boxed, as a sentence, and rounded or with a unit; and the answer of the row before it."""
    import pyarrow.parquet

    for path in inputs["problems"].values():
        answers = pyarrow.parquet.read_table(path, columns=["answer"]).column("answer").to_pylist()
        for before, answer in zip([answers[-1], *answers], answers, strict=False):
            yield rf"\boxed{{{answer}}}", answer
            yield rf"So the value is \boxed{{x = {answer} \text{{ cm}}}}.", answer
            yield rf"\boxed{{{before}}}", answer


def _listed_pairs(inputs: Frozen) -> Iterator[tuple[str, str]]:
    for path in inputs["pairs"]:
        for line in Path(path).read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            yield row["response"], row["ground_truth"]


def rows(folder: Path, inputs: Frozen) -> Frozen:
    """G6: for each data set the digest of every problem, by its position."""
    from cepo.config.schema import DataConfig
    from cepo.data.training_set import read_training_sets
    from cepo.models.processing import Processing

    processing = Processing(str(_model_folder()))
    values: Frozen = {}
    for name, path in inputs["problems"].items():
        settings: dict[str, Any] = {"train_files": path, "prompt_key": "problem", "answer_key": "answer"}
        settings |= {"image_key": "images", "max_prompt_length": 4096, "rollout_batch_size": 1}
        problems = read_training_sets(DataConfig(**settings), processing)
        values[f"{name} content"] = problems.content()
        for index in range(len(problems)):
            problem = problems[index]
            found = hashlib.sha256(repr((problem.text, problem.ground_truth)).encode())
            for image in problem.images:
                found.update(f"{image.mode} {image.size}".encode())
                found.update(image.tobytes())
            values[f"{name} {index}"] = found.hexdigest()
    return values


def _model_folder() -> Path:
    from cepo.microgeo.world import build_world

    return build_world().model_path


def seconds(folder: Path, inputs: Frozen) -> Frozen:
    """G7: seconds of the quickstart and of two starts, printed and recorded, with the quickstart's accuracies compared."""
    with tempfile.TemporaryDirectory() as place:
        start = time.monotonic()
        _run(
            [
                sys.executable,
                "-m",
                "cepo.train",
                "config=microgeo/quickstart",
                f"trainer.save_checkpoint_path={place}/run",
            ]
        )
        values: Frozen = {"seconds of the quickstart": time.monotonic() - start}
        for line in (Path(place) / "run" / "metrics.jsonl").read_text().splitlines():
            row = json.loads(line)
            if "val/accuracy" in row:
                values[f"accuracy after {row['step']} steps"] = row["val/accuracy"]
        if inputs["rows"]:
            _run([sys.executable, "-m", "lab.rows_at_scale", "make", f"{place}/rows", "--rows", str(inputs["rows"])])
            measured = _run([sys.executable, "-m", "lab.rows_at_scale", "measure", f"{place}/rows/images.jsonl"])
            for line in measured.stdout.splitlines():
                row = json.loads(line)
                values[f"seconds of start {row['start']}"] = row["seconds"]
    for name, value in values.items():
        print(f"    {name}: {value:.3f}", flush=True)
    return values


def _test_outcomes(paths: tuple[str, ...]) -> Frozen:
    result = _run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *paths], check=False)
    failed = [line for line in result.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return {"exit code of " + " ".join(paths): result.returncode, "failed of " + " ".join(paths): failed}


def _cepo(*words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return _run([sys.executable, "-m", "cepo", *words], check=check)


def _run(command: list[str], *, check: bool = True) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if check and result.returncode:
        raise SystemExit(
            f"{' '.join(command)} ended with {result.returncode}:\n{result.stdout[-2000:]}{result.stderr[-4000:]}"
        )
    return result


def _digest(content: str | bytes) -> str:
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()


GATES: dict[str, Callable[[Path, Frozen], Frozen]] = {
    "G1": trained,
    "G2": parity,
    "G3": configurations,
    "G4": old_folder,
    "G5": verdicts,
    "G6": rows,
    "G7": seconds,
}


if __name__ == "__main__":
    sys.exit(main())
