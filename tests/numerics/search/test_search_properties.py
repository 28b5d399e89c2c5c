"""Claims: on blocks drawn to break its bounds every search takes the scales of brute force, bit for bit.

The torch path and the compiled kernels on every instruction set; every kind of ``hostile.py``, magnitude, dtype and
importance. An example is a few hundred blocks; a failure prints the first wrong one as Python to paste.
"""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings, strategies as st

from ptqpipe.numerics.formats import CODECS, Format, get_format
from ptqpipe.numerics.kernels import cpu
from ptqpipe.numerics.search.brute_force import search as brute_force
from tests.numerics.search import hostile

BLOCKS = {  # format: examples of 12 kinds x 12 blocks
    "mxfp4": 16, "nvfp4": 8, "mxfp6_e2m3": 4, "mxfp6_e3m2": 4, "mxfp8": 6, "e2m1/16/e4m3": 6, "e2m1/8/ue5m3": 4,
    "e2m1/4/e8m0": 4, "e2m1/64/e8m0": 6, "e2m1/128/e8m0": 4, "e2m1/256/e8m0": 4, "e4m3/256/e8m0": 2, "e2m1/256/e4m3": 2,
    "e2m1/64/ue5m3/global": 3, "e4m3/16/e4m3/global": 3, "e2m3/12/ue5m3/global": 3, "e3m2/4/e4m3": 3, "e5m2/8/e8m0": 2,
    "e2m1/4/ue4m4/global": 2, "e6m1/4/e8m0": 2,
}  # fmt: skip
FOUND = (Phase.generate,)  # no shrinking: the block that fails is printed, a smaller seed would be another one
LARGEST = "largest of the dtype"
TILE = Format("tile", CODECS["e4m3"], (16, 24), CODECS["bf16"], partial_blocks=True)

sizes, dtypes = st.sampled_from(hostile.SIZES), st.sampled_from(hostile.DTYPES)
importances = st.just("none") | st.sampled_from(hostile.IMPORTANCES)
seeds = st.integers(0, 2**31)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def check(case: hostile.Case) -> None:
    """Every search of this machine."""
    expected = case.expected()
    for name, search in hostile.searches().items():
        found = search(case.w, case.fmt, case.global_scale, case.importance)
        if found is not None:
            fault = case.fault(name, found, expected)
            assert not fault, fault


@pytest.mark.slow
@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_are_brute_force(name: str) -> None:
    """12,000 blocks in all."""
    fmt = get_format(name)

    @settings(max_examples=BLOCKS[name], deadline=None, derandomize=True, database=None, phases=FOUND)
    @given(sizes, dtypes, importances, seeds)
    def run(size: str, dtype: torch.dtype, importance: str, seed: int) -> None:
        shape = (3, 4 * fmt.block[1])
        kinds = tuple(hostile.KINDS)
        check(hostile.make(fmt, shape, kinds=kinds, size=size, dtype=dtype, importance=importance, seed=seed))

    run()


@pytest.mark.slow
@settings(
    max_examples=32,
    deadline=None,
    derandomize=True,
    database=None,
    phases=FOUND,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(
    st.sampled_from(
        [
            ("fp8_channel", (4, 72)), ("fp8_tensor", (3, 50)), ("fp8_block", (20, 130)), ("tile", (20, 60)),
            ("fp8_block_ue8m0", (130, 40)), ("e4m3/16/bf16", (2, 64)),
            ("e2m1/16/fp16", (2, 64)), ("e2m1/16/bf16/global", (1, 32)),
        ]
    ),
    st.sampled_from(list(hostile.KINDS)), sizes, dtypes, importances, seeds,
)  # fmt: skip
def test_scales_that_are_numbers_are_brute_force(
    weight: tuple[str, tuple[int, int]], kind: str, size: str, dtype: torch.dtype, importance: str, seed: int
) -> None:
    fmt = TILE if weight[0] == "tile" else get_format(weight[0])
    check(hostile.make(fmt, weight[1], kinds=(kind,), size=size, dtype=dtype, importance=importance, seed=seed))


@pytest.mark.slow
@settings(
    max_examples=16,
    deadline=None,
    derandomize=True,
    database=None,
    phases=FOUND,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(
    st.sampled_from([("int4_g32", 64), ("int4_g128", 128), ("int8_channel", 40), ("int8_signed_channel", 20)]),
    st.sampled_from(list(hostile.KINDS)), sizes, dtypes, importances, seeds,
)  # fmt: skip
def test_scales_of_integers_are_brute_force(
    weight: tuple[str, int], kind: str, size: str, dtype: torch.dtype, importance: str, seed: int
) -> None:
    fmt, shape = get_format(weight[0]), (2, weight[1])
    check(hostile.make(fmt, shape, kinds=(kind,), size=size, dtype=dtype, importance=importance, seed=seed))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_scales_whose_inverse_is_subnormal_are_searched(dtype: torch.dtype) -> None:
    """Above 2^126 the inverse of a scale rounds another way than that of its half, so the half may be worse."""
    fmt = get_format("fp8_channel")
    for seed, kind in enumerate(("two-valued", "far apart", "constant") * 2):
        check(hostile.make(fmt, (4, 72), kinds=(kind,), size=LARGEST, dtype=dtype, importance="none", seed=seed))
    kinds = ("constant", "two-valued", "nearly constant", "sparse")
    case = hostile.make(fmt, (64, 8), kinds=kinds, size=LARGEST, dtype=dtype, importance="none", seed=0)
    expected = case.expected()
    assert int((expected.double() > 2.0**126).sum()) > 20  # of 256: those above have few such scales
    for isa in cpu.isas():
        found = hostile.compiled(isa)(case.w, case.fmt, case.global_scale, case.importance)
        assert found is not None
        fault = case.fault(isa, found, expected)
        assert not fault, fault


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "e4m3/16/bf16"])
def test_the_oracle_is_brute_force(name: str) -> None:
    fmt = get_format(name)
    kinds = tuple(hostile.KINDS) if fmt.scale.enumerable else ("constant",)
    for seed, size in enumerate(hostile.SIZES if fmt.scale.enumerable else ("alike",)):
        case = hostile.make(
            fmt, (1, fmt.block[1]), kinds=kinds, size=size, dtype=torch.float32, importance="uniform", seed=seed
        )
        found = brute_force(case.w, fmt, global_scale=case.global_scale, importance=case.importance)
        assert torch.equal(case.expected(), found), size
