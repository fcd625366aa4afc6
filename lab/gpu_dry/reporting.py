"""The line by which a checking process tells its parent what it found."""

from __future__ import annotations

import json

MARK = "gpu_dry: "


def report(*, ok: bool, found: str) -> None:
    """Prints the outcome of this process's check."""
    print(MARK + json.dumps({"ok": ok, "found": found}), flush=True)


def reported(output: str) -> dict[str, object] | None:
    """Returns the outcome that a process printed; None if it printed none."""
    lines = [line.removeprefix(MARK) for line in output.splitlines() if line.startswith(MARK)]
    return json.loads(lines[-1]) if lines else None
