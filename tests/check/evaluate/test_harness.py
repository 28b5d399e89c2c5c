"""Claims about lm-eval tasks: its own numbers on a model of ours, local files, comparisons sample by sample."""

import json
import math
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ptqpipe
from ptqpipe.check.evaluate.harness import LOCAL_TASKS, TaskMetric, TaskRequest, check_tasks, compare, run_tasks
from ptqpipe.check.evaluate.scores import score
from ptqpipe.errors import UsageError
from ptqpipe.runtime import load_model
from ptqpipe.runtime.loading import load_tokenizer

MODEL = Path(__file__).resolve().parents[3] / "ptqpipe" / "demo_model"
ALL = tuple(sorted(path.stem for path in LOCAL_TASKS.glob("*.yaml")))
CHOICE = {"query": "Question: what does it return?\n", "choices": ["the number of items", "zebra purple"], "gold": 0}
OTHER = {"query": "Question: what does it raise?", "choices": ["zzz qqq xx", "an exception"], "gold": 1}
SCHEMA = {"context_options": ["The list holds the items so the list", "xq"], "continuation": "is returned.", "gold": 0}
WORD = {"context": "Return a list of the", "continuation": "items"}
ROWS: dict[str, list[dict[str, Any]]] = {
    "piqa": [CHOICE, OTHER, CHOICE],
    "arc_easy": [CHOICE, OTHER],
    "openbook_qa": [CHOICE, OTHER],
    "copa": [CHOICE, OTHER],
    "winogrande": [SCHEMA, SCHEMA],
    "winograd_wsc": [SCHEMA, SCHEMA],
    "lambada_openai": [WORD, WORD],
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for number, (name, rows) in enumerate(ROWS.items()):
        place = folder / "sub" if number % 2 else folder  # a task's file may lie one folder down
        place.mkdir(exist_ok=True)
        (place / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def model() -> Any:
    return load_model(MODEL)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(MODEL)


@pytest.fixture(scope="module")
def metrics(model: Any, tokenizer: Any, data: Path) -> dict[tuple[str, str], TaskMetric]:
    found = run_tasks(model, tokenizer, TaskRequest(ALL, task_data=data))
    return {(metric.task, metric.name): metric for metric in found}


def likelihood(model: Any, tokenizer: Any, context: str, continuation: str) -> float:
    """Sum of log-probabilities of the continuation's tokens, by plain torch."""
    start = len(tokenizer(context)["input_ids"])
    ids = torch.tensor([tokenizer(context + continuation)["input_ids"]])
    with torch.no_grad():
        logp = model(ids).logits[0].double().log_softmax(-1)
    return sum(float(logp[t - 1, ids[0, t]]) for t in range(start, ids.shape[1]))


@pytest.mark.slow
def test_every_local_task_runs_offline(metrics: dict[tuple[str, str], TaskMetric]) -> None:
    assert {task for task, _ in metrics} == set(ALL)
    assert len(ALL) == 7
    assert metrics["local_piqa", "acc"].samples == 3
    assert not metrics["local_lambada", "perplexity"].higher_is_better
    assert metrics["local_lambada", "acc"].higher_is_better


@pytest.mark.slow
def test_no_process_is_forked(model: Any, tokenizer: Any, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a pool was forked from a process with threads")

    monkeypatch.setattr(multiprocessing, "Pool", refuse)
    monkeypatch.delenv("DISABLE_MULTIPROC", raising=False)
    found = run_tasks(model, tokenizer, TaskRequest(("local_lambada",), task_data=data))
    assert next(metric.stderr for metric in found if metric.name == "perplexity") is not None  # resampled all the same
    assert "DISABLE_MULTIPROC" not in os.environ


@pytest.mark.slow
def test_multiple_choice_picks_the_likeliest_answer(
    metrics: dict[tuple[str, str], TaskMetric], model: Any, tokenizer: Any
) -> None:
    right = []
    for row in ROWS["piqa"]:
        prompt = row["query"].strip() + "\nAnswer:"
        scores = [likelihood(model, tokenizer, prompt, " " + choice) for choice in row["choices"]]
        right.append(float(np.argmax(scores) == row["gold"]))
    assert list(metrics["local_piqa", "acc"].values) == right
    assert metrics["local_piqa", "acc"].value == pytest.approx(sum(right) / len(right))


def test_schemas_compare_one_continuation_after_two_contexts(
    metrics: dict[tuple[str, str], TaskMetric], model: Any, tokenizer: Any
) -> None:
    row = SCHEMA
    scores = [likelihood(model, tokenizer, c, " " + str(row["continuation"])) for c in row["context_options"]]
    assert metrics["local_winogrande", "acc"].value == float(np.argmax(scores) == row["gold"])


def test_lambada_is_the_perplexity_of_the_last_word(
    metrics: dict[tuple[str, str], TaskMetric], model: Any, tokenizer: Any
) -> None:
    expected = math.exp(-likelihood(model, tokenizer, str(WORD["context"]), " " + str(WORD["continuation"])))
    assert metrics["local_lambada", "perplexity"].value == pytest.approx(expected, rel=1e-4)


def test_perplexity_is_that_of_lm_eval(model: Any, tokenizer: Any) -> None:
    """Its rolling log-likelihood scores every token of a text after a prefix token; so do we with that prefix."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    text = (MODEL / "heldout.txt").read_text(encoding="utf-8")[:600]
    lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1)
    request = Instance(request_type="loglikelihood_rolling", doc={}, arguments=(text,), idx=0)
    theirs = lm.loglikelihood_rolling([request], disable_tqdm=True)[0]
    ids = [lm.prefix_token_id, *lm.tok_encode(text)]
    ours = score(model, torch.tensor(ids), window=len(ids))
    assert len(ids) > 100
    assert -float(ours.nll.double().sum()) == pytest.approx(theirs, rel=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("error")
def test_answers_longer_than_the_context_are_refused_and_cut_questions_told(
    model: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model.config, "max_position_embeddings", 24)
    query, short, long = "def " * 30, "return", "return " * 40
    counts = [len(tokenizer(" " + choice.strip())["input_ids"]) for choice in (short, long)]
    assert counts[0] < 24 < counts[1]
    for choice in (short, long):
        row = {"query": query, "choices": [choice, "x"], "gold": 0}
        (tmp_path / "piqa.jsonl").write_text(json.dumps(row) + "\n" + json.dumps(row | {"query": "a"}) + "\n")
        request = TaskRequest(("local_piqa",), task_data=tmp_path)
        if choice == long:
            with pytest.raises(UsageError, match=r"an answer of \d+ tokens, and the model takes 24; leave"):
                run_tasks(model, tokenizer, request)
        else:
            with pytest.warns(UserWarning, match="^2 requests of the tasks are longer than the 24 tokens"):
                run_tasks(model, tokenizer, request)


@pytest.mark.slow
def test_limit_takes_the_first_samples(model: Any, tokenizer: Any, data: Path) -> None:
    found = run_tasks(model, tokenizer, TaskRequest(("local_piqa",), task_data=data, limit=1))
    assert [metric.samples for metric in found] == [1, 1]


@pytest.fixture
def further(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with two more tasks, of which one has damaged data.

    They are further to one of lm-eval's own, PIQA: it looks for these beside its module, and to read the thousands
    there takes 9 s of a core, once for each --include-path.
    """
    from lm_eval.tasks import TaskManager

    folder = tmp_path_factory.mktemp("further")
    (folder / "bad.jsonl").write_text('{"query": 1\n')
    text = (LOCAL_TASKS / "local_copa.yaml").read_text()
    for name, file in (("mine", next(data.rglob("copa.jsonl"))), ("damaged", folder / "bad.jsonl")):
        (folder / f"{name}.yaml").write_text(text.replace("local_copa", name).replace("copa.jsonl", str(file)))
    module = sys.modules[TaskManager.__module__]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "__file__", str(Path(str(module.__file__)).with_name("piqa") / "manager.py"))
        yield folder


@pytest.mark.slow
def test_a_folder_of_further_tasks(model: Any, tokenizer: Any, further: Path) -> None:
    found = run_tasks(model, tokenizer, TaskRequest(("mine",), include_path=further))
    assert [(metric.task, metric.samples) for metric in found] == [("mine", 2)]
    check_tasks(TaskRequest(("mine", "piqa"), include_path=further))


def test_data_that_lm_eval_cannot_load_is_one_line(model: Any, tokenizer: Any, further: Path) -> None:
    with pytest.raises(UsageError, match="the tasks damaged cannot be loaded") as caught:
        run_tasks(model, tokenizer, TaskRequest(("damaged",), include_path=further))
    assert "\n" not in str(caught.value)


def test_lm_eval_reads_a_packed_checkpoint_by_its_path(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    """What ``lm_eval --model hf`` does, in a process that has imported ptqpipe."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    path = tmp_path / "modelopt"
    ptqpipe.convert(MODEL, format="nvfp4", out=path, container="modelopt")
    arguments = ("Return a list of the", " items")

    def likelihood_of(lm: Any) -> float:
        request = Instance(request_type="loglikelihood", doc={}, arguments=arguments, idx=0)
        return float(lm.loglikelihood([request], disable_tqdm=True)[0][0])

    by_path = HFLM(pretrained=str(path), dtype="float32", device="cpu", batch_size=1)
    by_model = HFLM(pretrained=load_model(path), tokenizer=tokenizer, batch_size=1)
    assert likelihood_of(by_path) == likelihood_of(by_model)
    assert likelihood_of(by_path) != likelihood_of(HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1))


@pytest.mark.slow
def test_unknown_tasks_are_named_with_their_neighbours(data: Path) -> None:
    with pytest.raises(UsageError, match=r"task 'local_pika' is unknown; near it are local_piqa"):
        check_tasks(TaskRequest(("local_pika",), task_data=data))
    with pytest.raises(UsageError, match=r"task 'hellaswagg' is unknown; near it are hellaswag"):
        check_tasks(TaskRequest(("hellaswagg",)))


def test_local_tasks_need_no_index_of_thousands_of_others(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lm_eval.tasks import TaskManager

    asked: list[bool] = []

    def manager(*, include_path: str | None, include_defaults: bool) -> TaskManager:
        asked.append(include_defaults)
        return TaskManager(include_path=include_path, include_defaults=False)

    monkeypatch.setattr("lm_eval.tasks.TaskManager", manager)
    check_tasks(TaskRequest(("local_piqa", "local_copa"), task_data=data))
    with pytest.raises(UsageError, match="'piqa' is unknown"):  # of an index without any
        check_tasks(TaskRequest(("local_piqa", "piqa"), task_data=data))
    assert asked == [False, True]


@pytest.mark.slow
def test_local_data_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="with task_data"):
        check_tasks(TaskRequest(("local_piqa",)))
    with pytest.raises(UsageError, match=r"needs piqa\.jsonl"):
        check_tasks(TaskRequest(("local_piqa",), task_data=tmp_path))
    with pytest.raises(UsageError, match="is for local_ tasks, and piqa is none"):
        check_tasks(TaskRequest(("piqa",), task_data=tmp_path))
    with pytest.raises(UsageError, match="is no folder"):
        check_tasks(TaskRequest(("piqa",), include_path=tmp_path / "none"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"query": 1\n', "line 1 is not JSON"),
        (b'{"query": "a", "choices": ["b", "c"], "gold": 0}\n\n{"query": "a", "gold": 0}\n', "line 3 has no 'choices'"),
        (b"[1]\n", "line 1 has no 'query'"),
        (b"\xff\n", "not UTF-8"),
    ],
)
def test_damaged_local_data_is_one_line(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "copa.jsonl").write_bytes(content)
    with pytest.raises(UsageError, match=message):
        check_tasks(TaskRequest(("local_copa",), task_data=tmp_path))


def test_without_lm_eval_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)
    with pytest.raises(UsageError, match=r"pip install 'ptqpipe\[eval\]'"):
        check_tasks(TaskRequest(("piqa",)))


def metric(values: Sequence[Any], aggregate: Callable[[Sequence[Any]], float], *, better: bool = True) -> TaskMetric:
    return TaskMetric("t", "m", better, aggregate(values), None, len(values), values, aggregate)


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def test_recovery_is_percent_of_the_baseline() -> None:
    assert compare(metric([1, 0, 0, 0], mean), metric([1, 1, 0, 0], mean)).recovery == 50.0
    lower = compare(metric([4.0, 4.0], mean, better=False), metric([2.0, 2.0], mean, better=False))
    assert (lower.recovery, lower.difference) == (50.0, 2.0)
    assert compare(metric([1, 1], mean), metric([0, 0], mean)).recovery is None


def test_the_interval_is_paired() -> None:
    """The same samples right in both: no doubt about the difference, whatever the spread of each."""
    values = [1.0, 0.0] * 50
    assert compare(metric(values, mean), metric(values, mean)).interval == (0.0, 0.0)
    worse = [0.0, 0.0] * 5 + values[10:]
    found = compare(metric(worse, mean), metric(values, mean))
    assert found.interval is not None
    assert found.interval[0] <= -0.05 <= found.interval[1] <= 0.0


def test_any_aggregate_is_resampled() -> None:
    def perplexity(values: Sequence[float]) -> float:
        return math.exp(-mean(values))

    values = [-1.0, -2.0, -3.0] * 20
    found = compare(metric([v - 0.1 for v in values], perplexity), metric(values, perplexity))
    assert found.interval is not None
    assert found.interval[0] < found.difference < found.interval[1]
    assert found.difference == pytest.approx(math.exp(2.1) - math.exp(2.0))


def test_lm_eval_asks_no_git_where_the_folder_is_none(
    model: Any, tokenizer: Any, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    run_tasks(model, tokenizer, TaskRequest(("local_copa",), task_data=data, limit=1))
    assert "git" not in capfd.readouterr().err
