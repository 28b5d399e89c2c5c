"""The fingerprint of a checkpoint: a hash of its content, the same for every copy and every download.

Read are, of every weight file, its name in the folder, its size, its header (names, dtypes, shapes and places of all
tensors) and pages of its data; and config.json and hf_quant_config.json whole, since they say what the weights compute.
Times, owners, links and the folder's own name do not count; nor do the tokenizer, the generation config and code.

A file has 64 pages of 4 KiB and one for every 64 MiB, at places that are hashed from its header: every tensor has one
where a file has no more tensors than pages, as those of dense models do; of a mixture of experts with hundreds of
tensors per file, every n-th has. So 16 GB cost a few megabytes of reading, 700 GB less than a hundred.

What it misses: numbers that were changed where no page is looked at, in a file of the same size and header (a few rows
of an embedding; one expert among hundreds). Training, merging and other roundings change every page. Who must exclude
even that compares sha256 sums of the files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from ptqpipe.checkpoint.header import FileHeader, TensorEntry

PAGE: Final = 4096
LEAST_PAGES: Final = 64
BYTES_PER_PAGE: Final = 64 * 2**20
CONFIG_FILES: Final = ("config.json", "hf_quant_config.json")
#: Hex digits of a fingerprint that are of the weights; the others are of the config files.
OF_WEIGHTS: Final = 32
_AT_ONCE: Final = 16  # files that are read at the same time: a disk answers many small reads as fast as one


def fingerprint_of(
    folder: Path, headers: Sequence[FileHeader], read: Callable[[TensorEntry, int, int], bytearray]
) -> str:
    """64 hex digits: 32 of the sha256 of the weights, 32 of that of the config files.

    headers  of all weight files, in order
    read     bytes [start, stop) of a tensor; called on several threads

    Raises what ``read`` raises, and OSError for a config file that cannot be read.
    """

    def sample(header: FileHeader) -> str:
        digest = hashlib.sha256()
        for entry, start, stop in pages(header):
            digest.update(read(entry, start, stop))
        return digest.hexdigest()

    weights, config = hashlib.sha256(), hashlib.sha256()
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        samples = list(pool.map(sample, headers))
    for header, sampled in zip(headers, samples, strict=True):
        name = header.path.relative_to(folder).as_posix()
        weights.update(f"{name}\0{header.file_bytes}\0{header.sha256}\0{sampled}\n".encode())
    for path in (folder / name for name in CONFIG_FILES):
        if path.is_file():
            raw = path.read_bytes()
            config.update(f"{path.name}\0{len(raw)}\n".encode() + raw)
    return weights.hexdigest()[:OF_WEIGHTS] + config.hexdigest()[: 64 - OF_WEIGHTS]


def pages(header: FileHeader) -> Iterator[tuple[TensorEntry, int, int]]:
    """(tensor, start, stop) of the bytes that are sampled in one file, each piece inside one page of the file."""
    tensors = [entry for entry in header.entries if entry.nbytes]
    count = LEAST_PAGES + header.file_bytes // BYTES_PER_PAGE if tensors else 0
    for i in range(count):
        drawn = hashlib.sha256(f"{header.sha256} {i}".encode()).digest()
        which, where = int.from_bytes(drawn[:8], "big"), int.from_bytes(drawn[8:16], "big")
        entry = tensors[i * len(tensors) // count + which % max(1, len(tensors) // count)]
        page = (entry.offset + where % entry.nbytes) // PAGE * PAGE - entry.offset
        yield entry, max(page, 0), min(page + PAGE, entry.nbytes)
