"""Trains a small Llama, or mixture of experts, on text files, so that a method can be measured on a model that it was
not made for.

    python -m labs.train_bench_model OUT --data FILE|DIR ... --tokenizer MODEL [--hidden 192 --layers 4 ...]

AdamW, cosine learning rate; products in bfloat16 on GPUs and on CPUs that multiply bfloat16, else in float32. Every
``--save`` steps, and at the end, OUT gets the model (safetensors, config, the tokenizer's files) and state.pt, from
which the same call continues; OUT/training.jsonl has a line for each of these: steps, tokens, seconds, loss of the
training text and of its last twentieth, which is not trained on. Batches follow from ``--seed`` and the number of the
step alone; a call that goes on with other ``--steps`` changes the learning rate of what is left. With ``--minutes`` a
call ends that long after it began, whatever it has reached of the steps: the learning rate falls by the clock then.

With ``--experts`` a trained Llama, the folder ``--start``, becomes a Mixtral with so many copies of each of its MLPs,
two for each token (sparse upcycling, Komatsuzaki et al. 2022, arXiv 2212.05055), which then learn to differ.
"""

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

SUFFIXES = {".txt", ".md", ".rst", ".raw"}
HELD_OUT = 20  # one of so many tokens, at the end of the text
HELD_ROWS = 64  # that the loss is measured on
WARM_UP, WEIGHT_DECAY = 0.02, 0.1  # of the steps; of AdamW
COPY_NOISE = 0.02  # of an expert, as a share of the standard deviation of the MLP that it is a copy of


def read_tokens(paths: list[Path], tokenizer: Any) -> torch.Tensor:
    """int64 ``[T]``: all texts of the files and folders, in the order of their names; one .npy file has tokens ``[T]``
    of this tokenizer already."""
    if paths[0].suffix == ".npy":
        return torch.from_numpy(np.load(paths[0]).astype(np.int64))
    files = [f for path in paths for f in (sorted(path.rglob("*")) if path.is_dir() else [path])]
    texts = [f.read_text(encoding="utf-8", errors="replace") for f in files if f.suffix in SUFFIXES or f in paths]
    if not texts:
        raise SystemExit(f"no text in {', '.join(map(str, paths))}; give files, or folders with {sorted(SUFFIXES)}")
    return torch.tensor([token for text in texts for token in tokenizer(text)["input_ids"]])


def rows_of(tokens: torch.Tensor, starts: torch.Tensor, length: int) -> torch.Tensor:
    """int64 ``[len(starts), length]``."""
    return torch.stack([tokens[int(start) : int(start) + length] for start in starts])


def batch_of(tokens: torch.Tensor, step: int, args: argparse.Namespace) -> torch.Tensor:
    """The rows of a step."""
    generator = torch.Generator().manual_seed(args.seed * 1_000_003 + step)
    rows = rows_of(tokens, torch.randint(len(tokens) - args.length, (args.batch,), generator=generator), args.length)
    return rows.pin_memory() if torch.cuda.is_available() else rows  # a copy that the host does not wait for


def held_out_loss(model: Any, tokens: torch.Tensor, args: argparse.Namespace) -> float:
    """Mean loss of evenly spaced rows, nats a token."""
    starts = torch.linspace(0, len(tokens) - args.length, HELD_ROWS).long()
    rows = rows_of(tokens, starts, args.length).to(model.device)
    with torch.inference_mode(), torch.compiler.set_stance("force_eager"):
        losses = [
            float(model.loss_function(model(part, use_cache=False).logits, part, model.config.vocab_size))
            for part in rows.split(16)
        ]
    return sum(losses) / len(losses)


def rate(step: int, spent: float, args: argparse.Namespace) -> float:
    """The learning rate of a step, ``spent`` of the time being over (0 to 1)."""
    warm = max(1, round(WARM_UP * args.steps))
    done = max((step - warm) / max(1, args.steps - warm), spent)
    return float(args.lr * min(1, (step + 1) / warm) * (0.05 + 0.475 * (1 + math.cos(math.pi * max(0, done)))))


def build(args: argparse.Namespace, vocabulary: int) -> LlamaForCausalLM:
    """A model with random weights."""
    torch.manual_seed(args.seed)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=args.hidden,
        intermediate_size=args.intermediate or args.hidden * 3,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads or args.heads,
        max_position_embeddings=max(256, args.length),
        tie_word_embeddings=args.tie,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config)


def upcycled(args: argparse.Namespace) -> MixtralForCausalLM:
    """A Mixtral that computes about what the Llama does that it is made of."""
    torch.manual_seed(args.seed)
    llama = LlamaForCausalLM.from_pretrained(args.start, dtype=torch.float32)
    shared = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]
    shared += ["num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings"]
    known = {name: getattr(llama.config, name) for name in shared}
    rope = {"rope_parameters": llama.config.rope_parameters, "sliding_window": None}
    experts = {"num_local_experts": args.experts, "num_experts_per_tok": 2}
    model = MixtralForCausalLM(MixtralConfig(**known, **rope, **experts, bos_token_id=None, eos_token_id=None))
    _, unknown = model.load_state_dict(llama.state_dict(), strict=False)
    assert all(".mlp." in name for name in unknown), unknown
    with torch.no_grad():
        for dense, sparse in zip(llama.model.layers, model.model.layers, strict=True):
            first = torch.cat((dense.mlp.gate_proj.weight, dense.mlp.up_proj.weight))
            for stack, w in ((sparse.mlp.experts.gate_up_proj, first), (sparse.mlp.experts.down_proj, None)):
                w = dense.mlp.down_proj.weight if w is None else w
                stack.copy_(w + COPY_NOISE * w.std() * torch.randn_like(stack))
    return model


def train(args: argparse.Namespace, save: Callable[[int, float], None], model: Any, tokens: torch.Tensor) -> None:
    """Steps from where the state stands to the last, or to the end of the time."""
    cuda = model.device.type == "cuda"
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=WEIGHT_DECAY, fused=cuda
    )
    state, first = args.out / "state.pt", 0
    if state.exists():
        found = torch.load(state, map_location=model.device, weights_only=True)
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        first = found["step"]
    routers = {"output_router_logits": True} if args.experts else {}  # the loss is to balance experts, too
    for step in range(first, args.steps):
        spent = (time.monotonic() - args.begun) / (60 * args.minutes) if args.minutes else 0.0
        for group in optimizer.param_groups:
            group["lr"] = rate(step, min(1.0, spent), args)
        rows = batch_of(tokens, step, args).to(model.device, non_blocking=True)
        bfloat16 = cuda or torch.cpu._is_avx512_bf16_supported()
        with torch.autocast(model.device.type, torch.bfloat16, enabled=bfloat16):
            loss = model(rows, labels=rows, use_cache=False, **routers).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        last = step + 1 == args.steps or spent >= 1
        if (step + 1) % args.save == 0 or last:
            part = state.with_suffix(".part")
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}, part)
            part.rename(state)  # whole or not at all
            save(step + 1, loss.item())
        if last:
            return


def parsed() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--data", type=Path, nargs="+", required=True, help="texts, or one .npy file of tokens")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder of a model whose tokenizer is taken")
    for name, value in (("hidden", 192), ("layers", 4), ("heads", 4), ("kv-heads", 0), ("intermediate", 0)):
        parser.add_argument(f"--{name}", type=int, default=value, help="[%(default)s]")
    for name, value in (("steps", 2000), ("batch", 16), ("length", 256), ("save", 200), ("seed", 0), ("threads", 1)):
        parser.add_argument(f"--{name}", type=int, default=value, help="[%(default)s]")
    parser.add_argument("--lr", type=float, default=2e-3, help="[%(default)s]")
    parser.add_argument("--minutes", type=float, default=0, help="end after so long, saving apart [all steps]")
    parser.add_argument("--experts", type=int, default=0, help="copies of each MLP of --start [a Llama from nothing]")
    parser.add_argument("--start", type=Path, help="folder of the Llama that --experts begins with")
    parser.add_argument("--tie", action="store_true", help="the head is the embedding")
    parser.add_argument(
        "--compile", action="store_true", help="compile the decoder layers, which takes a minute or less"
    )
    args = parser.parse_args()
    if bool(args.experts) != bool(args.start):
        parser.error("--experts and --start go together: a mixture of experts begins with a trained Llama")
    args.begun = time.monotonic()
    return args


def main() -> None:
    """Trains, or continues."""
    args = parsed()
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    every = read_tokens(args.data, tokenizer)
    cut = len(every) - len(every) // HELD_OUT
    tokens, held_out = every[:cut], every[cut:]
    if len(held_out) <= args.length:
        raise SystemExit(f"{len(every)} tokens are too few; expected {HELD_OUT * (args.length + 1)} or more")
    made = upcycled(args) if args.experts else build(args, len(tokenizer))
    model: Any = made.to("cuda" if torch.cuda.is_available() else "cpu")
    if args.compile:
        for layer in model.model.layers:  # one by one: all of them run the first one's code
            layer.compile()

    def save(step: int, loss: float) -> None:
        model.save_pretrained(args.out)
        tokenizer.save_pretrained(args.out)
        line = {"steps": step, "tokens": step * args.batch * args.length, "seconds": time.monotonic() - args.begun}
        line |= {"loss": loss, "held_out": held_out_loss(model, held_out, args), "parameters": model.num_parameters()}
        with open(args.out / "training.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)

    train(args, save, model, tokens)


if __name__ == "__main__":
    main()
