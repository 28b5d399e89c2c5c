"""Claims about adding a container: one module is all. It is found, written, read, verified and laid out from there; its
readers' issues are a row of the table of readers."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import ptqpipe
from ptqpipe.check.diff import diff
from ptqpipe.check.inspect import inspect
from ptqpipe.check.verify.command import verify
from ptqpipe.checkpoint import layouts as containers
from ptqpipe.conversion.relayout.command import relayout
from ptqpipe.errors import FormatError, UsageError
from ptqpipe.models.layout_issues import LAYOUT_ISSUES
from ptqpipe.run.machine import Machine
from tests import tiny

# Scales before codes, another suffix for each part, a scale of the kv cache of its own, and a config key per weight.
MODULE = '''
"""A layout of NVFP4 weights and of nothing else."""

from ptqpipe.checkpoint.layouts._config import check_parts, matrix_shape, quantization_config
from ptqpipe.checkpoint.layouts._config import refuse, without_quantization
from ptqpipe.checkpoint.layouts._lists import Lists
from ptqpipe.checkpoint.layouts._types import Part, PartKind, StoredWeight
from ptqpipe.numerics.schemes import Capabilities, KvCache, get_scheme

QUANT_METHOD = "drawer"
CAPABILITIES = Capabilities(kv_cache=KvCache(r"\\1.cache_\\2_scale", (), written=True, per_head=False))
_SCHEME = get_scheme("nvfp4")


def supports(scheme):
    return None if scheme == _SCHEME else f"drawer stores nvfp4 only, not {scheme.name}; use another container"


def parts(weight, shape, scheme, *, experts=None, transposed=False):
    refuse(weight, container="drawer", scheme_reason=supports(scheme), experts=experts, transposed=transposed)
    module, (n, k) = weight.removesuffix(".weight"), shape
    return (
        Part(f"{module}.top", "F8_E4M3", scheme.fmt.scale_shape(shape), PartKind.SCALES),
        Part(f"{module}.one", "F32", (), PartKind.GLOBAL_DIVISOR),
        Part(f"{module}.inside", "U8", (n, k // 2), PartKind.DATA),
    )


def configs(request):
    request.check(supports)
    described = {"quant_method": QUANT_METHOD, "full": sorted(target.module for target in request.targets)}
    described["ptqpipe"] = dict(request.provenance)
    return {"config.json": {**without_quantization(request.base), "quantization_config": described}}


def detect(config, names):
    return quantization_config(config).get("quant_method") == QUANT_METHOD


def lists(config):
    return Lists("full", aims=lambda names: False)


def stored_weights(config, names):
    found = {}
    for name in names:
        module = name.removesuffix(".inside")
        if module != name:
            weight, shape = f"{module}.weight", matrix_shape(names, name, bits=4, owner=module)
            expected = parts(weight, shape, _SCHEME)
            check_parts(expected, names, weight=weight)
            found[weight] = StoredWeight(weight, shape, _SCHEME, expected)
    return found


def config_faults(files, stored):
    listed = set(quantization_config(files["config.json"] or {}).get("full") or [])
    for weight in stored:
        if weight.removesuffix(".weight") not in listed:
            yield "full", f"does not list {weight}"
'''


@pytest.fixture
def drawer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a container whose module lies in a folder of its own."""
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "drawer.py").write_text(MODULE)
    monkeypatch.setitem(LAYOUT_ISSUES, "drawer", ((lambda _: True, "nobody reads drawers"),))
    monkeypatch.setattr(containers, "__path__", [*containers.__path__, str(folder)])
    yield "drawer"
    sys.modules.pop("ptqpipe.checkpoint.layouts.drawer", None)
    vars(containers).pop("drawer", None)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny.save(tmp_path / "model", tiny.llama(layers=1, hidden=64, inner=128))


def convert(model: Path, out: Path, container: str) -> Path:
    return ptqpipe.convert(model, out=out, format="nvfp4", container=container).out


def test_it_is_found_by_its_file(drawer: str) -> None:
    assert drawer in containers.container_names()
    assert containers.get_container("Drawer").QUANT_METHOD == "drawer"


def test_without_the_file_it_is_unknown() -> None:
    with pytest.raises(UsageError, match="unknown container 'drawer'"):
        containers.get_container("drawer")


def test_a_model_is_converted_and_verified(drawer: str, model: Path, tmp_path: Path) -> None:
    out = convert(model, tmp_path / "out", drawer)
    stored = {name: t for file in out.glob("*.safetensors") for name, t in load_file(file).items()}
    base = "model.layers.0.mlp.up_proj"
    assert [stored[f"{base}.{part}"].shape for part in ("top", "one", "inside")] == [(128, 4), (), (128, 32)]
    report = verify(out, source=model, optimal=True)
    assert report.faults == ()
    assert "nobody reads drawers" in {note.message for note in report.notes}
    assert inspect(out).container == drawer
    plain = convert(model, tmp_path / "plain", "ptqpipe")
    assert diff(out, plain).equal
    ours, theirs = ptqpipe.load_tensors(out), ptqpipe.load_tensors(plain)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name].dequantize(), theirs[name].dequantize()) for name in ours)


def test_its_own_check_of_the_config_counts(drawer: str, model: Path, tmp_path: Path) -> None:
    out = convert(model, tmp_path / "out", drawer)
    config = json.loads((out / "config.json").read_text())
    lost = config["quantization_config"]["full"].pop()
    (out / "config.json").write_text(json.dumps(config))
    faults = verify(out, source=model).faults
    assert ("full", f"does not list {lost}.weight") in {(fault.where, fault.message) for fault in faults}


@pytest.mark.parametrize("other", ["compressed_tensors", "modelopt", "ptqpipe"])
def test_layouts_change_to_it_and_back(drawer: str, model: Path, tmp_path: Path, other: str) -> None:
    start = convert(model, tmp_path / "start", other)
    there, back = tmp_path / "there", tmp_path / "back"
    for source, out, container in ((start, there, drawer), (there, back, other)):
        assert relayout(source, out, container=container, machine=Machine(workers=1)) is not None
    assert verify(there, source=model).faults == ()
    before, after = (
        {file.name: file.read_bytes() for file in folder.glob("*.safetensors")} for folder in (start, back)
    )
    assert before == after


def test_what_it_cannot_store_is_refused_in_its_own_words(drawer: str, model: Path, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="drawer stores nvfp4 only, not mxfp4"):
        ptqpipe.convert(model, out=tmp_path / "out", format="mxfp4", container=drawer)
    with pytest.raises(UsageError, match='drawer has one KV-cache scale per layer; use kv_cache="fp8", or compr'):
        ptqpipe.convert(model, out=tmp_path / "out", format="nvfp4", container=drawer, kv_cache="fp8_per_head")
    assert not (tmp_path / "out").exists()
