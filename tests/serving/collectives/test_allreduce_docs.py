"""What docs/serving.md shows of DTensor and transformers, run as it is written there: two ranks of torchrun."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
TITLE = "In DTensor and in transformers"
BEFORE = """
import os
import sys

import torch
from torch.nn import Linear

torch.manual_seed(0)
torch.set_num_threads(1)
MODEL = sys.argv[1]


class Mlp(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = Linear(64, 256, bias=False), Linear(256, 64)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


model, x = Mlp(), torch.randn(2048, 64)
with torch.no_grad():
    wanted = model(x)
    torch.manual_seed(int(os.environ["RANK"]))
    partial = torch.randn(5000)
"""
AFTER = """
def close(found, wanted):
    error = float((found - wanted).norm() / wanted.norm())
    assert error < 0.02, error  # twice the error of a sum of Gaussians


from transformers import AutoModelForCausalLM as Plain

ids = torch.arange(2048).reshape(32, 64) % 32
whole = partial.clone()
dist.all_reduce(whole)
with torch.no_grad():
    close(total, whole)
    close(model(x), wanted)
    reduce.min_bytes = 0
    before = reduce.stats().calls
    close(model(x), wanted)
    assert reduce.stats().calls == before + 1
    close(llm(ids).logits, Plain.from_pretrained(MODEL)(ids).logits)
print(f"it works {dist.get_rank()}\\n", end="")  # one write: the ranks share a pipe, where pieces of lines would mix
dist.destroy_process_group()
"""


def blocks() -> str:
    """The code of the section."""
    text = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    section = text.split(f"## {TITLE}\n")[1].split("\n## ")[0]
    return "\n".join(line[4:] for line in section.splitlines() if not line.strip() or line.startswith("    "))


@pytest.mark.slow
@pytest.mark.usefixtures("forks")
def test_the_examples_of_the_document_run_as_they_are_written(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("transformers.distributed.tensor_parallel")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    code = blocks()
    assert len(re.findall(r"^(?:from|import) ", code, re.MULTILINE)) == 10
    script = tmp_path / "example.py"
    script.write_text(BEFORE + code + AFTER, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script),
         str(tmp_path / "model")],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    assert sorted(re.findall(r"it works \d", done.stdout)) == ["it works 0", "it works 1"]
