#!/usr/bin/env bash
# Trains a list of configurations one after the other; the ablations where none is named:
#   bash scripts/geo3k/sweep.sh [2b|4b] [NAME ...] [a.b.c=value ...]
# NAME is a file or a folder of configs/geo3k. Settings and the variables of train.sh apply to every run.
# All of them are resolved and checked before the first starts. Called again, it leaves out what has finished with the same
# settings and resumes what has not. A run that fails does not stop the others; the exit code is 1 then.
# DRY_RUN=1 prints each run's state, name and folder, and starts nothing.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
CONFIGS="$ROOT/configs/geo3k"
TRAIN="$ROOT/scripts/geo3k/train.sh"
MARK="sweep_finished.yaml"

SIZE=2b
NAMES=()
OVERRIDES=("--")
for argument in "$@"; do
    case "$argument" in
    *=*) OVERRIDES+=("$argument") ;;
    2b | 2B | 4b | 4B) SIZE="$argument" ;;
    *) NAMES+=("${argument%/}") ;;
    esac
done
[[ ${#NAMES[@]} -gt 0 ]] || NAMES=(ablations)

RUNS=()
for name in "${NAMES[@]}"; do
    if [[ -d "$CONFIGS/$name" ]]; then
        while read -r file; do
            file="${file#"$CONFIGS"/}"
            RUNS+=("${file%.yaml}")
        done < <(find "$CONFIGS/$name" -name '*.yaml' | sort)
    elif [[ -f "$CONFIGS/${name%.yaml}.yaml" ]]; then
        RUNS+=("${name%.yaml}")
    else
        die "There is no configuration and no folder '$name' in $CONFIGS; bash scripts/geo3k/train.sh --help lists them."
    fi
done

ensure_environment "$(engine_extra)"
PLANS="$(mktemp -d)"
trap 'rm -rf "$PLANS"' EXIT

# start NAME: train.sh with this sweep's size and settings.
start() {
    bash "$TRAIN" "$1" "$SIZE" "${OVERRIDES[@]:1}"
}

# finished INDEX: whether that run's folder records an end with the very settings it has now.
finished() {
    cmp -s "$PLANS/$1" "${FOLDERS[$1]}/$MARK"
}

FOLDERS=()
for index in "${!RUNS[@]}"; do
    DRY_RUN=1 start "${RUNS[$index]}" >"$PLANS/$index" || die "${RUNS[$index]} cannot be trained: see above. Nothing was started."
    FOLDERS+=("$(sed -n 's/^# run folder: //p' "$PLANS/$index")")
done

FAILED=()
for index in "${!RUNS[@]}"; do
    name="${RUNS[$index]}"
    if finished "$index"; then
        echo "finished  $name  ${FOLDERS[$index]}"
        continue
    fi
    echo "to do     $name  ${FOLDERS[$index]}"
    [[ "${DRY_RUN:-0}" == 0 ]] || continue
    code=0
    start "$name" || code=$?
    case "$code" in
    0) cp "$PLANS/$index" "${FOLDERS[$index]}/$MARK" ;;
    130 | 143) die "Interrupted in $name; the same command goes on from there." ;;
    *) FAILED+=("$name") ;;
    esac
done
[[ ${#FAILED[@]} -eq 0 ]] || die "${#FAILED[@]} of ${#RUNS[@]} runs failed: ${FAILED[*]}. The same command tries them again."
