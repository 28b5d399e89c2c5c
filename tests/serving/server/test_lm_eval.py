"""lm-eval's ``local-completions`` against the server says what its ``hf`` model says of the same model in process."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.serving.engine.models import DEMO, reference, tokenizer
from tests.serving.server.conftest import Server

pytest.importorskip("lm_eval")
pytest.importorskip("tenacity")

TASK: dict[str, Any] = {
    "task": "continue",
    "dataset_path": "json",
    "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_text": "{{text}}",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "{{label}}",
    "target_delimiter": "",
    "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
}


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Which of two ends a held-out line has: its own or the next line's."""
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    lines = [line.strip() for line in (DEMO / "heldout.txt").read_text().splitlines() if 40 < len(line.strip()) < 90]
    lines = lines[:24]
    rows = []
    for at, line in enumerate(lines):
        ends = [line[25:], lines[(at + 1) % len(lines)][25:]]
        rows.append({"text": line[:25], "choices": ends if at % 2 else ends[::-1], "label": 1 - at % 2})
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {**TASK, "dataset_kwargs": {"data_files": {"test": str(path)}}}


@pytest.mark.slow
def test_local_completions_equals_hf(server: Server, task: dict[str, Any]) -> None:
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.models.openai_completions import LocalCompletionsAPI
    from lm_eval.tasks import TaskManager

    api = LocalCompletionsAPI(
        model="demo", base_url=f"{server.url}/v1/completions", tokenizer=str(DEMO), tokenizer_backend="huggingface",
        num_concurrent=1, max_retries=1, max_length=256, batch_size=4, add_bos_token=True,
    )  # fmt: skip
    here = HFLM(
        pretrained=reference(), tokenizer=tokenizer(), batch_size=4, device="cpu", max_length=255, add_bos_token=True
    )
    none = TaskManager(include_defaults=False)  # the task is given whole; reading lm-eval's own takes 9 s of a core
    found = {
        name: simple_evaluate(model=model, tasks=[task], task_manager=none, bootstrap_iters=0, log_samples=True)
        for name, model in (("api", api), ("hf", here))
    }
    samples = {name: result["samples"]["continue"] for name, result in found.items()}
    assert len(samples["api"]) == 24
    for ours, theirs in zip(samples["api"], samples["hf"], strict=True):
        for (mine, mine_greedy), (right, right_greedy) in zip(
            ours["filtered_resps"], theirs["filtered_resps"], strict=True
        ):
            # Sums of up to 40 float32 log probabilities of size ten.
            assert mine == pytest.approx(right, abs=1e-3)
            assert mine_greedy == right_greedy
    metrics = {name: result["results"]["continue"] for name, result in found.items()}
    assert metrics["api"]["acc,none"] == metrics["hf"]["acc,none"]
    assert metrics["api"]["acc,none"] > 0.6  # its own end is the likelier one more often than not
