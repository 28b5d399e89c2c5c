"""The claims about what a decoder layer does between its products: ``test_triton_layer.py`` runs this in a process.

Once with TRITON_INTERPRET=1, which has to be set before Triton is imported, on CPU tensors; and once on a CUDA device
where there is one. Expected values are those of torch's operators in transformers' own functions.
"""

from collections.abc import Callable

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from ptqpipe.numerics.kernels import triton as kernels, triton_layer

DEVICE = torch.device("cpu" if kernels.interpreting() else "cuda")
BLOCK = 4


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    """Normal numbers, of rows of very different magnitudes."""
    g = torch.Generator().manual_seed(seed)
    sizes = torch.exp2(torch.randint(-12, 6, (shape[0], *(1,) * (len(shape) - 1)), generator=g).float())
    return (torch.randn(shape, generator=g) * sizes).bfloat16().to(DEVICE)


def module(width: int, eps: float) -> LlamaRMSNorm:
    """transformers' norm with weights of either sign."""
    made = LlamaRMSNorm(width, eps).to(DEVICE, torch.bfloat16)
    made.weight.data = torch.randn(width, generator=torch.Generator().manual_seed(width)).bfloat16().to(DEVICE)
    return made.requires_grad_(False)


def assert_normed(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Equal but for a few numbers, each of which has been rounded to its other neighbour before its weight multiplied
    it: 2^-7 of itself there, and as much from the rounding of the product."""
    gap = (found.double() - wanted.double()).abs()
    assert found.shape == wanted.shape
    assert bool((gap <= 2.0**-6 * wanted.double().abs()).all())
    assert int((gap > 0).sum()) <= max(1, found.numel() // 100)


@pytest.mark.parametrize(("rows", "width"), [(1, 64), (3, 100), (70, 96), (2, 4096), (2, 5120)])
@pytest.mark.parametrize("eps", [1e-6, 1e-2])
def test_norms(rows: int, width: int, eps: float) -> None:
    x, own = numbers(rows, width), module(width, eps)
    same, found = triton_layer.norm(x, own.weight, eps)
    assert same is x
    assert_normed(found, own(x))
    wide = numbers(rows, 2 * width)[:, width:]  # of rows with others between them
    assert_normed(triton_layer.norm(wide, own.weight, eps)[1], own(wide))


def test_a_norm_whose_mean_is_exact_has_torchs_bits() -> None:
    """Of magnitudes that are one power of two, so that a root which is off by some bits changes nothing."""
    x = torch.tensor([1.0, -1.0, -1.0, 1.0]).repeat(4, 24) * torch.tensor([[1.0], [4.0], [2.0**-9], [0.0]])
    x, own = x.bfloat16().to(DEVICE), module(96, 1e-20)
    assert torch.equal(triton_layer.norm(x, own.weight, 1e-20)[1], own(x))


@pytest.mark.parametrize(("rows", "width"), [(1, 64), (70, 100), (2, 4096)])
def test_a_residual_is_added_first(rows: int, width: int) -> None:
    x, y, own = numbers(rows, width), numbers(rows, width, seed=1), module(width, 1e-5)
    total, found = triton_layer.norm(x, own.weight, 1e-5, y)
    assert torch.equal(total, x + y)
    assert_normed(found, own(x + y))


@pytest.mark.parametrize(
    ("rows", "heads", "kv_heads", "dim"), [(1, 4, 2, 32), (5, 6, 1, 80), (70, 2, 2, 16), (3, 32, 8, 128)]
)
@pytest.mark.parametrize("kind", ["plain", "joined", "normed"])
def test_rotary_embedding_and_store(kind: str, rows: int, heads: int, kv_heads: int, dim: int) -> None:
    widths = [heads * dim, kv_heads * dim, kv_heads * dim]
    joined = numbers(rows, sum(widths))
    parts = [part if kind == "joined" else part.contiguous() for part in joined.split(widths, -1)]
    g = torch.Generator().manual_seed(2)
    angles = torch.rand(rows, dim, generator=g) * 6
    rotary = (angles.cos().bfloat16().to(DEVICE), angles.sin().bfloat16().to(DEVICE))
    blocks = -(-rows // BLOCK) + 2
    slots = torch.randperm(blocks * BLOCK, generator=g)[:rows].to(DEVICE)
    pages = [numbers(blocks, BLOCK, kv_heads, dim, seed=seed) for seed in (3, 4)]
    before = [page.clone() for page in pages]
    norms, query, key = None, parts[0].view(1, rows, heads, dim), parts[1].view(1, rows, kv_heads, dim)
    if kind == "normed":
        own = (module(dim, 1e-6), module(dim, 1e-3))
        own[1].weight.data *= 2
        norms = triton_layer.HeadNorms(own[0].weight, own[1].weight, 1e-6, 1e-3)
        query, key = own[0](query), own[1](key)
    turned = apply_rotary_pos_emb(query.transpose(1, 2), key.transpose(1, 2), rotary[0][None], rotary[1][None])
    query, key = (x[0].transpose(0, 1) for x in turned)
    found = triton_layer.rotate_and_store(*parts, rotary, (pages[0], pages[1]), slots, norms)
    stored = [page.flatten(0, 1)[slots] for page in pages]
    if kind == "normed":
        for one, other in ((found, query), (stored[0], key)):
            assert int((one != other).sum()) <= max(
                2, one.numel() // 50
            )  # whose plane has a number that was rounded anew
            largest = other.float().abs().amax(-1, keepdim=True)
            assert bool(((one.float() - other.float()).abs() <= 2.0**-4 * largest).all())
    else:
        assert torch.equal(found, query)
        assert torch.equal(stored[0], key)
    assert torch.equal(stored[1], parts[2].view(rows, kv_heads, dim))
    for page, old in zip(pages, before, strict=True):
        old.flatten(0, 1)[slots] = page.flatten(0, 1)[slots]
        assert torch.equal(page, old)  # nothing else was written to


@pytest.mark.parametrize(("rows", "width"), [(1, 64), (3, 1000), (70, 96)])
@pytest.mark.parametrize("activation", [torch.nn.functional.silu, torch.nn.functional.gelu, torch.relu])
def test_the_gate_has_torchs_bits(activation: Callable[[torch.Tensor], torch.Tensor], rows: int, width: int) -> None:
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).to(DEVICE)
    table = activation(every.view(torch.bfloat16)).view(torch.int16)
    gate, up = numbers(rows, 2 * width).split(width, -1)
    looked_up = table.view(torch.bfloat16)[gate.contiguous().view(torch.int16).int() & 0xFFFF]
    found = triton_layer.gated(gate, up, table)
    assert torch.equal(found, looked_up * up)
    if activation is not torch.nn.functional.gelu:  # whose bits depend on a number's place on a CPU
        assert torch.equal(found, activation(gate) * up)
    one = torch.ones(1, 1 << 16, dtype=torch.bfloat16, device=DEVICE)
    found = triton_layer.gated(every.view(torch.bfloat16)[None], one, table)[0]
    wanted = table.view(torch.bfloat16)
    nan = wanted.isnan()
    assert torch.equal(found[~nan], wanted[~nan])
    assert bool(found[nan].isnan().all())
