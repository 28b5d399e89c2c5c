"""Models of images and text, given text: their language model runs, tower and projector stay on disk."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

import ptqpipe
from ptqpipe.calibration.command import calibrate
from ptqpipe.calibration.options import CalibrateOptions, GenerateOptions
from ptqpipe.calibration.own_text import generate
from ptqpipe.check.evaluate.command import evaluate
from ptqpipe.check.options import EvalOptions
from ptqpipe.check.verify.command import verify
from ptqpipe.conversion.options import TransformOptions
from ptqpipe.conversion.transform.command import transform
from ptqpipe.errors import CheckpointError, UsageError
from ptqpipe.runtime import load, load_model
from ptqpipe.runtime.loading import check_load
from ptqpipe.serving.engine import EngineOptions
from ptqpipe.serving.engine.model_runner import ModelRunner, check_model
from ptqpipe.serving.engine.probe import check_empty
from ptqpipe.serving.engine.prompt_images import Images
from ptqpipe.serving.preflight import check_checkpoint
from ptqpipe.serving.tower import Tower
from tests import families, image_text, tiny
from tests.serving.engine import images as pictures
from tests.serving.engine.models import ask, engine, generate as served_by, greedy_of, tokenizer

NOTE = "vision tower and projector are left out"
TOWERS = re.compile(r"(vis(ual|ion)\w*|projector|connector|aligner|merger)\.")


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Makes each model once."""
    made: dict[str, Path] = {}

    def of(kind: str) -> Path:
        if kind not in made:
            made[kind] = families.make_model(tmp_path_factory.mktemp("model") / kind, kind)
        return made[kind]

    return of


def logits_of(model: Any) -> torch.Tensor:
    """Of two rows of random tokens."""
    ids = torch.randint(3, 80, (2, 12), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=ids).logits
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", image_text.RUN)
@pytest.mark.filterwarnings("error:.*no place")
def test_the_language_model_computes_what_the_whole_model_computes_of_text(
    make: Callable[[str], Path], kind: str
) -> None:
    path = make(kind)
    alone = load_model(path)
    whole = transformers.AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
    torch.testing.assert_close(logits_of(alone), logits_of(whole), rtol=0, atol=0)
    assert not [name for name, _ in alone.named_parameters() if TOWERS.search(name)]
    empty, refusal = check_load(path), ""
    try:
        check_model(empty)
        check_empty(empty, 64)
    except UsageError as error:
        refusal = str(error)
    assert image_text.RUN[kind] in refusal
    assert bool(image_text.RUN[kind]) == bool(refusal)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "weights"), [("qwen3_vl", 2 * 7), ("gemma4", 2 * 7 + 2 * 5)]
)  # two share keys, values
def test_calibrated_converted_evaluated_and_served(
    make: Callable[[str], Path], tmp_path: Path, kind: str, weights: int
) -> None:
    model, data, said = make(kind), families.write_windows(tmp_path / "data.jsonl"), list[str]()
    stats, options = tmp_path / "stats", CalibrateOptions(samples=8, seqlen=16, holdout=2)
    done = calibrate(model, [str(data)], stats, options=options, log=said.append)
    assert done is not None
    assert not [name for name in done.content["modules"] if TOWERS.search(name)]
    out = ptqpipe.convert(model, out=tmp_path / "out", stats=stats, workers=1)
    assert len(out.record["weights"]) == weights  # the checkpoint's own names
    assert verify(out.out, source=model, statistics=stats, workers=1).ok
    result = evaluate(
        str(out.out), source=str(model), options=EvalOptions(data=(str(data),), seqlen=16), log=said.append
    )
    assert 0 < result["kl"][0]["mean"] < 0.3
    written = generate(model, tmp_path / "own.jsonl", options=GenerateOptions(samples=2, seqlen=16), log=said.append)
    assert written.content["samples"] == 2
    assert [NOTE in line for line in said] == [True] * 3
    check_checkpoint(str(out.out), tp=1, packed=True)
    oracle, prompts = load(out.out, dtype="float32"), [(5, 6, 7, 8), tuple(range(9, 39))]
    runner = ModelRunner(load(out.out, dtype="float32"), EngineOptions(1 << 24, 64, 4, 8))
    found = served_by(
        engine(runner, max_len=64, max_batch_tokens=11, tokens=tokenizer()),
        [ask(prompt, 12, name=str(at)) for at, prompt in enumerate(prompts)],
    )
    assert [found[str(at)][0] for at in range(2)] == [greedy_of(oracle, prompt, 12) for prompt in prompts]
    decoded = load_model(out.out)
    torch.testing.assert_close(logits_of(load(out.out, dtype="float32")), logits_of(decoded), rtol=0, atol=1e-4)


def test_a_rule_gives_the_tower_fp8_and_images_are_seen_with_it(tmp_path: Path) -> None:
    model = pictures.make(tmp_path / "model", "qwen3_vl")
    rules = [{"match": "model.visual.*", "format": "fp8_dynamic"}, {"match": "*", "format": "nvfp4"}]
    (tmp_path / "recipe.yaml").write_text(json.dumps({"version": 1, "rules": rules}))
    out = ptqpipe.convert(model, out=tmp_path / "out", recipe=str(tmp_path / "recipe.yaml"), workers=1)
    formats = {name: entry["format"] for name, entry in out.record["weights"].items()}
    towers = [name for name in formats if TOWERS.search(name)]
    assert len(towers) > 3
    assert {formats[name] for name in towers} == {"fp8_channel"}
    assert verify(out.out, source=model, workers=1).ok
    prompt, made = pictures.inputs("qwen3_vl", transformers.AutoConfig.from_pretrained(model))
    given = Images(made, (b"1", b"2"), pictures.IMAGE)
    whole, packed = (
        Tower(path, torch.float32, "cpu", lambda line: None).see(prompt, given) for path in (model, out.out)
    )
    error = float((whole.rows - packed.rows).norm() / whole.rows.norm())
    assert 0 < error < 0.1


@pytest.mark.parametrize("kind", ["blip", "idefics"])
def test_a_model_that_needs_an_image_is_refused_with_what_works(kind: str, tmp_path: Path) -> None:
    config = transformers.CONFIG_MAPPING[kind]().to_diff_dict()
    tiny.save(tmp_path, {"a.weight": torch.zeros(16, 16)}, config={**config, "model_type": kind})
    with pytest.raises(CheckpointError, match=r"generates no text without an image.*without data and stats.*vLLM"):
        check_load(tmp_path)


@pytest.mark.parametrize("kind", ["qwen3_vl", "gemma3", "llava", "mistral3", "paligemma", "ovis2"])
def test_factors_move_in_the_language_model_alone(make: Callable[[str], Path], kind: str, tmp_path: Path) -> None:
    model, data = make(kind), families.write_windows(tmp_path / "data.jsonl")
    given = CalibrateOptions(samples=8, seqlen=16, moments=("diagonal",), holdout=0)
    calibrate(model, [str(data)], tmp_path / "stats", options=given)
    scaling = "rotate_values" if "gemma" in kind else "smoothquant,rotate_values"  # whose norms a scale would offset
    options = TransformOptions(transforms=scaling, rotation_size=16, dtype="fp32")
    transform(model, tmp_path / "out", stats=tmp_path / "stats", options=options)
    before, after = (load_file(next(path.glob("*.safetensors"))) for path in (model, tmp_path / "out"))
    changed = [name for name in before if not torch.equal(before[name].float(), after[name].float())]
    assert len(changed) >= 4  # v_proj and o_proj of two layers
    assert not [name for name in changed if TOWERS.search(name)]
    whole, folded = (
        transformers.AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
        for path in (model, tmp_path / "out")
    )
    torch.testing.assert_close(logits_of(folded), logits_of(whole), rtol=0, atol=1e-4)
    with pytest.raises(UsageError, match=r"rotate_residual is refused"):  # images enter the stream unrotated
        transform(model, tmp_path / "no", options=replace(options, transforms="rotate_residual"))
