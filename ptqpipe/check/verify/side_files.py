"""Checks the files beside weights and configs: those that were written are as they were, and say what the source's say.

What a reader opens decides over the model as its weights do: a chat template, a tokenizer, how answers are drawn, an
adapter. ``checkpoint/files.py`` has the table of these names. Decodes nothing.
"""

import filecmp
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ptqpipe.check.verify.findings import Findings
from ptqpipe.checkpoint import OWN_FILES, PAGES, RECORD_FILE, TOKENS, file_sha256, is_opened
from ptqpipe.checkpoint.json_values import same_json
from ptqpipe.checkpoint.regular_file import read_json
from ptqpipe.conversion.card import CARD, ORIGINAL, card_sha256, is_ours
from ptqpipe.conversion.record import Record
from ptqpipe.models.source import Source

_TEMPLATES = ("chat_template.jinja", "chat_template.json")
# What tools write that save a tokenizer or a processor again, and no number or token depends on.
_RESAVED = frozenset(
    (
        *("transformers_version", "_from_model_config", "is_local", "local_files_only", "backend", "name_or_path"),
        *("tokenizer_class", "processor_class", "tokenizer_file", "tokenizer_type", "model_input_names", "use_fast"),
        *("chat_template", "special_tokens_map_file", "_processor_class", "auto_map", "image_processor_type"),
        *("feature_extractor_type", "clean_up_tokenization_spaces", "model_max_length", "padding_side"),
        *("extra_special_tokens", "additional_special_tokens", "sp_model_kwargs", "use_cache"),
    )
)
_GENERATION = "generation_config.json"
_USUAL = {  # what a generation config means by a key that it leaves out
    **dict.fromkeys(("temperature", "top_p", "repetition_penalty", "length_penalty"), 1.0),
    "top_k": 50,
    "do_sample": False,
    "num_beams": 1,
    "max_length": 20,
}


def check_written_files(ckpt: Source, record: Record, findings: Findings) -> None:
    """Every file that was written with the weights is still there, byte for byte, and none was added that readers open.

    Other files that were added, and pages for people (a model card, the hub's .gitattributes) that were changed, are
    notes.
    """
    folder, index = ckpt.reader.path, ckpt.reader.index
    extra = set(_files_of(ckpt))
    described = {name for name in OWN_FILES - {RECORD_FILE} if (folder / name).is_file()}
    described |= {index.name} if index is not None else set()
    for name in sorted(described - record.files.keys()):
        findings.fault("files", name, f"is not among the files that {RECORD_FILE} lists as written")
    for name in sorted(extra - record.files.keys()):
        if is_opened(name):
            findings.fault("files", name, "was added after conversion, and readers open it: remove it, or add it to "
                           "the source and convert again")  # fmt: skip
        else:
            findings.note("files", name, "was added after conversion")
    for name, written in sorted(record.files.items()):
        wrong = findings.note if name in PAGES else findings.fault
        if name not in extra | described:
            wrong("files", name, f"is missing, though {RECORD_FILE} lists it as written")
        elif (digest := _file_hash(folder / name)) != written:
            hashes = f"sha256 {digest[:12]}..., written {written[:12]}..."
            wrong("files", name, f"is not the file that was written ({hashes}): changed after conversion")


def _file_hash(path: Path) -> str:
    """sha256 of a file; of a model card without what `ptqpipe eval` has put into it since."""
    return card_sha256(path) if path.name == CARD and is_ours(path) else file_sha256(path)


def check_files(ckpt: Source, source: Source, findings: Findings) -> None:
    """Every other file than weights, configs and record equals the source's, byte for byte; another tool's says the
    same in what readers go by."""
    ours, theirs = _files_of(ckpt), _files_of(source)
    if (card := ours.pop(CARD, None)) is not None and is_ours(card):  # made anew; check_written_files knows its hash
        former = theirs.pop(CARD, None)
        theirs |= {ORIGINAL: former} if former is not None and ORIGINAL in ours else {}
    elif card is not None:
        ours[CARD] = card
    if not findings.chosen:
        _check_template(ours, theirs, findings)
    for name in sorted(theirs.keys() - ours.keys() - OWN_FILES):
        findings.choice("files", name, "is in the source, but the checkpoint lacks it")
    for name in sorted(ours.keys() - theirs.keys()):
        # A tokenizer that is saved again gets files that its source need not have: they say what tokenizer.json does.
        alone = name.endswith(".py") or name == "adapter_config.json"
        report = findings.fault if alone or (findings.chosen and is_opened(name)) else findings.note
        report("files", name, "is in the checkpoint, but not in the source" + ("; readers open it" * alone))
    for name in sorted(ours.keys() & theirs.keys()):
        if not filecmp.cmp(ours[name], theirs[name], shallow=False):
            _report_file(name, ours[name], theirs[name], findings)


def _files_of(source: Source) -> dict[str, Path]:
    """Files beside weights and configs, by their names in the folder: also one that `convert` would leave behind, if
    readers open it (the config of an adapter)."""
    reader = source.reader
    named = {path.relative_to(reader.path).as_posix(): path for path in (*reader.extra_files, *reader.left_out)}
    carried = set(reader.extra_files)
    return {name: path for name, path in named.items() if path in carried or is_opened(name)}


def _check_template(ours: Mapping[str, Path], theirs: Mapping[str, Path], findings: Findings) -> None:
    """The chat template that readers use, whichever file it stands in, is the source's."""
    (name, template), (other, wanted) = _template(ours), _template(theirs)
    if template != wanted and template is None:
        findings.note("files", other, "has a chat template in the source, the checkpoint has none")
    elif template != wanted:
        has = "another one" if wanted is not None else "none"
        findings.fault("files", name, f"has a chat template, the source has {has}: the model is asked with other words")


def _template(files: Mapping[str, Path]) -> tuple[str, Any]:
    """(file, chat template) that readers use: of its own file before that of the tokenizer's config; None for none."""
    if (path := files.get(_TEMPLATES[0])) is not None:
        return _TEMPLATES[0], path.read_text("utf-8", errors="replace").rstrip("\n")
    for name in (_TEMPLATES[1], "tokenizer_config.json"):
        content = read_json(files[name]) if name in files else None
        template = content.get("chat_template") if isinstance(content, Mapping) else None
        if template is not None:
            return name, template.rstrip("\n") if isinstance(template, str) else template
    return "tokenizer_config.json", None


def _report_file(name: str, path: Path, original: Path, findings: Findings) -> None:
    """Tools that save a tokenizer again reorder its files; what the tokens are, and what a reader does with them, must
    not change."""
    a, b = (read_json(file) if file.suffix == ".json" else None for file in (path, original))
    if findings.chosen:
        (findings.note if name in PAGES else findings.fault)("files", name, "differs from the source's")
    elif name in _TEMPLATES:
        return  # `_check_template` compares what readers use
    elif a is None or b is None:
        strict = TOKENS.fullmatch(name) or is_opened(name)
        (findings.fault if strict else findings.note)("files", name, "differs from the source's")
    elif a == b:
        findings.note("files", name, "is formatted differently, with the same content as the source's")
    else:
        keys = changed(a, b)
        report = findings.fault if TOKENS.fullmatch(name) or _decisive(name, a, b, keys) else findings.note
        report("files", name, f"differs from the source's in {', '.join(keys) if keys else 'its content'}")


def _decisive(name: str, a: Any, b: Any, keys: Iterable[str]) -> bool:
    """Whether a JSON file that readers open says something else: of how answers are drawn, whatever is there; of tokens
    and images, what both files say."""
    if not is_opened(name) or not isinstance(a, Mapping) or not isinstance(b, Mapping):
        return is_opened(name)
    compared = [key for key in keys if key not in _RESAVED]
    if name == _GENERATION:
        return any(_plain(a.get(k, _USUAL.get(k))) != _plain(b.get(k, _USUAL.get(k))) for k in compared)
    pairs = [(_plain(a[k]), _plain(b[k])) for k in compared if k in a and k in b]
    return any(
        x != y and isinstance(x, Mapping) == isinstance(y, Mapping) for x, y in pairs
    )  # a size: 224, or an object


def _plain(value: Any) -> Any:
    """A token as its text, and one id as itself: files have the first as an object, too, the second as a list."""
    if isinstance(value, list) and len(value) == 1:
        return value[0]
    return value.get("content") if isinstance(value, Mapping) and "content" in value else value


def changed(a: Any, b: Any) -> list[str]:
    """The keys in which two values of JSON files differ; none for what is no object."""
    if not isinstance(a, dict) or not isinstance(b, dict):
        return []
    return sorted(
        str(key) for key in a.keys() | b.keys() if not same_json(a.get(key), b.get(key)) or (key in a) != (key in b)
    )
