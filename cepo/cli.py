"""Runs the commands as `python -m cepo.cli` too, which scripts of earlier versions call; they are in `cepo.commands.cli`."""

from cepo.commands.cli import main, script

__all__ = ["main", "script"]

if __name__ == "__main__":
    script()
