"""Claims about a model's own text: it is drawn from what the model predicts, by a seed, and calibrates that model."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from click.testing import CliRunner

import ptqpipe
from ptqpipe.calibration.generate import Texts, generate, rows_of, threads_for
from ptqpipe.cli import main
from ptqpipe.errors import NumericsError, UsageError
from tests.calibration.models import VOCABULARY, make_model

SEQLEN = 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "llama", "llama")


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def test_tokens_are_drawn_from_what_the_model_predicts(model: Any) -> None:
    windows = generate(model, samples=96, seqlen=SEQLEN, seed=0, begin=None)
    assert windows.shape == (96, SEQLEN)
    with torch.no_grad():
        log_p = torch.log_softmax(model(windows).logits[:, :-1].double(), -1)
    surprise = -log_p.gather(-1, windows[:, 1:].unsqueeze(-1)).flatten()
    entropy = -(log_p.exp() * log_p).sum(-1).flatten()
    spread = float((surprise - entropy).std()) / len(surprise) ** 0.5
    assert abs(float((surprise - entropy).mean())) < 4 * spread
    # Tokens drawn evenly would surprise the model more than that.
    even = torch.randint(0, VOCABULARY, surprise.shape, generator=torch.Generator().manual_seed(1))
    other = -log_p.flatten(0, 1).gather(-1, even.unsqueeze(-1)).mean()
    assert float(other) > float(surprise.mean()) + 8 * spread


SMALL = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 3}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "lru_width": 32, "intermediate_size": 64}


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(transformers.MambaConfig(**SMALL, state_size=4), id="mamba, a cache of another name"),
        pytest.param(transformers.RecurrentGemmaConfig(**SMALL, **HEADS), id="recurrent gemma, no cache to give"),
    ],
)
def test_states_that_are_kept_change_no_token(config: Any) -> None:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2)
    own = model.forward
    windows = generate(model, samples=3, seqlen=10, seed=0, begin=1)

    def forgetful(input_ids: torch.Tensor, **options: Any) -> Any:
        out = own(input_ids, use_cache=False)
        return type(out)(logits=out.logits)

    model.forward = forgetful
    assert torch.equal(generate(model, samples=3, seqlen=10, seed=0, begin=1), windows)


def test_a_seed_chooses_the_text_and_windows_begin_apart(model: Any) -> None:
    one, again, other = (generate(model, samples=8, seqlen=12, seed=seed, begin=3) for seed in (0, 0, 1))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    assert one[:, 0].tolist() == [3] * 8
    assert len(set(one[:, 1].tolist())) > 4


def test_windows_take_turns_in_temperatures(model: Any) -> None:
    """The likelier tokens of each cold window, the less likely ones of each hot one."""
    windows = generate(model, samples=60, seqlen=SEQLEN, seed=0, begin=None, texts=Texts((0.5, 2.0)))
    with torch.no_grad():
        log_p = torch.log_softmax(model(windows).logits[:, :-1], -1)
    surprise = -log_p.gather(-1, windows[:, 1:].unsqueeze(-1)).mean((1, 2))
    assert float(surprise[0::2].max()) < float(surprise[1::2].min())


def test_texts_of_a_length_fill_a_window_one_after_another(model: Any) -> None:
    windows = generate(model, samples=5, seqlen=30, seed=0, begin=3, texts=Texts(lengths=(10, 30)))
    alone = generate(model, samples=9, seqlen=10, seed=0, begin=3)  # three windows of three such texts
    assert torch.equal(windows[0::2], alone.view(3, 30))
    assert windows[1::2, 0].tolist() == [3, 3]
    assert windows.amin() >= 0


def test_texts_begin_with_prompts_and_go_on_by_themselves(model: Any) -> None:
    prompts = [[3, 7, 8, 9], list(range(20, 60))]
    told: list[int] = []
    texts = Texts(prompts=prompts)
    windows = generate(model, samples=12, seqlen=20, seed=0, begin=3, texts=texts, on_tokens=told.append)
    beginnings = {tuple(row[:5]) for row in windows.tolist()}
    short = {row for row in beginnings if row[:4] == (3, 7, 8, 9)}
    assert len(short) > 1  # goes on behind its prompt, whose own beginning-of-text token does not stand there twice
    assert beginnings - short == {(3, 20, 21, 22, 23)}
    long = [row for row in windows.tolist() if row[1] == 20]
    assert all(row[:10] == [3, *range(20, 29)] for row in long)  # half of the text
    assert len({row[10] for row in long}) > 1
    assert sum(told) == 12 * 20


def test_own_text_of_several_kinds_by_the_command_and_in_python(folder: Path, tmp_path: Path) -> None:
    prompts, out, own = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl", tmp_path / "own.jsonl"
    prompts.write_text('{"input_ids": [7, 8, 9]}\n{"input_ids": [5, 6]}\n', encoding="utf-8")
    words = ["--samples", "8", "--seqlen", "16", "--length", "8", "--workers", "1", "-q", "--prompts", str(prompts)]
    heats = ["--temperature", "0.5", "--temperature", "1.5"]
    done = CliRunner().invoke(main, ["generate", str(folder), *words, *heats, "-o", str(out)])
    assert done.exit_code == 0, done.output
    options: dict[str, Any] = {"samples": 8, "seqlen": 16, "temperature": [0.5, 1.5], "length": 8, "workers": 1}
    ptqpipe.generate(folder, own, prompts=[[7, 8, 9], [5, 6]], **options)
    assert out.read_bytes() == own.read_bytes()
    assert out.read_bytes().count(b"7, 8, 9") > 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--temperature", "0"], "--temperature 0.0: expected a number above 0, at most 2"),
        (["--temperature", "nan"], "--temperature nan: expected a number above 0, at most 2"),
        (["--length", "1"], "--length 1: expected 2 or more, and at most the 16 tokens of a window"),
        (["--length", "8", "--length", "17"], "--length 17: expected"),
        (["--prompts", "nothing.txt"], "nothing.txt does not exist; give --prompts a .txt, .jsonl or .parquet file"),
    ],
)
def test_texts_that_cannot_be_are_refused_before_the_model_is_loaded(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], said: str
) -> None:
    monkeypatch.setattr("ptqpipe.calibration.own_text.load", None)
    out = tmp_path / "own.jsonl"
    done = CliRunner().invoke(main, ["generate", str(folder), "--seqlen", "16", *words, "-q", "-o", str(out)])
    assert done.exit_code == 2
    assert said in done.stderr
    assert not out.exists()


def test_what_a_model_cannot_write_is_refused(model: Any) -> None:
    with pytest.raises(UsageError, match="65 is more than the model's 64 positions"):
        generate(model, samples=1, seqlen=65, seed=0, begin=None)
    with pytest.raises(UsageError, match="samples=0"):
        generate(model, samples=0, seqlen=8, seed=0, begin=None)
    broken = type(model)(model.config)
    broken.lm_head.weight.data.fill_(float("nan"))
    with pytest.raises(NumericsError, match="not finite"):
        generate(broken, samples=1, seqlen=8, seed=0, begin=None)


def test_the_file_is_data_for_calibrate(folder: Path, tmp_path: Path) -> None:
    file, stats = tmp_path / "own.jsonl", tmp_path / "stats"
    write = ["generate", str(folder), "--samples", "6", "--seqlen", str(SEQLEN), "--workers", "1", "-o", str(file)]
    assert CliRunner().invoke(main, write).exit_code == 0
    rows = [json.loads(line)["input_ids"] for line in file.read_text().splitlines()]
    assert [len(row) for row in rows] == [SEQLEN] * 6
    read = ["calibrate", str(folder), "--data", str(file), "--samples", "6", "--seqlen", str(SEQLEN), "-o", str(stats)]
    done = CliRunner().invoke(main, [*read, "--workers", "1", "-q"])
    assert done.exit_code == 0, done.output
    assert "no window is held out" in done.stderr
    again = CliRunner().invoke(main, write)
    assert again.exit_code != 0
    assert "--overwrite" in again.output
    assert CliRunner().invoke(main, [*write, "--overwrite"]).exit_code == 0
    assert not list(tmp_path.glob(".*.partial"))


def test_one_window_for_every_eight_is_written_for_calibrate_to_hold_out(folder: Path, tmp_path: Path) -> None:
    file, stats = tmp_path / "own.jsonl", tmp_path / "stats"
    few = ["--samples", "17", "--seqlen", "16"]
    done = CliRunner().invoke(main, ["generate", str(folder), *few, "--workers", "1", "-q", "-o", str(file)])
    assert done.exit_code == 0, done.output
    assert done.stderr == ""
    assert len(file.read_text().splitlines()) == 17 + 2
    read = ["calibrate", str(folder), "--data", str(file), *few, "-o", str(stats), "--workers", "1", "-q"]
    calibrated = CliRunner().invoke(main, read)
    assert calibrated.exit_code == 0, calibrated.output
    assert "held out" not in calibrated.stderr
    assert json.loads((stats / "stats.json").read_text())["data"]["held_out"] == 2


def test_a_place_for_no_file_is_found_before_the_model_is_loaded(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("loaded")

    monkeypatch.setattr("ptqpipe.calibration.own_text.load", never)
    for out, words in ((tmp_path, "is a folder"), (Path("/proc/x.jsonl"), "is not writable")):
        result = CliRunner().invoke(main, ["generate", str(folder), "--seqlen", "8", "-q", "-o", str(out)])
        assert result.exit_code in (1, 2)
        assert words in result.stderr
        assert "partial" not in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_every_token_is_told_and_the_batch_is_as_large_as_memory_allows(model: Any) -> None:
    told: list[int] = []
    generate(model, samples=5, seqlen=12, seed=0, begin=3, on_tokens=told.append)
    assert sum(told) == 5 * 12
    assert len(told) == 11  # two tokens are there at first: all windows in one batch
    config = model.config
    cache = 2 * config.num_key_value_heads * config.head_dim * config.num_hidden_layers * 4  # bytes of a token
    assert rows_of(model, 1024) == max(32, (4 << 30) // cache // 1024)


def test_a_small_model_is_not_slowed_by_threads(model: Any) -> None:
    params = sum(p.numel() for p in model.parameters())
    assert threads_for(model, samples=2, seqlen=16, most=8) == 1
    assert threads_for(model, samples=1 << 30, seqlen=1, most=8) == 8
    assert 1 < threads_for(model, samples=3 * (1 << 29) // params + 1, seqlen=1, most=8) <= 3


def test_statistics_of_the_defaults_are_what_convert_takes_by_default(folder: Path, tmp_path: Path) -> None:
    run = CliRunner().invoke
    file, model = tmp_path / "own.jsonl", str(folder)
    few = ["--samples", "8", "--seqlen", "16", "--workers", "1", "-q"]
    assert run(main, ["generate", model, *few, "-o", str(file)]).exit_code == 0
    read = ["calibrate", model, "--data", str(file), *few]
    assert run(main, [*read, "-o", str(tmp_path / "stats")]).exit_code == 0
    convert = ["convert", model, "-q", "-o", str(tmp_path / "out"), "--stats"]
    done = run(main, [*convert, str(tmp_path / "stats")])
    assert done.exit_code == 0, done.output
    record = json.loads((tmp_path / "out" / "ptqpipe.json").read_text())
    assert "gptq" in json.dumps(record)
    assert run(main, [*read, "--moments", "diagonal,block", "-o", str(tmp_path / "small")]).exit_code == 0
    assert run(main, [*convert, str(tmp_path / "small"), "--overwrite"]).exit_code == 0
    assert "gptq" not in (tmp_path / "out" / "ptqpipe.json").read_text()
    missing = run(main, [*convert, str(tmp_path / "nothing"), "--overwrite"])
    assert missing.exit_code == 2
    assert "nothing are no folder that exists" in missing.stderr
