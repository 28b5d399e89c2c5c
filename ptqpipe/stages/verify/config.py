"""Whether the config files describe what is stored: checked against what the container itself would write for it.

The description is written anew from the stored weights and compared: everything for our own output, what readers act on
for another tool's. Must not know how a container spells a scheme, only how to compare two descriptions.
"""

import json
import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from ptqpipe.containers import Target, quantization_config
from ptqpipe.errors import CheckpointError, PtqError
from ptqpipe.patterns import expression
from ptqpipe.plan import conv1d_leaves, is_matrix
from ptqpipe.recipe import matches, rows_of
from ptqpipe.source import Source
from ptqpipe.stages.verify.findings import Findings
from ptqpipe.stages.verify.structure import plain_tensors

# compressed-tensors' models forbid any other key, so one more is an error in every reader.
_GROUP_KEYS = frozenset({"targets", "weights", "input_activations", "output_activations", "format"})
_ARGUMENT_KEYS = frozenset(
    (
        *("num_bits", "type", "symmetric", "group_size", "strategy", "block_structure", "dynamic", "actorder"),
        *("scale_dtype", "zp_dtype", "observer", "observer_kwargs"),
    )
)
_EMBEDDING = re.compile(r"embed|\bwte\b|\bwpe\b|norm|position", re.IGNORECASE)
_LINEAR = re.compile(r"(^|\.)(lm_head|fc\d?|c_fc|w\d|\w*_?proj|\w*dense\w*)$")
_LISTS = ("ignore", "modules_to_not_convert", "ignored_layers", "exclude")
_EXPERTS_ONLY = frozenset({"gptoss_mxfp4", "ptqpipe"})  # layouts whose readers look for codes by name alone
_CLASSES = frozenset({"Linear", "Conv1D", "Embedding"})  # targets that readers take for classes of layers with weights
_NO_KEY = object()


def targets_of(ckpt: Source) -> list[Target]:
    """What is stored quantized, as containers write configs from it."""
    return [Target(w.weight, w.scheme, w.experts, w.transposed) for w in ckpt.stored.values()]


def kept_modules(ckpt: Source) -> list[str]:
    """Modules whose matrices are not quantized."""
    entries = ckpt.reader.entries
    names = [n for n in plain_tensors(ckpt) if is_matrix(n, entries[n].dtype, entries[n].shape)]
    return [name.removesuffix(".weight") for name in names]


def check_config(ckpt: Source, findings: Findings) -> None:
    """The config of any quantized checkpoint against its stored weights."""
    if ckpt.container is None:
        return
    described = quantization_config(ckpt.reader.config)
    expected = _expected(ckpt, findings)
    if expected is not None:
        _check_scalars(described, quantization_config(expected.get("config.json", {})), "config.json", findings)
        if isinstance(described.get("config_groups"), Mapping) and ckpt.container_name == "compressed_tensors":
            _check_groups(described, ckpt, findings)
    _check_sparsity(described, findings)
    if ckpt.container_name == "compressed_tensors" and described.get("quantization_status") != "compressed":
        found = described.get("quantization_status")
        findings.fault(
            "config", "quantization_status", f"is {found!r}, expected 'compressed'; transformers loads garbage"
        )
    _check_kept_modules(ckpt, described, findings)
    _check_hf_quant_config(ckpt, described, expected, findings)


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
        return ckpt.container.configs(ckpt.reader.config, targets, kept_modules=kept_modules(ckpt), provenance={})
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
        elif _folded(actual) != _folded(value):
            findings.fault("config", where, f"says {key} {actual!r}, but what is stored is {value!r}")


def _numbers(value: list[Any]) -> bool:
    return all(isinstance(item, int) for item in value)


def _folded(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


def _check_groups(described: Mapping[str, Any], ckpt: Source, findings: Findings) -> None:
    """Each config group says exactly what one of the stored schemes needs, in words that readers accept."""
    assert ckpt.container is not None
    wanted = []
    for scheme in dict.fromkeys(w.scheme for w in ckpt.stored.values()):
        files = ckpt.container.configs({}, [Target("m.weight", scheme)], kept_modules=(), provenance={})
        wanted.append(quantization_config(files["config.json"])["config_groups"]["group_0"])
    for name, group in described["config_groups"].items():
        _check_keys(name, group, findings)
        if group.get("weights") is not None and not any(_says(group, other) for other in wanted):
            closest = max(wanted, key=lambda other: _agreement(group, other))
            findings.fault(
                "config", f"config_groups.{name}", f"does not describe what is stored: {_difference(group, closest)}"
            )
    lists = [target for group in described["config_groups"].values() for target in group.get("targets") or []]
    if len(lists) != len(set(lists)):
        twice = next(target for target in lists if lists.count(target) > 1)
        findings.fault("config", "config_groups", f"two groups target {twice!r}; readers differ in which one they take")
    _check_targets(described, ckpt, findings)


def _check_targets(described: Mapping[str, Any], ckpt: Source, findings: Findings) -> None:
    """Every stored weight is aimed at, and every group aims at one: by a module's name, or a class that layers have.

    The container takes any word without a dot for such a class, since names do not tell what class a module has.
    """
    modules = [weight.removesuffix(".weight") for weight in ckpt.stored]
    aimed: set[str] = set()
    for name, group in described["config_groups"].items():
        targets = [str(target) for target in group.get("targets") or []]
        exact = set(targets)
        patterns = [target for target in targets if target.startswith("re:")]
        everything = not _CLASSES.isdisjoint(targets)
        found = [m for m in modules if everything or m in exact or any(_names(p, m) for p in patterns)]
        aimed.update(found)
        if not found and group.get("weights") is not None:
            message = f"targets {_short(targets)}: neither a quantized module nor a class of layers; readers drop it"
            findings.fault("config", f"config_groups.{name}", message)
    lost = [module for module in modules if module not in aimed]
    if lost:
        message = f"target neither {lost[0]!r} nor its class ({len(lost)} such modules); readers drop what is stored"
        findings.fault("config", "config_groups", message)


def _check_sparsity(described: Mapping[str, Any], findings: Findings) -> None:
    """No config says that weights are sparse: what is stored never is."""
    sparsity = described.get("sparsity_config")
    if not isinstance(sparsity, Mapping):
        return
    kind = sparsity.get("format")
    if sparsity.get("targets") or kind not in (None, "dense"):
        message = f"says format {kind!r}, targets {_short(sparsity.get('targets'))}, but what is stored is dense"
        findings.fault("config", "sparsity_config", f"{message}; vLLM refuses it, remove the key")


def _check_keys(name: str, group: Any, findings: Findings) -> None:
    unknown = sorted(set(group) - _GROUP_KEYS)
    for part in ("weights", "input_activations", "output_activations"):
        arguments = group.get(part)
        if isinstance(arguments, Mapping):
            unknown += [f"{part}.{key}" for key in sorted(set(arguments) - _ARGUMENT_KEYS)]
    if unknown:
        findings.fault(
            "config", f"config_groups.{name}", f"has the unknown key {unknown[0]!r}; compressed-tensors refuses it"
        )


def _pairs(group: Mapping[str, Any]) -> dict[str, Any]:
    """What a group says, flat; targets aside."""
    flat: dict[str, Any] = {"format": group.get("format")}
    for part in ("weights", "input_activations"):
        arguments = group.get(part)
        flat[part] = None if arguments is None else "given"
        if isinstance(arguments, Mapping):
            flat.update({f"{part}.{key}": value for key, value in arguments.items() if value is not None})
    return flat


def _says(group: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    return not _difference(group, wanted)


def _agreement(group: Mapping[str, Any], wanted: Mapping[str, Any]) -> int:
    found = _pairs(group)
    return sum(found.get(key) == value for key, value in _pairs(wanted).items())


def _difference(group: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """What readers act on and the group says otherwise, in words; empty when there is nothing."""
    found, expected = _pairs(group), _pairs(wanted)
    defaults = {"symmetric": True, "dynamic": False, "type": "float"}
    decisive = ("num_bits", "type", "symmetric", "group_size", "strategy", "block_structure", "dynamic", "scale_dtype")
    for key in dict.fromkeys([*expected, *(k for k in found if k.rpartition(".")[2] in decisive)]):
        default = defaults.get(key.rpartition(".")[2])
        if found.get(key, default) != expected.get(key, default):
            return f"{key} is {found.get(key)!r}, expected {expected.get(key)!r}"
    return ""


def _check_kept_modules(ckpt: Source, described: Mapping[str, Any], findings: Findings) -> None:
    """A linear layer that is not quantized is listed as such, so that readers do not look for its codes."""
    ignore = [str(item) for key in _LISTS for item in described.get(key) or []]
    entries = {name: (entry.dtype, entry.shape) for name, entry in ckpt.reader.entries.items()}
    conv1d = conv1d_leaves(entries)
    targets = _targets(described, findings)
    for module in kept_modules(ckpt):
        entry = entries.get(f"{module}.weight")  # stacks of experts and their biases are no linear layers
        if entry is None or len(entry[1]) != 2 or _EMBEDDING.search(module) or module.rpartition(".")[2] in conv1d:
            continue
        aimed = targets is None or any(_names(target, module) or target == "Linear" for target in targets)
        if aimed and ckpt.container_name not in _EXPERTS_ONLY and not any(_excludes(i, module) for i in ignore):
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


def _check_hf_quant_config(
    ckpt: Source, described: Mapping[str, Any], expected: Mapping[str, Mapping[str, Any]] | None, findings: Findings
) -> None:
    """hf_quant_config.json and config.json say the same; vLLM and SGLang read one, TensorRT-LLM the other."""
    name = "hf_quant_config.json"
    extra = ckpt.reader.read_json(name)
    wanted = expected is not None and name in expected
    if extra is None:
        if wanted:
            findings.deviation("config", name, "is missing; TensorRT-LLM reads the quantization from it alone")
        return
    nested = extra.get("quantization")
    if not isinstance(nested, Mapping):
        findings.fault("config", name, "has no object 'quantization'")
        return
    if ckpt.container_name != "modelopt":
        findings.fault("config", name, f"describes ModelOpt's layout, but the checkpoint has {ckpt.container_name}")
        return
    inner = described.get("quantization") if isinstance(described.get("quantization"), Mapping) else described
    for key, other in (
        ("quant_algo", "quant_algo"),
        ("quantized_layers", "quantized_layers"),
        ("exclude_modules", "ignore"),
    ):
        a, b = nested.get(key) or None, (inner or {}).get(other) or None
        if key == "exclude_modules":
            a, b = (sorted(map(str, names)) if isinstance(names, list) else names for names in (a or [], b or []))
        if b is None and not described:
            continue
        if _folded(a) != _folded(b):
            findings.fault(
                "config", name, f"says {key} {_short(a)}, config.json {_short(b)}; readers take one of the two"
            )
    if expected is not None and name in expected:
        _check_scalars(nested, expected[name]["quantization"], name, findings)


def _short(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:77] + "..."


def check_readers(ckpt: Source, source: Source | None, findings: Findings) -> None:
    """What readers are known to get wrong about this checkpoint: about its family, and in the container's own words."""
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
    if ckpt.container_name == "ptqpipe":
        return
    for row in rows_of(config):
        if not row.fails or (row.containers and ckpt.container_name not in row.containers):
            continue
        wrong = [
            stored
            for stored in ckpt.stored.values()
            if matches(row.keep.pattern, stored.weight.removesuffix(".weight"))
            and (not row.keep.bits or stored.scheme.fmt.element.bits < row.keep.bits)
        ]
        if wrong:
            more = f", like {len(wrong) - 1} more of its name" if len(wrong) > 1 else ""
            (findings.fault if row.unread else findings.note)(
                "readers", wrong[0].weight, f"is {wrong[0].scheme.name}{more}: {row.fails}; convert its source again"
            )
