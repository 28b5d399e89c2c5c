"""tune --train: floats that are trained with the codes, from the model to the checkpoint, verified, refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from ptqpipe.calibration.activations import InMemory
from ptqpipe.calibration.runner import Runner
from ptqpipe.check.evaluate.tokenized_text import SAMPLE
from ptqpipe.checkpoint import CheckpointReader, Finished
from ptqpipe.cli import main
from ptqpipe.conversion.prepare import prepare
from ptqpipe.errors import UsageError
from ptqpipe.numerics.formats import get_format
from ptqpipe.pipeline import demo
from ptqpipe.pipeline.tune import command as tune
from ptqpipe.pipeline.tune.kl import end_to_end, learn_codes as learn
from ptqpipe.pipeline.tune.kl.descent import DescentResult, Variables
from ptqpipe.pipeline.tune.kl.floats import Trained, find_kept
from ptqpipe.pipeline.tune.kl.model_divergence import ModelPair
from ptqpipe.pipeline.tune.options import Settings, TuneOptions
from ptqpipe.pipeline.tune.tune_summary import render
from ptqpipe.quantization.learned_codes import TRAINED_FILE, LearnedCodes
from ptqpipe.recipe.options import RecipeOptions
from ptqpipe.run.machine import Machine
from ptqpipe.runtime.skeleton import Skeleton
from tests.calibration.models import make_model, make_windows

DEMO = Path(demo.__file__).resolve().parent.parent / "demo_model"
ALL = ("head", "embeddings", "norms", "global")
OPTIONS = TuneOptions(
    samples=40, seqlen=64, method="kl", metric="output", train=ALL, settings=Settings(steps=8, rate=1e-4)
)
ONE = Machine(workers=1)
TEXTS = {"held-out samples": 2e-3, "sample text": 3e-3}


def invoke(*args: object) -> Any:
    return CliRunner().invoke(main, [str(arg) for arg in args])


def made_up(variables: Variables, **_: Any) -> DescentResult:
    """Stands for descent: norms and global scales are larger by a tenth, the embedding, which is the head, stays."""
    with torch.no_grad():
        for name, each in variables.floats.items():
            if name.startswith("global:"):
                each.variable.add_(0.1)
            elif "embed" not in name:
                each.variable.mul_(1.1)
    if variables.choices:
        return DescentResult({key: c.codes() for key, c in variables.choices.items()}, {}, TEXTS, TEXTS, 3, 0, 0.0)
    floats = {name: each.stored for name, each in variables.floats.items()}
    return DescentResult({}, floats, TEXTS, {name: 0.5 * kl for name, kl in TEXTS.items()}, 8, 7, 0.0)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(SAMPLE.read_text(encoding="utf-8")[:30000], encoding="utf-8")
    return path


def run(text: Path, out: Path, *, model: Path = DEMO, **changes: Any) -> dict[str, Any]:
    given: dict[str, Any] = {"recipe": RecipeOptions(format="nvfp4"), "options": OPTIONS, "machine": ONE} | changes
    return dict(tune.tune(model, [str(text)], out, **given).content)


@pytest.fixture(scope="module")
def trained(text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Codes, and the checkpoint that is made of them beside it ("out")."""
    home = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(learn, "descend", made_up)
        content = run(text, home / "codes")
    done = invoke("convert", DEMO, "--codes", home / "codes", "-o", home / "out")
    assert done.exit_code == 0, done.output
    assert "model.norm.weight: not quantized, but trained with the codes" in done.output
    return home, content


@pytest.mark.slow
def test_what_was_trained_is_what_is_written_and_the_record_says_so(trained: tuple[Path, dict[str, Any]]) -> None:
    home, content = trained
    found = content["end_to_end"]
    assert found["train"]["kinds"] == list(ALL)
    assert found["train"]["result"] == {name: 0.5 * kl for name, kl in TEXTS.items()}
    kinds = {name: entry["kind"] for name, entry in found["trained"].items()}
    assert set(kinds.values()) == {"embeddings", "norms"}
    assert kinds["model.embed_tokens.weight"] == "embeddings"
    changes = {kinds[name]: entry["change"] for name, entry in found["trained"].items()}
    assert changes["embeddings"] == 0.0
    assert changes["norms"] == pytest.approx(0.1, abs=3e-3)
    told = render(Finished(home / "codes", content, 1.0, 1))
    assert "end to end, 3 steps: no codes lowered the KL divergence on both held-out samples and sample text;" in told
    assert "then train, step 7 of 8: KL divergence x 1000 on held-out samples 2 -> 1, sample text 3 -> 1.5; " in told
    assert f"trained: embeddings, norms ({list(kinds.values()).count('norms')}), global scales" in told
    with CheckpointReader.open(DEMO) as source, CheckpointReader.open(home / "out") as out:
        for name, entry in found["trained"].items():
            before, after = source.read(name), out.read(name)
            factor = 1.0 if kinds[name] == "embeddings" else 1.1
            assert torch.equal(after, (before.float() * factor).to(before.dtype))
            assert out.sha256(name) == entry["sha256"]
    record = json.loads((home / "out" / "ptqpipe.json").read_text())
    assert record["rounding"]["end_to_end"] == found
    assert record["kept"]["model.norm.weight"]["reason"] == "trained with the codes"


@pytest.mark.slow
def test_global_scales_are_larger_and_shared_as_before(
    trained: tuple[Path, dict[str, Any]], text: Path, tmp_path: Path
) -> None:
    home, content = trained
    run(text, tmp_path / "plain", options=TuneOptions(samples=40, seqlen=64, metric="output"))
    with LearnedCodes.open(home / "codes") as after, LearnedCodes.open(tmp_path / "plain") as before:
        scales = {}
        for name, entry in content["weights"].items():
            fmt, shape = get_format(entry["format"]), tuple(entry["shape"])
            new, old = after.of(name, fmt, shape=shape), before.of(name, fmt, shape=shape)
            assert torch.equal(new.codes, old.codes)
            assert new.global_scale is not None
            assert old.global_scale is not None
            assert float(new.global_scale / old.global_scale) == pytest.approx(1.10517, rel=3e-4)
            scales[name] = float(new.global_scale)
    layer = "model.layers.0.self_attn"
    assert scales[f"{layer}.q_proj.weight"] == scales[f"{layer}.k_proj.weight"] == scales[f"{layer}.v_proj.weight"]


@pytest.mark.slow
def test_verify_knows_what_was_trained(trained: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    home, content = trained
    count = len(content["end_to_end"]["trained"])
    for given in ((), ("--source", DEMO)):
        done = invoke("verify", home / "out", *given)
        assert done.exit_code == 0, done.output
        assert (
            f"{count} tensors: were trained with the codes (embeddings, norms): their values are not the" in done.output
        )


def changed(home: Path, out: Path, change: Any) -> str:
    shutil.copytree(home / "out", out)
    path = out / "ptqpipe.json"
    record = json.loads(path.read_text())
    change(record)
    path.write_text(json.dumps(record))
    done = invoke("verify", out, "--source", DEMO)
    assert done.exit_code == 1
    return str(done.output)


def test_a_record_that_lies_about_training_is_a_fault(trained: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    home, name = trained[0], "model.norm.weight"

    def entries(record: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = record["rounding"]["end_to_end"]["trained"]
        return found

    said = changed(home, tmp_path / "a", lambda record: entries(record).pop(name))
    assert f"{name}: is kept for 'trained with the codes', the plan's reason is" in said
    said = changed(home, tmp_path / "b", lambda record: entries(record)[name].update(change=0.05))
    assert f"{name}: claims that training changed it by 0.05, recomputed 0.1" in said
    said = changed(home, tmp_path / "c", lambda record: entries(record)[name].update(sha256="0" * 64))
    assert f"{name}: is not what was trained according to ptqpipe.json" in said

    def hide(record: dict[str, Any]) -> None:
        entries(record).pop(name)
        record["kept"][name]["reason"] = "no rule matches"

    assert f"{name}: differs from the source" in changed(home, tmp_path / "d", hide)


def test_another_layout_and_floats_have_what_was_trained(trained: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    home, _ = trained
    for command, out in (
        (("relayout", home / "out", "--container", "modelopt"), tmp_path / "modelopt"),
        (("dequantize", home / "out"), tmp_path / "floats"),
    ):
        done = invoke(*command, "-o", out)
        assert done.exit_code == 0, done.output
        with CheckpointReader.open(home / "out") as before, CheckpointReader.open(out) as after:
            assert after.sha256("model.norm.weight") == before.sha256("model.norm.weight")
        done = invoke("verify", out)
        assert done.exit_code == 0, done.output
    done = invoke("verify", tmp_path / "modelopt", "--source", DEMO)
    assert done.exit_code == 0, done.output


def test_a_damaged_file_of_trained_tensors_is_one_line(trained: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    home = tmp_path / "home"
    shutil.copytree(trained[0] / "codes", home)
    raw = bytearray((home / TRAINED_FILE).read_bytes())
    raw[-1] ^= 1
    (home / TRAINED_FILE).write_bytes(raw)
    done = invoke("convert", DEMO, "--codes", home, "-o", tmp_path / "out")
    assert done.exit_code == 1
    assert f"{home / TRAINED_FILE} lacks 'model.norm.weight', or is damaged; tune again" in done.output
    (home / TRAINED_FILE).unlink()
    done = invoke("convert", DEMO, "--codes", home, "-o", tmp_path / "other")
    assert done.exit_code == 1
    assert "or is damaged; tune again" in done.output


def test_a_recipe_that_quantizes_what_was_trained_is_refused(
    trained: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    recipe = tmp_path / "head.yaml"
    recipe.write_text(
        "version: 1\nrules:\n- {match: '*embed_tokens', format: fp8}\n- {match: '*', format: nvfp4}\n",
        encoding="utf-8",
    )
    done = invoke("convert", DEMO, "--codes", trained[0] / "codes", "--recipe", recipe, "-o", tmp_path / "out")
    assert done.exit_code == 2
    assert "was tuned with --train, which changed 'model.embed_tokens.weight'" in done.output


def test_gradients_of_floats_are_those_of_the_divergence(tmp_path: Path) -> None:
    """Of a norm in the first layer, the last norm, the head and the embedding, against differences."""
    model = make_model(tmp_path / "llama", "llama")
    wanted = ["lm_head", "model.embed_tokens", "model.layers.0.input_layernorm", "model.norm"]
    with prepare(model, options=RecipeOptions(format="nvfp4"), out=tmp_path / "o", collected=True) as plan:
        skeleton = Skeleton.of(plan.source, dtype=torch.float32)
        kept = find_kept(plan, skeleton, ("head", "embeddings", "norms"))
        with (
            Runner.open(skeleton, make_windows(samples=3)) as runner,
            ModelPair.open(runner, InMemory(), lambda name: None) as whole,
            runner.embeddings(),
        ):
            whole.entering = runner.embedded
            floats = Trained(skeleton, kept, [])
            whole.float_head = floats.float_head
            assert float(whole.divergence([0]).mean()) == pytest.approx(0.0, abs=1e-7)
            generator = torch.Generator().manual_seed(0)
            for name in wanted:
                variable = floats.floats[f"{name}.weight"].variable
                plain = variable.detach().clone()
                along = torch.randn(plain.shape, generator=generator) * plain.square().mean().sqrt() * 0.05
                found = {}
                for step in (1.0, 1.02, 0.98):
                    variable.data = plain + step * along
                    found[step] = float(whole.divergence([0]).mean())
                    if step == 1.0:
                        variable.grad = None
                        whole.backward(0, 1.0)
                        assert variable.grad is not None
                        slope = float((variable.grad * along).sum())
                variable.data = plain
                assert found[1.0] > 0
                assert slope == pytest.approx((found[1.02] - found[0.98]) / 0.04, rel=0.02)


@pytest.mark.parametrize(
    ("changes", "train", "message"),
    [
        ({}, ("heads",), 'train="heads" is unknown; did you mean head\\? use head, embeddings, norms, biases, global'),
        ({"method": "gptq"}, ("head",), 'train belongs to method="kl"'),
        ({}, ("biases",), 'train="biases": the model has no such tensor; leave it out'),
        ({"scheme": "mxfp4a16"}, ("global",), "no weight has a global scale in this format; leave it out"),
    ],
    ids=["unknown", "method", "none", "no global"],
)
def test_what_cannot_be_trained_is_one_line(
    changes: dict[str, Any], train: tuple[str, ...], message: str, text: Path, tmp_path: Path
) -> None:
    options = TuneOptions(samples=40, seqlen=64, method=changes.get("method", "kl"), train=train)
    with pytest.raises(UsageError, match=message):
        run(text, tmp_path / "out", options=options, recipe=RecipeOptions(format=changes.get("scheme", "nvfp4")))
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_run_that_is_stopped_while_floats_are_trained_goes_on_to_the_same_values(text: Path, tmp_path: Path) -> None:
    """Really trained, at a small model's usual steps: fewer nats on both texts. The codes stay as GPTQ leaves them."""
    options = TuneOptions(
        samples=40, seqlen=64, method="kl", metric="output", train=ALL[:2], settings=Settings(steps=8, rate=1e-4)
    )
    saved: list[str] = []
    real, descend = learn.save_state, learn.descend

    def of_floats(variables: Variables, **how: Any) -> DescentResult:
        return made_up(variables) if variables.choices else descend(variables, **how)

    def copies(folder: Path, tensors: Any) -> None:
        """What a kill at this moment would leave lies in a folder of its own then."""
        saved.append(folder.name)
        if saved.count("state of floats") == 3 and not (tmp_path / "again").exists():
            shutil.copytree(tmp_path / "whole", tmp_path / "again")
        real(folder, tensors)

    with pytest.MonkeyPatch.context() as patch:
        for module in (learn, end_to_end):
            patch.setattr(module, "save_state", copies)
        patch.setattr(learn, "descend", of_floats)
        whole = run(text, tmp_path / "whole" / "codes", options=options)
        assert not (tmp_path / "again" / "codes").exists()
        steps = len(saved)
        again = run(text, tmp_path / "again" / "codes", options=options, mode="resume")
    assert 0 < len(saved) - steps < steps  # it went on, and did not start again
    assert again["digest"] == whole["digest"]
    assert again["end_to_end"] == whole["end_to_end"]
    found = whole["end_to_end"]["train"]
    assert found["best"] > 0
    assert all(found["result"][name] < before for name, before in found["start"].items())
    files = [(tmp_path / name / "codes" / TRAINED_FILE).read_bytes() for name in ("whole", "again")]
    assert files[0] == files[1]


def test_a_head_that_is_the_embedding_is_trained_as_one(tmp_path: Path) -> None:
    model = make_model(tmp_path / "tied", "llama_tied")
    with prepare(model, options=RecipeOptions(format="nvfp4"), out=tmp_path / "o", collected=True) as plan:
        skeleton = Skeleton.of(plan.source, dtype=torch.float32)
        for one in ("head", "embeddings"):
            with pytest.raises(UsageError, match='is its embedding, one tensor; name both: train="head,embeddings"'):
                find_kept(plan, skeleton, (one,))
        kept = find_kept(plan, skeleton, ("head", "embeddings"))
        assert [each.tensor for each in kept] == ["model.embed_tokens.weight"]
        with (
            Runner.open(skeleton, make_windows(samples=2)) as runner,
            ModelPair.open(runner, InMemory(), lambda name: None) as whole,
            runner.embeddings(),
        ):
            whole.entering = runner.embedded
            floats = Trained(skeleton, kept, [])
            whole.float_head = floats.float_head
            variable = floats.floats["model.embed_tokens.weight"].variable
            assert skeleton.model.get_output_embeddings().weight is variable
            variable.data = variable.detach() * 1.1
            assert whole.backward(0, 1.0) > 0
            assert variable.grad is not None
            assert bool((variable.grad.abs().sum(dim=1) > 0).all())  # of the head: of every word


def test_a_quantized_head_is_not_trained(tmp_path: Path) -> None:
    model = make_model(tmp_path / "llama", "llama")
    recipe = tmp_path / "head.yaml"
    recipe.write_text(
        "version: 1\nrules:\n- {match: lm_head, format: fp8}\n- {match: '*', format: nvfp4}\n", encoding="utf-8"
    )
    with prepare(model, recipe_path=recipe, out=tmp_path / "o", collected=True) as plan:
        skeleton = Skeleton.of(plan.source, dtype=torch.float32)
        with pytest.raises(
            UsageError, match=r"'lm_head.weight' is no float tensor of its own in the output \(the recipe qu"
        ):
            find_kept(plan, skeleton, ("head",))
