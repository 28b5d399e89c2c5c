"""Learned rotations: orthogonal, at the optimum where that is known, the same every time."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from ptqpipe.quantization.transforms import learn_rotations
from ptqpipe.quantization.transforms.learn_rotations import Reader, Rounding, learn, slope


def to_three_bits(x: torch.Tensor) -> torch.Tensor:
    """Rounded to a significand of four bits, as E4M3 without an end of its range: errors in proportion to numbers."""
    fraction, exponent = torch.frexp(x)
    return torch.ldexp((fraction * 16).round() / 16, exponent)


def to_e2m1(x: torch.Tensor) -> torch.Tensor:
    """The nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6 times a sixth of the largest of each 16."""
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    blocks = x.reshape(len(x), -1, 16)
    scale = blocks.abs().amax(-1, keepdim=True) / 6
    nearest = values[((blocks / scale).abs().unsqueeze(-1) - values).abs().argmin(-1)]
    found: torch.Tensor = (torch.copysign(nearest, blocks) * scale).flatten(1)
    return found


def in_basis(angle: float, first: float, second: float) -> torch.Tensor:
    """The symmetric matrix with these eigenvalues, whose eigenvectors are the axes turned by an angle."""
    c, s = math.cos(angle), math.sin(angle)
    turn = torch.tensor([[c, -s], [s, c]])
    return turn @ torch.diag(torch.tensor([first, second])) @ turn.T


PLAIN = Rounding(to_three_bits, 0, 0.0)


def drawn(moment: torch.Tensor, count: int) -> torch.Tensor:
    """Normal, with these moments but for one factor; tokens of many sizes, so that no octave is met more often."""
    generator = torch.Generator().manual_seed(1)
    z = torch.randn(count, len(moment), generator=generator) * torch.exp2(torch.rand(count, 1, generator=generator))
    found: torch.Tensor = z @ torch.linalg.cholesky(moment).T
    return found


@pytest.mark.parametrize(
    ("angle", "inputs", "gradients"),
    [(math.pi / 6, (8.0, 1.0), (1.0, 5.0)), (0.0, (8.0, 1.0), (5.0, 1.0)), (-math.pi / 5, (3.0, 1.0), (1.0, 9.0))],
    ids=["opposed, 30 degrees", "alike, on the axes", "opposed, -36 degrees"],
)
def test_two_channels_of_commuting_moments_reach_the_least_that_any_angle_gives(
    angle: float, inputs: tuple[float, float], gradients: tuple[float, float]
) -> None:
    """With errors in proportion to numbers, and gradients that do not depend on inputs, the loss is sum_i A_ii B_ii of
    the moments A of inputs and B of gradients. With common eigenvectors it is 2 (a b + d e cos^2 2t) at an angle t from
    those, a and b the mean eigenvalues, d and e half their differences: least at the eigenvectors where large ones meet
    small ones, and half way between them where large ones meet large ones."""
    a, b = (sum(pair) / 2 for pair in (inputs, gradients))
    d, e = ((pair[0] - pair[1]) / 2 for pair in (inputs, gradients))

    def loss(cosine: float) -> float:
        return 2 * (a * b + d * e * cosine**2)

    count = 1 << 17
    x = drawn(in_basis(angle, *inputs), count)
    signs = torch.randint(0, 2, (count, 2), generator=torch.Generator().manual_seed(2)) * 2.0 - 1
    h = signs @ torch.linalg.cholesky(in_basis(angle, *gradients)).T  # of these moments
    found = learn([Reader(x, h, torch.zeros(1).long(), torch.ones(2))], count=1, block=2, rounding=PLAIN, steps=300)
    least = min(loss(0.0), loss(1.0))
    assert found.error / found.plain_error == pytest.approx(least / loss(math.cos(2 * angle)), rel=0.06)
    hadamard = loss(math.cos(2 * (angle - math.pi / 4)))
    assert found.hadamard_error / found.plain_error == pytest.approx(hadamard / loss(math.cos(2 * angle)), rel=0.06)


def correlated(count: int) -> Reader:
    """Correlated inputs, and gradients at them from few outputs; two blocks of columns that one matrix turns, and one
    that another does."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(count, 48, generator=generator) @ torch.randn(48, 48, generator=generator)
    h = torch.randn(count, 8, generator=generator) @ torch.randn(8, 48, generator=generator)
    return Reader(x, h, torch.tensor([0, 0, 1]), torch.ones(48))


@pytest.mark.parametrize("rounding", [PLAIN, Rounding(to_e2m1, 16, 0.09)], ids=["8 bits", "4 bits"])
def test_learned_matrices_are_orthogonal_and_lower_the_cost_of_tokens_that_were_not_learned_from(
    rounding: Rounding,
) -> None:
    """The cost by its definition, on tokens that `learn` was not even given."""
    both = correlated(8192)
    known = replace(both, inputs=both.inputs[:4096], gradients=both.gradients[:4096])
    found = learn([known], count=2, block=16, rounding=rounding, steps=40)
    assert found.matrices.shape == (2, 16, 16)
    eye = torch.eye(16, dtype=torch.float64).expand(2, 16, 16)
    assert float((found.matrices @ found.matrices.mT - eye).abs().max()) < 1e-12
    assert found.error < 0.97 * min(found.plain_error, found.hadamard_error)

    def cost(turn: torch.Tensor) -> float:
        x, h = both.inputs[4096:] @ turn, both.gradients[4096:] @ turn
        return float(((rounding.quantize(x) - x) * h).sum(1).square().mean() / 2)

    first, second = found.matrices.float()
    whole: torch.Tensor = torch.block_diag(first, first, second)  # type: ignore[no-untyped-call]
    assert cost(whole) < 0.97 * cost(torch.eye(48))


def test_any_number_of_threads_gives_the_same_matrices_and_a_gain_is_taken_out() -> None:
    """Inputs g z and gradients h / g, which are what a layer behind a norm of the weights g reads, count as z and h;
    columns of no gain as nothing."""
    every = correlated(8192)
    runs = [slice(0, 1024), slice(1024, 3072), slice(3072, 3584), slice(3584, 7680)]
    plain = [replace(every, inputs=every.inputs[run], gradients=every.gradients[run]) for run in runs]
    gain = torch.exp2(torch.arange(48) % 7 - 3.0)
    scaled = [Reader(r.inputs * gain, r.gradients / gain, r.turns, gain) for r in plain]
    steps: list[int] = []
    options: dict[str, Any] = {"count": 2, "block": 16, "rounding": Rounding(to_e2m1, 16, 0.09), "steps": 20}
    one = learn(plain, **options)
    several = learn(scaled, **options, threads=3, stepped=lambda: steps.append(1))
    assert torch.equal(one.matrices, several.matrices)
    assert one.error == several.error < one.plain_error
    assert len(steps) == 20
    gain[4:6] = torch.tensor([1e-40, 0.0])
    inverse, factors = (of.flatten() for of in replace(plain[0], gain=gain).factors(16))
    assert torch.equal(factors, gain)
    assert inverse[4:6].tolist() == [0.0, 0.0]
    assert torch.equal(inverse[6:], 1 / gain[6:])


@pytest.mark.parametrize("rounding", [PLAIN, Rounding(to_e2m1, 16, 0.09), Rounding(to_e2m1, 24, 0.09)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_slope_is_that_of_the_local_steps(rounding: Rounding, dtype: torch.dtype) -> None:
    """By autograd, from the definition: errors in proportion to sqrt(x^2 + floor * amax^2); two blocks by one matrix,
    scales of a token, of a block and across blocks."""
    reader = replace(correlated(256), gain=torch.linspace(0.5, 2, 48))
    rows = torch.randperm(256, generator=torch.Generator().manual_seed(3))[:100]
    drawn = torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    matrices = torch.linalg.qr(drawn).Q.float().requires_grad_(True)
    whole: torch.Tensor = torch.block_diag(*matrices.double()[reader.turns])  # type: ignore[no-untyped-call]
    x, h = (reader.inputs / reader.gain)[rows].double() @ whole, (reader.gradients * reader.gain)[rows].double() @ whole
    groups = x.square().reshape(100, -1, rounding.group or 48)
    steps = (groups + rounding.floor * groups.amax(-1, keepdim=True)).flatten(1)
    (wanted,) = torch.autograd.grad((steps * h.square()).sum() / 200, matrices)
    found = slope(reader, rows, matrices=matrices.detach(), rounding=rounding, dtype=dtype)
    limit = 1e-5 if dtype == torch.float64 else 0.02
    assert float((found - wanted).norm() / wanted.norm()) < limit
    assert found.dtype == torch.float32


def test_gradients_of_zero_and_a_single_token_are_no_trouble() -> None:
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))
    options: dict[str, Any] = {"count": 1, "block": 16, "rounding": Rounding(to_e2m1, 16, 0.09), "steps": 8}
    found = learn([Reader(x, torch.zeros(64, 16), torch.zeros(1).long(), torch.ones(16))], **options)
    assert torch.equal(found.matrices[0], torch.eye(16, dtype=torch.float64))
    found = learn([Reader(x[:1], x[1:2], torch.zeros(1).long(), torch.ones(16))], **options)
    assert found.error < found.plain_error
    assert float((found.matrices[0] @ found.matrices[0].T - torch.eye(16)).abs().max()) < 1e-12


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of how many tokens slopes are found from now on."""
    seen: list[int] = []

    def watched(reader: Reader, rows: torch.Tensor, **options: Any) -> torch.Tensor:
        seen.append(len(rows))
        return slope(reader, rows, **options)

    monkeypatch.setattr(learn_rotations, "slope", watched)
    return seen


@pytest.mark.parametrize(("readers", "tokens"), [(1, 1536), (8, 1536), (12, 1024), (200, 128)])
def test_a_step_sees_as_many_inputs_whatever_the_number_of_readers(
    readers: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But at most and at least some of each."""
    seen = counted(monkeypatch)
    learn([correlated(2048)] * readers, count=2, block=16, rounding=PLAIN, steps=1)
    assert seen == [tokens] * readers


def test_steps_end_where_a_quarter_of_them_has_gained_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Channels without correlations, of which the larger ones cost less: no rotation gains, and its steps are not all
    taken, though each is told."""
    scale = torch.exp2(torch.arange(16.0))
    generator = torch.Generator().manual_seed(1)
    x, h = torch.randn(2, 4096, 16, generator=generator)
    seen, told = counted(monkeypatch), list[int]()
    reader = Reader(x * scale, h / scale.square(), torch.zeros(1).long(), torch.ones(16))
    found = learn([reader], count=1, block=16, rounding=PLAIN, steps=80, stepped=lambda: told.append(1))
    assert torch.equal(found.matrices[0], torch.eye(16, dtype=torch.float64))
    assert found.error == found.plain_error
    assert (len(seen), len(told)) == (20, 80)


def test_where_nothing_is_gained_the_matrices_are_identities() -> None:
    """Without a step."""
    reader = Reader(torch.randn(64, 16), torch.randn(64, 16), torch.zeros(1).long(), torch.ones(16))
    found = learn([reader], count=1, block=16, rounding=Rounding(to_e2m1, 16, 0.09), steps=0)
    assert torch.equal(found.matrices[0], torch.eye(16, dtype=torch.float64))
    assert found.error == found.plain_error
