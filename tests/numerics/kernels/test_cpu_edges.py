"""Claims: at the very edge of each of its bounds the compiled search is still brute force, and so are its totals.

As test_cpu_exact.py and test_cpu_rules.py, of few blocks, so that all of it takes seconds.
"""

import pytest
import torch

from ptqpipe.numerics.formats import get_format
from ptqpipe.numerics.kernels import cpu, reference
from ptqpipe.numerics.qtensor import encode
from ptqpipe.numerics.search import baselines, brute_force
from ptqpipe.numerics.search.objective import formula, importance_blocks, magnitude_blocks
from tests.numerics.search import cases, edges

if not cpu.available():
    pytest.skip("the CPU kernels are not built: pip install -e . with a C++ compiler", allow_module_level=True)


@pytest.fixture(params=cpu.isas(), autouse=True)
def _isa(request):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    cpu.force_isa(request.param)
    yield
    cpu.force_isa(None)
    torch.set_num_threads(threads)


@pytest.mark.parametrize("blocks", [1, 64])  # fewer than the kernel takes at once, and only such
@pytest.mark.parametrize("name", edges.BLOCKS)
def test_the_code_at_an_edge_is_the_one_counted_by_hand(name, blocks):
    fmt_name, w, code = edges.edge(name)
    fmt, w = get_format(fmt_name), w.repeat(1, blocks)
    done = cpu.block_quantize(w, fmt)
    assert done is not None
    assert done[1].tolist() == [[code] * blocks]
    assert torch.equal(done[0], encode(w, done[1], fmt=fmt).data)


@pytest.mark.parametrize(
    "name", ["nvfp4", "e2m1/16/e4m3", "mxfp4", "mxfp8", "mxfp6_e2m3", "mxfp6_e3m2", "e2m1/12/ue5m3"]
)
@pytest.mark.parametrize("weighted", [False, True])
def test_a_few_blocks_of_every_kind(name, weighted):
    fmt = get_format(name)
    for w in (edges.mixed(fmt, seed=43), edges.mixed(fmt, seed=44).bfloat16()):
        g = torch.tensor(0.0123) if fmt.has_global else None
        importance = cases.importances(w.shape[1], 45)["2^-30 .. 2^30"] if weighted else None
        expected = brute_force.search(w, fmt, global_scale=g, importance=importance)
        done = cpu.block_quantize(w, fmt, global_scale=g, importance=importance)
        assert done is not None
        differ = (done[1] != expected).nonzero()[:, 1]
        assert len(differ) == 0, f"scales of the blocks {differ.tolist()} differ"
        assert torch.equal(done[0], encode(w, expected, fmt=fmt, global_scale=g).data)


@pytest.mark.parametrize("name", ["nvfp4", "e2m1/16/e4m3", "mxfp4", "mxfp8"])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_total_of_a_few_blocks_of_every_kind(name, weighted):
    fmt = get_format(name)
    w = edges.mixed(fmt, seed=46).clamp(-(2.0**20), 2.0**20)  # squares of more leave float32 at minifloat scales
    g = torch.tensor(0.0123) if fmt.has_global else None
    importance = cases.importances(w.shape[1], 47)["uniform"] if weighted else None
    codes = brute_force.search(w, fmt, global_scale=g, importance=importance).reshape(-1)
    h = importance_blocks(importance, w, fmt)
    scores, _ = formula(magnitude_blocks(w, fmt), codes, fmt=fmt, global_scale=g, h=h)
    total = reference.sum_blocks(scores) * (1.0 if g is None else float(g) ** 2)
    assert 0 < total < float("inf")
    assert cpu.score_total(w, fmt, global_scale=g, importance=importance) == total


@pytest.mark.parametrize(("rule", "search"), [("absmax", baselines.absmax), ("exact", brute_force.search)])
@pytest.mark.parametrize("exponent", [-73, -64])
def test_the_total_of_blocks_far_below_their_scale_is_that_of_the_formula(rule, search, exponent):
    """Abs-max gives them 64 times the smallest scale, where the squares of their y are subnormal."""
    fmt = get_format("e2m1/16/e4m3")
    w = torch.zeros(1, 2048 * 16)
    w[0, ::16] = torch.randn(2048, generator=cases.generator(49)) * 2.0**exponent
    codes = search(w, fmt).reshape(-1)
    scores, _ = formula(magnitude_blocks(w, fmt), codes, fmt=fmt)
    assert 0 < float(scores.max()) < 2.0 ** (2 * exponent + 20)
    assert cpu.score_total(w, fmt, rule=rule) == reference.sum_blocks(scores)


def test_the_total_of_subnormal_weights_is_that_of_the_formula():
    fmt = get_format("mxfp4")
    w = torch.randn(2, 160, generator=cases.generator(50)) * 2.0**-140
    codes = brute_force.search(w, fmt).reshape(-1)
    scores, _ = formula(magnitude_blocks(w, fmt), codes, fmt=fmt)
    assert float(scores.min()) > 0
    assert cpu.score_total(w, fmt) == reference.sum_blocks(scores)


@pytest.mark.parametrize("name", [f"e2m1/{block}/e4m3" for block in (4, 6, 8, 10, 12, 14, 16, 18, 26, 28, 30, 32, 64)])
@pytest.mark.parametrize("blocks", [5, 16, 35])
def test_codes_of_blocks_that_fill_no_word_are_packed_without_gaps(name, blocks):
    fmt = get_format(name)
    w = torch.randn(2, blocks * fmt.block[1], generator=cases.generator(blocks))
    done = cpu.block_quantize(w, fmt)
    assert done is not None
    assert torch.equal(done[0], encode(w, done[1], fmt=fmt).data)


@pytest.mark.parametrize("name", ["e4m3/5/e4m3", "e4m3/6/e8m0", "e4m3/14/e4m3", "e4m3/16/e4m3", "e2m3/20/e8m0"])
def test_codes_of_wider_elements_are_packed_without_gaps(name):
    fmt = get_format(name)
    w = torch.randn(2, 35 * fmt.block[1], generator=cases.generator(48))
    done = cpu.block_quantize(w, fmt)
    assert done is not None
    assert torch.equal(done[0], encode(w, done[1], fmt=fmt).data)


@pytest.mark.parametrize("name", edges.ROWS)
def test_the_scale_of_a_row_at_an_edge_is_the_one_counted_by_hand(name):
    values, scale = edges.ROWS[name]
    for w in (torch.tensor([values]), torch.tensor([values]).bfloat16()):
        if torch.equal(w.float(), torch.tensor([values])):
            done = cpu.block_quantize(w, get_format("fp8_channel"))
            assert done is not None
            assert done[1].tolist() == [[scale]]


@pytest.mark.parametrize("name", edges.WEIGHTED)
def test_the_code_at_a_weighted_edge_is_the_one_counted_by_hand(name):
    fmt_name, values, weights, code = edges.WEIGHTED[name]
    done = cpu.block_quantize(torch.tensor([values]), get_format(fmt_name), importance=torch.tensor(weights))
    assert done is not None
    assert done[1].tolist() == [[code]]


@pytest.mark.parametrize("name", [name for name, (fmt, *_) in edges.RARE.items() if fmt == "nvfp4"])
@pytest.mark.parametrize("blocks", [1, 64])
def test_the_code_at_a_rare_edge_is_the_one_counted_by_hand(name, blocks):
    fmt, w, g, h, code = edges.rare(name)
    done = cpu.block_quantize(
        w.repeat(1, blocks), fmt, global_scale=g, importance=None if h is None else h.repeat(blocks)
    )
    assert done is not None
    assert done[1].tolist() == [[code] * blocks]
