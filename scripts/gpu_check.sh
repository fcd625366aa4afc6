#!/usr/bin/env bash
# Everything that only a machine with an NVIDIA GPU can show, in one command:
#   bash scripts/gpu_check.sh [arguments of pytest ...]
# In ten minutes it asks of vLLM what training asks of it (where vLLM is installed), compares log-probs and gradients of packed
# rows with those of padded ones, takes two steps of a training, and measures the levers of scoring and update one by one, at
# Qwen3-VL-2B's sizes; its last lines are a table. With CEPO_GPU_CHECK_PARTS=all it goes on with full weights,
# tests/gpu, the stages of a step and a profile, in 25 minutes. A part that fails or exceeds its own limit does not keep the next
# ones from running. Needed: one GPU, torch, transformers, peft, pytest and the package's other needs; no Ray, no network, no
# weights.
# Everything it prints is in log.txt in the folder: paste that into an issue.
# Variables, all optional:
#   OUT                    the folder for the log and the figures (lab/results/gpu/<date and time>)
#   CEPO_GPU_CHECK_DEVICE  cuda, or cpu: the same commands with tiny shapes, to see that they run (cuda)
#   CEPO_GPU_CHECK_PARTS   first, or all (first)
#   CEPO_GPU_CHECK_SECONDS time limit of the whole (600; of all parts 1500)
#   CEPO_PYTHON            the Python to run; else python3 where all packages have versions that serve; else as in scripts/common.sh
# Exit code: 0 all passed; 1 a part failed, which the last line names; 2 there is no GPU.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$ROOT"
DEVICE="${CEPO_GPU_CHECK_DEVICE:-cuda}"
WHICH="${CEPO_GPU_CHECK_PARTS:-first}"
[[ "$WHICH" == first || "$WHICH" == all ]] || die "CEPO_GPU_CHECK_PARTS is '$WHICH'; accepted: first and all."
LIMIT=600
[[ "$WHICH" == first ]] || LIMIT=1500
LIMIT="${CEPO_GPU_CHECK_SECONDS:-$LIMIT}"
[[ "$DEVICE" == cuda || "$DEVICE" == cpu ]] || die "CEPO_GPU_CHECK_DEVICE is '$DEVICE'; accepted: cuda and cpu."
[[ "$LIMIT" =~ ^[1-9][0-9]*$ ]] || die "CEPO_GPU_CHECK_SECONDS is '$LIMIT'; accepted: a number of seconds."
SERVES='import peft, pytest, torch, transformers
from cepo.commands.doctor import installed_versions, version_findings
raise SystemExit(any(found.mark == "fail" for found in version_findings(installed_versions())))'
if [[ -z "${CEPO_PYTHON:-}" ]] && python3 -c "$SERVES" >/dev/null 2>&1; then
    CEPO_PYTHON=python3
fi
ensure_environment "$(engine_extra),dev"

OUT="${OUT:-$ROOT/lab/results/gpu/$(date +%Y-%m-%d-%H%M%S)}"
mkdir -p "$OUT"
OUT="$(cd "$OUT" && pwd)"
LOG="$OUT/log.txt"
: >"$LOG"
rm -f "$OUT/stages_2b.json" "$OUT/stages_small.json" "$OUT/profile.json" "$OUT/steps.json" "$OUT/levers.json"
export TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 HF_HUB_DISABLE_PROGRESS_BARS=1 TQDM_DISABLE=1 PYTHONUNBUFFERED=1
[[ "$DEVICE" == cuda ]] || export CUDA_VISIBLE_DEVICES=""

say() { printf '%s\n' "$@" | tee -a "$LOG"; }

if [[ "$DEVICE" == cuda ]] && ! "$CEPO_PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' >>"$LOG" 2>&1; then
    say "gpu_check: torch sees no GPU ($CEPO_PYTHON -m cepo doctor says why); CEPO_GPU_CHECK_DEVICE=cpu runs the same with tiny shapes."
    exit 2
fi

FAILED=()
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
        timeout --signal=INT --kill-after=15 "$seconds" "$@" 2>&1 | tee -a "$LOG" || code=${PIPESTATUS[0]}
    fi
    say "-- $name: exit code $code after $((SECONDS - begun)) s"
    ((code == 0)) || FAILED+=("$name")
}

if [[ "$DEVICE" == cuda ]]; then
    LARGE=2b SMALL=small GROUPS_OF_ROWS=4 REPEATS=3 RESPONSE=128 TIMED_RESPONSE=32
    STEPS=(--prompts 32 --response 512)
    LEVERS=(--groups 8 --repeats 3 --seconds 110)
else
    LARGE=micro SMALL=micro GROUPS_OF_ROWS=1 REPEATS=1 RESPONSE=8 TIMED_RESPONSE=8
    STEPS=(--prompts 2 --response 8 worker.actor.fsdp.mp_param_dtype=fp32 worker.rollout.dtype=fp32)
    LEVERS=(--groups 1 --repeats 1)
fi
HAS_VLLM=no
if "$CEPO_PYTHON" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("vllm") is None)'; then
    HAS_VLLM=yes
fi
engine() { # engine NAME ARGUMENTS ...: in a process of its own, as a run starts one engine in its life
    local name="$1"
    shift
    part "engine $name" 200 "$CEPO_PYTHON" -m lab.engine_check --device "$DEVICE" --shape "$LARGE" --response "$RESPONSE" "$@"
}

part versions 30 bash -c "nvidia-smi || true; '$CEPO_PYTHON' -m cepo doctor || true" # the other parts decide, not the doctor
if [[ "$HAS_VLLM" == yes ]]; then
    engine adapter --weights adapter
else
    say "" "== engine" "vLLM is not installed: training samples with transformers, and this part is left out"
fi
part "packed rows" 100 "$CEPO_PYTHON" -m pytest tests/gpu/test_packed_rows.py -v -rsP -p no:cacheprovider --confcutdir=tests/gpu -k "$DEVICE"
part "two steps" 240 "$CEPO_PYTHON" -m lab.gpu_steps --device "$DEVICE" --shape "$LARGE" --out "$OUT" "${STEPS[@]}"
part levers 180 "$CEPO_PYTHON" -m lab.gpu_levers --device "$DEVICE" --shape "$LARGE" --out "$OUT" "${LEVERS[@]}"
if [[ "$WHICH" == all ]]; then
    part tests 360 "$CEPO_PYTHON" -m pytest tests/gpu -v -rsP --log-level=INFO -p no:cacheprovider --confcutdir=tests/gpu -k "$DEVICE" --durations=5 "$@"
    if [[ "$HAS_VLLM" == yes ]]; then
        engine full --weights full
    fi
    for size in 2b small; do
        shape="$LARGE"
        [[ "$size" == 2b ]] || shape="$SMALL"
        part "stages $size" 200 "$CEPO_PYTHON" -m lab.stages --device "$DEVICE" --shape "$shape" --groups "$GROUPS_OF_ROWS" \
            --repeats "$REPEATS" --response "$TIMED_RESPONSE" --no-flops --out "$OUT/stages_$size.json"
    done
    # By itself, so that a fault of the profiler costs no figure.
    part "profile of the update" 120 "$CEPO_PYTHON" -m lab.stages --device "$DEVICE" --shape "$LARGE" --groups "$GROUPS_OF_ROWS" \
        --stages update --repeats 1 --no-flops --profile --out "$OUT/profile.json"
fi

say ""
"$CEPO_PYTHON" -m lab.gpu_table "$OUT" 2>&1 | tee -a "$LOG"
say "" "gpu_check: ${#FAILED[@]} parts failed (${FAILED[*]:-none}) after $SECONDS s; everything is in $OUT"
exit "$((${#FAILED[@]} > 0))"
