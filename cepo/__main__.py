"""Runs the console script `cepo` for `python3 -m cepo`."""

from __future__ import annotations

from cepo.commands.cli import script

if __name__ == "__main__":
    script()
