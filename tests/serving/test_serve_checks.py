"""Claims about what a service refuses before it loads anything: one line each, of the kind that gives the exit code."""

import errno
import json
import os
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ptqpipe.cli import main
from ptqpipe.errors import CheckpointError, PtqError, UsageError
from ptqpipe.models import chat_template
from ptqpipe.run.processes import join_remedy
from ptqpipe.runtime.loading import load_tokenizer
from ptqpipe.serving import command as stage
from ptqpipe.serving.options import ServeOptions, VllmService
from ptqpipe.serving.preflight import read_template
from ptqpipe.serving.rank_processes import RankInfo, WorkerRanks
from ptqpipe.serving.server.uvicorn_server import bind
from tests.serving.engine.models import DEMO


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that gets as far as starting ranks or loading fails."""

    def started(*_: Any) -> None:
        raise AssertionError("ranks were started")

    monkeypatch.setattr(WorkerRanks, "start", started)


def refused(options: ServeOptions, kind: type[PtqError], says: str, *, ranks: int = 1) -> None:
    with pytest.raises(kind) as error:
        stage.serve(options, RankInfo(0, ranks, ranks), worker=[], log=print)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"port": 99999}, "port is 99999, expected 0 to 65535"),
    ({"port": -1}, "port is -1"),
    ({"drain": float("nan")}, "drain is nan"),
    ({"drain": float("inf")}, "drain is inf"),
    ({"drain": -5.0}, "drain is -5"),
    ({"api_key": ""}, "api_key is empty"),
    ({"api_key": "  "}, "api_key is empty"),
]


@pytest.mark.parametrize(("options", "says"), OPTIONS)
@pytest.mark.parametrize("make", [lambda **x: ServeOptions("ckpt", **x), lambda **x: VllmService("ckpt", **x)])
def test_an_address_a_time_or_a_key_that_is_none_is_refused_by_both_engines(
    make: Any, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        make(**options)


@pytest.mark.parametrize(
    ("options", "says"),
    [({"kv_cache_size": 0}, "kv_cache_size=0 is out"), ({"max_body": 0}, "max_body=0 is out of range; use 1 or")],
)
def test_sizes_of_nothing_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        ServeOptions("ckpt", **options)


@pytest.mark.usefixtures("nothing_starts")
def test_a_codec_that_there_is_not_is_refused_without_ranks_too() -> None:
    refused(ServeOptions(str(DEMO), port=0, allreduce="int7"), UsageError, "unknown codec 'int7'")


@pytest.mark.usefixtures("nothing_starts")
def test_ranks_that_do_not_divide_the_model_are_refused_before_they_start() -> None:
    refused(ServeOptions(str(DEMO), port=0), UsageError, "tp=16 does not divide the 2 attention heads", ranks=16)


@pytest.mark.usefixtures("nothing_starts")
def test_a_port_that_is_taken_is_refused_before_anything_is_read() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        options = ServeOptions(str(DEMO), port=taken.getsockname()[1])
        refused(options, UsageError, "choose another port")


CONFIGS: list[tuple[str, dict[str, Any]]] = [
    ("heads", {"num_attention_heads": 0}),
    ("expected int", {"num_hidden_layers": "x"}),
    ("nosuch", {"hidden_act": "nosuch"}),
    ("max_position_embeddings -5", {"max_position_embeddings": -5}),
    ("such code is never run", {"model_type": "nosuch", "auto_map": {"AutoConfig": "evil.Evil"}}),
]


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize(("says", "changes"), CONFIGS)
def test_a_config_that_makes_no_model_is_refused_before_ranks_start(
    tmp_path: Path, says: str, changes: dict[str, Any]
) -> None:
    path = shutil.copytree(DEMO, tmp_path / "demo")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **changes}))
    says = "config.json" if says == "heads" else says
    refused(ServeOptions(str(path), port=0), CheckpointError, says, ranks=2)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"\xff\xfe\x00{{", "is not UTF-8 text"),
        (b"{% for m in %}", "is no Jinja template"),
        (b"{{ m ", "is no Jinja template"),
        (b"{% nosuch %}", "is no Jinja template"),
    ],
)
def test_a_chat_template_is_compiled_at_the_start(tmp_path: Path, content: bytes, says: str) -> None:
    (tmp_path / "template.jinja").write_bytes(content)
    with pytest.raises(UsageError, match=says):
        read_template(tmp_path / "template.jinja")


def test_a_chat_template_with_transformers_own_tags_is_one(tmp_path: Path) -> None:
    text = "{% for m in messages %}{% generation %}{{ m.content | tojson }}{% endgeneration %}{% break %}{% endfor %}"
    (tmp_path / "template.jinja").write_text(text)
    assert read_template(tmp_path / "template.jinja") == text
    assert read_template(None) is None


def test_a_folder_without_a_tokenizer_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((DEMO / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match="has no tokenizer that transformers reads"):
        load_tokenizer(tmp_path)


def test_a_tokenizer_that_needs_a_package_or_code_is_not_answered_by_copying_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_bytes((DEMO / "config.json").read_bytes())
    (tmp_path / "tokenizer.model").write_bytes(b"words")
    for error, says in (
        (ImportError("tokenizers of this kind need sentencepiece"), "need sentencepiece; install that package"),
        (ValueError("The repository contains custom code which must be executed"), "as code, which is never run; copy"),
        (ValueError("a bad merge"), "a bad merge; copy the model's tokenizer files there"),
    ):

        def fails(*_: object, error: Exception = error, **__: object) -> None:
            raise error

        monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", fails)
        with pytest.raises(CheckpointError, match=says):
            load_tokenizer(tmp_path)


@pytest.mark.slow
def test_what_the_engines_thread_refuses_has_the_exit_code_of_its_kind() -> None:
    done = CliRunner().invoke(main, ["serve", str(DEMO), "--port", "0", "--kv-cache-size", "100"])
    assert done.exit_code == 2, done.output
    assert "raise --kv-cache-size" in done.output


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.EADDRINUSE, "choose another port"),
        (errno.EACCES, "choose another port"),
        (errno.EADDRNOTAVAIL, "choose another host"),
        (errno.EAFNOSUPPORT, "choose another host"),
        (errno.EMFILE, "ulimit -n"),
        (errno.ENOBUFS, "ulimit -n"),
    ],
)
def test_an_address_that_cannot_be_listened_on_has_the_remedy_of_its_reason(
    number: int, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: socket.socket, address: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(socket, "socket", type("Refused", (socket.socket,), {"bind": fails}))
    with pytest.raises(UsageError, match=f"cannot listen on .*: {os.strerror(number)}; .*{remedy}"):
        bind("127.0.0.1", 8000)


@pytest.mark.parametrize(
    ("environment", "error", "remedy"),
    [
        ({}, ValueError("MASTER_ADDR is ''"), "start all ranks with torchrun"),
        (
            {"MASTER_ADDR": "a", "MASTER_PORT": "1"},
            OSError(errno.EADDRINUSE, "Address already in use"),
            "choose another master port",
        ),
        ({"MASTER_ADDR": "a", "MASTER_PORT": "1"}, RuntimeError("connect timed out"), "reach each other's ports"),
    ],
)
def test_ranks_that_do_not_meet_have_the_remedy_of_their_reason(
    environment: dict[str, str], error: Exception, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert remedy in join_remedy(error)


def test_where_nothing_can_be_rendered_the_template_is_not_blamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "renderer.py"
    broken.write_text("raise SystemExit(3)")
    monkeypatch.setattr(chat_template, "_RENDERER", broken)
    monkeypatch.setattr(chat_template, "_renderer", chat_template._Renderer())
    with pytest.raises(UsageError, match=r"ended with code 3; see that there is memory left.*can import transformers"):
        chat_template.compile_template("x")
