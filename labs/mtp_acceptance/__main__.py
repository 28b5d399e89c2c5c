"""Measures how many drafts of a trained multi-token prediction layer are right, and how many steps they save.

Usage: python -m labs.mtp_acceptance [--kinds deepseek_v3 qwen3_next] [--steps 300] [--keep DIR] [--results FILE]

A small model of each kind is trained on the text and with the tokenizer of the demo model (make_tiny_model.py): the
model by the next token, its multi-token prediction layer by the token after that. The layer's forward here is
transformers' own ``MtpLayer`` over a decoder layer of the model's class, so that what is served is compared with what
another program trained. The files have the names in which vendors publish it.

Then ``ptqpipe serve`` answers the same prompts (beginnings of documents that the model never saw, greedy), without and
with ``--speculative mtp``: the float model, and what ``convert --format nvfp4 --mtp keep|fp8|nvfp4`` writes. One JSON
line for each checkpoint and number of drafts:

    accepted    part of the drafted tokens that the model itself chose, from /metrics
    steps       of the engine, without and with drafts
    same        answers of the ``prompts`` that are the same token by token without drafts
"""

import argparse
import json
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import torch
import transformers
from make_tiny_model import Config, batches, documents, save_tokenizer, split
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.modeling_layers import MtpLayer

ROOT = Path(__file__).resolve().parents[2]
LAYERS, CONTEXT, BATCH = 2, 128, 16
PROMPT, NEW = 24, 96  # tokens of a prompt, and of an answer
FORMATS = ("keep", "fp8", "nvfp4")  # of the layer; "" is the float model

_SIZES: dict[str, Any] = {
    "hidden_size": 192, "intermediate_size": 384, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 4, "max_position_embeddings": 256, "tie_word_embeddings": False,
}  # fmt: skip
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 128}


def config_of(kind: str, vocabulary: int) -> Any:
    """The config of a small model of a kind, without its prediction layer."""
    sizes = {**_SIZES, "vocab_size": vocabulary, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None}
    if kind == "qwen3_next":
        return transformers.Qwen3NextConfig(
            **{**sizes, "num_key_value_heads": 2}, **_EXPERTS, head_dim=64, num_experts=4,
            shared_expert_intermediate_size=128, layer_types=["linear_attention", "full_attention"],
            linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=32, linear_value_head_dim=32,
        )  # fmt: skip
    return transformers.DeepseekV3Config(
        **sizes, **_EXPERTS, n_routed_experts=4, n_shared_experts=1, first_k_dense_replace=1, n_group=1, topk_group=1,
        q_lora_rank=96, kv_lora_rank=64, qk_rope_head_dim=32, qk_nope_head_dim=32, v_head_dim=64,
    )  # fmt: skip


class Trained(torch.nn.Module):
    """A model and its prediction layer, with one loss."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        decoder = self.model.get_decoder()
        own = type(config)(**{**config.to_dict(), "layer_types": None, "num_hidden_layers": 1})
        if getattr(config, "layer_types", None):
            own.layer_types = ["full_attention"]
        if hasattr(config, "first_k_dense_replace"):
            own.first_k_dense_replace = 0
        own._attn_implementation = config._attn_implementation
        self.mtp = MtpLayer(own, type(decoder.layers[-1]), type(decoder.norm), 0)
        self.mtp.apply(self.model._init_weights)

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The losses of the model and of its layer, nats a token, for int64 [samples, tokens]."""
        decoder = self.model.get_decoder()
        states = decoder(rows, use_cache=False).last_hidden_state
        places = torch.arange(rows.shape[1] - 1)[None]
        embedded = self.model.get_input_embeddings()(rows[:, 1:])
        turns = decoder.rotary_emb(embedded, position_ids=places)
        guessed = self.mtp(embedded, states[:, :-1], turns, None, places, None)  # no mask: causal
        return self._loss(states[:, :-1], rows[:, 1:]), self._loss(guessed[:, :-1], rows[:, 2:])

    def _loss(self, states: Tensor, wanted: Tensor) -> Tensor:
        logits = self.model.lm_head(states)
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())


def train(trained: Trained, tokens: Tensor, steps: int, *, rate: float = 3e-3) -> dict[str, float]:
    """AdamW over ``steps`` batches; the last losses."""
    optimizer = torch.optim.AdamW(trained.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.02)
    begun, losses = time.process_time(), (torch.zeros(()), torch.zeros(()))
    rows = batches(tokens, Config(context=CONTEXT, batch=BATCH))
    for step, window in zip(range(steps), rows, strict=False):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / 20, (steps - step) / (0.6 * steps))
        losses = trained(window)
        (losses[0] + 0.5 * losses[1]).backward()
        torch.nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return {
        "loss": round(float(losses[0]), 3), "mtp_loss": round(float(losses[1]), 3), "steps": steps,
        "cpu_s": round(time.process_time() - begun, 1),
    }  # fmt: skip


def save(trained: Trained, kind: str, folder: Path) -> None:
    """The checkpoint as published: transformers names a layer behind the last, and config.json does not count it."""
    model, mtp = trained.model, trained.mtp
    decoder = model.get_decoder()
    decoder.layers.append(mtp.mtp_block)
    model.to(torch.bfloat16).save_pretrained(folder)
    file, base = folder / "model.safetensors", f"model.layers.{LAYERS}."
    tensors = load_file(file)
    parts = {"eh_proj": mtp.eh_proj, "enorm": mtp.enorm, "hnorm": mtp.hnorm, "shared_head.norm": mtp.post_norm}
    names = {part: f"{base}{part}" for part in parts}
    edits: dict[str, Any] = {"num_nextn_predict_layers": 1}
    if kind == "qwen3_next":
        tensors = {name.replace(base, "mtp.layers.0."): value for name, value in tensors.items()}
        leaves = ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
        names, edits = {part: f"mtp.{leaf}" for part, leaf in zip(parts, leaves, strict=True)}, {}
    else:
        for copied, of in (("embed_tokens", "model.embed_tokens"), ("shared_head.head", "lm_head")):
            tensors[f"{base}{copied}.weight"] = tensors[f"{of}.weight"].clone()
    for part, module in parts.items():
        tensors[f"{names[part]}.weight"] = module.weight.detach().bfloat16()
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | edits
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def answers(ckpt: Path, prompts: list[list[int]], *, drafts: int) -> tuple[list[str], dict[str, float]]:
    """What the service answers, and the counters of its /metrics."""
    import ptqpipe

    asked: dict[str, Any] = {"speculative": "mtp", "speculative_tokens": drafts} if drafts else {}
    with (
        ptqpipe.serve(ckpt, port=0, dtype="float32", **asked) as service,
        httpx.Client(base_url=service.url, timeout=300) as http,
    ):
        found = []
        for prompt in prompts:
            body = {"prompt": prompt, "max_tokens": NEW, "temperature": 0, "ignore_eos": True}
            answer = http.post("/v1/completions", json=body)
            answer.raise_for_status()
            found.append(answer.json()["choices"][0]["text"])
        lines = http.get("/metrics").text
    counters = re.findall(r"^(?:vllm|ptqpipe)[:_](\w+)\{?[^}\n]*\}? (\S+)$", lines, flags=re.MULTILINE)
    return found, {name: float(value) for name, value in counters}


def measure(ckpt: Path, prompts: list[list[int]], numbers: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    """A line for each number of drafts."""
    plain, before = answers(ckpt, prompts, drafts=0)
    for drafts in numbers:
        found, counted = answers(ckpt, prompts, drafts=drafts)
        drafted, accepted = (counted[f"spec_decode_num_{word}_tokens_total"] for word in ("draft", "accepted"))
        yield {
            "drafts": drafts, "accepted": round(accepted / drafted, 3), "drafted_tokens": int(drafted),
            "steps_without": int(before["engine_steps_total"]), "steps_with": int(counted["engine_steps_total"]),
            "same": sum(a == b for a, b in zip(plain, found, strict=True)), "prompts": len(prompts),
        }  # fmt: skip


def lines_of(kind: str, folder: Path, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Trains, converts and measures a kind."""
    import ptqpipe

    texts, held_out = split(documents(), Config())
    tokenizer = transformers.AutoTokenizer.from_pretrained(ROOT / "ptqpipe" / "demo_model")
    tokens = torch.tensor([token for ids in tokenizer(texts)["input_ids"] for token in [*ids, 1]])
    paragraphs = [ids for ids in tokenizer(held_out.split("\n\n"))["input_ids"] if len(ids) >= PROMPT]
    prompts = [ids[:PROMPT] for ids in paragraphs[:: len(paragraphs) // options.prompts][: options.prompts]]
    torch.manual_seed(0)
    trained, source = Trained(config_of(kind, len(tokenizer))), folder / kind
    told = train(trained, tokens, options.steps)
    yield {"model": kind, "trained": told, "parameters": sum(weight.numel() for weight in trained.parameters())}
    save(trained, kind, source)
    save_tokenizer(tokenizer, source)
    for line in measure(source, prompts, tuple(options.drafts)):
        yield {"model": kind, "format": "bfloat16", "mtp": "bfloat16", **line}
    for mtp in FORMATS:
        out = ptqpipe.convert(source, out=folder / f"{kind}-{mtp}", format="nvfp4", mtp=mtp, workers=1).out
        for line in measure(out, prompts, tuple(options.drafts)):
            yield {"model": kind, "format": "nvfp4", "mtp": mtp, **line}


def main() -> int:
    """Parses the options and measures; 1 where an answer changed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", default=["deepseek_v3", "qwen3_next"])
    parser.add_argument("--steps", type=int, default=300, help="of training [%(default)s]")
    parser.add_argument("--prompts", type=int, default=16, help="[%(default)s]")
    parser.add_argument("--drafts", type=int, nargs="+", default=[1, 2], help="tokens drafted in a step [1 2]")
    parser.add_argument("--keep", type=Path, help="folder for the models [one that is removed]")
    parser.add_argument("--results", type=Path, help="file to which the lines are appended as well")
    options = parser.parse_args()
    torch.set_num_threads(1)
    changed = False
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        for kind in options.kinds:
            for line in lines_of(kind, folder, options):
                changed |= line.get("same") != line.get("prompts")
                print(json.dumps(line), flush=True)
                if options.results:
                    with open(options.results, "a", encoding="utf-8") as file:
                        file.write(json.dumps(line) + "\n")
    return int(changed)


if __name__ == "__main__":
    sys.exit(main())
