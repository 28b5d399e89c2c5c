"""Samples for calibration: token windows from the rows of files, chosen by a seed.

Rows are tokenized one by one with the model's own tokenizer (its special tokens included; message lists through its
chat template) and follow each other in one stream. The stream is cut in windows of equal length; ``samples`` of them
are chosen without replacement. The sha256 of the chosen tokens identifies them.
"""

import hashlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ptqpipe.checkpoint import file_sha256
from ptqpipe.errors import UsageError
from ptqpipe.images import decode_images, digest_of, read_image, split_content
from ptqpipe.rows import chat_text, files_of, read_rows, row_tokens, shows_images
from ptqpipe.runtime.loading import load_tokenizer, read_config
from ptqpipe.runtime.processor import Processor

NO_TOKEN = -1
_OF_TOKENS = ("mm_token_type_ids", "token_type_ids")
HELD_SHARE = 8  # samples for each window that is held out, unless the caller says how many


@dataclass(frozen=True, slots=True)
class DataFile:
    """One --data, as records name it: a file by its base name and its sha256, a data set by its name and None."""

    name: str
    sha256: str | None
    rows: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Samples:
    """What a model is calibrated on.

    windows     [samples, seqlen] int64
    held_out    [held out, seqlen] int64: other windows, for judging what the first ones led to
    sha256      of ``windows`` as little-endian int64; and then of what all images are known by, if there are any
    files       of every --data
    candidates  how many windows there were to choose from
    images      of each window and then of each held out: what the model takes beside tokens; empty without images.
                A row with images is a window of its own, `NO_TOKEN` behind its end
    """

    windows: torch.Tensor
    held_out: torch.Tensor
    sha256: str
    files: tuple[DataFile, ...]
    candidates: int
    images: tuple[Mapping[str, Any] | None, ...] = ()

    @property
    def shown(self) -> int:
        """How many windows have images."""
        return sum(given is not None for given in self.images)

    def images_of(self, share: slice) -> tuple[Mapping[str, Any] | None, ...]:
        """Those of a share of the windows and the same share of those held out."""
        count = len(self.windows)
        return (*self.images[:count][share], *self.images[count:][share])


def load_samples(
    names: Sequence[str],
    model: Path,
    *,
    samples: int,
    seqlen: int,
    seed: int = 0,
    field: str | None = None,
    holdout: int | None = 0,
    images: bool = False,
) -> Samples:
    """Tokenizes, cuts and chooses.

    names    files, folders of them, or data sets by name
    model    the folder with the tokenizer
    holdout  how many further windows are held out; None: one for every HELD_SHARE samples, or as many as the data have
    images   whether rows may be messages with images, named by paths from the folder of their file

    Raises UsageError for no or bad data and for too few tokens, CheckpointError for a model without tokenizer.
    """
    _check_asked(names, samples, seqlen, holdout)
    tokenizer = cache(lambda: load_tokenizer(model))  # rows of token ids need none
    see, shown = cache(lambda: Processor(model, read_config(model))), list[_Shown]()
    files: list[DataFile] = []
    stream = array("q")
    for name in files_of(names):
        rows, total = 0, 0
        for where, value in read_rows(name, field=field):
            if images and shows_images(value):
                shown.append(_with_images(see(), tokenizer(), value, where, folder=Path(name).parent, seqlen=seqlen))
                total += len(shown[-1].tokens)
            else:
                for tokens in row_tokens(tokenizer, value, where):
                    stream.extend(tokens)
                    total += len(tokens)
            rows += 1
        if not rows:
            raise UsageError(f"{name} is empty; give a file with text")
        files.append(_described(name, rows, total))
    count = len(stream) // seqlen
    candidates = count + len(shown)
    if candidates < samples + (holdout or 0):
        raise _too_few(len(stream), seqlen, f"{samples} and {holdout} held out" if holdout else f"{samples}")
    if holdout is None:
        holdout = min(samples // HELD_SHARE, candidates - samples)
    windows = torch.full((candidates, seqlen), NO_TOKEN)
    if count:
        windows[:count] = torch.frombuffer(stream, dtype=torch.int64, count=count * seqlen).view(count, seqlen)
    for at, row in enumerate(shown, count):
        windows[at, : len(row.tokens)] = torch.tensor(row.tokens)
    order = torch.randperm(candidates, generator=torch.Generator().manual_seed(seed))
    first, then = order[:samples].sort().values, order[samples : samples + holdout].sort().values
    chosen, held_out = windows[first], windows[then]
    digest = tokens_digest(chosen)
    if not shown:
        return Samples(chosen, held_out, digest, tuple(files), candidates)
    given = [None if at < count else shown[at - count] for at in (*first.tolist(), *then.tolist())]
    known = b"".join(row.digest for row in given if row is not None)
    digest = hashlib.sha256(bytes.fromhex(digest) + known).hexdigest()
    inputs = tuple(None if row is None else row.inputs for row in given)
    return Samples(chosen, held_out, digest, tuple(files), candidates, inputs)


def _check_asked(names: Sequence[str], samples: int, seqlen: int, holdout: int | None) -> None:
    """UsageError for no data and for counts that are none."""
    if not names:
        raise UsageError(
            "no data to calibrate on; give --data FILE: text like what the model will serve (.txt, .jsonl with text or "
            "messages, .parquet), about --samples x --seqlen tokens"
        )
    if samples < 1 or seqlen < 1:
        raise UsageError(f"--samples {samples} --seqlen {seqlen}: expected 1 or more of each")
    if holdout is not None and holdout < 0:
        raise UsageError(f"--holdout {holdout}: expected 0 or more windows")


@dataclass(frozen=True, slots=True)
class _Shown:
    """A row with images: its tokens, what the model takes beside them, and what its images are known by."""

    tokens: tuple[int, ...]
    inputs: dict[str, Any]
    digest: bytes


def _with_images(
    processor: Processor, tokenizer: Any, messages: list[dict[str, Any]], where: str, *, folder: Path, seqlen: int
) -> _Shown:
    """A row of messages with images. UsageError for what is none."""
    split = [split_content(message.get("content"), where) for message in messages]
    raw = [read_image(place, folder, remedy="-", within=False) for _, places in split for place in places]
    shown = decode_images(raw, where)
    plain = [{**message, "content": parts} for message, (parts, _) in zip(messages, split, strict=True)]
    text = chat_text(tokenizer, plain, where, template=processor.template)
    try:
        tokens, inputs = processor(text, shown)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None
    end = len(tokens) - tokens[::-1].index(processor.token)
    if end > seqlen:
        raise UsageError(f"{where} has tokens of images up to number {end}, --seqlen is {seqlen}; raise it")
    cut = {name: value[:, :seqlen] if name in _OF_TOKENS else value for name, value in inputs.items()}
    return _Shown(tokens[:seqlen], cut, b"".join(map(digest_of, raw)))


def check_samples(names: Sequence[str], model: Path, *, samples: int, seqlen: int) -> None:
    """UsageError where data give fewer than ``samples`` windows; reads no more of them than it takes to know that. A
    row with images is a window."""
    tokenizer, found = cache(lambda: load_tokenizer(model)), 0
    for name in files_of(names):
        for where, value in read_rows(name):
            found += seqlen if shows_images(value) else sum(map(len, row_tokens(tokenizer, value, where)))
            if found >= samples * seqlen:
                return
    raise _too_few(found, seqlen, f"{samples}")


def _too_few(tokens: int, seqlen: int, wanted: str) -> UsageError:
    return UsageError(
        f"the data give {tokens} tokens, {tokens // seqlen} windows of {seqlen}, expected {wanted}; give more data, or "
        "lower --samples or --seqlen"
    )


def _described(name: str, rows: int, tokens: int) -> DataFile:
    """Records are published: no folder's name may stand in them."""
    path = Path(name).expanduser()
    if not path.is_file():
        return DataFile(name, None, rows, tokens)
    return DataFile(path.name, file_sha256(path), rows, tokens)


def tokens_digest(windows: torch.Tensor) -> str:
    """sha256 of token ids as little-endian int64, row by row."""
    return hashlib.sha256(windows.numpy().astype("<i8").tobytes()).hexdigest()
