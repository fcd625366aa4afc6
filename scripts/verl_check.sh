#!/usr/bin/env bash
# Runs cepo's methods inside verl on a CPU and compares their advantages with cepo's own: bash scripts/verl_check.sh
# cepo's environment writes the rollouts and its own advantages; verl's, which cannot be the same (verl 0.9 wants an older
# transformers and OmegaConf), trains two steps with them. 4 GB of disk for it at the first call, then about 2 minutes of 2 cores.
# Variables, all optional: CEPO_PYTHON (a Python with cepo's environment), VERL_PYTHON (one with cepo, verl and pytest), PYTHON.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
ensure_environment "cpu,video,trl,dev,docs"
cd "$ROOT"
if [[ -z "${VERL_PYTHON:-}" ]]; then
    VENV="$ROOT/.venv-verl" VERL_PYTHON="$ROOT/.venv-verl/bin/python"
    if [[ ! -e "$VENV/.cepo" ]]; then
        "$(PYTHON="${PYTHON:-} python3.11 python3.12" find_python)" -m venv "$VENV"
        install_cpu_torch
        pip_install "torch==$(pinned cpu torch)" "torchvision==$(pinned cpu torchvision)" "verl[verl-core]==0.9.1" \
            "math-verify==$(pinned cpu math-verify)" "pytest==$(pinned cpu pytest)" --editable "$ROOT"
        "$VERL_PYTHON" "$ROOT/scripts/mixed_builds.py"
        touch "$VENV/.cepo"
    fi
fi
FOLDER="$(mktemp -d)"
trap 'rm -rf "$FOLDER"' EXIT
"$CEPO_PYTHON" tests/integrations/verl_on_cpu/own_rollouts.py "$FOLDER"
for TESTS in test_verl test_verl_tools; do # one process each, because each starts Ray and a process group
    CEPO_VERL_ROLLOUTS="$FOLDER" "$VERL_PYTHON" -m pytest --noconftest -rs "tests/integrations/$TESTS.py" "$@"
done
