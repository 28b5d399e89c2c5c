#!/usr/bin/env bash
# The quick tests of what runs models, with the newest transformers of the package registry in place of the pinned one:
# users install that, and what it deprecates, renames or drops is seen here first. It lies in a folder of its own before
# the environment's packages, which stay as they are. Arguments go to pytest.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${PTQPIPE_VENV:-$root/.venv}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

version() { "$venv/bin/python" -c 'from importlib.metadata import version; print(version("transformers"))'; }

if ! "$venv/bin/python" -m pip install --quiet --no-deps --disable-pip-version-check --target "$folder" transformers; then
    echo "the registry cannot be reached: not run"
    exit 0
fi
pinned=$(version)
export PYTHONPATH=$folder
newest=$(version)
if [ "$newest" = "$pinned" ]; then
    echo "transformers $pinned is the newest: nothing else to run"
    exit 0
fi
if ! "$venv/bin/python" -c 'import transformers'; then
    echo "transformers $newest does not import beside the pinned packages: not run"
    exit 0
fi
echo "transformers $newest in place of $pinned"
[ $# -gt 0 ] || set -- tests/calibration tests/runtime tests/conversion/test_mtp.py
bash "$root/scripts/test.sh" -m "not slow" "$@"
