"""Images in chats: the answers are those of transformers' processor and `generate`; what is no image is one line."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
import transformers

from ptqpipe.errors import UsageError
from ptqpipe.serving.command import serving
from ptqpipe.serving.engine import EngineOptions, Images, Overloaded, Request, SamplingParams, Service, State
from ptqpipe.serving.options import ServeOptions
from ptqpipe.serving.preflight import check_checkpoint, processor_of
from tests import processors
from tests.serving.engine import images
from tests.serving.server.test_processes import started

COUNT = 6
LIMITS = EngineOptions(1 << 24, 64, 4)
BEFORE = "w3 " * 20  # more than a page of the cache
FIRST, SECOND = processors.picture(1), processors.picture(2, width=40)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models with processors."""
    made = tmp_path_factory.mktemp("chats")
    return {kind: processors.add(images.make(made / kind, kind), kind) for kind in processors.KINDS}


@pytest.fixture(scope="module")
def media(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an image, and one beside it with another."""
    folder = tmp_path_factory.mktemp("media")
    (folder / "allowed").mkdir()
    (folder / "allowed" / "first.png").write_bytes(processors.png(FIRST))
    (folder / "outside.png").write_bytes(processors.png(SECOND))
    (folder / "allowed" / "link.png").symlink_to(folder / "outside.png")
    return folder / "allowed"


@pytest.fixture(scope="module", params=list(processors.KINDS))
def service(request: pytest.FixtureRequest, folders: dict[str, Path], media: Path) -> Iterator[tuple[str, Path, str]]:
    """(kind, folder, URL) of each model, served."""
    folder = folders[request.param]
    options = ServeOptions(
        str(folder), port=0, dtype="float32", kv_cache_size=1 << 24, workers=1, allowed_local_media_path=media
    )
    with serving(options, log=lambda line: None) as url:
        yield request.param, folder, url


def ask(url: str, content: list[dict[str, Any]]) -> httpx.Response:
    """A greedy chat with one message."""
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": COUNT, "temperature": 0}
    return httpx.post(f"{url}/v1/chat/completions", json={**body, "ignore_eos": True}, timeout=60)


def image(url: str) -> dict[str, Any]:
    """A part of a message."""
    return {"type": "image_url", "image_url": {"url": url}}


def text(words: str) -> dict[str, Any]:
    """A part of a message."""
    return {"type": "text", "text": words}


def expected(kind: str, folder: Path) -> str:
    """What transformers answers to `BEFORE`, the first image, w4, the second image and w5."""
    mark, tokenizer = processors.KINDS[kind][0], transformers.AutoTokenizer.from_pretrained(folder)
    words, shown = f"user {BEFORE} {mark} w4 {mark} w5 assistant", [FIRST, SECOND]
    if kind == "qwen3_vl":  # whose processor needs torchvision, for videos
        made = dict(transformers.AutoImageProcessor.from_pretrained(folder)(shown, return_tensors="pt"))
        for grid in made["image_grid_thw"]:
            words = words.replace(mark, "@" * (int(grid.prod()) // 4), 1)
        ids = tokenizer(words.replace("@", mark), return_tensors="pt").input_ids
        made["mm_token_type_ids"] = (ids == images.IMAGE).long()
    else:
        made = dict(transformers.AutoProcessor.from_pretrained(folder)(text=[words], images=shown, return_tensors="pt"))
        ids = made.pop("input_ids")
        made.pop("attention_mask")
    tokens = images.greedy(images.reference(folder), tuple(ids[0].tolist()), made, COUNT)
    answer: str = tokenizer.decode(tokens, skip_special_tokens=True)
    return answer


def test_answers_are_those_of_transformers(service: tuple[str, Path, str]) -> None:
    kind, folder, url = service
    first, second = (processors.data_uri(processors.png(shown)) for shown in (FIRST, SECOND))
    parts = [text(BEFORE), image(first), text("w4"), image(second), text("w5")]
    right = expected(kind, folder)
    found = ask(url, parts).json()
    assert found["choices"][0]["message"]["content"].replace(" ", "") == right.replace(" ", "")
    parts[1] = image("first.png")
    again = ask(url, parts).json()
    assert again["choices"][0]["message"]["content"].replace(" ", "") == right.replace(" ", "")
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert httpx.get(f"{url}/v1/models", timeout=60).json()["data"][0]["details"]["images"] is True


@pytest.mark.slow
@pytest.mark.usefixtures("forks")
@pytest.mark.parametrize("kind", ["gemma3", "llava"])
def test_two_ranks_answer_as_transformers(kind: str, folders: dict[str, Path], tmp_path: Path) -> None:
    first, second = (processors.data_uri(processors.png(shown)) for shown in (FIRST, SECOND))
    parts = [text(BEFORE), image(first), text("w4"), image(second), text("w5")]
    with started(tmp_path, "--tp", "2", "--kv-cache-size", "16MiB", model=folders[kind]) as service:
        found = ask(service.url, parts).json()
    answer = found["choices"][0]["message"]["content"]
    assert answer.replace(" ", "") == expected(kind, folders[kind]).replace(" ", "")


def test_a_family_without_a_plan_for_ranks_is_one_line(folders: dict[str, Path]) -> None:
    with pytest.raises(UsageError, match=r"no tensor-parallel plan for 'qwen3_vl_text' models; use tp=1"):
        check_checkpoint(str(folders["qwen3_vl"]), tp=2, packed=True)


NOT_TAKEN: list[tuple[str, list[dict[str, Any]], str]] = [
    ("a URL", [image("http://127.0.0.1/a.png")], "would be fetched from a network, which is never done"),
    ("outside", [image("link.png")], "lies outside of the allowed folder; the server reads those of the folder"),
    ("no image", [image("data:image/png;base64,YWJj")], "image 1 of the request is none that can be decoded"),
    ("no base64", [image("data:image/png;base64,%%")], "is no base64"),
    ("no place", [{"type": "image_url"}], "messages[0] has an image without a place"),
    ("sound", [{"type": "input_audio", "input_audio": {}}], "messages[0] has a part of type 'input_audio'"),
    ("a mark", [image("first.png"), text("<image>")], "a text has '<image>', which stands for an image here"),
    ("many", [image("first.png")] * 15, "this model's context is 64 tokens"),
]


@pytest.mark.parametrize(("content", "said"), [row[1:] for row in NOT_TAKEN], ids=[row[0] for row in NOT_TAKEN])
def test_what_is_not_taken_is_one_line(
    service: tuple[str, Path, str], content: list[dict[str, Any]], said: str
) -> None:
    found = ask(service[2], content)
    assert found.status_code == 400
    assert said in found.json()["error"]["message"]
    assert ask(service[2], [text("w3")]).status_code == 200


def test_a_model_without_its_processor_says_so_to_who_sends_an_image(folders: dict[str, Path], tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(folders["llava"], bare, ignore=shutil.ignore_patterns("*processor_config.json"))
    said: list[str] = []
    options = ServeOptions(str(bare), port=0, dtype="float32", kv_cache_size=1 << 24, workers=1)
    with serving(options, log=said.append) as url:
        found = ask(url, [image(processors.data_uri(processors.png(FIRST)))])
        assert found.status_code == 400
        assert "has none of processor_config.json, preprocessor_config.json" in found.json()["error"]["message"]
        assert ask(url, [text("w3")]).status_code == 200
    assert any("images are not taken" in line for line in said)
    assert processor_of(str(folders["llava"]), batch_invariant=True) == "images are not taken with batch_invariant"
    refused = pytest.raises(UsageError, match=r"allowed_local_media_path: images are not taken.*leave the option out")
    with refused, serving(replace(options, allowed_local_media_path=tmp_path), log=said.append):
        pass


def test_a_tower_without_its_config_ends_the_request_alone(folders: dict[str, Path], tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(folders["llava"], other)
    config = json.loads((other / "config.json").read_text())
    del config["vision_config"]
    (other / "config.json").write_text(json.dumps(config))
    options = ServeOptions(str(other), port=0, dtype="float32", kv_cache_size=1 << 24, workers=1)
    with serving(options, log=lambda line: None) as url:
        found = ask(url, [image(processors.data_uri(processors.png(FIRST)))])
        assert found.status_code == 500
        assert "lacks 'model.vision_tower" in found.json()["error"]["message"]
        assert ask(url, [text("w3")]).status_code == 200


def test_many_images_at_once_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ptqpipe.serving.engine.service.MOST_IMAGE_BYTES", 100)
    service = Service(lambda: None, max_queue=8)  # type: ignore[arg-type,return-value]
    service.state, service.engine = State.READY, SimpleNamespace(check=lambda request: None, options=LIMITS)  # type: ignore[assignment]
    brought = Images({"pixel_values": torch.zeros(16)}, (b"1",), images.IMAGE)
    service.submit(Request("a", (1,), SamplingParams(), 1, brought), lambda piece: None)
    service.submit(Request("b", (1,), SamplingParams(), 1), lambda piece: None)
    with pytest.raises(Overloaded, match=r"images of requests under way take 64 bytes; try again later"):
        service.submit(Request("c", (1,), SamplingParams(), 1, brought), lambda piece: None)
