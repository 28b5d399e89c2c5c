"""Samples for calibration: token windows from the rows of files, chosen by a seed.

Rows are tokenized one by one with the model's own tokenizer (its special tokens included; message lists through its
chat template) and follow each other in one stream. The stream is cut in windows of equal length; ``samples`` of them
are chosen without replacement. Where the tokenizer puts a beginning-of-text token before a text, each window of text
starts with it, in the place of its first token, as in llama.cpp's imatrix; rows of token ids stay as they are. If a
source has a weight, each is cut separately and gives its share of the windows.
Of long data every second, fourth, ... row is tokenized, and of a data set by name the first ones, unless that is too
little. The sha256 of the chosen tokens identifies them.
"""

import hashlib
import itertools
import math
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from ptqpipe.calibration.rows import (
    Messages,
    Notes,
    begin_token,
    begun,
    end_token,
    files_of,
    has_beginning,
    pieces,
    read_rows,
    row_text,
    row_tokens,
    shows_images,
    size_of,
    weighted,
)
from ptqpipe.checkpoint import file_sha256
from ptqpipe.errors import UsageError, arg, usage
from ptqpipe.models.embedder import is_embedder
from ptqpipe.models.images import decode_images, digest_of, read_image, split_content
from ptqpipe.models.language_model import takes_images
from ptqpipe.runtime.loading import default_length, load_tokenizer, read_config
from ptqpipe.runtime.processor import Processor

NO_TOKEN = -1
_OF_TOKENS = ("mm_token_type_ids", "token_type_ids")
# Tokens of a window. Short ones show a model more beginnings of texts: many models send attention to the first token,
# whose activations are huge, and an error there is in every token behind it.
SAMPLE_LENGTH = 256
HELD_SHARE = 8  # samples for each window that is held out, unless the caller says how many
LONG = 1 << 23  # at most so many characters are tokenized,
CHARACTERS = 32  # or so many for each token of the wanted windows, where that is more
_IMAGES = 4  # at most so many rows with images are processed for each wanted window


@dataclass(frozen=True, slots=True)
class DataFile:
    """One of ``data``, as records name it: a file by its base name and its sha256, a data set by its name and None.

    rows    that were read: of a file all
    tokens  of those rows that were tokenized
    weight  by which it was mixed, if it was
    every   of so many rows, or pieces of long ones, one was tokenized; None: all
    """

    name: str
    sha256: str | None
    rows: int
    tokens: int
    weight: float | None = None
    every: int | None = None

    def to_json(self) -> dict[str, Any]:
        left_out = {name for name in ("weight", "every") if getattr(self, name) is None}
        return {name: value for name, value in asdict(self).items() if name not in left_out}


@dataclass(frozen=True, slots=True)
class Samples:
    """What a model is calibrated on.

    windows     [samples, seqlen] int64
    held_out    [held out, seqlen] int64: other windows, for judging what the first ones led to
    sha256      of the chosen windows as little-endian int64; and then of what all images are known by, if there are any
    files       of every name in ``data``
    candidates  how many windows there were to choose from
    images      of each window and then of each held out: what the model takes beside tokens; empty without images.
                A row with images is a window of its own, `NO_TOKEN` behind its end
    origin      int64 [samples + held out]: of which of ``files`` a window has its first token
    notes       lines about the rows: in which form they are, what was left out
    """

    windows: torch.Tensor
    held_out: torch.Tensor
    sha256: str
    files: tuple[DataFile, ...]
    candidates: int
    images: tuple[Mapping[str, Any] | None, ...] = ()
    origin: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    notes: tuple[str, ...] = ()

    def judged(self) -> "Samples":
        """These, with one of every HELD_SHARE windows held out, the last ones, where the data had no others left: whole
        batches, which would judge instead, may be half of all windows."""
        count = 0 if len(self.held_out) else len(self.windows) // HELD_SHARE
        windows, held_out = self.windows[: len(self.windows) - count], self.windows[len(self.windows) - count :]
        return replace(self, windows=windows, held_out=held_out) if count else self

    def first(self, count: int) -> "Samples":
        """So many of the windows and then of those held out, in their order."""
        more = max(0, count - len(self.windows))
        return replace(self, windows=self.windows[:count], held_out=self.held_out[:more], origin=self.origin[:count])

    def spread(self, count: int) -> "Samples":
        """So many of the windows, evenly spread over them, and none held out."""
        places = torch.arange(count) * len(self.windows) // count
        return replace(self, windows=self.windows[places], held_out=self.held_out[:0], origin=self.origin[places])

    @property
    def shown(self) -> int:
        return sum(images is not None for images in self.images)

    @property
    def thinned(self) -> str:
        """How much of long data was tokenized, in words behind a comma; empty: all."""
        every = max(file.every or 1 for file in self.files)
        return f", from one of every {every:,} rows" if every > 1 else ""

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

    names    files, folders of them, or data sets by name; ``=WEIGHT`` behind one mixes them by weights
    model    the folder with the tokenizer
    holdout  how many further windows are held out; None: one for every HELD_SHARE samples, or as many as the data have
    images   whether rows may be messages with images, named by paths from the folder of their file

    Raises UsageError for no or bad data and for too few tokens, CheckpointError for a model without tokenizer.
    """
    _check_asked(names, samples, seqlen, holdout)
    check_seed(seed)
    tokenizer = cache(lambda: load_tokenizer(model))  # rows of token ids need none
    see = cache(lambda: Processor(model, read_config(model))) if images else None
    embeds = is_embedder(model)
    sources = _sources(names)
    shares, usual = _shares(samples, sources), _shares(samples // HELD_SHARE, sources)
    held = usual if holdout is None else _shares(holdout, sources)
    pools = list[_Pool]()
    for (files, weight), count, more, least in zip(sources, shares, held, usual, strict=True):
        read = partial(_read, files, weight, tokenizer, see, seqlen=seqlen, field=field, embeds=embeds)
        pool = read(wanted=count + max(more, least))  # so that stages which hold none out choose from the same windows
        pools.append(read(wanted=None) if pool.more and pool.candidates < count + more else pool)
    generator = torch.Generator().manual_seed(seed)
    picked = list[tuple[int, _Chosen]]()
    for pool, count, more in zip(pools, shares, held, strict=True):
        if holdout is None:
            more = max(0, min(more, pool.candidates - count))
        if pool.candidates < count + more:
            wanted = f"{count} and {more} held out" if more else f"{count}"
            name = "the data" if len(pools) == 1 else pool.files[0].name
            raise _too_few(len(pool.stream), seqlen, wanted, name, pool.lengths, holdout=bool(holdout))
        order = torch.randperm(pool.candidates, generator=generator)
        first, then = order[:count].sort().values, order[count : count + more].sort().values
        picked.append((count, pool.choose(torch.cat([first, then]))))
    return _together(picked, pools)


def sample_length(config: Any, model: Path) -> int:
    """The default number of tokens of a window to calibrate on: `SAMPLE_LENGTH`, or the model's positions where they
    are fewer; for a model that takes images, whose rows are longer, that of other windows."""
    longest = default_length(config, model)
    return longest if takes_images(config, model) else min(SAMPLE_LENGTH, longest)


def samples_of_model(names: Sequence[str], model: Path, config: Any, *, seqlen: int | None, **options: Any) -> Samples:
    """`load_samples` with images where the model of ``config`` takes them, and of its usual length where ``seqlen`` is
    None."""
    length = sample_length(config, model) if seqlen is None else seqlen
    return load_samples(names, model, seqlen=length, images=takes_images(config, model), **options)


def _together(picked: "Sequence[tuple[int, _Chosen]]", pools: "Sequence[_Pool]") -> Samples:
    """The samples: of each pool so many windows, and those behind them held out; those of several pools mixed."""
    ends = list(itertools.accumulate(len(one.windows) for _, one in picked))
    first = _spread([torch.arange(end - len(one.windows), end)[:n] for end, (n, one) in zip(ends, picked, strict=True)])
    then = _spread([torch.arange(end - len(one.windows), end)[n:] for end, (n, one) in zip(ends, picked, strict=True)])
    windows, order = torch.cat([one.windows for _, one in picked]), torch.cat([first, then])
    rows = [row for _, one in picked for row in one.shown]
    rows_of_windows = [rows[place] for place in order.tolist()]
    before = itertools.accumulate((len(pool.files) for pool in pools), initial=0)
    origin = torch.cat([one.origin + start for (_, one), start in zip(picked, before, strict=False)])
    digest = tokens_digest(windows[first])
    if any(pool.shown for pool in pools):
        digests = b"".join(row.digest for row in rows_of_windows if row is not None)
        digest = hashlib.sha256(bytes.fromhex(digest) + digests).hexdigest()
    return Samples(
        windows[first],
        windows[then],
        digest,
        tuple(file for pool in pools for file in pool.files),
        sum(pool.candidates for pool in pools),
        tuple(None if row is None else row.inputs for row in rows_of_windows)
        if any(pool.shown for pool in pools)
        else (),
        origin[order],
        tuple(line for pool in pools for line in pool.notes),
    )


def _spread(numbers: Sequence[torch.Tensor]) -> torch.Tensor:
    """All numbers int64 [n] of several pools, in an order in which every run of them has about each pool's share: the
    last ones often judge what the others led to. Those of one pool stay as they are."""
    places = [(torch.arange(len(own), dtype=torch.float64) + 0.5) / len(own) for own in numbers]
    return torch.cat(list(numbers))[torch.argsort(torch.cat(places), stable=True)]


def _sources(names: Sequence[str]) -> list[tuple[list[str], float | None]]:
    """(files, weight) of what is chosen from on its own: every file where one has a weight, which is 1 where it is not
    given; else all files together, with None."""
    chosen = [weighted(name) for name in files_of(names)]
    if any(name == "self" and not Path(name).exists() for name, _ in chosen):
        raise UsageError(
            f"{arg('data', 'self')} is an option of convert; here generate the text first: "
            + usage("generate", "MODEL", out="own.jsonl")
        )
    if all(weight is None for _, weight in chosen):
        return [([name for name, _ in chosen], None)]
    return [([name], 1.0 if weight is None else weight) for name, weight in chosen]


def _shares(count: int, sources: Sequence[tuple[list[str], float | None]]) -> list[int]:
    """``count`` windows divided by the weights of the sources; what rounding leaves goes to the largest remainders."""
    weights = [weight or 1.0 for _, weight in sources]
    exact = [count * weight / sum(weights) for weight in weights]
    shares = [int(share) for share in exact]
    order = sorted(range(len(exact)), key=lambda i: shares[i] - exact[i])
    for i in order[: count - sum(shares)]:
        shares[i] += 1
    return shares


@dataclass(frozen=True, slots=True)
class _Chosen:
    """Windows of one source, int64 [n, seqlen]; the file of each, by its number in the source; and the rows with images
    among them."""

    windows: torch.Tensor
    origin: torch.Tensor
    shown: "list[_Shown | None]"


@dataclass(frozen=True, slots=True)
class _Pool:
    """What is chosen from: the tokens of texts in a row, and rows with images; ``ends`` of the files in the stream, how
    many rows have which length, whether the files have ``more``, and the tokens that windows of text ``begin`` with
    and, of a sentence embedder, ``end`` with."""

    files: list[DataFile]
    stream: "array[int]"
    ends: list[int]
    shown: "list[_Shown]"
    shown_of: list[int]
    seqlen: int
    lengths: "Counter[int]"
    more: bool
    begin: int | None = None
    end: int | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def candidates(self) -> int:
        return len(self.stream) // self.seqlen + len(self.shown)

    def choose(self, which: torch.Tensor) -> _Chosen:
        count = len(self.stream) // self.seqlen
        windows = _windows(self.stream, self.shown, self.seqlen, self.begin, self.end)
        begins = torch.arange(count) * self.seqlen
        origin = torch.cat(
            [torch.searchsorted(torch.tensor(self.ends), begins, right=True), torch.tensor(self.shown_of).long()]
        )
        shown = [None if number < count else self.shown[number - count] for number in which.tolist()]
        return _Chosen(windows[which], origin[which], shown)


@dataclass(slots=True)
class _Thinned:
    """Keeps every row that comes, until their sizes are more than ``most`` together; then every second one, and so on.
    So those that are kept are evenly spread over all, and memory never holds more.

    kept   each with its size
    every  one of so many was kept
    """

    most: float
    kept: list[tuple[int, "_Row"]] = field(default_factory=list)
    every: int = 1
    _seen: int = 0
    _size: int = 0

    def add(self, row: "_Row", size: int) -> None:
        """The next one."""
        if self._seen % self.every == 0:
            self.kept.append((size, row))
            self._size += size
            while self._size > self.most and len(self.kept) > 1:
                self.kept, self.every = self.kept[::2], self.every * 2
                self._size = sum(each for each, _ in self.kept)
        self._seen += 1


@dataclass(frozen=True, slots=True)
class _Row:
    file: int
    where: str
    value: Any
    begins: bool = True


def _read(
    files: Sequence[str],
    weight: float | None,
    tokenizer: Callable[[], Any],
    see: Callable[[], Processor] | None,
    *,
    seqlen: int,
    field: str | None,
    embeds: bool,
    wanted: int | None,
) -> _Pool:
    """The tokens of a source's files.

    see     what makes tokens of images; None: rows with images are refused
    embeds  whether the model is a sentence embedder, which sees the token behind a text
    wanted  windows, which decides how much of long data is tokenized; None: all of them
    """
    most = math.inf if wanted is None else max(LONG, CHARACTERS * wanted * seqlen)
    of_image = 0 if wanted is None else int(most) // (_IMAGES * max(1, wanted))
    thinned, counts, more, notes = _Thinned(most), list[int](), False, Notes()
    for number, name in enumerate(files):
        rows, size, whole = 0, 0, Path(name).expanduser().is_file()
        for where, value in read_rows(name, field=field, notes=notes):
            shown = see is not None and shows_images(value)
            for piece, part in enumerate(pieces(value) if isinstance(value, str) else [value]):
                thinned.add(_Row(number, where, part, piece == 0), of_image if shown else size_of(part))
                size += of_image if shown else size_of(part)
            rows += 1
            if not whole and size > most:
                more = True
                break
        counts.append(rows)
    every = thinned.every if thinned.every > 1 else None
    worded = any(isinstance(row.value, str | Messages) for _, row in thinned.kept)
    begin, begins = begin_token(tokenizer()) if worded else None, False
    pool = _Pool([], array("q"), [], [], [], seqlen, Counter(), more or every is not None)
    of_file = itertools.groupby((row for _, row in thinned.kept), key=lambda row: row.file)
    taken = {number: list(of_each) for number, of_each in of_file}
    for number, (name, rows) in enumerate(zip(files, counts, strict=True)):
        total = 0
        for row in taken.get(number, ()):
            if see is not None and shows_images(row.value):
                folder = Path(name).expanduser().parent
                place: dict[str, Any] = {"folder": folder, "seqlen": seqlen, "notes": notes}
                image_row = _with_images(see(), tokenizer(), row.value, row.where, **place)
                pool.shown.append(image_row)
                pool.shown_of.append(number)
                total += len(image_row.tokens)
            else:
                for tokens in row_tokens(tokenizer, row.value, row.where, begins=row.begins, notes=notes):
                    begins = begins or has_beginning(row.value, tokens, begin)
                    pool.stream.extend(tokens)
                    pool.lengths[len(tokens)] += 1
                    total += len(tokens)
        pool.files.append(_described(name, rows, total, weight, every))
        pool.ends.append(len(pool.stream))
    pool.notes.extend(notes.lines())
    end = end_token(tokenizer()) if begins and embeds else None
    return replace(pool, begin=begin if begins else None, end=end)


def _check_asked(names: Sequence[str], samples: int, seqlen: int, holdout: int | None) -> None:
    if not names:
        raise UsageError(
            f"no data to calibrate on; give {arg('data', 'FILE')}: text like what the model will serve (.txt, .jsonl "
            f"with text or messages, .parquet), about {arg('samples')} x {arg('seqlen')} tokens"
        )
    if samples < 1 or seqlen < 1:
        raise UsageError(f"{arg('samples', samples)} {arg('seqlen', seqlen)}: expected 1 or more of each")
    if holdout is not None and holdout < 0:
        raise UsageError(f"{arg('holdout', holdout)}: expected 0 or more windows")


def check_seed(seed: int) -> None:
    """UsageError for a seed of more than 32 bits: of more than 64 a generator takes none, and others are made of it."""
    if not 0 <= seed < 1 << 32:
        raise UsageError(f"{arg('seed', seed)} is out of range; use 0 to {(1 << 32) - 1}")


@dataclass(frozen=True, slots=True)
class _Shown:
    """A row with images: its tokens, what the model takes beside them, and what its images are known by."""

    tokens: tuple[int, ...]
    inputs: dict[str, Any]
    digest: bytes


def _with_images(
    processor: Processor, tokenizer: Any, messages: Messages, where: str, *, folder: Path, seqlen: int, notes: Notes
) -> _Shown:
    split = [split_content(message.get("content"), where) for message in messages]
    raw = [read_image(place, folder, remedy="-", within=False) for _, places in split for place in places]
    shown = decode_images(raw, where)
    plain = Messages({**message, "content": parts} for message, (parts, _) in zip(messages, split, strict=True))
    plain.tools = messages.tools
    text, _ = row_text(tokenizer, plain, where, notes=notes, template=processor.template)
    try:
        tokens, inputs = processor(text, shown)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None
    end = len(tokens) - tokens[::-1].index(processor.token)
    if end > seqlen:
        raise UsageError(f"{where} has tokens of images up to number {end}, {arg('seqlen')} is {seqlen}; raise it")
    cut = {name: value[:, :seqlen] if name in _OF_TOKENS else value for name, value in inputs.items()}
    return _Shown(tokens[:seqlen], cut, b"".join(map(digest_of, raw)))


def check_samples(names: Sequence[str], model: Path, *, samples: int, seqlen: int, field: str | None = None) -> None:
    """UsageError where data give fewer than ``samples`` windows; reads no more of them than it takes to know that. A
    row with images is a window."""
    tokenizer, sources = cache(lambda: load_tokenizer(model)), _sources(names)
    read = partial(read_rows, field=field)
    for (files, _), count in zip(sources, _shares(samples, sources), strict=True):
        tokens, lengths = 0, Counter[int]()
        for where, value in itertools.chain.from_iterable(map(read, files)):
            for length in [seqlen] if shows_images(value) else map(len, row_tokens(tokenizer, value, where)):
                lengths[length] += 1
                tokens += length
                if tokens >= count * seqlen:
                    break
            if tokens >= count * seqlen:
                break
        if tokens < count * seqlen:
            raise _too_few(tokens, seqlen, f"{count}", "the data" if len(sources) == 1 else files[0], lengths)


def _too_few(
    tokens: int, seqlen: int, wanted: str, name: str, lengths: "Counter[int]", *, holdout: bool = False
) -> UsageError:
    """
    lengths  how many rows have which; rows of one length, as `generate` writes them, say what to ask for
    holdout  whether the call says how many windows are held out
    """
    data, weight = ("the data give", "") if name == "the data" else (f"{name} gives", "its weight, ")
    remedy = (
        f"give more data, or lower {weight}{arg('samples')}{', ' + arg('holdout') if holdout else ''} or "
        f"{arg('seqlen')}"
    )
    length, rows = next(iter(lengths.items()), (0, 0))
    if len(lengths) == 1 and rows > 1 and 1 < length <= seqlen and not weight:
        samples = rows - rows // (HELD_SHARE + 1)
        remedy = (
            f"the rows are {rows} windows of {length} tokens: use {arg('samples', samples)} {arg('seqlen', length)}"
        )
    return UsageError(f"{data} {tokens} tokens, {tokens // seqlen} windows of {seqlen}, expected {wanted}; {remedy}")


def _described(name: str, rows: int, tokens: int, weight: float | None, every: int | None) -> DataFile:
    """Records are published: no folder's name may stand in them."""
    path = Path(name).expanduser()
    if not path.is_file():
        return DataFile(name, None, rows, tokens, weight, every)
    return DataFile(path.name, file_sha256(path), rows, tokens, weight, every)


def tokens_digest(windows: torch.Tensor) -> str:
    """sha256 of token ids as little-endian int64, row by row."""
    return hashlib.sha256(windows.numpy().astype("<i8").tobytes()).hexdigest()


def _windows(
    stream: "array[int]", shown: Sequence[_Shown], seqlen: int, begin: int | None, end: int | None
) -> torch.Tensor:
    """int64 [n, seqlen]: the text cut into windows that start with ``begin`` and stop with ``end``, what is left of it
    aside; then each row with images."""
    count = len(stream) // seqlen
    windows = torch.full((count + len(shown), seqlen), NO_TOKEN)
    if count:
        cut = torch.frombuffer(stream, dtype=torch.int64, count=count * seqlen).view(count, seqlen)
        windows[:count] = begun(cut, begin)
        if end is not None:
            windows[:count, -1] = end
    for number, row in enumerate(shown, count):
        windows[number, : len(row.tokens)] = torch.tensor(row.tokens)
    return windows
