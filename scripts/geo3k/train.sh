#!/usr/bin/env bash
# Trains Qwen3-VL on Geometry3K in the paper's setting:
#   bash scripts/geo3k/train.sh NAME [2b|4b] [a.b.c=value ...]
# NAME is a file of configs/geo3k without its ending: a method, or a path below it such as own_paper/NAME.
# Variables, all optional:
#   NUM_GPUS     devices on each machine, 1 to 8 (1); NUM_NODES machines (1), see docs/gpus.md
#   MODEL_PATH   a folder or hub name in place of Qwen/Qwen3-VL-2B-Instruct or -4B-Instruct
#   TRAIN_FILES  a file, folder or hub name with @split, in place of the hub's training set; VAL_FILES the same for validation
#   CHECKPOINTS  the folder of run folders (checkpoints in the checkout)
#   DRY_RUN=1    resolves, checks and prints the configuration, and starts nothing
#   SKIP_DOCTOR  1: starts without looking at machine, engine and memory first (0; in a dry run 1)
#   CEPO_PYTHON, CEPO_VENV, PYTHON  see scripts/common.sh
# Paths are relative to the folder the script is called from. Later arguments win, over the variables too.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
CONFIGS="$ROOT/configs/geo3k"

usage() {
    local file
    echo "usage: bash scripts/geo3k/train.sh NAME [2b|4b] [a.b.c=value ...]"
    echo "variables: NUM_GPUS NUM_NODES MODEL_PATH TRAIN_FILES VAL_FILES CHECKPOINTS DRY_RUN SKIP_DOCTOR CEPO_PYTHON CEPO_VENV"
    echo "names:"
    find "$CONFIGS" -name '*.yaml' ! -path "$CONFIGS/base.yaml" | sort | while read -r file; do
        file="${file#"$CONFIGS"/}"
        echo "  ${file%.yaml}"
    done
}

case "${1:-}" in
-h | --help)
    usage
    exit 0
    ;;
"") die "$(usage)" ;;
esac
NAME="${1%.yaml}"
shift
[[ -f "$CONFIGS/$NAME.yaml" ]] || die "There is no configuration '$NAME' in $CONFIGS."$'\n'"$(usage)"

SIZE=2b
if [[ $# -gt 0 && "$1" != *=* ]]; then
    SIZE="$(printf '%s' "$1" | tr '[:upper:]' '[:lower:]')"
    shift
fi
case "$SIZE" in
2b | 4b) MODEL="Qwen/Qwen3-VL-${SIZE%b}B-Instruct" ;;
*) die "The size is '$SIZE'; accepted: 2b and 4b. Settings have the form a.b.c=value." ;;
esac

[[ "${NUM_GPUS:-1}" == [1-8] ]] || die "NUM_GPUS is '$NUM_GPUS'; accepted: 1 to 8."
[[ "${NUM_NODES:-1}" =~ ^[1-9][0-9]*$ ]] || die "NUM_NODES is '$NUM_NODES'; accepted: a number from 1 on."

ARGUMENTS=(
    "config=$CONFIGS/$NAME.yaml"
    "worker.actor.model.model_path=${MODEL_PATH:-$MODEL}"
    "trainer.n_gpus_per_node=${NUM_GPUS:-1}"
    "trainer.nnodes=${NUM_NODES:-1}"
    # Both sizes have the same experiment name; a run folder of its own keeps one from resuming the other.
    "trainer.save_checkpoint_path=${CHECKPOINTS:-$ROOT/checkpoints}/\${trainer.project_name}/\${trainer.experiment_name}-$SIZE"
)
[[ -z "${TRAIN_FILES:-}" ]] || ARGUMENTS+=("data.train_files=$TRAIN_FILES")
[[ -z "${VAL_FILES:-}" ]] || ARGUMENTS+=("data.val_files=$VAL_FILES")

case "${DRY_RUN:-0}" in
0 | 1) ;;
*) die "DRY_RUN is '$DRY_RUN'; accepted: 1 and 0." ;;
esac
case "${SKIP_DOCTOR:=${DRY_RUN:-0}}" in
0 | 1) ;;
*) die "SKIP_DOCTOR is '$SKIP_DOCTOR'; accepted: 1 and 0." ;;
esac

ensure_environment "$(engine_extra)"
# A cluster that is joined has the devices, not this machine: each worker looks at its own.
if [[ "$SKIP_DOCTOR" == 0 && "${NUM_NODES:-1}" == 1 && -z "${RAY_ADDRESS:-}" ]]; then
    "$CEPO_PYTHON" -m cepo doctor "${ARGUMENTS[@]}" "$@" >&2 ||
        die "This training could not start here: see the lines marked fail, and what they say to do. SKIP_DOCTOR=1 tries it nevertheless."
fi
case "${DRY_RUN:-0}" in
0) exec "$CEPO_PYTHON" -m cepo.train "${ARGUMENTS[@]}" "$@" ;;
1) exec "$CEPO_PYTHON" -m cepo config "${ARGUMENTS[@]}" "$@" ;;
esac
