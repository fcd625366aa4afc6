#!/usr/bin/env bash
# Everything that only a machine with an NVIDIA GPU can show, in one command of at most 14 minutes:
#   bash scripts/gpu_check.sh [arguments of pytest ...]
# It prints what is installed, runs tests/gpu, asks of vLLM what training asks of it (where vLLM is installed), and times the stages
# of a step at Qwen3-VL-2B's sizes and at small ones. A part that fails does not keep the next ones from running. Needed: one GPU,
# torch, transformers, peft, pytest and the package's other needs; no Ray, no network, no weights.
# The last thing it prints, summary.txt in the folder, is what to paste into an issue.
# Variables, all optional:
#   OUT                    the folder for log, reports and figures (benchmarks/results/gpu/<date and time>)
#   CEPO_GPU_CHECK_DEVICE  cuda, or cpu: the same commands with tiny shapes, to see that they run (cuda)
#   CEPO_GPU_CHECK_SECONDS time limit of the whole (840)
#   CEPO_PYTHON            the Python to run; else python3 where it has torch; else as in scripts/common.sh
# Exit code: 0 all passed; 1 a part failed, which the summary names; 2 there is no GPU.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$ROOT"
DEVICE="${CEPO_GPU_CHECK_DEVICE:-cuda}"
LIMIT="${CEPO_GPU_CHECK_SECONDS:-840}"
[[ "$DEVICE" == cuda || "$DEVICE" == cpu ]] || die "CEPO_GPU_CHECK_DEVICE is '$DEVICE'; accepted: cuda and cpu."
[[ "$LIMIT" =~ ^[1-9][0-9]*$ ]] || die "CEPO_GPU_CHECK_SECONDS is '$LIMIT'; accepted: a number of seconds."
if [[ -z "${CEPO_PYTHON:-}" ]] && python3 -c 'import torch, pytest' >/dev/null 2>&1; then
    CEPO_PYTHON=python3
fi
ensure_environment "$(engine_extra),dev"

OUT="${OUT:-$ROOT/benchmarks/results/gpu/$(date +%Y-%m-%d-%H%M%S)}"
mkdir -p "$OUT"
OUT="$(cd "$OUT" && pwd)"
LOG="$OUT/log.txt"
: >"$LOG"
# A report of an earlier run must not pass for one of this run.
rm -f "$OUT/tests.xml" "$OUT/stages_2b.json" "$OUT/stages_small.json" "$OUT/engine.txt" \
    "$OUT/summary.json" "$OUT/summary.txt" "$OUT/parts.txt"
export TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 HF_HUB_DISABLE_PROGRESS_BARS=1 TQDM_DISABLE=1 PYTHONUNBUFFERED=1
[[ "$DEVICE" == cuda ]] || export CUDA_VISIBLE_DEVICES=""

say() { printf '%s\n' "$@" | tee -a "$LOG"; }

if [[ "$DEVICE" == cuda ]] && ! "$CEPO_PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' >>"$LOG" 2>&1; then
    say "gpu_check: torch sees no GPU ($CEPO_PYTHON -m cepo.cli doctor says why); CEPO_GPU_CHECK_DEVICE=cpu runs the same with tiny shapes."
    exit 2
fi

RESULT=0
# part NAME SECONDS COMMAND ...: runs it for at most that long, and at most until the whole must end.
part() {
    local name="$1" seconds="$2" left code=0 begun=$SECONDS
    shift 2
    left=$((LIMIT - SECONDS))
    ((seconds <= left)) || seconds=$left
    say "" "== $name"
    if ((seconds < 5)); then
        say "no time is left for it"
        code=124
    else
        # pytest ends with a report when it is interrupted; what does not end by itself is killed.
        timeout --signal=INT --kill-after=15 "$seconds" "$@" 2>&1 | tee -a "$LOG" || code=${PIPESTATUS[0]}
    fi
    say "-- $name: exit code $code after $((SECONDS - begun)) s"
    printf '%s\t%s\t%s\n' "$name" "$code" "$((SECONDS - begun))" >>"$OUT/parts.txt"
    ((code == 0)) || RESULT=1
}

versions() {
    nvidia-smi --query-gpu=name,driver_version,memory.total,compute_cap --format=csv,noheader 2>/dev/null || echo "nvidia-smi does not answer"
    "$CEPO_PYTHON" -m cepo.cli doctor || true # vLLM may be missing here, and versions may be newer: the tests decide
    "$CEPO_PYTHON" scripts/gpu_summary.py --needs
}
export -f versions
export CEPO_PYTHON

if [[ "$DEVICE" == cuda ]]; then
    LARGE=2b SMALL=small GROUPS_OF_ROWS=4 REPEATS=3 RESPONSE=128
else
    LARGE=micro SMALL=micro GROUPS_OF_ROWS=1 REPEATS=1 RESPONSE=8
fi
part versions 60 bash -c versions
part tests 360 "$CEPO_PYTHON" -m pytest tests/gpu -rs -p no:cacheprovider --confcutdir=tests/gpu -k "$DEVICE" \
    --durations=5 --junitxml="$OUT/tests.xml" "$@"
engine() {
    "$CEPO_PYTHON" -m benchmarks.engine_check --device "$DEVICE" --shape "$LARGE" --response "$RESPONSE" 2>>"$LOG" | tee "$OUT/engine.txt"
    return "${PIPESTATUS[0]}"
}
export -f engine
export DEVICE LARGE RESPONSE OUT LOG
if "$CEPO_PYTHON" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("vllm") is None)'; then
    part engine 300 bash -c engine
else
    say "" "== engine" "vLLM is not installed: training would sample with transformers, and this part is left out"
fi
part "stages 2b" 200 "$CEPO_PYTHON" -m benchmarks.stages --device "$DEVICE" --shape "$LARGE" --groups "$GROUPS_OF_ROWS" \
    --repeats "$REPEATS" --response "$RESPONSE" --no-flops --out "$OUT/stages_2b.json"
part "stages small" 90 "$CEPO_PYTHON" -m benchmarks.stages --device "$DEVICE" --shape "$SMALL" --groups "$GROUPS_OF_ROWS" \
    --repeats "$REPEATS" --response "$RESPONSE" --no-flops --out "$OUT/stages_small.json"

say "" "== summary"
"$CEPO_PYTHON" scripts/gpu_summary.py "$OUT" 2>&1 | tee "$OUT/summary.txt" | tee -a "$LOG"
say "gpu_check: exit code $RESULT after $SECONDS s; everything is in $OUT"
exit "$RESULT"
