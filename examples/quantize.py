"""Quantize a model without data, check the result, and measure what it cost.

python examples/quantize.py Qwen/Qwen3-0.6B --out qwen-nvfp4 --text held-out.txt
"""

import argparse

import ptqpipe

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model", help="a folder, or a name on the hub")
parser.add_argument("--format", default="nvfp4", help="number format; `ptqpipe formats` lists all")
parser.add_argument("--out", default="quantized", help="folder to write")
parser.add_argument("--text", help="text on which the result is compared with the model")
args = parser.parse_args()

done = ptqpipe.convert(args.model, format=args.format, out=args.out, progress=True)
print(done)  # what the command line prints

checked = ptqpipe.verify(done.path, source=args.model)
print(repr(checked))
if not checked.ok:
    raise SystemExit(f"{len(checked.faults)} faults")

if args.text is not None:
    measured = ptqpipe.evaluate(done.path, args.text, source=args.model)
    print(measured.verdict)
