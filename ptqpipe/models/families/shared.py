"""What several rows of the table of families have in common."""

from dataclasses import replace

from ptqpipe.models.families.defaults import GATES
from ptqpipe.models.families.family import Keep, ModuleOutputs, Mtp, Norms, ReaderIssue, fails

# What compressed-tensors stores as ``weight_packed`` instead of ``weight``, and what has one scale of a whole matrix.
PACKED = ("nvfp4", "nvfp4_w4a4", "mxfp4", "mxfp4_w4a8", "int4_g128", "int4_g32", "int8")
ONE_SCALE = ("fp8_static", "fp8_tensor")

# fmt: off
QWEN = (
    # SGLang's qwen3_5_mtp.py and vLLM's qwen3_next_mtp.py, qwen3_5_mtp.py.
    ReaderIssue(Keep(r"re:(.*\.)?mtp\.fc$", "projection into the multi-token prediction layer"),
        symptom="SGLang builds it as a plain linear layer, and so does vLLM beside ModelOpt's NVFP4: they find no "
        "place for codes", readers=("sglang",)),
    fails("sglang", r"re:(.*\.)?mtp\.layers\.", "multi-token prediction layer beside ModelOpt's NVFP4",
        "SGLang builds it unquantized beside ModelOpt's NVFP4 and cannot load it; vLLM reads it", bits=8,
        containers=("modelopt",)),
)
QWEN3_NEXT = (
    *QWEN,
    fails("sglang", r"re:(.*\.)?layers\.\d+\.self_attn\.[qkv]_proj$", "attention beside ModelOpt's NVFP4",
        "SGLang builds q, k and v of Qwen3-Next unquantized beside ModelOpt's NVFP4; vLLM reads them", bits=8,
        containers=("modelopt",)),
    # SGLang's qwen3_next_mtp.py names its modules like those of the first decoder layer, so that no list can tell them
    # apart. Found by labs/readers/sglang_loads.py --drafts.
    fails("sglang", r"re:(.*\.)?mtp\.layers\.\d+\..*_proj$", "multi-token prediction layer beside FP8",
        "SGLang, where it drafts with it, takes it for quantized and computes with weights without their scales, "
        "without a word; the model without its speculative decoding loads", unless_quantized="re:.*",
        formats=("fp8_dynamic", "fp8_static", "fp8_block")),
    # _make_packed_weight_loader of SGLang's qwen3_next.py.
    fails("sglang", r"re:(.*\.)?linear_attn\.in_proj_qkvz$", "linear attention in packed codes",
        "SGLang asks for the plain weight, which compressed-tensors' packed codes have not, and stops with an "
        "AttributeError; vLLM reads it", containers=("compressed_tensors",), formats=PACKED),
    *(
        fails("sglang", r"re:(.*\.)?linear_attn\.in_proj_qkvz$", "linear attention with one scale of the whole matrix",
            "SGLang expects a scale of each part of it and stops with an error of its shape; vLLM reads it",
            containers=(container,), formats=formats)
        for container, formats in (("modelopt", ()), ("compressed_tensors", ONE_SCALE))
    ),
)


def kept(pattern: str, what: str, *containers: str, unless_quantized: str = "re:.*") -> ReaderIssue:
    """A part that SGLang takes for quantized where it is kept. Its models build these layers without their names, or
    under others than the lists of what is not quantized have: found by labs/readers/sglang_loads.py with --ignore."""
    return ReaderIssue(
        Keep(pattern, what),
        symptom=(
            "SGLang does not find it by its name in the list of what is kept, takes it for quantized, and loses its "
            "weights without a word or stops"
        ),
        unless_quantized=unless_quantized,
        readers=("sglang",),
        containers=containers,
        by_default=False,
    )


CT = "compressed_tensors"
LINEAR = r"(.*\.)?(.*_proj|w1|w2|w3|fc1|fc2|dense.*|query_key_value)$"
KEPT_LAYERS = kept(rf"re:(.*\.)?layers\.\d+\.(self_attn|mlp)\.{LINEAR}", "layer of the language model")
KEPT_LAYERS_CT = replace(KEPT_LAYERS, containers=(CT,))
# Found by labs/readers/sglang_loads.py: SGLang's hunyuan.py, phi.py and persimmon.py give the head no name.
HEAD_AS_CODES = ReaderIssue(
    Keep(r"re:(.*\.)?layers\.", "a model whose head SGLang does not name, in ModelOpt's layout"),
    symptom=(
        "SGLang takes the head of this family for codes wherever something is in ModelOpt's layout, and stops or, in "
        "FP8, computes with it without a word; it reads compressed-tensors"
    ),
    readers=("sglang",),
    containers=("modelopt",),
    by_default=False,
)
GEMMA4_TOWER = replace(
    kept(
        r"re:(.*\.)?vision_tower\.encoder\.layers\.\d+\.(self_attn|mlp)\.(q|k|v|gate|up)_proj\.linear$",
        "vision tower of Gemma 4",
    ),
    symptom=(
        "SGLang does not find the vision tower of Gemma 4 by its names: without a word it loses the weights of one "
        "that is kept and the scales of one that is quantized"
    ),
)
MINIMAX_M3 = (("q_proj", "k_proj", "v_proj", "index_q_proj", "index_k_proj"),)
# Towers and projectors that are kept by default, too: these models are read in no format until SGLang finds the names.
GLM4V = (kept(r"re:(.*\.)?visual\.(blocks|merger)\.", "vision tower"), KEPT_LAYERS)
# vLLM makes one matrix of them with q, k and v, so these stay as they are with them.
DELTA_ATTENTION = (ReaderIssue(Keep(r"re:(.*\.)?self_attn\.(b|f_a|f_b|g_a|g_b)_proj$", GATES)),)
MAMBA1 = (
    ReaderIssue(Keep(r"re:(.*\.)?(mamba|mixer)\.(in|x|dt|out)_proj$", "state-space layer that vLLM builds unquantized"),
        symptom="vLLM builds the projections of Mamba-1 unquantized and finds no place for their codes",
        readers=("vllm",)),
)


def mamba2(inner: tuple[str, ...], states: tuple[str, ...], heads: str) -> tuple[ModuleOutputs, ...]:
    """The gate, the input, B, C and the step sizes that vLLM's MambaMixer2 (mamba_mixer2.py) builds of ``in_proj``."""
    return (ModuleOutputs(r"(.*\.)?(mamba|mixer)\.in_proj$", (inner, inner, states, states, (heads,))),)


# create_qkvz_proj of vLLM's and SGLang's Qwen3.5: q, k and v, with z below them. Qwen3-Next's is one output.
KEYS = ("linear_num_key_heads", "linear_key_head_dim")
QWEN3_5_OUTPUTS = (
    ModuleOutputs(
        r"(.*\.)?linear_attn\.in_proj_qkv$", (KEYS, KEYS, ("linear_num_value_heads", "linear_value_head_dim"))
    ),
)
QWEN4_EXP = (
    # Qwen4ExpQSAAttention of vLLM's models/qwen4_exp/nvidia/qsa.py.
    ReaderIssue(
        Keep(r"re:(.*\.)?self_attn\.([qkv]_proj|indexer\.index_qk_proj)$", "attention in one matrix with its indexer"),
        symptom="vLLM makes one matrix of q, k, v and the indexer's projection, which finds no place for codes of "
        "some of them, and for none beside ModelOpt's NVFP4", readers=("vllm",)),
    ReaderIssue(Keep(r"re:(.*\.)?ple\.(key|value)_proj$", "projection of the n-gram table")),
    ReaderIssue(Keep(r"re:(.*\.)?lm_head$", "language-model head"), symptom="vLLM builds the head of Qwen4-exp "
        "unquantized and does not load it", readers=("vllm",)),
)
GEMMA_SMALL = (
    # Most have 4 to 256 columns, which blocks do not divide well; vendors and llm-compressor leave all of them.
    ReaderIssue(Keep(r"re:(.*\.)?(altup|laurel)\.", "small projection")),
    ReaderIssue(
        Keep(r"re:(.*\.)?(per_layer_(input_gate|projection|model_projection)|altup_(unembed_)?projections)(\.|$)",
            "small projection")),
)
GEMMA2 = Norms(
    mlp="pre_feedforward_layernorm",
    offset=1.0,
    outputs=("post_attention_layernorm", "post_feedforward_layernorm"),
)
GLM4 = Norms(outputs=("post_self_attn_layernorm", "post_mlp_layernorm"))
SIDE_BY_SIDE = Norms("input_layernorm", "input_layernorm", layer_norm=True)
BEHIND = Norms("", "", outputs=("post_attention_layernorm", "post_feedforward_layernorm"))

INTERNVL = (
    ReaderIssue(Keep(r"re:(.*\.)?mlp1\.\d+$", "multimodal projector"),
        symptom="vLLM and SGLang build it as plain linear layers and find no place for codes",
        readers=("vllm", "sglang")),
)

# transformers' modeling_layers.py (MtpModel), vLLM's deepseek_mtp.py, glm4_moe_mtp.py, qwen3_next_mtp.py.
NUMBERED = Mtp(*(f"model.layers.{{layer}}{leaf}" for leaf in ("", ".eh_proj", ".enorm", ".hnorm", ".shared_head.norm")))
QWEN_MTP = Mtp("mtp.layers.0", "mtp.fc", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm")
# fmt: on
