"""Claims about the quality benchmark: all tools are measured alike, on text that nothing was calibrated on."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ptqpipe
from ptqpipe.numerics.qtensor import QTensor

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
DEMO = SCRIPTS.parent / "ptqpipe" / "demo_model"
TOKENS = 1024


@pytest.fixture(scope="module")
def modules() -> Iterator[Any]:
    """Imports the benchmark's files by name, as they import each other."""
    pytest.importorskip("transformers", reason="needs the extra hf")
    sys.path.insert(0, str(SCRIPTS))
    yield import_module
    sys.path.remove(str(SCRIPTS))


@pytest.fixture(scope="module")
def measure(modules: Any) -> ModuleType:
    module: ModuleType = modules("quality_measure")
    return module


@pytest.fixture(scope="module")
def baseline(measure: ModuleType) -> Any:
    texts = measure.read_texts(DEMO, DEMO / "heldout.txt", DEMO / "heldout.txt", tokens=TOKENS, shared=False)
    return measure.Baseline.of(DEMO, texts)


def decoded(checkpoint: Path, out: Path) -> None:
    """A dump as the peers' scripts write it: the decode of every weight as plain safetensors."""
    tensors: dict[str, torch.Tensor] = {}
    with ptqpipe.load_tensors(checkpoint) as weights:
        for name, value in weights.items():
            tensors[name] = value.dequantize() if isinstance(value, QTensor) else value.clone()
    out.mkdir()
    save_file(tensors, str(out / "model.safetensors"))
    suffix = "input_global_scale"  # divides in a checkpoint, multiplies in a dump
    stored = load_file(checkpoint / "model.safetensors")
    inputs = {n.replace(suffix, "input_scale"): 1 / w.float().reshape(1) for n, w in stored.items() if suffix in n}
    if inputs:
        (out / "inputs").mkdir()
        save_file(inputs, str(out / "inputs" / "scales.safetensors"))
    shutil.copy(DEMO / "config.json", out)


@pytest.mark.slow
@pytest.mark.parametrize("fmt", ["nvfp4", "nvfp4_w4a4", "mxfp4", "fp8"])
def test_decoded_weights_measure_what_their_checkpoint_measures(baseline: Any, tmp_path: Path, fmt: str) -> None:
    exact: dict[str, Any] = {"input_amax": 336.0} if fmt == "nvfp4_w4a4" else {}  # 1/8 has an exact reciprocal
    ptqpipe.convert(DEMO, format=fmt, out=tmp_path / "ckpt", **exact)
    decoded(tmp_path / "ckpt", tmp_path / "dump")
    (tmp_path / "dump" / "size.json").write_text('{"bytes": 5}')
    stored_one, dump = (baseline.measure(tmp_path / name, fmt) for name in ("ckpt", "dump"))
    assert dump.pop("bytes") == 5
    assert (stored_one.pop("read"), dump.pop("read")) == ("checkpoint", "decoded weights")
    assert stored_one == dump
    assert 0 < dump["kl"] < 1


@pytest.mark.slow
def test_inputs_alone_are_quantized_before_the_float_weights(baseline: Any, tmp_path: Path) -> None:
    for fmt in ("nvfp4", "mxfp4"):
        ptqpipe.convert(DEMO, format=fmt, out=tmp_path / fmt)
    kept, quantized, whole = (
        baseline.measure(tmp_path / fmt, fmt, floats=floats)
        for fmt, floats in (("nvfp4", True), ("mxfp4", True), ("mxfp4", False))
    )
    assert kept["kl"] == 0 == kept["weights"]
    assert 0 < quantized["kl"] < whole["kl"]


@pytest.mark.parametrize(("fmt", "bits"), [("nvfp4", 4.5), ("mxfp4a16", 4.25)])
def test_the_limit_is_counted_from_what_exact_scales_lose_on_normal_numbers(
    modules: Any, fmt: str, bits: float
) -> None:
    w = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0)) * 0.02
    decode = ptqpipe.quantize(w, fmt, scale_search="exact").dequantize().double()
    lost = float((decode - w).square().sum() / w.double().square().sum())
    assert modules("quality_table").NORMAL[fmt] == (bits, pytest.approx(lost, rel=0.01))


def test_a_factor_of_the_input_is_taken_out_after_quantizing(measure: ModuleType) -> None:
    from ptqpipe.numerics.schemes import Activation
    from ptqpipe.runtime.input_quantizers import InputQuantizer

    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    plain = InputQuantizer(Activation.MXFP4)
    # Powers of two per block of 32 move its exponent and no code.
    (got,) = measure.hook(plain, torch.full((32,), 8.0))(None, (x,))
    assert torch.equal(got, plain(x))
    uneven = torch.cat([torch.full((16,), 64.0), torch.ones(16)])
    (other,) = measure.hook(plain, uneven)(None, (x,))
    assert torch.equal(other, plain(x * uneven) / uneven)
    assert not torch.equal(other, plain(x))


def test_calibration_rows_do_not_overlap_the_held_out_text(measure: ModuleType) -> None:
    file = DEMO / "heldout.txt"
    every = measure.read_texts(DEMO, file, file, tokens=10**9, shared=True).calibration
    texts = measure.read_texts(DEMO, file, file, tokens=TOKENS, shared=False)
    assert torch.equal(texts.held_out, every[:TOKENS])
    assert torch.equal(texts.calibration, every[TOKENS:])
    one, again, other = texts.rows(1), texts.rows(1), texts.rows(2)
    assert torch.equal(one, again)
    assert one.shape[1] == texts.window == 256
    assert one.shape == other.shape
    cut = {tuple(row) for row in every[TOKENS:].split(256) for row in [row.tolist()]}
    assert all(tuple(row) in cut for row in one.tolist())


QUESTIONS = [
    {"query": "Question: Why?\n", "choices": ["so", "because"], "gold": 1},
    {"query": "Question: Which one?", "choices": ["this ", "that"], "gold": 0},
    {"query": "Question: How?", "choices": ["slowly", "fast"], "gold": 0},
]


@pytest.fixture
def questions(tmp_path: Path) -> list[Path]:
    """Two files of three questions each, the second in capitals."""
    files = [tmp_path / name for name in ("small.jsonl", "large.jsonl")]
    rows = [json.dumps(row) + "\n" for row in QUESTIONS]
    files[0].write_text("".join(rows))
    files[1].write_text("".join(rows).replace("Why", "WHY").replace("Which", "WHICH").replace("How", "HOW"))
    return files


def test_a_chat_is_four_questions_in_turn_with_their_right_answers(measure: ModuleType, questions: list[Path]) -> None:
    (chat,) = measure.turns(questions)  # the last two questions of six make no chat
    assert [turn["role"] for turn in chat] == ["user", "assistant"] * 4
    texts = [turn["content"] for turn in chat]
    assert texts == ["Why?", "because", "WHY?", "because", "Which one?", "this", "WHICH one?", "this"]


def test_chats_are_written_by_the_models_template(measure: ModuleType, questions: list[Path], tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    assert measure.chat_tokens(DEMO, questions, 100) is None  # it has none
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    tokenizer.chat_template = "{% for m in messages %}[{{ m['role'] }}: {{ m['content'] }}]{% endfor %}"
    shutil.copytree(DEMO, tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    tokens = measure.chat_tokens(tmp_path / "model", questions, 12)
    whole = tokenizer(
        "[user: Why?][assistant: because][user: WHY?][assistant: because]"
        "[user: Which one?][assistant: this][user: WHICH one?][assistant: this]",
        add_special_tokens=False,
    )["input_ids"]
    assert tokens.tolist() == whole[:12]


@pytest.mark.shared
@pytest.mark.published
def test_chats_of_a_published_model_have_its_marks(modules: Any, measure: ModuleType, shared_dir: Path) -> None:
    bench = modules("bench_quality")
    (model,) = (one for one in bench.MODELS if one.name == "smollm2-135m")
    folder = bench.place(model.folder, shared_dir)
    tokens = measure.chat_tokens(folder, [bench.place(name, shared_dir) for name in bench.CHATS], 8192)
    begin, end = measure.load_tokenizer(folder).convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    assert len(tokens) == 8192
    assert tokens[0] == begin
    assert abs(int((tokens == begin).sum()) - int((tokens == end).sum())) <= 1


@pytest.mark.slow
def test_every_text_is_measured_in_windows_of_every_size(measure: ModuleType, baseline: Any, tmp_path: Path) -> None:
    ptqpipe.convert(DEMO, format="nvfp4", out=tmp_path / "out")
    others = {"other_": baseline.texts.held_out[:700], "chat_": baseline.texts.calibration[:300]}
    measured = {}
    for window in (64, 128):
        one = measure.Baseline.of(DEMO, baseline.texts, others=others, window=window, folder=tmp_path)
        measured[window] = one.measure(tmp_path / "out", "nvfp4")
        assert measured[window].keys() >= {"kl", "other_kl", "chat_kl", "other_perplexity", "chat_perplexity"}
        assert measured[window]["window"] == window
        assert measured[window]["tokens"] == TOKENS - TOKENS // window  # a window's first token is not scored
        # The text of another kind is a part of the first here: its windows are those of the first's.
        own = measured[window]["kl_windows"][: 700 // window]
        assert measured[window]["other_kl"] == pytest.approx(sum(own) / len(own) / (window - 1), rel=1e-4)
    assert measured[64]["kl"] != measured[128]["kl"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]  # logits leave no file behind


def test_logits_are_computed_once_and_stay_what_they_were(measure: ModuleType, tmp_path: Path) -> None:
    calls, spans = [], measure.Window(0, 3, 1)
    logits = torch.randn(2, 5, generator=torch.Generator().manual_seed(0))

    def give(batch: Any, tokens: torch.Tensor) -> torch.Tensor:
        calls.append(batch)
        return logits.bfloat16()

    remembered = measure.Remembered(give, tmp_path)
    one, again = (remembered([spans], torch.arange(3)) for _ in range(2))
    assert len(calls) == 1
    assert torch.equal(one, logits.bfloat16().float())
    assert torch.equal(again, one)
    assert list(tmp_path.iterdir()) == []


def test_published_models_are_where_the_option_or_the_environment_says(
    modules: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = modules("bench_quality").place
    monkeypatch.delenv("PTQPIPE_MODELS", raising=False)
    assert place("published/one", tmp_path / "shared") == tmp_path / "real" / "one"
    monkeypatch.setenv("PTQPIPE_MODELS", str(tmp_path / "elsewhere"))
    assert place("published/one", tmp_path / "shared") == tmp_path / "elsewhere" / "one"
    assert place("published/one", tmp_path / "shared", tmp_path / "named") == tmp_path / "named" / "one"
    assert place("./ptqpipe/demo_model", tmp_path) == DEMO


def test_a_model_that_was_not_fetched_is_skipped_with_the_reason(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPTS / "bench_quality.py"), "--models", "smollm2-135m", "--published", "nowhere"]
    command += ["--formats", "fp8", "--entries", "ptqpipe:absmax", "--results", str(tmp_path / "lines.jsonl")]
    env = os.environ | {"PYTHONPATH": str(SCRIPTS.parent)}
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=tmp_path, timeout=240)
    assert done.returncode == 0, done.stderr
    (skipped,) = map(json.loads, done.stdout.splitlines())
    assert skipped["model"] == "smollm2-135m"
    assert "no folder nowhere/smollm2-135m" in skipped["skipped"]
    assert "fetch_models.py" in skipped["skipped"]
    assert not (tmp_path / "lines.jsonl").exists()


def test_large_models_have_fewer_tokens_by_default(modules: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = modules("bench_quality")
    held_out = DEMO / "heldout.txt"
    count = bench.weights_of(DEMO)
    assert count == sum(w.numel() for w in load_file(DEMO / "model.safetensors").values())
    monkeypatch.setattr(bench, "TOKENS", 1024)
    monkeypatch.setattr(bench, "TOKENS_OF_LARGE", 512)
    for large, tokens in ((count, 1024), (count - 1, 512)):
        monkeypatch.setattr(bench, "LARGE", large)
        (begun,) = bench.begin(DEMO, held_out, held_out, None, False, held_out)
        assert begun["tokens"] == tokens
        assert len(bench._current[0].held_out["other_"].tokens) == 256  # a window at least


def test_entries_are_told_apart_by_tool_name_and_format(modules: Any) -> None:
    entries = modules("quality_entries")
    keys = [(entry.tool, entry.name, fmt) for entry in entries.ENTRIES for fmt in entry.formats]
    assert len(keys) == len(set(keys))
    assert {fmt for _, _, fmt in keys} == set(entries.FORMATS)
    assert {tool for tool, _, _ in keys} == {"ptqpipe", *modules("bench_quality").PACKAGES}


def test_the_peers_script_takes_the_command_of_every_entry(modules: Any, tmp_path: Path) -> None:
    entries, parser = modules("quality_entries"), modules("peers").parser_of()
    for entry in entries.ENTRIES:
        for fmt in entry.formats if entry.tool != "ptqpipe" else ():
            job = entries.Job(entry, fmt, DEMO, tmp_path / "out", tmp_path / "rows", 1, 40, 64)
            script, *words = entries.peer_command(job)
            assert Path(script).exists()
            if Path(script).name == "llama_child.py":  # which has no parser
                assert words == ["decode", str(DEMO), str(tmp_path / "out"), entry.name]
                continue
            args = parser.parse_args(words)
            assert (args.model, args.out) == (str(DEMO), tmp_path / "out")
            # Whoever is calibrated is given the rows; whoever is not has no need of them, static input scales aside.
            assert (args.calibration == tmp_path / "rows") >= entry.needs_text(fmt), entry.key


@pytest.fixture
def llama(monkeypatch: pytest.MonkeyPatch, modules: Any) -> ModuleType:
    """llama_child.py without llama.cpp, which no function of these tests calls."""
    monkeypatch.setitem(sys.modules, "llama_cpp", ModuleType("llama_cpp"))
    child: ModuleType = modules("llama_child")
    return child


def test_rows_of_queries_and_keys_come_back_from_llamas_order(llama: ModuleType) -> None:
    weight = torch.arange(12 * 3).reshape(12, 3).numpy()  # two heads of six dimensions
    there = llama.in_pairs(weight, 2)
    assert there[:, 0].tolist() == [3 * row for row in (0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11)]
    assert (llama.in_halves(there, 2) == weight).all()


def test_decoded_arrays_are_written_as_safetensors(llama: ModuleType, tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3, 5), "b.weight": torch.randn(7).half(), "c": torch.randn(4, 2).T}
    llama.write_safetensors({name: tensor.numpy() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    loaded = load_file(tmp_path / "model.safetensors")
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[name], tensor.float()) for name, tensor in tensors.items())


def test_own_text_beside_the_calibration_text_is_as_many_rows_of_each(modules: Any, tmp_path: Path) -> None:
    entries = modules("quality_entries")
    name = "aqas + end to end after two-sided gptq in order, own text beside"
    (entry,) = (one for one in entries.ENTRIES if one.name == name)
    job = entries.Job(entry, "mxfp4", DEMO, tmp_path / "out", tmp_path / "rows", 1, 40, 64)
    write, fold, learn, convert = entries.own_steps(job, tmp_path / "stats")
    own = tmp_path / "out-text.jsonl"
    assert write[3:7] == ["generate", str(DEMO), "--samples", "40"]
    assert write[write.index("-o") + 1] == str(own)
    assert fold[fold.index("--stats") + 1] == str(tmp_path / "stats")
    assert [word for before, word in pairwise(learn) if before == "--data"] == [f"{tmp_path / 'rows'}=1", f"{own}=1"]
    assert learn[learn.index("--samples") + 1] == "80"
    assert learn[learn.index("--method") + 1] == "kl"
    assert convert[convert.index("--codes") + 1] == learn[learn.index("-o") + 1]


def test_every_command_is_told_the_device_and_the_threads(modules: Any, tmp_path: Path) -> None:
    entries = modules("quality_entries")
    for entry in [one for one in entries.ENTRIES if one.tool == "ptqpipe"]:
        job = entries.Job(entry, entry.formats[0], DEMO, tmp_path / "out", tmp_path / "rows", 1, 40, 64, (), "cuda", 3)
        for step in [*entries.own_steps(job, tmp_path / "stats"), entries.calibrate_command(DEMO, tmp_path, job)]:
            assert step[step.index("--workers") + 1] == "3"
            assert ("--device" in step) == (step[3] != "transform")  # it computes on the CPU


def test_learned_rotations_come_before_the_factors_and_both_are_found_on_statistics_of_their_own(
    modules: Any, tmp_path: Path
) -> None:
    entries = modules("quality_entries")
    name = "learned rotations + aqas + two-sided gptq in order"
    (entry,) = (one for one in entries.ENTRIES if one.name == name)
    job = entries.Job(entry, "mxfp4", DEMO, tmp_path / "out", tmp_path / "rows", 1, 40, 64)
    first, rotate, again, scale, tune, convert = entries.own_steps(job, tmp_path / "stats")
    chain = [str(DEMO)]
    for calibrate, fold in ((first, rotate), (again, scale)):
        assert calibrate[3:5] == ["calibrate", chain[-1]]
        assert fold[3:5] == ["transform", chain[-1]]
        assert fold[fold.index("--stats") + 1] == calibrate[calibrate.index("-o") + 1] != str(tmp_path / "stats")
        chain.append(fold[fold.index("-o") + 1])
    assert "pairs" in first[first.index("--moments") + 1]
    assert tune[4] == convert[4] == chain[-1]


def line(tool: str, entry: str, kl: float, *, calibrated: bool = False, seed: int | None = None) -> dict[str, Any]:
    """A result whose KL is the same in every one of four windows of three tokens."""
    costs = {"cpu_s": 1.0, "peak_rss_mib": 1, "seconds": 1.0}
    found = {"kl": kl, "kl_windows": [3 * kl] * 4, "window": 4, "tokens": 12, "perplexity": 2.0, "top1_agreement": 0.5}
    names = {"model": "m", "format": "nvfp4", "tool": tool, "entry": entry, "seed": seed, "calibrated": calibrated}
    return {**names, **costs, **found}


def test_the_table_shows_the_lowest_and_pairs_by_window(modules: Any) -> None:
    lines = [
        line("ptqpipe", "exact", 0.005),
        line("ptqpipe", "exact", 0.002),  # made again: replaces the one before
        line("peer", "rtn", 0.003),
        line("ptqpipe", "gptq", 0.0008, calibrated=True, seed=0),
        line("ptqpipe", "gptq", 0.0012, calibrated=True, seed=1),
        {**line("peer", "gptq", 0.0, calibrated=True), "kl": None} | {"failed": "why"},
    ]
    lines[-1].pop("kl")
    text = modules("quality_table").render(lines)
    assert "| ptqpipe exact | no | _2.00_ |" in text
    assert "| ptqpipe gptq | yes | **1.00 ±0.20** |" in text
    assert "| peer rtn | no | 3.00 |" in text
    assert "| m nvfp4 | no | 2.000 | exact 2.000 | peer rtn 3.000 | -1.000 [-1.000, -1.000] | 33.3% |" in text
    assert "| peer gptq" not in text
    assert "- peer, m: nvfp4 gptq: `why`" in text
    again = {**line("peer", "gptq", 0.001, calibrated=True)}
    assert "why" not in modules("quality_table").render([*lines, again])
    assert "| ptqpipe exact |" not in modules("quality_table").render(lines, ["other"])


def test_chats_have_a_column_where_any_entry_was_measured_on_them(modules: Any) -> None:
    plain, render = line("peer", "rtn", 0.003) | {"other_kl": 0.004}, modules("quality_table").render
    assert "| m | nvfp4 | peer rtn | 3.00 | 4.00 | 1 | 2.00 | 50.0 % | 1 | 1 |" in render([plain])
    text = render([plain, line("ptqpipe", "exact", 0.002) | {"other_kl": 0.005, "chat_kl": 0.006}])
    assert "| on text of another kind | on chats | seeds of it |" in text
    assert "| m | nvfp4 | peer rtn | 3.00 | 4.00 |  | 1 | 2.00 | 50.0 % | 1 | 1 |" in text
    assert "| m | nvfp4 | ptqpipe exact | 2.00 | 5.00 | 6.00 | 1 | 2.00 | 50.0 % | 1 | 1 |" in text


def test_a_model_is_shown_with_its_windows_of_other_sizes(modules: Any) -> None:
    bench, model = modules("bench_quality"), modules("bench_quality").Model("m", "", "", "")
    lines = [line("peer", "rtn", 0.003) | {"model": bench.labelled(model, window)} for window in (256, 2048)]
    text = modules("quality_table").render(lines, ["m"])
    assert "| m, mean KL" in text
    assert "| m, windows of 2048, mean KL" in text


def test_who_changes_more_weights_than_plain_rounding_is_compared_only_where_these_are_rotated(modules: Any) -> None:
    lines = [
        line("ptqpipe", "exact", 0.005) | {"weights": 28},
        line("ptqpipe", "convert --quality best", 0.003, calibrated=True) | {"weights": 30},
        line("ptqpipe", "learned rotations + kl, head and embedding trained", 0.001, calibrated=True) | {"weights": 30},
        line("peer", "fewer", 0.002, calibrated=True) | {"weights": 20},
        line("peer", "more", 0.002, calibrated=True) | {"weights": 35},
    ]
    text = modules("quality_table").render(lines)
    assert "| ptqpipe convert --quality best | yes | **3.00** |" in text
    for told in ("(1.00: 30 weights)", "(2.00: 20 weights)", "(2.00: 35 weights)"):
        assert told in text


def test_who_needs_more_bits_than_the_format_is_shown_with_them_and_compared_with_nobody(modules: Any) -> None:
    lines = [
        line("ptqpipe", "exact", 0.005),
        line("peer", "Q4_0", 0.006) | {"bits": 4.5},
        line("peer", "Q4_K_M", 0.001) | {"bits": 4.8},
    ]
    text = modules("quality_table").render(lines)
    assert "| ptqpipe exact | no | **5.00** |" in text
    assert "| peer Q4_K_M | no | (1.00: 4.8 bits) |" in text
    assert "| peer Q4_0 | no | 6.00 |" in text
    assert "| peer Q4_0 6.000 |" in text  # the best peer


@pytest.mark.slow
def test_the_tables_are_what_the_results_give(modules: Any) -> None:
    root = SCRIPTS.parent
    lines = modules("bench_quality").read_lines(root / "benchmarks" / "quality.jsonl")
    assert modules("quality_table").render(lines) in (root / "benchmarks" / "quality.md").read_text(encoding="utf-8")


def test_the_results_show_the_best_of_each_row_of_the_lines(modules: Any) -> None:
    """The short table of docs/results.md: the lowest mean KL of ptqpipe and of other tools, with data and without."""
    root = SCRIPTS.parent
    rows = (
        "the lowest with data",
        "best other tool with data",
        "the lowest without data: GPTQ in order, on text that the model generates",
        "best other tool without data",
    )
    lines = modules("bench_quality").read_lines(root / "benchmarks" / "quality.jsonl")
    full = modules("quality_table").render(lines, ["bench-4m"])
    wanted: dict[str, tuple[list[str], list[str]]] = {"no": ([], []), "any": ([], [])}
    pattern = r"^\| bench-4m \S+ \| (no|any) \| \S+ \| .*? (\d+\.\d+) \| .*? (\d+\.\d+) \|"
    for data, own, other in re.findall(pattern, full, re.MULTILINE):
        wanted[data][0].append(f"{float(own):.2f}")
        wanted[data][1].append(f"{float(other):.2f}")
    text = (root / "docs" / "results.md").read_text(encoding="utf-8")
    for row, numbers in zip(rows, [*wanted["any"], *wanted["no"]], strict=True):
        shown = re.findall(rf"^\| {re.escape(row)} \|(.*)\|$", text, re.MULTILINE)
        assert [re.findall(r"\d+\.\d+", cells) for cells in shown] == [numbers], row


@pytest.mark.slow
@pytest.mark.usefixtures("forks")
def test_a_warm_process_answers_every_job_and_says_why_one_failed(modules: Any, tmp_path: Path) -> None:
    jobs = [["--version"], ["inspect", str(tmp_path / "missing")], ["inspect", str(DEMO)]]
    command = [sys.executable, str(SCRIPTS / "quality_warm.py"), "ptqpipe", "60"]
    env = os.environ | {"PYTHONPATH": str(SCRIPTS.parent)}
    asked = "".join(json.dumps(job) + "\n" for job in jobs)
    done = subprocess.run(command, input=asked, capture_output=True, text=True, env=env, timeout=240)
    version, refused, shown = map(json.loads, done.stdout.splitlines())
    assert version["status"] == shown["status"] == 0
    assert ptqpipe.__version__ in version["said"]
    assert refused["status"] == 2
    assert "missing" in refused["said"]
    assert all(answer["peak_rss_mib"] > 0 for answer in (version, refused, shown))


def test_a_warm_process_that_ends_is_named(modules: Any, tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\nexit 3\n")
    broken.chmod(0o755)
    runs = modules("bench_quality").Runs({"modelopt": str(broken)}, warm=True)
    with pytest.raises(SystemExit, match=f"the process of modelopt, {broken}, ended with 3; its words are above"):
        runs.cost("modelopt", [["peers.py", "modelopt"]])


# The script, whose worker is a fork, too: what it holds while others run is no claim here.
FORKING = """
import multiprocessing
context = multiprocessing.get_context
multiprocessing.get_context = lambda method: context("fork")
import bench_quality
bench_quality.main()
"""


@pytest.mark.shared
@pytest.mark.slow
@pytest.mark.usefixtures("forks")
def test_a_second_run_makes_only_what_is_missing(modules: Any, shared_dir: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", FORKING, "--shared", str(shared_dir), "--scratch", str(tmp_path / "scratch")]
    command += ["--results", str(tmp_path / "lines.jsonl"), "--models", "slm4096", "--tokens", "512"]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(SCRIPTS), str(SCRIPTS.parent)])}
    for entries in (["ptqpipe:absmax"], ["ptqpipe:absmax"], ["ptqpipe:absmax", "ptqpipe:exact"]):
        extra = ["--formats", "fp8", "--seeds", "0", "--entries", *entries]
        done = subprocess.run([*command, *extra], capture_output=True, text=True, env=env, timeout=240)
        assert done.returncode == 0, done.stderr
        found = [json.loads(text) for text in (tmp_path / "lines.jsonl").read_text().splitlines()]
        made = [one for one in found if one["tool"] != "float"]
        assert [f"{one['tool']}:{one['entry']}" for one in made] == entries
        assert all("kl" in one for one in made)
