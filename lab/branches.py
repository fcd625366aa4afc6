"""Counts the branches of each package that the tests take, and records which test runs which line.

    pip install coverage
    python3 lab/branches.py --folder build/branches [--report] [--record FILE] [TESTS ...]

This runs the given tests (by default all) and prints, for each package, how many of its branches they and their child
processes took. `CORE` is the code that computes and reads no files. Further runs with the same folder add their tests.
`--report` only prints, and `--record` also writes the numbers with date, commit and versions to a JSON file.
`lab/mutants.py` reads the record of lines. Killed processes leave no record, such as Ray's workers at shutdown.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from lab.support.machine import machine_record  # noqa: E402

CORE = (
    "algorithms/", "losses/", "config/", "errors.py", "metrics.py", "files/trees.py", "sections/", "types.py",
    "data/batch.py", "data/prompts.py", "data/dataset.py", "answers/", "rewards/benchmark.py", "rewards/contract.py",
    "rewards/math.py",
)  # fmt: skip
SETTINGS = """[run]
branch = true
parallel = true
source = {source}
data_file = {data}
# A child process has the name of the test that started it.
context = ${{PYTEST_CURRENT_TEST-}}
sigterm = true
patch = _exit, fork
"""


def recorded(folder: Path, tests: Sequence[str]) -> int:
    """Runs the tests and returns pytest's exit code."""
    settings = folder / "settings"
    settings.write_text(SETTINGS.format(source=ROOT / "cepo", data=folder / "data"), encoding="utf-8")
    environment = os.environ | {"COVERAGE_PROCESS_START": str(settings), "PYTHONPATH": str(ROOT)}
    environment.pop("PYTEST_CURRENT_TEST", None)  # if a test calls this, its name must not apply to the tests run here
    command = [sys.executable, "-m", "pytest", "-p", "lab.support.lines_of_tests", "--show-capture=no", *tests]
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def taken(folder: Path) -> dict[str, tuple[int, int]]:
    """Returns the numbers of taken and of all branches, by module."""
    from coverage import Coverage

    coverage = Coverage(data_file=str(folder / "data"), config_file=str(folder / "settings"))
    coverage.combine(keep=True)
    coverage.save()
    report = folder / "report.json"
    coverage.json_report(outfile=str(report))
    files = json.loads(report.read_text(encoding="utf-8"))["files"]
    return {
        path.rpartition("cepo/")[2]: (each["summary"]["covered_branches"], each["summary"]["num_branches"])
        for path, each in files.items()
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a table of packages; returns pytest's exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "branches")
    parser.add_argument("--report", action="store_true", help="run no test")
    parser.add_argument("--record", type=Path, help="JSON file for the numbers")
    parser.add_argument("tests", nargs="*")
    options = parser.parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    code = 0 if options.report else recorded(options.folder.resolve(), options.tests)
    covered: Counter[str] = Counter()
    existing: Counter[str] = Counter()
    for file, (yes, of) in taken(options.folder.resolve()).items():
        core = file.startswith(CORE)
        package = file.partition("/")[0] if "/" in file else "modules beside the packages"
        for name in (f"{package}, core" if core else package, "ALL CORE" if core else "ALL THE REST"):
            covered[name] += yes
            existing[name] += of
    for name in sorted(existing):
        if existing[name]:
            print(f"| {name} | {covered[name]} of {existing[name]} | {covered[name] / existing[name]:.1%} |")
    if options.record is not None:
        packages = {name: {"taken": covered[name], "of": existing[name]} for name in sorted(existing) if existing[name]}
        command = ["git", "rev-parse", "--short", "HEAD"]
        commit = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
        record = {**machine_record(1), "commit": commit, "branches": packages}
        options.record.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return code


if __name__ == "__main__":
    sys.exit(main())
