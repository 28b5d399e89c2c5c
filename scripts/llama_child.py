"""llama.cpp in its own environment, for bench_serve.py and bench_quality.py. Needs llama-cpp-python, gguf and numpy
alone.

    python llama_child.py make MODEL OUT.gguf           a bfloat16 Llama checkpoint as GGUF: the same numbers, then Q4_0
    python llama_child.py decode MODEL OUT TYPE         what is left of its weights in Q4_0, Q4_K_M, MXFP4 or NVFP4
    python llama_child.py run OUT.gguf THREADS TOKENS SEQUENCES [--cpu-clock]

``make`` writes bfloat16 beside OUT and lets llama.cpp itself quantize that to Q4_0, as ``llama-quantize`` does: its
output matrix becomes Q6_K. ``decode`` lets it quantize the layers alone, embedding and head in bfloat16, with one
thread and without an importance matrix; the folder OUT has the weights as the package gguf decodes them, in float32,
and size.json: bytes of the layers' matrices, and bits of a weight. A matrix whose rows a type's blocks do not divide
gets another type by llama.cpp's rules, such as Q5_0 for Q4_K.

``run`` answers lines of JSON on standard input, {"prompts": [[token, ...], ...], "new": N}, with a line each:
{"began": seconds, "tokens": [seconds of each token of all sequences]}. Prompts and steps go through ``llama_decode``
with all sequences in one batch, each with a stream of the cache of its own; tokens are the largest logits. TOKENS is
the length of a sequence, SEQUENCES the most at once; ``--cpu-clock`` counts CPU seconds.
"""

import ctypes
import json
import math
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

CLOCK = time.process_time if "--cpu-clock" in sys.argv else time.perf_counter
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def tensors_of(model: Path) -> Iterator[tuple[str, Any]]:
    """The bfloat16 tensors of a checkpoint as uint16, by name."""
    for file in sorted(model.glob("*.safetensors")):
        with open(file, "rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(length))
        for name, entry in header.items():
            if name != "__metadata__":
                assert entry["dtype"] == "BF16", f"{name} is {entry['dtype']}, expected BF16"
                at, shape = 8 + length + entry["data_offsets"][0], tuple(entry["shape"])
                yield name, np.memmap(file, np.uint16, "r", at, shape)


def ggml_name(name: str) -> str:
    """GGUF's name of a Llama tensor."""
    layer = re.fullmatch(r"model\.layers\.(\d+)\.(.*)\.weight", name)
    return f"blk.{layer[1]}.{NAMES[layer[2]]}.weight" if layer else NAMES[name.removesuffix(".weight")] + ".weight"


def in_pairs(weight: Any, heads: int) -> Any:
    """A query's or key's rows in llama.cpp's order, where a rotation's two dimensions lie side by side."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def in_halves(weight: Any, heads: int) -> Any:
    """The rows in transformers' order again."""
    return weight.reshape(heads, -1, 2, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(model: Path, out: Path) -> None:
    """The checkpoint in bfloat16 (norms in float32), with a vocabulary of made-up words."""
    import gguf

    config = json.loads((model / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(str(out), "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    words = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(words + [f"t{i}" for i in range(len(words), config["vocab_size"])])
    writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * (config["vocab_size"] - len(words)))
    writer.add_token_scores([0.0] * config["vocab_size"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, bits in tensors_of(model):
        if bits.ndim == 1:
            writer.add_tensor(ggml_name(name), (bits.astype(np.uint32) << 16).view(np.float32))
            continue
        turned = {"q_proj": heads, "k_proj": kv_heads}.get(name.split(".")[-2])
        rows = bits if turned is None else in_pairs(bits, turned)
        as_bytes = np.ascontiguousarray(rows).view(np.uint8)
        writer.add_tensor(ggml_name(name), as_bytes, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def quantize(model: Path, out: Path, parameters: Any) -> None:
    """A checkpoint as the GGUF file that llama.cpp makes of it."""
    whole = out.with_suffix(".bf16")
    write_gguf(model, whole)
    status = llama_cpp.llama_model_quantize(bytes(whole), bytes(out), ctypes.byref(parameters))
    whole.unlink()
    if status:
        raise SystemExit(f"llama.cpp does not quantize {whole} to type {parameters.ftype}: {status}")


def make(model: Path, out: Path) -> None:
    """See the top."""
    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0
    quantize(model, out, parameters)


def decode(model: Path, out: Path, kind: str) -> None:
    """See the top."""
    import gguf

    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.nthread = 1
    parameters.output_tensor_type = parameters.token_embedding_type = gguf.GGMLQuantizationType.BF16
    if kind.endswith("FP4"):  # no type of a file: NVFP4 is refused, and MXFP4 is for experts, the others would be Q8_0
        parameters.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_MXFP4_MOE
        override = llama_cpp.llama_model_tensor_override
        every = (override * 2)(override(rb"blk\..*", gguf.GGMLQuantizationType[kind]), override(None, 0))
        parameters.tt_overrides = every
    else:
        parameters.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    config = json.loads((model / "config.json").read_text())
    turned = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    decoded, size, count = {}, 0, 0
    with tempfile.TemporaryDirectory() as folder:
        quantize(model, Path(folder) / "model.gguf", parameters)
        stored = {tensor.name: tensor for tensor in gguf.GGUFReader(Path(folder) / "model.gguf").tensors}
        for name, bits in tensors_of(model):
            tensor = stored[ggml_name(name)]
            weight = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(bits.shape)
            heads = turned.get(name.split(".")[-2])
            decoded[name] = weight if heads is None else in_halves(weight, heads)
            if name.startswith("model.layers.") and bits.ndim == 2:
                size, count = size + int(tensor.n_bytes), count + bits.size
    out.mkdir(parents=True)
    write_safetensors(decoded, out / "model.safetensors")
    shutil.copy(model / "config.json", out / "config.json")
    (out / "size.json").write_text(json.dumps({"bytes": size, "bits": round(8 * size / count, 3)}))


def write_safetensors(tensors: dict[str, Any], file: Path) -> None:
    """Arrays as float32."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + 4 * tensor.size
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            stream.write(np.ascontiguousarray(tensor, np.float32).data)


class Model:
    """A model with a context for ``sequences`` of ``tokens``."""

    def __init__(self, path: str, threads: int, tokens: int, sequences: int) -> None:
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx, parameters.n_seq_max = math.ceil(tokens / 256) * 256 * sequences, sequences
        parameters.n_batch = parameters.n_ubatch = 512
        parameters.n_threads = parameters.n_threads_batch = threads
        parameters.kv_unified = False
        self.context = llama_cpp.llama_init_from_model(self.model, parameters)
        if not self.context:
            raise SystemExit(f"llama.cpp makes no context of {parameters.n_ctx} tokens")
        self.vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.batch = llama_cpp.llama_batch_init(512, 0, 1)

    def decode(self, entries: list[tuple[int, int, int, bool]]) -> list[int]:
        """Computes (token, position, sequence, whether its logits are wanted); the best token of each that is."""
        for at, (token, position, sequence, wanted) in enumerate(entries):
            self.batch.token[at], self.batch.pos[at], self.batch.n_seq_id[at] = token, position, 1
            self.batch.seq_id[at][0], self.batch.logits[at] = sequence, wanted
        self.batch.n_tokens = len(entries)
        if llama_cpp.llama_decode(self.context, self.batch):
            raise SystemExit("llama_decode failed")
        found = [at for at, entry in enumerate(entries) if entry[3]]
        rows = [llama_cpp.llama_get_logits_ith(self.context, at) for at in found]
        return [int(np.ctypeslib.as_array(row, (self.vocabulary,)).argmax()) for row in rows]

    def answer(self, prompts: list[list[int]], new: int) -> dict[str, Any]:
        """Times of one load."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)
        entries = [
            (token, at, sequence, at == len(prompt) - 1)
            for sequence, prompt in enumerate(prompts)
            for at, token in enumerate(prompt)
        ]
        began, last, times, made = CLOCK(), [], [], []
        for first in range(0, len(entries), 512):
            last += self.decode(entries[first : first + 512])
        for step in range(new):
            times.append(CLOCK())
            made.append(last)
            if step < new - 1:
                length = len(prompts[0]) + step
                last = self.decode([(token, length, sequence, True) for sequence, token in enumerate(last)])
        return {"began": began, "tokens": times, "first": made[0]}


def bytes_read(path: str) -> int:
    """Bytes of weights that a decode step reads: all but the embedding's table."""
    import gguf

    return sum(int(t.n_bytes) for t in gguf.GGUFReader(path).tensors if t.name != "token_embd.weight")


def run(path: str, threads: int, tokens: int, sequences: int) -> None:
    """Answers until the input ends. The first line says what it is."""
    silent = llama_cpp.llama_log_callback(lambda level, text, data: None)
    llama_cpp.llama_log_set(silent, None)
    model = Model(path, threads, tokens, sequences)
    print(json.dumps({"bytes": bytes_read(path), "isa": llama_cpp.llama_print_system_info().decode()}), flush=True)
    for line in sys.stdin:
        print(json.dumps(model.answer(**json.loads(line))), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "make":
        make(Path(sys.argv[2]), Path(sys.argv[3]))
    elif sys.argv[1] == "decode":
        decode(Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
    else:
        run(sys.argv[2], *map(int, sys.argv[3:6]))
