"""Trains vision-language models with Contrastive Evidence Policy Optimization (CEPO) and other methods."""

import sys

__version__ = "0.4.0"

# Older Pythons must be able to parse this file, so that they print this message.
if sys.version_info < (3, 11):  # noqa: UP036
    sys.stderr.write(
        f"cepo needs Python 3.11, 3.12 or 3.13, and this is Python {sys.version_info[0]}.{sys.version_info[1]} "
        f"({sys.executable}). Install a newer Python beside it, and name it: PYTHON=python3.11 bash scripts/quickstart.sh, "
        "or python3.11 -m venv .venv for an environment of your own.\n"
    )
    raise SystemExit(2)
