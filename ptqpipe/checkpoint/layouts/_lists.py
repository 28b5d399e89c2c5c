"""Which modules the lists of a config leave unquantized, as the readers of its layout match them.

One answer for weights that are kept and for those that are stored quantized: a list that excludes what has codes is as
wrong as one that misses what has none. Where readers differ, what one of them takes for excluded is excluded, by the
source of their versions in ``models/reader_facts.py``. Knows names, and no tensors.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from fnmatch import translate
from typing import Any

from ptqpipe.checkpoint.patterns import alike, expression
from ptqpipe.checkpoint.tensor_names import experts_of
from ptqpipe.errors import CheckpointError, one_line

# A language model within another model: the files, transformers and vLLM name its modules by different ones of these.
_ROOTS = ("model.language_model.", "language_model.model.", "language_model.", "model.")
_STACK = re.compile(r"(.*\.)?experts\.[^.\d]+$")
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
# What readers make one matrix of, and look for by the name of the whole.
WHOLES = (
    (r"^(?!.*\.experts\.)(.*\.)?[qkv]_proj$", r"\1qkv_proj"),
    (r"^(?!.*\.experts\.)(.*\.)?(gate|up)_proj$", r"\1gate_up_proj"),
    (r"^(.*\.)?(q_a_proj|kv_a_proj_with_mqa)$", r"\1fused_qkv_a_proj"),  # vLLM
    (r"^(.*\.)?(q_a_proj|kv_a_proj_with_mqa)$", r"\1fused_qkv_a_proj_with_mqa"),  # SGLang
)
_HEADS = frozenset({"lm_head", "output_head", "embed_out"})
_BOUNDARY = r"(?:(?<=\.)|(?=\.|$))"  # transformers': an entry ends where a component does
_META = re.compile(r"[*?\[\](){}|\\+^$]")


def is_head(module: str) -> bool:
    """Whether a module is the language-model head by its name."""
    return module.rpartition(".")[2] in _HEADS


def is_stack(module: str) -> bool:
    """Whether a module's name is that of a stack of experts: "...mlp.experts.gate_up_proj"."""
    return _STACK.match(module) is not None


def called(module: str, *, roots: bool = True) -> list[str]:
    """What readers call a module: its name, with ``roots`` under any root that a language model has in theirs; for an
    expert the module of all experts, and for a stack of experts the single ones."""
    names = [module]
    if roots:
        root = next((root for root in _ROOTS if module.startswith(root)), "")
        core = module[len(root) :]
        if root or is_head(module):
            names += [other + core for other in _ROOTS if other != root]
        if is_head(core) or core.startswith(("visual", "vision", "audio")):
            names.append(core)
    experts = [(name, owner) for name in names if (owner := experts_of(name))]
    names += [owner for _, owner in experts]
    names += [f"{owner}.0.{leaf}" for name, owner in experts if is_stack(name) for leaf in _PROJECTIONS]
    return list(dict.fromkeys(names))


def wholes(names: Collection[str]) -> Iterator[str]:
    """Readers' names for the fused modules of these and their neighbours: qkv_proj for q_proj."""
    for pattern, whole in WHOLES:
        for name in names:
            if (other := re.sub(pattern, whole, name)) != name:
                yield other


class Lists:
    """The exclusions in a quantization config, and the modules that readers expect codes for."""

    def __init__(
        self,
        key: str,
        entries: Iterable[str] = (),
        *,
        literal: str = "exact",
        patterns: Mapping[str, str] | None = None,
        suffixes: bool = False,
        also: Callable[[Sequence[str]], str | None] | None = None,
        aims: Callable[[Sequence[str]], bool] | None = None,
        unsure: Callable[[str], bool] | None = None,
    ) -> None:
        """By default entries are whole names.

        key       of the list in config.json
        literal   "exact", "parts" (any run of components of a name) or "inside" (any part of it)
        patterns  entry -> the expression that it is for readers, matched from the beginning of a name
        suffixes  an entry excludes every name that ends with it
        also      what else of config.json excludes a module of these names, in words
        aims      whether readers look for codes of a module of these names that nothing excludes; by default of all
        unsure    whether some readers do so, and others leave the module
        """
        self._key = key
        self._literal = literal
        self._entries = frozenset(entry.rstrip(".") if literal == "parts" else entry for entry in entries if entry)
        self._patterns = dict(patterns or {})
        self._suffixes = tuple(sorted(self._entries)) if suffixes else ()
        self._also, self._aims, self._unsure = also, aims, unsure
        everything = [*self._entries, *self._patterns]
        # A hundred thousand experts are of few kinds, but not for parts of components: "layers.1" is one of layers.10.
        self._kind = str if also is not None or suffixes or literal == "inside" else alike(everything)
        self._roots = any("language_model" in entry for entry in everything) or also is not None
        self._known: dict[str, str | None] = {}

    def excluding(self, module: str) -> str | None:
        """By what readers, or one of them, leave a module unquantized: "lists it under ..."; None where nothing says
        so. CheckpointError for an expression that cannot be matched."""
        kind = self._kind(module)
        if kind not in self._known:
            names = self._called(kind)
            entry = None
            if self._entries or self._patterns:
                more = () if self._literal == "inside" else wholes(names)
                entry = self._by_literal([*names, *more]) or self._by_pattern(names)
            said = None if entry is None else self._under(entry)
            self._known[kind] = said or (None if self._also is None else self._also(names))
        return self._known[kind]

    def aims(self, module: str) -> bool:
        """Whether readers look for codes of a module that nothing excludes."""
        return self._aims is None or self._aims(called(module))

    def unsure(self, module: str) -> bool:
        """Whether some readers look for codes of such a module, and others leave it."""
        return self._unsure is not None and self._unsure(module)

    def refuse(self, modules: Iterable[str]) -> None:
        """CheckpointError for the first of ``modules``, which are stored quantized, that is excluded."""
        for module in modules:
            said = self.excluding(module)
            if said is not None:
                raise CheckpointError(f"{module} {contradicted(said)}")

    def within(self, modules: Iterable[str]) -> Iterator[tuple[str, str]]:
        """(entry, module) where an entry is a part of a name and ends within one of its components, which is enough for
        vLLM in ModelOpt's layout: "layers.1" for layers.10. The first module of each entry."""
        text = "\n".join(modules)
        for entry in sorted(self._entries):
            match = re.search(rf"^.*{re.escape(entry)}(?=[^.\n]).*$", text, re.MULTILINE) if entry in text else None
            if match is not None:
                yield entry, match[0]

    def _called(self, module: str) -> list[str]:
        return called(module, roots=self._roots or not module.startswith("model.layers."))

    def _under(self, entry: str) -> str:
        return f"lists it under {self._key!r} as {one_line(repr(entry), limit=200)}"

    def _by_literal(self, names: Iterable[str]) -> str | None:
        for name in names if self._entries else ():
            if name in self._entries:
                return name
            parts: Iterable[str] = ()
            if self._suffixes and name.endswith(self._suffixes):
                parts = (entry for entry in self._suffixes if name.endswith(entry))
            elif self._literal == "inside":
                parts = (entry for entry in self._entries if entry in name)
            elif self._literal == "parts":
                parts = (run for run in _runs(name) if run in self._entries)
            entry = next(iter(parts), None)
            if entry is not None:
                return entry
        return None

    def _by_pattern(self, names: Iterable[str]) -> str | None:
        both = ((entry, pattern, name) for entry, pattern in self._patterns.items() for name in names)
        return next((entry for entry, pattern, name in both if matched(pattern, name, entry=entry)), None)


def contradicted(said: str, file: str = "config.json") -> str:
    """What is wrong with a weight that is stored quantized, and that ``said`` excludes."""
    return (
        f"is quantized, but {file} {said}; readers take it for a plain weight and drop its codes: correct that entry, "
        "or store the weight plain"
    )


def matched(pattern: str, name: str, *, entry: str) -> bool:
    """Whether an expression of a config matches from the beginning of a name. CheckpointError, naming the ``entry``,
    where that takes too long, or it is none."""
    try:
        return expression(pattern).match(name)
    except ValueError as error:
        shown, name = one_line(repr(entry), limit=200), one_line(name, limit=200)
        raise CheckpointError(f"{shown} in config.json cannot be matched with {name!r}: {error}") from None


def _runs(name: str) -> Iterator[str]:
    parts = name.split(".")
    for start in range(len(parts)):
        for stop in range(start + 1, len(parts) + 1):
            yield ".".join(parts[start:stop])


def listed(described: Mapping[str, Any], *keys: str) -> list[str] | None:
    """The entries of the first of these keys that has any; None where none of them is there. CheckpointError for what
    is no list of strings."""
    lists = [(key, described[key]) for key in keys if described.get(key) is not None]
    for key, value in lists:
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise CheckpointError(f"{key} in config.json must be a list of strings")
    return list(dict.fromkeys(entry for _, value in lists for entry in value)) if lists else None


def by_expressions(entries: Iterable[str]) -> dict[str, str]:
    """The entries ``re:...`` of a list, as compressed-tensors and Quark have them."""
    return {entry: entry[3:] for entry in entries if entry.startswith("re:")}


def by_wildcards(entries: Iterable[str]) -> dict[str, str]:
    """The entries of a list that have wildcards of the shell."""
    return {entry: translate(entry) for entry in entries if re.search(r"[*?\[]", entry) and not entry.startswith("re:")}


def as_transformers(entries: Iterable[str]) -> dict[str, str]:
    """The entries of a list as transformers' ``should_convert_module`` takes them, but for plain names: expressions
    that end where a component of the name does."""
    patterns = {}
    for entry in entries:
        if _META.search(entry) or entry.endswith("."):
            try:
                expression(f"(?:{entry}){_BOUNDARY}")
            except ValueError:
                continue  # no reader matches it with anything: transformers stops, the others compare the text
            patterns[entry] = f"(?:{entry}){_BOUNDARY}"
    return patterns


def components(key: str, entries: Iterable[str]) -> Callable[[Sequence[str]], str | None] | None:
    """Wildcards without a dot that match one component of a name, as SGLang takes them in ModelOpt's layout; None
    where there are none."""
    patterns = {entry: pattern for entry, pattern in by_wildcards(entries).items() if "." not in entry}
    if not patterns:
        return None

    def find(names: Sequence[str]) -> str | None:
        parts = dict.fromkeys(part for name in names for part in name.split("."))
        both = ((entry, pattern, part) for entry, pattern in patterns.items() for part in parts)
        entry = next((entry for entry, pattern, part in both if matched(pattern, part, entry=entry)), None)
        return None if entry is None else f"lists it under {key!r} as {one_line(repr(entry), limit=200)}"

    return find


def plain_head(described: Mapping[str, Any], names: Sequence[str]) -> str | None:
    """Why readers leave the head: nothing says that it is quantized, as GPTQ and AWQ have to."""
    said = described.get("lm_head")
    return f"says lm_head {said!r:.40}" if is_head(names[0]) and said is not True else None


def in_blocks(module: str) -> bool:
    """Whether a module is one of a decoder layer: those that GPTQ and AWQ quantize."""
    inside = re.search(r"(^|\.)(layers|h|blocks|block|layer)\.\d+\.", module) is not None
    return inside and re.search(r"(^|\.)(visual|vision|audio|image|mm)[^.]*\.", module) is None
