"""Looks for known vulnerabilities of the pinned packages: `python3 scripts/audit.py` (needs `pip install pip-audit`).

pip-audit queries a database on the network for each package of `constraints/*.txt`. If the database cannot be reached,
it skips packages and still reports success, so this script counts the packages that were really looked up.

Exit codes: 0 no vulnerability is known, 1 some are known, 3 not every package could be looked up.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

CONSTRAINTS = Path(__file__).resolve().parent.parent / "constraints"
NOT_SCANNED = 3


def verdict(dependencies: list[dict[str, Any]]) -> tuple[int, str]:
    """Returns the exit code and the message for the dependencies in a report of pip-audit."""
    skipped = [each["name"] for each in dependencies if "skip_reason" in each]
    known = [(each, one["id"]) for each in dependencies for one in each.get("vulns", ())]
    looked_up = len(dependencies) - len(skipped)
    lines = [f"{each['name']} {each['version']}: {name}" for each, name in known]
    lines.append(f"{looked_up} of {len(dependencies)} packages were looked up, {len(known)} known vulnerabilities")
    if skipped or not dependencies:
        lines.append(f"NOT SCANNED: {len(skipped)} packages; is a vulnerability database reachable from here?")
    return (1 if known else NOT_SCANNED if skipped or not dependencies else 0), "\n".join(lines)


def main() -> int:
    """Runs pip-audit and prints the known vulnerabilities; returns the exit code."""
    files = [option for file in sorted(CONSTRAINTS.glob("*.txt")) for option in ("-r", str(file))]
    command = [sys.executable, "-m", "pip_audit", "--no-deps", "--disable-pip", "--format", "json", *files]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        dependencies = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        print(f"{done.stderr.strip()}\nNOT SCANNED: pip-audit gave no report")
        return NOT_SCANNED
    code, text = verdict(dependencies)
    print(text)
    return code


if __name__ == "__main__":
    sys.exit(main())
