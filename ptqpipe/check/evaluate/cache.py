"""A model's log-probabilities on a text, computed once, so that the source of many checkpoints runs once. On disk:

    <cache>/logits/<digest>/key.json          what the digest is of: model, tokens, windows, dtype, versions
    <cache>/logits/<digest>/<start>-<stop>    one batch, as `encode` writes it, then its CRC-32

A batch that was just computed is decoded, too, so a hit and a miss measure the same bits. A file appears under its name
only when it is whole, and one that is damaged is computed again. The least recently used digests go when the limit is
reached. A model is made when a batch is missing.
"""

import hashlib
import json
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from ptqpipe.check.evaluate.scores import Window, batches, model_logits, vocabulary_of, windows as windows_of
from ptqpipe.check.options import CACHE_BYTES, EvalOptions
from ptqpipe.errors import CheckpointError, UsageError, arg, not_finite
from ptqpipe.run.quantities import disk_size, memory_size, option_size

LAYOUT = 2
MOST_IN_MEMORY = 8 << 30  # bytes


class CachedLogits:
    """The log-probabilities of one model on one text (see ``scores.Logits``): from disk, or else computed and stored.

    folder     where they are
    most       bytes that they take there, at most
    stored     whether an earlier run has left any
    """

    def __init__(self, folder: Path, *, vocabulary: int, most: int, make: Callable[[], Any]) -> None:
        """Use `open_cache`."""
        self.folder = folder
        self.vocabulary = vocabulary
        self.most = most
        self.stored = any("-" in file.name for file in folder.iterdir())
        self._make = make
        self._model: Any = None

    def described(self) -> str:
        """A line for people about where the log-probabilities are."""
        what = "the source's log-probabilities"
        if self.stored:
            return f"{what} are in {self.folder} from an earlier run"
        return f"{what} are cached in {self.folder}, at most {disk_size(self.most)} ({arg('cache_size', 0)}: no cache)"

    def __call__(self, batch: Sequence[Window], tokens: torch.Tensor, /) -> torch.Tensor:
        """As ``scores.Logits`` says."""
        stored = self._read(batch)
        return stored if stored is not None else self._compute(batch, tokens)

    def fill(
        self, windows: Sequence[Window], tokens: torch.Tensor, *, on_batch: Callable[[int], None] | None = None
    ) -> None:
        """Computes what is missing, and lets go of the model."""
        for batch in batches(windows, vocabulary=self.vocabulary):
            if self._read(batch) is None:
                self._compute(batch, tokens)
            if on_batch is not None:
                on_batch(sum(window.scored for window in batch))
        self._model = None

    def _compute(self, batch: Sequence[Window], tokens: torch.Tensor) -> torch.Tensor:
        """Runs the model and stores what it gives. A full or read-only disk only means that nothing is stored."""
        if self._model is None:
            self._model = self._make()
        logits = model_logits(self._model, batch, tokens)
        if logits.shape[-1] != self.vocabulary:
            raise CheckpointError(
                f"a model with a vocabulary of {self.vocabulary} gives {logits.shape[-1]} logits; check vocab_size in "
                "config.json"
            )
        raw = encode(logits)
        data = raw.numpy().data
        with suppress(OSError):
            write_atomically(self._file(batch), data, zlib.crc32(data).to_bytes(4, "little"))
        decoded = decode(raw, *logits.shape)
        assert decoded is not None
        return decoded

    def _file(self, batch: Sequence[Window]) -> Path:
        return self.folder / f"{batch[0].start}-{batch[-1].stop}"

    def _read(self, batch: Sequence[Window]) -> torch.Tensor | None:
        try:
            raw = bytearray(self._file(batch).read_bytes())
        except OSError:
            return None
        if len(raw) < 5 or zlib.crc32(memoryview(raw)[:-4]) != int.from_bytes(raw[-4:], "little"):
            return None
        data = torch.frombuffer(raw, dtype=torch.uint8, count=len(raw) - 4)
        return decode(data, sum(window.scored for window in batch), self.vocabulary)


class KeptLogits:
    """The log-probabilities of a model on ``tokens`` int64 [T], once computed and kept in memory: for short texts."""

    def __init__(self, model: Any, tokens: torch.Tensor, window: int, *, begin: int | None = None) -> None:
        """UsageError where they would take more than 8 GiB."""
        self.vocabulary = vocabulary_of(model) or 0
        needed = MOST * self.vocabulary * len(tokens)
        if needed > MOST_IN_MEMORY:
            most = MOST_IN_MEMORY // (MOST * self.vocabulary)
            raise UsageError(
                f"log-probabilities of {len(tokens)} tokens take {memory_size(needed)}; use "
                f"{arg('max_tokens', most)} or less"
            )
        windows = windows_of(len(tokens), window, begin=begin)
        self._kept = {
            batch[0].start: encode(model_logits(model, batch, tokens))
            for batch in batches(windows, vocabulary=self.vocabulary)
        }

    def __call__(self, batch: Sequence[Window], tokens: torch.Tensor, /) -> torch.Tensor:
        logits = decode(self._kept[batch[0].start], sum(window.scored for window in batch), self.vocabulary)
        assert logits is not None
        return logits


def not_cached(nbytes: int, options: EvalOptions) -> str:
    """A line for people where `open_cache` gives nothing for log-probabilities of ``nbytes``."""
    return (
        f"both models are loaded at once: {disk_size(nbytes)} of the source's log-probabilities exceed "
        f"{arg('cache_size', option_size(options.cache_size))} or the free disk space, or {options.cache_dir} is not "
        "writable"
    )


def open_cache(
    cache: Path,
    *,
    key: Mapping[str, Any],
    windows: Sequence[Window],
    vocabulary: int,
    dtype: torch.dtype,
    make: Callable[[], Any],
    limit_bytes: int = CACHE_BYTES,
) -> CachedLogits | None:
    """The store of one model on one text; None where it would not fit ``limit_bytes`` or the disk, or the folder cannot
    be written.

    key         everything that decides the logits, JSON
    vocabulary  width of the logits, to be known before the model is
    dtype       what the model computes in
    make        gives the transformers model
    """
    begin = windows[0].begin if windows else None
    content = {
        **key,
        "begin": begin,
        "vocabulary": vocabulary,
        "dtype": str(dtype),
        "torch": torch.__version__,
        "layout": LAYOUT,
    }
    raw = json.dumps(content, sort_keys=True, indent=1).encode()
    folder = cache / "logits" / hashlib.sha256(raw).hexdigest()[:32]
    needed = store_bytes(windows, vocabulary)
    if needed > limit_bytes:
        return None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / "key.json", raw)  # anew each time: its time says when it was used
        _make_room(cache / "logits", folder, limit_bytes - needed)
        there = sum(file.stat().st_size for file in folder.iterdir())
        if shutil.disk_usage(folder).free < needed - there:
            return None
    except OSError:
        return None
    return CachedLogits(folder, vocabulary=vocabulary, most=needed, make=make)


def store_bytes(windows: Sequence[Window], vocabulary: int) -> int:
    """Upper bound of a text's logit cache on disk."""
    files = len(list(batches(windows, vocabulary=vocabulary)))
    return sum(window.scored for window in windows) * (MOST * vocabulary + 4) + 4 * files


def _make_room(root: Path, keep: Path, room: int) -> None:
    """Removes the least recently used stores until all but ``keep`` have at most ``room`` bytes."""
    stores = []
    for folder in root.iterdir():
        if folder != keep and (folder / "key.json").is_file():
            size = sum(file.stat().st_size for file in folder.iterdir())
            stores.append(((folder / "key.json").stat().st_mtime_ns, size, folder))
    total = sum(size for _, size, _ in stores)
    for _, size, folder in sorted(stores):
        if total <= room:
            return
        shutil.rmtree(folder, ignore_errors=True)
        total -= size


def write_atomically(path: Path, *parts: bytes | memoryview) -> None:
    """A file that appears whole or not at all. OSError where it cannot be written."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            for part in parts:
                file.write(part)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


# Log-probabilities in at most 16 bits each: all that a KL divergence needs of the model that others are compared with.
# -log p is stored in steps of 1/2048 nat up to 32 nats: the high byte of every token of the vocabulary, and the low
# byte of those with less than 16 nats alone. The others, each below 1.2e-7, come back in steps of 1/8 nat. An error d
# of the log-probabilities moves a mean KL by about d^2 / 2, weighted with p: 1e-8 nats, and as much again for what the
# rare tokens add. labs/evaluation/NOTES.md has the measured errors.

STEPS = 2048  # of a nat
MOST = 2  # bytes for each token of the vocabulary, at most
_FINE = 128  # high bytes below it have a low byte: 16 nats
_ROWS = 2**24  # numbers that are encoded or decoded at once
_FIRST = 1e-6  # nats: puts the most likely token before those that rounding made equal to it


def encode(logits: torch.Tensor) -> torch.Tensor:
    """uint8 bytes for logits [rows, vocabulary] of any float dtype. NumericsError for NaN."""
    top = logits.argmax(-1).to(torch.int32).view(torch.uint8)
    highs, lows = [], []
    for rows in torch.split(logits, max(1, _ROWS // logits.shape[1])):
        nats = -rows.float().log_softmax(-1)
        if bool(nats.isnan().any()):
            raise not_finite("the source gives logits that are not numbers (NaN)", logits.dtype)
        codes = (nats * STEPS).round().clamp_(0, 2**16 - 1).to(torch.int32)
        high = (codes >> 8).to(torch.uint8)
        highs.append(high.flatten())
        lows.append((codes & 255).to(torch.uint8)[high < _FINE])
    return torch.cat([top, *highs, *lows])


def decode(raw: torch.Tensor, rows: int, vocabulary: int) -> torch.Tensor | None:
    """float32 [rows, vocabulary] log-probabilities, not normalized to the last bit; None for bytes of another size."""
    count = rows * vocabulary
    if len(raw) < 4 * rows + count:
        return None
    top, high, low = raw[: 4 * rows], raw[4 * rows : 4 * rows + count], raw[4 * rows + count :]
    values, read = torch.empty(rows, vocabulary), 0
    for block, part in zip(
        torch.split(values, step := max(1, _ROWS // vocabulary)), torch.split(high, step * vocabulary), strict=True
    ):
        fine = part < _FINE
        end = read + int(fine.sum())
        if end > len(low):
            return None
        nats = part.to(torch.float32).mul_(256).add_(128)
        nats[fine] += low[read:end].to(torch.float32) - 128
        torch.div(nats.view(block.shape), -STEPS, out=block)
        read = end
    if read != len(low):
        return None
    first = top.clone().view(torch.int32).to(torch.int64)[:, None]
    return values.scatter_(1, first, values.amax(-1, keepdim=True) + _FIRST)
