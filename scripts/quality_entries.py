"""Who is compared in bench_quality.py, and the commands that produce each entry's checkpoint.

Knows command lines; must not import torch, ptqpipe or a peer. An entry is one tool's way to do a format; its steps are
processes that run one after another, whose costs add up.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path

HERE = Path(__file__).parent
FORMATS = ("nvfp4", "nvfp4_w4a4", "mxfp4a16", "mxfp4", "fp8")
LLMC_SCHEMES = {
    "nvfp4": "NVFP4A16",
    "nvfp4_w4a4": "NVFP4",
    "mxfp4a16": "MXFP4A16",
    "mxfp4": "MXFP4",
    "fp8": "FP8_DYNAMIC",
}
MODELOPT_CONFIGS = {
    "nvfp4": "NVFP4_DEFAULT_CFG",
    "nvfp4_w4a4": "NVFP4_DEFAULT_CFG",
    "mxfp4a16": "MXFP4_DEFAULT_CFG",
    "mxfp4": "MXFP4_DEFAULT_CFG",
    "fp8": "FP8_PER_CHANNEL_PER_TOKEN_CFG",
}
SWEEP, HESSIAN = "NVFP4_W4A4_WEIGHT_MSE_FP8_SWEEP_CFG", "NVFP4_W4A4_WEIGHT_LOCAL_HESSIAN_CFG"
AWQ, FOUR_OVER_SIX = "NVFP4_AWQ_LITE_CFG", "NVFP4_FOUR_OVER_SIX_CFG"
# AutoRound has no preset for E4M3 weights per row with inputs per token.
AUTOROUND_FP8 = json.dumps(
    {
        "bits": 8,
        "group_size": -1,
        "data_type": "fp",
        "sym": True,
        "act_bits": 8,
        "act_group_size": -1,
        "act_data_type": "fp",
        "act_dynamic": True,
        "act_sym": True,
    }
)
AUTOROUND_SCHEMES = {
    "nvfp4": "NVFP4",
    "nvfp4_w4a4": "NVFP4",
    "mxfp4a16": "MXFP4",
    "mxfp4": "MXFP4",
    "fp8": AUTOROUND_FP8,
}
DOWN_64 = "down_proj:64"
ONE_SIDED, TWO_SIDED = (("--method", "gptq", "--metric", metric) for metric in ("output", "kl"))
TRAINED = ("--method", "kl", "--train", "head,embeddings")
OWN_ROWS = 128  # that a model writes
LEARNED = {"fp8": 200, "mxfp4": 200, "nvfp4_w4a4": 50}  # steps of rotations that are learned
NV, FP4, FOUR_BIT_INPUTS = ("nvfp4", "nvfp4_w4a4"), FORMATS[:4], ("nvfp4_w4a4", "mxfp4")
QUANTIZED_INPUTS = (*FOUR_BIT_INPUTS, "fp8")


@dataclass(frozen=True, slots=True)
class Entry:
    """One tool's way.

    name        of the method; with the tool it identifies the entry
    formats     that it does
    calibrated  whether its weights depend on the calibration text
    options     of `ptqpipe convert`, or of the peer's script
    transform   ptqpipe: what `transform --transforms` does first, on statistics of the model; then it is calibrated
                again, unless tuned
    learn       ptqpipe: whether rotations are learned and folded before all this, on statistics of their own
    tune        ptqpipe: options of `tune`, whose codes are converted; None: no tuning
    quality     ptqpipe: `convert --data TEXT --quality` of this name, one command; None: the stages one by one. Under
                a budget, one of its options, the format does not count
    own_text    ptqpipe: whether it is calibrated or tuned on text that `generate` lets the model write: needs no data,
                or where it is calibrated, too, as many rows beside the others
    moments     ptqpipe: of a calibration of its own, as `calibrate --moments` takes them; empty: those of all entries
    floats      ptqpipe: what is measured has the float weights, and of the checkpoint how inputs are quantized
    rotate      ptqpipe: inputs that are rotated while the model runs, as `convert --rotate` takes them; it is kept out
                of benchmarks/quality.jsonl, since of the readers vLLM alone runs it
    """

    tool: str
    name: str
    formats: tuple[str, ...] = FORMATS
    calibrated: bool = False
    options: tuple[str, ...] = ()
    transform: str | None = None
    learn: bool = False
    tune: tuple[str, ...] | None = None
    own_text: bool = False
    quality: str | None = None
    moments: str = ""
    floats: bool = False
    rotate: str = ""

    @property
    def key(self) -> str:
        """What the command line calls it."""
        return f"{self.tool}:{self.name}"

    def needs_text(self, fmt: str) -> bool:
        """Whether a seed matters: it runs the model on text, for its weights or for a peer's static input scales."""
        return self.calibrated or self.own_text or (fmt == "nvfp4_w4a4" and self.tool != "ptqpipe")


def _ours(name: str, *options: str, **more: str | tuple[str, ...] | bool | int | None) -> Entry:
    formats = more.pop("formats", FORMATS)
    return Entry("ptqpipe", name, formats, bool(more.pop("calibrated", True)), options, **more)  # type: ignore[arg-type]


ENTRIES = (
    _ours("absmax", "--scale-search", "absmax", "--global-scale", "absmax", calibrated=False, formats=(*NV, "fp8")),
    _ours("floor", "--scale-search", "ocp_floor", calibrated=False, formats=("mxfp4a16", "mxfp4")),
    _ours("exact", "--scale-search", "exact", calibrated=False),
    _ours("enlarged", "--scale-search", "enlarged", calibrated=False, formats=("mxfp4a16", "mxfp4")),
    _ours("inputs alone", "--scale-search", "exact", calibrated=False, formats=QUANTIZED_INPUTS, floats=True),
    _ours("gptq, own text", "--algorithm", "gptq", calibrated=False, own_text=True),
    _ours("gptq in order, own text", tune=ONE_SIDED, calibrated=False, own_text=True),
    _ours("two-sided gptq in order, own text", tune=TWO_SIDED, calibrated=False, own_text=True),
    _ours("exact, inputs", "--algorithm", "rtn", "--objective", "none", formats=("nvfp4_w4a4",)),
    _ours("exact, diagonal", "--algorithm", "rtn", "--objective", "diagonal"),
    _ours("exact, 16x16", "--algorithm", "rtn", "--objective", "block", formats=FP4),
    _ours("gptq", "--algorithm", "gptq"),
    _ours("two-sided gptq", "--algorithm", "gptq", moments="diagonal,full,kl", formats=FP4),
    _ours("awq", "--algorithm", "rtn", "--objective", "diagonal", transform="awq", formats=FP4),
    _ours("awq + gptq", "--algorithm", "gptq", transform="awq", formats=FP4),
    _ours("aqas + gptq", "--algorithm", "gptq", transform="aqas", formats=QUANTIZED_INPUTS),
    *(_ours(f"convert --quality {quality}", quality=quality) for quality in ("fast", "good", "best")),
    _ours("convert --quality best --untie", "--untie", quality="best", formats=QUANTIZED_INPUTS),
    _ours("convert --data self", calibrated=False, own_text=True, quality="best"),
    _ours("convert --data FILE --data self", own_text=True, quality="best"),
    _ours("convert --budget 4.75bits", "--budget", "4.75bits", "--reader", "vllm", quality="best", formats=("nvfp4",)),
    _ours("gptq in order", tune=ONE_SIDED),
    _ours("two-sided gptq in order", tune=TWO_SIDED),
    _ours("awq + gptq in order", transform="awq", tune=ONE_SIDED, formats=("nvfp4", "mxfp4a16")),
    _ours("aqas + gptq in order", transform="aqas", tune=ONE_SIDED, formats=FOUR_BIT_INPUTS),
    _ours("aqas + two-sided gptq in order", transform="aqas", tune=TWO_SIDED, formats=FOUR_BIT_INPUTS),
    _ours("end to end after two-sided gptq in order", tune=("--method", "kl")),
    *(
        _ours(f"aqas + {name}, own text beside", transform="aqas", tune=how, own_text=True, formats=FOUR_BIT_INPUTS)
        for name, how in (
            ("two-sided gptq in order", TWO_SIDED),
            ("end to end after two-sided gptq in order", ("--method", "kl")),
        )
    ),
    _ours("two-sided gptq in order, head and embedding trained", tune=TRAINED, formats=("nvfp4", "mxfp4a16", "fp8")),
    _ours(
        "aqas + two-sided gptq in order, head and embedding trained",
        transform="aqas",
        tune=TRAINED,
        formats=FOUR_BIT_INPUTS,
    ),
    *(
        _ours(f"learned rotations + {name}", learn=True, tune=how, formats=("fp8",))
        for name, how in (
            ("two-sided gptq in order", TWO_SIDED),
            ("end to end after two-sided gptq in order", ("--method", "kl")),
            ("two-sided gptq in order, head and embedding trained", TRAINED),
        )
    ),
    _ours(
        "learned rotations + aqas + two-sided gptq in order",
        learn=True,
        transform="aqas",
        tune=TWO_SIDED,
        formats=FOUR_BIT_INPUTS,
    ),
    *(
        _ours(
            f"learned rotations + aqas + {name}, own text beside",
            learn=True,
            transform="aqas",
            tune=how,
            own_text=True,
            formats=FOUR_BIT_INPUTS,
        )
        for name, how in (
            ("end to end after two-sided gptq in order", ("--method", "kl")),
            ("two-sided gptq in order, head and embedding trained", TRAINED),
        )
    ),
    _ours("rotated, exact", "--scale-search", "exact", calibrated=False, formats=("mxfp4",), rotate=DOWN_64),
    _ours("rotated, gptq", "--algorithm", "gptq", formats=("mxfp4",), rotate=DOWN_64),
    _ours("rotated, two-sided gptq in order", tune=TWO_SIDED, formats=("mxfp4",), rotate=DOWN_64),
    _ours("rotated, convert --quality best", quality="best", formats=("mxfp4",), rotate=DOWN_64),
    Entry("llm-compressor", "rtn", options=("--method", "rtn")),
    Entry("llm-compressor", "expanded_mse", NV, options=("--method", "rtn", "--observer", "nvfp4_expanded_mse")),
    Entry("llm-compressor", "mse", FORMATS[2:], options=("--method", "rtn", "--observer", "memoryless_mse")),
    Entry("llm-compressor", "imatrix_mse", FORMATS, True, ("--method", "rtn", "--observer", "imatrix_mse")),
    Entry("llm-compressor", "gptq", FORMATS, True, ("--method", "gptq")),
    Entry("llm-compressor", "awq", FP4, True, ("--method", "rtn", "--transform", "awq")),
    Entry("llm-compressor", "awq + gptq", FP4, True, ("--method", "gptq", "--transform", "awq")),
    Entry("llm-compressor", "smoothquant", QUANTIZED_INPUTS, True, ("--method", "rtn", "--transform", "smoothquant")),
    Entry(
        "llm-compressor",
        "smoothquant + gptq",
        QUANTIZED_INPUTS,
        True,
        ("--method", "gptq", "--transform", "smoothquant"),
    ),
    Entry("llm-compressor", "gptq + expanded_mse", NV, True, ("--method", "gptq", "--observer", "nvfp4_expanded_mse")),
    Entry("modelopt", "max"),
    Entry("modelopt", "mse", NV, options=("--config", SWEEP, "--algorithm", '{"method": "mse"}')),
    Entry("modelopt", "mse", ("fp8",), options=("--algorithm", '{"method": "mse"}')),
    Entry("modelopt", "fp8 sweep", NV, options=("--config", SWEEP)),
    Entry("modelopt", "four_over_six", NV, options=("--config", FOUR_OVER_SIX)),
    Entry("modelopt", "local_hessian", NV, True, ("--config", HESSIAN)),
    Entry("modelopt", "awq_lite", NV, True, ("--config", AWQ)),
    Entry("fouroversix", "mse", NV, options=("--rule", "mse")),
    Entry("fouroversix", "static_6", FORMATS[2:4], options=("--rule", "static_6")),
    Entry("torchao", "rtn"),
    *(Entry("llama.cpp", kind, ("nvfp4",), options=(kind,)) for kind in ("Q4_0", "Q4_K_M", "NVFP4")),
    Entry("llama.cpp", "MXFP4", ("mxfp4a16",), options=("MXFP4",)),
    Entry("auto-round", "opt_rtn", FORMATS, True, ("--iters", "0")),
    Entry("auto-round", "tuned", FORMATS, True, ("--iters", "200")),
)


@dataclass(frozen=True, slots=True)
class Job:
    """An entry on one model and format.

    out          the checkpoint to write
    calibration  the file of token rows, ``rows`` of ``row_tokens``, that ``seed`` chose
    convert      what `ptqpipe convert` must be told about this model
    device       where ptqpipe computes
    threads      of each of its processes
    """

    entry: Entry
    fmt: str
    source: Path
    out: Path
    calibration: Path
    seed: int
    rows: int
    row_tokens: int
    convert: tuple[str, ...] = ()
    device: str = "cpu"
    threads: int = 1

    @property
    def machine(self) -> list[str]:
        """Where a command of ptqpipe computes; `transform` does it on the CPU alone."""
        return ["--workers", str(self.threads), *(["--device", self.device] if self.device != "cpu" else [])]


def peer_command(job: Job) -> list[str]:
    """The process of a peer, without the interpreter."""
    entry, fmt = job.entry, job.fmt
    weights_only = fmt in ("nvfp4", "mxfp4a16")
    if entry.tool == "llama.cpp":
        return [str(HERE / "llama_child.py"), "decode", str(job.source), str(job.out), *entry.options]
    text = ["--calibration", str(job.calibration)] if entry.needs_text(fmt) else []
    head = [str(HERE / "peers.py"), entry.tool, str(job.source), str(job.out)]
    if entry.tool == "llm-compressor":
        return [*head, "--scheme", LLMC_SCHEMES[fmt], *entry.options, *text]
    if entry.tool == "fouroversix":
        return [*head, "--dtype", "nvfp4" if fmt in NV else "mxfp4", *entry.options, *text]
    if entry.tool == "torchao":
        return [*head, "--format", fmt, *text]
    narrow = ["--weights-only"] if weights_only else []
    if entry.tool == "auto-round":
        seed = ["--seed", str(job.seed), "--calibration", str(job.calibration)]
        return [*head, "--scheme", AUTOROUND_SCHEMES[fmt], *entry.options, *narrow, *seed]
    config = [] if "--config" in entry.options else ["--config", MODELOPT_CONFIGS[fmt]]
    export = [] if entry.name == "awq_lite" or fmt in ("mxfp4a16", "mxfp4") else ["--export"]
    return [*head, *config, *entry.options, *narrow, *text, *export]


def calibrate_command(source: Path, stats: Path, job: Job, moments: str = "diagonal,block,full") -> list[str]:
    """`ptqpipe calibrate` on the same rows that every peer gets."""
    rows = ["--samples", str(job.rows), "--seqlen", str(job.row_tokens), "--moments", moments]
    head = ["-P", "-m", "ptqpipe", "calibrate", str(source), "--data", str(job.calibration), *rows]
    return [*head, "-o", str(stats), *job.machine, "-q"]


def own_steps(job: Job, stats: Path) -> list[list[str]]:
    """The processes of a ptqpipe entry after calibration, whose statistics are in ``stats``; without interpreters."""
    entry, tool, source = job.entry, ["-P", "-m", "ptqpipe"], job.source
    floats, again, codes = (job.out.with_name(job.out.name + tail) for tail in ("-float", "-stats", "-codes"))
    rotated, quiet = ["--rotate", entry.rotate] if entry.rotate else [], [*job.machine, "-q"]
    steps: list[list[str]] = []
    if entry.quality is not None:
        texts = [*([str(job.calibration)] if entry.calibrated else []), *(["self"] if entry.own_text else [])]
        chosen = ["--samples", str(job.rows * len(texts)), "--seqlen", str(job.row_tokens), "--seed", str(job.seed)]
        ask = [*tool, "convert", str(source), *(word for text in texts for word in ("--data", text)), *chosen]
        what = [*entry.options, *([] if "--budget" in entry.options else ["--format", job.fmt])]
        return [[*ask, *what, "--quality", entry.quality, *job.convert, *rotated, "-o", str(job.out), *quiet]]
    data, rows = [str(job.calibration)], job.rows
    if entry.own_text:
        own, count = job.out.with_name(job.out.name + "-text.jsonl"), job.rows if entry.calibrated else OWN_ROWS
        write = [*tool, "generate", str(source), "--samples", str(count), "--seqlen", str(job.row_tokens)]
        steps.append([*write, "--seed", str(job.seed), "-o", str(own), *job.machine])
        if entry.calibrated:
            data, rows = [f"{data[0]}=1", "--data", f"{own}=1"], rows + count
        else:
            data, rows = [str(own)], count
            job = replace(job, calibration=own, rows=count)
    if entry.learn:
        turned, gradients = (job.out.with_name(job.out.name + tail) for tail in ("-turned", "-gradients"))
        steps.append(calibrate_command(source, gradients, job, "diagonal,pairs"))
        fold = [*tool, "transform", str(source), "--transforms", "rotate", "--learn", str(LEARNED[job.fmt])]
        fold += ["--stats", str(gradients), "--format", job.fmt, "--untie", "--dtype", "fp32", "-o", str(turned)]
        steps.append([*fold, *job.machine[:2], "-q"])
        source, stats = turned, job.out.with_name(job.out.name + "-stats")
        steps += [calibrate_command(source, stats, job)] if entry.transform else []
    if entry.transform:
        fold = [*tool, "transform", str(source), "--transforms", entry.transform, "--stats", str(stats)]
        steps.append(
            [*fold, "--format", job.fmt, "--untie", "--dtype", "fp32", "-o", str(floats), *job.machine[:2], "-q"]
        )
        source = floats
    known = ["--stats", str(stats)] if entry.calibrated else []
    if entry.tune is not None:
        chosen = ["--samples", str(rows), "--seqlen", str(job.row_tokens), "--seed", str(job.seed)]
        learn = [*tool, "tune", str(source), "--data", *data, "--format", job.fmt, *chosen]
        steps.append([*learn, *job.convert, *entry.tune, *rotated, "-o", str(codes), *quiet])
        known, rotated = ["--codes", str(codes)], []  # the codes bring their recipe
    elif entry.transform or entry.own_text or entry.moments:
        steps.append(calibrate_command(source, again, job, *([entry.moments] if entry.moments else [])))
        known = ["--stats", str(again)]
    convert = ["--format", job.fmt, *entry.options, *job.convert, *rotated, "-o", str(job.out), *quiet]
    return [*steps, [*tool, "convert", str(source), *known, *convert]]
