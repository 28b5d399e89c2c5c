"""Claims under thousands of seeded mutations of whole checkpoints: one line and nothing, or an output that is sound.

A mutated source is prepared and, where its headers allow, converted and verified. What is kept is compared with the
safetensors library, without ptqpipe's readers. Any exception that is no PtqError of one line fails, and so does a
folder with the output's name after an error.
"""

import json
import math
import os
import random
import shutil
import signal
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import deserialize

import ptqpipe
from ptqpipe.check.diff import diff, render as render_diff
from ptqpipe.check.inspect import inspect, render as render_inspected
from ptqpipe.check.verify.command import verify
from ptqpipe.check.verify.report import render
from ptqpipe.checkpoint.partial import Paths
from ptqpipe.conversion import convert_summary as tables
from ptqpipe.conversion.command import convert
from ptqpipe.conversion.conversion import Conversion
from ptqpipe.conversion.dequantize import dequantize
from ptqpipe.conversion.prepare import prepare
from ptqpipe.conversion.relayout.command import relayout
from ptqpipe.errors import PtqError
from ptqpipe.recipe.options import RecipeOptions
from ptqpipe.run.machine import Machine
from ptqpipe.runtime.expected import unlike_model
from tests import tiny
from tests.checkpoint.test_fuzz import mutate_bytes, mutate_json
from tests.conversion import damage

MUTATIONS = 300  # of each source, for each of the seeds
CONVERSIONS = 15  # at most so many of them end to end; the others stop at the plan
OUTPUT_MUTATIONS = 60
SECONDS_EACH = 600  # what takes longer never ends

Mutation = Callable[[Path, random.Random], None]


# --- sources ---------------------------------------------------------------------------------------------------------


def dense(folder: Path) -> Path:
    return tiny.save(folder, tiny.llama(layers=1, hidden=32, inner=64), shards=2)


def stacks(folder: Path) -> Path:
    config = {**tiny.LLAMA_CONFIG, "model_type": "qwen3_moe", "text_config": {"hidden_size": 32}}
    return tiny.save(folder, tiny.fused_moe(hidden=32, inner=16, transposed=True), config=config, shards=2)


def one_projection(folder: Path) -> Path:
    """A stack whose orientation only hidden_size tells."""
    tensors = tiny.fused_moe(hidden=32, inner=16)
    del tensors["model.layers.0.mlp.experts.gate_up_proj"]
    return tiny.save(folder, tensors, config={**tiny.LLAMA_CONFIG, "hidden_size": 32}, shards=2)


def fp8_blocks(folder: Path) -> Path:
    """DeepSeek's layout with small blocks, written by hand."""
    tensors = tiny.llama(layers=1, hidden=32, inner=64)
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        rows, columns = tensors[name].shape
        tensors[name] = tensors[name].float().mul(100).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = torch.full((rows // 16, columns // 16), 0.01)
    quantization = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 16]}
    return tiny.save(folder, tensors, config={**tiny.LLAMA_CONFIG, "quantization_config": quantization}, shards=2)


def converted_to(scheme: str, container: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        source = dense(folder.parent / "float")
        ptqpipe.convert(source, format=scheme, container=container, out=folder, shard_size=10_000, workers=1)
        (folder / "ptqpipe.json").unlink()
        return folder

    return make


SOURCES: dict[str, Callable[[Path], Path]] = {
    "dense": dense,
    "stacks": stacks,
    "one_projection": one_projection,
    "fp8_blocks": fp8_blocks,
    "compressed_tensors": converted_to("fp8_dynamic", "compressed_tensors"),
    "modelopt": converted_to("fp8_dynamic", "modelopt"),
    "mxfp8_hf": converted_to("mxfp8", "mxfp8_hf"),
    "ptqpipe": converted_to("mxfp8", "ptqpipe"),
}

# --- mutations -------------------------------------------------------------------------------------------------------

FIELDS = ["hidden_size", "model_type", "text_config", "quantization_config", "compression_config", "architectures"]
FIELDS += ["tie_word_embeddings", "num_hidden_layers", "dtype", "torch_dtype", "vision_config", "num_local_experts"]
VALUES: list[Any] = [None, True, -1, 0, 0.5, 32, 2**70, "", "32", "gpt_oss", "\ud800", "a\nb", [], [32], {}, [[]]]
VALUES += [{"hidden_size": 32}, {"hidden_size": [1]}, {"quantization_config": 3}, {"a": {"b": [None]}}, float("inf")]
VALUES += [{"quant_method": method} for method in ("fp8", "compressed-tensors", "modelopt", "mxfp4", "gptq", 8, None)]
NAMES = ["", ".", "weight", ".weight", "a.weight", "lm_head.weight", "x" * 3000 + ".weight", "a b.weight", "é.weight"]
NAMES += ["a\nb.weight", "../../x.weight", "/x.weight", "a.weight.weight", "(.*.weight", "experts.weight", "a..weight"]
NAMES += ["model.layers.0.self_attn.q_proj.weight_packed", "model.layers.0.self_attn.q_proj.weight_scale"]
NAMES += ["model.layers.0.mlp.experts.0.up_proj.weight", "model.layers.0.mlp.experts.gate_up_proj", "experts.w1"]
NAMES += ["model.layers.0.mlp.experts.gate_up_proj_bias", "model.layers.00.self_attn.q_proj.weight", "a.bias", "1.2.3"]


def change_config(folder: Path, rng: random.Random) -> None:
    path = folder / rng.choice([p.name for p in folder.glob("*config.json") if p.name != "tokenizer_config.json"])
    text = path.read_bytes()
    kind = rng.randrange(8)
    if kind == 0:
        path.write_bytes(mutate_bytes(text, rng))
    elif kind == 1:
        path.unlink()
    elif kind == 2:
        path.write_text('{"text_config": ' + rng.choice(["[", '{"a": ']) * rng.choice([50, 5000, 10**5]))
    elif kind in (3, 4):
        path.write_bytes(mutate_json(text, rng))
    else:
        damage.edit_json(path, lambda c: c.update({rng.choice(FIELDS): rng.choice(VALUES)}))


def change_quantization(folder: Path, rng: random.Random) -> None:
    """One or a few values inside the description of a quantization."""
    config = json.loads((folder / "config.json").read_text())
    if isinstance(config.get("quantization_config"), dict):
        text = json.dumps(config["quantization_config"]).encode()
        config["quantization_config"] = json.loads(mutate_json(text, rng).decode("utf-8", "surrogatepass"))
    else:
        config["quantization_config"] = rng.choice(VALUES)
    (folder / "config.json").write_text(json.dumps(config))


def change_header_bytes(folder: Path, rng: random.Random) -> None:
    path = rng.choice(damage.shards(folder))
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    text = rng.choice([mutate_bytes, mutate_json])(raw[8 : 8 + length], rng)
    claimed = len(text) if rng.random() < 0.9 else rng.choice([0, length, 2**63, 10**8, len(raw)])
    path.write_bytes(struct.pack("<Q", claimed) + text + raw[8 + length :])


def change_tensor(folder: Path, rng: random.Random) -> None:
    """Another name, dtype or shape for a tensor or two, so that header and index still agree."""
    for _ in range(rng.choice([1, 1, 2])):
        path = rng.choice(damage.shards(folder))
        names = [name for name in damage.read_header(path)[0] if name != "__metadata__"]
        if not names:
            return
        name = rng.choice(names)
        kind = rng.randrange(4)
        if kind == 0:
            damage.edit_header(path, lambda header, name=name: _retyped(header, name, rng))
        elif kind == 1:
            damage.edit_header(path, lambda header, name=name: _reshaped(header, name, rng))
        elif kind == 2:
            _drop(folder, path, name)
        else:
            damage.rename(folder, name, rng.choice([*NAMES, f"{name}_scale", f"{name}_packed", f"{name}_scale_inv"]))


def _retyped(header: dict[str, Any], name: str, rng: random.Random) -> dict[str, Any]:
    """Another dtype of any width; the last dimension follows it."""
    widths = {"U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "F16": 2, "BF16": 2, "I16": 2, "F32": 4}
    widths |= {"I32": 4, "F64": 8, "I64": 8}
    dtype = rng.choice(list(widths))
    begin, end = header[name]["data_offsets"]
    shape = header[name]["shape"]
    rows = math.prod(shape[:-1])
    if shape and rows and (end - begin) % (rows * widths[dtype]) == 0:
        header[name].update(dtype=dtype, shape=[*shape[:-1], (end - begin) // rows // widths[dtype]])
    return header


def _reshaped(header: dict[str, Any], name: str, rng: random.Random) -> dict[str, Any]:
    shape = header[name]["shape"]
    total = 1
    for d in shape:
        total *= d
    choices = [
        shape[::-1],
        [total],
        [1, *shape],
        [*shape, 1],
        [1, total],
        [total, 1],
        [total // 2, 2],
        [2, 1, total // 2],
    ]
    choices += [[4, 4, total // 16], [1] * 70 + [total], [0, 5], []]
    header[name]["shape"] = rng.choice(choices)
    return header


def _drop(folder: Path, path: Path, name: str) -> None:
    damage.drop(folder, name)
    index = folder / "model.safetensors.index.json"
    if index.exists():
        damage.edit_json(index, lambda content: content["weight_map"].pop(name))


def change_index(folder: Path, rng: random.Random) -> None:
    path = folder / "model.safetensors.index.json"
    if not path.exists():
        return
    kind = rng.randrange(4)
    if kind == 0:
        path.unlink()
    else:
        path.write_bytes((mutate_bytes if kind == 1 else mutate_json)(path.read_bytes(), rng))


def change_files(folder: Path, rng: random.Random) -> None:
    """Shards truncated, extended, missing, doubled, or not files at all."""
    path = rng.choice(damage.shards(folder))
    size = path.stat().st_size
    kind = rng.randrange(7)
    if kind == 0:
        os.truncate(path, rng.randrange(size))
    elif kind == 1:
        os.truncate(path, size + rng.choice([1, 8, 4096]))
    elif kind == 2:
        path.unlink()
    elif kind == 3:
        shutil.copyfile(
            path, folder / rng.choice(["copy.safetensors", "model.safetensors", "consolidated.safetensors"])
        )
    elif kind == 4:
        path.unlink()
        path.mkdir()
    elif kind == 5:
        path.unlink()
        path.symlink_to(rng.choice(["nowhere", path.name, ".", "/dev/null"]))
    else:
        path.write_bytes(rng.choice([b"", b"version https://git-lfs.github.com/spec/v1\n", b"\x80\x02" * 100]))


def change_numbers(folder: Path, rng: random.Random) -> None:
    """NaN, infinities, the smallest and the largest numbers, zeros or noise among the weights and scales."""
    path = rng.choice(damage.shards(folder))
    names = [name for name in damage.read_header(path)[0] if name != "__metadata__"]
    name = rng.choice(names)
    data = damage.tensor_bytes(folder, name)
    begin = rng.randrange(len(data)) // 4 * 4
    length = rng.choice([4, 4, 64, len(data)])
    pattern = rng.choice([b"\xc0\x7f", b"\x80\x7f", b"\x80\xff", b"\x7f\x7f", b"\x01\x00", b"\0\0", b"\x7f\x7e", None])
    new = rng.randbytes(length) if pattern is None else pattern * length
    data[begin : begin + length] = new[: len(data[begin : begin + length])]
    damage.put(folder, name, bytes(data))


MUTATORS: list[Mutation] = [
    change_config,
    change_config,
    change_quantization,
    change_header_bytes,
    change_tensor,
    change_tensor,
    change_index,
    change_files,
    change_numbers,
]

# --- what is claimed -------------------------------------------------------------------------------------------------


def tensors_of(folder: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """Every tensor of the weight files of a folder, as the safetensors library sees them."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        for name, info in deserialize(path.read_bytes()):
            found[name] = (info["dtype"], list(info["shape"]), bytes(info["data"]))
    return found


def check_output(source: Path, out: Path, prepared: Conversion) -> None:
    """verify finds no fault but that of a source that its config.json does not describe, which convert warns of; every
    source tensor is kept byte for byte or is in the record as quantized."""
    consumed = prepared.source.consumed
    report = verify(out, source=source, workers=1)
    allowed = "config config.json" if unlike_model(prepared.source) else None
    faults = [f"{f.check} {f.where}: {f.message}" for f in report.faults if f"{f.check} {f.where}" != allowed]
    assert faults == []
    record = json.loads((out / "ptqpipe.json").read_text())
    before, after = tensors_of(source), tensors_of(out)
    assert before.keys() - consumed <= before.keys()
    for name, tensor in before.items():
        if name in record["kept"] and name not in consumed:
            assert after[name] == tensor
    quantized = {name.partition("[")[0] for name in record["weights"]}
    for name in before.keys() - consumed - record["kept"].keys():
        base = name.removesuffix(".weight")
        parent, _, leaf = base.rpartition(".")
        parts = ["gate_proj", "up_proj"] if leaf == "gate_up_proj" else [leaf]
        assert name in quantized or all(f"{parent}.0.{part}.weight" in quantized for part in parts), name


def outcome(source: Path, out: Path, options: RecipeOptions, *, all_the_way: bool) -> str:
    """Runs one conversion and checks the claim; what became of it."""
    try:
        prepared = prepare(source, options=options, out=out)
    except PtqError as error:
        assert_one_line(error)
        assert not out.exists()
        return "refused"
    with prepared:
        assert prepared.outputs.container_name in tables.header_text(prepared, Machine())
        if not all_the_way:
            return "planned"
        try:
            convert(prepared, machine=Machine(workers=1))
        except PtqError as error:
            assert_one_line(error)
            assert not out.exists()
            return "stopped"
        check_output(source, out, prepared)
    return "converted"


def assert_one_line(error: PtqError) -> None:
    text = str(error)
    assert text
    assert text.isprintable(), repr(text)
    assert len(text) < 2500, len(text)


class Folder:
    """A source that is mutated and put back, in place."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._sound = tiny.bytes_of(path)

    @contextmanager
    def mutated(self, mutation: Mutation, rng: random.Random) -> Iterator[None]:
        mutation(self.path, rng)
        try:
            yield
        finally:
            for path in list(self.path.iterdir()):
                name = path.name
                if path.is_symlink() or (path.is_file() and name not in self._sound):
                    path.unlink()
                elif path.is_dir():
                    shutil.rmtree(path)
            for name, content in self._sound.items():
                path = self.path / name
                if not path.exists() or path.read_bytes() != content:
                    path.write_bytes(content)


@contextmanager
def at_most(seconds: int) -> Iterator[None]:
    """Ends what would go on for ever."""

    def ring(*_: object) -> None:
        raise TimeoutError(f"still running after {seconds} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.slow
@pytest.mark.parametrize("kind", SOURCES)
def test_a_mutated_source_is_one_line_and_nothing_or_a_sound_output(kind: str, tmp_path: Path) -> None:
    rng = random.Random(kind)
    source = SOURCES[kind](tmp_path / "model")
    schemes = ["nvfp4", "nvfp4_w4a4", "mxfp4", "mxfp8", "fp8_dynamic", "fp8_tensor"]
    folder, out = Folder(source), tmp_path / "out"
    assert outcome(source, out, RecipeOptions(format="nvfp4"), all_the_way=True) == "converted"
    shutil.rmtree(out)
    seen: Counter[str] = Counter()
    for number in range(MUTATIONS):
        mutation = rng.choice(MUTATORS)
        options = RecipeOptions(format=rng.choice(schemes), ignore=rng.choice([(), (), ("*mlp*",)]))
        state = rng.getstate()
        with folder.mutated(mutation, rng):
            try:
                with at_most(SECONDS_EACH):
                    done = outcome(source, out, options, all_the_way=seen["converted"] + seen["stopped"] < CONVERSIONS)
            except BaseException:
                print(f"{kind} mutation {number}: {mutation.__name__}, {options}, state {hash(state)}")
                raise
        seen[done] += 1
        shutil.rmtree(out, ignore_errors=True)
        shutil.rmtree(Paths.of(out).partial, ignore_errors=True)
    assert seen["refused"] > MUTATIONS // 10, seen
    assert seen["converted"] > 0, seen


OUTPUTS = [("nvfp4", "compressed_tensors"), ("nvfp4_w4a4", "modelopt"), ("mxfp4", "ptqpipe"), ("fp8_tensor", None)]


def meaning(folder: Path) -> tuple[Any, ...]:
    """What readers take from a folder: the tensors and the config."""
    configs = [json.loads(path.read_bytes()) for path in sorted(folder.glob("*config.json"))]
    return tensors_of(folder), configs


def change_record(folder: Path, rng: random.Random) -> None:
    path = folder / "ptqpipe.json"
    path.write_bytes((mutate_json if rng.random() < 0.8 else mutate_bytes)(path.read_bytes(), rng))


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "container"), OUTPUTS)
def test_a_mutated_output_has_a_fault_unless_it_means_the_same(
    scheme: str, container: str | None, tmp_path: Path
) -> None:
    rng = random.Random(scheme)
    source, out = dense(tmp_path / "model"), tmp_path / "out"
    ptqpipe.convert(source, format=scheme, container=container, out=out, shard_size=10_000, workers=1)
    folder, whole = Folder(out), meaning(out)
    assert verify(out, source=source, workers=1).ok
    faults = 0
    for number in range(OUTPUT_MUTATIONS):
        mutation = rng.choice([*MUTATORS, change_record])
        with folder.mutated(mutation, rng):
            report = verify(out, source=source, workers=1)
            faults += not report.ok
            assert all(line.isprintable() for line in render(report).splitlines())
            if report.ok:
                assert meaning(out) == whole, f"mutation {number}: {mutation.__name__}"
    assert faults > OUTPUT_MUTATIONS // 2


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "container"), OUTPUTS)
def test_other_commands_on_a_mutated_output_are_one_line_or_do_their_work(
    scheme: str, container: str | None, tmp_path: Path
) -> None:
    rng = random.Random(f"others {scheme}")
    source, out, good, made = (tmp_path / name for name in ("model", "out", "good", "made"))
    ptqpipe.convert(dense(source), format=scheme, container=container, out=out, shard_size=10_000, workers=1)
    shutil.copytree(out, good)
    other = "compressed_tensors" if container == "ptqpipe" else "ptqpipe"
    commands: list[Callable[[], object]] = [
        lambda: render_inspected(inspect(out)),
        lambda: render_diff(diff(good, out)),
        lambda: relayout(out, made, container=other, machine=Machine(workers=1)),
        lambda: dequantize(out, made, machine=Machine(workers=1)),
    ]
    refused, folder = 0, Folder(out)
    for _ in range(OUTPUT_MUTATIONS):
        with folder.mutated(rng.choice([*MUTATORS, change_record]), rng):
            for command in commands:
                try:
                    command()
                except PtqError as error:
                    assert_one_line(error)
                    assert not made.exists()
                    refused += 1
                shutil.rmtree(made, ignore_errors=True)
                shutil.rmtree(Paths.of(made).partial, ignore_errors=True)
    assert OUTPUT_MUTATIONS < refused < 4 * OUTPUT_MUTATIONS
