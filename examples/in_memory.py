"""Quantize a model that is in memory, with the batches of a loop of yours, use it, and save it.

python examples/in_memory.py Qwen/Qwen3-0.6B text.txt --out qwen-nvfp4
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import ptqpipe

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model", help="a folder, or a name on the hub")
parser.add_argument("text", help="a text file like what the model will serve")
parser.add_argument("--format", default="nvfp4")
parser.add_argument("--quality", default="best", choices=("fast", "good", "best"))
parser.add_argument("--out", default="from-memory")
parser.add_argument("--samples", type=int, default=16)
parser.add_argument("--seqlen", type=int, default=128)
args = parser.parse_args()

tokenizer = AutoTokenizer.from_pretrained(args.model)
model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16)


def forward_loop(model: torch.nn.Module) -> None:
    """Calls the model with your data, batch by batch."""
    tokens = tokenizer(Path(args.text).read_text(encoding="utf-8"), return_tensors="pt").input_ids[0]
    windows = tokens[: len(tokens) // args.seqlen * args.seqlen].reshape(-1, args.seqlen)
    for batch in windows[: args.samples + args.samples // 8].split(4):
        model(input_ids=batch)


packed = ptqpipe.quantize_model(
    model, args.format, forward_loop=forward_loop, quality=args.quality, samples=args.samples, seqlen=args.seqlen
)
prompt = tokenizer("The function returns", return_tensors="pt")
print(tokenizer.decode(packed.generate(**prompt, max_new_tokens=16, do_sample=False)[0]))
print(ptqpipe.save_checkpoint(packed, args.out), "is the checkpoint")
