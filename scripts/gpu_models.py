"""What a GPU does with models, beside a CPU: `convert`, `calibrate` to `eval`, and the engine. JSON lines.

    python scripts/gpu_models.py convert|calibrate|engine --scratch DIR [--dense llama-8b] [--formats nvfp4 ...]
        [--rehearse]

Parts of ``gpu_acceptance.py``, which says what each has to show. DIR keeps the models that one part makes for another;
in memory (/dev/shm), disks are not what is measured. ``--rehearse`` runs the same on a CPU with tiny models, the GPU's
kernels under Triton's interpreter. Exits with 1 if something is not as it must be, after everything was measured.
"""

import argparse
import filecmp
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import make_synthetic_model as synthetic
from safetensors.torch import load_file

import ptqpipe
from ptqpipe.numerics.kernels import triton, triton_linear
from ptqpipe.quantization import unit
from ptqpipe.runtime import packed
from ptqpipe.runtime.loading import load, load_model
from ptqpipe.serving.engine import Engine, EngineOptions, Request, SamplingParams
from ptqpipe.serving.engine.model_runner import ModelRunner

ROOT = Path(__file__).resolve().parents[1]
DEMO = ROOT / "ptqpipe" / "demo_model"
TINY = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "tie_word_embeddings": False,
}  # fmt: skip
FORMATS = ("nvfp4", "fp8", "mxfp4", "bfloat16")
MEMORY = {"max_memory": "32GiB"}
FULL_BYTES, FEW_LAYERS = 60e9, 8  # of an 8B model, its copies and an MoE; layers where there is less room
MOMENTS_BOUND = 1e-3  # relative to the largest: float32 sums in another order, in all layers before
PERPLEXITY_BOUND = 5e-3  # relative
TIE = {"float32": 1e-5, "bfloat16": 2.0**-7}  # gap of two logits to the largest one, below which either may come first


class Part:
    """A part under way: where it computes, where its files are, and whether all was as it must be so far."""

    def __init__(self, scratch: Path, dense: str, formats: list[str], *, rehearse: bool) -> None:
        self.scratch, self.dense, self.formats, self.rehearse, self.good = scratch, dense, formats, rehearse, True
        self.device = "cpu" if rehearse else "cuda"
        self.fmt = "mxfp4a16" if rehearse else "nvfp4"  # the interpreter takes its time for a search of global scales
        self.fewer: dict[str, Any] = {"ignore": ["*mlp*"]} if rehearse else {}  # and for every weight

    def say(self, *, good: bool = True, **fields: Any) -> None:
        """One JSON line."""
        self.good = self.good and good
        print(json.dumps(fields | {"good": good}), flush=True)

    @contextmanager
    def kernels(self) -> Iterator[None]:
        """Within it the GPU's kernels run: in a rehearsal Triton's in the place of the CPU's, which one thread at a
        time can interpret."""
        if not self.rehearse:
            yield
            return

        one_at_a_time = threading.Lock()

        def kernel_for(device: torch.device, name: str) -> Callable[..., Any] | None:
            kernel = getattr(triton, name, None)
            if kernel is None:
                return None

            def alone(*given: Any, **options: Any) -> Any:
                with one_at_a_time:
                    return kernel(*given, **options)

            return alone

        def product(x: torch.Tensor, w: packed.PackedWeight, bias: torch.Tensor | None) -> torch.Tensor | None:
            return triton_linear.linear(x, w.data, w.scales, w.factor, w.fmt, w.shape, bias)

        with mock.patch.object(unit, "kernel_for", kernel_for), mock.patch.object(packed, "_kernel", product):
            yield

    def model(self, shape: str) -> Path:
        """A synthetic model of this shape, made if it is not there yet; with fewer layers where room is short."""
        out = self.scratch / shape
        if not (out / "config.json").exists():
            found = synthetic.Shape("llama", TINY) if self.rehearse else synthetic.SHAPES[shape]
            if shape == "llama-8b" and not self.rehearse and shutil.disk_usage(self.scratch).free < FULL_BYTES:
                found = replace(found, config=found.config | {"num_hidden_layers": FEW_LAYERS})
            begun = time.perf_counter()
            nbytes = synthetic.make(out, found)
            self.say(made=shape, bytes=nbytes, layers=found.config["num_hidden_layers"], seconds=since(begun))
        return out

    def converted(self, shape: str, fmt: str) -> Path:
        """A synthetic model converted on the GPU, if it is not there yet."""
        out, model = self.scratch / f"{shape}-{fmt}", self.model(shape)
        if not (out / "ptqpipe.json").exists():
            self.convert(model, out, fmt, gpu=True)
        return out

    def convert(self, model: Path, out: Path, fmt: str, *, gpu: bool, **options: Any) -> None:
        """Converts, and says how fast: GB of the source a second."""
        device, nbytes = self.device if gpu else "cpu", weight_bytes(model)
        begun = time.perf_counter()
        with self.kernels() if gpu else nullcontext():
            ptqpipe.convert(
                model, format=fmt, out=out, device=device, overwrite=True, **MEMORY, **self.fewer, **options
            )
        seconds = since(begun)
        done: dict[str, Any] = {"format": fmt, "device": "gpu" if gpu else "cpu", "bytes": nbytes, "seconds": seconds}
        self.say(convert=model.name, **done, gb_per_s=round(nbytes / seconds / 1e9, 4))


def since(begun: float) -> float:
    """Seconds."""
    return round(time.perf_counter() - begun, 3)


def weight_bytes(folder: Path) -> int:
    """Of all weight files."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def same_files(one: Path, other: Path) -> list[str]:
    """Names of weight files and configs that differ; what was measured (ptqpipe.json, the card) may, in last digits."""
    names = {file.name for folder in (one, other) for file in folder.iterdir()} - {"ptqpipe.json", "README.md"}
    return sorted(filecmp.cmpfiles(one, other, names, shallow=False)[1] + filecmp.cmpfiles(one, other, names)[2])


def run_convert(part: Part) -> None:
    """Part 4: a dense model and an MoE, GB/s, and the CPU's bytes. The dense one stays for the engine."""
    cases = [(part.dense, "nvfp4"), (part.dense, "fp8"), (part.dense, "mxfp4"), ("moe-fused", "mxfp4")]
    cases = [case for case in cases if case[1] in part.formats]
    for shape, fmt in [("tiny", part.fmt)] if part.rehearse else cases:
        gpu, cpu = part.converted(shape, fmt), part.scratch / "on-the-cpu"
        part.convert(part.model(shape), cpu, fmt, gpu=False)
        differing = same_files(gpu, cpu)
        part.say(same_bytes=not differing, convert=shape, format=fmt, differing=differing, good=not differing)
        shutil.rmtree(cpu)
        if (shape, fmt) not in cases[:2]:
            shutil.rmtree(gpu)
    shutil.rmtree(part.scratch / "moe-fused", ignore_errors=True)


def run_calibrate(part: Part) -> None:
    """Part 5: calibrate, tune, convert with statistics and eval on both devices, of a trained model; then one of 1B."""
    model, data = (part.model("tiny"), tokens(128, 4, 32)) if part.rehearse else (trained(), DEMO / "heldout.txt")
    windows = {"samples": 2, "seqlen": 32} if part.rehearse else {"samples": 32, "seqlen": 256}
    each = [calibrated(part, model, data, windows, gpu=gpu) for gpu in (False, True)]
    compare_moments(part, model.name, *(where / "stats" for where in each))
    outs = [part.scratch / "with-statistics-cpu", part.scratch / "with-statistics-gpu"]
    for gpu, out in enumerate(outs):  # of the CPU's statistics: the same question to both
        part.convert(model, out, part.fmt, gpu=bool(gpu) and not part.rehearse, stats=each[0] / "stats")
    differing = same_files(*outs)
    part.say(same_bytes=not differing, convert="with statistics", differing=differing, good=not differing)
    tuned(part, model, each)
    scored = [score(part, each[gpu] / "model", model, data, gpu=bool(gpu)) for gpu in (0, 1)]
    change = abs(scored[1] / scored[0] - 1)
    part.say(perplexity=scored, change=change, bound=PERPLEXITY_BOUND, good=change <= PERPLEXITY_BOUND)
    if part.rehearse:
        return
    large, ids = part.model("1gb"), tokens(32000, 8, 256)
    both = [calibrated(part, large, ids, {"samples": 7, "seqlen": 256}, gpu=gpu, tune=False) for gpu in (True, False)]
    compare_moments(part, large.name, *(where / "stats" for where in both))


def trained() -> Path:
    """The standard model where it is at hand, else the one of the package."""
    shared = Path(os.environ.get("PTQPIPE_SHARED", ROOT.parent / "shared"))
    found = shared / "assets" / "models" / "bench-4m" / "hf"
    return found if found.is_dir() else DEMO


def tokens(vocabulary: int, rows: int, columns: int) -> torch.Tensor:
    """Random tokens, int64 ``[rows, columns]``."""
    return torch.randint(vocabulary, (rows, columns), generator=torch.Generator().manual_seed(0))


def calibrated(part: Part, model: Path, data: Any, windows: dict[str, Any], *, gpu: bool, tune: bool = True) -> Path:
    """A folder with statistics and codes of GPTQ, made on one device; its times are said."""
    where = part.scratch / f"{model.name}-{'gpu' if gpu else 'cpu'}"
    shutil.rmtree(where, ignore_errors=True)
    where.mkdir()
    device: dict[str, Any] = {"device": part.device if gpu else "cpu", **MEMORY}
    begun = time.perf_counter()
    ptqpipe.calibrate(model, data, where / "stats", **windows, **device)
    part.say(calibrate=model.name, device="gpu" if gpu else "cpu", seconds=since(begun))
    if tune:
        begun = time.perf_counter()
        ptqpipe.tune(model, data, where / "codes", format=part.fmt, method="gptq", **windows, **device, **part.fewer)
        part.say(tune=model.name, device="gpu" if gpu else "cpu", seconds=since(begun))
    return where


def compare_moments(part: Part, model: str, one: Path, other: Path) -> None:
    """The largest difference of any statistic, relative to the largest number of its tensor."""
    worst, place = 0.0, ""
    for file in sorted(one.rglob("*.safetensors")):
        first, second = load_file(file), load_file(other / file.relative_to(one))
        for name, a in first.items():
            if a.is_floating_point() and a.numel() and "amax" not in name and "quantile" not in name:
                gap = float((a.double() - second[name].double()).abs().max() / a.double().abs().max().clamp(min=1e-30))
                worst, place = max((worst, place), (gap, f"{file.stem} {name}"))
    part.say(statistics=model, difference=worst, at=place, bound=MOMENTS_BOUND, good=worst <= MOMENTS_BOUND)


def tuned(part: Part, model: Path, each: list[Path]) -> None:
    """Checkpoints of either device's GPTQ codes; the share of bytes of codes that are the same."""
    for where in each:
        part.convert(model, where / "model", part.fmt, gpu=False, codes=where / "codes")
    same = total = 0
    for file in sorted((each[0] / "model").glob("*.safetensors")):
        first, second = load_file(file), load_file(each[1] / "model" / file.name)
        for name, a in first.items():
            if a.dtype == torch.uint8:
                same, total = same + int((a == second[name]).sum()), total + a.numel()
    part.say(gptq=model.name, same_codes=round(same / total, 5))


def score(part: Part, ckpt: Path, model: Path, data: Any, *, gpu: bool) -> float:
    """The perplexity of a checkpoint, measured on one device; its time is said."""
    begun = time.perf_counter()
    found = ptqpipe.evaluate(
        ckpt, data, source=model, device=part.device if gpu else "cpu", out=ckpt.parent / "eval.json",
        max_tokens=64 if part.rehearse else 8192, overwrite=True,
    )  # fmt: skip
    perplexity = float(found.record["perplexity"][0]["checkpoint"])
    part.say(eval=ckpt.parent.name, perplexity=perplexity, seconds=since(begun))
    return perplexity


class NoText:
    """A tokenizer's place where nobody reads the text."""

    def decode(self, tokens: list[int], **options: Any) -> str:
        """Nothing."""
        return ""


def engine_of(model: Any, length: int, most: int) -> Engine:
    """An engine for ``most`` sequences of ``length`` tokens, without prefix caching."""
    options = EngineOptions(64 << 30, length, most, max_batch_tokens=4096, prefix_caching=False)
    runner = ModelRunner(model, options)
    return Engine(runner, NoText(), options=options, vocabulary=runner.config.vocab_size, end_tokens=())


def generate(engine: Engine, prompts: torch.Tensor, new: int) -> tuple[list[list[int]], float, float]:
    """(greedy tokens of every prompt, seconds until all have one, seconds of the others)."""
    params = SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True)
    found: list[list[int]] = [[] for _ in prompts]
    for at, prompt in enumerate(prompts.tolist()):
        engine.add(Request(str(at), tuple(prompt), params))
    begun = first = time.perf_counter()
    while engine.busy:
        for piece in engine.step():
            found[int(piece.request)] += piece.tokens
        first = first if first > begun else time.perf_counter() if all(found) else begun
    return found, first - begun, time.perf_counter() - first


def by_transformers(model: Any, prompt: torch.Tensor, new: int) -> tuple[list[int], list[float]]:
    """(greedy tokens after a prompt, gap between the best two logits over the largest) by transformers' own cache."""
    found, gaps, given, cache = list[int](), list[float](), prompt[None].to(model.device), None
    with torch.inference_mode():
        for _ in range(new):
            out = model(input_ids=given, past_key_values=cache, use_cache=True)
            cache, logits = out.past_key_values, out.logits[0, -1].float()
            best = logits.topk(2)
            gaps.append(float((best.values[0] - best.values[1]) / logits.abs().max()))
            found.append(int(best.indices[0]))
            given = best.indices[:1][None]
    return found, gaps


def compare_greedy(part: Part, ckpt: Path, dtype: str, new: int) -> None:
    """The engine's greedy tokens beside transformers', of the same weights; they may part at a tie alone."""
    own, device = getattr(torch, dtype), part.device
    prompts = tokens(100, 4, 12)
    with part.kernels():
        made, _, _ = generate(engine_of(load(ckpt, dtype=own, device=device), 12 + new, 4), prompts, new)
    theirs = load_model(ckpt, dtype=own, device=device)
    same, ties = 0, 0
    for prompt, ours in zip(prompts, made, strict=True):
        wanted, gaps = by_transformers(theirs, prompt, new)
        parted = next((at for at, pair in enumerate(zip(ours, wanted, strict=True)) if pair[0] != pair[1]), None)
        same += parted is None
        ties += parted is not None and gaps[parted] <= TIE[dtype]
    good = same + ties == len(prompts)
    part.say(greedy=ckpt.name, dtype=dtype, prompts=len(prompts), same=same, parted_at_ties=ties, new=new, good=good)


def measure_engine(part: Part, ckpt: Path, name: str) -> None:
    """Tokens a second by batch; and how many sequences of a batch have the tokens that they get alone."""
    length, new = (6, 2) if part.rehearse else (512, 32)
    batches = (1, 2) if part.rehearse else (1, 16, 64)
    begun = time.perf_counter()
    model = load(ckpt, dtype=torch.bfloat16, device=part.device)
    part.say(load=name, seconds=since(begun))
    engine, prompts = engine_of(model, length + new, max(batches)), tokens(100, max(batches), length)
    with part.kernels():
        alone = [generate(engine, prompts[at : at + 1], new)[0][0] for at in range(2)]
        for batch in batches:
            generate(engine, prompts[:batch], new)  # compiles and records what the steps of such a batch need
            found, prefill, decode = generate(engine, prompts[:batch], new)
            part.say(
                engine=name, batch=batch, prompt=length, new=new, prefill_tokens_s=round(batch * length / prefill, 1),
                decode_tokens_s=round(batch * (new - 1) / decode, 1),
                as_alone=sum(a == b for a, b in zip(alone, found, strict=False)), compared=min(batch, 2),
            )  # fmt: skip
    if part.device == "cuda":
        part.say(engine=name, gpu_gib=round(torch.cuda.max_memory_allocated() / 2**30, 2))
        torch.cuda.reset_peak_memory_stats()


def measure_transformers(part: Part, ckpt: Path, name: str) -> None:
    """Tokens a second of transformers' own generation, by batch: a first call of one token is what prefill takes."""
    length, new = 512, 32
    model, prompts = load_model(ckpt, dtype=torch.bfloat16, device=part.device), tokens(100, 64, length)
    for batch in (1, 16, 64):
        given, times = prompts[:batch].to(part.device), []
        for count in (1, 1, new):
            torch.cuda.synchronize()
            begun = time.perf_counter()
            model.generate(given, max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - begun)
        part.say(
            transformers=name, batch=batch, prompt=length, new=new,
            prefill_tokens_s=round(batch * length / times[1], 1),
            decode_tokens_s=round(batch * (new - 1) / (times[2] - times[1]), 1),
        )  # fmt: skip


def run_engine(part: Part) -> None:
    """Part 6: tokens a second by format, and transformers' own; then greedy tokens beside transformers'."""
    for fmt in [fmt for fmt in ("nvfp4", "fp8", "bfloat16") if fmt in part.formats and not part.rehearse]:
        plain = fmt == "bfloat16"
        ckpt = part.model(part.dense) if plain else part.converted(part.dense, fmt)
        measure_engine(part, ckpt, f"{part.dense} {fmt}")
        torch.cuda.empty_cache()
    if not part.rehearse:
        measure_transformers(part, part.model(part.dense), f"{part.dense} bfloat16")
    model = part.model("tiny") if part.rehearse else trained()
    ckpt = part.scratch / f"{model.name}-for-the-engine"
    part.convert(model, ckpt, part.fmt, gpu=not part.rehearse)
    for given in (model, ckpt):
        for dtype in ("float32",) if part.rehearse or given == ckpt else ("float32", "bfloat16"):
            compare_greedy(part, given, dtype, 8 if part.rehearse else 48)
    if part.rehearse:
        measure_engine(part, ckpt, f"tiny {part.fmt}")


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = {"convert": run_convert, "calibrate": run_calibrate, "engine": run_engine}
    parser.add_argument("part", choices=parts)
    parser.add_argument("--scratch", type=Path, required=True, help="folder for models, best in memory")
    parser.add_argument(
        "--dense", choices=sorted(synthetic.SHAPES), default="llama-8b", help="what is converted and run"
    )
    parser.add_argument("--formats", nargs="+", default=[*FORMATS], choices=FORMATS, help="and in which formats")
    parser.add_argument("--rehearse", action="store_true", help="tiny models on a CPU, TRITON_INTERPRET=1")
    options = parser.parse_args()
    if options.rehearse and not triton.interpreting():
        sys.exit("--rehearse needs Triton and TRITON_INTERPRET=1")
    options.scratch.mkdir(parents=True, exist_ok=True)
    part = Part(options.scratch, options.dense, options.formats, rehearse=options.rehearse)
    parts[options.part](part)
    return 0 if part.good else 1


if __name__ == "__main__":
    sys.exit(main())
