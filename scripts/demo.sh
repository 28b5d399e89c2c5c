#!/usr/bin/env bash
# The main job end to end on the embedded demo model: convert, verify, perplexity before and after, a sentence.
# Arguments go to `ptqpipe demo`. Runs in the environment that setup.sh makes; see there.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
bash "$root/scripts/setup.sh" hf
venv=${PTQPIPE_VENV:-$root/.venv}
"$venv/bin/python" -m ptqpipe demo "$@"
command -v ptqpipe >/dev/null || echo "ptqpipe itself is in $venv/bin; before you call it: source $venv/bin/activate"
