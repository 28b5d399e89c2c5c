"""A decode step without the forward of transformers' model: embedding, rotary angles, layers, norm and head, one after
another.

What a model's own code does around its layers takes a millisecond or two of Python a step, a tenth of what a small
model's weights take. It is left out where a model has these parts and nothing else, where every layer has the compiled
forward of ``fused_layers.py``, and where the logits of random steps are the model's own, bit for bit. All other steps
(of prompts, with images, with a hook on a part that is passed over) are the model's.
"""

from collections.abc import Callable
from typing import Any

import torch

from ptqpipe.numerics.kernels.cpu_layer import Layer, run
from ptqpipe.serving.engine.attention import PagedAttention
from ptqpipe.serving.engine.batch import Batch, Span

_MODEL, _DECODER = {"model", "lm_head"}, {"embed_tokens", "layers", "norm", "rotary_emb"}

Forward = Callable[[Batch], torch.Tensor]


class DecodeStep:
    """A model's parts, and the compiled ones of all its layers."""

    def __init__(self, model: Any, layers: list[Layer], attention: PagedAttention) -> None:
        decoder = model.model
        self._embed, self._rotary, self._norm, self._head = (
            decoder.embed_tokens, decoder.rotary_emb, decoder.norm, model.lm_head,
        )  # fmt: skip
        self._layers, self._attention = layers, attention
        called = {self._embed, self._rotary, self._norm, self._head}  # as modules, which call their hooks
        passed = [module for module in model.modules() if module not in called]
        self._hooks = [hooks for part in passed for hooks in (part._forward_hooks, part._forward_pre_hooks)]

    def run(self, batch: Batch) -> torch.Tensor | None:
        """Logits [wanted, vocabulary] within a step (`PagedAttention.during`); None where the step is the model's."""
        where, wanted = self._attention.singles(), batch.wanted
        if where is None or batch.images is not None or not wanted.numel() or any(self._hooks):
            return None
        x = self._embed(batch.tokens[None])
        rotary = self._rotary(x, position_ids=batch.positions()[None])
        outs = run(self._layers, x, rotary, *where)
        if outs is None:
            return None
        last = outs[-1] if wanted.shape == batch.tokens.shape else outs[-1][:, wanted]
        logits: torch.Tensor = self._head(self._norm(last))[0]
        return logits


@torch.inference_mode()
def decode_step(model: Any, layers: list[Layer], attention: PagedAttention, forward: Forward) -> DecodeStep | None:
    """The step of a model whose ``layers`` have these kernels; None for a model with other parts, or other bits.

    forward  float32 logits as the model's own code has them
    The pages must be all zeros, and are so afterwards.
    """
    if {name for name, _ in model.named_children()} != _MODEL or "forward" in vars(model) or model.training:
        return None
    if {name for name, _ in model.model.named_children()} != _DECODER or "forward" in vars(model.model):
        return None
    if not layers or len(layers) != len(model.model.layers):
        return None
    step, size = DecodeStep(model, layers, attention), attention.block_size
    g = torch.Generator().manual_seed(0)
    try:
        for totals in ((size,), (size, size - 1) if size > 1 else (1,)):
            tokens = torch.randint(model.model.embed_tokens.num_embeddings, (len(totals),), generator=g)
            batch = Batch(tokens, torch.arange(len(totals)), tuple(Span(1, total, (0,)) for total in totals))
            with attention.during(batch):
                logits = step.run(batch)
            if logits is None or not torch.equal(logits.float(), forward(batch)):
                return None
        return step
    finally:
        for pages in attention.pages.values():
            pages.keys[0].zero_()
            pages.values[0].zero_()
