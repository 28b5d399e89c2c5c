"""Checks that the config files describe what is stored, against what the container itself would write for it.

The description is written anew from the stored weights and compared: everything for our own output, what readers act on
for another tool's.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ptqpipe.check.verify.findings import Findings
from ptqpipe.checkpoint.json_values import short_json
from ptqpipe.checkpoint.layouts import (
    HF_QUANT_CONFIG,
    ConfigRequest,
    Lists,
    Target,
    contradicted,
    is_kv_scale,
    is_stack,
    merged_config,
    quantization_config,
    same_value,
    without_quantization,
)
from ptqpipe.errors import PtqError
from ptqpipe.models.families import check_config as check_names, doubts, fails_either_way, issues_of
from ptqpipe.models.layout_issues import layout_warnings
from ptqpipe.models.source import Source
from ptqpipe.recipe.plan import conv1d_leaves, is_matrix
from ptqpipe.recipe.recipe import matches, reader_issues

_EMBEDDING = re.compile(r"embed|\bwte\b|\bwpe\b|norm|position", re.IGNORECASE)
_LINEAR = re.compile(r"(^|\.)(lm_head|fc\d?|c_fc|w\d|\w*_?proj|\w*dense\w*)$")
_LISTS = ("ignore", "modules_to_not_convert", "ignored_layers", "exclude")
_NO_KEY = object()


def targets_of(ckpt: Source) -> list[Target]:
    """The quantized modules, as containers take them to write configs."""
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
    described = quantization_config(ckpt.config)
    expected = _expected(ckpt, findings)
    if expected is not None:
        _check_scalars(described, quantization_config(expected.get("config.json", {})), "config.json", findings)
    for where, message in ckpt.container.config_faults(files, ckpt.stored):
        findings.fault("config", where, message)
    _check_sparsity(described, findings)
    _check_groups(described, findings)
    lists = {file: ckpt.container.lists(config) for file, config in _descriptions(ckpt, files)}
    for file, excluded in lists.items():
        _check_lists(ckpt, excluded, file, findings)
    _check_agreement(ckpt, lists, findings)
    _check_hf_quant_config(ckpt, files[HF_QUANT_CONFIG], (expected or {}).get(HF_QUANT_CONFIG), findings)


def check_model(ckpt: Source, findings: Findings) -> None:
    """The config of the model against the names and shapes of its tensors. CheckpointError where they contradict each
    other."""
    config = ckpt.reader.config
    for line in doubts(config, ckpt.tensors):
        findings.note("config", "config.json", line)
    check_names(config, ckpt.tensors)


def _check_hf_quant_config(
    ckpt: Source, actual: Mapping[str, Any] | None, expected: Mapping[str, Any] | None, findings: Findings
) -> None:
    """hf_quant_config.json is there where the container writes one, and says the same."""
    name, nested = HF_QUANT_CONFIG, (actual or {}).get("quantization")
    if actual is None and expected is not None:
        findings.deviation("config", name, "is missing; TensorRT-LLM reads the quantization from it alone")
    elif actual is not None and not isinstance(nested, Mapping):
        findings.fault("config", name, "has no object 'quantization'")
    elif actual is not None and not (ckpt.container is not None and ckpt.container.CAPABILITIES.hf_quant_config):
        findings.fault("config", name, f"describes ModelOpt's layout, but the checkpoint has {ckpt.container_name}")
    elif isinstance(nested, Mapping) and expected is not None:
        _check_scalars(nested, expected["quantization"], name, findings)


def _expected(ckpt: Source, findings: Findings) -> dict[str, dict[str, Any]] | None:
    """The config files that the container would write for what is stored; None where it cannot write them."""
    assert ckpt.container is not None
    targets = targets_of(ckpt)
    reason = next((r for r in map(ckpt.container.supports, dict.fromkeys(t.scheme for t in targets)) if r), None)
    if reason is not None or not targets:
        cache = any(map(is_kv_scale, ckpt.plain))  # which may be all that is quantized
        if findings.own or not (targets or cache):
            message = reason or "describes a quantization, but nothing is stored quantized"
            findings.fault("config", "quantization_config", message)
        return None
    try:
        return ckpt.container.configs(ConfigRequest(ckpt.config, targets, kept_modules(ckpt)))
    except PtqError as error:
        findings.deviation("config", "quantization_config", str(error))
        return None


def _check_scalars(stored: Mapping[str, Any], expected: Mapping[str, Any], where: str, findings: Findings) -> None:
    layerwise = () if findings.own or "quantized_layers" not in stored else ("quant_algo", "group_size")
    for key, value in expected.items():
        if isinstance(value, Mapping) or key in _LISTS or (isinstance(value, list) and not _numbers(value)):
            continue
        if key in layerwise or (key == "kv_cache_quant_algo" and value is None and not findings.own):
            continue  # every layer says its own, and was read by it; of caches we know FP8 alone
        actual = stored.get(key, _NO_KEY)
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


def _descriptions(ckpt: Source, files: Mapping[str, Mapping[str, Any] | None]) -> list[tuple[str, Mapping[str, Any]]]:
    """(file, config as containers take it) of each description that readers of the layout go by: some of
    hf_quant_config.json, the others of config.json."""
    assert ckpt.container is not None
    second = files[HF_QUANT_CONFIG]
    if not ckpt.container.CAPABILITIES.hf_quant_config or not isinstance((second or {}).get("quantization"), Mapping):
        return [("config.json", ckpt.config)]
    own = [("config.json", ckpt.config)] if quantization_config(ckpt.reader.config) else []
    return [*own, (HF_QUANT_CONFIG, merged_config(without_quantization(ckpt.reader.config), second))]


def _check_lists(ckpt: Source, lists: Lists, file: str, findings: Findings) -> None:
    """No list excludes what is stored quantized; what is not quantized is listed as such, so that readers do not look
    for its codes."""
    stored = [weight.removesuffix(".weight") for weight in ckpt.stored]
    for module in stored:
        if (said := lists.excluding(module)) is not None:
            findings.fault("config", module, contradicted(said, file))
    for entry, module in lists.within(stored):
        findings.note("config", module, f"has {entry!r} in its name, which {file} lists: vLLM takes it for excluded")
    plain = _built_plain(ckpt)
    for module in _linear_layers(ckpt):
        # A tensor called ".weight" is of no module that a reader could build.
        if not module or not lists.aims(module) or plain(module) or lists.excluding(module) is not None:
            continue
        certain = not lists.unsure(module) and (_LINEAR.search(module) or is_stack(module))
        report = findings.fault if findings.own or certain else findings.note
        lost = f"is not quantized, but no config list says so; readers look for its codes: list it in {file}"
        report("config", module, lost)


def _check_agreement(ckpt: Source, lists: Mapping[str, Lists], findings: Findings) -> None:
    modules = [*(weight.removesuffix(".weight") for weight in ckpt.stored), *_linear_layers(ckpt)]
    for module in modules if len(lists) > 1 else ():
        said = {file: excluded.excluding(module) for file, excluded in lists.items()}
        if None in said.values() and any(said.values()):
            file = next(file for file, text in said.items() if text is None)
            message = f"does not exclude {module} under exclude_modules or ignore, and the other config file does"
            findings.fault("config", file, f"{message}; readers take one of the two: write the same list in both")
            return


def _linear_layers(ckpt: Source) -> list[str]:
    """Kept modules that readers may build quantized: linear layers and stacks of experts."""
    entries = {name: (entry.dtype, entry.shape) for name, entry in ckpt.reader.entries.items()}
    conv1d, modules = conv1d_leaves(entries), []
    for module in kept_modules(ckpt):
        entry = entries.get(f"{module}.weight")
        linear = entry is not None and len(entry[1]) == 2 and module.rpartition(".")[2] not in conv1d
        stacked = is_stack(module) and len((entry or entries.get(module, ("", ())))[1]) == 3
        if (linear and not _EMBEDDING.search(module)) or stacked:
            modules.append(module)
    return modules


def _built_plain(ckpt: Source) -> Callable[[str], bool]:
    """Whether readers build a module unquantized, whatever a config says, and so look for no codes of it."""
    patterns = [
        issue.keep.pattern
        for issue in issues_of(ckpt.reader.config)
        if issue.unsupported and not issue.unless_quantized and not issue.formats and not issue.keep.bits
        and (not issue.containers or ckpt.container_name in issue.containers)
    ]  # fmt: skip
    return lambda module: any(matches(pattern, module) for pattern in patterns)


def _check_groups(described: Mapping[str, Any], findings: Findings) -> None:
    groups = described.get("config_groups")
    for name, group in groups.items() if isinstance(groups, Mapping) else ():
        if not isinstance(group, Mapping) or not isinstance(group.get("targets"), list):
            findings.fault("config", f"config_groups.{name}", "must be an object with a list of targets")


def check_readers(ckpt: Source, source: Source | None, findings: Findings) -> None:
    """Issues of readers with this checkpoint: those of its family, and the container's warnings."""
    if ckpt.container is None or not ckpt.stored:
        return
    base = source.reader.config if source is not None else ckpt.reader.config
    _check_structure(ckpt, base, findings)
    targets: Sequence[Target] = targets_of(ckpt)
    for line in layout_warnings(ckpt.container_name, targets, base):
        findings.note("readers", ckpt.container_name, line)


def _check_structure(ckpt: Source, config: Mapping[str, Any], findings: Findings) -> None:
    """Weights that the readers of a family do not take quantized; the one reader of ptqpipe's own layout does."""
    if ckpt.container is None or ckpt.container.CAPABILITIES.own_reader:
        return
    stored = {one.weight.removesuffix(".weight"): one for one in ckpt.stored.values()}
    schemes = {module: one.scheme for module, one in stored.items()}
    for issue, modules in reader_issues(config, schemes, container=ckpt.container_name, kept=kept_modules(ckpt)):
        first = stored.get(modules[0])
        more = f", like {len(modules) - 1} more of its name" if len(modules) > 1 else ""
        again = "convert its source again" + (" without keeping it" if issue.unless_quantized else "")
        remedy = "use another reader" if fails_either_way(config, issue) else again
        (findings.fault if issue.unsupported else findings.note)(
            "readers",
            modules[0] if first is None else first.weight,
            f"is {'kept' if first is None else first.scheme.name}{more}: {issue.symptom}; {remedy}",
        )
