"""Claims about what readers' own loaders were seen to do with the tiny models: what they lose is refused for them."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import ptqpipe
from ptqpipe.errors import UsageError
from ptqpipe.models.families import family_of
from ptqpipe.models.reader_facts import READERS
from tests import families, family_rows

ROOT = Path(__file__).resolve().parent.parent.parent
KINDS = {*family_rows.PUBLISHED, *families.LOADED}


def rows(reader: str) -> list[dict[str, Any]]:
    """The lines of a reader's results; those of SGLang with a layer kept, and of its models for drafts, apart."""
    file = {
        "vllm": "vllm_fills",
        "sglang": "sglang_families",
        "sglang with a layer kept": "sglang_kept",
        "sglang for drafts": "sglang_drafts",
    }[reader]
    return [json.loads(line) for line in (ROOT / "labs" / "readers" / f"{file}.jsonl").read_text().splitlines()]


def lost(row: dict[str, Any]) -> list[str]:
    """Tensors that a reader left out or changed. A fused weight has one ``weight_shape``, which readers do not use, and
    transformers' own layout of MiniMax-M3 a bias that vLLM does not find there, in whatever format."""
    unused = (".weight_shape", ".mlp.gate.e_score_correction_bias")
    return [name for name in row.get("missing", ()) if not name.endswith(unused)]


LOST = [(reader.split()[0], row["model"], row["output"], row["container"], tuple(row.get("ignore", ())), row.get("mtp"))
        for reader in ("vllm", "sglang", "sglang with a layer kept", "sglang for drafts") for row in rows(reader)
        if row["model"] in {*KINDS, *families.DRAFTING} and lost(row)]  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes each model once; ``mtp``: with its multi-token prediction layer."""

    @cache
    def of(kind: str, mtp: bool = False) -> Path:
        folder = tmp_path_factory.mktemp("loaded") / kind
        if mtp or kind in families.LOADED:
            return families.make_model(folder, kind, mtp=mtp)
        return family_rows.make(folder, kind, published=True)

    return of


@pytest.mark.parametrize("reader", ["vllm", "sglang"])
def test_every_tiny_model_was_given_to_the_reader_in_every_format_that_is_written_for_it(reader: str) -> None:
    wanted = {(scheme, container) for scheme, found in READERS[reader].items() for container in found}
    tried: dict[str, set[tuple[str, str]]] = {kind: set() for kind in KINDS}
    for row in rows(reader):
        tried[row["model"]].add((row["output"], row["container"]))
    assert {kind: wanted - done for kind, done in tried.items() if wanted - done} == {}


@pytest.mark.parametrize("kind", sorted(kind for kind in KINDS if "sglang" in family_of({"model_type": kind}).missing))
def test_a_model_that_a_reader_does_not_have_stops_it_and_is_refused_for_it_in_every_format(
    kind: str, model: Callable[[str], Path], tmp_path: Path
) -> None:
    assert all(row.get("problem") for row in rows("sglang") if row["model"] == kind)
    for scheme in READERS["sglang"]:
        with pytest.raises(UsageError, match=f"sglang has no '{kind}' model; leave"):
            ptqpipe.convert(model(kind), reader="sglang", format=scheme, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_every_model_for_drafts_was_tried_with_its_layer_kept_and_quantized() -> None:
    wanted = {(scheme, container) for scheme, found in READERS["sglang"].items() for container in found}
    tried: dict[tuple[str, str], set[tuple[str, str]]] = {}
    for row in rows("sglang for drafts"):
        tried.setdefault((row["model"], row["mtp"]), set()).add((row["output"], row["container"]))
        assert row.get("refused") or (row["landed"] and not lost(row)), row
    assert set(tried) == {(kind, mtp) for kind in families.DRAFTING for mtp in ("keep", "fp8")}
    assert all(done >= wanted for done in tried.values())


@pytest.mark.parametrize(("reader", "kind", "scheme", "container", "ignore", "mtp"), LOST)
def test_what_a_reader_loses_without_a_word_is_refused_for_it(
    reader: str,
    kind: str,
    scheme: str,
    container: str,
    ignore: tuple[str, ...],
    mtp: str | None,
    model: Callable[..., Path],
    tmp_path: Path,
) -> None:
    call: dict[str, Any] = {"format": scheme, "container": container, "out": tmp_path / "out", "requantize": True}
    call |= {"ignore": ignore, "mtp": mtp or "keep"}
    with pytest.raises(UsageError, match=f"reader=.{reader}|contradicts"):
        ptqpipe.convert(model(kind, mtp=mtp is not None), reader=reader, **call)
