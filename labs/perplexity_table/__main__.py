"""Perplexity before and after: converts models to several formats and runs what transformers loads.

    python -m labs.perplexity_table MODEL [MODEL ...] --text FILE [--tokens 4096] [--formats nvfp4 mxfp4a16 ...]

Prints one JSON line per model and format: perplexity and mean KL divergence (nats per token) to the float model, with
the activations quantized as the format declares, and whether the logits equal those of our own decode of the weights
(`logits_equal_decode`, for weight-only formats). Needs the hf extra and compressed-tensors.
"""

import argparse
import json
import math
import tempfile
from pathlib import Path
from typing import Any

import torch

import ptqpipe
from ptqpipe.errors import PtqError
from ptqpipe.numerics.qtensor import QTensor
from ptqpipe.numerics.schemes import Activation, get_scheme

WINDOW = 256


def window_of(model: Any) -> int:
    """Tokens in a window: 256, or as many as the model has positions for."""
    return min(WINDOW, getattr(model.config, "max_position_embeddings", WINDOW))


@torch.no_grad()
def log_probs(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """float32 [T, V] log-probabilities in windows that do not overlap."""
    parts = [model(part).logits[0].float().log_softmax(-1) for part in ids.split(window_of(model), dim=1)]
    return torch.cat(parts)


def perplexity(logp: torch.Tensor, ids: torch.Tensor, window: int) -> float:
    """exp of the mean negative log-likelihood of each window's tokens but the first."""
    position = torch.arange(ids.shape[1] - 1)
    inside = (position + 1) % window != 0  # a window's last row predicts the next window's first token
    losses = -logp[:-1].gather(1, ids[0, 1:, None])[:, 0]
    return math.exp(float(losses[inside].double().mean()))


def decoded_state(model: Any, out: Path) -> None:
    """Puts the decode of a checkpoint's weights into a float model."""
    state = model.state_dict()
    with ptqpipe.load_tensors(out) as weights:
        for name, value in weights.items():
            if isinstance(value, QTensor):
                w = value.dequantize()
                state[name].copy_(w if w.shape == state[name].shape and name not in weights.transposed else w.t())


def measure(path: Path, scheme: str, ids: torch.Tensor, reference: torch.Tensor, folder: Path) -> dict[str, Any]:
    """Converts, loads with transformers, and compares with the float model's log-probabilities."""
    from transformers import AutoModelForCausalLM

    out = folder / scheme.replace("/", "-")
    row: dict[str, Any] = {"model": path.parent.name if path.name == "hf" else path.name, "format": scheme}
    container = None
    try:
        done = ptqpipe.convert(path, format=scheme, out=out)
    except PtqError as error:
        row["note"] = str(error)
        container = "ptqpipe"  # our own layout also takes Conv1D; measured on the decoded weights
        done = ptqpipe.convert(path, format=scheme, out=out, container=container)
    decoded: Any = AutoModelForCausalLM.from_pretrained(path, dtype="auto").eval()
    decoded_state(decoded, out)
    own = log_probs(decoded, ids)
    if container is None:
        # compressed-tensors decodes packed weights to bfloat16, which a float32 model cannot multiply with
        dtype = torch.bfloat16 if decoded.dtype == torch.float32 else "auto"
        loaded: Any = AutoModelForCausalLM.from_pretrained(out, dtype=dtype).eval()
        logp = log_probs(loaded, ids)
        row["reader"] = "transformers" + (", bfloat16" if dtype == torch.bfloat16 else "")
        if get_scheme(scheme).activation is Activation.NONE and loaded.dtype == decoded.dtype:
            row["logits_equal_decode"] = bool(torch.equal(logp, own))
    else:
        logp, row["reader"] = own, "ptqpipe's decode"
    kl = (reference.exp() * (reference - logp)).sum(-1)
    row.update(
        perplexity=perplexity(logp, ids, window_of(decoded)),
        kl_mean=float(kl.double().mean()),
        quantized=len(done.record["weights"]),
        kept=len(done.record["kept"]),
        bytes=done.written_bytes,
    )
    return row


def main() -> None:
    """Prints the table as JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--formats", nargs="+", default=["nvfp4", "mxfp4a16", "mxfp4", "fp8", "mxfp8"])
    args = parser.parse_args()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from ptqpipe.runtime.hf import unregister

    unregister()  # this is about what transformers itself reads

    for path in args.models:
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype="auto").eval()
        tokenizer: Any = AutoTokenizer.from_pretrained(path)
        ids = tokenizer(args.text.read_text(encoding="utf-8")[: args.tokens * 8], return_tensors="pt").input_ids
        window = window_of(model)
        ids = ids[:, : min(args.tokens, ids.shape[1]) // window * window]
        reference = log_probs(model, ids)
        name = path.parent.name if path.name == "hf" else path.name
        first = {
            "model": name,
            "format": str(model.dtype).removeprefix("torch."),
            "perplexity": perplexity(reference, ids, window),
        }
        print(json.dumps({**first, "tokens": int(ids.shape[1])}), flush=True)
        with tempfile.TemporaryDirectory() as folder:
            for scheme in args.formats:
                print(json.dumps(measure(path, scheme, ids, reference, Path(folder))), flush=True)


if __name__ == "__main__":
    main()
