#!/usr/bin/env bash
# Installs cepo, builds the built-in toy task, trains CEPO on it for a few steps and shows what happened.
# Extra arguments override settings: bash scripts/quickstart.sh trainer.max_steps=40
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
ensure_environment "cpu"
cd "$ROOT"
exec "$CEPO_PYTHON" -m cepo quickstart "$@"
