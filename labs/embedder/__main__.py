"""Embedders against their original, on pairs of sentences of a text: a JSON line for each, as `ptqpipe eval` has it.

    python -m labs.embedder ORIGINAL TEXT RESULTS.jsonl NAME=FOLDER ... [--count 2000]

The original's embeddings are computed once; each folder is any checkpoint that ptqpipe reads, of whatever program.
"""

import argparse
import json
import time
from pathlib import Path

import torch

from ptqpipe.check.evaluate.embeddings import embed, embedding_row
from ptqpipe.check.evaluate.sentence_pairs import SentencePairs, pairs_of_text
from ptqpipe.models.embedder import Pooling
from ptqpipe.models.language_model import embedder_model_of
from ptqpipe.runtime.loading import load_rank, load_tokenizer
from ptqpipe.runtime.parallel import TensorParallel


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("original", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("results", type=Path)
    parser.add_argument("models", nargs="+", metavar="NAME=FOLDER")
    parser.add_argument("--count", type=int, default=2000, help="pairs: half neighbours, half at random")
    options = parser.parse_args()
    pairs, pooling = pairs_of_text(str(options.text), options.text.name), Pooling.of(options.original)
    half, middle = options.count // 2, len(pairs.first) // 2
    some = [*range(half), *range(middle, middle + half)]
    pairs = SentencePairs(pairs.name, tuple(pairs.first[i] for i in some), tuple(pairs.second[i] for i in some))
    tokenizer, longest = load_tokenizer(options.original), pooling.longest or 256

    def vectors(folder: Path) -> torch.Tensor:
        model = load_rank(folder, TensorParallel(), packed=False, model_of=embedder_model_of, dtype="float32")
        with torch.no_grad():
            sides = [
                embed(model, tokenizer, pooling, side, longest=longest, batch_size=8)
                for side in (pairs.first, pairs.second)
            ]
        return torch.stack(sides)

    theirs = vectors(options.original)
    for entry in options.models:
        name, _, folder = entry.partition("=")
        begun = time.process_time()
        row = {"name": name} | embedding_row(pairs, vectors(Path(folder)), theirs)
        row["cpu_seconds"] = round(time.process_time() - begun, 1)
        with options.results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
