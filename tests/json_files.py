"""Every JSON file that a command reads, and the cheapest way to read it, for fuzz tests and tests/fuzz/attack_json.py.

A target has a sound file and a function that reads it as the commands do. What it may do with a mutant: succeed, or
raise a PtqError of one line; nothing else, within seconds, and without a file beside its own.
"""

import json
import random
import signal
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import ptqpipe
from ptqpipe.calibration.rows import read_rows
from ptqpipe.calibration.statistics import Statistics
from ptqpipe.check.evaluate.eval_file import read_result
from ptqpipe.check.evaluate.eval_summary import check_target
from ptqpipe.check.evaluate.tokenized_text import read_text as read_tokens
from ptqpipe.check.inspect import inspect, render as render_inspected, to_json as inspected_json
from ptqpipe.check.verify.config import check_config
from ptqpipe.check.verify.findings import Findings
from ptqpipe.checkpoint.files import read_json_object, scan_folder
from ptqpipe.checkpoint.layouts import detect_container, get_container, merged_config
from ptqpipe.checkpoint.partial import completed_run
from ptqpipe.checkpoint.reader import CheckpointReader
from ptqpipe.conversion.record import read_record
from ptqpipe.errors import PtqError
from ptqpipe.models.source import Source
from ptqpipe.numerics.formats import get_format
from ptqpipe.quantization.learned_codes import LearnedCodes
from ptqpipe.recipe.file import load_recipe
from ptqpipe.recipe.plan import make_plan
from ptqpipe.recipe.recipe import Recipe
from ptqpipe.runtime.loading import load_tokenizer, read_config, read_generation_config
from tests import tiny
from tests.checkpoint.test_fuzz import HOSTILE, VALUES, mutate_bytes, mutate_json

LONGEST = 600  # characters of a message
SECONDS = 20  # for one mutant
RECIPE = Path(__file__).resolve().parent.parent / "recipes/methods/mixed_nvfp4_fp8.yaml"


@dataclass(frozen=True, slots=True)
class Target:
    """One file and its reader; ``share`` of all mutants are its."""

    file: Path
    read: Callable[[], object]
    share: float
    sound: bytes = field(default=b"")


def targets(folder: Path) -> dict[str, Target]:
    """All of them, with sound files in ``folder``."""
    packed = {name: _packed(folder, name, scheme) for name, scheme in PACKED.items()}
    plain = tiny.save(folder / "sharded", tiny.llama(layers=1, hidden=32, inner=64), shards=2)
    made: dict[str, tuple[Path, Callable[[], object], float]] = {}
    for name, model in packed.items():
        made[f"config.json of {name}"] = (model / "config.json", _config_reader(model), 1.0)
    made["hf_quant_config.json"] = (packed["modelopt"] / "hf_quant_config.json", _hf_reader(packed["modelopt"]), 1.0)
    made["index"] = (plain / "model.safetensors.index.json", lambda: scan_folder(plain), 1.0)
    record = packed["compressed_tensors"]
    made["ptqpipe.json"] = (record / "ptqpipe.json", _record_reader(record), 1.0)
    made["inspect"] = (record / "ptqpipe.json", lambda: _inspected(record), 0.1)
    stats, codes = _statistics(folder / "stats"), _codes(folder / "codes")
    made["stats.json"] = (stats / "stats.json", lambda: _read_statistics(stats), 1.0)
    made["rounding.json"] = (codes / "rounding.json", lambda: _read_codes(codes), 1.0)
    evaluation = _evaluation(folder / "eval" / "m.eval.json")
    made["eval.json"] = (evaluation, lambda: read_result(evaluation, run_id="a" * 64), 1.0)
    made["eval.json as output"] = (evaluation, lambda: _as_output(evaluation), 0.3)
    recipe = _recipe(folder / "recipe" / "recipe.yaml")
    made["recipe"] = (recipe, lambda: load_recipe(recipe).rule_for("model.layers.0.mlp.up_proj"), 1.0)
    rows = _rows(folder / "rows" / "text.jsonl")
    made["text.jsonl to calibrate"] = (rows, lambda: list(read_rows(str(rows))), 0.5)
    texts = _texts(folder / "texts" / "text.jsonl")
    made["text.jsonl to evaluate"] = (texts, lambda: read_tokens(texts, lambda: _tokenizer), 0.5)
    run = tiny.save(folder / "run", tiny.llama(layers=1, hidden=32, inner=64))
    (run / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2], "temperature": 0.7, "top_k": 5}))
    made["config.json to run"] = (run / "config.json", lambda: read_config(run), 0.1)
    made["generation_config.json"] = (run / "generation_config.json", lambda: read_generation_config(run), 0.2)
    made["tokenizer_config.json"] = (
        _tokenizer_config(folder / "words"),
        lambda: load_tokenizer(folder / "words"),
        0.03,
    )
    return {name: Target(file, read, share, file.read_bytes()) for name, (file, read, share) in made.items()}


def attack(target: Target, mutants: int, *, seed: int, root: Path, found: Callable[[str, bytes], None]) -> Counter[str]:
    """Reads ``mutants`` mutants of a target's file; ``found`` gets what is wrong with one, and its bytes. How many were
    read and how many refused."""
    rng, outcomes, before = random.Random(f"{seed} {target.file.name}"), Counter[str](), sorted(root.rglob("*"))
    for _ in range(mutants):
        mutant = mutated(target.sound, rng, lines=target.file.suffix == ".jsonl")
        target.file.write_bytes(mutant)
        try:
            with _within_seconds():
                target.read()
            outcomes["read"] += 1
        except PtqError as error:
            outcomes["refused"] += 1
            text = str(error)
            if not text or not text.isprintable() or len(text) > LONGEST:
                found(f"its message is not one line of {LONGEST} characters: {text!r:.900}", mutant)
        except Exception as error:  # the point of it all
            outcomes["broken"] += 1
            found(f"{type(error).__name__} {error}"[:300] + _place(error), mutant)
    target.file.write_bytes(target.sound)
    if sorted(root.rglob("*")) != before:
        found("files appeared or went", b"")
    return outcomes


def mutated(sound: bytes, rng: random.Random, *, lines: bool = False) -> bytes:
    """One mutant: a few values, or a few bytes."""
    if rng.random() < 0.15:
        return mutate_bytes(sound, rng)
    if not lines:
        return mutate_json(sound, rng, VALUES + HOSTILE)
    rows = sound.splitlines()
    rows[at] = mutate_json(rows[at := rng.randrange(len(rows))], rng, VALUES + HOSTILE)
    return b"\n".join(rows)


def _place(error: Exception) -> str:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/ptqpipe/" in f.filename]
    return f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""


@contextmanager
def _within_seconds() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TimeoutError(f"no end in {SECONDS} seconds")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


# --- The sound files, and how each is read

PACKED = {
    "compressed_tensors": "nvfp4",
    "modelopt": "nvfp4",
    "deepseek_fp8": "fp8_block",
    "mxfp8_hf": "mxfp8",
    "ptqpipe": "mxfp8",
}


def _packed(folder: Path, container: str, scheme: str) -> Path:
    source = folder / "float"
    if not source.exists():
        tiny.save(source, tiny.llama(layers=1, hidden=128, inner=128))
    return ptqpipe.convert(source, format=scheme, container=container, out=folder / container, workers=1).out


def _config_reader(model: Path) -> Callable[[], object]:
    with CheckpointReader.open(model) as reader:
        names = {name: (entry.dtype, entry.shape) for name, entry in reader.entries.items()}
        extra = reader.read_json("hf_quant_config.json")
    with Source.open(model) as source:
        tensors = dict(source.tensors)
    recipe = load_recipe(RECIPE)

    def read() -> None:
        config = read_json_object(model / "config.json", strict=False)
        found = merged_config(config, extra)
        container = detect_container(found, names)
        if container is not None:
            get_container(container).stored_weights(found, names)
        make_plan(tensors, config, recipe=recipe)

    return read


def _hf_reader(model: Path) -> Callable[[], object]:
    with CheckpointReader.open(model) as reader:
        names = {name: (entry.dtype, entry.shape) for name, entry in reader.entries.items()}
        plain = {key: value for key, value in reader.config.items() if key != "quantization_config"}

    def read() -> None:
        config = merged_config(plain, read_json_object(model / "hf_quant_config.json", strict=False))
        container = detect_container(config, names)
        if container is not None:
            get_container(container).stored_weights(config, names)

    return read


def _record_reader(model: Path) -> Callable[[], object]:
    source = Source.open(model)

    def read() -> None:
        completed_run(model)
        record = read_record(source.reader)
        check_config(source, Findings(own=True, chosen=True))
        if record.conversion is not None:
            Recipe.from_json(record.conversion["recipe"])

    return read


def _inspected(model: Path) -> None:
    found = inspect(model)
    render_inspected(found)
    json.dumps(inspected_json(found))


def _statistics(folder: Path) -> Path:
    folder.mkdir()
    tensors = {f"m.{name}": torch.ones(16) for name in ("amax", "mean", "second_moment", "held_second_moment")}
    save_file({**tensors, "a.k_amax": torch.ones(2), "a.v_amax": torch.ones(2)}, folder / "b.safetensors")
    entry = {"file": "b.safetensors", "key": "m", "tokens": 7, "measured": True, "held_tokens": 3}
    entry["quantiles"] = {"0.99": 0.5, "0.999": 1.5}
    content = {
        "version": 1,
        "digest": "d",
        "model": {"name": "n", "fingerprint": "f"},
        "data": {"samples": 4, "seqlen": 8, "files": ["x"]},
        "modules": {"m": entry, "sibling": entry},
        "attention": {"a": {"heads": 2}},
        "files": {},
    }
    (folder / "stats.json").write_text(json.dumps(content))
    return folder


def _read_statistics(folder: Path) -> None:
    with Statistics.open(folder) as statistics:
        for module in statistics.modules:
            statistics.of(module, held_out=True)
            statistics.has(module, "full_moment")
            statistics.held_out(module)
            statistics.columns(module)
        for module in statistics.attentions:
            statistics.attention(module)
        json.dumps([statistics.digest, statistics.model_fingerprint, statistics.content.get("data", {})])


def _codes(folder: Path) -> Path:
    folder.mkdir()
    tensors = {"w.data": torch.zeros(4, 16, dtype=torch.uint8), "w.scales": torch.ones(4, 2, dtype=torch.uint8)}
    save_file({**tensors, "w.global_scale": torch.ones(1)}, folder / "b.safetensors")
    content = {
        "version": 1,
        "digest": "d",
        "method": "gptq",
        "model": {"name": "n", "fingerprint": "f"},
        "data": {"samples": 4},
        "weights": {"w": {"format": "nvfp4", "shape": [4, 32]}},
        "blocks": {"b": {"file": "other.safetensors", "sha256": "0"}},
    }
    (folder / "rounding.json").write_text(json.dumps(content))
    return folder


def _read_codes(folder: Path) -> None:
    with LearnedCodes.open(folder) as rounding:
        rounding.of("w", get_format("nvfp4"), shape=(4, 32)).dequantize()
        json.dumps([rounding.describe(), rounding.digest, rounding.model_fingerprint, rounding.has("x")])


def _evaluation(file: Path) -> Path:
    file.parent.mkdir()
    measured = {"data": "t.txt", "tokens": 9, "window": 4, "checkpoint": 5.0, "baseline": 4.0, "difference": 1.0}
    divergence = {"data": "t.txt", "tokens": 9, "mean": 0.1, "interval": [0.0, 0.2], "percentiles": {"99": 0.5}}
    task = {"task": "piqa", "metric": "acc", "samples": 5, "checkpoint": 0.5, "stderr": 0.1, "baseline": 0.6}
    content = {
        "version": 1,
        "ptqpipe": "0.1.0",
        "checkpoint": {"name": "m", "run_id": "a" * 64},
        "baseline": {"name": "b"},
        "settings": {"dtype": "float32", "window": 4},
        "perplexity": [{**measured, "interval": [0.5, 1.5]}],
        "kl": [{**divergence, "max": 1.0, "top1_agreement": 0.9}],
        "tasks": [{**task, "recovery": 0.8, "interval": [0.7, 0.9]}],
    }
    file.write_text(json.dumps(content))
    return file


def _as_output(file: Path) -> None:
    check_target(file, overwrite=False, compared=True, tasks=True)
    completed_run(file.parent)


def _recipe(file: Path) -> Path:
    file.parent.mkdir()
    rule = {"match": "re:.*mlp.*", "format": "nvfp4", "algorithm": "gptq", "objective": "block", "damping": 0.1}
    content = {
        "version": 1,
        "description": "d",
        "rules": [{**rule, "refine_passes": 3}, {"match": "*", "format": "keep"}],
        "keep": ["lm_head", "*.gate"],
        "fuse": [["q_proj", "k_proj"], ["w1", "w3"]],
        "container": "compressed_tensors",
        "input_amax": 3.0,
        "headroom": 1.5,
        "kv_cache": "none",
        "shard_size": 1000,
    }
    file.write_text(json.dumps(content))  # which is YAML
    return file


def _rows(file: Path) -> Path:
    file.parent.mkdir()
    messages = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c"}]
    rows: list[dict[str, Any]] = [{"text": "one two three"}, {"input_ids": [1, 2, 3]}, {"messages": messages}]
    file.write_text("\n".join(json.dumps(row) for row in [*rows, {"text": "four"}]))
    return file


def _texts(file: Path) -> Path:
    file.parent.mkdir()
    file.write_text("\n".join(json.dumps({"text": text, "id": 1}) for text in ("one two", "three", "")))
    return file


def _tokenizer(text: str, *, verbose: bool = True) -> dict[str, list[int]]:
    return {"input_ids": [ord(letter) % 96 for letter in text]}


def _tokenizer_config(folder: Path) -> Path:
    model = {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "[UNK]": 2}, "unk_token": "[UNK]"}
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    content = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]", "model_max_length": 64}
    (folder / "tokenizer_config.json").write_text(json.dumps({**content, "chat_template": "{{ messages }}"}))
    return folder / "tokenizer_config.json"
