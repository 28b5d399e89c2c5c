"""Claims about a service that drafts: it answers as without, and /metrics counts."""

from pathlib import Path

import httpx
import pytest
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from ptqpipe.errors import UsageError
from ptqpipe.serving.command import serving
from ptqpipe.serving.options import ServeOptions
from tests import families

BODY = {"prompt": "w5 w17 w40 w8", "max_tokens": 12, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def ckpt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with a layer that drafts, and a tokenizer of words."""
    folder = families.make_model(tmp_path_factory.mktemp("drafts") / "model", "glm4_moe", mtp=True)
    made = Tokenizer(models.WordLevel({f"w{i}": i for i in range(families.VOCABULARY)}, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="w0").save_pretrained(folder)
    return folder


def test_answers_are_those_without_drafts_and_metrics_count(ckpt: Path) -> None:
    answers, metrics = [], ""
    for speculative in (None, "mtp"):
        options = ServeOptions(
            str(ckpt), port=0, dtype="float32", workers=1, kv_cache_size=1 << 22, speculative=speculative,
            speculative_tokens=1 if speculative is None else 2,
        )  # fmt: skip
        with serving(options, log=lambda line: None) as url, httpx.Client(base_url=url, timeout=60) as http:
            answers.append(http.post("/v1/completions", json=BODY).json()["choices"][0]["text"])
            metrics = http.get("/metrics").text
    assert answers[0] == answers[1] != ""
    drafted = [line for line in metrics.splitlines() if line.startswith("vllm:spec_decode_num_draft_tokens_total")]
    assert len(drafted) == 1
    assert float(drafted[0].split()[-1]) >= 12


def test_a_checkpoint_whose_layer_was_dropped_is_refused(tmp_path: Path) -> None:
    folder = families.make_model(tmp_path / "model", "glm4_moe")  # as transformers saves it
    options = ServeOptions(str(folder), port=0, speculative="mtp")
    with (
        pytest.raises(UsageError, match=r"has no multi-token prediction layer \(no 'model.layers.2.eh_proj'\)"),
        serving(options, log=lambda line: None),
    ):
        pass
