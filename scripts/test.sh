#!/usr/bin/env bash
# Installs what the tests need and runs them. Extra arguments go to pytest: bash scripts/test.sh -m "not heavy"
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
ensure_environment "cpu,video,dev"
cd "$ROOT"
"$CEPO_PYTHON" -m ruff check .
"$CEPO_PYTHON" -m ruff format --check .
"$CEPO_PYTHON" -m pyright --pythonpath "$CEPO_PYTHON"
exec "$CEPO_PYTHON" -m pytest -rs "$@"
