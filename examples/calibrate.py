"""Quantize a model with your own data: rows from Python, without a file.

python examples/calibrate.py Qwen/Qwen3-0.6B text.txt --out qwen-nvfp4-best
"""

import argparse
from pathlib import Path

import ptqpipe

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model", help="a folder, or a name on the hub")
parser.add_argument("text", help="a text file like what the model will serve; its paragraphs are the rows")
parser.add_argument("--format", default="nvfp4")
parser.add_argument("--quality", default="best", choices=("fast", "good", "best"))
parser.add_argument("--out", default="calibrated")
parser.add_argument("--samples", type=int, default=128, help="windows that the model runs on")
parser.add_argument("--seqlen", type=int, help="tokens of a window")
args = parser.parse_args()

# Rows may come from anywhere: a `datasets` object, a generator, a DataLoader of batches with input_ids.
rows = [row for row in Path(args.text).read_text(encoding="utf-8").split("\n\n") if row.strip()]

done = ptqpipe.quantize_model(
    args.model,
    args.format,
    data=rows,
    quality=args.quality,
    out=args.out,
    samples=args.samples,
    seqlen=args.seqlen,
)
print(repr(done))
