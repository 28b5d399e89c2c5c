"""Claims under 10,000 seeded mutants of every JSON file that a command reads: read, or refused in one line of 600
characters, within seconds, and nothing is written. tests/fuzz/attack_json.py does the same for longer."""

from collections import Counter
from pathlib import Path

import pytest

from tests.json_files import Target, attack, targets

MUTANTS = 10_000
NAMES = (
    *("config.json of compressed_tensors", "config.json of modelopt", "config.json of deepseek_fp8"),
    *("config.json of mxfp8_hf", "config.json of ptqpipe", "hf_quant_config.json", "index", "ptqpipe.json", "inspect"),
    *("stats.json", "rounding.json", "eval.json", "eval.json as output", "recipe", "text.jsonl to calibrate"),
    *("text.jsonl to evaluate", "config.json to run", "generation_config.json", "tokenizer_config.json"),
)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("attack")


@pytest.fixture(scope="module")
def known(root: Path) -> dict[str, Target]:
    return targets(root)


def test_every_file_is_attacked(known: dict[str, Target]) -> None:
    assert tuple(known) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_sound_file_is_read(name: str, known: dict[str, Target]) -> None:
    known[name].read()


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_mutant_is_read_or_refused_in_one_line(name: str, known: dict[str, Target], root: Path) -> None:
    wrong: list[tuple[str, bytes]] = []
    whole = sum(target.share for target in known.values())
    count = round(MUTANTS * known[name].share / whole)
    outcomes = attack(known[name], count, seed=0, root=root, found=lambda what, mutant: wrong.append((what, mutant)))
    assert [(what, mutant[:2000]) for what, mutant in wrong] == []
    assert sum(outcomes.values()) == count
    assert outcomes["read"] > 0
    assert outcomes["refused"] > 0 or name == "tokenizer_config.json"  # whose fields are nearly all free


def test_the_attack_sees_tracebacks_long_messages_hangs_and_stray_files(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = root / "probe.json"
    file.write_text('{"a": [1, 2]}')
    calls: Counter[str] = Counter()

    def broken() -> None:
        calls["all"] += 1
        if calls["all"] == 1:
            (root / "stray").touch()
        raise KeyError("a")

    wrong: list[str] = []
    attack(Target(file, broken, 1.0, file.read_bytes()), 3, seed=0, root=root, found=lambda what, _: wrong.append(what))
    assert [what.split()[0] for what in wrong] == ["KeyError", "KeyError", "KeyError", "files"]
    monkeypatch.setattr("tests.json_files.SECONDS", 1)
    wrong.clear()

    def endless() -> None:
        while True:
            pass

    attack(Target(file, endless, 1.0, file.read_bytes()), 1, seed=0, root=root, found=lambda w, _: wrong.append(w))
    assert wrong == ["TimeoutError no end in 1 seconds"]
    for left in (file, root / "stray"):
        left.unlink()
