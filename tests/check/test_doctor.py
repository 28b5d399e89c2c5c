"""Claims about ``ptqpipe doctor``: it says what is here and what is not, with the remedy, and always ends with 0."""

import io
import json
import platform
import socket
import tomllib
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from ptqpipe.check import doctor
from ptqpipe.cli import main
from ptqpipe.numerics.kernels import cpu_library


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def found(*, network: bool = True) -> dict[str, doctor.Check]:
    return {one.name: one for one in doctor.examine(network=network)}


def test_every_part_of_the_machine_has_a_line_and_the_same_in_json() -> None:
    text, data = (CliRunner().invoke(main, ["doctor", *more], catch_exceptions=False) for more in ([], ["--json"]))
    assert (text.exit_code, data.exit_code) == (0, 0)
    checks = json.loads(data.output)
    assert {"ptqpipe", "CPU", "kernels", "torch", "GPU", "memory", "disk", "hub"} <= checks.keys()
    for name in checks:
        assert f"  {name} " in text.output
    assert checks["torch"]["version"] == torch.__version__
    assert checks["kernels"]["isa"] == cpu_library.current_isa()


def test_an_aarch64_processor_is_known_by_its_features(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "processor\t: 0\nFeatures\t: fp asimd aes asimddp\nCPU implementer\t: 0x41\n\nprocessor\t: 1\n"
    monkeypatch.setattr(cpu_library, "open", lambda *_, **__: io.StringIO(text), raising=False)
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    cpu = found(network=False)["CPU"]
    assert (cpu.facts["model"], cpu.facts["flags"]) == ("aarch64", ["asimd", "asimddp"])


def test_kernels_that_were_not_built_are_named_with_what_builds_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_library, "LIBRARY", tmp_path / "absent.so")
    caches = (cpu_library._built, cpu_library.library, cpu_library.known_isas)
    for one in caches:
        one.cache_clear()
    try:
        kernels = found()["kernels"]
    finally:
        monkeypatch.undo()
        for one in caches:
            one.cache_clear()
    assert (kernels.state, kernels.facts["isa"]) == ("missing", "none")
    assert kernels.text.startswith("not built: ")
    assert "C++ compiler" in kernels.remedy


def test_a_gpu_that_is_found_says_how_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    monkeypatch.setattr(doctor, "_installed", lambda name: name != "triton")
    assert found()["GPU"][1:4] == (
        "missing",
        "NVIDIA H200; triton, which the kernels for it need, is not installed",
        "pip install 'ptqpipe[cuda]'",
    )
    monkeypatch.setattr(doctor, "_installed", lambda _: True)
    assert "not used unless asked for" in found()["GPU"].text
    assert 'device="cuda"' in found()["GPU"].remedy


def test_an_extra_that_is_missing_has_the_line_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_installed", lambda name: name != "jinja2")
    checks = found()
    assert (checks["extra report"].state, checks["extra report"].text) == ("missing", "lacks jinja2")
    assert checks["extra report"].remedy == "pip install 'ptqpipe[report]'"
    assert checks["extra hf"].state == "ok"


def test_the_extras_are_those_of_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    lines = [
        f"{line}; extra == '{extra}'" for extra, all_of in project["optional-dependencies"].items() for line in all_of
    ]
    monkeypatch.setattr(doctor.metadata, "requires", lambda _: lines)
    needed = doctor.required()
    assert needed["hf"] == ["transformers", "accelerate", "huggingface_hub"]
    assert needed["eval"] == ["lm-eval"]
    assert project["optional-dependencies"].keys() - {"all"} == needed.keys()


def test_a_hub_that_does_not_answer_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "HF_HUB_OFFLINE is set" in found()["hub"].text
    monkeypatch.delenv("HF_HUB_OFFLINE")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # nobody listens
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{unused.getsockname()[1]}")
        hub = found()["hub"]
    assert (hub.state, hub.facts["reachable"]) == ("missing", False)
    assert "does not answer" in hub.text
