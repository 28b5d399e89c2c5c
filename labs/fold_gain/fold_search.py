"""The searches of this study: channels put into blocks, and factors by gradient descent.

Knows tensors and how formats quantize inputs; must not know files.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ptqpipe.numerics.schemes import Activation, Scheme
from ptqpipe.runtime.input_quantizers import GROUP, InputQuantizer

LEVELS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])  # of E2M1
OCTAVES = 9  # below the largest input: what a block scale may be
PER_OCTAVE = 3  # scales in NVFP4's table; their rounding to E4M3 is chance
OWN_ERROR = 0.012  # mean square of what E4M3's rounding leaves of a block's largest value, in squares of the scale
SWEEPS, SWAPS = 2, 6  # over all pairs of blocks, and in a pair
LEAST = 1e-4  # of the error of two blocks: what a swap must save
STEPS, RATE, ROWS = 120, 0.01, 6  # of gradient descent on the logarithms of factors
Sites = Mapping[str, tuple[tuple[str, ...], str]]


@dataclass(frozen=True, slots=True)
class Errors:
    """What channels lose in a block, by the scale that the block has.

    error  [tokens, channels, scales] squared error, weighted by the channel
    own    int64 [tokens, channels]: the scale that a channel would have as the largest of its block
    block  channels of a block
    """

    error: torch.Tensor
    own: torch.Tensor
    block: int

    @classmethod
    def of(cls, x: torch.Tensor, weights: torch.Tensor, scheme: Scheme) -> "Errors":
        """Of inputs [tokens, channels]: MXFP4's scales are its own, NVFP4's a third of an octave apart."""
        size, top = x.abs(), float(x.abs().amax())
        powers = scheme.activation is Activation.MXFP4
        if powers:  # floor of the logarithm, of a significand of 1.75 or more the next one
            significand, exponent = torch.frexp(size)
            own = exponent - 1 + (significand >= 0.875).int()
            last = int(own.max())
            scales = torch.exp2(torch.arange(last - OCTAVES, last + 1).float() - 2)
            own = own - (last - OCTAVES)
        else:
            last = math.ceil(PER_OCTAVE * math.log2(top))
            first = last - OCTAVES * PER_OCTAVE
            scales = torch.exp2(torch.arange(first, last + 1) / PER_OCTAVE) / 6
            own = (torch.log2(size.clamp_min(1e-30)) * PER_OCTAVE).round().int() - first
        own = own.clamp(0, len(scales) - 1).long()
        middles = (LEVELS[1:] + LEVELS[:-1]) / 2
        parts = [LEVELS[torch.bucketize(size / scale, middles)] * scale - size for scale in scales]
        error = torch.stack(parts, dim=2).square_()
        if not powers:
            error.scatter_(2, own[:, :, None], (scales[own].square() * OWN_ERROR)[:, :, None])
        return cls(error.mul_(weights[None, :, None]), own, GROUP[scheme.activation])

    @property
    def channels(self) -> int:
        """How many there are."""
        return self.own.shape[1]

    def total(self, order: torch.Tensor) -> float:
        """The error of one token in the mean, all channels together, in blocks of this order."""
        found = 0.0
        for block in order.split(self.block):
            scale = self.own[:, block].amax(dim=1, keepdim=True)
            found += float(self.error[:, block].sum(dim=1).gather(1, scale).mean())
        return found

    def swaps(self, one: torch.Tensor, two: torch.Tensor) -> tuple[torch.Tensor, float]:
        """(what each swap of a channel of block one with a channel of block two changes [b, b], the error before)."""
        first, second = self.error[:, one], self.error[:, two]
        whole = [part.sum(dim=1) for part in (first, second)]
        (without, most), (without_2, most_2) = _others(self.own[:, one]), _others(self.own[:, two])
        scale = torch.maximum(without[:, :, None], self.own[:, two][:, None, :])
        scale_2 = torch.maximum(without_2[:, :, None], self.own[:, one][:, None, :])
        new = (whole[0][:, None] - first).gather(2, scale)
        new += second.gather(2, scale.transpose(1, 2)).transpose(1, 2)
        new_2 = (whole[1][:, None] - second).gather(2, scale_2)
        new_2 += first.gather(2, scale_2.transpose(1, 2)).transpose(1, 2)
        before = [float(part.gather(1, top[:, None]).mean()) for part, top in zip(whole, (most, most_2), strict=True)]
        return new.mean(dim=0) + new_2.mean(dim=0).t() - sum(before), sum(before)


def _others(own: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(the largest of the other channels of the block [tokens, b], of all of them [tokens])."""
    top = own.topk(2, dim=1)
    others = top.values[:, :1].expand_as(own).clone()
    others.scatter_(1, top.indices[:, :1], top.values[:, 1:])
    return others, top.values[:, 0]


def search(every: Sequence[Errors]) -> torch.Tensor:
    """int64 [channels]: an order that no swap of two blocks' channels makes much better for all of these together."""
    blocks = list(torch.arange(every[0].channels).split(every[0].block))
    generator = torch.Generator().manual_seed(0)
    pairs = [(a, b) for a in range(len(blocks)) for b in range(a + 1, len(blocks))]
    for _ in range(SWEEPS):
        done = 0
        for a, b in (pairs[number] for number in torch.randperm(len(pairs), generator=generator).tolist()):
            done += _swap(blocks, a, b, every)
        if not done:
            break
    return torch.cat(blocks)


def _swap(blocks: list[torch.Tensor], a: int, b: int, every: Sequence[Errors]) -> int:
    """Swaps channels of two blocks while that is better; how many times."""
    for count in range(SWAPS):
        found = [errors.swaps(blocks[a], blocks[b]) for errors in every]
        change = torch.stack([each for each, _ in found]).sum(dim=0)
        i, j = divmod(int(change.argmin()), len(blocks[b]))
        if float(change[i, j]) > -LEAST * sum(before for _, before in found):
            return count
        one, two = blocks[a].clone(), blocks[b].clone()
        one[i], two[j] = blocks[b][j], blocks[a][i]
        blocks[a], blocks[b] = one, two
    return SWAPS


def noise(y: torch.Tensor, factors: torch.Tensor, quantizer: InputQuantizer) -> torch.Tensor:
    """What quantizing inputs y = x / factors [tokens, K] adds to x, with a gradient to the factors.

    Of values below the block's scale the error grows with the scale, of larger ones and of those that become zero with
    the value; what remains is rounding, which counts as given.
    """
    blocks = y.abs().reshape(len(y), -1, GROUP[quantizer.activation])
    largest = blocks.amax(dim=2, keepdim=True).expand_as(blocks).reshape_as(y)
    with torch.no_grad():
        error = quantizer(y) - y
        scale = largest / (5 if quantizer.activation is Activation.MXFP4 else 6)
        small = (y.abs() < scale) & (y.abs() > scale / 4)
        by_scale = error / largest.clamp_min(1e-20)
        by_value = error / torch.where(y == 0, 1.0, y)
    return torch.where(small, factors * largest * by_scale, factors * y * by_value)


def descend(
    model: Any, rows: torch.Tensor, sites: Sites, activation: Activation
) -> tuple[dict[tuple[int, str], tuple[torch.Tensor, torch.Tensor]], dict[str, Any]]:
    """Learns factors by Adam on the KL divergence of the model whose inputs alone are quantized.

    (layer, site) -> (factors [channels] by which inputs are divided, the channel of each column), and the divergence x
    1000, means over the first and the last quarter of the steps.
    """
    logs: dict[tuple[int, str], torch.Tensor] = {}
    columns: dict[tuple[int, str], torch.Tensor] = {}
    largest: dict[tuple[int, str], torch.Tensor] = {}
    handles = []
    running = [False]

    def hook(key: tuple[int, str], args: tuple[torch.Tensor, ...]) -> Any:
        x = args[0].reshape(-1, args[0].shape[-1])
        if not running[0]:
            amax = x.abs().amax(dim=0)
            largest[key] = torch.maximum(largest[key], amax) if key in largest else amax
            return None
        factors = logs[key].exp()[columns[key]]
        static = activation.static_max
        scale = None if static is None else float((largest[key] / factors.detach()).amax()) / static
        added = noise(x.detach() / factors, factors, InputQuantizer(activation, scale))
        return (args[0] + added.reshape_as(args[0]), *args[1:])

    for i, layer in enumerate(model.model.layers):
        for site, (readers, producer) in sites.items():
            weight, count = layer.get_submodule(producer).weight, layer.get_submodule(readers[0]).weight.shape[1]
            column, head = torch.arange(count), getattr(layer.self_attn, "head_dim", count)
            repeat = count // weight.shape[0]
            columns[i, site] = column if repeat == 1 else column // head // repeat * head + column % head
            logs[i, site] = torch.zeros(weight.shape[0], requires_grad=True)
            for reader in readers:
                module = layer.get_submodule(reader)
                handles.append(module.register_forward_pre_hook(lambda _, args, key=(i, site): hook(key, args)))
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with torch.no_grad():
        for batch in rows.split(16):
            model(batch)
    seen = _learn(model, rows, list(logs.values()), running)
    for handle in handles:
        handle.remove()
    quarter = STEPS // 4
    facts = {
        name: round(1000 * sum(part) / quarter, 2)
        for name, part in (("first", seen[:quarter]), ("last", seen[-quarter:]))
    }
    return {key: (log.detach().exp(), columns[key]) for key, log in logs.items()}, facts


def _learn(model: Any, rows: torch.Tensor, logs: list[torch.Tensor], running: list[bool]) -> list[float]:
    """Takes the steps; the divergence at each. ``running[0]``: whether inputs are quantized."""
    optimizer = torch.optim.Adam(logs, lr=RATE, betas=(0.9, 0.95))
    generator, seen = torch.Generator().manual_seed(0), []
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = RATE * min(1.0, (step + 1) / 10) * (1 - step / STEPS)
        batch = rows[torch.randint(0, len(rows), (ROWS,), generator=generator)]
        running[0] = False
        with torch.no_grad():
            want = model(batch).logits.log_softmax(dim=-1)
        running[0] = True
        found = model(batch).logits.log_softmax(dim=-1)
        divergence = (want.exp() * (want - found)).sum(dim=-1).mean()
        optimizer.zero_grad()
        divergence.backward()
        optimizer.step()
        seen.append(float(divergence.detach()))
    return seen
