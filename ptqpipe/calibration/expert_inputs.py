"""What stacked experts are given in two runs of a layer: in the float model, and in the one that is quantized so far.

An expert's tokens are those that the quantized model sends to it. Each of them counts as much as the expert's output
does in that of the layer.
"""

import bisect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from ptqpipe.calibration.activations import Activations
from ptqpipe.calibration.cross_moments import ActivationCache, CrossMoments, CrossSums, Quantizer, arguments
from ptqpipe.calibration.experts import LEAST_TOKENS, routing
from ptqpipe.calibration.runner import BATCH_TOKENS, Layer

STREAMS = 4  # sets of hidden states that there are at once, at most: what enters a stack in both runs, and experts


@dataclass(frozen=True, slots=True)
class ExpertInputs:
    """Inputs of one product of an expert, a row for each of its tokens.

    exact    float32 [n, K] in the float model
    seen     float32 [n, K] in the quantized one
    weights  float32 [n], of which the mean square is 1: what each row counts for
    first    bool [n]: those of the first tokens of windows, which count more in moments
    """

    exact: torch.Tensor
    seen: torch.Tensor
    weights: torch.Tensor
    first: torch.Tensor

    def weighted(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Both, times the weights."""
        return self.exact * self.weights.unsqueeze(1), self.seen * self.weights.unsqueeze(1)

    def part(self, rows: slice) -> "ExpertInputs":
        """Some of the rows."""
        return ExpertInputs(self.exact[rows], self.seen[rows], self.weights[rows], self.first[rows])

    def moments(self, name: str) -> CrossMoments:
        """Means over the weighted rows. NumericsError for inputs, those of ``name``, that are not finite."""
        sums = CrossSums()
        for start in range(0, len(self.weights), BATCH_TOKENS):
            part = self.part(slice(start, start + BATCH_TOKENS))
            sums.add(*part.weighted(), part.first)
        return sums.mean(name)


@dataclass(frozen=True, slots=True)
class StackInputs:
    """What the module ``stack`` of a layer is given, by batch.

    exact, seen  hidden states [n, K] of the float model and of the quantized one, before experts quantize them
    experts      int64 [n, k]: where the quantized model sends each token
    weights      [n, k]: what each of these experts counts for there
    first        bool [n]: the first tokens of windows
    """

    layer: Layer
    stack: str
    exact: Activations
    seen: Activations
    experts: dict[int, torch.Tensor]
    weights: dict[int, torch.Tensor]
    first: dict[int, torch.Tensor]

    @classmethod
    def of(
        cls,
        layer: Layer,
        stack: str,
        *,
        batches: Sequence[int],
        entering: Callable[[int], torch.Tensor],
        parameters: Mapping[str, torch.Tensor],
        quantizers: Mapping[str, Quantizer],
        cache: ActivationCache,
        store: Callable[[], Activations],
    ) -> "StackInputs":
        """Runs both models up to the stack; arguments as in `collect_cross_moments`.

        store  opens a place for hidden states of all batches, which `close` closes
        """
        inputs = cls(layer, stack, store(), store(), {}, {}, {})
        try:
            for batch in batches:
                inputs._add(batch, entering, parameters, quantizers, cache)
        except BaseException:
            inputs.close()
            raise
        return inputs

    def _add(
        self,
        batch: int,
        entering: Callable[[int], torch.Tensor],
        parameters: Mapping[str, torch.Tensor],
        quantizers: Mapping[str, Quantizer],
        cache: ActivationCache,
    ) -> None:
        layer, stack = self.layer, self.stack
        exact = cache.inputs(batch, [stack]) or {
            stack: arguments(layer, [stack], {}, layer.inputs(batch), batch, {})[stack][0]
        }
        left = cache.left(batch, quantizers)
        with cache.reusing(layer, batch):
            stack_arguments = arguments(layer, [stack], left, entering(batch), batch, parameters)[stack]
        places, experts, weights = routing(layer.module.get_submodule(stack), stack_arguments)
        x, seen = exact[stack][places], stack_arguments[0][places]
        # Where each expert has rows of its own, the float model may have sent a token to another one.
        both = x.any(dim=-1) if len(places) < len(stack_arguments[0]) else slice(None)
        self.exact.put(batch, x[both])
        self.seen.put(batch, seen[both])
        self.experts[batch], self.weights[batch] = experts[both].cpu(), weights[both].float().cpu()
        samples, tokens = layer.windows(batch)
        self.first[batch] = (places % (samples * tokens) % tokens == 0)[both].cpu()

    def close(self) -> None:
        self.exact.close()
        self.seen.close()

    def groups(self, batches: Sequence[int], experts: int) -> Iterator[tuple[int, ...]]:
        """All of so many experts, in runs whose `inputs` over these batches take no more memory than the stack's own,
        or are of one expert."""
        sent = torch.stack([torch.bincount(self.experts[b].flatten(), minlength=experts)[:experts] for b in batches])
        rows = sent.sum(0).tolist()
        most = max(sum(len(self.experts[batch]) for batch in batches), *rows)
        yield from _runs(list(itertools.accumulate(rows)), most)

    def inputs(self, experts: Sequence[int], batches: Sequence[int]) -> dict[int, ExpertInputs]:
        """Of the first product of experts, over these batches in their order. One that is given fewer than LEAST_TOKENS
        there has all tokens of the first of them instead, whatever experts they are sent to."""
        parts: dict[int, list[tuple[torch.Tensor, ...]]] = {expert: [] for expert in experts}
        for batch in batches:
            exact, seen = self.exact.get(batch), self.seen.get(batch)
            for expert, rows_of_expert in parts.items():
                token, place = torch.where(self.experts[batch] == expert)
                weights, first = self.weights[batch][token, place], self.first[batch][token]
                rows_of_expert.append((exact[token], seen[token], weights, first))
        inputs: dict[int, ExpertInputs] = {}
        for expert in experts:
            exact, seen, weights, first = (torch.cat(part) for part in zip(*parts.pop(expert), strict=True))
            if len(weights) >= LEAST_TOKENS and bool(weights.any()):
                inputs[expert] = self._moved(exact, seen, weights / weights.square().mean().sqrt(), first)
        if len(inputs) < len(experts):  # one set of tokens for all of the others
            exact, seen = self.exact.get(batches[0]), self.seen.get(batches[0])
            of_others = self._moved(exact, seen, torch.ones(len(exact)), self.first[batches[0]])
            inputs |= {expert: of_others for expert in experts if expert not in inputs}
        return inputs

    def _moved(
        self, exact: torch.Tensor, seen: torch.Tensor, weights: torch.Tensor, first: torch.Tensor
    ) -> ExpertInputs:
        device = self.layer.device
        return ExpertInputs(exact.float().to(device), seen.float().to(device), weights.to(device), first.to(device))


def _runs(before: Sequence[int], most: int) -> Iterator[tuple[int, ...]]:
    """Numbers of experts, in runs of ``most`` tokens; ``before`` says how many tokens those up to each one have."""
    start = 0
    while start < len(before):
        taken = before[start - 1] if start else 0
        stop = bisect.bisect_right(before, taken + most)
        yield tuple(range(start, stop))
        start = stop
