"""calibrate --moments pairs: inputs and gradients at them, against autograd through transformers' own model."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open

from ptqpipe.calibration import command as stage, pairs
from ptqpipe.calibration.backward import draw_labels
from ptqpipe.calibration.command import calibrate
from ptqpipe.calibration.data import load_samples
from ptqpipe.calibration.options import CalibrateOptions
from ptqpipe.calibration.pairs import PAIRS, places_of
from ptqpipe.calibration.statistics import Statistics
from ptqpipe.errors import UsageError
from ptqpipe.run.machine import Machine, Ranks
from tests import tiny
from tests.calibration.models import make_model, make_windows, write_windows

ROWS, TOKENS = 90, 24  # two batches
OPTIONS = CalibrateOptions(samples=ROWS, seqlen=TOKENS, moments=("diagonal", "pairs"), holdout=0)
ONE = Machine(workers=1)
SHARED = {
    "llama": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "gpt2": ["mlp.c_fc"],
    "mixtral": ["self_attn.o_proj"],
}
BLOCK = {"llama": "model.layers.1", "gpt2": "transformer.h.1", "mixtral": "model.layers.0"}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_windows(tmp_path_factory.mktemp("text") / "rows.jsonl", make_windows(samples=ROWS))


def whole_model(path: Path, windows: torch.Tensor, experts: str | None) -> tuple[Any, dict[str, Any]]:
    """The model, and by its modules' names inputs and gradients at outputs, [windows * tokens, ...], of the loss at the
    labels that a reverse pass draws; by the name ``experts`` the gradient at their input instead."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )
    seen: dict[str, Any] = {}

    def of(name: str) -> Any:
        def hook(_module: Any, args: Any, out: torch.Tensor) -> None:
            out.retain_grad()
            seen[name] = (args[0], out)

        return hook

    def at_experts(_module: Any, args: Any) -> Any:
        x = args[0].clone()
        x.retain_grad()
        seen[str(experts)] = (x, x)
        return (x, *args[1:])

    for name, module in model.named_modules():
        if name == experts:
            module.register_forward_pre_hook(at_experts)
        elif any(name.endswith(each) for names in SHARED.values() for each in names):
            module.register_forward_hook(of(name))
    logits = model(windows).logits
    chances = logits.detach().softmax(-1)
    drawn = [draw_labels(chances[i], torch.Generator().manual_seed(i)) for i in range(len(windows))]
    labels, counts = (torch.cat(part) for part in zip(*drawn, strict=True))
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels, reduction="none") @ counts
    loss.backward()  # type: ignore[no-untyped-call]
    return model, {
        name: (x.detach().reshape(-1, x.shape[-1]), out.grad.reshape(-1, out.shape[-1]))
        for name, (x, out) in seen.items()
    }


def close(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """To the rounding of bfloat16, and that of float32 sums."""
    return torch.allclose(found.float(), wanted, rtol=2**-8, atol=1e-4 * float(wanted.abs().max()))


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral"])
def test_they_are_inputs_and_the_sum_of_what_their_layers_pass_back(
    kind: str, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """h = sum of W^T dLoss/d(W x) over the layers that share x; of experts the gradient at what all are given."""
    monkeypatch.setattr(pairs, "PAIRS", 2048)  # fewer than there are tokens
    path = make_model(tmp_path / "model", kind)
    calibrate(path, [str(text)], tmp_path / "stats", options=OPTIONS, machine=ONE)
    windows = load_samples([str(text)], path, samples=ROWS, seqlen=TOKENS, seed=0, holdout=0).windows
    experts = f"{BLOCK[kind]}.mlp.experts" if kind == "mixtral" else None
    model, seen = whole_model(path, windows, experts)
    kept = places_of(windows.numel(), 2048)
    with Statistics.open(tmp_path / "stats") as opened:
        assert opened.content["settings"]["moments"] == ["diagonal", "pairs"]
        names = [f"{BLOCK[kind]}.{name}" for name in SHARED[kind]]
        known = next(name for name in opened.modules if name.endswith(names[0].removeprefix("transformer.")))
        found = opened.pairs(known)
        assert found is not None
        assert found[0].shape == (2048, model.config.hidden_size)
        weights = [model.get_submodule(name).weight.detach() for name in names]
        passed = [seen[n][1] @ (w.T if kind == "gpt2" else w) for n, w in zip(names, weights, strict=True)]
        assert close(found[0], seen[names[0]][0][kept])
        assert close(found[1], sum(passed)[kept])
        if experts is not None:
            of_experts = [opened.pairs(m) for m in opened.modules if ".layers.0." in m and m.endswith((".w1", ".w3"))]
            for pair in of_experts:
                assert pair is not None
                assert close(pair[0], seen[experts][0][kept])
                assert close(pair[1], seen[experts][1][kept])
            assert len(of_experts) == 2 * model.config.num_local_experts


def test_moments_of_outputs_are_kept_where_they_are_asked_for_and_pairs_do_not_depend_on_them(
    text: Path, tmp_path: Path
) -> None:
    path = make_model(tmp_path / "model", "llama")
    with_kl = replace(OPTIONS, moments=("diagonal", "kl", "pairs"))
    files = []
    for name, options in (("alone", OPTIONS), ("both", with_kl)):
        calibrate(path, [str(text)], tmp_path / name, options=options, machine=ONE)
        with safe_open(tmp_path / name / "outputs.safetensors", "pt") as opened:
            assert bool(opened.keys()) == (name == "both")
        files.append([file.read_bytes() for file in sorted((tmp_path / name).glob("*.pairs.safetensors"))])
    assert files[0] == files[1] != []


def test_kept_tokens_are_one_of_every_few_and_not_always_the_same_of_them() -> None:
    found = places_of(8 * PAIRS, PAIRS)
    assert torch.equal(found // 8, torch.arange(PAIRS))
    assert set((found % 8).tolist()) == set(range(8))
    assert torch.equal(places_of(100, PAIRS), torch.arange(100))


def test_a_run_that_was_stopped_behind_the_reverse_pass_goes_on_to_the_same_bytes(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny.save(tmp_path / "model", tiny.llama())
    calibrate(path, [str(text)], tmp_path / "stats", options=OPTIONS, machine=ONE)

    def stops(*_args: Any, **_kwargs: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(stage, "run_layers", stops)
        with pytest.raises(KeyboardInterrupt):
            calibrate(path, [str(text)], tmp_path / "out", options=OPTIONS, machine=ONE)
    with monkeypatch.context() as patch:
        patch.setattr(stage, "collect_outputs", stops)
        calibrate(path, [str(text)], tmp_path / "out", options=OPTIONS, machine=ONE, mode="resume")
    assert tiny.bytes_of(tmp_path / "out") == tiny.bytes_of(tmp_path / "stats")


def test_several_processes_are_one_clear_line(text: Path, tmp_path: Path) -> None:
    path = tiny.save(tmp_path / "model", tiny.llama())
    ranks = replace(Ranks(), rank=0, world=2)
    with pytest.raises(UsageError, match='moments="pairs" needs a single process, not 2; start it'):
        calibrate(path, [str(text)], tmp_path / "out", options=OPTIONS, machine=ONE, ranks=ranks)
    assert not (tmp_path / "out").exists()


def test_what_they_take_at_most_is_what_is_kept_of_every_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a layer: q, k, v, gate and up with inputs counted each, and the largest input once more while its parts are
    joined."""
    from ptqpipe.models.source import Source
    from ptqpipe.runtime.skeleton import Skeleton

    path = make_model(tmp_path / "model", "llama")
    with Source.open(path) as source:
        skeleton = Skeleton.of(source, dtype=torch.float32)
        name, module = skeleton.blocks[0]
        config = skeleton.model.config
        columns = 5 * config.hidden_size + config.num_attention_heads * config.head_dim + config.intermediate_size
        largest = max(config.hidden_size, config.num_attention_heads * config.head_dim, config.intermediate_size)
        assert pairs.nbytes(name, module, skeleton.origins, 7) == (columns + largest) * 7 * 2 * 2
        every = 2 * columns * len(skeleton.blocks)
        for numbers, tokens in ((1, 256), (300 * every + 1, 300), (1 << 60, PAIRS)):
            monkeypatch.setattr(pairs, "NUMBERS", numbers)
            assert pairs.most_tokens(skeleton.blocks, skeleton.origins) == tokens
