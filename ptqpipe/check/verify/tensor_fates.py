"""Checks names, bytes and files: every source tensor has one fate, nothing is unexplained, what is kept is byte-equal.

Looks at the two checkpoints as sets of logical weights (``source.py``) and plain tensors. Must not decode anything
except kept tensors of a source that is itself quantized.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping

import torch

from ptqpipe.check.verify.findings import Findings
from ptqpipe.check.verify.side_files import changed
from ptqpipe.checkpoint.dtypes import NotFinite
from ptqpipe.checkpoint.layouts import StoredWeight, is_kv_scale
from ptqpipe.models.source import Source
from ptqpipe.recipe.weight_map import WeightMap

READ_BYTES = 8 << 20
_ROPE_BUFFER = re.compile(r".*rotary_emb\.inv_freq")
_REWRITTEN = frozenset({"transformers_version", "_name_or_path", "torch_dtype", "dtype", "use_cache"})
_QUANTIZATION = frozenset({"quantization_config", "compression_config"})


def check_fates(ckpt: Source, origins: WeightMap, findings: Findings) -> None:
    """Every source tensor is quantized or kept, once; every stored tensor has its origin."""
    fates: Counter[str] = Counter()
    expanded: Counter[str] = Counter()
    for stored in ckpt.stored.values():
        slices = origins.find(stored)
        if slices is None:
            findings.fault("names", stored.weight, _no_origin(stored, origins))
        elif slices[0].tensor == stored.weight:
            fates[stored.weight] += 1
        else:
            expanded[slices[0].tensor] += 1
    for name in ckpt.plain:
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


def _no_origin(stored: StoredWeight, origins: WeightMap) -> str:
    tensor = origins.tensors.get(stored.weight)
    here = "x".join(map(str, stored.shape if stored.experts is None else (stored.experts, *stored.shape)))
    if tensor is not None:
        return f"is stored as {here}{' (transposed)' * stored.transposed}, but the source has {list(tensor[1])}"
    return f"is stored quantized ({here}), but the source has no weight of this name; readers will not find it"


def _explain(name: str, ckpt: Source, findings: Findings) -> None:
    if is_kv_scale(name):
        return
    if name == "lm_head.weight" and not findings.chosen and ckpt.reader.config.get("tie_word_embeddings"):
        findings.note("names", name, "a tied head that the source does not store; readers take the embedding")
        return
    findings.fault("names", name, "is in the checkpoint, but the source has no such tensor and no weight needs it")


def _missing(name: str, source: Source, findings: Findings) -> None:
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
        compare_decoded(ckpt, source, name, findings)
    elif findings.chosen or entry.dtype not in ("BF16", "F16", "F32") or dtype not in ("BF16", "F16", "F32"):
        findings.fault("kept", name, f"is {entry.dtype}, but the source has {dtype}")
    else:
        _compare_rounded(ckpt, source, name, findings)


def check_kept_finite(ckpt: Source, name: str, findings: Findings) -> str | None:
    """Notes NaN and infinities in a kept tensor: they are the source's, and make what the model computes useless.

    Returns how many there are, in words; None for none.
    """
    bad = NotFinite(ckpt.reader.entries[name].dtype)
    for _, raw in ckpt.reader.chunks(name):
        bad.look(torch.frombuffer(raw, dtype=torch.uint8))
    if bad.count:
        findings.note("values", name, f"is copied from the source with {bad.text}")
    return bad.text if bad.count else None


def _compare_bytes(ckpt: Source, source: Source, name: str, origin: str, findings: Findings) -> None:
    total, differing, first = ckpt.reader.entries[name].nbytes, 0, None
    for (start, ours), (_, theirs) in zip(ckpt.reader.chunks(name), source.reader.chunks(origin), strict=True):
        if ours != theirs:
            a, b = (torch.frombuffer(raw, dtype=torch.uint8) for raw in (ours, theirs))
            differing += int((a != b).sum())
            first = start + int((a != b).int().argmax()) if first is None else first
    if differing:
        findings.fault("kept", name, f"differs from the source in {differing} of {total} bytes, the first at {first}")


def compare_decoded(ckpt: Source, source: Source, name: str, findings: Findings) -> None:
    """A weight that the source stores quantized is its decode here, rounded to the dtype that it has."""
    stored = source.stored[name]
    for expert in stored.planes:
        decoded = stored.plain(source.quantized(name, expert=expert))
        wanted = decoded.t() if stored.transposed else decoded
        stored_numbers = (
            ckpt.reader.read(name) if expert is None else ckpt.reader.read(name, start=expert, stop=expert + 1)[0]
        )
        bits = (x.contiguous().view(torch.uint8) for x in (stored_numbers, wanted.to(stored_numbers.dtype)))
        if stored_numbers.shape != wanted.shape or not torch.equal(*bits):
            dtype = str(stored_numbers.dtype).removeprefix("torch.")
            findings.fault("kept", name, f"is not the {dtype} decode of the source's quantized weight")
            return


def _compare_rounded(ckpt: Source, source: Source, name: str, findings: Findings) -> None:
    """Other tools store kept tensors in the model's dtype: then they must be the source's numbers, rounded once."""
    for start, stop in _row_runs(source.tensors[name]):
        stored = ckpt.reader.read(name, start=start, stop=stop)
        wanted = source.reader.read(name, start=start, stop=stop).to(stored.dtype)
        if not torch.equal(stored, wanted):
            findings.fault("kept", name, f"is {stored.dtype} and not the source's numbers rounded to it")
            return
    was = source.tensors[name][0]
    findings.note("kept", name, f"is stored as {ckpt.reader.entries[name].dtype}, rounded from the source's {was}")


def _row_runs(entry: tuple[str, tuple[int, ...]]) -> Iterator[tuple[int, int | None]]:
    shape = entry[1]
    if not shape:
        yield 0, None
        return
    step = max(1, READ_BYTES // max(1, 8 * math.prod(shape[1:])))
    for start in range(0, shape[0], step):
        yield start, min(start + step, shape[0])


def check_sizes(ckpt: Source, findings: Findings) -> None:
    """Total size, metadata and files that loaders go by; the reader has checked the tensors' own entries."""
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
            findings.deviation("files", path.name, "is another set of weights in the folder; remove it")


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
    for key in changed(a, b):
        message = f"{key} is {a.get(key)!r:.80}, the source has {b.get(key)!r:.80}"
        if findings.chosen or key not in _REWRITTEN:
            findings.fault("config", "config.json", message)
        else:
            findings.note("config", "config.json", message)


def check_dangling(ckpt: Source, source: Source | None, findings: Findings) -> None:
    """Tensors that look like parts of a quantized weight and belong to none, of the checkpoint and of its source."""
    for check, model in (("names", ckpt), *([("source", source)] if source is not None else [])):
        for name, looks, _ in model.dangling:
            findings.fault(check, name, f"looks like {looks} ({model.tensors[name][0]}), but no weight uses it")
