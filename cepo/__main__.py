"""`python3 -m cepo` is the console script `cepo`."""

from __future__ import annotations

from cepo.cli import script

if __name__ == "__main__":
    script()
