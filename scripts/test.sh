#!/usr/bin/env bash
# Installs what the tests need and runs them. Extra arguments go to pytest: bash scripts/test.sh -m "not heavy"
# Two test files at a time (-n 0: one); files go in the order of their names, so that the long ones are not the last.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
ensure_environment "cpu,video,trl,dev,docs"
cd "$ROOT"
"$CEPO_PYTHON" -m ruff check .
"$CEPO_PYTHON" -m ruff format --check .
if "$CEPO_PYTHON" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("vllm") is None)'; then
    "$CEPO_PYTHON" -m pyright --pythonpath "$CEPO_PYTHON"
else
    echo "pyright is left out: vLLM is not installed, and the types of rollout/ are its own"
fi
# Tests would share a GPU: one at a time there.
NUM_AT_A_TIME=2
[[ "$(engine_extra)" == cpu ]] || NUM_AT_A_TIME=0
exec "$CEPO_PYTHON" -m pytest -rs -n "$NUM_AT_A_TIME" --dist loadfile --no-loadscope-reorder "$@"
