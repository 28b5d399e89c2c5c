"""Checks the kernels for aarch64 on a machine of another kind: compiles them and runs their tests under an emulator.

    python scripts/check_aarch64.py            # all that compare kernels with their references
    python scripts/check_aarch64.py TEST ...   # these tests alone, on the first of the processors below

Needs Debian's g++-aarch64-linux-gnu and qemu-user, and the packages of the tests. The kernels are built by setup.py
with the cross compiler and run on an emulated processor; the tests and the references that they compare with run here.
Bits are checked, not speed: an emulator's times say nothing. Exits with 1 if a test failed, with 2 without the tools.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILT = ROOT / "build/aarch64"
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
PACKED = ("tests/runtime/test_packed.py", "tests/runtime/test_packed_integers.py")
TESTS = (
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests/numerics/kernels").glob("test_cpu_*.py")),
    "tests/quantization/test_lossless_mxfp4.py",
    "tests/quantization/test_gptq.py::test_kernels_and_reference_give_the_same_bits",
    "tests/serving/collectives/test_kernels.py",
    "tests/check/test_doctor.py",
    *PACKED,
)
# With dot products of bytes and without: products with E2M1 have code for either.
PROCESSORS = {"neoverse-n1": TESTS, "cortex-a72": PACKED}


def build() -> list[str]:
    """Compiles the kernels, what runs them and what calls them; the command that starts it, without its processor."""
    compilers = {"CC": "aarch64-linux-gnu-gcc", "CXX": COMPILER}
    linkers = {"LDSHARED": "aarch64-linux-gnu-gcc -shared", "LDCXXSHARED": f"{COMPILER} -shared"}
    library, caller = BUILT / "ptqpipe/numerics/kernels/_cpu.so", BUILT / "emulated"
    library.unlink(missing_ok=True)  # setup.py goes on without kernels where they do not compile
    command = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", str(BUILT), "--build-temp", str(BUILT)]
    subprocess.run(command, cwd=ROOT, env=os.environ | compilers | linkers, check=True)
    subprocess.run(
        [COMPILER, "-O2", "tests/numerics/kernels/emulated.cpp", "-o", str(caller), "-ldl"], cwd=ROOT, check=True
    )
    if not library.is_file():
        sys.exit("the kernels do not compile for aarch64; see above")
    libc = subprocess.run([COMPILER, "-print-file-name=libc.so.6"], capture_output=True, text=True, check=True).stdout
    return ["-L", str(Path(libc.strip()).resolve().parent.parent), str(caller), str(library)]


def run(processor: str, started: list[str], tests: list[str]) -> int:
    """The exit status of pytest, whose output says how many tests passed."""
    print(f"== {processor}, emulated", flush=True)
    emulated = " ".join([EMULATOR, "-cpu", processor, *started])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.numerics.kernels.emulated", *tests]
    return subprocess.run(command, cwd=ROOT, env=os.environ | {"PTQPIPE_EMULATED": emulated}, check=False).returncode


def main(tests: list[str]) -> int:
    """The exit status."""
    missing = [name for name in (COMPILER, EMULATOR) if shutil.which(name) is None]
    if missing:
        print(f"no {' and no '.join(missing)} here: apt-get install g++-aarch64-linux-gnu qemu-user", file=sys.stderr)
        return 2
    started = build()
    wanted = {next(iter(PROCESSORS)): tests} if tests else PROCESSORS
    statuses = [run(processor, started, list(which)) for processor, which in wanted.items()]
    return int(any(statuses))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
