"""Calibration data with images: the moments are those of transformers' whole model, image tokens among them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import ptqpipe
from ptqpipe.calibration.command import calibrate
from ptqpipe.calibration.data import load_samples
from ptqpipe.calibration.moments import FIRST_WEIGHT
from ptqpipe.calibration.options import CalibrateOptions
from ptqpipe.calibration.statistics import Statistics
from ptqpipe.check.verify.command import verify
from ptqpipe.errors import CheckpointError, UsageError
from ptqpipe.pipeline.tune.command import TuneOptions, tune
from tests import processors
from tests.serving.engine import images

SEQLEN = 48
MODULES = ("layers.0.self_attn.q_proj", "layers.1.self_attn.q_proj", "layers.1.mlp.down_proj")


def write(folder: Path, rows: int = 3) -> Path:
    """Chats with an image each, of their own sizes, and rows of text."""
    lines = []
    for row in range(rows):
        (folder / f"{row}.png").write_bytes(processors.png(processors.picture(row, 40 + 30 * row)))
        parts = [{"type": "image", "image": f"{row}.png"}, {"type": "text", "text": "w3 w4 " * (row + 1)}]
        lines.append({"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": f"w{row}"}]})
    lines.append({"text": " ".join(f"w{at % 80}" for at in range(2 * SEQLEN))})
    file = folder / "chats.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def inputs_of(model: Any, ids: torch.Tensor, made: dict[str, Any]) -> dict[str, torch.Tensor]:
    """What some linear layers of a whole model are given, [tokens, columns] each."""
    found: dict[str, torch.Tensor] = {}

    def note(name: str) -> Any:
        return lambda _module, args: found.__setitem__(name, args[0][0])

    hooks = [
        module.register_forward_pre_hook(note(end))
        for name, module in model.named_modules()
        for end in MODULES
        if name.endswith(end) and "visual" not in name and "vision" not in name
    ]
    with torch.no_grad():
        model(input_ids=ids, **made)
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3_vl", "gemma3"])
def test_moments_are_those_of_the_whole_model(kind: str, tmp_path: Path) -> None:
    folder = processors.add(images.make(tmp_path / "model", kind), kind)
    data, said = write(tmp_path), list[str]()
    options = CalibrateOptions(samples=4, seqlen=SEQLEN, holdout=1, dtype="float32")
    done = calibrate(folder, [str(data)], tmp_path / "stats", options=options, log=said.append)
    assert done is not None
    assert "of the samples have images" in said[0]
    samples = load_samples([str(data)], folder, samples=4, seqlen=SEQLEN, holdout=1, images=True)
    assert sum(given is not None for given in samples.images) == 3
    whole = images.reference(folder)
    rows: dict[str, list[torch.Tensor]] = {name: [] for name in MODULES}
    for ids, made in zip(samples.windows, samples.images, strict=False):
        for name, x in inputs_of(whole, ids[ids >= 0][None], dict(made or {})).items():
            rows[name].append(x)
    with Statistics.open(done.out) as statistics:
        for name in MODULES:
            module = next(found for found in statistics.modules if found.endswith(name))
            x, first = torch.cat(rows[name]).double(), torch.cat([row[:1] for row in rows[name]]).double()
            found = statistics.of(module)
            assert found.tokens == len(x)
            squares = x.square().sum(0) + (FIRST_WEIGHT - 1) * first.square().sum(0)
            squares /= len(x) + (FIRST_WEIGHT - 1) * len(first)
            torch.testing.assert_close(found.second_moment.double(), squares, rtol=1e-4, atol=1e-9)
    assert not [name for name in statistics.modules if "visual" in name or "vision" in name]


@pytest.mark.slow
def test_codes_are_tuned_on_images(tmp_path: Path) -> None:
    folder = processors.add(images.make(tmp_path / "model", "qwen3_vl"), "qwen3_vl")
    data, said = write(tmp_path), list[str]()
    options = TuneOptions(samples=4, seqlen=SEQLEN)
    done = tune(folder, [str(data)], tmp_path / "codes", options=options, log=said.append)
    assert "of the samples have images" in said[0]
    with pytest.raises(UsageError, match='metric="kl" takes no rows with images; use metric="output"'):
        tune(folder, [str(data)], tmp_path / "other", options=replace(options, metric="kl"))
    blocks = done.content["blocks"].values()
    assert [record["start_loss"] > 0 for record in blocks] == [True, True]
    out = ptqpipe.convert(folder, out=tmp_path / "out", codes=tmp_path / "codes", workers=1)
    assert verify(out.out, source=folder, workers=1).ok


def test_images_are_part_of_the_data_and_rows_that_do_not_fit_are_one_line(tmp_path: Path) -> None:
    folder = processors.add(images.make(tmp_path / "model", "llava"), "llava")
    data = write(tmp_path)

    def load(seqlen: int = SEQLEN) -> None:
        load_samples([str(data)], folder, samples=1, seqlen=seqlen, images=True)

    with pytest.raises(UsageError, match=r"line 1 has tokens of images up to number 5, seqlen is 4; raise it"):
        load(4)
    with pytest.raises(UsageError, match=r"line 1 has an image, which only calibrate and tune take"):
        load_samples([str(data)], folder, samples=1, seqlen=SEQLEN)
    before, other = load_samples([str(data)], folder, samples=5, seqlen=SEQLEN, images=True), processors.picture(9, 40)
    (tmp_path / "0.png").write_bytes(processors.png(other))
    after = load_samples([str(data)], folder, samples=5, seqlen=SEQLEN, images=True)
    assert torch.equal(before.windows, after.windows)
    assert before.sha256 != after.sha256
    (tmp_path / "0.png").write_bytes(b"none")
    with pytest.raises(UsageError, match=r"image 1 of .*line 1 is none that can be decoded"):
        load()
    (tmp_path / "0.png").unlink()
    with pytest.raises(UsageError, match=r"image '0.png' cannot be read"):
        load()
    (folder / "preprocessor_config.json").unlink()
    (folder / "processor_config.json").unlink()
    with pytest.raises(CheckpointError, match=r"has none of processor_config\.json"):
        load()


def test_messages_that_are_no_objects_beside_an_image_are_one_line(tmp_path: Path) -> None:
    folder = processors.add(images.make(tmp_path / "model", "llava"), "llava")
    data = write(tmp_path)
    row = {"messages": [{"role": "user", "content": [{"type": "image", "image": "0.png"}]}, 5]}
    data.write_text(json.dumps(row) + "\n" + data.read_text())
    with pytest.raises(UsageError, match=r"chats\.jsonl, line 1, 'messages' is a list of dict and int, expected"):
        load_samples([str(data)], folder, samples=2, seqlen=SEQLEN, images=True)
