"""Claims about the face of the package: its names, keywords, errors in Python's words, results of one line."""

import inspect
import io
import json
import pkgutil
import sys
from collections.abc import Callable
from html import escape
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import ptqpipe
from ptqpipe.api.calls import options_from
from ptqpipe.api.result import Result
from ptqpipe.calibration.options import CalibrateOptions
from ptqpipe.cli.serve import serve as serve_command
from ptqpipe.errors import OutputExists, PtqError, UsageError
from ptqpipe.pipeline.demo import MODEL
from ptqpipe.pipeline.options import ConvertCommand
from ptqpipe.pipeline.tune.options import TuneOptions
from ptqpipe.quantization.learned_codes import LearnedCodes
from ptqpipe.recipe.options import RecipeOptions
from ptqpipe.run.options import options_of
from tests import tiny

COMMANDS = (
    "calibrate", "convert", "dequantize", "diff", "evaluate", "generate", "inspect", "plan", "quantize_model",
    "relayout", "report", "serve", "transform", "tune", "verify",
)  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("model") / "model", tiny.llama(layers=1, hidden=32, inner=64))


def test_dir_shows_the_api_alone_and_all_of_it_is_there() -> None:
    assert dir(ptqpipe) == sorted(ptqpipe.__all__)
    assert not {name for name in dir(ptqpipe) if isinstance(getattr(ptqpipe, name), ModuleType)}
    assert {name for name in COMMANDS if not callable(getattr(ptqpipe, name))} == set()
    with pytest.raises(AttributeError, match="no attribute 'quantise'; did you mean quantize\\?"):
        ptqpipe.quantise  # noqa: B018


def test_no_public_name_is_that_of_a_module() -> None:
    """Importing the module would put it in the name's place."""
    modules = {module.name for module in pkgutil.iter_modules(ptqpipe.__path__)}
    assert len(modules) > 12
    assert modules & set(ptqpipe.__all__) == set()


@pytest.mark.parametrize("name", COMMANDS)
def test_keywords_have_names_types_and_the_defaults_of_the_stages(name: str) -> None:
    function = getattr(ptqpipe, name)
    parameters = inspect.signature(function).parameters
    assert not [one for one in parameters.values() if one.kind is one.VAR_KEYWORD]
    assert [one.name for one in parameters.values() if one.annotation is one.empty] == []
    needed = [one for one in parameters.values() if one.default is one.empty]
    with pytest.raises(UsageError, match=rf"{name} has no option 'overwriet'"):
        function(*["nothing"] * len(needed), overwriet=True)


def test_float_types_go_by_their_short_and_their_long_names(tmp_path: Path) -> None:
    """As they do on the command line."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"input_ids": list(range(24))}) + "\n")
    short, long = (
        ptqpipe.evaluate(MODEL, data=str(rows), seqlen=8, dtype=name, out=tmp_path / f"{name}.json")
        for name in ("fp32", "float32")
    )
    assert short.evaluation["settings"] == long.evaluation["settings"]
    assert short.evaluation["settings"]["dtype"] == "float32"
    ptqpipe.convert(MODEL, format="fp8", out=tmp_path / "q", workers=1)
    floats = ptqpipe.dequantize(tmp_path / "q", tmp_path / "f", dtype="float16", workers=1)
    assert floats.record["dtype"] == "fp16"
    assert ptqpipe.load_model(MODEL, dtype="bf16").dtype is torch.bfloat16


def test_the_tables_of_options_are_keywords() -> None:
    assert {one.name for one in options_of(RecipeOptions)} <= inspect.signature(ptqpipe.convert).parameters.keys()
    assert inspect.signature(ptqpipe.calibrate).parameters["samples"].default == 128
    assert inspect.signature(ptqpipe.convert).parameters["max_memory"].default == 2 << 30
    click_names = {
        str(option.opts[0]).removeprefix("--").replace("-", "_")
        for option in serve_command.params
        if option.param_type_name == "option" and not getattr(option, "hidden", False)
    }
    vllm = {"engine", "vllm_python", "nnodes", "node_rank", "master_addr", "master_port"}
    assert click_names - vllm == inspect.signature(ptqpipe.serve).parameters.keys() - {"ckpt"}


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: ptqpipe.quantize_model(3), r"^model is 3, expected a path or a name, or a model in memory$"),
        (lambda: ptqpipe.quantize_model(None), "^model is None, expected a path or a name, or a model in memory$"),
        (lambda: ptqpipe.convert([]), r"^model is \[\], expected a path or a name$"),
        (lambda: ptqpipe.evaluate(MODEL, source=3), "^source is 3, expected a path or a name$"),
        (lambda: ptqpipe.verify(b"\n" * 999), r"^ckpt is b'.{,100}', expected a path or a name$"),
        (lambda: ptqpipe.convert(MODEL, out=""), "^out is empty, expected the name of what to write$"),
        (lambda: ptqpipe.calibrate(MODEL, "text.txt", ""), "^out is empty"),
    ],
)
def test_what_can_be_no_path_is_refused_by_its_name(call: Callable[[], object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        call()


# By the keyword that is wrong. mypy would refuse each of them, too.
WEIGHT: Any = torch.ones(16, 32)
api: Any = ptqpipe
WRONG_KINDS: dict[str, tuple[Callable[..., object], str]] = {
    "global scale": (lambda: api.quantize(WEIGHT, global_scale="no"), "'no', expected search or absmax$"),
    "no format": (lambda: api.quantize(WEIGHT, 5), "a format by its name, got int"),
    "search": (lambda: api.quantize(WEIGHT, scale_search=3), "^scale_search is 3, expected a text$"),
    "load_model": (lambda: api.load_model(5), "^ckpt is 5, expected a path$"),
    "format": (lambda: api.convert(MODEL, format=["nvfp4"]), r"^format is \['nvfp4'\], expected a text$"),
    "ignore": (lambda: api.convert(MODEL, ignore=[5]), r"^ignore is \[5\], expected names"),
    "workers": (lambda: api.convert(MODEL, workers="two"), "^workers is 'two', expected a whole number$"),
    "bool for int": (lambda: api.convert(MODEL, workers=True), "^workers is True, expected a whole number$"),
    "device": (lambda: api.convert(MODEL, device=None), "^device is None, expected a text$"),
    "damping": (lambda: api.convert(MODEL, damping="x"), "^damping is 'x', expected a number$"),
    "memory": (lambda: api.convert(MODEL, max_memory=[1]), r"^max_memory is \[1\], expected a size such as 2GiB"),
    "budget": (lambda: api.convert(MODEL, budget=5), "^budget is 5, expected a text$"),
    "formats": (lambda: api.plan(MODEL, "5bits", "r", formats=5), "^formats is 5, expected names"),
    "samples": (lambda: api.calibrate(MODEL, "t", "o", samples=2.5), "^samples is 2.5, expected a whole number$"),
    "moments": (lambda: api.calibrate(MODEL, "t", "o", moments=5), "^moments is 5, expected names"),
    "seed": (lambda: api.generate(MODEL, "o.jsonl", seed="x"), "^seed is 'x', expected a whole number$"),
    "alpha": (lambda: api.transform(MODEL, "rotate", "o", alpha="x"), "^alpha is 'x', expected a number$"),
    "transforms": (lambda: api.transform(MODEL, 5, "o"), "^transforms is 5, expected names"),
    "feedback": (lambda: api.tune(MODEL, "t", "o", feedback="x"), "^feedback is 'x', expected a number$"),
    "container": (lambda: api.relayout(MODEL, 5), "^container is 5, expected a text$"),
    "tasks": (lambda: api.evaluate(MODEL, tasks=5), "^tasks is 5, expected names"),
    "drain": (lambda: api.serve(MODEL, drain="x"), "^drain is 'x', expected a number$"),
    "loop": (lambda: api.quantize_model(MODEL, forward_loop=5), "^forward_loop is 5, expected a function$"),
    "tokenizer": (lambda: api.quantize_model(MODEL, tokenizer=5), "^tokenizer is of type int, expected a tok"),
    "saved": (lambda: api.save_checkpoint(None, "o"), "^model is None, expected a model in memory$"),
    "Config": (lambda: api.Config(5), "^format is 5, expected a text$"),
    "its options": (lambda: api.Config("fp8", sample=1), "has no option 'sample'; did you mean samples"),
    "few workers": (lambda: api.verify(MODEL, workers=0), "^workers=0 is too few; use 1 or more$"),
}


@pytest.mark.parametrize(("call", "words"), WRONG_KINDS.values(), ids=WRONG_KINDS)
def test_a_value_of_another_kind_is_refused_by_its_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, call: Callable[[], object], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PtqError, match=words):
        call()
    assert not list(tmp_path.iterdir())


def test_what_stands_for_another_kind_is_taken(model: Path, tmp_path: Path) -> None:
    """Numbers of numpy, a device, one name for several, 1 for True."""
    stand_ins = {"ignore": "*q_proj", "workers": np.int64(1), "device": torch.device("cpu"), "overwrite": 1}
    assert api.convert(model, out=tmp_path / "q", **stand_ins).path == tmp_path / "q"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^device=.cuda. needs a GPU that torch can use; none"):
        ptqpipe.convert(model, out=tmp_path / "q", device="cuda")


def test_a_gpu_whose_number_is_not_there_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^device=.cuda:99. needs a GPU that torch can use; "):
        ptqpipe.convert(model, out=tmp_path / "q", device="cuda:99")


def test_an_option_goes_by_the_keyword_of_the_function_that_was_called(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^none.txt does not exist; give eval a \.txt"):
        ptqpipe.convert(model, out=tmp_path / "q", eval="none.txt")
    with pytest.raises(UsageError, match=r'^reader="vllmm" is unknown; did you mean vllm\?'):
        ptqpipe.plan(model, "5bits", tmp_path / "r.yaml", reader="vllmm")
    with pytest.raises(UsageError, match=r"^cache_size 'much' is not a size; write 2GiB"):
        ptqpipe.evaluate(model, cache_size="much", out=tmp_path / "e.json")
    with pytest.raises(UsageError, match="evaluate has no option 'command'"):
        ptqpipe.evaluate(model, command="rm -rf")
    with pytest.raises(UsageError, match=r"^push=.nobody. has no owner"):
        ptqpipe.convert(model, out=tmp_path / "q", push="nobody")
    assert not list(tmp_path.iterdir())


def test_several_checkpoints_are_compared(model: Path, tmp_path: Path) -> None:
    both = [ptqpipe.convert(model, format=name, out=tmp_path / name, workers=1).path for name in ("fp8", "nvfp4")]
    found = ptqpipe.report(*both, out=tmp_path / "both.md")
    assert "\n" not in repr(found)
    assert "fp8: 8." in str(found)
    assert "nvfp4: 4." in str(found)
    assert "nvfp4" in (tmp_path / "both.md").read_text()
    with pytest.raises(UsageError, match="are for a report on one checkpoint; leave them out"):
        ptqpipe.report(*both, source=model)
    assert ptqpipe.report(both[0], out=tmp_path / "one", kind="md").path == tmp_path / "one"
    with pytest.raises(PtqError, match=r"nowhere\.json"):
        ptqpipe.report(both[0], eval=tmp_path / "nowhere.json")  # as the command line spells it
    assert (tmp_path / "one").read_text().startswith("<!-- ptqpipe report -->")


def test_errors_are_those_of_the_command_line_in_pythons_words(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "q"
    calls: dict[str, tuple[type[PtqError], Any]] = {
        "overwrite=True replaces it, or choose another out": (
            OutputExists,
            lambda: ptqpipe.convert(model, format="nvfp4", out=out),
        ),
        "resume and overwrite contradict each other": (
            UsageError,
            lambda: ptqpipe.convert(model, out=out, resume=True, overwrite=True),
        ),
        'give data="FILE"': (UsageError, lambda: ptqpipe.calibrate(model, None, tmp_path / "stats")),
        'max_memory="8MB" is too small': (UsageError, lambda: ptqpipe.convert(model, out=out, max_memory="8MB")),
        "workers=0 is too few": (UsageError, lambda: ptqpipe.relayout(out, "modelopt", workers=0)),
        "is not a size; write 2GiB": (UsageError, lambda: ptqpipe.convert(model, out=out, max_memory="much")),
        'budget="4.75" is a number without a unit; write 4.75bits': (
            UsageError,
            lambda: ptqpipe.plan(model, "4.75", tmp_path / "r.yaml"),
        ),
        "stats needs source": (UsageError, lambda: ptqpipe.verify(out, stats=tmp_path)),
        "does not exist, and is not a hub name": (UsageError, lambda: ptqpipe.verify("no/such/folder")),
        'dtype="int4" is unknown': (UsageError, lambda: ptqpipe.dequantize(out, tmp_path / "f", dtype="int4")),
        "device 'gpu' is unknown; use cpu, cuda": (UsageError, lambda: ptqpipe.convert(model, out=out, device="gpu")),
    }
    ptqpipe.convert(model, format="nvfp4", out=out, workers=1)
    for message, (kind, call) in calls.items():
        with pytest.raises(kind) as error:
            call()
        assert message in str(error.value), message
        assert "--" not in str(error.value), str(error.value)


def test_a_call_that_was_cut_says_how_to_go_on(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The words are Python's, and so is what they ask for."""
    from ptqpipe.conversion import job as rewriting

    def cut(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(rewriting, "_finish", cut)
        with pytest.raises(KeyboardInterrupt):
            ptqpipe.convert(model, format="nvfp4", out=tmp_path / "q", workers=1)
    with pytest.raises(PtqError, match="resume=True continues it, overwrite=True discards it"):
        ptqpipe.convert(model, format="nvfp4", out=tmp_path / "q", workers=1)
    assert ptqpipe.convert(model, format="nvfp4", out=tmp_path / "q", workers=1, resume=True).path == tmp_path / "q"


def test_results_are_a_line_a_table_and_data(model: Path, tmp_path: Path) -> None:
    done = ptqpipe.convert(model, format="nvfp4", out=tmp_path / "q<b>", workers=1)
    assert repr(done).startswith(f"<convert {tmp_path}/q<b>: format nvfp4, weights 7 at 4.52 bits, size ")
    assert "\n" not in repr(done)
    html = done._repr_html_()
    assert [part in html for part in ("q&lt;b&gt;", "<th>size</th>", "<b>")] == [True, True, False]
    assert str(done).splitlines()[-1].startswith("Done: ")
    assert f"<summary>as printed</summary><pre>{escape(str(done))}</pre>" in html
    assert done.record == json.loads((tmp_path / "q<b>" / "ptqpipe.json").read_text())
    assert done.written_bytes > 0
    assert {"path", "record", "written_bytes"} <= set(dir(done))
    with pytest.raises(AttributeError, match="the result of convert has no 'pathh'"):
        done.pathh  # noqa: B018
    assert (done.verdict, done.kl) == (None, None)
    checked = ptqpipe.verify(done.path, source=model)
    assert (checked.ok, checked.faults) == (True, ())
    (tmp_path / "q<b>" / "config.json").unlink()
    damaged = ptqpipe.verify(done.path)
    assert not damaged.ok
    assert " faults, the first: " in repr(damaged)


def test_a_measured_result_says_what_it_means() -> None:
    row = {"data": "t", "mean": 0.002, "top1_agreement": 0.96}
    measured = Result(
        "evaluate",
        None,
        path=None,
        record={},
        facts={},
        text=lambda: "",
        evaluation={"kl": [row, {**row, "mean": 0.5}]},
    )
    assert measured.kl == 0.5
    assert str(measured.verdict).endswith(": damaged")
    assert "KL 5.00e-1, same top token 96.0 %: damaged" in repr(measured)
    assert measured._repr_html_().startswith('<p style="color: #a4231b"><b>! damaged</b></p><table>')


def test_large_objects_are_one_short_line(model: Path, tmp_path: Path) -> None:
    rows = [
        repr(ptqpipe.quantize(torch.ones(64, 64))),
        repr(ptqpipe.convert(model, out=tmp_path / "q", workers=1)._report),
    ]
    with ptqpipe.load_tensors(tmp_path / "q") as weights:
        rows.append(repr(weights))
    (tmp_path / "q" / "rounding.json").write_text(
        '{"version": 1, "digest": "", "model": {"fingerprint": ""}, "weights": {}}'
    )
    with LearnedCodes.open(tmp_path / "q") as rounding:
        rows.append(repr(rounding))
    assert [row for row in rows if "\n" in row or len(row) > 60 + len(str(tmp_path))] == []


@pytest.mark.slow
@pytest.mark.usefixtures("forks")
def test_a_service_that_cannot_start_says_why_in_pythons_words(model: Path) -> None:
    with pytest.raises(UsageError, match="does not exist, and is not a hub name"):
        ptqpipe.serve("no/such/folder")
    with pytest.raises(UsageError, match=r"max_queue=-1 is out of range; use 0 or more") as error:
        ptqpipe.serve(model, max_queue=-1)
    assert "--" not in str(error.value)
    with pytest.raises(UsageError, match=r"^tp is 0, expected 1 or more$"):  # said by the child, in Python's words
        ptqpipe.serve(model, tp=0)
    with pytest.raises(UsageError, match="api_key is empty, which any client has"):
        ptqpipe.serve(model, api_key="")


def test_numbers_of_numpy_and_texts_become_what_the_field_is() -> None:
    numbers = {"samples": np.int64(4), "seed": np.int32(1)}
    options = options_from(CalibrateOptions, numbers)
    assert [type(getattr(options, name)) for name in numbers] == [int, int]
    recipe = options_from(ConvertCommand, {"input_amax": np.float32(2), "work_dir": "kept"}, model="m")
    assert (type(recipe.input_amax), recipe.work_dir) == (float, Path("kept"))
    assert recipe.stated == {"input_amax", "work_dir", "model"}
    with pytest.raises(UsageError, match=r"^stats is empty, expected a path$"):
        options_from(ConvertCommand, {"stats": ""}, model="m")


def test_several_names_are_a_list_or_a_text_with_commas() -> None:
    for given in ("head,norms", "head, norms", ["head", "norms"], ("head", "norms")):
        options = options_from(TuneOptions, {"train": given, "method": "kl"})
        assert options == TuneOptions(train=("head", "norms"), method="kl")
    assert options_from(CalibrateOptions, {"moments": "diagonal"}).moments == ("diagonal",)


@pytest.mark.parametrize("where", ["a file", "a terminal", "a notebook"])
@pytest.mark.parametrize("asked", [None, True, False])
def test_bars_are_shown_where_somebody_looks_unless_the_call_says(
    where: str, asked: bool | None, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Screen(io.StringIO):
        def isatty(self) -> bool:
            return where == "a terminal"

    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    if where == "a notebook":
        monkeypatch.setitem(sys.modules, "ipykernel", ModuleType("ipykernel"))
    done = ptqpipe.convert(model, out=tmp_path / "q", workers=1, progress=asked)
    ptqpipe.verify(done.path, progress=asked)
    shown = where != "a file" if asked is None else asked
    assert ("100%" in screen.getvalue(), "checks" in screen.getvalue()) == (shown, shown)


def test_a_model_in_memory_is_packed_without_a_word(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Transformers says that it writes the model's weights, which nobody does."""
    loaded = AutoModelForCausalLM.from_pretrained(MODEL)
    capfd.readouterr()
    ptqpipe.quantize_model(loaded, "fp8", out=tmp_path / "q", workers=1)
    said = capfd.readouterr()
    assert (said.out, said.err) == ("", "")


def test_what_a_long_call_says_of_itself_goes_where_its_bars_go(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Standard output is the caller's."""
    words = {"data": MODEL / "heldout.txt", "quality": "fast", "samples": 8, "seqlen": 32, "workers": 1}
    ptqpipe.quantize_model(MODEL, "fp8", out=tmp_path / "q", progress=True, **words)
    said = capsys.readouterr()
    assert said.out == ""
    assert "  2 convert: into " in said.err


class Odd:
    """Can neither be compared nor be asked whether it is true, like an array of several numbers."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        raise ValueError("compared")

    def __bool__(self) -> bool:
        raise ValueError("asked")


ODD = (np.zeros((4, 4)), np.array(["a", "b"]), torch.zeros(4, 4), [np.zeros(3)], Odd(), [Odd()], b"x", {"a": 1})
# What other keywords take at all: data are rows of any kind, and files are written or read as whole ones.
LEFT_OUT = {"data", "out", "push", "forward_loop", "tokenizer"}


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "serve"])
def test_no_value_of_any_kind_ends_in_another_error(name: str, model: Path) -> None:
    """Each keyword, with the others right: a PtqError."""
    function = getattr(ptqpipe, name)
    parameters = [
        one
        for one in inspect.signature(function).parameters.values()
        if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)
    ]
    needed = {one.name: str(model) for one in parameters if one.default is one.empty}
    for one in parameters:
        for value in ODD if one.name not in LEFT_OUT else ():
            with pytest.raises(PtqError):
                function(**needed | {one.name: value})


@pytest.mark.parametrize("name", ["quantize", "load_tensors", "load_model", "save_checkpoint"])
@pytest.mark.parametrize("value", [*ODD, None, "x", []], ids=lambda value: type(value).__name__)
def test_what_is_no_tensor_or_folder_or_model_is_a_ptq_error(name: str, value: Any) -> None:
    if name == "quantize" and isinstance(value, torch.Tensor):
        return
    with pytest.raises(PtqError):
        getattr(ptqpipe, name)(value, *(["out"] if name == "save_checkpoint" else []))


@pytest.mark.parametrize("keyword", ["dtype", "activations", "device"])
@pytest.mark.parametrize("value", [*ODD, []], ids=lambda value: type(value).__name__)
def test_a_model_is_loaded_by_names_alone(keyword: str, value: Any, model: Path) -> None:
    with pytest.raises(UsageError):
        ptqpipe.load_model(model, **{keyword: value})
