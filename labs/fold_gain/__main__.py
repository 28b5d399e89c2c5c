"""What folds beyond AQAS would buy where inputs have 4 bits: the order of channels, and factors that are learned.

    python -m labs.fold_gain MODEL --text FILE --calibration FILE --other FILE [--formats mxfp4 nvfp4_w4a4]
        [--folds none sorted mlp residual factors] [--seed 0] [--nearest]

Prints one JSON line for each format and fold: mean KL x 1000 to the float model on two texts, of codes that
`tune --method gptq` finds (with ``--nearest``: of nearest codes at exact scales), inputs quantized as the format says.
Every fold starts from what `transform --transforms aqas` makes, and leaves the float model's outputs as they are:

    none      AQAS alone
    sorted    channels of each MLP by E[x^2]
    mlp       channels of each MLP (rows of gate and up, columns of down): swaps of two blocks' channels while the error
              of down's quantized inputs on real tokens falls, each channel counted by the squares of its weights
    residual  channels of the residual stream, in the whole model alike, for the inputs behind all norms
    factors   a factor for each channel that AQAS has one for, by gradient descent on the model's KL divergence with
              quantized inputs and float weights, from AQAS's own

"error" is the error of the inputs on tokens that the search has not seen, relative to that before it; "first" and
"last" the divergence x 1000 at the beginning and the end of descent. For Llama-like models without biases whose widths
the formats' blocks divide. Needs the hf extra.
"""

import argparse
import json
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from quality_measure import Remembered, Texts, kl_of, read_texts
from safetensors.torch import load_file, save_file

import ptqpipe
from labs.fold_gain.fold_search import Errors, descend, search
from ptqpipe.check.evaluate.scores import model_logits
from ptqpipe.check.evaluate.tokenized_text import read_text
from ptqpipe.conversion.options import TransformOptions
from ptqpipe.conversion.transform.command import transform
from ptqpipe.numerics.schemes import get_scheme
from ptqpipe.runtime.input_quantizers import GROUP
from ptqpipe.runtime.loading import load_model, load_tokenizer

FOLDS = ("none", "sorted", "mlp", "residual", "factors")
OTHER_TOKENS = 8192
SEEN, JUDGED = 1024, 1024  # tokens that a search sees, and that it is judged by
SITES = {  # what reads each input, and what makes it
    "qkv": (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "input_layernorm"),
    "o": (("self_attn.o_proj",), "self_attn.v_proj"),
    "gate_up": (("mlp.gate_proj", "mlp.up_proj"), "post_attention_layernorm"),
    "down": (("mlp.down_proj",), "mlp.up_proj"),
}
Tensors = dict[str, torch.Tensor]
Inputs = dict[tuple[int, str], torch.Tensor]


def keep(seen: list[torch.Tensor], _: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
    """A hook before a layer: keeps its inputs, a row each."""
    seen.append(args[0].reshape(-1, args[0].shape[-1]))


def inputs_of(model: Any, rows: torch.Tensor, count: int) -> Inputs:
    """(layer, site) -> float32 [count, K]: inputs at tokens drawn from all rows, the same ones everywhere."""
    found: dict[tuple[int, str], list[torch.Tensor]] = {}
    handles = []
    for i, layer in enumerate(model.model.layers):
        for site, (readers, _) in SITES.items():
            seen = found.setdefault((i, site), [])
            handles.append(layer.get_submodule(readers[0]).register_forward_pre_hook(partial(keep, seen)))
    with torch.no_grad():
        for batch in rows.split(16):
            model(batch)
    for handle in handles:
        handle.remove()
    chosen = torch.randperm(rows.numel(), generator=torch.Generator().manual_seed(0))[:count]
    return {key: torch.cat(parts)[chosen] for key, parts in found.items()}


def energy(tensors: Tensors, layer: int, site: str) -> torch.Tensor:
    """float32 [K]: the squares of each column of what reads an input, summed."""
    names = [f"model.layers.{layer}.{reader}.weight" for reader in SITES[site][0]]
    return torch.stack([tensors[name].float().square().sum(dim=0) for name in names]).sum(dim=0)


def order_mlp(tensors: Tensors, layer: int, order: torch.Tensor) -> None:
    """The channels of an MLP in another order."""
    base = f"model.layers.{layer}.mlp"
    for name in ("gate_proj", "up_proj"):
        tensors[f"{base}.{name}.weight"] = tensors[f"{base}.{name}.weight"][order]
    tensors[f"{base}.down_proj.weight"] = tensors[f"{base}.down_proj.weight"][:, order].contiguous()


def order_residual(tensors: Tensors, order: torch.Tensor) -> None:
    """The channels of the residual stream in another order, everywhere: writers have them as rows."""
    for name, tensor in tensors.items():
        writes = name.endswith(("o_proj.weight", "down_proj.weight")) or tensor.dim() == 1
        tensors[name] = (tensor[order] if writes else tensor[:, order]).contiguous()


def fold_mlps(tensors: Tensors, inputs: Inputs, scheme: str, *, swaps: bool) -> dict[str, Any]:
    """Orders every MLP; the errors that it leaves."""
    left = []
    for layer in sorted({layer for layer, _ in inputs}):
        x, weights = inputs[layer, "down"], energy(tensors, layer, "down")
        seen, judge = (Errors.of(part, weights, get_scheme(scheme)) for part in (x[:SEEN], x[SEEN:]))
        start = torch.arange(x.shape[1])
        order = search([seen]) if swaps else x[:SEEN].square().mean(dim=0).argsort(descending=True)
        left.append(round(judge.total(order) / judge.total(start), 4))
        order_mlp(tensors, layer, order)
    return {"error": left}


def fold_residual(tensors: Tensors, inputs: Inputs, scheme: str) -> dict[str, Any]:
    """Orders the residual stream; the error that it leaves behind all norms together."""
    sites = [key for key in inputs if key[1] in ("qkv", "gate_up")]
    weights = {key: energy(tensors, *key) for key in sites}
    seen = [Errors.of(inputs[key][:SEEN], weights[key], get_scheme(scheme)) for key in sites]
    judges = [Errors.of(inputs[key][SEEN:], weights[key], get_scheme(scheme)) for key in sites]
    start, order = torch.arange(seen[0].channels), search(seen)
    before, after = (sum(judge.total(each) for judge in judges) for each in (start, order))
    order_residual(tensors, order)
    return {"error": [round(after / before, 4)]}


def fold_factors(tensors: Tensors, model: Any, rows: torch.Tensor, scheme: str) -> dict[str, Any]:
    """Learns factors and folds them; the divergence before and after on the rows that they were learned from."""
    found, facts = descend(model, rows, SITES, get_scheme(scheme).activation)
    for (layer, site), (factors, columns) in found.items():
        readers, producer = SITES[site]
        name = f"model.layers.{layer}.{producer}.weight"
        tensors[name] = tensors[name] / (factors if tensors[name].dim() == 1 else factors[:, None])
        for reader in readers:
            name = f"model.layers.{layer}.{reader}.weight"
            tensors[name] = tensors[name] * factors[columns]
    return facts


def write_fold(fold: str, floats: Path, out: Path, rows: torch.Tensor, scheme: str) -> dict[str, Any]:
    """Writes the folded float model; what is to be said about the fold."""
    out.mkdir()
    for file in floats.iterdir():
        if file.suffix != ".safetensors" and not file.name.startswith("ptqpipe"):
            (out / file.name).write_bytes(file.read_bytes())
    tensors, model = load_file(floats / "model.safetensors"), load_model(floats)
    facts: dict[str, Any] = {}
    if fold == "factors":
        facts = fold_factors(tensors, model, rows, scheme)
    elif fold != "none":
        inputs = inputs_of(model, rows, SEEN + JUDGED)
        if fold == "residual":
            facts = fold_residual(tensors, inputs, scheme)
        else:
            facts = fold_mlps(tensors, inputs, scheme, swaps=fold == "mlp")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, out / "model.safetensors")
    return facts


def quantize(floats: Path, out: Path, data: Path, scheme: str, rows: torch.Tensor, *, nearest: bool) -> None:
    """Writes the checkpoint that is measured."""
    if nearest:
        ptqpipe.convert(floats, format=scheme, out=out, workers=1)
        return
    codes = out.with_name(f"{out.name}-codes")
    count, length = rows.shape
    ptqpipe.tune(floats, str(data), codes, format=scheme, method="gptq", workers=1, samples=count, seqlen=length)
    ptqpipe.convert(floats, format=scheme, codes=codes, out=out, workers=1)


def check(model: Any, scheme: str) -> None:
    """SystemExit for a model that this cannot fold."""
    block = GROUP[get_scheme(scheme).activation]
    for name, module in model.model.layers.named_modules():
        if not isinstance(module, torch.nn.Linear):
            continue
        bias = "" if getattr(module, "bias", None) is None else " and a bias"
        if bias or module.in_features % block:
            raise SystemExit(
                f"{name} has {module.in_features} inputs{bias}, expected a multiple of {block} and no bias; choose "
                "another model"
            )


def measure(args: argparse.Namespace, texts: Texts, scratch: Path) -> None:
    """Prints the lines."""
    source, rows = load_model(args.model), texts.rows(args.seed)
    for scheme in args.formats:
        check(source, scheme)
    other = read_text(args.other, lambda: load_tokenizer(args.model), max_tokens=OTHER_TOKENS).tokens
    measured = [(text, Remembered(partial(model_logits, source))) for text in (texts.held_out, other)]
    data, stats = scratch / "rows.jsonl", scratch / "stats"
    data.write_text("".join(json.dumps({"input_ids": row.tolist()}) + "\n" for row in rows), encoding="utf-8")
    windows = {"samples": rows.shape[0], "seqlen": rows.shape[1]}
    ptqpipe.calibrate(args.model, str(data), stats, moments="diagonal,block,full", workers=1, **windows)
    name = args.model.parent.name if args.model.name == "hf" else args.model.name
    for scheme in args.formats:
        floats = scratch / f"{scheme}-aqas"
        options = TransformOptions("aqas", dtype="fp32", untie=True, format=scheme)
        transform(args.model, floats, stats=stats, options=options)
        for fold in args.folds:
            folded, out = scratch / f"{scheme}-{fold}", scratch / f"{scheme}-{fold}-quantized"
            facts = write_fold(fold, floats, folded, rows, scheme)
            quantize(folded, out, data, scheme, rows, nearest=args.nearest)
            kls = [kl_of(load_model(out), text, reference).kl for text, reference in measured]
            row = {"model": name, "format": scheme, "fold": fold, "codes": "nearest" if args.nearest else "gptq"}
            row |= {"seed": args.seed, "kl": round(1000 * _mean(kls[0]), 3), "kl_other": round(1000 * _mean(kls[1]), 3)}
            print(json.dumps(row | {"block": GROUP[get_scheme(scheme).activation]} | facts), flush=True)


def _mean(kl: torch.Tensor | None) -> float:
    assert kl is not None
    return float(kl.double().mean())


def main(arguments: Sequence[str] | None = None) -> None:
    """Reads the call."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, required=True, help="held out")
    parser.add_argument("--calibration", type=Path, required=True)
    parser.add_argument("--other", type=Path, required=True, help="of another kind, to measure on, too")
    parser.add_argument("--tokens", type=int, default=24_576)
    parser.add_argument("--formats", nargs="+", default=["mxfp4", "nvfp4_w4a4"])
    parser.add_argument("--folds", nargs="+", default=list(FOLDS), choices=FOLDS)
    parser.add_argument("--seed", type=int, default=0, help="chooses the 128 calibration rows")
    parser.add_argument("--nearest", action="store_true", help="nearest codes instead of GPTQ in order")
    args = parser.parse_args(arguments)
    texts = read_texts(args.model, args.text, args.calibration, tokens=args.tokens, shared=False)
    with tempfile.TemporaryDirectory() as folder:
        measure(args, texts, Path(folder))


if __name__ == "__main__":
    main()
