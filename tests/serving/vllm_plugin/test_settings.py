"""Claims about the environment variables of vLLM's plugin."""

import subprocess
import sys

import pytest

from ptqpipe.errors import UsageError
from ptqpipe.serving.vllm_plugin.settings import PluginSettings


def test_nothing_set_means_kernels_and_plain_sums() -> None:
    assert PluginSettings.from_environment({}) == PluginSettings(codec=None, block=64, min_bytes="auto", kernels=True)


@pytest.mark.parametrize("text", ["off", "OFF", "", "0", "none"])
def test_every_spelling_of_off_keeps_sums_plain(text: str) -> None:
    assert PluginSettings.from_environment({"PTQPIPE_ALLREDUCE": text}).codec is None


def test_every_variable_is_read() -> None:
    found = PluginSettings.from_environment(
        {
            "PTQPIPE_ALLREDUCE": "Int8",
            "PTQPIPE_ALLREDUCE_BLOCK": "128",
            "PTQPIPE_ALLREDUCE_MIN_BYTES": "65536",
            "PTQPIPE_VLLM_KERNELS": "off",
            "PTQPIPE_VLLM_UNTESTED": "1",
        }
    )
    assert found == PluginSettings(codec="int8", block=128, min_bytes=65536, kernels=False, untested=True)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("PTQPIPE_ALLREDUCE_BLOCK", "0"),
        ("PTQPIPE_ALLREDUCE_BLOCK", "many"),
        ("PTQPIPE_ALLREDUCE_MIN_BYTES", "-1"),
        ("PTQPIPE_ALLREDUCE_MIN_BYTES", "1MB"),
        ("PTQPIPE_VLLM_KERNELS", "maybe"),
    ],
)
def test_what_cannot_be_read_is_named(name: str, text: str) -> None:
    with pytest.raises(UsageError, match=name):
        PluginSettings.from_environment({name: text})


def test_graphs_with_and_without_our_operators_have_different_keys() -> None:
    keys = {
        PluginSettings(codec=codec, kernels=kernels).fingerprint()
        for codec in (None, "int8")
        for kernels in (True, False)
    }
    assert len(keys) == 4


def test_the_entry_point_imports_neither_torch_nor_transformers_nor_vllm() -> None:
    code = (
        "import sys, ptqpipe.serving.vllm_plugin; print(sorted({'torch', 'transformers', 'vllm'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=240)
    assert done.stdout.strip() == "[]"


def test_a_plugin_that_cannot_start_says_so_and_does_not_raise() -> None:
    """Without vLLM, or with a variable that cannot be read: the log has it, and the caller goes on."""
    code = "from ptqpipe.serving.vllm_plugin import register; register(); print('went on')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        env={"PTQPIPE_ALLREDUCE_BLOCK": "x", "PATH": ""},
    )
    assert done.stdout.strip() == "went on"
    assert "the plugin is off" in done.stderr
    assert "PTQPIPE_ALLREDUCE_BLOCK" in done.stderr
