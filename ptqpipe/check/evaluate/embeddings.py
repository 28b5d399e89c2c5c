"""How near a sentence embedder is to its original, on pairs of sentences: the cosine of its embeddings with the
original's, the rank correlation of the pairs' similarities, and how often a sentence has the same nearest one.

The original runs first and is gone before the checkpoint is loaded: embeddings are all that is kept of it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ptqpipe.check.evaluate.bootstrap import RESAMPLES, SEED, interval
from ptqpipe.check.evaluate.sentence_pairs import SentencePairs, pairs_of_text, read_pairs
from ptqpipe.check.evaluate.tokenized_text import SAMPLE, SAMPLE_NAME
from ptqpipe.check.options import EvalOptions
from ptqpipe.checkpoint import name_of, resolve_source
from ptqpipe.errors import NumericsError, UsageError, arg, tokenizer_errors
from ptqpipe.models.embedder import Pooling, is_embedder
from ptqpipe.models.language_model import embedder_model_of
from ptqpipe.models.source import Source
from ptqpipe.run.machine import counting_bar
from ptqpipe.runtime.loading import (
    check_device,
    check_length,
    default_length,
    dtype_of,
    load_rank,
    load_tokenizer,
    read_config,
)
from ptqpipe.runtime.parallel import TensorParallel

_NOT_HERE = ("tasks", "stride", "max_tokens", "samples")
_ROWS = 2**22  # numbers of a matrix of resampled pairs that are in memory at once


@dataclass(frozen=True, slots=True)
class EmbedderJob:
    """What is to be measured, checked.

    longest  tokens of a sentence that are read
    """

    options: EvalOptions
    path: Path
    baseline: Path
    pairs: tuple[SentencePairs, ...]
    longest: int

    @classmethod
    def of(cls, path: Path, baseline: Path | None, options: EvalOptions) -> "EmbedderJob | None":
        """None of a model that is no embedder. UsageError for what cannot be measured, CheckpointError for models
        without a pooling; no weight is read."""
        if not is_embedder(path):
            if options.pairs:
                raise UsageError(
                    f"{arg('pairs')} are for sentence embedders, and {path} is none (it has no modules.json with a "
                    f"Transformer); give text with {arg('data')}"
                )
            return None
        other = next((name for name in _NOT_HERE if getattr(options, name) not in (None, (), 0)), None)
        if other is not None:
            raise UsageError(
                f"{path} is a sentence embedder, and {arg(other)} is for models that continue text; leave it out"
            )
        if baseline is None:
            raise UsageError(
                f"{path} is a sentence embedder, whose embeddings are compared with its original's; add "
                f"{arg('source', 'MODEL')}"
            )
        if not is_embedder(baseline):
            raise UsageError(f"{path} is a sentence embedder, {baseline} is none; give the model that it was made from")
        ours, theirs = (read_config(one, embedder_model_of) for one in (path, baseline))
        sizes = [int(config.get_text_config().hidden_size) for config in (ours, theirs)]
        if sizes[0] != sizes[1]:
            raise UsageError(
                f"{baseline} has embeddings of {sizes[1]} numbers, {path} of {sizes[0]}; only those of one size can be "
                "compared"
            )
        if Pooling.of(path) != Pooling.of(baseline):
            raise UsageError(f"{path} and {baseline} make embeddings in two ways (1_Pooling); give its own original")
        dtype_of(options.dtype, ours)
        check_device(options.device)
        longest = options.seqlen or default_length(ours, path)
        check_length(ours, longest)
        return cls(options, path, baseline, tuple(_pairs(options)), longest)

    @property
    def header(self) -> str:
        """What is measured, line by line."""
        names = f"{name_of(self.path)} against {name_of(self.baseline)}"
        lines = [f"{names}, in {self.options.dtype} on {self.options.device}"]
        lines += [f"{pairs.name}: {len(pairs.first):,} pairs of sentences" for pairs in self.pairs]
        if any(pairs.name == SAMPLE_NAME for pairs in self.pairs):
            better = f"{arg('data')} text like yours, or {arg('pairs')}"
            lines.append(f"(the sample text of the package; for a better test give {better})")
        return "\n".join(lines)

    def rows(self, *, progress: bool) -> list[dict[str, Any]]:
        """A row of the eval file for each file of pairs or text."""
        theirs, ours = (self._embeddings(path, progress) for path in (self.baseline, self.path))
        return [embedding_row(pairs, mine, other) for pairs, mine, other in zip(self.pairs, ours, theirs, strict=True)]

    def _embeddings(self, path: Path, progress: bool) -> list[torch.Tensor]:
        """Of each file, float64 [2, pairs, hidden]."""
        options, pooling, tokenizer = self.options, Pooling.of(path), load_tokenizer(path)
        loaded: dict[str, Any] = {"dtype": options.dtype, "activations": options.activations, "device": options.device}
        model = load_rank(path, TensorParallel(), packed=False, model_of=embedder_model_of, **loaded)
        total = 2 * sum(len(pairs.first) for pairs in self.pairs)
        with counting_bar(total, "sentences", shown=progress, title=path.name) as advance, torch.no_grad():
            sides = [
                torch.stack(
                    [
                        embed(
                            model, tokenizer, pooling, side, longest=self.longest, batch_size=options.batch_size,
                            on_batch=lambda count: advance(count, ""),
                        )
                        for side in (pairs.first, pairs.second)
                    ]
                )
                for pairs in self.pairs
            ]  # fmt: skip
        return sides


def models_of(ckpt: str, source: str | None) -> tuple[Path, Path | None]:
    """The folders of a checkpoint and its original, whose headers are sound."""
    path, other = resolve_source(ckpt), None if source is None else resolve_source(source)
    for model in (path, *([other] if other is not None else [])):  # before one of them is measured
        Source.open(model).close()
    return path, other


def _pairs(options: EvalOptions) -> list[SentencePairs]:
    files = [read_pairs(file) for file in options.pairs]
    if options.data or not files:
        data = options.data or (str(SAMPLE),)
        names = [SAMPLE_NAME if name == str(SAMPLE) else Path(name).name for name in data]
        files += [pairs_of_text(name, shown, field=options.text_field) for name, shown in zip(data, names, strict=True)]
    return files


def embed(
    model: Any,
    tokenizer: Any,
    pooling: Pooling,
    sentences: Sequence[str],
    *,
    longest: int,
    batch_size: int,
    on_batch: Callable[[int], None] = lambda count: None,
) -> torch.Tensor:
    """Embeddings of sentences as sentence-transformers makes them, at length 1; float64 [sentences, hidden] on the CPU.

    Sentences of about one length run together, so that there is little padding.

    NumericsError for an embedding that is not finite.
    """
    order = sorted(range(len(sentences)), key=lambda i: len(sentences[i]))
    vectors: dict[int, torch.Tensor] = {}
    for start in range(0, len(order), batch_size):
        batch = order[start : start + batch_size]
        with tokenizer_errors(f"sentence {batch[0] + 1}"):
            words = tokenizer(
                [sentences[i] for i in batch], padding=True, truncation=True, max_length=longest, return_tensors="pt"
            )
        device = model.get_input_embeddings().weight.device
        words = {name: value.to(device) for name, value in words.items()}
        pooled = pooling.pool(model(**words).last_hidden_state, words["attention_mask"]).double().cpu()
        if not bool(torch.isfinite(pooled).all()):
            raise NumericsError("an embedding is not finite; check the model's weights, or use another dtype")
        vectors |= dict(zip(batch, torch.nn.functional.normalize(pooled), strict=True))
        on_batch(len(batch))
    return torch.stack([vectors[i] for i in range(len(sentences))])


def embedding_row(pairs: SentencePairs, ours: torch.Tensor, theirs: torch.Tensor) -> dict[str, Any]:
    """The row of a file of pairs, from embeddings of length 1, float64 [2, pairs, hidden], of a checkpoint and its
    original. Every interval is 95 % of a bootstrap over pairs."""
    cosines = (ours * theirs).sum(2)
    a, b = ((side[0] * side[1]).sum(1).numpy() for side in (ours, theirs))
    nearest = [(side[0] @ side[1].t()).argmax(1) for side in (ours, theirs)]
    same = (nearest[0] == nearest[1]).double().numpy()
    ones = np.ones(len(a))
    return {
        "data": pairs.name,
        "sha256": pairs.sha256,
        "pairs": len(a),
        "cosine": float(cosines.mean()),
        "cosine_interval": interval((cosines.mean(0).numpy(),), ones),
        "cosine_least": float(cosines.min()),
        "spearman": float(spearman(a, b, ones[None])[0]),
        "interval": spearman_interval(a, b),
        "same_nearest": float(same.mean()),
        "same_nearest_interval": interval((same,), ones),
    }


def spearman(a: np.ndarray, b: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Rank correlation of a and b [n], in which value i occurs counts[r, i] times; [r]. Equal values have the mean of
    their ranks. NaN where all are equal."""
    ranks = [_ranks(values, counts) for values in (a, b)]
    total = counts.sum(1, keepdims=True)
    x, y = (rank - (rank * counts).sum(1, keepdims=True) / total for rank in ranks)
    with np.errstate(invalid="ignore", divide="ignore"):
        correlation: np.ndarray = (counts * x * y).sum(1) / np.sqrt((counts * x * x).sum(1) * (counts * y * y).sum(1))
    return correlation


def _ranks(values: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """[r, n]"""
    _, group = np.unique(values, return_inverse=True)
    order = np.argsort(group, kind="stable")
    starts = np.flatnonzero(np.diff(group[order], prepend=-1))
    sums = np.add.reduceat(counts[:, order], starts, axis=1)
    means: np.ndarray = np.cumsum(sums, axis=1) - (sums - 1) / 2
    return means[:, group]


def spearman_interval(
    a: np.ndarray, b: np.ndarray, *, resamples: int = RESAMPLES, seed: int = SEED
) -> tuple[float, float]:
    """Percentile interval, 95 %, over draws of the pairs with replacement."""
    generator, values = np.random.default_rng(seed), list[np.ndarray]()
    step = max(1, _ROWS // len(a))
    for start in range(0, resamples, step):
        count = min(step, resamples - start)
        counts = generator.multinomial(len(a), np.full(len(a), 1 / len(a)), size=count).astype(np.float64)
        values.append(spearman(a, b, counts))
    low, high = np.nanquantile(np.concatenate(values), [0.025, 0.975])
    return float(low), float(high)
