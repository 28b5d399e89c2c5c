"""The one thing that pyproject.toml cannot say: the CPU kernels are whatever ``.cpp`` files lie in csrc.

They export a plain C interface for ctypes and do not link to torch, so one build serves every torch version.
Without a compiler the install goes on without them (``optional``), and ptqpipe uses its pure-torch path.
"""

from pathlib import Path

from setuptools import Extension, setup

CSRC = Path("ptqpipe/kernels/csrc")

# No -march: the sources choose AVX-512, AVX2 or baseline at run time. No -ffast-math and no contraction to FMA:
# the kernels are bit-equal to their torch references.
FLAGS = ["-O3", "-g0", "-std=c++17", "-ffp-contract=off", "-fno-math-errno"]


def cpu_extensions() -> list[Extension]:
    """The one extension ``ptqpipe.kernels._cpu``, or none while csrc has no sources."""
    sources = sorted(map(str, CSRC.glob("*.cpp")))
    if not sources:
        return []
    headers = sorted(str(path) for path in CSRC.iterdir() if path.suffix in {".h", ".hpp", ".inc"})
    return [
        Extension(
            "ptqpipe.kernels._cpu",
            sources=sources,
            depends=headers,
            include_dirs=[str(CSRC)],
            extra_compile_args=FLAGS,
            language="c++",
            optional=True,
        )
    ]


setup(ext_modules=cpu_extensions())
