"""The whole model at once: how far the quantized model's next-token probabilities are from the float model's, and the
gradient of that.

Every decoder layer is in memory. What the float model's last layer returns is kept of every batch, so that its logits
cost one product. Going backwards, each layer is run again from what entered it (``torch.utils.checkpoint``), and the
head goes through a batch in pieces: the activations of one layer and the logits of one piece are in memory at a time.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

import torch
from torch.utils.checkpoint import checkpoint

from ptqpipe.calibration.activations import Activations
from ptqpipe.calibration.backward import pieces
from ptqpipe.calibration.runner import Layer, Runner
from ptqpipe.errors import NumericsError, arg

LayerForward = Callable[[torch.Tensor, int], torch.Tensor]
"""(hidden states that enter a quantized layer, number of the batch) -> those that leave it."""


class ModelPair:
    """Both models on the batches of a runner, all layers in memory. Made by `open`."""

    def __init__(self, runner: Runner, float_layers: Sequence[Layer], entering: Activations) -> None:
        """Use `open`."""
        self.float_layers = float_layers
        # The caller puts the quantized layers here, what enters the first of them, and what gives the head of the float
        # model while it is open, where they are not the float model's.
        self.layers: Sequence[LayerForward] = [layer.forward for layer in float_layers]
        self.entering: Callable[[int], torch.Tensor] = entering.get
        self.float_head: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
        self._runner = runner

    @classmethod
    @contextlib.contextmanager
    def open(cls, runner: Runner, entering: Activations, on_layer: Callable[[str], None]) -> Iterator["ModelPair"]:
        """Runs the float model over every batch, then loads all layers and the head; uses the runner up.

        entering  an empty place for what enters the first layer; the caller closes it
        on_block  called with the name of each layer that the float model has run
        """
        for layer in runner.layers():
            if layer.index == 0:
                for batch in range(layer.batches):
                    entering.put(batch, layer.inputs(batch))
            layer.advance()
            on_layer(layer.name)
        with runner.all_layers() as float_layers:
            yield cls(runner, float_layers, entering)

    def divergence(self, batches: Sequence[int]) -> torch.Tensor:
        """Mean KL(float || quantized) of the next-token probabilities over the tokens of each window of some batches,
        float64 [windows], in nats."""
        with torch.no_grad():
            divergences = [self._of(batch, self._last(batch), share=None)[0] for batch in batches]
        return torch.cat(divergences) / self._runner.batches[batches[0]].shape[1]

    def backward(self, batch: int, share: float) -> float:
        """Adds the gradient of ``share`` times the mean divergence of a batch to whatever the layers depend on, and
        returns that mean, in nats. NumericsError where they are not finite."""
        tokens = self._runner.batches[batch].numel()
        with torch.enable_grad():
            x = self._last(batch)
        sums, gradient = self._of(batch, x.detach(), share=share / tokens)
        total = float(sums.sum())
        if not (total < float("inf") and bool(torch.isfinite(gradient).all())):
            raise NumericsError(
                "the gradients of the KL divergence are not finite; check the model's weights and the data, or use "
                + arg("method", "gptq")
            )
        if x.requires_grad:  # else the head alone is learned
            x.backward(gradient)
        return total / tokens

    def _last(self, batch: int) -> torch.Tensor:
        x = self.entering(batch).to(self._runner.device)
        for layer in self.layers:
            if torch.is_grad_enabled():
                x = checkpoint(layer, x, batch, use_reentrant=False, preserve_rng_state=False)
            else:
                x = layer(x, batch)
        return x

    def _of(self, batch: int, x: torch.Tensor, *, share: float | None) -> tuple[torch.Tensor, torch.Tensor]:
        """(of each window of a batch whose last hidden states are ``x`` the sum of the divergences, float64 on the CPU,
        and the gradient there of ``share`` times the sum of all). What the head depends on gets its gradient, too;
        nothing does where ``share`` is None."""
        runner, sums = self._runner, torch.zeros(len(x), dtype=torch.float64)
        hidden, ids = runner.activations.get(batch), runner.batches[batch]
        gradient = torch.zeros_like(x)
        for piece in pieces(x):
            with torch.no_grad(), self.float_head():
                target = runner.logits(ids[piece], hidden[piece].to(x.device)).float().log_softmax(-1)
            with torch.set_grad_enabled(share is not None):
                rows = x[piece].detach().requires_grad_(share is not None)
                quantized = runner.logits(ids[piece], rows).float().log_softmax(-1)
                losses = (target.exp() * (target - quantized)).sum((1, 2))
            if share is not None:
                (losses.sum() * share).backward()
                assert rows.grad is not None
                gradient[piece] = rows.grad
            sums[piece[0]] += losses.detach().double().cpu()
        return sums, gradient
