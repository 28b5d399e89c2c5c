"""The model card, README.md, of a checkpoint that is written here: for the hub, and for who finds the folder.

It follows from source and record alone, so that a run that is resumed writes the same bytes. One section is left for
what `ptqpipe eval` measures later; verify's hash of the card leaves that section out. Texts from files are untrusted:
they are shown as code.
"""

import hashlib
import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from ptqpipe.checkpoint import hub_name, name_of, write_file
from ptqpipe.checkpoint.regular_file import read_regular
from ptqpipe.conversion.record import text_data
from ptqpipe.errors import argv, one_line
from ptqpipe.models.embedder import is_embedder
from ptqpipe.models.source import Source
from ptqpipe.recipe.recipe import FORMER_NAMES
from ptqpipe.run.quantities import disk_size

CARD = "README.md"
ORIGINAL = "README.original.md"  # the source's card, where it is another's and not large
LARGEST_ORIGINAL = 64 << 10  # bytes
_LARGEST_CARD = 4 << 20
_BEGIN, _END = "<!-- measured by ptqpipe eval -->", "<!-- end -->"
_SECTION = re.compile(f"(?<={re.escape(_BEGIN)}\n).*?(?={re.escape(_END)})", re.DOTALL)
_CARRIED = ("license", "license_name", "license_link", "language", "pipeline_tag")

# How each layout is run, by its readers that are known to read it (docs/formats.md).
_VLLM, _SGLANG = "vllm serve PATH", " ".join(["python -m sglang.launch_server", *argv(model_path="PATH")])
_READERS: dict[str, tuple[str, ...]] = {
    "compressed_tensors": (_VLLM, _SGLANG),
    "modelopt": (_VLLM, _SGLANG),
    "deepseek_fp8": (_VLLM, _SGLANG),
    "gptoss_mxfp4": (_VLLM, _SGLANG),
    "mxfp8_hf": (_SGLANG,),
}
_PLAIN_READERS = (_VLLM, _SGLANG)


def card(source: Source, record: Mapping[str, Any], *, nbytes: int, warnings: Sequence[str] = ()) -> bytes:
    """The card of a checkpoint.

    record    the content of its ptqpipe.json
    nbytes    of its weight files and their index
    warnings  what its readers get wrong
    """
    front = front_matter(source.reader.path / CARD)
    head = yaml.safe_dump(_head(source, record, front), sort_keys=False, allow_unicode=True)
    plain = "weights" not in record or "dequantized_from" in record or "transformed_from" in record
    formats = Counter(str(entry.get("format")) for entry in record.get("weights", {}).values())
    what = _kind(record, formats)
    lines = [f"# {code(_name(source, record))}, {what}", ""]
    lines += [_BEGIN, _END, "", *_facts(source, record, nbytes, formats, plain=plain), "", *_command_lines(record), ""]
    lines += _use(record, warnings, plain=plain, embeds=is_embedder(source.reader.path))
    return f"---\n{head}---\n\n{chr(10).join(lines)}\n".encode("utf-8", errors="replace")


class _Loader(yaml.SafeLoader):
    """Without anchors, by which a few lines merge to millions of keys; a card needs none."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """YAMLError for an alias."""
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("it has an alias")
        return super().compose_node(parent, index)


def front_matter(path: Path) -> dict[str, Any]:
    """The YAML front matter of a card; empty for none, and for one that cannot be read, or is longer than
    LARGEST_ORIGINAL: YAML takes seconds a megabyte."""
    try:
        text = read_regular(path, limit=_LARGEST_CARD).decode("utf-8", errors="replace")
        match = re.match(r"---\r?\n(.*?)\r?\n---\s*(\n|$)", text, re.DOTALL)
        content = yaml.load(match[1], Loader=_Loader) if match and len(match[1]) <= LARGEST_ORIGINAL else None
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return {}
    return content if isinstance(content, dict) else {}


def is_ours(path: Path) -> bool:
    """Whether a card was written here: it has the section for what is measured."""
    try:
        return _BEGIN.encode() in read_regular(path, limit=_LARGEST_CARD)
    except OSError:
        return False


def original_card(source: Source) -> Path | None:
    """The source's own card, where it is to be kept beside ours."""
    path = source.reader.path / CARD
    small = path.is_file() and path.stat().st_size <= LARGEST_ORIGINAL
    return path if small and not is_ours(path) else None


def card_sha256(path: Path) -> str:
    """sha256 of a card without what was measured since it was written. OSError where it cannot be read."""
    text = read_regular(path, limit=_LARGEST_CARD)
    return hashlib.sha256(_SECTION.sub("", text.decode("utf-8", errors="surrogateescape")).encode(
        "utf-8", errors="surrogateescape")).hexdigest()  # fmt: skip


def write_section(ckpt: Path, section: str) -> bool:
    """Puts the section of what is measured into a checkpoint's card; whether it did. The rest of the card stays as it
    is; one without the section is somebody's own and stays whole. OutputError where it cannot be written."""
    path = ckpt / CARD
    if not is_ours(path):
        return False
    try:
        text = read_regular(path, limit=_LARGEST_CARD).decode("utf-8")
    except UnicodeDecodeError:  # to write it would change what a person put there
        return False
    write_file(path, _SECTION.sub(lambda _: section, text))
    return True


def _head(source: Source, record: Mapping[str, Any], front: Mapping[str, Any]) -> dict[str, Any]:
    """The front matter: what the hub files the model under."""
    base = hub_name(source.reader.path) or (front.get("base_model") if is_ours(source.reader.path / CARD) else None)
    head: dict[str, Any] = {}
    if isinstance(base, str):
        head = {"base_model": one_line(base)}
        head |= {} if "transformed_from" in record else {"base_model_relation": "quantized"}
    kept = {key: value for key in _CARRIED if _is_text(value := front.get(key))}
    formats = {str(entry.get("format")) for entry in record.get("weights", {}).values() if "format" in entry}
    tags = ["ptqpipe", *sorted(formats)]
    if "pipeline_tag" not in kept and _is_causal(source):
        kept["pipeline_tag"] = "text-generation"
    return {**head, **kept, "library_name": "transformers", "tags": tags}


def _is_text(value: Any) -> bool:
    parts = value if isinstance(value, list) else [value]
    return bool(parts) and all(isinstance(part, str) and len(part) < 300 for part in parts)


def _is_causal(source: Source) -> bool:
    architectures = source.reader.config.get("architectures")
    return isinstance(architectures, list) and any("CausalLM" in str(name) for name in architectures)


def code(text: object) -> str:
    """Untrusted text in code style: nothing in it is markup, nor the end of a section."""
    return "`" + one_line(str(text), limit=200).replace("`", "'").replace("<!--", "<!- -") + "`"


def cell(text: str) -> str:
    """Text for a cell of a table, whose columns bars part."""
    return text.replace("|", "/")


def _name(source: Source, record: Mapping[str, Any]) -> str:
    made_from = record.get("source")
    source_name = made_from.get("name") if isinstance(made_from, Mapping) else None
    return str(source_name or name_of(source.reader.path))


def _kind(record: Mapping[str, Any], formats: Mapping[str, int]) -> str:
    if "transformed_from" in record:
        return "transformed for quantization"
    if "dequantized_from" in record:
        return f"decoded to {record.get('dtype')}"
    return f"quantized to {', '.join(sorted(formats))}"


def _facts(
    source: Source, record: Mapping[str, Any], nbytes: int, formats: Mapping[str, int], *, plain: bool
) -> list[str]:
    before = source.reader.nbytes
    base = hub_name(source.reader.path)
    made_from = f"[{base}](https://huggingface.co/{base})" if base else code(name_of(source.reader.path))
    rows = [("made from", made_from), ("size", f"{disk_size(nbytes)} of weights and index, from {disk_size(before)}")]
    weights, kept = record.get("weights", {}), record.get("kept", {})
    if not plain:
        bits = [(entry.get("bits_per_weight"), _elements(entry)) for entry in weights.values()]
        weighted = [(b, n) for b, n in bits if isinstance(b, float | int)]
        mean = sum(b * n for b, n in weighted) / max(1, sum(n for _, n in weighted))
        counts = ", ".join(f"{n} {f}" for f, n in formats.items())
        rows.append(("quantized", f"{len(weights)} weights ({counts}), {mean:.3f} bits per weight"))
    reasons = Counter(str(entry.get("reason") or "no reason recorded") for entry in kept.values())
    words = "; ".join(f"{one_line(reason, limit=80)} ({n})" for reason, n in reasons.items())
    rows.append(("kept", f"{len(kept)} tensors: {words}" if kept else "no tensor"))
    rows += [("layout", code(record.get("container")))] if not plain else []
    rows += [("calibrated on", text)] if (text := _data(record)) else []
    rows.append(("written by", f"ptqpipe {record.get('ptqpipe')}, run {str(record.get('run_id'))[:12]}"))
    return ["| | |", "|---|---|", *(f"| {what} | {cell(text)} |" for what, text in rows)]


def _elements(entry: Mapping[str, Any]) -> int:
    total = 1
    for size in entry.get("shape", ()):
        total *= int(size)
    return total


def _data(record: Mapping[str, Any]) -> str:
    for key in ("statistics", "rounding"):
        if (data := text_data(record, key)) is not None:
            files = [file for file in _list(data.get("files")) if isinstance(file, Mapping)]
            names = ", ".join(code(file.get("name")) for file in files)
            return _words(f"{data.get('samples')} samples of {data.get('seqlen')} tokens") + f" of {names}"
    return ""


def _list(value: Any) -> list[Any]:
    """A list of a record that was read from a file, which may hold anything."""
    return value if isinstance(value, list) else []


def _command_lines(record: Mapping[str, Any]) -> list[str]:
    former = record.get("converted_as")
    recipe = record.get("recipe") or (former.get("recipe") if isinstance(former, Mapping) else None)
    if not isinstance(recipe, Mapping):
        decoded = "dequantized_from" in record
        names = ",".join(one_line(str(name), limit=40) for name in _list(record.get("transforms")))
        if decoded:
            return ["Made by", "", _command("dequantize", "CKPT", dtype=record.get("dtype"))]
        return ["Made by", "", _command("transform", "MODEL", transforms=names or None)]
    rules = [rule for rule in _list(recipe.get("rules")) if isinstance(rule, Mapping)]
    one = rules[0] if len(rules) == 1 and rules[0].get("match") == "*" else None
    options: dict[str, object] = {"recipe": "FILE"} if one is None else {"format": one.get("scheme")}
    run, tuned = record.get("pipeline"), record.get("rounding")
    if isinstance(run, Mapping) and run.get("budget"):
        options = {"budget": one_line(str(run["budget"]), limit=40)}
    options["container"] = record.get("container")
    if isinstance(run, Mapping):
        options |= _text_options(record, run)
    else:
        options |= {option: "DIR" for key, option in _FOLDERS.items() if isinstance(record.get(key), Mapping)}
    lines = ["Made by", "", _command("convert", "MODEL", **options), "", "with"]
    method = str(tuned.get("method")) if isinstance(tuned, Mapping) else ""
    return [*lines, "", *(f"- {code(rule.get('match'))}: {_rule(rule, method)}" for rule in rules)]


def _command(*words: str, **options: object) -> str:
    """A shell's command as a block of code. Of ptqpipe's own spelling whoever writes the card: it is part of a file."""
    return f"    {shlex.join(['ptqpipe', *words, *argv(**options)])}"


_FOLDERS = {"statistics": "stats", "rounding": "codes"}
_BY_TUNE = ("algorithm", "weighting", "damping", "order", "scales", "refine")  # said of codes that tune does not choose


def _text_options(record: Mapping[str, Any], run: Mapping[str, Any]) -> dict[str, object]:
    data = next((text_entry for key in _FOLDERS if (text_entry := text_data(record, key))), None)
    if data is None:
        return {}
    size = {key: data[key] for key in ("samples", "seqlen") if isinstance(data.get(key), int)}
    quality = one_line(str(run.get("quality")), limit=20)
    return {"data": "TEXT", **size, "quality": quality, "untie": True if run.get("untie") is True else None}


def _rule(rule: Mapping[str, Any], method: str = "") -> str:
    shown = {key: value for key, value in rule.items() if key not in ("match", "scheme")}
    if method:
        shown = {key: value for key, value in shown.items() if key not in _BY_TUNE} | {"codes by tune": method}
    named = (f"{FORMER_NAMES.get(key, key)} {value}" for key, value in shown.items())
    return ", ".join([code(rule.get("scheme")), *map(_words, named)])


def _words(text: str) -> str:
    return one_line(text, limit=80).replace("_", " ")


def _use(record: Mapping[str, Any], warnings: Sequence[str], *, plain: bool, embeds: bool) -> list[str]:
    container = str(record.get("container"))
    readers = _PLAIN_READERS if plain else _READERS.get(container, ())
    if embeds:  # vLLM's pooling runner is the one whose encoders are known to take these layers
        readers = (" ".join([_VLLM, *argv(runner="pooling")]),) if _VLLM in readers else ()
    needs = not plain and container in ("modelopt", "ptqpipe")
    lines = ["## Use", "", "PATH is this folder, or its name on the hub.", ""]
    model_class = "AutoModel" if embeds else "AutoModelForCausalLM"
    # compressed-tensors decodes to bfloat16, and embedders are published in float32, which their other layers keep.
    dtype = ', dtype="bfloat16"' if embeds else ""
    lines += [f"    {line}" for line in (*readers, *([] if embeds else ["ptqpipe serve PATH"]))]
    lines += ["", f"    from transformers import {model_class}"]
    lines += ["    import ptqpipe  # for this layout"] if needs else []
    lines += [f'    model = {model_class}.from_pretrained("PATH"{dtype})', ""]
    lines += [*(f"- {one_line(warning, limit=500)}" for warning in warnings), ""] if warnings else []
    return [*lines, "`ptqpipe verify PATH` checks every byte of it. [ptqpipe.json](ptqpipe.json) lists what became of "
            "every tensor."]  # fmt: skip
