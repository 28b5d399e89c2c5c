"""Names, bytes and files: every source tensor has one fate, nothing is unexplained, what is kept is byte-equal.

Looks at the two checkpoints as sets of logical weights (``source.py``) and plain tensors. Must not decode anything
except kept tensors of a source that is itself quantized.
"""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ptqpipe.checkpoint.finite import NotFinite
from ptqpipe.containers import WITH_KV_CACHE, StoredWeight, quantization_config
from ptqpipe.regular_file import MAX_JSON_BYTES, read_regular
from ptqpipe.source import Source
from ptqpipe.stages.common.text import same_json
from ptqpipe.stages.verify.findings import Findings
from ptqpipe.stages.verify.origin import Origins

READ_BYTES = 8 << 20
_KV_SCALE = re.compile(r".*\.(?:[kvq]_proj\.)?[kvq]_scale")
_ROPE_BUFFER = re.compile(r".*rotary_emb\.inv_freq")
_TOKENS = re.compile(r"(tokenizer\.json|vocab\.(json|txt)|merges\.txt|added_tokens\.json|.*\.(model|tiktoken))")
_REWRITTEN = frozenset({"transformers_version", "_name_or_path", "torch_dtype", "dtype", "use_cache"})
_QUANTIZATION = frozenset({"quantization_config", "compression_config"})


def plain_tensors(ckpt: Source) -> list[str]:
    """Stored tensors that are no part of a quantized weight, in the order of the files."""
    return [name for name in ckpt.reader.entries if name not in ckpt.consumed]


def is_kv_scale(name: str) -> bool:
    """Whether a tensor's name says that it scales a quantized kv cache."""
    return _KV_SCALE.fullmatch(name) is not None


def check_fates(ckpt: Source, origins: Origins, findings: Findings) -> None:
    """Every source tensor is quantized or kept, once; every stored tensor has its origin."""
    fates: Counter[str] = Counter()
    expanded: Counter[str] = Counter()
    for stored in ckpt.stored.values():
        found = origins.find(stored)
        if found is None:
            findings.fault("names", stored.weight, _no_origin(stored, origins))
        elif found[0].tensor == stored.weight:
            fates[stored.weight] += 1
        else:
            expanded[found[0].tensor] += 1
    for name in plain_tensors(ckpt):
        if name in origins.kept:
            fates[origins.kept[name]] += 1
        else:
            _explain(name, ckpt, findings)
    for tensor, count in expanded.items():
        whole = origins.divided[tensor]
        fates[tensor] += 1
        if count != whole:
            findings.fault(
                "names", tensor, f"only {count} of the {whole} weights that this stack of experts becomes are stored"
            )
    for name in origins.tensors:
        if fates[name] > 1:
            findings.fault("names", name, "is stored both quantized and as it was; readers take one of the two")
        elif fates[name] == 0:
            _missing(name, origins.source, findings)


def _no_origin(stored: StoredWeight, origins: Origins) -> str:
    found = origins.tensors.get(stored.weight)
    here = "x".join(map(str, stored.shape if stored.experts is None else (stored.experts, *stored.shape)))
    if found is not None:
        return f"is stored as {here}{' (transposed)' * stored.transposed}, but the source has {list(found[1])}"
    return f"is stored quantized ({here}), but the source has no weight of this name; readers will not find it"


def _explain(name: str, ckpt: Source, findings: Findings) -> None:
    """A stored tensor that the source does not have."""
    if is_kv_scale(name):
        return
    if name == "lm_head.weight" and not findings.chosen and ckpt.reader.config.get("tie_word_embeddings"):
        findings.note("names", name, "a tied head that the source does not store; readers take the embedding")
        return
    findings.fault("names", name, "is in the checkpoint, but the source has no such tensor and no weight needs it")


def _missing(name: str, source: Source, findings: Findings) -> None:
    """A source tensor without a fate."""
    if not findings.chosen and _ROPE_BUFFER.fullmatch(name):
        findings.note("names", name, "a buffer of the source that readers compute themselves is not stored")
    elif not findings.chosen and name == "lm_head.weight" and source.reader.config.get("tie_word_embeddings"):
        findings.note(
            "names", name, "the source stores its tied head, the checkpoint does not; readers take the embedding"
        )
    else:
        findings.fault(
            "names", name, "is in the source, but the checkpoint has neither this tensor nor a weight made of it"
        )


def check_kept(ckpt: Source, source: Source, name: str, origin: str, findings: Findings) -> None:
    """A kept tensor is ``origin`` of the source: dtype, shape and every byte. One that has another name in this layout
    (``containers.kv_scale``) holds one number, as [1] or []."""
    entry = ckpt.reader.entries[name]
    decoded = source.stored.get(origin)
    dtype, shape = source.tensors[origin]
    if entry.shape != shape and (origin == name or {entry.shape, shape} != {(), (1,)}):
        findings.fault("kept", name, f"has shape {list(entry.shape)}, but the source has {list(shape)}")
    elif entry.dtype == dtype and decoded is None:
        _compare_bytes(ckpt, source, name, origin, findings)
    elif entry.dtype == dtype:
        _compare_decoded(ckpt, source, name, findings)
    elif findings.chosen or entry.dtype not in ("BF16", "F16", "F32") or dtype not in ("BF16", "F16", "F32"):
        findings.fault("kept", name, f"is {entry.dtype}, but the source has {dtype}")
    else:
        _compare_rounded(ckpt, source, name, findings)


def check_kept_finite(ckpt: Source, name: str, findings: Findings) -> str | None:
    """A note on NaN and infinities in a kept tensor: they are the source's, and what the model computes is lost. How
    many there are, in words; None for none."""
    bad = NotFinite(ckpt.reader.entries[name].dtype)
    for start in range(0, ckpt.reader.entries[name].nbytes, READ_BYTES):
        stop = min(start + READ_BYTES, ckpt.reader.entries[name].nbytes)
        bad.look(torch.frombuffer(ckpt.reader.read_bytes(name, start=start, stop=stop), dtype=torch.uint8))
    if bad.count:
        findings.note("values", name, f"is kept and has {bad.text}; they are the source's")
    return bad.text if bad.count else None


def _compare_bytes(ckpt: Source, source: Source, name: str, origin: str, findings: Findings) -> None:
    total = ckpt.reader.entries[name].nbytes
    differing, first = 0, None
    for start in range(0, total, READ_BYTES):
        stop = min(start + READ_BYTES, total)
        a = torch.frombuffer(ckpt.reader.read_bytes(name, start=start, stop=stop), dtype=torch.uint8)
        b = torch.frombuffer(source.reader.read_bytes(origin, start=start, stop=stop), dtype=torch.uint8)
        unlike = a != b
        if bool(unlike.any()):
            differing += int(unlike.sum())
            first = start + int(unlike.int().argmax()) if first is None else first
    if differing:
        findings.fault("kept", name, f"differs from the source in {differing} of {total} bytes, the first at {first}")


def _compare_decoded(ckpt: Source, source: Source, name: str, findings: Findings) -> None:
    """The source stores the tensor quantized; kept means decoded, rounded to bfloat16."""
    stored = source.stored[name]
    width = stored.shape[0] * stored.shape[1] * 2
    for expert in range(stored.experts or 1):
        q = source.quantized(name, expert=None if stored.experts is None else expert)
        decoded = q.dequantize().bfloat16()
        wanted = (decoded.t() if stored.transposed else decoded).contiguous()
        start = expert * width
        raw = ckpt.reader.read_bytes(name, start=start, stop=start + width)
        found = torch.frombuffer(raw, dtype=torch.bfloat16)
        if not torch.equal(found.view(torch.int16), wanted.flatten().view(torch.int16)):
            findings.fault("kept", name, "is not the bfloat16 decode of the source's quantized weight")
            return


def _compare_rounded(ckpt: Source, source: Source, name: str, findings: Findings) -> None:
    """Other tools store kept tensors in the model's dtype: then they must be the source's numbers, rounded once."""
    for start, stop in _row_runs(source.tensors[name]):
        found = ckpt.reader.read(name, start=start, stop=stop)
        wanted = source.reader.read(name, start=start, stop=stop).to(found.dtype)
        if not torch.equal(found, wanted):
            findings.fault("kept", name, f"is {found.dtype} and not the source's numbers rounded to it")
            return
    was = source.tensors[name][0]
    findings.note("kept", name, f"is stored as {ckpt.reader.entries[name].dtype}, rounded from the source's {was}")


def _row_runs(entry: tuple[str, tuple[int, ...]]) -> Iterator[tuple[int, int | None]]:
    shape = entry[1]
    if not shape:
        yield 0, None
        return
    width = 8
    for extent in shape[1:]:
        width *= extent
    step = max(1, READ_BYTES // max(1, width))
    for start in range(0, shape[0], step):
        yield start, min(start + step, shape[0])


def check_sizes(ckpt: Source, findings: Findings) -> None:
    """What the index and the headers say beside the tensors: the reader has checked the rest."""
    reader = ckpt.reader
    if reader.index is None and len(reader.files) > 1:
        message = f"is missing, though there are {len(reader.files)} weight files; loaders find them by it"
        findings.fault("index", "model.safetensors.index.json", message)
    if reader.index is not None:
        metadata = (reader.read_json(reader.index.name) or {}).get("metadata")
        total = metadata.get("total_size") if isinstance(metadata, Mapping) else None
        actual = sum(entry.nbytes for entry in reader.entries.values())
        if total != actual:
            findings.deviation(
                "index", reader.index.name, f"says total_size {total!r}, the tensors have {actual} bytes"
            )
    for path, metadata in reader.metadata.items():
        if metadata.get("format") != "pt":
            findings.deviation(
                "index", path.name, f"has metadata {dict(metadata)}, expected format 'pt', which loaders ask for"
            )
    if not reader.has_config:
        findings.fault("config", "config.json", "is missing; no reader can load the checkpoint")
    for path, why in reader.left_out.items():
        if why.startswith("weights or index") and path != reader.index:
            findings.deviation("files", path.name, "is another set of weights beside this one; remove it")


def check_files(ckpt: Source, source: Source, findings: Findings, *, own_files: frozenset[str]) -> None:
    """The files beside the weights are the source's, byte for byte."""
    ours = _relative(ckpt.reader.path, ckpt.reader.extra_files)
    theirs = _relative(source.reader.path, source.reader.extra_files)
    for name in sorted(theirs.keys() - ours.keys() - own_files):
        findings.choice("files", name, "is in the source, but the checkpoint lacks it")
    for name in sorted(ours.keys() - theirs.keys()):
        findings.note("files", name, "is in the checkpoint, but not in the source")
    for name in sorted(ours.keys() & theirs.keys()):
        if not _same_file(ours[name], theirs[name]):
            _report_file(name, ours[name], theirs[name], findings)


def _relative(root: Path, files: Iterable[Path]) -> dict[str, Path]:
    return {path.relative_to(root).as_posix(): path for path in files}


def _same_file(a: Path, b: Path) -> bool:
    with open(a, "rb") as first, open(b, "rb") as second:
        while True:
            left, right = first.read(READ_BYTES), second.read(READ_BYTES)
            if left != right:
                return False
            if not left:
                return True


def _report_file(name: str, path: Path, original: Path, findings: Findings) -> None:
    """Tools that save a tokenizer again reorder its files; what the tokens are must not change."""
    a, b = _json(path), _json(original)
    if findings.chosen:
        findings.fault("files", name, "differs from the source's")
    elif a is None or b is None:
        (findings.fault if _TOKENS.fullmatch(name) else findings.note)("files", name, "differs from the source's")
    elif a == b:
        findings.note("files", name, "is written differently, and says the same as the source's")
    else:
        keys = _changed(a, b)
        report = findings.fault if _TOKENS.fullmatch(name) else findings.note
        report("files", name, f"differs from the source's in {', '.join(keys) if keys else 'its content'}")


def _json(path: Path) -> Any:
    if path.suffix != ".json":
        return None
    try:
        return json.loads(read_regular(path, limit=MAX_JSON_BYTES))
    except (OSError, ValueError, RecursionError):
        return None


def _changed(a: Any, b: Any) -> list[str]:
    if not isinstance(a, dict) or not isinstance(b, dict):
        return []
    return sorted(
        str(key) for key in a.keys() | b.keys() if not same_json(a.get(key), b.get(key)) or (key in a) != (key in b)
    )


def check_model_config(
    ckpt: Source, source: Source, findings: Findings, *, rewritten: frozenset[str] = frozenset()
) -> None:
    """config.json describes the source's model: only its quantization may differ, and the keys ``rewritten``."""
    differing = _QUANTIZATION | rewritten
    a = {key: value for key, value in ckpt.reader.config.items() if key not in differing}
    b = {key: value for key, value in source.reader.config.items() if key not in differing}
    for config in (a, b):
        text = config.get("text_config")
        if isinstance(text, Mapping):
            config["text_config"] = {key: value for key, value in text.items() if key not in differing}
    for key in _changed(a, b):
        message = f"{key} is {a.get(key)!r:.80}, the source has {b.get(key)!r:.80}"
        if findings.chosen or key not in _REWRITTEN:
            findings.fault("config", "config.json", message)
        else:
            findings.note("config", "config.json", message)


def check_dangling(ckpt: Source, findings: Findings, *, kept: Container[str] = ()) -> None:
    """Tensors that look like parts of a quantized weight and belong to none; ``kept`` are plain in the source, too."""
    if ckpt.container is None:
        return
    suffixes = ("_packed", "_scale", "_scale_2", "_scale_inv", "_blocks", "_scales", "_zero_point", "_global_scale")
    for name in plain_tensors(ckpt):
        dtype = ckpt.reader.entries[name].dtype
        if (
            not is_kv_scale(name)
            and name not in kept
            and (name.endswith(suffixes) or dtype.startswith(("F8_", "F4", "F6_")))
        ):
            findings.fault("names", name, f"looks like a part of a quantized weight ({dtype}), but no weight uses it")


def check_kv_scales(ckpt: Source, findings: Findings) -> None:
    """Scales of a quantized kv cache are finite, positive, announced by the config, and there for k and v alike."""
    names = [name for name in plain_tensors(ckpt) if is_kv_scale(name)]
    layers: dict[str, set[str]] = defaultdict(set)
    for name in names:
        values = ckpt.reader.read(name).float()
        if not bool((torch.isfinite(values) & (values > 0)).all()):
            findings.fault("scales", name, f"is {values.flatten().tolist()[:4]}, expected finite positive numbers")
        match = re.fullmatch(r"(.*?)\.(?:[kvq]_proj\.)?([kvq])_scale", name)
        if match is not None:
            layers[match[1]].add(match[2])
    for layer, found in layers.items():
        if not {"k", "v"} <= found:
            findings.fault("scales", layer, f"has a kv-cache scale for {sorted(found)} only, expected k and v")
    described = json.dumps(dict(quantization_config(ckpt.reader.config)), default=str)
    extra = json.dumps(ckpt.reader.read_json("hf_quant_config.json") or {}, default=str)
    declared = re.search(r'"kv_cache_(scheme|quant_algo)": (?!null)', described + extra) is not None
    if names and not declared:
        report = findings.choice if ckpt.container_name in WITH_KV_CACHE else findings.note
        report("config", "kv_cache_scheme", f"{len(names)} kv-cache scales are stored, but no config announces them")
    if declared and not names and ckpt.container is not None:
        findings.choice("config", "kv_cache_scheme", "is announced, but there are no kv-cache scales; readers use 1.0")
