"""Claims about the files beside the weights: what readers open and was added or changed is a fault, the rest a note."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ptqpipe
from tests import tiny
from tests.check.verify.checks import check, found
from tests.conversion import damage

ADDED = [
    *("chat_template.jinja", "chat_template.json", "chat_templates/tool.jinja", "additional_chat_templates/rag.jinja"),
    *("added_tokens.json", "special_tokens_map.json", "tokenizer.json", "tokenizer.model", "spiece.model"),
    *("vocab.json", "vocab.txt", "merges.txt", "tekken.json", "qwen.tiktoken", "params.json"),
    *("adapter_config.json", "generation_config.json", "preprocessor_config.json", "processor_config.json"),
    *("video_preprocessor_config.json", "modeling_other.py", "remote/code.py", "modules.json", "1_Pooling/config.json"),
    *("quantize_config.json", "quant_config.json", "tokenizer_config.json"),
]
NOT_OPENED = ["README.md", "notes.txt", "trainer_state.json", "eval.json", "figure.png", "original/tokenizer.model"]


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model without any further file, and a conversion of it."""
    folder = tmp_path_factory.mktemp("bare")
    source = tiny.save(folder / "model", tiny.llama(layers=1))
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        (source / name).unlink()
    return source, ptqpipe.convert(source, format="nvfp4", out=folder / "good", workers=1).out


def put(folder: Path, name: str, text: str = "{}") -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(text)


@pytest.mark.parametrize("name", [*ADDED, *NOT_OPENED])
def test_an_added_file_is_a_fault_where_readers_open_it(bare: tuple[Path, Path], tmp_path: Path, name: str) -> None:
    folder = damage.copy(bare[1], tmp_path / "more")
    put(folder, name)
    for source in (None, bare[0]):
        report = check(folder, source)
        kind = report.faults if name in ADDED else report.notes
        assert name in [f.where for f in kind if f.check == "files"] or name == "README.md", found(report)
        assert report.ok == (name not in ADDED), found(report)


Edit = Callable[[Path], object]


def edit(name: str, **changes: Any) -> Edit:
    """Other values of keys of a JSON file, those that are None left out."""

    def act(folder: Path) -> None:
        content = json.loads((folder / name).read_text()) | changes
        (folder / name).write_text(json.dumps({k: v for k, v in content.items() if v is not None}))

    return act


GENERATION, TOKENIZER, IMAGES = "generation_config.json", "tokenizer_config.json", "preprocessor_config.json"
# What another tool's checkpoint says otherwise than its source, and whether that is a fault.
OTHERWISE: dict[str, tuple[Edit, bool]] = {
    "another template": (lambda f: put(f, "chat_template.jinja", "{{ evil }}"), True),
    "the template in its own file": (lambda f: put(f, "chat_template.jinja", "{{ messages }}\n"), False),
    "the template in chat_template.json": (
        lambda f: put(f, "chat_template.json", json.dumps({"chat_template": "{{ messages }}"})),
        False,
    ),
    "another template in the tokenizer's config": (edit(TOKENIZER, chat_template="{{ evil }}"), True),
    "no template": (edit(TOKENIZER, chat_template=None), False),
    "another end": (edit(GENERATION, eos_token_id=5), True),
    "the same end in a list": (edit(GENERATION, eos_token_id=[2]), False),
    "another temperature": (edit(GENERATION, temperature=2.0), True),
    "no temperature": (edit(GENERATION, temperature=None), True),
    "one more key that changes answers": (edit(GENERATION, repetition_penalty=1.3), True),
    "one more key with its usual value": (edit(GENERATION, repetition_penalty=1.0), False),
    "another version": (edit(GENERATION, transformers_version="5.0"), False),
    "another token": (edit(TOKENIZER, eos_token="<evil>"), True),
    "a token as an object": (edit(TOKENIZER, eos_token={"content": "</s>", "lstrip": False}), False),
    "another class": (edit(TOKENIZER, tokenizer_class="TokenizersBackend"), False),
    "a token in front": (edit(TOKENIZER, add_bos_token=False), True),
    "another mean": (edit(IMAGES, image_mean=[0.1, 0.5, 0.5]), True),
    "a size as an object": (edit(IMAGES, size={"height": 224, "width": 224}), False),
    "an adapter": (lambda f: put(f, "adapter_config.json"), True),
    "code": (lambda f: put(f, "modeling_other.py", ""), True),
    "other code": (lambda f: put(f, "modeling.py", "import os"), True),
    "tokens that are saved again": (lambda f: put(f, "special_tokens_map.json"), False),
    "a page": (lambda f: put(f, "README.md", "words"), False),
}


@pytest.mark.parametrize("what", OTHERWISE)
def test_another_tools_files_say_what_the_sources_say(tmp_path: Path, what: str) -> None:
    source = tiny.save(tmp_path / "model", tiny.llama(layers=1))
    (source / "chat_template.jinja").unlink()
    tokens = {"eos_token": "</s>", "add_bos_token": True, "tokenizer_class": "LlamaTokenizer"}
    put(source, TOKENIZER, json.dumps({**tokens, "chat_template": "{{ messages }}"}))
    put(source, GENERATION, json.dumps({"eos_token_id": 2, "temperature": 0.6, "transformers_version": "4.40"}))
    put(source, IMAGES, json.dumps({"image_mean": [0.5, 0.5, 0.5], "size": 224}))
    put(source, "modeling.py", "")
    out = damage.disown(ptqpipe.convert(source, format="nvfp4", out=tmp_path / "out", workers=1).out)
    assert check(out, source).ok
    act, fault = OTHERWISE[what]
    act(out)
    report = check(out, source)
    assert report.ok != fault, found(report)
    assert {f.check for f in report.faults} <= {"files"}
