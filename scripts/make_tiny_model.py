"""Trains the demo model: a small Llama with its own tokenizer, on the documentation of Python's standard library.

Usage: python scripts/make_tiny_model.py [OUT]   (default: ptqpipe/demo_model; needs the extra ``hf``)

The text is what the running interpreter has on disk: docstrings found with ``ast`` (nothing is imported),
comments that are whole sentences, and the topics of ``help()``. Every choice is seeded and the number of steps
is fixed, so one machine with one Python gives the same bytes each time. Prints one JSON line for the corpus,
one every 50 steps (loss and held-out loss in nats per token) and one at the end. OUT gets a standard checkpoint
and ``heldout.txt``: the docstrings of modules that the model never saw, for measuring.
"""

import argparse
import ast
import hashlib
import io
import json
import math
import sysconfig
import time
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

BOS, EOS = "<s>", "</s>"


@dataclass(frozen=True, slots=True)
class Config:
    """Everything that decides the result. The defaults give about 1.4 million weights: below 3 MB in bf16."""

    vocab_size: int = 1024
    hidden_size: int = 256
    intermediate_size: int = 256
    layers: int = 3
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 128
    context: int = 256
    batch: int = 16
    steps: int = 900
    warmup_steps: int = 30
    decay_fraction: float = 0.6
    muon_lr: float = 0.02
    adam_lr: float = 0.006
    weight_decay: float = 0.02
    heldout_chars: int = 32_000
    heldout_document_chars: int = 5_000
    seed: int = 0
    threads: int = 2  # the number decides the order of sums, and with it the bytes


# --- text -----------------------------------------------------------------------------------------------------------


def is_prose(paragraph: str) -> bool:
    """Whether a paragraph is English rather than code, a table or a signature."""
    plain = sum(ch.isalpha() or ch in " ,.'\"()" for ch in paragraph)
    return (
        len(paragraph.split()) >= 5
        and paragraph.isascii()
        and plain >= 0.9 * len(paragraph)
        and paragraph[0].isalpha()
        and paragraph[-1] in ".:"
        and ">>>" not in paragraph
    )


def prose(text: str) -> list[str]:
    """The paragraphs of ``text`` that are prose, each unwrapped into one line."""
    paragraphs = (" ".join(block.split()) for block in text.replace("\r", "").split("\n\n"))
    return [paragraph for paragraph in paragraphs if is_prose(paragraph)]


def docstrings(source: bytes) -> Iterator[str]:
    """The docstrings of one Python file, in the order of its syntax tree."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, kinds):
            doc = ast.get_docstring(node)
            if doc:
                yield doc


def comments(source: bytes) -> Iterator[str]:
    """The comments of one Python file that stand on lines of their own, adjacent lines joined."""
    lines: list[str] = []
    last = 0
    for token in tokenize.tokenize(io.BytesIO(source).readline):
        if token.type != tokenize.COMMENT or not token.line.lstrip().startswith("#"):
            continue
        text = token.string.lstrip("#").strip()
        if not text or token.start[0] != last + 1:
            yield " ".join(lines)
            lines = []
        lines.append(text)
        last = token.start[0]
    yield " ".join(lines)


def help_topics(source: bytes) -> Iterator[str]:
    """The texts of ``pydoc_data/topics.py``: long string constants."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) > 200:
            yield node.value


def documents() -> dict[str, str]:
    """Name to text: one document a module and one a help topic; a paragraph that came before is left out."""
    library = Path(sysconfig.get_paths()["stdlib"])
    seen: set[str] = set()
    found: dict[str, str] = {}

    def add(name: str, texts: Iterable[str]) -> None:
        fresh = list(dict.fromkeys(paragraph for text in texts for paragraph in prose(text) if paragraph not in seen))
        seen.update(fresh)
        if fresh:
            found[name] = "\n\n".join(fresh)

    for path in sorted(library.rglob("*.py")):
        relative = path.relative_to(library)
        if "site-packages" in relative.parts:
            continue
        try:
            if relative.as_posix() == "pydoc_data/topics.py":
                for index, topic in enumerate(help_topics(path.read_bytes())):
                    add(f"topic {index}", [topic])
            else:
                add(relative.as_posix(), docstrings(path.read_bytes()))
                add(f"{relative.as_posix()} comments", comments(path.read_bytes()))
        except (SyntaxError, ValueError):
            continue  # a file that is broken on purpose, for the tests of some tool
    return found


def split(corpus: dict[str, str], config: Config) -> tuple[list[str], str]:
    """Training documents and the held-out text: the docstrings of whole modules, picked by the hash of their name."""
    names = sorted(corpus, key=lambda name: hashlib.sha256(name.encode()).digest())
    heldout: list[str] = []
    for name in names:
        if name.endswith(".py") and "test" not in name and 1_000 <= len(corpus[name]) <= config.heldout_document_chars:
            heldout.append(name)
            if sum(len(corpus[name]) for name in heldout) >= config.heldout_chars:
                break
    train = [corpus[name] for name in names if name.removesuffix(" comments") not in heldout]
    return train, "\n\n".join(corpus[name] for name in heldout) + "\n"


def train_tokenizer(texts: list[str], config: Config) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of ``vocab_size`` tokens that starts every text with BOS."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocab_size,
        special_tokens=[BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    core.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, 0)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=BOS,
        eos_token=EOS,
        clean_up_tokenization_spaces=False,
    )


# --- model ----------------------------------------------------------------------------------------------------------


def new_model(config: Config) -> LlamaForCausalLM:
    """A Llama with tied embeddings, initialized so that each block starts near the identity."""
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.context,
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=1,
            initializer_range=config.hidden_size**-0.5 / 2,
            dtype="float32",
        )
    )
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.mul_(0.1)
    return model


def optimizers(model: LlamaForCausalLM, config: Config) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the blocks, AdamW for embeddings and norms."""
    matrices = [w for name, w in model.named_parameters() if w.ndim == 2 and "embed" not in name]
    rest = [w for name, w in model.named_parameters() if w.ndim != 2 or "embed" in name]
    muon = torch.optim.Muon(matrices, lr=config.muon_lr, momentum=0.95, weight_decay=config.weight_decay)
    adam = torch.optim.AdamW(rest, lr=config.adam_lr, betas=(0.9, 0.95), weight_decay=0.0)
    return [muon, adam]


def lr_factor(step: int, config: Config) -> float:
    """Warm up, hold, then fall linearly to zero over the last ``decay_fraction``."""
    left = (config.steps - step) / (config.steps * config.decay_fraction)
    return min(1.0, (step + 1) / config.warmup_steps, left)


def batches(tokens: Tensor, config: Config) -> Iterator[Tensor]:
    """Windows of ``context + 1`` tokens, int64 [batch, context + 1]; each epoch starts at another offset."""
    generator = torch.Generator().manual_seed(config.seed)
    width = config.context + 1
    while True:
        offset = int(torch.randint(width, (1,), generator=generator))
        count = (tokens.numel() - offset) // width
        windows = tokens[offset : offset + count * width].view(count, width)
        order = torch.randperm(count, generator=generator)
        for picked in order.split(config.batch):
            if picked.numel() == config.batch:
                yield windows[picked]


def next_token_loss(model: LlamaForCausalLM, window: Tensor) -> Tensor:
    """Mean cross entropy in nats per token of int64 [batch, width]; products in bfloat16 where the CPU has them."""
    with torch.autocast("cpu", torch.bfloat16, enabled=torch.cpu._is_avx512_bf16_supported()):
        logits = model(input_ids=window[:, :-1], use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), window[:, 1:].flatten())


@torch.no_grad()
def heldout_loss(model: LlamaForCausalLM, tokens: Tensor, config: Config) -> float:
    """Mean nats per token over consecutive windows of the held-out tokens; the last partial window is left out."""
    width = config.context + 1
    windows = tokens[: tokens.numel() // width * width].view(-1, width)
    losses = [next_token_loss(model, part).item() * len(part) for part in windows.split(config.batch)]
    return sum(losses) / len(windows)


def train(model: LlamaForCausalLM, tokens: Tensor, heldout: Tensor, config: Config) -> float:
    """Trains in place, prints JSON lines, returns the last held-out loss."""
    started, started_cpu = time.perf_counter(), time.process_time()
    chosen = optimizers(model, config)
    base_lrs = [optimizer.param_groups[0]["lr"] for optimizer in chosen]
    held = math.inf
    for step, window in zip(range(config.steps), batches(tokens, config), strict=False):
        for optimizer, lr in zip(chosen, base_lrs, strict=True):
            optimizer.param_groups[0]["lr"] = lr * lr_factor(step, config)
        loss = next_token_loss(model, window)
        loss.backward()
        for optimizer in chosen:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if (step + 1) % 50 == 0 or step + 1 == config.steps:
            held = heldout_loss(model, heldout, config)
            seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - started_cpu
            report(step=step + 1, loss=loss.item(), heldout_loss=held, seconds=seconds, cpu_seconds=cpu_seconds)
    return held


# --- the script -----------------------------------------------------------------------------------------------------


def report(**fields: float | int | str) -> None:
    """One JSON line, numbers with four decimals."""
    rounded = {key: round(value, 4) if isinstance(value, float) else value for key, value in fields.items()}
    print(json.dumps(rounded), flush=True)


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Saves the tokenizer under the class name that transformers 4 and 5 both know; 5 writes one of its own."""
    tokenizer.save_pretrained(out)
    path = out / "tokenizer_config.json"
    config = json.loads(path.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    path.write_text(json.dumps(config, indent=2) + "\n")


def sample(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, prompt: str) -> str:
    """What the model goes on with after ``prompt``, greedily."""
    inputs = tokenizer(prompt, return_tensors="pt")
    out = model.generate(inputs["input_ids"], max_new_tokens=48, do_sample=False)
    return str(tokenizer.decode(out[0], skip_special_tokens=True))


def make(out: Path, config: Config) -> float:
    """The whole job: text, tokenizer, training, checkpoint. Returns the held-out loss in nats per token."""
    torch.manual_seed(config.seed)
    torch.set_num_threads(config.threads)
    texts, heldout_text = split(documents(), config)
    tokenizer = train_tokenizer(texts, config)
    tokens = torch.tensor([token for ids in tokenizer(texts)["input_ids"] for token in [*ids, 1]])
    heldout = torch.tensor(tokenizer(heldout_text)["input_ids"])
    model = new_model(config)
    report(
        documents=len(texts),
        train_chars=sum(map(len, texts)),
        train_tokens=tokens.numel(),
        heldout_chars=len(heldout_text),
        heldout_tokens=heldout.numel(),
        parameters=sum(w.numel() for w in model.parameters()),
    )
    held = train(model, tokens, heldout, config)
    model.to(torch.bfloat16).save_pretrained(out)
    save_tokenizer(tokenizer, out)
    (out / "heldout.txt").write_text(heldout_text, encoding="ascii")
    report(sample=sample(model, tokenizer, "This function returns"), config=json.dumps(asdict(config)))
    return held


def main() -> None:
    """Parses the one argument and runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Path(__file__).resolve().parent.parent / "ptqpipe" / "demo_model"
    parser.add_argument("out", type=Path, nargs="?", default=default)
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    make(out, Config())


if __name__ == "__main__":
    main()
