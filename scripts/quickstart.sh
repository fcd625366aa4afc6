#!/usr/bin/env bash
# Installs cepo, builds the embedded world, trains CEPO on it for a few steps and shows what happened.
# Extra arguments override settings: bash scripts/quickstart.sh trainer.max_steps=40
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
ensure_environment "cpu"
cd "$ROOT"
RUN="${CEPO_QUICKSTART_RUN:-$ROOT/checkpoints/cepo/quickstart}"
"$CEPO_PYTHON" -m cepo.train config=configs/microgeo/quickstart.yaml trainer.save_checkpoint_path="$RUN" "$@"
"$CEPO_PYTHON" -m cepo.cli report "$RUN" --open
