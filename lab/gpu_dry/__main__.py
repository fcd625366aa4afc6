"""Checks the GPU path on a machine without a GPU, in an environment with the wheels of the extra `gpu`.

    python -m lab.gpu_dry                      # everything: about an hour on 2 cores
    python -m lab.gpu_dry --only attention     # one part, of PARTS
    python -m lab.gpu_dry --card B200          # one card
    python -m lab.gpu_dry --what "all weights" # checks whose words contain these

Each check is a process of its own that sees a card which computes nothing (`hollow/`). lab/notes/gpu-dry.md says what
that can show. The record goes to lab/results/gpu_dry.json; each check replaces its own row there.

Exit code: 0 all passed, 1 a check failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lab.gpu_dry.cards import CARDS, build_library, environment, reported
from lab.gpu_dry.memory import CASES as MEMORY_CASES
from lab.gpu_dry.step import CASES
from lab.support.machine import ROOT, machine_record
from lab.support.tables import RESULTS, table

PARTS = ("engine", "evaluation", "options", "memory", "attention", "values", "head", "step")
PAGE = ROOT / "lab" / "notes" / "gpu-dry.md"
SECONDS = 900
"""The time limit of one check."""
VARIABLES = {"memory": {"CEPO_DRY_LARGEST_COPY": str(4 << 20)}}
"""Of a part's processes. Larger copies there are of weights without values, and would fill the host's memory."""
LIBRARIES = ("triton", "flashinfer-python", "nvidia-cudnn-cu13", "nvidia-nccl-cu13", "ray")


@dataclass(frozen=True, kw_only=True)
class Check:
    """One process.

    Attributes:
        part: the module of `lab.gpu_dry` that it runs.
        what: what it checks, in words.
        arguments: of the module.
        count: number of cards that a process sees.
        ranks: number of processes, each with a card of its own.
    """

    part: str
    what: str
    card: str
    arguments: tuple[str, ...]
    count: int = 1
    ranks: int = 1

    @property
    def name(self) -> tuple[str, str, str]:
        """The check's part, cards and words in the record."""
        num_cards = self.count * self.ranks
        return self.part, f"{num_cards} x {self.card}" if num_cards > 1 else self.card, self.what


def checks() -> Iterator[Check]:
    """Yields every check."""
    yield from engine_checks()
    yield Check(part="evaluation", what="small model", card="H100", arguments=())
    yield from option_checks()
    for name, case in MEMORY_CASES.items():
        for card in case.cards:
            yield Check(part="memory", what=name, card=card, arguments=(name,))
    for card in CARDS:
        for size, dtype in (("2b", "bfloat16"), ("2b", "float32"), ("4b", "bfloat16")):
            arguments = (f"qwen3-vl-{size}", dtype)
            yield Check(part="attention", what=f"{size}, {dtype}", card=card, arguments=arguments)
    for card in CARDS:
        for dtype in ("float16", "float32"):
            yield Check(part="values", what=f"micro, {dtype}", card=card, arguments=("micro", dtype))
    for card in CARDS:
        for dtype in ("bfloat16", "float32"):
            yield Check(part="head", what=dtype, card=card, arguments=("qwen3-vl-2b", dtype))
    for name in CASES:
        yield Check(part="step", what=name, card="H100", arguments=(name,))


def engine_checks() -> Iterator[Check]:
    for card in CARDS:
        for weights, words in (("adapter", "adapter"), ("full", "all weights")):
            arguments = ("qwen3-vl-2b", weights)
            yield Check(part="engine", what=f"2b, {words}", card=card, arguments=arguments)
    for name, words in (("internvl3-2b", "InternVL3 2b"), ("smolvlm2-2.2b", "SmolVLM2 2.2b")):
        yield Check(part="engine", what=f"{words}, adapter", card="H100", arguments=(name, "adapter"))
    for weights, words in (("adapter", "adapter"), ("full", "all weights")):
        arguments = ("qwen3-vl-2b", weights, "2", "2")
        yield Check(part="engine", what=f"2b, {words}, 2 ranks share it", card="H100", arguments=arguments, ranks=2)
    apart = ("qwen3-vl-2b", "adapter", "2", "1")
    yield Check(part="engine", what="2b, adapter, 2 ranks with one each", card="H100", arguments=apart, ranks=2)
    first = ("qwen3-vl-2b", "full", "8", "1", "alone")
    yield Check(part="engine", what="2b, all weights, first of 8 with one each", card="H100", arguments=first)


def option_checks() -> Iterator[Check]:
    for card in CARDS:
        yield Check(part="options", what="2b", card=card, arguments=("qwen3-vl-2b", "1", "1", "sleep"))
    awake = ("qwen3-vl-2b", "2", "2", "awake")
    yield Check(part="options", what="2b, 2 devices share an engine", card="H100", arguments=awake, count=2)
    asleep = ("qwen3-vl-4b", "8", "1", "sleep")
    yield Check(part="options", what="4b, 8 engines that sleep", card="H100", arguments=asleep, count=8)


def outcome(check: Check, library: Path, cache: Path) -> dict[str, Any]:
    """Runs a check and returns its row of the record."""
    begun = time.monotonic()
    command = [sys.executable, "-m", f"lab.gpu_dry.{check.part}", *check.arguments]
    variables = environment(library, CARDS[check.card], check.count, cache) | VARIABLES.get(check.part, {})
    result, failure = finished(command, variables)
    seconds = round(time.monotonic() - begun, 1)
    names = dict(zip(("part", "card", "what"), check.name, strict=True))
    return {**names, **(result or {"ok": False, "found": failure}), "seconds": seconds, "commit": commit()}


def finished(command: list[str], variables: dict[str, str]) -> tuple[dict[str, object] | None, str]:
    """Returns what a check's process reported, None if nothing, and then why; all that it has started is ended."""
    process = subprocess.Popen(
        command,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, messages = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return None, f"no result after {SECONDS} s"
    finally:
        with contextlib.suppress(ProcessLookupError):  # nothing of it runs any more
            os.killpg(process.pid, signal.SIGKILL)
    result = reported(output)
    if result is not None:
        return result, ""
    lines = [line for line in messages.splitlines() if line.strip()]
    print("\n".join(lines[-40:]), file=sys.stderr)
    # The last error, since warnings of libraries may follow it.
    errors = [line for line in lines if "Error: " in line]
    last = [*lines[-1:], *errors[-1:]]
    return None, f"exit code {process.returncode}: {last[-1] if last else 'no message'}"


def is_asked(check: Check, options: argparse.Namespace) -> bool:
    has_part = options.only in (None, check.part)
    has_card = options.card in (None, check.card)
    return has_part and has_card and options.what in check.what


def page_table(rows: list[dict[str, Any]]) -> str:
    """Returns the record's table, as lab/notes/gpu-dry.md has it, with a row for each check that the record lacks."""
    recorded = {(row["part"], row["card"], row["what"]): row for row in rows}
    lines: list[list[str]] = []
    for check in checks():
        row = recorded.get(check.name)
        if row is None:
            lines.append([*check.name, "not yet run", ""])
        else:
            lines.append([*check.name, "yes" if row["ok"] else "NO", row["found"]])
    return table(("part", "card", "what", "passed", "found"), lines)


def commit() -> str:
    """Returns the commit of this checkout, marked if other files than the record differ from it."""
    described = subprocess.run(["git", "describe", "--always"], capture_output=True, text=True, check=False)
    written = [":!lab/notes/gpu-dry.md", ":!lab/results"]
    differs = subprocess.run(["git", "diff", "--quiet", "HEAD", "--", ".", *written], check=False).returncode != 0
    return (described.stdout.strip() or "unknown") + ("-dirty" if differs else "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PARTS)
    parser.add_argument("--card", choices=CARDS)
    parser.add_argument("--what", default="", help="a part of the check's words")
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu_dry.json")
    options = parser.parse_args()
    asked = [check for check in checks() if is_asked(check, options)]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        library = build_library(Path(name))
        for number, check in enumerate(asked):
            # Attention and head read what they have compiled; engines of one card may share it.
            cache = check.card if check.part == "engine" else str(number)
            row = outcome(check, library, Path(name) / cache)
            print(
                f"{'ok  ' if row['ok'] else 'FAIL'} {row['part']}, {row['card']}, {row['what']}: {row['found']}",
                flush=True,
            )
            rows.append(row)
            write(row, options.out)
    if options.out == RESULTS / "gpu_dry.json":
        write_page(json.loads(options.out.read_text(encoding="utf-8"))["checks"])
    return 0 if all(row["ok"] for row in rows) else 1


def write(row: dict[str, Any], out: Path) -> None:
    """Writes a row into the record, in place of an earlier one of the same check."""
    names = [each.name for each in checks()]
    recorded = json.loads(out.read_text(encoding="utf-8"))["checks"] if out.is_file() else []
    by_name = {(old["part"], old["card"], old["what"]): old for old in [*recorded, row]}
    record = machine_record(1)
    record["versions"] |= {name: version(name) for name in LIBRARIES}
    record["checks"] = [by_name[name] for name in names if name in by_name]
    out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def write_page(rows: list[dict[str, Any]]) -> None:
    """Replaces the table at the end of lab/notes/gpu-dry.md."""
    text = PAGE.read_text(encoding="utf-8")
    new = page_table(rows)
    PAGE.write_text(text[: text.index(new.splitlines()[0])] + new + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
