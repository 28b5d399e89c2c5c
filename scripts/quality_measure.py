"""How bench_quality.py measures: the same texts, one forward pass, one decode for every tool's output.

A checkpoint in a known container is decoded and its inputs quantized by ``ptqpipe.runtime.load_model``. A folder of
plain weights, with inputs/scales.safetensors beside them where inputs have static scales or factors, is a dump of
weights that a tool has quantized and decoded itself: the same input quantizers are put on the layers whose weights it
changed. What stands in its size.json belongs to its result.
"""

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from ptqpipe.check.evaluate.bootstrap import cluster_sums, standard_error
from ptqpipe.check.evaluate.measures import perplexity
from ptqpipe.check.evaluate.scores import Logits, Scores, Window, model_logits, score, vocabulary_of
from ptqpipe.check.evaluate.tokenized_text import read_text
from ptqpipe.numerics.schemes import Activation
from ptqpipe.runtime.input_quantizers import InputQuantizer
from ptqpipe.runtime.loading import load_model, load_tokenizer

DYNAMIC = {"mxfp4": Activation.MXFP4, "fp8": Activation.FP8_TOKEN}
WINDOW, ROWS = 256, 128
QUESTIONS = 4  # of a chat


@dataclass(slots=True)
class Remembered:
    """A model's logits, computed once for every batch of windows and kept in float32 on the disk: 12,288 tokens of a
    vocabulary of 49,152 are 2.4 GB. bfloat16 would not do: it rounds a logit of 20 by up to 0.06, and half the mean
    square of that, some 6e-4 nats, is as much as an FP8 model's divergence.

    folder      where the files are; they have no names and end with the process. None: the system's for temporary files
    vocabulary  width of the logits; needed where these are scored themselves
    """

    give: Logits
    folder: Path | None = None
    vocabulary: int | None = None
    known: dict[int, torch.Tensor] = field(default_factory=dict)

    def __call__(self, batch: Sequence[Window], tokens: torch.Tensor, /) -> torch.Tensor:
        """As the protocol of ``evaluation.scores`` says."""
        start = batch[0].start
        if start not in self.known:
            logits = self.give(batch, tokens).float()
            with tempfile.NamedTemporaryFile(dir=self.folder) as file:
                logits.numpy().tofile(file.name)
                stored = torch.from_file(file.name, size=logits.numel(), dtype=torch.float32)
            self.known[start] = stored.view(logits.shape)
        return self.known[start]


def positions(model: Any) -> int:
    """Tokens that a model has positions for."""
    return getattr(model.config, "max_position_embeddings", WINDOW)


@dataclass(frozen=True, slots=True)
class Texts:
    """Held-out tokens [T], T a multiple of ``window``, and the tokens that calibration rows are cut from."""

    held_out: torch.Tensor
    calibration: torch.Tensor
    window: int

    def rows(self, seed: int) -> torch.Tensor:
        """[at most 128, window] calibration rows, chosen by the seed among those that do not overlap."""
        cut = len(self.calibration) // self.window
        chosen = torch.randperm(cut, generator=torch.Generator().manual_seed(seed))[:ROWS].sort().values
        return self.calibration[: cut * self.window].view(cut, self.window)[chosen]


def read_texts(model: Path, held_out: Path, calibration: Path, *, tokens: int, shared: bool) -> Texts:
    """The texts of a model. One file for both is divided after the held-out tokens, unless ``shared``."""
    from ptqpipe.runtime.loading import read_config

    tokenizer = load_tokenizer(model)
    window = min(WINDOW, getattr(read_config(model), "max_position_embeddings", WINDOW))
    every = read_text(held_out, lambda: tokenizer).tokens
    count = min(tokens, len(every)) // window * window
    rest = every if shared else every[count:]
    return Texts(
        every[:count], rest if calibration == held_out else read_text(calibration, lambda: tokenizer).tokens, window
    )


def turns(files: Sequence[Path]) -> Iterator[list[dict[str, str]]]:
    """Chats of four questions of the files in turn, each answered by its right choice. A line of a file is
    {"query": "Question: ...", "choices": [...], "gold": its number}.
    """
    rows = zip(*(map(json.loads, file.read_text(encoding="utf-8").splitlines()) for file in files), strict=False)
    chat: list[dict[str, str]] = []
    for row in chain.from_iterable(rows):
        question, answer = row["query"].removeprefix("Question:").strip(), row["choices"][row["gold"]].strip()
        chat += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        if len(chat) == 2 * QUESTIONS:
            yield chat
            chat = []


def chat_tokens(model: Path, files: Sequence[Path], count: int) -> torch.Tensor | None:
    """The first ``count`` tokens of the chats, one after another as the model's template writes each; None where its
    tokenizer has no template."""
    tokenizer: Any = load_tokenizer(model)
    if getattr(tokenizer, "chat_template", None) is None:
        return None
    ids: list[int] = []
    for chat in turns(files):
        text = tokenizer.apply_chat_template(chat, tokenize=False)
        ids += tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(ids) >= count:
            break
    return torch.tensor(ids[:count])


@dataclass(frozen=True, slots=True)
class HeldOut:
    """A text to measure on: its tokens, whole windows of them, and what the float model makes of it."""

    tokens: torch.Tensor
    reference: Remembered
    perplexity: float


@dataclass(slots=True)
class Baseline:
    """The float model: its weights and its logits on held-out texts; models run on ``device``.

    texts     what calibration rows are cut from
    held_out  by the prefix of what is measured on them: "" is the text, "other_" of another kind, "chat_" chats
    window    tokens
    """

    texts: Texts
    state: Mapping[str, torch.Tensor]
    held_out: dict[str, HeldOut]
    window: int
    device: str

    @property
    def perplexities(self) -> dict[str, float]:
        """The float model's, on each text."""
        return {f"{prefix}perplexity": text.perplexity for prefix, text in self.held_out.items()}

    @classmethod
    def of(
        cls,
        source: Path,
        texts: Texts,
        device: str = "cpu",
        *,
        others: Mapping[str, torch.Tensor] | None = None,
        window: int = WINDOW,
        folder: Path | None = None,
    ) -> "Baseline":
        """Loads it in float32. ``others`` are more held-out texts by their prefixes; ``folder`` is for the logits."""
        model = load_model(source, device=device)
        window = min(window, positions(model))
        held_out = {}
        for prefix, tokens in {"": texts.held_out, **(others or {})}.items():
            whole = tokens[: len(tokens) // window * window]
            reference = Remembered(partial(model_logits, model), folder, vocabulary_of(model))
            held_out[prefix] = HeldOut(whole, reference, perplexity(score(reference, whole, window=window)).value)
        return cls(texts, model.state_dict(), held_out, window, device)

    def measure(self, out: Path, fmt: str, *, floats: bool = False) -> dict[str, Any]:
        """KL and perplexity of a checkpoint or dump; ``kl_windows`` are the sums by window, which intervals need.

        floats  of the float weights, inputs quantized as in the checkpoint
        """
        model = load_model(out, device=self.device)
        own = model.state_dict()
        changed = [n for n, w in self.state.items() if w.dim() > 1 and not torch.equal(w.float(), own[n].float())]
        dump = not (out / "hf_quant_config.json").exists() and "quantization_config" not in (
            out / "config.json"
        ).read_text(encoding="utf-8")
        if not changed:
            raise SystemExit(f"{out.name} has quantized nothing")
        if dump:
            quantize_inputs(model, out, fmt, [name.removesuffix(".weight") for name in changed])
        if floats:
            model.float().load_state_dict(self.state)
        measured: dict[str, Any] = {}
        for prefix, text in self.held_out.items():
            scores = score(model, text.tokens, window=self.window, reference=text.reference)
            assert scores.kl is not None
            assert scores.agree is not None
            sums, counts = cluster_sums(scores.kl, scores.cluster)
            measured[f"{prefix}kl"] = float(sums.sum() / counts.sum())
            measured[f"{prefix}perplexity"] = perplexity(scores).value
            if prefix == "":
                measured["standard_error"] = standard_error(sums, counts)
                measured["top1_agreement"] = float(scores.agree.double().mean())
                measured["tokens"], measured["window"] = len(scores.kl), self.window
                by_window = [float(f"{value:.6g}") for value in sums]
        measured["weights"] = 0 if floats else len(changed)
        if (out / "size.json").exists():
            measured |= json.loads((out / "size.json").read_text(encoding="utf-8"))
        measured["read"] = "decoded weights" if dump else "checkpoint"
        return {**measured, "kl_windows": by_window}


def quantize_inputs(model: Any, out: Path, fmt: str, modules: list[str]) -> None:
    """Puts on ``modules`` of a dump the input quantizers that a checkpoint of the format would have."""
    file = out / "inputs" / "scales.safetensors"
    extra = load_file(file) if file.exists() else {}
    for name in modules:
        module = model.get_submodule(name)
        factor, scale = extra.get(f"{name}.pre_quant_scale"), extra.get(f"{name}.input_scale")
        if fmt == "nvfp4_w4a4":
            if scale is None:
                raise SystemExit(f"{out} has no static scale of the input of {name}")
            quantizer = InputQuantizer(Activation.NVFP4_STATIC_GLOBAL, float(scale))
        elif fmt in DYNAMIC:
            quantizer = InputQuantizer(DYNAMIC[fmt])
        else:
            continue
        module.register_forward_pre_hook(hook(quantizer, None if factor is None else factor.to(module.weight.device)))


def hook(quantizer: InputQuantizer, factor: torch.Tensor | None) -> Callable[..., Any]:
    """A forward pre-hook: quantizes x times ``factor``, and takes the factor out again (the weight holds it)."""

    def run(_module: Any, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        x = args[0]
        return (quantizer(x) if factor is None else quantizer(x * factor) / factor, *args[1:])

    return run


def kl_of(model: Any, tokens: torch.Tensor, reference: Remembered) -> Scores:
    """Scores against the reference."""
    return score(model, tokens, window=min(WINDOW, positions(model)), reference=reference)
