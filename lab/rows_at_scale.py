"""Measures how a start reads and checks many rows: seconds, processor time and memory, with an empty and a full cache.

    python -m lab.rows_at_scale make FOLDER --rows 100000 [--distinct 200 --width 1024]
    python -m lab.rows_at_scale measure FOLDER/images.jsonl --starts 2
    python -m lab.rows_at_scale steps FOLDER/images.jsonl --seconds 10

`make` writes a tiny model and two sets of rows: `text.jsonl`, and `images.jsonl` with an image in each row, by default of
1024 x 768 pixels and one of 200. `measure` starts a process for each start, which reads the set as training does, and prints a
line of JSON for each: seconds and processor seconds from the loaded tokenizer to the checked rows, and the peaks of the
resident memory of the main process and of all processes together. The first start finds an empty cache. Memory that
processes share counts once in `peak_all_gb` (proportional) and for each process in `peak_all_resident_gb`.

`steps` prints how long steps of 64 prompts wait for their images if each then takes `--seconds` on other devices.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

PROMPTS = 64
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_SECONDS_BETWEEN_LOOKS = 0.1


def main() -> None:
    options = _arguments()
    if options.command == "make":
        make(options.folder, options.rows, options.distinct, options.width)
    elif options.command == "start":
        start(options.data, alone=options.alone)
    elif options.command == "steps":
        steps(options.data, options.seconds)
    else:
        measure(options.data, options.starts, alone=options.alone)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("make", help="write the model and the rows")
    making.add_argument("folder", type=Path)
    making.add_argument("--rows", type=int, default=100_000)
    making.add_argument("--distinct", type=int, default=200, help="images")
    making.add_argument("--width", type=int, default=1024, help="of an image in pixels; its height is 3/4 of it")
    measuring = commands.add_parser("measure", help="start several times, at first with an empty cache")
    measuring.add_argument("data", type=Path)
    measuring.add_argument("--starts", type=int, default=2)
    starting = commands.add_parser("start", help="one start; used by measure")
    starting.add_argument("data", type=Path)
    waiting = commands.add_parser("steps", help="how long steps wait for their images")
    waiting.add_argument("data", type=Path)
    waiting.add_argument("--seconds", type=float, default=10.0)
    for command in (measuring, starting):
        command.add_argument("--alone", action="store_true", help="check in one process")
    return parser.parse_args()


def make(folder: Path, rows: int, num_distinct: int, width: int) -> None:
    """Writes the model, the images and the two sets of rows."""
    from lab.worlds.model import build_untrained_model

    build_untrained_model(folder / "model")
    images = folder / "pictures"
    images.mkdir(parents=True, exist_ok=True)
    for number in range(num_distinct):
        _photograph(number, (width, width * 3 // 4), images / f"{number:03d}.jpg")
    words = random.Random(0)
    with (folder / "text.jsonl").open("w") as texts, (folder / "images.jsonl").open("w") as with_images:
        for number in range(rows):
            problem = f"Problem {number}. " + " ".join(words.choice(_WORDS) for _ in range(60))
            row: dict[str, object] = {
                "prompt": problem,
                "answer": str(number % 97),
                "solution": f"It is {number % 97}.",
            }
            texts.write(json.dumps(row) + "\n")
            row["prompt"] = f"<image>{problem}"
            row["images"] = [f"pictures/{number % num_distinct:03d}.jpg"]
            with_images.write(json.dumps(row) + "\n")


_WORDS = ("the", "triangle", "circle", "area", "length", "angle", "is", "of", "and", "find", "side", "12", "3.5", "sum")


def _photograph(seed: int, size: tuple[int, int], path: Path) -> None:
    """Writes a JPEG, of 1024 x 768 pixels about 150 kB: smooth areas with noise."""
    import numpy
    from PIL import Image

    random_numbers = numpy.random.default_rng(seed)
    coarse = Image.fromarray(random_numbers.integers(0, 256, (24, 32, 3), dtype=numpy.uint8))
    smooth = numpy.asarray(coarse.resize(size, Image.Resampling.BICUBIC), dtype=numpy.float32)
    noisy = smooth + random_numbers.normal(0, 6, smooth.shape)
    Image.fromarray(noisy.clip(0, 255).astype(numpy.uint8)).save(path, quality=88)


def start(data: Path, *, alone: bool) -> None:
    """Reads and checks a set as training does; the parent process takes the time between the two lines."""
    if alone:
        from cepo.data import row_check

        row_check.MOST_PROCESSES = 1
    from cepo.config.schema import DataConfig
    from cepo.data.training_set import read_training_sets
    from cepo.models.processing import Processing
    from cepo.terminal.progress import log_to_stderr

    log_to_stderr()
    config = DataConfig(**_settings(data))
    processing = Processing(str(data.parent / "model"))
    print("loaded", flush=True)
    problems = read_training_sets(config, processing)
    content = problems.content()
    problems.image_probe()
    problems.indices(0, 64)
    print(json.dumps({"content": content, "most_visuals": problems.most_visuals}), flush=True)
    sys.stdin.readline()


def _settings(data: Path) -> dict[str, Any]:
    return {
        "train_files": str(data),
        "image_dir": str(data.parent),
        "rollout_batch_size": PROMPTS,
        "min_pixels": None,
        "max_prompt_length": 2048,
    }


def steps(data: Path, seconds: float) -> None:
    """Prints the wait of five steps that read ahead, and of five that do not."""
    from cepo.algorithms.settings import TeacherConfig
    from cepo.config.schema import DataConfig
    from cepo.data import read_ahead
    from cepo.data.prompts import ContextBuilder
    from cepo.data.training_set import read_training_sets
    from cepo.models.processing import Processing

    config = DataConfig(**_settings(data))
    processing = Processing(str(data.parent / "model"))
    problems = read_training_sets(config, processing)
    contexts = ContextBuilder(processing, TeacherConfig(), max_context_length=config.max_prompt_length)
    for worthwhile in (float("inf"), 0.0):
        read_ahead.WORTHWHILE_SECONDS = worthwhile
        reader = read_ahead.ProblemReader(problems, contexts, PROMPTS)
        waits: list[float] = []
        for number in range(5):
            begin = time.monotonic()
            reader.round(number)
            waits.append(round(time.monotonic() - begin, 3))
            reader.read_ahead(number + 1)
            time.sleep(seconds)
        reader.close()
        print(json.dumps({"reads_ahead": worthwhile == 0.0, "seconds_waited": waits}), flush=True)


def measure(data: Path, starts: int, *, alone: bool) -> None:
    """Starts `starts` times with a common cache, which is empty at first, and prints what each start took."""
    with tempfile.TemporaryDirectory() as cache:
        for number in range(starts):
            print(
                json.dumps({"start": number + 1, "data": data.name} | _one_start(data, cache, alone=alone)), flush=True
            )


def _one_start(data: Path, cache: str, *, alone: bool) -> dict[str, object]:
    places = {"XDG_CACHE_HOME": cache, "HF_HOME": f"{cache}/hf"}
    child = subprocess.Popen(
        [sys.executable, str(Path(__file__).resolve()), "start", str(data), *(["--alone"] if alone else [])],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **places},
    )
    assert child.stdout is not None, "it is a pipe"
    assert child.stdin is not None, "it is a pipe"
    watch = _Watch(child.pid)
    child.stdout.readline()
    begin, used_before = time.monotonic(), watch.look()
    found = child.stdout.readline()
    seconds = time.monotonic() - begin
    used = watch.look() - used_before
    watch.end()
    child.stdin.write("\n")
    child.stdin.close()
    child.wait()
    return {
        "seconds": round(seconds, 2),
        "processor_seconds": round(used, 2),
        "peak_main_gb": round(watch.peak_main / 1e9, 3),
        "peak_all_gb": round(watch.peak_shared_once / 1e9, 3),
        "peak_all_resident_gb": round(watch.peak_all / 1e9, 3),
    } | json.loads(found)


class _Watch:
    """Looks ten times a second at a process and all that it started."""

    def __init__(self, root: int) -> None:
        self._root = root
        self._seconds: dict[int, float] = {}
        self.peak_main = self.peak_all = self.peak_shared_once = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._repeat, daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._is_over.set()
        self._thread.join()

    def look(self) -> float:
        """Notes the memory of all processes and returns the processor seconds that they have taken so far."""
        resident: dict[int, int] = {}
        shared_once = 0
        for process in self._processes():
            try:
                fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
                rollup = Path(f"/proc/{process}/smaps_rollup").read_text().split()
            except OSError:  # it has ended
                continue
            self._seconds[process] = (int(fields[11]) + int(fields[12])) / _TICKS
            resident[process] = int(fields[21]) * _PAGE
            shared_once += int(rollup[rollup.index("Pss:") + 1]) * 1024
        self.peak_main = max(self.peak_main, resident.get(self._root, 0))
        self.peak_all = max(self.peak_all, sum(resident.values()))
        self.peak_shared_once = max(self.peak_shared_once, shared_once)
        return sum(self._seconds.values())

    def _processes(self) -> list[int]:
        parents: dict[int, int] = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                try:
                    fields = (entry / "stat").read_text().rpartition(")")[2].split()
                except OSError:  # it has ended
                    continue
                parents[int(entry.name)] = int(fields[1])
        family = [self._root]
        for process in family:  # which grows with every child found
            family += [child for child, parent in parents.items() if parent == process]
        return family

    def _repeat(self) -> None:
        while not self._is_over.wait(_SECONDS_BETWEEN_LOOKS):
            self.look()


if __name__ == "__main__":
    main()
