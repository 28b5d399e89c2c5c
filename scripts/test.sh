#!/usr/bin/env bash
# The tests but those that take seconds each, which are a sixth of them and four fifths of the time; `scripts/test.sh
# tests` runs these, too, as CI does. Arguments go to pytest. As many processes as there are processors, 4 at most, in the
# environment that setup.sh makes; see there.
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
[ $# -gt 0 ] || set -- -m "not slow"
# A hung test fails by name instead of holding the whole run; a thread ends what waits in C, too.
exec "${PTQPIPE_VENV:-$root/.venv}/bin/python" -m pytest -n logical --maxprocesses 4 --dist worksteal --timeout 900 --timeout-method thread "$@"
