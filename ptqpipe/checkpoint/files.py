"""Sorts the files of a checkpoint folder: which hold the weights, which are copied, which are left out and why.

Opens the headers and the index alone. The decisions:

- With an index, the files that it names are the checkpoint, and every tensor in them must be in it.
- Without an index, every ``*.safetensors`` of the folder is, and their names must be disjoint.
- A further ``*.safetensors`` beside an indexed set is an error, since ignoring it could lose part of a model,
  unless its name says that it is another set: ``consolidated*`` (Mistral's own layout), which is the checkpoint where
  there is no other, and an adapter, which never is one (``adapter.py``).
- Subfolders hold no weights of this checkpoint (``original/``, ``metal/``): their weights are left behind,
  their other files are carried.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final, NoReturn

from ptqpipe.checkpoint.adapter import ADAPTER_CONFIG, adapter_error, are_adapters, is_adapter_file
from ptqpipe.checkpoint.header import FileHeader, parse_file, parse_json_object, shown
from ptqpipe.checkpoint.regular_file import MAX_JSON_BYTES, kind_of, read_regular
from ptqpipe.errors import CheckpointError, read_failure

INDEX_NAME: Final = "model.safetensors.index.json"
SINGLE_NAME: Final = "model.safetensors"
#: The record beside the weights: what wrote them, from what, and the fate of every tensor. Its "run_id" names the run.
RECORD_FILE: Final = "ptqpipe.json"
#: Instead of weights: the factors that make them of another checkpoint's, while they are read (``folded.py``).
FOLDING_FILE: Final = "ptqpipe-folding.json"
#: Written anew by every converter, so never carried over.
OWN_FILES: Final = frozenset({"config.json", "hf_quant_config.json", RECORD_FILE})

#: Files of a model's folder that no program reads: they may change.
PAGES: Final = frozenset({"README.md", ".gitattributes", "LICENSE"})
# Those that programs open by their names, wherever they come from: the tokenizer and its template, what a model is
# asked with and how its answers are drawn, images and sounds, the stages of an embedding model, adapters (which
# transformers adds by itself), other descriptions of a quantization, Mistral's own files, and code.
_OPENED: Final = re.compile(
    r"(tokenizer|tokenizer_config|added_tokens|special_tokens_map|vocab|chat_template|tekken|params)\.json"
    r"|vocab\.txt|merges\.txt|[^/]*\.(model|tiktoken|spm|jinja)|(additional_)?chat_templates/.*"
    r"|(generation|(video_|image_|audio_)?(pre)?processor|feature_extractor|adapter|quantize|quant)_config\.json"
    r"|modules\.json|config_sentence_transformers\.json|sentence_[a-z_]+_config\.json|\d+_[A-Za-z]+/config\.json"
    r"|(.*/)?[^/]+\.py"
)
#: Those among them that say what the tokens are, and are read in no other way than byte for byte.
TOKENS: Final = re.compile(r"(tokenizer\.json|vocab\.(json|txt)|merges\.txt|added_tokens\.json|.*\.(model|tiktoken))")
_SEAL: Final = re.compile(rb'\n  "sha256": "([0-9a-f]{64})"\n\}\n\Z')
_BLANK: Final = "0" * 64
_SAFETENSORS: Final = ".safetensors"
_WEIGHT_SUFFIXES: Final = (
    *(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".ggml", ".onnx", ".onnx_data", ".onnx.data"),
    *(".h5", ".msgpack", ".npz", ".ot", ".tflite", ".pdparams"),
)
_SKIPPED_FOLDERS: Final = frozenset({".git", ".cache", ".huggingface", "__pycache__", ".ipynb_checkpoints"})
_HIDDEN: Final = (".partial", ".stages", ".gone")  # of an output beside which they lie
_MISTRAL: Final = "consolidated"
_NUMBERED: Final = re.compile(r"(?P<stem>.+)-(?P<index>\d{5,})-of-(?P<count>\d{5,})\.safetensors")


@dataclass(frozen=True, slots=True)
class FolderContent:
    """The files of one checkpoint folder, sorted into what they are."""

    headers: tuple[FileHeader, ...]
    index: Path | None
    extra_files: tuple[Path, ...]
    left_out: Mapping[Path, str]


def natural_key(name: str) -> list[tuple[int, str]]:
    """Sorts ``layer.2`` before ``layer.10``."""
    parts = re.split(r"([0-9]+)", name)
    return [(int(p), "") if i % 2 else (-1, p) for i, p in enumerate(parts)]


def scan_folder(folder: Path) -> FolderContent:
    """The contents of a folder, with headers that are validated and agree with the index.

    Raises CheckpointError for a damaged file, a missing shard, a tensor in two files or in none, weight files that
    belong to no set, and an adapter without its model.
    """
    index, weight_files = _find_index(folder), _top_level_weights(folder)
    present = [p for p in weight_files if not _is_other_set(p.name)]
    if index is None:
        files = present or [p for p in weight_files if p.name.startswith(_MISTRAL)]
        headers = _read_without_index(folder, files)
    else:
        headers = _read_indexed(folder, index)
        _refuse_strays(index, files=[h.path for h in headers], present=present)
    whole = tuple(header for header in headers if not are_adapters(entry.name for entry in header.entries))
    if headers and not whole:
        raise adapter_error(folder)
    headers = headers if index is not None else whole
    extra, left_out = _walk(folder, weights=frozenset(header.path for header in headers))
    return FolderContent(headers, index, extra, left_out)


def read_json_object(path: Path, *, strict: bool = True) -> dict[str, Any]:
    """A JSON object from a file; ``strict=False`` allows what config files contain in practice (Infinity, duplicates).

    Raises CheckpointError for what cannot be read or parsed, a pipe or a device, and more than 256 MiB.
    """
    try:
        raw = read_regular(path, limit=MAX_JSON_BYTES)
    except OSError as error:
        raise CheckpointError(f"{shown(str(path))} cannot be read: {read_failure(error)}") from None
    if raw.startswith(b"version https://git-lfs"):
        raise CheckpointError(f"{shown(str(path))} is a Git LFS pointer; run 'git lfs pull' in its folder")
    if strict:
        return parse_json_object(path, raw)
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{shown(str(path))} is not JSON: {shown(str(error))[1:-1]}; download it again") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{shown(str(path))} holds {type(value).__name__}, expected a JSON object")
    return value


def json_bytes(content: Mapping[str, Any]) -> bytes:
    """A JSON file's bytes. A half of a surrogate pair, which a source's config may hold escaped, stays escaped."""
    try:
        return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
    except UnicodeEncodeError:
        return (json.dumps(content, indent=2) + "\n").encode()


def is_opened(name: str) -> bool:
    """Whether programs that load a model open a file of its folder ("chat_templates/tool.jinja") by this name."""
    return _OPENED.fullmatch(name) is not None


def sealed(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record that vouches for itself: its last key is the sha256 of its bytes (`json_bytes`) with zeros there."""
    blank = {**{key: value for key, value in record.items() if key != "sha256"}, "sha256": _BLANK}
    return {**blank, "sha256": hashlib.sha256(json_bytes(blank)).hexdigest()}


def vouches_for_itself(raw: bytes) -> bool:
    """Whether the bytes of a record are those that its sha256 was made of; False as well where it has none."""
    seal = _SEAL.search(raw)
    if seal is None:
        return False
    blank = raw[: seal.start(1)] + _BLANK.encode() + raw[seal.end(1) :]
    return hashlib.sha256(blank).hexdigest().encode() == seal[1]


def file_sha256(path: Path) -> str:
    """sha256 of a whole file in hex. CheckpointError where it cannot be read."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(f"{shown(str(path))} cannot be read: {read_failure(error)}") from None


def refuse_pipes(folder: Path) -> None:
    """CheckpointError for a pipe, a device or a socket in a model's folder, or a link to one.

    Who lets another library read the folder's files (config, tokenizer, chat template) asks this first: opening a pipe
    waits for ever, and a device need not end. Weights are not looked at: their readers are our own.
    """
    for root, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in _SKIPPED_FOLDERS]
        for name in names:
            path = Path(root, name)
            try:
                kind = "" if is_weight_file(name) else kind_of(path.stat().st_mode)
            except OSError:  # absent or not to be read: whoever opens it says so
                continue
            if kind:
                _refuse_kind(path, kind)


def refuse_foreign_links(folder: Path, files: Iterable[Path], *, weights: Iterable[Path]) -> None:
    """CheckpointError for a file of a model's folder whose content lies elsewhere: its copy would be published.

    A link may lead within the folder, and into the blobs of the hub's cache where the weights lie as well. Weights need
    not be asked about: what is no safetensors file is refused anyhow, and large shards often lie on another disk.
    """
    blobs = {path.resolve().parent for path in weights}
    homes = [folder.resolve(), *(b for b in blobs if b.name == "blobs" and b.parent.name.startswith("models--"))]
    for path in files:
        target = path.resolve()
        if not any(target.is_relative_to(home) for home in homes):
            raise CheckpointError(
                f"{shown(str(path))} is a link that leaves the model's folder, to {shown(_target(path))}; its content "
                "would become part of the output: copy the folder with cp -rL, or delete the link"
            )


def _target(path: Path) -> str:
    """What the link says itself; where a folder above is the link, where it leads."""
    return os.readlink(path) if path.is_symlink() else str(path.resolve())


def _refuse_kind(path: Path, kind: str) -> NoReturn:
    raise CheckpointError(f"{shown(str(path))} is {kind}, expected a file; remove it, or put the file itself there")


def is_weight_file(name: str) -> bool:
    """Whether a file is, by its name, one of weights or their index, in any framework's format."""
    lowered = name.lower()
    return lowered.endswith(_WEIGHT_SUFFIXES) or (
        lowered.endswith(".index.json") and lowered[: -len(".index.json")].endswith(_WEIGHT_SUFFIXES)
    )


def _top_level_weights(folder: Path) -> list[Path]:
    try:
        names = [name for name in os.listdir(folder) if name.endswith(_SAFETENSORS)]
    except OSError as error:
        raise CheckpointError(f"{shown(str(folder))} cannot be listed: {read_failure(error)}") from None
    return [folder / name for name in sorted(names, key=natural_key)]


def _is_other_set(name: str) -> bool:
    return name.startswith((_MISTRAL, "adapter_")) or is_adapter_file(name)


def _find_index(folder: Path) -> Path | None:
    """The standard index if there is one, else the only other one that is not of another set."""
    if (folder / INDEX_NAME).exists():
        return folder / INDEX_NAME
    indexes = sorted(p for p in folder.glob(f"*{_SAFETENSORS}.index.json") if not _is_other_set(p.name))
    if len(indexes) > 1:
        names = ", ".join(p.name for p in indexes)
        raise CheckpointError(f"{shown(str(folder))} has the indexes {names}; keep one, named {INDEX_NAME}")
    return indexes[0] if indexes else None


def _read_without_index(folder: Path, files: list[Path]) -> tuple[FileHeader, ...]:
    for path in files:
        if match := _NUMBERED.fullmatch(path.name):
            count = int(match["count"])
            width = len(match["count"])
            wanted = {f"{match['stem']}-{i:0{width}d}-of-{match['count']}{_SAFETENSORS}" for i in range(1, count + 1)}
            missing = sorted(wanted - {p.name for p in files}) if count <= 10**5 else ["..."]
            if missing:
                raise CheckpointError(f"{shown(str(folder))} lacks {missing[0]} of {count} shards; download it again")
    headers = tuple(parse_file(path) for path in files)
    first: dict[str, Path] = {}
    for header in headers:
        for entry in header.entries:
            if first.setdefault(entry.name, header.path) is not header.path:
                raise CheckpointError(
                    f"tensor {shown(entry.name)} is in both {shown(first[entry.name].name)} and "
                    f"{shown(header.path.name)} of {shown(str(folder))}; keep one of them"
                )
    return headers


def _weight_map(index: Path) -> dict[str, str]:
    content = read_json_object(index)
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        kind = "empty" if weight_map == {} else f"a {type(weight_map).__name__}"
        raise CheckpointError(f"{shown(str(index))} has a weight_map that is {kind}, expected tensor names -> files")
    result: dict[str, str] = {}
    paths: dict[str, str] = {}  # of the files that were looked at: many names have one
    for name, file in weight_map.items():
        if isinstance(file, str) and file in paths:
            result[name] = paths[file]
            continue
        if not isinstance(file, str) or not _is_inside(file):
            raise CheckpointError(
                f"{shown(str(index))} places tensor {shown(name)} in {shown(file)}, expected a .safetensors file "
                "inside the folder; write the index again"
            )
        result[name] = paths[file] = str(PurePosixPath(file))
    return result


def _is_inside(file: str) -> bool:
    path = PurePosixPath(file)
    printable = "\0" not in file and "\\" not in file and file.isprintable()
    return printable and file.endswith(_SAFETENSORS) and not path.is_absolute() and ".." not in path.parts


def _read_indexed(folder: Path, index: Path) -> tuple[FileHeader, ...]:
    weight_map = _weight_map(index)
    headers: list[FileHeader] = []
    for file in sorted(set(weight_map.values()), key=natural_key):
        if not os.path.lexists(folder / file):
            name = next(n for n, f in weight_map.items() if f == file)
            raise CheckpointError(
                f"{shown(str(folder))} lacks the shard {shown(file)} that its index names for {shown(name)}; "
                "download it again"
            )
        headers.append(parse_file(folder / file))
    files_by_name: dict[str, str] = {}
    for header in headers:
        file = header.path.relative_to(folder).as_posix()
        for entry in header.entries:
            if weight_map.get(entry.name) != file:
                _raise_disagreement(index, entry.name, file=file, indexed=weight_map.get(entry.name))
            files_by_name[entry.name] = file
    for name in weight_map.keys() - files_by_name.keys():
        raise CheckpointError(
            f"{shown(str(index))} names tensor {shown(name)}, which {shown(weight_map[name])} does not hold; "
            "write the index again or download the shard again"
        )
    return tuple(headers)


def _raise_disagreement(index: Path, name: str, *, file: str, indexed: str | None) -> None:
    where = "does not name it" if indexed is None else f"places it in {shown(indexed)}"
    raise CheckpointError(
        f"{shown(file)} holds tensor {shown(name)} but {shown(str(index))} {where}; write the index again"
    )


def _refuse_strays(index: Path, *, files: list[Path], present: list[Path]) -> None:
    strays = sorted(set(present) - set(files))
    if strays:
        raise CheckpointError(
            f"{shown(str(strays[0]))} is a weight file that {index.name} does not name ({len(strays)} in all); "
            "move it out of the folder, or write the index again"
        )


def _walk(folder: Path, *, weights: frozenset[Path]) -> tuple[tuple[Path, ...], Mapping[Path, str]]:
    """The files to carry over, and what is left behind with the reason."""
    extra: list[Path] = []
    left_out: dict[Path, str] = {}
    for path, reason in _classified(folder):
        if path in weights or (path.parent == folder and path.name in OWN_FILES):
            continue
        if reason:
            left_out[path] = reason
        else:
            extra.append(path)
    key = natural_key
    return tuple(sorted(extra, key=lambda p: key(str(p)))), dict(sorted(left_out.items()))


def _classified(folder: Path) -> Iterator[tuple[Path, str]]:
    """Every file and unentered folder, with the reason to leave it behind ("" to carry it)."""

    def refuse(error: OSError) -> None:
        raise CheckpointError(f"{shown(str(error.filename))} cannot be listed: {read_failure(error)}")

    for root, folders, names in os.walk(folder, onerror=refuse):
        for name in list(folders):
            path = Path(root, name)
            if name in _SKIPPED_FOLDERS or (name.startswith(".") and name.endswith(_HIDDEN)):
                folders.remove(name)
                yield path, "bookkeeping of a tool"
            elif path.is_symlink():  # os.walk does not enter it; a link may lead in circles
                yield path, "link to a folder"
        for name in names:
            path = Path(root, name)
            if path == folder / ADAPTER_CONFIG:  # transformers would load the model that it names instead of this one
                yield path, "of an adapter, which is not merged into the model"
            elif is_weight_file(name):
                yield path, "weights or index of another set or format"
            elif not path.exists():
                raise CheckpointError(f"{shown(str(path))} is a broken link; download the checkpoint again")
            elif kind := kind_of(path.stat().st_mode):
                _refuse_kind(path, kind)
            else:
                yield path, ""
