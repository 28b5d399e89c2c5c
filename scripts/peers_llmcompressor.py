"""Quantizes a model with llm-compressor's own code and saves its compressed-tensors checkpoint.

Run by bench_quality.py under an interpreter that has llmcompressor; must not import ptqpipe. Weights are loaded in
float32, so that only the codes and scales differ from other tools. The head is kept, as everywhere in that benchmark.

    python scripts/peers_llmcompressor.py MODEL OUT --scheme NVFP4A16 --method rtn
        [--observer NAME] [--calibration FILE]

FILE holds one {"input_ids": [...]} a line. Methods: rtn (QuantizationModifier), gptq (GPTQModifier, its defaults).
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch


def scheme_of(name: str, observer: str | None) -> dict[str, Any]:
    """The preset as a config group, with another observer of the weights where one is named."""
    from compressed_tensors.quantization import preset_name_to_scheme

    scheme = preset_name_to_scheme(name, ["Linear"])
    if observer:
        scheme.weights.observer = observer
    return {"group_0": scheme}


def modifier_of(args: argparse.Namespace) -> Any:
    """What llm-compressor's oneshot applies."""
    groups = scheme_of(args.scheme, args.observer)
    if args.method == "gptq":
        from llmcompressor.modifiers.gptq import GPTQModifier

        return GPTQModifier(config_groups=groups, ignore=["lm_head"])
    from llmcompressor.modifiers.quantization import QuantizationModifier

    return QuantizationModifier(config_groups=groups, ignore=["lm_head"])


def main() -> None:
    """Loads, quantizes, saves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("out")
    parser.add_argument("--scheme", required=True)
    parser.add_argument("--method", required=True, choices=["rtn", "gptq"])
    parser.add_argument("--observer")
    parser.add_argument("--calibration", type=Path)
    args = parser.parse_args()
    from datasets import Dataset
    from llmcompressor import oneshot
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    options: dict[str, Any] = {}
    if args.calibration is not None:
        rows = [json.loads(line)["input_ids"] for line in args.calibration.read_text().splitlines()]
        options = {
            "dataset": Dataset.from_dict({"input_ids": rows, "attention_mask": [[1] * len(row) for row in rows]}),
            "num_calibration_samples": len(rows),
            "max_seq_length": max(map(len, rows)),
            "shuffle_calibration_samples": False,
        }
    oneshot(model=model, recipe=modifier_of(args), **options)
    model.save_pretrained(args.out, save_compressed=True)


if __name__ == "__main__":
    main()
