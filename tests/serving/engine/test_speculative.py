"""Claims about speculation: whatever is drafted, tokens are those of the model without it, and good drafts save steps.

Models compute in float32: no step of these texts has two candidates as near as the rounding of another batch.
"""

from collections.abc import Sequence as Row
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import ptqpipe
from ptqpipe.runtime import load
from ptqpipe.serving.engine import EngineOptions
from ptqpipe.serving.engine.block_manager import BlockManager
from ptqpipe.serving.engine.engine import Engine
from ptqpipe.serving.engine.model_runner import ModelRunner
from ptqpipe.serving.engine.scheduler import Chunk
from ptqpipe.serving.engine.speculative import Drafter
from tests import families
from tests.serving.engine import models
from tests.serving.engine.models import ask, generate

KINDS = ("deepseek_v3", "glm4_moe", "qwen3_next")
COUNT, MAX_LEN = 20, 48
PROMPTS = [tuple(3 + (7 * at + 5 * place) % 90 for place in range(length)) for at, length in enumerate((4, 9, 17))]


class Words:
    """A tokenizer of numbers."""

    def decode(self, tokens: Row[int], **_: Any) -> str:
        """The numbers."""
        return " ".join(map(str, tokens))


def engine(run: ModelRunner, drafter: Any = None, **limits: Any) -> Engine:
    """An engine of short sequences."""
    made = models.engine(run, max_len=MAX_LEN, tokens=Words(), **limits)
    made.drafter = drafter
    return made


def runner(folder: Path, *, mtp: bool, max_bytes: int = 1 << 26) -> ModelRunner:
    """The model of a folder."""
    return ModelRunner(load(folder, dtype="float32", mtp=mtp), EngineOptions(max_bytes, MAX_LEN, 8, 4))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A random model of each family; its drafts are as good as chance."""
    base = tmp_path_factory.mktemp("speculative")
    return {kind: families.make_model(base / kind, kind, mtp=True) for kind in KINDS}


def predictable(folder: Path) -> Path:
    """Makes the next token follow from the last one alone, in the model and in its layer: then drafts are right."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
            tensor.mul_(1e-4)  # not none at all: the engine looks at what passes
        elif name.endswith(("eh_proj.weight", "mtp.fc.weight")):
            tensor.copy_(torch.cat([torch.eye(len(tensor)), torch.zeros(len(tensor), len(tensor))], dim=1))
        elif "norm" in name:
            plus_one = "mtp.norm.weight" in tensors and "linear_attn" not in name  # most of Qwen's: 1 + weight
            tensor.fill_(0 if plus_one else 1)
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("kind", KINDS[:2])  # transformers has the layer of no other
def test_the_layer_computes_what_transformers_own_does(kind: str, folders: dict[str, Path]) -> None:
    mtp_model = pytest.importorskip("transformers.modeling_layers", reason="5.23 has one").MtpModel
    ours = load(folders[kind], dtype="float32", mtp=True)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folders[kind], dtype=torch.float32)
    theirs._keys_to_ignore_on_load_unexpected = [rf"layers\.{families.LAYERS}\."]
    layer = mtp_model.from_pretrained(theirs)
    ids = torch.randint(3, 96, (1, 12), generator=torch.Generator().manual_seed(1))
    cache = transformers.cache_utils.MtpCache(config=theirs.config.get_mtp_config())
    with torch.no_grad():
        states = theirs.model(ids).last_hidden_state[:, :-1]
        expected = layer.forward_layer(0, states, torch.arange(11)[None], cache, input_ids=ids[:, 1:])
        pairs = ours.mtp.pair(ours, ours.get_decoder()(ids).last_hidden_state[:, :-1], ids[:, 1:])
        found = ours.mtp(ours, pairs)
    assert torch.allclose(found, expected, rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "mtp"), [("deepseek_v3", "fp8"), ("glm4_moe", "nvfp4"), ("qwen3_next", "nvfp4")])
@pytest.mark.parametrize("loader", [load, transformers.AutoModelForCausalLM.from_pretrained])
def test_a_model_with_a_quantized_layer_loads_without_it(
    kind: str, mtp: str, loader: Any, folders: dict[str, Path], tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    logits = []
    for at, asked in enumerate(("keep", mtp)):
        out = tmp_path / f"out{at}"
        ptqpipe.convert(folders[kind], out=out, format="nvfp4", mtp=asked, scale_search="absmax", workers=1)
        with torch.no_grad():
            logits.append(loader(out, dtype=torch.float32)(torch.tensor([PROMPTS[2]])).logits)
    assert torch.equal(*logits)
    assert not [line for line in recwarn if "no place for" in str(line.message)]


@pytest.mark.parametrize(("kind", "mtp"), [("deepseek_v3", "nvfp4"), ("glm4_moe", "fp8"), ("qwen3_next", "fp8")])
def test_a_quantized_layer_computes_what_its_codes_say(kind: str, mtp: str, tmp_path: Path) -> None:
    folder = families.make_model(tmp_path / "model", kind, mtp=True)
    out = ptqpipe.convert(folder, out=tmp_path / "out", format="nvfp4", mtp=mtp, scale_search="absmax", workers=1).out
    ids = torch.randint(3, 96, (1, 8), generator=torch.Generator().manual_seed(1))
    found = []
    for packed, source in ((True, out), (False, out), (False, folder)):
        model = load(source, dtype="float32", mtp=True, packed=packed)
        with torch.no_grad():
            pairs = model.mtp.pair(model, model.get_decoder()(ids).last_hidden_state[:, :-1], ids[:, 1:])
            found.append(model.mtp(model, pairs))
    assert torch.allclose(found[0], found[1], rtol=0, atol=1e-4 * float(found[1].abs().max()))
    assert not torch.allclose(found[1], found[2], rtol=0, atol=1e-2 * float(found[2].abs().max()))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "most"), zip(KINDS, (1, 3, 2), strict=True))
def test_random_drafts_change_no_token(kind: str, most: int, folders: dict[str, Path]) -> None:
    requests = [ask(prompt, COUNT, name=str(at)) for at, prompt in enumerate(PROMPTS)]
    requests.append(ask(PROMPTS[1], COUNT, name="sampled", n=2, temperature=0.9, seed=3, presence_penalty=0.5))
    requests.append(ask(PROMPTS[0], COUNT, name="logprobs", logprobs=2, prompt_logprobs=1))
    plain = generate(engine(runner(folders[kind], mtp=False)), requests)
    run = runner(folders[kind], mtp=True)
    for limits in ({}, {"max_batch_tokens": 7, "max_seqs": 3}):
        made = engine(run, Drafter(run, most=most, max_len=MAX_LEN), **limits)
        assert generate(made, requests) == plain
        assert made.counters.draft_tokens >= made.counters.drafts > 0
        assert made.blocks.free == made.blocks.count


@pytest.mark.parametrize(("kind", "most"), [("deepseek_v3", 1), ("deepseek_v3", 3), ("qwen3_next", 3)])
def test_good_drafts_save_steps(kind: str, most: int, tmp_path: Path) -> None:
    folder = predictable(families.make_model(tmp_path / "model", kind, mtp=True))
    requests = [ask(PROMPTS[2], COUNT, ignore_eos=True)]
    plain = engine(runner(folder, mtp=False))
    expected = generate(plain, requests)
    run = runner(folder, mtp=True)
    made = engine(run, Drafter(run, most=most, max_len=MAX_LEN))
    assert generate(made, requests) == expected
    counters = made.counters
    assert plain.counters.steps == COUNT
    assert counters.steps == 1 + -(-(COUNT - 1) // (1 + most))
    assert sum(counters.accepted_tokens.values()) == counters.draft_tokens
    assert set(counters.accepted_tokens) == set(range(most))


class SometimesRight(Drafter):
    """Drafts from known continuations, wrong at every place that ``wrong`` divides."""

    known: dict[tuple[int, ...], list[int]]
    wrong = 5

    def draft(self, chunks: Row[Chunk], blocks: BlockManager) -> None:
        """As ever, then other tokens for those drafted."""
        super().draft(chunks, blocks)
        for seq in (chunk.seq for chunk in chunks if chunk.seq.drafts):
            tokens = [*seq.tokens[: seq.prompt_len], *self.known[tuple(seq.tokens[: seq.prompt_len])]]
            places = range(len(seq.tokens), len(seq.tokens) + len(seq.drafts))
            seq.drafts = tuple((tokens[at] + (at % self.wrong == 0)) % 96 for at in places)


@pytest.mark.parametrize(
    ("kind", "max_bytes"),
    [("glm4_moe", 1 << 26), ("glm4_moe", 1 << 17), ("qwen3_next", 1 << 26)],
    ids=["room", "a cache that sequences are put out of", "states"],
)
def test_a_draft_is_accepted_exactly_up_to_the_first_wrong_one(
    kind: str, max_bytes: int, folders: dict[str, Path]
) -> None:
    run = runner(folders[kind], mtp=True, max_bytes=max_bytes)
    requests = [ask(prompt, COUNT, name=str(at)) for at, prompt in enumerate(PROMPTS)]
    plain = generate(engine(run), requests)
    known = {request.prompt: plain[request.id][0] for request in requests}
    drafter = SometimesRight(run, most=3, max_len=MAX_LEN)
    drafter.known = known
    made = engine(run, drafter)
    assert generate(made, requests) == plain
    accepted = sum(made.counters.accepted_tokens.values())
    assert 0 < accepted < made.counters.draft_tokens
    assert made.counters.generated_tokens == COUNT * len(PROMPTS)
    if max_bytes < 1 << 20:
        assert made.scheduler.preemptions > 0
    again = engine(run, drafter)
    stop = plain["1"][0][6]
    ended = generate(again, [ask(PROMPTS[1], COUNT, name="1", stop_token_ids=(stop,))])
    assert ended["1"][0] == plain["1"][0][: 1 + plain["1"][0].index(stop)]  # nothing that was accepted behind it
