"""verify: no stored byte changes without a fault that names it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.check.verify.checks import (
    DOWN,
    EMBEDDING,
    GATE,
    NORM,
    UP,
    Damage,
    K,
    Q,
    check,
    config,
    found,
    group,
    truncate,
)
from tests.conversion import damage


def drop_from_everywhere(name: str) -> Damage:
    """A tensor and its entry in the index."""

    def act(folder: Path) -> None:
        damage.drop(folder, name)
        damage.edit_json(folder / "model.safetensors.index.json", lambda index: index["weight_map"].pop(name))

    return act


def record(edit: Callable[[dict[str, dict[str, dict[str, object]]]], object]) -> Damage:
    return lambda folder: damage.edit_json(folder / "ptqpipe.json", edit)


def byte(name: str, index: int, change: Callable[[int], int]) -> Damage:
    return lambda folder: damage.change_byte(folder, name, index, change)


# what is done -> (how, words of a fault, whether it is a fault in another tool's checkpoint too)
DAMAGES: dict[str, tuple[Damage, str, bool]] = {
    "low bit of a code": (byte(f"{Q}.weight_packed", 5, lambda b: b ^ 1), f"{Q}.weight", False),
    "sign bit of a code": (byte(f"{DOWN}.weight_packed", 777, lambda b: b ^ 0x88), f"{DOWN}.weight", True),
    "a scale one code up": (byte(f"{K}.weight_scale", 9, lambda b: b + 1), f"{K}.weight", False),
    "a scale four times as large": (byte(f"{K}.weight_scale", 9, lambda b: b + 16), f"{K}.weight", True),
    "a scale of zero": (byte(f"{K}.weight_scale", 9, lambda _: 0), "scales are zero", True),
    "a scale of NaN": (byte(f"{K}.weight_scale", 9, lambda _: 0x7F), "NaN, infinite or negative", True),
    "a negative scale": (byte(f"{K}.weight_scale", 9, lambda b: b | 0x80), "NaN, infinite or negative", True),
    "the last bit of a global scale": (byte(f"{DOWN}.weight_global_scale", 0, lambda b: b ^ 1), DOWN, False),
    "a global scale twice as large": (byte(f"{DOWN}.weight_global_scale", 2, lambda b: b ^ 0x80), DOWN, True),
    "a global scale of its own in a fused group": (byte(f"{K}.weight_global_scale", 0, lambda b: b ^ 1), K, True),
    "a negative global scale": (byte(f"{Q}.weight_global_scale", 3, lambda b: b | 0x80), "finite positive", True),
    "an input scale of its own": (byte(f"{K}.input_global_scale", 0, lambda b: b ^ 1), "input scale", True),
    "an infinite input scale": (
        lambda f: damage.put(f, f"{DOWN}.input_global_scale", b"\0\0\x80\x7f"),
        "finite positive",
        True,
    ),
    "another input scale": (byte(f"{DOWN}.input_global_scale", 2, lambda b: b ^ 1), "input_global_scale", False),
    "gate and up exchanged": (lambda f: swap_weights(f, GATE, UP), f"{GATE}.weight", True),
    "layers exchanged": (lambda f: swap_weights(f, Q, Q.replace("layers.0", "layers.1")), f"{Q}.weight", True),
    "two rows of codes exchanged": (lambda f: swap_rows(f, f"{Q}.weight_packed", 64), f"{Q}.weight", True),
    "a kept bit": (byte(NORM, 0, lambda b: b ^ 1), NORM, True),
    "a kept tensor of another shape": (lambda f: reshape(f, EMBEDDING, [128, 96]), EMBEDDING, True),
    "a kept tensor of another dtype": (lambda f: damage.retype(f, NORM, "F16"), NORM, True),
    "a renamed weight": (
        lambda f: [damage.rename(f, f"{Q}.{p}", f"{Q}x.{p}") for p in nvfp4_parts()],
        "no weight of this name",
        True,
    ),
    "a renamed part": (lambda f: damage.rename(f, f"{Q}.weight_scale", f"{Q}.weight_scales"), Q, True),
    "a renamed kept tensor": (lambda f: damage.rename(f, NORM, NORM + "2"), NORM, True),
    "a dropped part": (drop_from_everywhere(f"{Q}.weight_global_scale"), Q, True),
    "a dropped kept tensor": (drop_from_everywhere(NORM), NORM, True),
    "a dropped weight": (lambda f: [drop_from_everywhere(f"{DOWN}.{p}")(f) for p in nvfp4_parts()], DOWN, True),
    "scales typed as bytes": (lambda f: damage.retype(f, f"{Q}.weight_scale", "U8"), "weight_scale", True),
    "scales typed as E8M0": (lambda f: damage.retype(f, f"{Q}.weight_scale", "F8_E8M0"), "weight_scale", True),
    "codes typed as E4M3": (lambda f: damage.retype(f, f"{Q}.weight_packed", "F8_E4M3"), "weight_packed", True),
    "a truncated file": (lambda f: truncate(damage.shards(f)[0]), "truncated", True),
    "an empty file": (lambda f: damage.shards(f)[0].write_bytes(b""), "bytes", True),
    "a missing file": (lambda f: damage.shards(f)[1].unlink(), "lacks the shard", True),
    "another format string": (config(lambda c: c.update(format="mxfp4-pack-quantized")), "format", True),
    "another format string in the group": (group(lambda g: g.update(format="float-quantized")), "format", True),
    "another group size": (group(lambda g: g["weights"].update(group_size=32)), "group", True),
    "another strategy": (group(lambda g: g["weights"].update(strategy="channel")), "group", True),
    "another activation": (group(lambda g: g["input_activations"].update(dynamic=False)), "input_", True),
    "no activation": (group(lambda g: g.pop("input_activations")), "input_", True),
    "no scale dtype": (group(lambda g: g["weights"].pop("scale_dtype")), "scale_dtype", True),
    "an unknown key": (group(lambda g: g["weights"].update(group_sizes=16)), "group_sizes", True),
    "no status": (config(lambda c: c.pop("quantization_status")), "quantization_status", True),
    "nothing ignored": (config(lambda c: c.update(ignore=[])), "lm_head", True),
    "a quantized layer ignored": (config(lambda c: c["ignore"].append(Q)), Q, True),
    "other targets": (group(lambda g: g.update(targets=["re:.*mlp.*"])), Q, True),
    "no description": (
        lambda f: damage.edit_json(f / "config.json", lambda c: c.pop("quantization_config")),
        "quantization",
        True,
    ),
    "another model": (
        lambda f: damage.edit_json(f / "config.json", lambda c: c.update(hidden_act="gelu")),
        "gelu",
        True,
    ),
    "a config that is no JSON": (lambda f: (f / "config.json").write_text("{"), "config.json", True),
    "a config that is a list": (lambda f: (f / "config.json").write_text("[]"), "config.json", True),
    "no config": (lambda f: (f / "config.json").unlink(), "config.json", True),
    "groups that are a list": (config(lambda c: c.update(config_groups=[1])), "config_groups", True),
    "targets that are a number": (group(lambda g: g.update(targets=7)), "targets", True),
    "another tokenizer": (lambda f: (f / "tokenizer_config.json").write_text('{"a": 2}'), "tokenizer_config", False),
    "a missing file beside the weights": (lambda f: (f / "chat_template.jinja").unlink(), "chat_template", False),
    "an index with another size": (
        lambda f: damage.edit_json(f / "model.safetensors.index.json", lambda i: i["metadata"].update(total_size=1)),
        "total_size",
        False,
    ),
    "no index": (lambda f: (f / "model.safetensors.index.json").unlink(), "loaders find them by it", True),
    "no record": (lambda f: (f / "ptqpipe.json").unlink(), "ptqpipe.json is missing", False),
    "a record that is no JSON": (lambda f: (f / "ptqpipe.json").write_text("nonsense"), "ptqpipe.json", False),
    "a record of nothing": (lambda f: (f / "ptqpipe.json").write_text("{}"), "ptqpipe.json", False),
    "a better error than the true one": (
        record(lambda r: r["weights"][f"{Q}.weight"].update(relative_mse=1e-4)),
        "claims relative_mse",
        False,
    ),
    "a better comparison than the true one": (
        record(lambda r: r["weights"][f"{Q}.weight"].update(versus_absmax=0.5)),
        "claims versus_absmax",
        False,
    ),
    "another recorded global scale": (record(lambda r: r["weights"][f"{Q}.weight"].update(global_scale=1.0)), Q, False),
    "another recorded search": (record(lambda r: r["weights"][f"{Q}.weight"].update(search="absmax")), Q, False),
    "another recorded shape": (record(lambda r: r["weights"][f"{Q}.weight"].update(shape=[1, 2])), Q, False),
    "another recorded hash": (record(lambda r: r["kept"][NORM].update(sha256="0" * 64)), NORM, False),
    "another recorded reason": (record(lambda r: r["kept"][NORM].update(reason="because")), NORM, False),
    "a weight that the record leaves out": (record(lambda r: r["weights"].pop(f"{Q}.weight")), Q, False),
    "a weight that only the record has": (
        record(lambda r: r["weights"].update(x=r["weights"][f"{Q}.weight"])),
        "x",
        False,
    ),
    "another recorded container": (record(lambda r: r.update(container="modelopt")), "container", False),
    "another recorded recipe": (record(lambda r: r["recipe"].update(input_amax=1.0)), "run_id", False),
    "another recorded rule": (record(lambda r: r["recipe"]["rules"][0].update(match="*mlp*")), "recipe", False),
    "another recorded source": (record(lambda r: r["source"].update(fingerprint="0")), "run_id", False),
    "another recorded version": (record(lambda r: r.update(ptqpipe="9.9.9")), "run_id", False),
    "no recorded recipe": (record(lambda r: r.pop("recipe")), "neither a recipe", False),
    "a recipe that is a number": (record(lambda r: r.update(recipe=7)), "neither a recipe", False),
    "a recipe that is none": (record(lambda r: r.update(recipe={"rules": 3})), "recipe", False),
}


def nvfp4_parts() -> tuple[str, ...]:
    return "weight_packed", "weight_scale", "weight_global_scale", "input_global_scale"


def swap_weights(folder: Path, a: str, b: str) -> None:
    for part in nvfp4_parts():
        damage.swap(folder, f"{a}.{part}", f"{b}.{part}")


def swap_rows(folder: Path, name: str, width: int) -> None:
    data = damage.tensor_bytes(folder, name)
    data[:width], data[width : 2 * width] = data[width : 2 * width], data[:width]
    damage.put(folder, name, bytes(data))


def reshape(folder: Path, name: str, shape: list[int]) -> None:
    path, _, _ = damage.place_of(folder, name)

    def edit(header: damage.Header) -> damage.Header:
        header[name]["shape"] = shape
        return header

    damage.edit_header(path, edit)


@pytest.mark.slow
@pytest.mark.parametrize("what", list(DAMAGES))
def test_damage_is_a_fault_that_names_it(good: Path, model: Path, tmp_path: Path, what: str) -> None:
    act, words, _ = DAMAGES[what]
    folder = damage.copy(good, tmp_path / "damaged")
    act(folder)
    report = check(folder, model)
    assert not report.ok
    assert any(words in f"{fault.where}: {fault.message}" for fault in report.faults), found(report)
    assert all("\n" not in fault.message for fault in report.faults)
    assert "cannot be checked" not in found(report)  # every kind of damage is understood, not only survived


@pytest.mark.parametrize("what", [name for name, (_, _, anyone) in DAMAGES.items() if anyone])
def test_damage_of_another_tools_checkpoint_is_a_fault(good: Path, model: Path, tmp_path: Path, what: str) -> None:
    act, words, _ = DAMAGES[what]
    folder = damage.disown(damage.copy(good, tmp_path / "damaged"))
    act(folder)
    report = check(folder, model)
    assert any(words in f"{fault.where}: {fault.message}" for fault in report.faults), found(report)


@pytest.mark.parametrize("what", ["sign bit of a code", "a scale one code up", "low bit of a code", "a kept bit"])
def test_a_change_of_any_recorded_byte_is_seen_without_a_source(good: Path, tmp_path: Path, what: str) -> None:
    folder = damage.copy(good, tmp_path / "damaged")
    DAMAGES[what][0](folder)
    assert "its sha256 differs" in found(check(folder, None))


@pytest.mark.slow
def test_a_change_that_the_record_was_made_to_describe_is_seen_against_the_source(
    good: Path, model: Path, tmp_path: Path
) -> None:
    folder = damage.copy(good, tmp_path / "damaged")
    damage.change_byte(folder, f"{Q}.weight_scale", 3, lambda b: b - 1)
    damage.rehash(folder, f"{Q}.weight", "scales", f"{Q}.weight_scale")
    assert check(folder, None).ok
    report = check(folder, model, all_blocks=True)
    assert "not the proven optimum" in found(report)
    assert "re-quantizing with the recorded recipe gives" in found(report)
