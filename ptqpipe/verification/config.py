"""Checks that the config files describe what is stored, against what the container itself would write for it.

The description is written anew from the stored weights and compared: everything for our own output, what readers act on
for another tool's. Must not know how a container stores a scheme, only how to compare two descriptions.
"""

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from ptqpipe.containers import (
    HF_QUANT_CONFIG,
    ConfigRequest,
    Target,
    quantization_config,
    same_value,
)
from ptqpipe.errors import CheckpointError, PtqError
from ptqpipe.families import check_config as check_names, doubts, fails_either_way
from ptqpipe.json_values import short_json
from ptqpipe.patterns import expression
from ptqpipe.plan import conv1d_leaves, is_matrix
from ptqpipe.recipe import failing_facts
from ptqpipe.source import Source
from ptqpipe.verification.findings import Findings

_EMBEDDING = re.compile(r"embed|\bwte\b|\bwpe\b|norm|position", re.IGNORECASE)
_LINEAR = re.compile(r"(^|\.)(lm_head|fc\d?|c_fc|w\d|\w*_?proj|\w*dense\w*)$")
_LISTS = ("ignore", "modules_to_not_convert", "ignored_layers", "exclude")
_NO_KEY = object()


def targets_of(ckpt: Source) -> list[Target]:
    """What is stored quantized, as containers write configs from it."""
    return [Target(w.weight, w.scheme, w.experts, w.transposed) for w in ckpt.stored.values()]


def kept_modules(ckpt: Source) -> list[str]:
    """Modules whose matrices are not quantized."""
    entries = ckpt.reader.entries
    names = [n for n in ckpt.plain if is_matrix(n, entries[n].dtype, entries[n].shape)]
    return [name.removesuffix(".weight") for name in names]


def check_config(ckpt: Source, findings: Findings) -> None:
    """The config files of any quantized checkpoint against its stored weights."""
    if ckpt.container is None:
        return
    files = {"config.json": ckpt.reader.config, HF_QUANT_CONFIG: ckpt.reader.read_json(HF_QUANT_CONFIG)}
    described = quantization_config(ckpt.reader.config)
    expected = _expected(ckpt, findings)
    if expected is not None:
        _check_scalars(described, quantization_config(expected.get("config.json", {})), "config.json", findings)
    for where, message in ckpt.container.config_faults(files, ckpt.stored):
        findings.fault("config", where, message)
    _check_sparsity(described, findings)
    _check_kept_modules(ckpt, described, findings)
    _check_hf_quant_config(ckpt, files[HF_QUANT_CONFIG], (expected or {}).get(HF_QUANT_CONFIG), findings)


def check_model(ckpt: Source, findings: Findings) -> None:
    """The config of the model against the names and shapes of its tensors. CheckpointError where they contradict each
    other."""
    config = ckpt.reader.config
    for line in doubts(config, ckpt.tensors):
        findings.note("config", "config.json", line)
    check_names(config, ckpt.tensors)


def _check_hf_quant_config(
    ckpt: Source, found: Mapping[str, Any] | None, expected: Mapping[str, Any] | None, findings: Findings
) -> None:
    """hf_quant_config.json is there where the container writes one, and says the same."""
    name, nested = HF_QUANT_CONFIG, (found or {}).get("quantization")
    if found is None and expected is not None:
        findings.deviation("config", name, "is missing; TensorRT-LLM reads the quantization from it alone")
    elif found is not None and not isinstance(nested, Mapping):
        findings.fault("config", name, "has no object 'quantization'")
    elif found is not None and not (ckpt.container is not None and ckpt.container.ABILITIES.hf_quant_config):
        findings.fault("config", name, f"describes ModelOpt's layout, but the checkpoint has {ckpt.container_name}")
    elif isinstance(nested, Mapping) and expected is not None:
        _check_scalars(nested, expected["quantization"], name, findings)


def _expected(ckpt: Source, findings: Findings) -> dict[str, dict[str, Any]] | None:
    """The config files that the container would write for what is stored; None where it cannot write them."""
    assert ckpt.container is not None
    targets = targets_of(ckpt)
    reason = next((r for r in map(ckpt.container.supports, dict.fromkeys(t.scheme for t in targets)) if r), None)
    if reason is not None or not targets:
        if findings.own or not targets:
            message = reason or "describes a quantization, but nothing is stored quantized"
            findings.fault("config", "quantization_config", message)
        return None
    try:
        return ckpt.container.configs(ConfigRequest(ckpt.reader.config, targets, kept_modules(ckpt)))
    except PtqError as error:
        findings.deviation("config", "quantization_config", str(error))
        return None


def _check_scalars(found: Mapping[str, Any], expected: Mapping[str, Any], where: str, findings: Findings) -> None:
    """Keys with one plain value mean the same in both."""
    for key, value in expected.items():
        if isinstance(value, Mapping) or key in _LISTS or (isinstance(value, list) and not _numbers(value)):
            continue
        actual = found.get(key, _NO_KEY)
        if actual is _NO_KEY:
            findings.deviation("config", where, f"has no {key}, expected {value!r}; readers may refuse it")
        elif not same_value(actual, value):
            findings.fault("config", where, f"says {key} {actual!r}, but what is stored is {value!r}")


def _numbers(value: list[Any]) -> bool:
    return all(isinstance(item, int) for item in value)


def _check_sparsity(described: Mapping[str, Any], findings: Findings) -> None:
    """No config says that weights are sparse: what is stored never is."""
    sparsity = described.get("sparsity_config")
    if not isinstance(sparsity, Mapping):
        return
    kind = sparsity.get("format")
    if sparsity.get("targets") or kind not in (None, "dense"):
        message = f"says format {kind!r}, targets {short_json(sparsity.get('targets'))}, but what is stored is dense"
        findings.fault("config", "sparsity_config", f"{message}; vLLM refuses it, remove the key")


def _check_kept_modules(ckpt: Source, described: Mapping[str, Any], findings: Findings) -> None:
    """A linear layer that is not quantized is listed as such, so that readers do not look for its codes."""
    ignore = [str(item) for key in _LISTS for item in described.get(key) or []]
    entries = {name: (entry.dtype, entry.shape) for name, entry in ckpt.reader.entries.items()}
    conv1d = conv1d_leaves(entries)
    targets = _targets(described, findings)
    by_name = ckpt.container is not None and ckpt.container.ABILITIES.found_by_name
    for module in kept_modules(ckpt):
        entry = entries.get(f"{module}.weight")  # stacks of experts and their biases are no linear layers
        if entry is None or len(entry[1]) != 2 or _EMBEDDING.search(module) or module.rpartition(".")[2] in conv1d:
            continue
        aimed = targets is None or any(_names(target, module) or target == "Linear" for target in targets)
        if aimed and not by_name and not any(_excludes(i, module) for i in ignore):
            report = findings.fault if findings.own or _LINEAR.search(module) else findings.note
            report("config", module, "is not quantized, but no config list says so; readers look for its codes")


def _targets(described: Mapping[str, Any], findings: Findings) -> list[str] | None:
    """The targets of all config groups, None where the description has no groups."""
    groups = described.get("config_groups")
    if not isinstance(groups, Mapping):
        return None
    found: list[str] = []
    for name, group in groups.items():
        targets = group.get("targets") if isinstance(group, Mapping) else None
        if not isinstance(targets, list):
            findings.fault("config", f"config_groups.{name}", "must be an object with a list of targets")
        else:
            found += map(str, targets)
    return found


def _names(target: str, module: str) -> bool:
    """Whether an entry names a module: exactly, as an expression, or as a wildcard."""
    if target.startswith("re:"):
        try:
            return expression(target[3:]).match(module)
        except ValueError as error:
            raise CheckpointError(f"{target!r} in config.json cannot be matched with {module!r}: {error}") from None
    return target == module or fnmatchcase(module, target)


def _excludes(entry: str, module: str) -> bool:
    """Whether an exclusion covers a module: by name, or the name of a parent."""
    return _names(entry, module) or (not entry.startswith("re:") and module.startswith(entry.rstrip("*.") + "."))


def check_readers(ckpt: Source, source: Source | None, findings: Findings) -> None:
    """What readers get wrong about this checkpoint: about its family, and what the container itself warns of."""
    if ckpt.container is None or not ckpt.stored:
        return
    base = source.reader.config if source is not None else ckpt.reader.config
    _check_structure(ckpt, base, findings)
    targets: Sequence[Target] = targets_of(ckpt)
    try:
        for line in ckpt.container.warnings(targets, base):
            findings.note("readers", ckpt.container_name, line)
    except PtqError as error:
        findings.note("readers", ckpt.container_name, str(error))


def _check_structure(ckpt: Source, config: Mapping[str, Any], findings: Findings) -> None:
    """Weights that the readers of a family do not take quantized; the one reader of ptqpipe's own layout does."""
    if ckpt.container is None or ckpt.container.ABILITIES.own_reader:
        return
    stored = {one.weight.removesuffix(".weight"): one for one in ckpt.stored.values()}
    schemes = {module: one.scheme for module, one in stored.items()}
    for fact, modules in failing_facts(config, schemes, container=ckpt.container_name, kept=kept_modules(ckpt)):
        first = stored.get(modules[0])
        more = f", like {len(modules) - 1} more of its name" if len(modules) > 1 else ""
        again = "convert its source again" + (" without keeping it" if fact.beside else "")
        remedy = "use another reader" if fails_either_way(config, fact) else again
        (findings.fault if fact.unread else findings.note)(
            "readers",
            modules[0] if first is None else first.weight,
            f"is {'kept' if first is None else first.scheme.name}{more}: {fact.fails}; {remedy}",
        )
