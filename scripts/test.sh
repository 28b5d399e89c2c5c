#!/usr/bin/env bash
# The tests but those that take seconds each, which are a sixth of them and four fifths of the time; `scripts/test.sh
# tests` runs these, too, as CI does. Arguments go to pytest. As many processes as there are processors, 4 at most, in the
# environment that setup.sh makes; see there.
#
# With --newest before all others: the quick tests of what runs models, with the newest transformers of the package
# registry in place of the pinned one. Users install that, and what it deprecates, renames or drops is seen here first.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
bash "$root/scripts/setup.sh" dev
cd "$root"
# One thread for each process: two pools of two threads on two cores wait for each other. Who is done takes over tests of
# the other: some wait for processes for half a minute.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# setup.sh installs without byte code. Where Python is told to write none either, each of the hundreds of processes that
# tests start would compile all that it imports: 17 s of CPU for torch and transformers, where byte code takes 6.
unset PYTHONDONTWRITEBYTECODE
python=${PTQPIPE_VENV:-$root/.venv}/bin/python
if [ "${1:-}" = --newest ]; then
    shift
    folder=$(mktemp -d)  # before the environment's packages, which stay as they are
    trap 'rm -rf "$folder"' EXIT
    version() { "$python" -c 'from importlib.metadata import version; print(version("transformers"))'; }
    if ! "$python" -m pip install --quiet --no-deps --disable-pip-version-check --target "$folder" transformers; then
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
    if ! "$python" -c 'import transformers'; then
        echo "transformers $newest does not import beside the pinned packages: not run"
        exit 0
    fi
    echo "transformers $newest in place of $pinned"
    [ $# -gt 0 ] || set -- tests/calibration tests/runtime tests/conversion/test_mtp.py
    set -- -m "not slow" "$@"
fi
[ $# -gt 0 ] || set -- -m "not slow"
# A hung test fails by name instead of holding the whole run; a thread ends what waits in C, too.
"$python" -m pytest -n logical --maxprocesses 4 --dist worksteal --timeout 900 --timeout-method thread "$@"
