"""Claims: at the very edge of each of its bounds the exact search is still brute force."""

import pytest
import torch

from ptqpipe.numerics.formats import get_format
from ptqpipe.numerics.search import brute_force, exact
from tests.numerics.search import cases, edges


@pytest.mark.parametrize("name", edges.BLOCKS)
def test_the_code_at_an_edge_is_the_one_counted_by_hand(name: str) -> None:
    fmt_name, w, code = edges.edge(name)
    fmt = get_format(fmt_name)
    assert brute_force.search(w, fmt).tolist() == [[code]]
    assert exact.search(w, fmt).tolist() == [[code]]


@pytest.mark.parametrize("name", ["nvfp4", "e2m1/16/e4m3", "mxfp4", "mxfp8", "mxfp6_e2m3"])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_few_blocks_of_every_kind(name: str, weighted: bool) -> None:
    fmt = get_format(name)
    w = edges.mixed(fmt, seed=41)
    g = torch.tensor(0.0123) if fmt.has_global else None
    h = cases.importances(w.shape[1], 42)["2^-30 .. 2^30"] if weighted else None
    expected = brute_force.search(w, fmt, global_scale=g, importance=h)
    assert torch.equal(exact.search(w, fmt, global_scale=g, importance=h), expected)


@pytest.mark.parametrize("name", edges.ROWS)
def test_the_scale_of_a_row_at_an_edge_is_the_one_counted_by_hand(name: str) -> None:
    values, scale = edges.ROWS[name]
    assert exact.search(torch.tensor([values]), get_format("fp8_channel")).tolist() == [[scale]]


@pytest.mark.parametrize("name", edges.WEIGHTED)
def test_the_code_at_a_weighted_edge_is_the_one_counted_by_hand(name: str) -> None:
    fmt_name, values, weights, code = edges.WEIGHTED[name]
    w, fmt, h = torch.tensor([values]), get_format(fmt_name), torch.tensor(weights)
    assert brute_force.search(w, fmt, importance=h).tolist() == [[code]]
    assert exact.search(w, fmt, importance=h).tolist() == [[code]]


@pytest.mark.parametrize("name", edges.RARE)
def test_the_code_at_a_rare_edge_is_the_one_counted_by_hand(name: str) -> None:
    fmt, w, g, h, code = edges.rare(name)
    assert brute_force.search(w, fmt, global_scale=g, importance=h).tolist() == [[code]]
    assert exact.search(w, fmt, global_scale=g, importance=h).tolist() == [[code]]
