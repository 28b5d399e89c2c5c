"""How the parameters of a block are put together from the matrices of a checkpoint."""

import pytest
import torch

from ptqpipe.calibration.assembly import assemble
from ptqpipe.models.slices import Member, Slice


def experts(count: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(6)
    return {
        f"b.experts.{e}.{leaf}.weight": torch.randn(6, 4, generator=generator)
        for e in range(count)
        for leaf in ("w1", "w3")
    }


@pytest.mark.parametrize("transposed", [False, True])
def test_matrices_of_experts_make_the_stack_that_was_loaded(*, transposed: bool) -> None:
    weights = experts(3)
    stacks = [torch.stack([weights[f"b.experts.{e}.{leaf}.weight"] for e in range(3)]) for leaf in ("w1", "w3")]
    parameter = torch.cat(stacks, dim=1)
    parameter = parameter.transpose(1, 2).contiguous() if transposed else parameter
    members = {key: Member(key, (6, 4), Slice(key)) for key in weights}
    (found,) = assemble({"gate_up": parameter}, {"gate_up": sorted(weights)}, members, weights)
    assert torch.equal(found.build(weights), parameter)
    assert set(found.keys) == set(weights)
    other = parameter + 1.0
    assert assemble({"gate_up": other}, {"gate_up": sorted(weights)}, members, weights) == []


def test_rows_that_alternate_in_a_stack_go_back_to_their_places() -> None:
    parameter = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(7))
    members, weights = {}, {}
    for expert in range(2):
        for start, leaf in enumerate(("gate", "up")):
            member = Member(f"experts.{expert}.{leaf}", (3, 4), Slice("experts.gate_up", start, 2, expert))
            members[member.key] = member
            weights[member.key] = parameter[expert, start::2]
    (found,) = assemble({"gate_up": parameter}, {"gate_up": ["experts.gate_up"]}, members, weights)
    assert torch.equal(found.build(weights), parameter)
