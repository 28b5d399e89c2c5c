"""Claims about tensor parallelism: the ranks say what one process says, and each reads its own part alone.

The oracle is one process of transformers with float weights: `load_model`, whose own claims are in test_load.py. Two
and four ranks are processes joined by gloo; they compute in float32, so logits agree up to the order of sums and greedy
tokens agree exactly.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import ptqpipe
from ptqpipe.models.source import Source
from ptqpipe.runtime import load_model
from tests.conftest import shared_folder
from tests.runtime import ranks
from tests.runtime.models import CONFIGS, TOKENS, quantized
from tests.runtime.ranks import Done, Job


def label(model: str, container: str, scheme: str) -> str:
    return f"{model}-{container}-{scheme}".replace("/", "_")


QUANTIZED = [
    ("biased", "compressed_tensors", "nvfp4"),
    ("tied", "compressed_tensors", "mxfp4"),
    ("llama", "modelopt", "nvfp4_w4a4"),
    ("llama", "compressed_tensors", "mxfp8"),
    ("llama", "ptqpipe", "e2m1/8/ue5m3"),
    ("qwen3_moe", "compressed_tensors", "nvfp4"),
    ("mixtral", "modelopt", "nvfp4"),
    ("mixtral", "mxfp8_hf", "mxfp8"),
    ("qwen3", "compressed_tensors", "fp8_dynamic"),
    ("gemma3", "compressed_tensors", "nvfp4"),
    ("phi3", "compressed_tensors", "nvfp4"),
]
FROM_PRETRAINED = (label("tied", "compressed_tensors", "mxfp4"), label("mixtral", "modelopt", "nvfp4"))
FLOAT32 = {"dtype": "float32", "activations": "none"}
GOLDEN = (
    "ct-nvfp4",
    "ct-mixed",
    "quark-mxfp4",
    "mo-mixtral-nvfp4",
    "gptoss-mxfp4",
    "ct-fp8",
    "ct-mxfp8",
    "ds-fp8-block",
)
OF_TWO_RANKS = {"tied", "biased", "mixtral", "qwen3", "bfloat16", *GOLDEN} | {label(*row) for row in QUANTIZED[3:5]}
OF_TWO_RANKS |= {label("gemma3", "compressed_tensors", "nvfp4"), label("qwen3", "compressed_tensors", "fp8_dynamic")}
PROMPTS = ("Once upon a time there was a little girl", "The king said to his people that")
KEPT_WHOLE = re.compile(r"embed_tokens|norm|mlp\.gate\.weight|global_scale")


@dataclass(frozen=True, slots=True)
class World:
    """What so many ranks found, by the jobs' names."""

    size: int
    jobs: Mapping[str, Job]
    found: Mapping[str, list[Done]]


def w4a4_at_the_end(source: Path, path: Path) -> Path:
    """Quantized inputs in the last layer alone: earlier ones would spread a code that falls to the other side."""
    return quantized(
        source, "compressed_tensors", lambda name: "nvfp4_w4a4" if name.startswith("model.layers.1.") else None
    ).save(path)


def golden_jobs() -> list[Job]:
    """Checkpoints that peers wrote."""
    tokens = torch.randint(3, 500, (2, 24), generator=torch.Generator().manual_seed(3))
    folders = {name: shared_folder() / "golden" / name for name in GOLDEN}
    return [Job(name, folder, tokens, FLOAT32) for name, folder in folders.items() if folder.is_dir()]


def real_jobs(root: Path) -> list[Job]:
    """A trained model in floats and in NVFP4, on text; none where the shared folder is not."""
    model = shared_folder() / "assets" / "models" / "bench-4m" / "hf"
    if not model.is_dir():
        return []
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokens = torch.tensor([tokenizer(text)["input_ids"][:8] for text in PROMPTS])
    packed = quantized(model, "compressed_tensors", "nvfp4").save(root / "nvfp4")
    return [Job(name, at, tokens, FLOAT32, new_tokens=16) for name, at in (("real", model), ("real-nvfp4", packed))]


@pytest.fixture(scope="session")
def jobs(sources: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory) -> list[Job]:
    """Every checkpoint that ranks load here."""
    root = tmp_path_factory.mktemp("parallel")
    found = [Job(name, sources[name], TOKENS, FLOAT32) for name in CONFIGS]
    for model, container, scheme in QUANTIZED:
        name = label(model, container, scheme)
        found.append(Job(name, quantized(sources[model], container, scheme).save(root / name), TOKENS, FLOAT32))
    found.append(Job("w4a4", w4a4_at_the_end(sources["llama"], root / "w4a4"), TOKENS, {"dtype": "float32"}))
    head = quantized(sources["llama"], "compressed_tensors", lambda name: "mxfp8a16" if name == "lm_head" else None)
    found.append(Job("head", head.save(root / "head"), TOKENS, FLOAT32))
    found.append(Job("counting", sources["biased"], TOKENS, FLOAT32, reduce="counting"))
    found += [Job(f"hf-{job.name}", job.path, TOKENS, FLOAT32, hf=True) for job in found if job.name in FROM_PRETRAINED]
    found.append(Job("bfloat16", sources["llama"], TOKENS, {"dtype": "bfloat16"}))
    return found + golden_jobs() + real_jobs(root)


@pytest.fixture(scope="module", params=[2, 4])
def world(request: pytest.FixtureRequest, jobs: list[Job], tmp_path_factory: pytest.TempPathFactory) -> World:
    chosen = [job for job in jobs if request.param == 2 or job.name not in OF_TWO_RANKS]
    found = ranks.run(chosen, size=request.param, folder=tmp_path_factory.mktemp("ranks") / "run")
    return World(request.param, {job.name: job for job in chosen}, found)


def needs(world: World, name: str) -> None:
    """Skips what four ranks leave to two, for the sake of time."""
    if name not in world.found:
        pytest.skip(f"{name} is loaded by two ranks")


def check_one_process_says_the_same(job: Job, found: list[Done]) -> None:
    """Logits of order 1 within 2e-5, the tokens exactly, every rank the same bits."""
    oracle = load_model(job.path, activations="none")
    with torch.no_grad():
        expected = oracle(job.tokens).logits
    for done in found:
        assert float((done.logits - expected).abs().max()) < 2e-5 * max(1.0, float(expected.abs().max()))
        assert torch.equal(done.greedy, ranks.greedy_tokens(oracle, job.tokens, job.new_tokens))
        assert torch.equal(done.logits, found[0].logits)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CONFIGS, *(label(*row) for row in QUANTIZED)])
def test_ranks_say_what_one_process_says(world: World, name: str) -> None:
    needs(world, name)
    check_one_process_says_the_same(world.jobs[name], world.found[name])


@pytest.mark.slow
def test_a_packed_head_is_split_by_words(world: World) -> None:
    check_one_process_says_the_same(world.jobs["head"], world.found["head"])
    assert {done.bytes_packed[1] for done in world.found["head"]} == {2 * 96 * 128 // world.size}


@pytest.mark.parametrize("name", FROM_PRETRAINED)
def test_from_pretrained_splits_a_packed_model(world: World, name: str) -> None:
    found = world.found[f"hf-{name}"]
    check_one_process_says_the_same(world.jobs[name], found)
    assert [done.bytes_packed for done in found] == [done.bytes_packed for done in world.found[name]]


def test_quantized_inputs_are_those_of_one_process(world: World) -> None:
    """Blocks of inputs lie in one rank, so the codes are the same but where a last bit decides a rounding."""
    oracle = load_model(world.jobs["w4a4"].path)
    with torch.no_grad():
        expected = oracle(TOKENS).logits
    plain = load_model(world.jobs["w4a4"].path, activations="none")
    with torch.no_grad():
        unquantized = plain(TOKENS).logits
    effect = float((unquantized - expected).norm())
    for done in world.found["w4a4"]:
        assert float((done.logits - expected).norm()) < 0.05 * effect


def test_the_ranks_compute_in_the_asked_dtype(world: World) -> None:
    needs(world, "bfloat16")
    oracle = load_model(world.jobs["bfloat16"].path, dtype="bfloat16")
    with torch.no_grad():
        expected = oracle(TOKENS).logits.float()
    for done in world.found["bfloat16"]:
        assert float((done.logits - expected).norm()) < 0.02 * float(expected.norm())
        assert torch.equal(done.logits, done.logits.bfloat16().float())


def test_sums_are_those_of_row_parallel_layers_alone(world: World) -> None:
    """Two a layer, of hidden size; neither embeddings nor logits."""
    for done in world.found["counting"]:
        assert done.sums == ((2, 24, 128),) * 4
    check_one_process_says_the_same(world.jobs["counting"], world.found["counting"])


@pytest.mark.parametrize("name", ["qwen3_moe", label("qwen3_moe", "compressed_tensors", "nvfp4")])
def test_each_rank_reads_its_own_part_alone(world: World, name: str) -> None:
    """Bytes from the operating system, against the headers: what all ranks need, and a share of the rest.

    Key-value heads are two, so each of four ranks reads one of them, half of the matrices.
    """
    whole = split = repeated = 0
    with Source.open(world.jobs[name].path) as source:
        for tensor, entry in source.reader.entries.items():
            if KEPT_WHOLE.search(tensor):
                whole += entry.nbytes
            elif re.search(r"\.[kv]_proj\.", tensor):
                repeated += entry.nbytes
            else:
                split += entry.nbytes
    expected = whole + split // world.size + repeated // min(world.size, 2)
    assert [done.bytes_read for done in world.found[name]] == [expected] * world.size


def test_a_packed_weight_keeps_its_bits_on_every_rank(world: World) -> None:
    for done in world.found[label("biased", "compressed_tensors", "nvfp4")]:
        packed, floats = done.bytes_packed
        assert floats > 0
        assert packed <= 0.29 * floats


@pytest.mark.shared
@pytest.mark.parametrize("name", GOLDEN)
def test_ranks_read_what_peers_wrote(world: World, name: str) -> None:
    needs(world, name)
    check_one_process_says_the_same(world.jobs[name], world.found[name])


@pytest.mark.slow
@pytest.mark.shared
@pytest.mark.parametrize("name", ["real", "real-nvfp4"])
def test_a_real_model_writes_the_same_text(world: World, name: str) -> None:
    """A trained model of 4 million weights: the tokens of transformers' own reading, and of the decode."""
    job, found = world.jobs[name], world.found[name]
    check_one_process_says_the_same(job, found)
    assert len(set(found[0].greedy[0].tolist())) > 10  # text, not one word again and again
    if name == "real":
        theirs = AutoModelForCausalLM.from_pretrained(job.path, dtype=torch.float32).eval()
        assert torch.equal(found[0].greedy, ranks.greedy_tokens(theirs, job.tokens, job.new_tokens))


def test_the_package_is_the_same_without_ranks(sources: Mapping[str, Path]) -> None:
    done = ranks.do(Job("one", sources["llama"], TOKENS, FLOAT32))
    oracle = load_model(sources["llama"])
    with torch.no_grad():
        assert torch.equal(done.logits, oracle(TOKENS).logits)
    assert ptqpipe.load_model is load_model
