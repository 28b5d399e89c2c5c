"""Claims about the record: each of its fields is changed, and verify says so; what it cannot know is listed here.

``docs/using.md`` says the same in words.
"""

import copy
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import ptqpipe
from ptqpipe.check.verify.command import verify
from ptqpipe.checkpoint import read_json_object, vouches_for_itself
from ptqpipe.conversion.dequantize import dequantize
from ptqpipe.conversion.record import self_faults
from ptqpipe.conversion.relayout.command import relayout
from ptqpipe.conversion.transform.command import transform
from ptqpipe.errors import CheckpointError, PtqError
from tests import tiny
from tests.conversion import damage
from tests.conversion.test_convert_stats import inputs_of_llama, run, write_statistics

OUTPUTS = ("rtn", "gptq", "relayout", "foreign", "dequantized", "transformed")

# Fields (a regular expression of output and path) that verify needs more for than the checkpoint: the first that fits.
# Every other field is seen to be wrong without a source.
NEEDS = {
    # Numbers beside another choice of scales, which needs the weights to be quantized again.
    r"rtn weights\..*(versus_plain_global|versus_absmax)": "source",
    # The numbers of GPTQ need the inputs' moments as well.
    r"(gptq|relayout) weights\..*(versus_\w+|weighted_error|metric|output_error|damping|held_out)": "stats",
    r"gptq statistics\.(model|data).*": "stats",  # a change of layout binds them to its run_id
    r"(rtn|gptq|relayout) consumed": "source",
    # The name of the format that was decoded: the float weight has another hash, but its own is recorded.
    r"dequantized weights\..*format": "source",
    # What was left out can only be looked for in the packed checkpoint, which is not the model that GPTQ began with.
    r"(dequantized|foreign) dropped.*": "source",
    r"relayout dropped.*": "nothing",
    # What no bytes say: the version of torch, which changes none; a folder's name, which may be changed; the factors of
    # a transform, which are not stored, beside the tensors that they are in.
    r"\w+ torch": "nothing",
    r"\w+ weights\..*rechecked": "nothing",  # what convert looked at while it ran
    r"(rtn|gptq) source\.name": "nothing",
    r"\w+ files\.README\.md": "nothing",  # the model card is for people to edit: a note
    r"transformed foldings\..*\.(edge|kind|channels|least|largest|changed|alpha)": "nothing",
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the model, its statistics and one output of every kind."""
    folder = tmp_path_factory.mktemp("records")
    model = tiny.save(folder / "model", tiny.llama(layers=1))
    inputs = {name: x for name, x in inputs_of_llama(tiny.llama()).items() if ".0." in name}
    stats = write_statistics(folder / "stats", model, inputs)
    ptqpipe.convert(model, format="nvfp4_w4a4", out=folder / "rtn", workers=1)
    run(model, stats, folder / "gptq", format="nvfp4_w4a4", algorithm="gptq")
    relayout(folder / "gptq", folder / "relayout", container="modelopt")
    other = ptqpipe.convert(model, format="nvfp4", out=folder / "other", workers=1).out
    (other / "ptqpipe.json").unlink()
    relayout(other, folder / "foreign", container="modelopt")
    dequantize(folder / "rtn", folder / "dequantized")
    transform(model, folder / "transformed", stats=stats)
    return folder


def sources(made: Path, output: str) -> dict[str, dict[str, Path]]:
    """What verify can be given beside the checkpoint, the least first."""
    source = made / {"dequantized": "rtn", "foreign": "other"}.get(output, "model")
    known: dict[str, dict[str, Path]] = {"alone": {}, "source": {"source": source}}
    if output in ("gptq", "relayout"):
        known["stats"] = {"source": source, "statistics": made / "stats"}
    return known


def leaves(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Every field of a record: of what is listed, the first entry; of files two, the model card and another."""
    if isinstance(value, dict) and value:
        entries = list(value.items())
        most = {"weights": 1, "kept": 1, "files": 2}.get(str(path[-1])) if path else None
        for key, inner in entries[:most]:
            yield from leaves(inner, (*path, key))
    elif isinstance(value, list) and value:
        yield from leaves(value[0], (*path, 0))
    else:
        yield path, value


def changed(value: Any) -> Any:
    """Another value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value * 2 or 1
    if isinstance(value, str):
        return ("1" if value.startswith("0") else "0") + value[1:]
    return {"x": 1} if isinstance(value, dict) else ["x"] if isinstance(value, list) else 1


def put(record: dict[str, Any], path: tuple[str | int, ...], value: Any) -> dict[str, Any]:
    found: Any = copy.deepcopy(record)
    inner = found
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return found  # type: ignore[no-any-return]  # JSON


def needed(field: str) -> str:
    return next((what for pattern, what in NEEDS.items() if re.fullmatch(pattern, field)), "alone")


@pytest.mark.slow
@pytest.mark.parametrize("output", OUTPUTS)
def test_every_field_of_a_record_that_is_changed_is_a_fault(made: Path, output: str) -> None:
    ckpt = made / output
    known = sources(made, output)
    for beside, given in known.items():
        assert verify(ckpt, workers=1, **given).ok, f"{output} {beside}"
    text = (ckpt / "ptqpipe.json").read_text()
    record = json.loads(text)
    unlike = []
    for path, value in leaves({key: value for key, value in record.items() if key != "sha256"}):
        field = f"{output} {'.'.join(map(str, path))}"
        damage.write_record(ckpt, put(record, path, changed(value)))
        first = next((beside for beside, given in known.items() if not verify(ckpt, workers=1, **given).ok), "nothing")
        if first != needed(field):
            unlike.append(f"{field}: seen with {first}, expected {needed(field)}")
    (ckpt / "ptqpipe.json").write_text(text)
    assert unlike == []


@pytest.mark.parametrize("output", OUTPUTS)
def test_no_byte_of_a_record_changes_unseen(made: Path, tmp_path: Path, output: str) -> None:
    """By its own sha256; what else is stored need not be looked at again for each of them."""
    written, path = made / output / "ptqpipe.json", tmp_path / "ptqpipe.json"
    raw = written.read_bytes()
    assert vouches_for_itself(raw)
    unseen = [
        at for at in range(len(raw)) if vouches_for_itself(raw[:at] + bytes([raw[at] ^ 1 << at % 8]) + raw[at + 1 :])
    ]
    unseen += [at for at in range(len(raw)) if vouches_for_itself(raw[:at] + raw[at + 1 :])]
    assert unseen == []
    for at in range(
        len(raw) - 90, len(raw)
    ):  # where the sha256 itself stands: what hides it is another key, or no JSON
        for bit in range(8):
            path.write_bytes(raw[:at] + bytes([raw[at] ^ 1 << bit]) + raw[at + 1 :])
            with suppress(PtqError):
                assert list(self_faults(tmp_path, read_json_object(path))), (at, bit)
    for at in range(0, len(raw), max(1, len(raw) // 25)):
        written.write_bytes(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :])
        assert not verify(made / output, workers=1).ok, at
    written.write_bytes(raw)


def test_a_record_of_an_older_version_has_no_sha256_of_itself(made: Path, tmp_path: Path) -> None:
    folder = damage.copy(made / "rtn", tmp_path / "old")
    record = json.loads((folder / "ptqpipe.json").read_text())
    del record["sha256"]
    damage.write_record(folder, record)
    report = verify(folder, workers=1)
    assert report.ok
    assert "has no sha256 of itself" in "".join(note.message for note in report.notes)
    relayout(folder, tmp_path / "new", container="modelopt")
    assert verify(tmp_path / "new", workers=1).ok


@pytest.mark.parametrize("output", OUTPUTS)
def test_a_key_that_no_record_has_and_one_that_is_missing_are_faults(made: Path, tmp_path: Path, output: str) -> None:
    folder = damage.copy(made / output, tmp_path / "damaged")
    text = (folder / "ptqpipe.json").read_text()
    keys = {"statistics", "certificate", "rounding", "converted_as", "transformed", "sha256"}
    for key in json.loads(text).keys() - keys:
        record = json.loads(text)
        del record[key]
        damage.write_record(folder, record)
        assert not verify(folder, workers=1).ok, key
    for place in ((), ("weights", 0), ("kept", 0)):
        record = json.loads(text)
        inner = record if not place else next(iter(record[place[0]].values()))
        inner["dampkng"] = 0.1
        damage.write_record(folder, record)
        faults = verify(folder, workers=1).faults
        assert any("has the key 'dampkng', which no record has" in fault.message for fault in faults), place
    (folder / "ptqpipe.json").write_text(text)


def test_a_changed_record_is_not_taken_over(made: Path, tmp_path: Path) -> None:
    folder = damage.copy(made / "gptq", tmp_path / "damaged")
    path = folder / "ptqpipe.json"
    path.write_text(path.read_text().replace('"versus_rtn": ', '"versus_rtn": 1e-7, "versus_absmax": ', 1))
    with pytest.raises(CheckpointError, match="its own sha256 is that of other bytes"):
        relayout(folder, tmp_path / "out", container="modelopt")
    assert not (tmp_path / "out").exists()


def test_claims_that_contradict_each_other_are_faults(made: Path) -> None:
    """Nothing of them needs a source, whatever else is changed along with them."""
    ckpt = made / "gptq"
    text = (ckpt / "ptqpipe.json").read_text()
    for change in (
        {"proven": True},
        {"proven": True, "algorithm": "rtn", "weighting": "none"},
        {"reverted": True},
        {"versus_rtn": 1.5},
        {"squared_error": 1e-6, "energy": 1.0},
        {"scheme": "nvfp4"},
        {"format": "mxfp4"},
        {"global_scale": None},
    ):
        record = json.loads(text)
        next(iter(record["weights"].values())).update(change)
        damage.write_record(ckpt, record)
        assert not verify(ckpt, workers=1).ok, change
    (ckpt / "ptqpipe.json").write_text(text)


@pytest.mark.parametrize("output", OUTPUTS)
def test_a_lost_field_of_a_weight_is_a_fault(made: Path, output: str) -> None:
    ckpt = made / output
    text = (ckpt / "ptqpipe.json").read_text()
    optional = {"versus_plain_global", "versus_absmax", "versus_rtn", "weighted_error", "output_error", "damping"}
    optional |= {"held_out", "metric", "reverted", "rechecked"}
    name, entry = next(iter(json.loads(text)["weights"].items()))
    for key in entry.keys() - optional:
        record = json.loads(text)
        del record["weights"][name][key]
        damage.write_record(ckpt, record)
        given = sources(made, output)["source" if needed(f"{output} weights.x.{key}") == "source" else "alone"]
        assert not verify(ckpt, workers=1, **given).ok, key
    (ckpt / "ptqpipe.json").write_text(text)


def test_nan_in_a_decoded_tensor_that_is_kept_is_recorded(made: Path, tmp_path: Path) -> None:
    source = ptqpipe.convert(made / "model", format="fp8_block", out=tmp_path / "source", workers=1).out
    damage.put(source, "model.layers.0.mlp.down_proj.weight_scale_inv", bytes.fromhex("0000c07f") * 2)
    out = ptqpipe.convert(source, format="nvfp4", ignore=["*down_proj"], out=tmp_path / "out", workers=1).out
    kept = json.loads((out / "ptqpipe.json").read_text())["kept"]["model.layers.0.mlp.down_proj.weight"]
    assert kept["not_finite"] == f"{128 * 256} NaN and 0 inf"
    for given in (None, source):
        report = verify(out, source=given, workers=1)
        assert "down_proj" in "".join(note.where for note in report.notes if note.check == "values")
        assert [fault.message for fault in report.faults if fault.check == "record"] == []


def test_a_reason_that_only_the_source_shows_is_believed_without_it(tmp_path: Path) -> None:
    """Of two stacks the first is split into weights; that the second fits no block follows from both together."""
    tensors = tiny.fused_moe(hidden=64, inner=16)
    config = {**tiny.LLAMA_CONFIG, "architectures": [], "model_type": "qwen3_moe", "num_hidden_layers": 1}
    model = tiny.save(tmp_path / "model", tensors, config=config)
    out = ptqpipe.convert(model, format="mxfp8", out=tmp_path / "out", workers=1).out
    kept = json.loads((out / "ptqpipe.json").read_text())["kept"]
    assert "does not divide" in kept["model.layers.0.mlp.experts.down_proj"]["reason"]
    for source in (None, model):
        assert verify(out, source=source, workers=1).faults == ()


@pytest.mark.parametrize("output", ["dequantized", "transformed"])
def test_float_outputs_are_verified_by_their_hashes(made: Path, tmp_path: Path, output: str) -> None:
    folder = damage.copy(made / output, tmp_path / "damaged")
    name = "model.layers.0.self_attn.q_proj.weight"
    damage.change_byte(folder, name, 3, lambda b: b ^ 1)
    assert name in [fault.where for fault in verify(folder, workers=1).faults]
    damage.edit_json(
        folder / "ptqpipe.json",
        lambda r: r["weights"][name].update(sha256=hashlib.sha256(damage.tensor_bytes(folder, name)).hexdigest()),
    )
    assert verify(folder, workers=1).ok
    assert output == "transformed" or not verify(folder, source=made / "rtn", workers=1).ok
