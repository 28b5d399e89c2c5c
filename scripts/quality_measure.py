"""How bench_quality.py measures: one text, one forward pass, one decode for every tool's output.

A checkpoint in a known container is decoded and its inputs quantized by ``ptqpipe.runtime.load_model``. A folder of
plain weights, with inputs/scales.safetensors beside them where inputs have static scales or factors, is a dump of
weights that a tool has quantized and decoded itself: the same input quantizers are put on the layers whose weights it
changed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from ptqpipe.check.evaluate.bootstrap import cluster_sums, standard_error
from ptqpipe.check.evaluate.measures import perplexity
from ptqpipe.check.evaluate.scores import Logits, Scores, Window, model_logits, score
from ptqpipe.check.evaluate.tokenized_text import read_text
from ptqpipe.numerics.schemes import Activation
from ptqpipe.runtime.input_quantizers import InputQuantizer
from ptqpipe.runtime.loading import load_model, load_tokenizer

DYNAMIC = {"mxfp4": Activation.MXFP4, "fp8": Activation.FP8_TOKEN}
WINDOW, ROWS = 256, 128


@dataclass(slots=True)
class Remembered:
    """A model's logits, computed once for every batch of windows."""

    give: Logits
    known: dict[int, torch.Tensor] = field(default_factory=dict)

    def __call__(self, batch: Sequence[Window], tokens: torch.Tensor, /) -> torch.Tensor:
        """As the protocol of ``evaluation.scores`` says."""
        return self.known.setdefault(batch[0].start, self.give(batch, tokens).float())


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


@dataclass(slots=True)
class Baseline:
    """The float model: its weights and its logits on the held-out text; models run on ``device``."""

    texts: Texts
    state: Mapping[str, torch.Tensor]
    reference: Remembered
    perplexity: float
    device: str

    @classmethod
    def of(cls, source: Path, texts: Texts, device: str = "cpu") -> "Baseline":
        """Loads it in float32."""
        model = load_model(source, device=device)
        window = min(texts.window, positions(model))
        reference = Remembered(partial(model_logits, model))
        found = perplexity(score(model, texts.held_out, window=window, reference=reference))
        return cls(texts, model.state_dict(), reference, found.value, device)

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
        scores = score(model, self.texts.held_out, window=self.texts.window, reference=self.reference)
        assert scores.kl is not None
        assert scores.agree is not None
        sums, counts = cluster_sums(scores.kl, scores.cluster)
        return {
            "kl": float(sums.sum() / counts.sum()),
            "standard_error": standard_error(sums, counts),
            "perplexity": perplexity(scores).value,
            "top1_agreement": float(scores.agree.double().mean()),
            "tokens": len(scores.kl),
            "window": self.texts.window,
            "weights": 0 if floats else len(changed),
            "read": "decoded weights" if dump else "checkpoint",
            "kl_windows": [float(f"{value:.6g}") for value in sums],
        }


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
