"""Quantizes an embedder with another tool's own code, under an interpreter that has the tool; must not import ptqpipe.

    python labs/embedder/peers.py llm-compressor-rtn|llm-compressor-gptq|torchao MODEL OUT [--text FILE]

llm-compressor writes its checkpoint; of torchao's weight-only NVFP4 the decoded weights are written in float32. The
calibration windows are 128 of 256 tokens of the text, cut like ptqpipe's: [CLS] first and [SEP] last.
"""

import argparse
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel, AutoTokenizer


def windows(model: str, text: Path, count: int = 128, length: int = 256) -> torch.Tensor:
    """Token ids int64 [count, length]."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = torch.tensor(tokenizer(text.read_text(encoding="utf-8"), verbose=False)["input_ids"])
    rows = ids[: len(ids) // length * length].view(-1, length)
    chosen = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))[:count]].clone()
    chosen[:, 0], chosen[:, -1] = tokenizer.cls_token_id, tokenizer.sep_token_id
    return chosen


def compress(model: str, out: Path, text: Path | None) -> None:
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier

    loaded = AutoModel.from_pretrained(model, dtype=torch.float32).eval()
    scheme: dict[str, Any] = {"targets": "Linear", "scheme": "NVFP4A16", "ignore": ["re:.*pooler.*"]}
    if text is None:
        oneshot(model=loaded, recipe=QuantizationModifier(**scheme))
    else:
        rows = windows(model, text)
        data = Dataset.from_dict({"input_ids": rows.tolist(), "attention_mask": torch.ones_like(rows).tolist()})
        oneshot(
            model=loaded,
            tokenizer=AutoTokenizer.from_pretrained(model),
            dataset=data,
            recipe=GPTQModifier(**scheme),
            max_seq_length=rows.shape[1],
            num_calibration_samples=len(rows),
            pipeline="basic",  # its sequential pipeline asks for decoder layers by name
        )
    loaded.save_pretrained(out, save_compressed=True)


def torchao_weights(model: str, out: Path) -> None:
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

    loaded = AutoModel.from_pretrained(model, dtype=torch.float32).eval()
    for name, module in loaded.named_modules():
        if isinstance(module, torch.nn.Linear) and "pooler" not in name:
            weight = module.weight.data
            scale = per_tensor_amax_to_scale(weight.abs().amax())
            module.weight.data = NVFP4Tensor.to_nvfp4(weight, per_tensor_scale=scale).dequantize(torch.float32)
    loaded.save_pretrained(out)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("tool", choices=("llm-compressor-rtn", "llm-compressor-gptq", "torchao"))
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--text", type=Path)
    options = parser.parse_args()
    begun = time.process_time()
    if options.tool == "torchao":
        torchao_weights(options.model, options.out)
    else:
        compress(options.model, options.out, options.text if options.tool.endswith("gptq") else None)
    for name in ("tokenizer.json", "tokenizer_config.json", "modules.json", "sentence_bert_config.json"):
        shutil.copy(Path(options.model) / name, options.out / name)
    shutil.copytree(Path(options.model) / "1_Pooling", options.out / "1_Pooling", dirs_exist_ok=True)
    print(f"{options.tool}: {time.process_time() - begun:.1f} CPU-s", flush=True)


if __name__ == "__main__":
    main()
