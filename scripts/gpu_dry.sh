#!/usr/bin/env bash
# Finds on a machine without a GPU what would otherwise fail on one: bash scripts/gpu_dry.sh [--only PART]
# It runs vLLM from start to close, counts the memory of scoring and update, and checks compiled kernels and the step, in an
# environment with the wheels of the extra gpu (9 GB, made at the first call from the public index). lab/notes/gpu-dry.md has the last
# record. Needed: gcc and Python.h; about an hour of 2 cores.
# Variables, all optional: CEPO_PYTHON (a Python that has these wheels), CEPO_VENV, PYTHON: see scripts/common.sh
# Exit code: 0 all passed; 1 a check failed, which its line names.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$ROOT"
# A local index or folder of wheels may hold CPU builds under the same version.
unset PIP_FIND_LINKS PIP_EXTRA_INDEX_URL
# dev has bitsandbytes for QLoRA, and what the processors of InternVL and SmolVLM need.
PIP_CONFIG_FILE=/dev/null ensure_environment gpu,dev
exec "$CEPO_PYTHON" -m lab.gpu_dry "$@"
