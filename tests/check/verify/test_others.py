"""verify: files beside the weights, experts, siblings and sources that are not what they should be."""

from collections.abc import Callable
from pathlib import Path

import pytest

import ptqpipe
from tests import tiny
from tests.check.verify.checks import DOWN, GATE, UP, Q, check, config, found, group, truncate
from tests.conversion import damage

# What readers take another model for, or refuse, though every tensor is as it was; seen without a source. The last says
# whether it is a fault of another tool's checkpoint, too.
CHANGED_FILES: dict[str, tuple[Callable[[Path], object], str, bool]] = {
    "no number of heads": (
        lambda f: damage.edit_json(f / "config.json", lambda c: c.pop("num_attention_heads")),
        "config.json",
        True,
    ),
    "another rotation": (
        lambda f: damage.edit_json(f / "config.json", lambda c: c.update(rope_theta=5e5)),
        "config.json",
        False,
    ),
    "other spaces in the config": (lambda f: damage.edit_json(f / "config.json", lambda _: None), "config.json", False),
    "exchanged tokens": (
        lambda f: (f / "tokenizer_config.json").write_text('{"b": 1}'),
        "tokenizer_config.json",
        False,
    ),
    "another template": (lambda f: (f / "chat_template.jinja").write_text("{{ x }}"), "chat_template.jinja", False),
    "no template": (lambda f: (f / "chat_template.jinja").unlink(), "chat_template.jinja", False),
    "another order in the index": (
        lambda f: damage.edit_json(f / "model.safetensors.index.json", lambda i: i["metadata"].update(a=1)),
        "model.safetensors.index.json",
        False,
    ),
    "a second description": (lambda f: (f / "hf_quant_config.json").write_text("{}"), "hf_quant_config.json", True),
    "a class that no layer has": (
        group(lambda g: g.update(targets=["NoSuch"])),
        "neither a quantized module nor",
        True,
    ),
    "no target": (group(lambda g: g.update(targets=[])), "no config group targets it", True),
    "one layer, and a class that no layer has": (
        group(lambda g: g.update(targets=[Q, "NoSuch"])),
        "target neither 'model.layers.0.mlp.down_proj' nor its class (13 such modules)",
        True,
    ),
    "sparse weights": (
        config(lambda c: c.update(sparsity_config={"format": "sparse-24-bitmask", "targets": ["Linear"]})),
        "sparsity_config",
        True,
    ),
    "sparse targets": (
        config(lambda c: c.update(sparsity_config={"format": "dense", "targets": ["Linear"]})),
        "sparsity_config",
        True,
    ),
}


@pytest.mark.parametrize("foreign", [False, True])
@pytest.mark.parametrize("what", CHANGED_FILES)
def test_a_config_or_a_tokenizer_that_was_changed_is_named_without_the_source(
    good: Path, tmp_path: Path, what: str, foreign: bool
) -> None:
    act, words, anyone = CHANGED_FILES[what]
    folder = damage.copy(good, tmp_path / "damaged")
    if foreign:
        damage.disown(folder)
    act(folder)
    report = check(folder, None)
    assert report.ok == (foreign and not anyone), found(report)
    assert report.ok or any(words in f"{fault.where}: {fault.message}" for fault in report.faults), found(report)


def test_a_file_that_was_added_is_a_note(good: Path, model: Path, tmp_path: Path) -> None:
    folder = damage.copy(good, tmp_path / "more")
    (folder / "README.md").write_text("what it scores")
    for source in (None, model):
        report = check(folder, source)
        assert report.ok, found(report)
        assert "README.md" in [note.where for note in report.notes if note.check == "files"]


def test_exchanged_experts_are_seen(experts: tuple[Path, Path], tmp_path: Path) -> None:
    source, good = experts
    assert check(good, source).ok
    folder = damage.disown(damage.copy(good, tmp_path / "damaged"))
    for part in ("weight_packed", "weight_scale", "weight_global_scale"):
        base = "model.layers.0.mlp.experts"
        damage.swap(folder, f"{base}.0.down_proj.{part}", f"{base}.2.down_proj.{part}")
    report = check(folder, source)
    assert {fault.where for fault in report.faults} == {f"{base}.{e}.down_proj.weight" for e in (0, 2)}
    assert all("not the numbers of the source's weight" in fault.message for fault in report.faults)


def test_a_router_that_no_config_lists_is_reported(experts: tuple[Path, Path], tmp_path: Path) -> None:
    source, good = experts
    folder = damage.copy(good, tmp_path / "damaged")
    damage.edit_config(folder, lambda c: c["ignore"].remove("model.layers.0.mlp.gate"))
    assert "model.layers.0.mlp.gate: is not quantized, but no config list says so" in found(check(folder, source))


def test_a_fused_sibling_left_unquantized_is_reported(model: Path, tmp_path: Path) -> None:
    """A recipe with the fuse table taken away quantizes q and keeps k and v; a runtime cannot fuse them."""
    out = ptqpipe.convert(model, ignore=[GATE, UP], out=tmp_path / "out", workers=1).out
    assert check(out, model).ok
    whole = ptqpipe.convert(model, out=tmp_path / "whole", workers=1).out
    folder = damage.disown(damage.copy(whole, tmp_path / "damaged"))
    for part in ("weight_packed", "weight_scale", "weight_global_scale"):
        damage.drop(folder, f"{UP}.{part}")
    report = check(folder, model)
    assert f"{UP}.weight: is in the source, but the checkpoint has neither this tensor" in found(report)


@pytest.mark.parametrize("code", [0, 255])
def test_reserved_e8m0_codes_are_faults(model: Path, tmp_path: Path, code: int) -> None:
    out = ptqpipe.convert(model, format="mxfp4", out=tmp_path / "out", workers=1).out
    damage.change_byte(out, f"{Q}.weight_scale", 0, lambda _: code)
    report = check(damage.disown(out), model)
    assert not report.ok
    assert (code == 255) == ("NaN, infinite or negative" in found(report))


def test_nan_codes_of_fp8_weights_are_faults(model: Path, tmp_path: Path) -> None:
    out = ptqpipe.convert(model, format="fp8_block", out=tmp_path / "out", workers=1).out
    damage.change_byte(out, f"{DOWN}.weight", 99, lambda _: 0xFF)
    assert "1 codes are NaN or infinite in e4m3" in found(check(damage.disown(out), model))


def test_a_folder_that_is_none_is_one_fault(tmp_path: Path, model: Path) -> None:
    report = check(tmp_path / "nowhere", model)
    assert len(report.faults) == 1
    assert "does not exist" in found(report)


def test_a_damaged_source_is_one_fault(good: Path, model: Path, tmp_path: Path) -> None:
    folder = damage.copy(model, tmp_path / "model")
    truncate(damage.shards(folder)[0])
    report = check(good, folder)
    assert [fault.where for fault in report.faults] == ["source"]


def test_another_source_is_not_the_source(good: Path, tmp_path: Path) -> None:
    other = tiny.save(tmp_path / "other", tiny.llama(seed=1))
    report = check(damage.disown(damage.copy(good, tmp_path / "peer")), other)
    wrong = {fault.where for fault in report.faults if fault.check == "error"}
    assert len(wrong) == 14
