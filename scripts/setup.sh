#!/usr/bin/env bash
# Makes the virtual environment that demo.sh and test.sh run in, and installs this tree into it (editable).
#
#   bash scripts/setup.sh [EXTRA]     EXTRA: hf (default) or dev
#
# The environment is .venv in the repository, whatever environment is active: one that this script did not make is
# changed only when its absolute path is given: PTQPIPE_VENV="$VIRTUAL_ENV". PYTHON names the interpreter to make it with.
# A stamp in the environment holds a hash of everything that decides the install; while it is the same, this
# script does nothing. dev includes hf. A real install prints a line for each step; the details go to a log.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

extra=${1:-hf}
venv=${PTQPIPE_VENV:-$PWD/.venv}

fail() {
    echo "setup.sh: $1" >&2
    exit 1
}

case $venv in
    /*) ;;
    *) fail "PTQPIPE_VENV is '$venv'; expected an absolute path" ;;
esac
case $extra in
    hf | dev) ;;
    *) fail "unknown extra '$extra'; expected hf or dev" ;;
esac

is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3.11 python3.12 python3.13 python3.14 python3 python}; do
        if is_new_enough "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    fail "no Python 3.11 or newer among: ${PYTHON:-python3.11 .. python3.14, python3, python}; install one or set PYTHON to its path"
}

if [ ! -x "$venv/bin/python" ]; then
    python=$(find_python)
    "$python" -c 'import venv, ensurepip' 2>/dev/null ||
        fail "$python has no venv module; install it (Debian and Ubuntu: the package python3-venv)"
    "$python" -m venv "$venv" || fail "could not make a virtual environment in '$venv'"
fi
is_new_enough "$venv/bin/python" || fail "'$venv' has a Python older than 3.11, or a broken one; remove it and run again"

# Sources by content, in a fixed order: a touched file does not cause an install, a changed header does.
inputs=$(
    "$venv/bin/python" --version
    pwd -P
    find pyproject.toml setup.py constraints.txt ptqpipe -type f \( -path '*/csrc/*' -o ! -path 'ptqpipe/*' \) |
        LC_ALL=C sort | xargs cksum
)
stamp=$venv/ptqpipe-install
for done_extra in "$extra" dev; do
    if [ "$(cat "$stamp" 2>/dev/null)" = "$done_extra $inputs" ]; then
        exit 0
    fi
done

log=$venv/ptqpipe-install.log
pip() { "$venv/bin/python" -m pip "$@" --disable-pip-version-check -v >>"$log" 2>&1; }

# Without byte code, which Python makes of what it imports: making that of all of torch and transformers takes longer.
install() { pip install --no-compile "$torch" -c constraints.txt "$@"; }

requirements() { # of the package with the extra, one a line
    "$venv/bin/python" - "$extra" <<'EOF'
import re, sys, tomllib

with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)["project"]

def of(extra):
    for one in project["optional-dependencies"][extra]:
        inner = re.fullmatch(r"ptqpipe\[(.*)\]", one)
        yield from (more for name in inner[1].split(",") for more in of(name)) if inner else [one]

print(*project["dependencies"], *of(sys.argv[1]), sep="\n")
EOF
}

# A line for each step, with its seconds: on a first run they take minutes.
step() {
    local name=$1 began=$SECONDS
    shift
    "$@" || fail "$name: failed; the last lines of $log say why"
    printf '%-32s %4d s\n' "$name" $((SECONDS - began)) >&2
}

compile() { # while packages are fetched; without a compiler the package works without kernels
    pip wheel . --no-deps --no-cache-dir --wheel-dir "$venv/ptqpipe-wheel" || true
    rm -rf "$venv/ptqpipe-wheel"
}

show_kernels() { # those that setup.py says it has compiled, until it is killed
    tail -n 0 -F "$log" 2>/dev/null | grep --line-buffered -o 'kernels [0-9]*/[0-9]*: .* s$' | sed -u 's/^/  /' >&2
}

rm -f "$stamp"
: >"$log"
torch=$(grep '^torch==' constraints.txt)
echo "installing ptqpipe[$extra] into $venv; what pip says goes to $log" >&2
set -m # each job a process group of its own, so that it ends whole
show_kernels &
shown=$!
compile &
compiling=$!
trap 'kill -- -$shown 2>/dev/null || true; kill -- -$compiling 2>/dev/null || true' EXIT
step "${torch/==/ }" install
mapfile -t packages < <(requirements)
step "packages of ptqpipe[$extra]" install "${packages[@]}"
step "kernels" wait "$compiling"
step "ptqpipe[$extra]" install -e ".[$extra]"
echo "$extra $inputs" >"$stamp"
