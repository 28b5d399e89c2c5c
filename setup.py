"""What pyproject.toml cannot describe: the copy of recipes/ in the package, and the CPU kernels.

The kernels are all .cpp files of csrc, compiled side by side if they changed. They export a plain C interface for
ctypes and link to neither Python nor torch, so one build serves every version of both: the library has no version in
its name, and ``python -m build`` makes one wheel, py3-none-linux_x86_64 or py3-none-linux_aarch64.
Without a compiler the install goes on without them (``optional``), and ptqpipe uses its pure-torch path.
"""

import hashlib
import os
import re
import shutil
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

CSRC = Path("ptqpipe/numerics/kernels/csrc")
LIBRARY = Path("ptqpipe/numerics/kernels/_cpu.so")
OBJECTS = Path("build/kernels")  # one object for each state of a source, what it includes, the flags and the compiler

# No -march: the sources choose AVX-512, AVX2 or baseline at run time (NEON on aarch64). No -ffast-math and no
# contraction to FMA: the kernels are bit-equal to their torch references.
FLAGS = ["-O3", "-g0", "-std=c++17", "-ffp-contract=off", "-fno-math-errno"]


INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)


def included(source: Path) -> list[Path]:
    """A source and what it includes from its own folder, directly or not, by name. Conditions around an include are not
    looked at: the compiler may read less than this."""
    found, waiting = {source}, [source]
    while waiting:
        text = waiting.pop().read_text(encoding="utf-8")
        new = {path for name in INCLUDE.findall(text) if (path := source.parent / name).is_file()} - found
        found |= new
        waiting += new
    return sorted(found)


class BuildKernels(build_ext):
    """Compiles the sources of an extension at the same time, and those alone that have changed."""

    def get_ext_filename(self, fullname):
        """The path of the library, the same for every Python."""
        return f"{Path(*fullname.split('.'))}.so"

    def build_extension(self, ext):
        """As setuptools."""
        compile_all, finished = self.compiler.compile, []

        def compile_one(source, output_dir, options):
            kept = OBJECTS / f"{Path(source).stem}-{self._state(source, options)}.o"
            if not kept.exists():
                began = time.monotonic()
                (made,) = compile_all([source], output_dir=output_dir, **options)
                OBJECTS.mkdir(parents=True, exist_ok=True)
                partial = kept.with_suffix(f".{os.getpid()}")
                shutil.copy(made, partial)
                partial.replace(kept)  # at once: another install may be looking
                finished.append(source)
                seconds = time.monotonic() - began
                line = f"kernels {len(finished)}/{len(ext.sources)}: {Path(source).name} {seconds:.0f} s\n"
                print(line, end="", flush=True)  # one write: lines of two threads do not mix
            else:
                finished.append(source)
            return str(kept)

        def compile_side_by_side(sources, output_dir=None, **options):
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                return list(pool.map(lambda source: compile_one(source, output_dir, options), sources))

        self.compiler.compile = compile_side_by_side
        super().build_extension(ext)

    def _state(self, source, options):
        """A hash of everything that decides the object of a source."""
        command = getattr(self.compiler, "compiler_so_cxx", self.compiler.compiler_so)  # older setuptools: C's
        version = subprocess.run([command[0], "--version"], capture_output=True, check=False).stdout
        digest = hashlib.sha256(repr((command, version, options.get("extra_postargs"))).encode())
        for path in (Path(source), *included(Path(source))):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
        return digest.hexdigest()[:16]


class BuildPackage(build_py):
    """The package, with a copy of the recipes at the top of the repository; an editable install reads those."""

    def run(self):
        """As setuptools."""
        super().run()
        if not self.editable_mode:
            copies = Path(self.build_lib, "ptqpipe/recipes")
            shutil.rmtree(copies, ignore_errors=True)  # those of an earlier build
            shutil.copytree("recipes", copies)


class Wheel(bdist_wheel):
    """A wheel that every Python 3 installs: for this platform where it has the kernels, for any where it has not."""

    def get_tag(self):
        """As setuptools."""
        library = Path(self.bdist_dir or "", LIBRARY)
        return ("py3", "none", super().get_tag()[2] if library.is_file() else "any")


def cpu_extensions() -> list[Extension]:
    """The one extension ``ptqpipe.numerics.kernels._cpu``, or none while csrc has no sources."""
    # The largest come first in this order, and attention last: no processor waits long for another at the end.
    sources = sorted(map(str, CSRC.glob("*.cpp")), reverse=True)
    if not sources:
        return []
    return [
        Extension(
            "ptqpipe.numerics.kernels._cpu",
            sources=sources,
            depends=sorted({str(path) for source in sources for path in included(Path(source))}),
            include_dirs=[str(CSRC)],
            extra_compile_args=FLAGS,
            language="c++",
            optional=True,
        )
    ]


setup(
    ext_modules=cpu_extensions(), cmdclass={"build_py": BuildPackage, "build_ext": BuildKernels, "bdist_wheel": Wheel}
)
