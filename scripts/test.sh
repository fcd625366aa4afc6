#!/usr/bin/env bash
# Installs what the tests need and runs them. Extra arguments go to pytest: bash scripts/test.sh -m "not heavy"
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
ensure_environment "cpu,dev"
cd "$ROOT"
"$VENV/bin/ruff" check .
"$VENV/bin/ruff" format --check .
"$VENV/bin/pyright" --pythonpath "$VENV/bin/python"
exec "$VENV/bin/python" -m pytest -rs "$@"
