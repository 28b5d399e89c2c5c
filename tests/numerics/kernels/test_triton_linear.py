"""Packed products on CUDA: the claims of ``triton_linear_cases.py`` under the interpreter and on a GPU, the code that
the kernels compile to (which needs no device), and FP8 by FP8, whose torch function a CPU has, too."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ptqpipe.api.matrices import quantize
from ptqpipe.numerics.kernels import cuda_fp8, triton_linear
from ptqpipe.numerics.schemes import Activation
from ptqpipe.runtime.input_quantizers import InputQuantizer, fp8_codes
from ptqpipe.runtime.packed import PackedWeight, packed_linear

CASES = Path(__file__).with_name("triton_linear_cases.py")
ROOT = CASES.parents[3]
TOKEN = InputQuantizer(Activation.FP8_TOKEN)


def run(arguments: list[str], environment: dict[str, str], *, timeout: int) -> str:
    """What a process of its own prints: whether Triton interprets is decided when it is imported."""
    result = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={key: value for key, value in os.environ.items() if not key.startswith("PYTEST")} | environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    return result.stdout


def run_cases(environment: dict[str, str], *, timeout: int) -> None:
    """``triton_linear_cases.py``."""
    options = ["-q", "-pno:cacheprovider", "-pno:xdist", "-ptests.numerics.kernels.quick_interpreter", "-Wignore"]
    run(["-m", "pytest", *options, str(CASES)], environment, timeout=timeout)


@pytest.mark.slow
@pytest.mark.usefixtures("forks")
def test_the_products_are_those_of_the_decoded_weights_under_the_interpreter() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    run_cases({"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}, timeout=600)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_products_are_those_of_the_decoded_weights_on_the_device() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    run_cases({"TRITON_INTERPRET": "0"}, timeout=1800)


COMPILE = """
import sys
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from ptqpipe.numerics.formats import get_format
from ptqpipe.numerics.kernels import triton_linear, triton_products

SIZES = ("n", "width", "stride", "blocks", "chunk")

def show(kernel, types, constants, warps):
    attrs = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(types) if name != "m"}
    kinds = types | {name: "constexpr" for name in constants}
    source = ASTSource(fn=kernel, signature=kinds, constexprs=constants, attrs=attrs)
    options = {"enable_fp_fusion": True, "num_warps": warps}
    print("KERNEL", triton.compile(source, target=GPUTarget("cuda", int(sys.argv[1]), 32), options=options).asm["ptx"])

for name in sys.argv[2:]:
    fmt = get_format(name)
    plan = triton_linear.plan_of(fmt, None if name == "fp8_channel" else torch.ones(1))
    for m in (1, 16, 64):
        tile, half = (
            triton_linear.tile_of(plan, m, (4096, 4096), dtype, parts=1, processors=132)
            for dtype in (torch.bfloat16, torch.float16)
        )
        types = {
            "out": "*i16", "x": "*bf16", "data": "*i16", "scales": "*bf16" if plan.kind == 3 else "*u8",
            "factor": "*fp32", "bias": "*bf16", "m": "i32",
        } | {size: "i32" for size in SIZES}
        constants = dict(
            EXACT=False, FACTOR=2, BIAS=True, BITS=plan.bits, KIND=plan.kind, GROUP=plan.group,
            SCALE_ROWS=plan.scale_rows, BM=tile.tokens, BN=tile.rows, ITEMS=tile.items, STAGES=tile.stages,
        )
        show(triton_products.tiles_kernel, types, constants, tile.warps)
        if m == 16:
            halves = types | {"out": "*fp16", "x": "*fp16"}
            show(triton_products.tiles_kernel, halves, constants | dict(ITEMS=half.items), half.warps)
types = {"out": "*i16", "sums": "*fp32", "factor": "*fp32", "bias": "*bf16", "count": "i32", "n": "i32"}
show(triton_products.parts_kernel, types, dict(PARTS=3, FACTOR=2, BIAS=True, LANES=1024), 4)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("capability", "formats"), [(80, ["nvfp4", "fp8_channel"]), (90, ["mxfp8", "fp8_block"]), (100, ["nvfp4"])]
)
@pytest.mark.usefixtures("forks")
def test_the_compiled_kernels_keep_subnormals_and_use_tensor_cores(
    capability: int, formats: list[str], tmp_path: Path
) -> None:
    """Codes are decoded by way of subnormal numbers, which a flush would make zero."""
    pytest.importorskip("triton", reason="Triton is not installed")
    environment = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    kernels = run(["-c", COMPILE, str(capability), *formats], environment, timeout=600).split("KERNEL")[1:]
    assert len(kernels) == 4 * len(formats) + 1
    for ptx in kernels:
        assert ".ftz" not in ptx
        assert ".local" not in ptx  # nothing that threads would have to keep in memory
        multiplies = re.search(r"\b(wg)?mma\S*\.bf16|tcgen05\.mma", ptx)
        assert bool(multiplies) == ("tiles_kernel" in ptx)


@pytest.mark.slow
def test_triton_is_imported_on_first_use_only() -> None:
    code = "import sys; from ptqpipe.runtime import packed; print('triton' in sys.modules)"
    assert run(["-c", code], {"TRITON_INTERPRET": "0"}, timeout=120).strip() == "False"


def test_without_a_device_there_is_no_kernel() -> None:
    packed = PackedWeight.from_qtensor(quantize(torch.ones(16, 64), "nvfp4"))
    x = torch.ones(2, 64, dtype=torch.bfloat16)
    assert packed.scales is not None
    made = triton_linear.linear(x, packed.data, packed.scales, packed.factor, packed.fmt, packed.shape)
    assert made is None
    assert not cuda_fp8.fits(x.device, (16, 64))


def fp8(fmt: str, n: int, k: int) -> PackedWeight:
    """A packed FP8 weight of very different rows."""
    g = torch.Generator().manual_seed(0)
    w = torch.randn(n, k, generator=g) * torch.exp2(torch.randint(-8, 3, (n, 1), generator=g).float())
    return PackedWeight.from_qtensor(quantize(w.bfloat16(), fmt))


def inputs(rows: int, k: int) -> torch.Tensor:
    """bfloat16 rows of very different sizes, one of zeros."""
    g = torch.Generator().manual_seed(1)
    x = torch.randn(rows, k, generator=g) * torch.exp2(torch.randint(-20, 8, (rows, 1), generator=g).float())
    x[-1] = 0
    return x.bfloat16()


def test_the_codes_of_fp8_inputs_decode_to_the_quantized_inputs() -> None:
    x = inputs(7, 96)
    codes, scales = fp8_codes(x.float())
    assert codes.dtype == torch.float8_e4m3fn
    assert torch.equal((codes.float() * scales).bfloat16(), TOKEN(x))


@pytest.mark.parametrize("bias", [None, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("fmt", ["fp8_channel", "fp8_tensor"])
def test_codes_times_codes_are_the_product_of_both_decodes(
    fmt: str, bias: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed, x = fp8(fmt, 48, 128), inputs(6, 128)
    added = None if bias is None else torch.randn(48, generator=torch.Generator().manual_seed(2)).to(bias)
    monkeypatch.setattr(cuda_fp8, "fits", lambda device, shape: True)
    y = packed_linear(x.reshape(2, 3, 128), packed, added, quantizer=TOKEN)
    codes, scales = fp8_codes(x.float())
    decoded, w = codes.double() * scales.double(), packed.dequantize().double()
    sums, exact = decoded.abs() @ w.abs().t(), decoded @ w.t()
    if added is not None:
        sums, exact = sums + added.double().abs(), exact + added.double()
    # As packed.py says; a bias that is not bfloat16 costs a second rounding, of the product before it.
    limit = sums * (2 * 128 * 2.0**-24) + 2.0**-8 * (exact.abs() + (sums if bias == torch.float32 else 0)) + 1e-30
    assert y.shape == (2, 3, 48)
    assert y.dtype == torch.bfloat16
    assert bool(((y.reshape(6, 48).double() - exact).abs() <= limit).all())


@pytest.mark.parametrize("fmt", ["fp8_channel", "nvfp4"])
def test_elsewhere_inputs_are_quantized_and_decoded_first(fmt: str) -> None:
    packed, x = PackedWeight.from_qtensor(quantize(torch.randn(48, 128).bfloat16(), fmt)), inputs(6, 128)
    assert torch.equal(packed_linear(x, packed, quantizer=TOKEN), packed_linear(TOKEN(x), packed))
