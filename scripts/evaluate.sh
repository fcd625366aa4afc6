#!/usr/bin/env bash
# Measures the accuracy of a checkpoint or a model:
#   bash scripts/evaluate.sh CHECKPOINT [n=N] [temperature=T] [a.b.c=value ...]
# CHECKPOINT is a folder global_step_<N> of a run, a merged or other model folder, or a hub name.
# Variables, all optional:
#   DATA       sources separated by commas: hub names with @split, files or folders (hiyouga/geometry3k@test), each
#              optionally after the name of a benchmark (mathvista:AI4Math/MathVista@testmini)
#   CONFIG     a YAML file with prompts and engine settings (the checkpoint's run's own; for a model configs/geo3k/base.yaml)
#   OUT        a new folder for evaluation.json and generations.jsonl (evaluations/<checkpoint>)
#   DRY_RUN=1  resolves, checks and prints, and starts nothing
#   CEPO_PYTHON, CEPO_VENV, PYTHON  see scripts/common.sh
# Paths are relative to the folder the script is called from. Later arguments win, over the variables too.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() {
    sed -n '2,/^source/{/^source/!s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
}

case "${1:-}" in
-h | --help)
    usage
    exit 0
    ;;
"" | *=*) die "$(usage)" ;;
esac
CHECKPOINT="${1%/}"
shift

ARGUMENTS=("checkpoint=$CHECKPOINT" "data=${DATA:-hiyouga/geometry3k@test}")
case "$(basename "$CHECKPOINT")" in
global_step_* | actor) [[ -z "${CONFIG:-}" ]] || ARGUMENTS+=("config=$CONFIG") ;;
*) ARGUMENTS+=("config=${CONFIG:-$ROOT/configs/geo3k/base.yaml}") ;;
esac
[[ -z "${OUT:-}" ]] || ARGUMENTS+=("out=$OUT")
case "${DRY_RUN:-0}" in
0) ;;
1) ARGUMENTS+=("dry_run=true") ;;
*) die "DRY_RUN is '$DRY_RUN'; accepted: 1 and 0." ;;
esac

ensure_environment "$(engine_extra)"
exec "$CEPO_PYTHON" -m cepo evaluate "${ARGUMENTS[@]}" "$@"
