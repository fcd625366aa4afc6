#!/usr/bin/env bash
# Trains the methods of the study from the same start, as far as they are not trained yet, and writes lab/notes/study.md:
#   bash scripts/study.sh [small|full|smoke] [--worlds shapes chain] [--arms NAME ...] [--results FILE] [--page FILE]
# Called again, it goes on where it was stopped. Variables, all optional:
#   OUT        folder of the runs (checkpoints/study-<profile>)
#   PROCESSES  runs at a time, each with one thread (2)
#   CEPO_PYTHON, CEPO_VENV, PYTHON  see scripts/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
ensure_environment "$(engine_extra)"
PROFILE="${1:-small}"
OUT="$(realpath -m "${OUT:-$ROOT/checkpoints/study-$PROFILE}")"
cd "$ROOT"
for ((number = 1; number <= ${PROCESSES:-2}; number++)); do
    "$CEPO_PYTHON" -m lab.studies.study run --profile "$PROFILE" --out "$OUT" "${@:2}" &
done
FAILED=0
for job in $(jobs -p); do wait "$job" || FAILED=1; done
"$CEPO_PYTHON" -m lab.studies.study page --profile "$PROFILE" --out "$OUT" "${@:2}"
exit "$FAILED"
