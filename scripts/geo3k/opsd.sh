#!/usr/bin/env bash
# The method that this file is named after: [2b|4b] [a.b.c=value ...]; variables are explained in train.sh beside it.
exec bash "$(dirname "${BASH_SOURCE[0]}")/train.sh" "$(basename "${BASH_SOURCE[0]}" .sh)" "$@"
