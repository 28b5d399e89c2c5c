"""tune, stopped and killed: it goes on to the same codes; what a reverse pass keeps, and what it finds."""

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ptqpipe.calibration import backward as reverse, runner
from ptqpipe.calibration.data import Samples, load_samples
from ptqpipe.checkpoint import tensor_file
from ptqpipe.conversion.prepare import prepare
from ptqpipe.errors import OutputError
from ptqpipe.pipeline.tune import backwards, codes_folder, command as tune, layer_codes, tune_samples
from ptqpipe.recipe.options import RecipeOptions
from ptqpipe.runtime.skeleton import Skeleton
from tests.pipeline.tune.tune_runs import DEMO, ONE, content_of, of_method

ReversePass = Callable[..., list[str]]


@pytest.mark.slow
def test_error_feedback_that_was_stopped_goes_on_to_the_same_codes(
    codes_of_run: Callable[[str, str], Path], text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = of_method("gptq")
    whole = content_of(codes_of_run("nvfp4", "gptq"))
    real, calls = layer_codes.follow, []

    def stops(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    monkeypatch.setattr(layer_codes, "follow", stops)
    with pytest.raises(KeyboardInterrupt):
        tune.tune(DEMO, [str(text)], tmp_path / "cut", options=options, machine=ONE)
    with pytest.raises(OutputError, match="settings"):
        tune.tune(DEMO, [str(text)], tmp_path / "cut", options=of_method("layerwise"), mode="resume", machine=ONE)
    again = tune.tune(DEMO, [str(text)], tmp_path / "cut", options=options, mode="resume", machine=ONE)
    assert again.content["digest"] == whole["digest"]
    assert len(calls) == 1 + len(whole["blocks"])


@pytest.mark.slow
def test_a_run_that_was_killed_while_it_wrote_a_layer_goes_on_to_the_same_codes(
    codes_of_run: Callable[[str, str], Path], text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a file lies there then, which no run may take for a layer."""
    options, undisturbed = of_method("gptq"), codes_of_run("nvfp4", "gptq")
    whole = content_of(undisturbed)
    real, second = tensor_file.bytes_of, sorted(whole["blocks"])[1]

    def killed(folder: Path, block: str, codes: Any) -> Any:
        if block == second:
            monkeypatch.setattr(tensor_file, "bytes_of", lambda _: 1 / 0)
        return write(folder, block, codes)

    write = codes_folder.write
    monkeypatch.setattr(codes_folder, "write", killed)
    with pytest.raises(ZeroDivisionError):
        tune.tune(DEMO, [str(text)], tmp_path / "cut", options=options, machine=ONE)
    monkeypatch.setattr(tensor_file, "bytes_of", real)
    monkeypatch.setattr(codes_folder, "write", write)
    again = tune.tune(DEMO, [str(text)], tmp_path / "cut", options=options, mode="resume", machine=ONE)
    assert again.content["digest"] == whole["digest"]
    assert {path.name for path in (tmp_path / "cut").iterdir()} == {path.name for path in undisturbed.iterdir()}


@pytest.mark.slow
def test_a_reverse_pass_that_has_ended_runs_again_only_where_a_file_of_it_is_lost(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options, passes, follows = replace(of_method("gptq"), samples=4), [], []
    whole = tune.tune(DEMO, [str(text)], tmp_path / "whole", options=options, machine=ONE)
    assert whole.content["metric"] == "kl"
    names = {file.name for file in (tmp_path / "whole").iterdir()}
    assert names == {"rounding.json", *(f"{block}.safetensors" for block in whole.content["blocks"])}
    real, follow = backwards.run_model_backward, layer_codes.follow

    def run(*args: Any, **kwargs: Any) -> Any:
        passes.append(1)
        return real(*args, **kwargs)

    def stops(*args: Any, **kwargs: Any) -> Any:
        follows.append(1)
        if len(follows) in (2, 3):
            raise KeyboardInterrupt
        return follow(*args, **kwargs)

    monkeypatch.setattr(backwards, "run_model_backward", run)
    monkeypatch.setattr(layer_codes, "follow", stops)
    for runs in (1, 1):
        with pytest.raises(KeyboardInterrupt):
            tune.tune(DEMO, [str(text)], tmp_path / "cut", options=options, mode="resume", machine=ONE)
        assert len(passes) == runs
    (first,) = tmp_path.glob("**/gradients/model.layers.0.safetensors")
    first.unlink()
    again = tune.tune(DEMO, [str(text)], tmp_path / "cut", options=options, mode="resume", machine=ONE)
    assert len(passes) == 2
    assert again.content["digest"] == whole.content["digest"]


@pytest.fixture
def reverse_pass(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ReversePass]:
    monkeypatch.setattr("ptqpipe.calibration.runner.BATCH_TOKENS", 2 * 32)  # several batches
    with prepare(DEMO, options=RecipeOptions("nvfp4"), out=tmp_path / "codes", stats=None, collected=True) as made:
        samples = load_samples([str(text)], DEMO, samples=6, seqlen=32)
        learned_from = tune_samples.learned_from(samples, of_method("gptq"))

        def observe(folder: Path, journal: dict[str, Any], stop: str = "") -> list[str]:
            """Runs the pass; ``stop``: the event that kills it. Every event: files and lines of the journal."""
            events: list[str] = []

            def happens(event: str) -> None:
                events.append(event)
                if event == stop:
                    raise KeyboardInterrupt

            def write(path: Path, tensors: Any) -> str:
                happens(f"{path.parent.name} {path.stem}")
                return tensor_file.write_tensors(path, tensors)

            def commit(unit: str, record: Any) -> None:
                happens(f"journal {len(record['layers'])}")
                journal[unit] = json.loads(json.dumps(record))

            monkeypatch.setattr(backwards, "write_tensors", write)
            folder.mkdir(exist_ok=True)
            with suppress(KeyboardInterrupt):
                backwards.observe(
                    made, learned_from, folder, ONE, dtype=torch.float32, seed=0, done=journal, commit=commit
                )
            return events

        yield observe


def kept(folder: Path) -> dict[str, bytes]:
    """The files of a reverse pass."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.mark.slow
def test_a_reverse_pass_goes_on_behind_the_layer_that_it_was_killed_behind(
    reverse_pass: ReversePass, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever that is, to the same bytes, with a bar that begins there; slopes do not outlive it."""
    events, begun = reverse_pass(tmp_path / "whole", {}), []
    whole = kept(tmp_path / "whole")
    layers = sum(event.startswith("gradients") for event in events)
    assert layers > 2
    assert len(events) == 3 * layers - 1  # the first layer leaves no slopes
    assert len(whole) == layers
    bar = backwards.counting_bar
    monkeypatch.setattr(backwards, "counting_bar", lambda *a, **o: begun.append(o["done"]) or bar(*a, **o))
    for number, event in enumerate(events):
        folder, journal = tmp_path / str(number), dict[str, Any]()
        first = reverse_pass(folder, journal, stop=event)
        assert first[-1] == event
        done = sum(line.startswith("journal") for line in first[:-1])
        begun.clear()
        second = reverse_pass(folder, journal)
        assert begun == [done]
        assert second == events[3 * done :]
        assert kept(folder) == whole
        assert reverse_pass(folder, journal) == []


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["gradients", "slopes"])
def test_a_flipped_bit_in_what_a_reverse_pass_has_kept_is_noticed(
    folder: str, reverse_pass: ReversePass, tmp_path: Path
) -> None:
    events = reverse_pass(tmp_path / "whole", {})
    journal: dict[str, Any] = {}
    reverse_pass(tmp_path / "cut", journal, stop=events[6])
    assert len(journal["backwards"]["layers"]) == 2
    (file, *_) = sorted((tmp_path / "cut" / folder).iterdir())
    content = bytearray(file.read_bytes())
    content[-3] ^= 16
    file.write_bytes(content)
    assert reverse_pass(tmp_path / "cut", journal) == events
    assert kept(tmp_path / "cut") == kept(tmp_path / "whole")


@pytest.mark.slow
def test_gradients_are_those_of_samples_that_do_not_judge_and_of_no_more_than_are_enough(
    rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of sixteen windows the last two judge; of the others all are run backwards, or five."""
    for module in (runner, tune_samples):
        monkeypatch.setattr(module, "BATCH_TOKENS", 4 * 32)
    ran, real = [], backwards.run_model_backward

    def run(skeleton: Any, samples: Samples, **more: Any) -> Any:
        ran.append(samples)
        return real(skeleton, samples, **more)

    monkeypatch.setattr(backwards, "run_model_backward", run)
    windows = load_samples([str(rows)], DEMO, samples=16, seqlen=32).windows
    counted = []
    for number, tokens in enumerate((16_384, 5 * 32)):
        monkeypatch.setattr(reverse, "TOKENS", tokens)
        done = tune.tune(DEMO, [str(rows)], tmp_path / str(number), options=of_method("gptq"), machine=ONE)
        counted.append(done.content["data"]["backwards"])
    assert counted == [14, 5]
    assert torch.equal(ran[0].windows, windows[:14])
    assert torch.equal(ran[1].windows, windows[[0, 2, 5, 8, 11]])


@pytest.mark.slow
def test_a_reverse_pass_in_bfloat16_finds_the_moments_of_one_in_float32(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for rounding, which is less than what other labels change: those of another seed have other moments. With the
    same labels, of which the slightest change of the distribution makes others."""
    found: dict[tuple[torch.dtype, int], list[torch.Tensor]] = {}
    labels: list[tuple[torch.Tensor, torch.Tensor]] = []  # those of the first pass
    draw, again = reverse.draw_labels, iter(labels)

    def same(chances: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        if dtype == torch.bfloat16:
            return next(again)
        labels.append(draw(chances, generator))
        return labels[-1]

    monkeypatch.setattr(reverse, "draw_labels", same)
    for dtype, seed in ((torch.float32, 0), (torch.bfloat16, 0), (torch.float32, 1)):
        folder = tmp_path / f"{dtype}-{seed}"
        folder.mkdir()
        with prepare(DEMO, options=RecipeOptions("nvfp4"), out=folder / "codes", stats=None, collected=True) as made:
            samples = load_samples([str(text)], DEMO, samples=16, seqlen=32)
            learned_from = tune_samples.learned_from(samples, of_method("gptq"))
            at = backwards.observe(
                made, learned_from, folder, ONE, dtype=dtype, seed=seed, done={}, commit=lambda *_: None
            )
            every = [at(name) for name, _ in Skeleton.of(made.source, dtype=torch.float32).blocks]
        found[dtype, seed] = [g for of in every for runs in (*of.outputs.values(), of.last) for g in runs]
    exact, rounded, other = found.values()
    assert all(g.dtype == torch.float32 for g in rounded)
    for one, two, three in zip(exact, rounded, other, strict=True):
        assert 0 < (two - one).norm() < 0.25 * (three - one).norm()
