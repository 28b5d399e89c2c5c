"""The table of families. A new family is a row of `FAMILIES`.

What readers do is their own source: vLLM 0.33, SGLang 0.5.23, TensorRT-LLM of mid-2026.
"""

from dataclasses import replace

from ptqpipe.families.types import GATE_UP_DOWN, Fact, Family, Keep, ModuleOutputs, Mtp, Norms

_UNQUANTIZED = (
    "vLLM, SGLang and TensorRT-LLM build it unquantized and cannot load the model: vLLM stops with a KeyError, the "
    "others with an error of its shape"
)

_SOME = (
    "whether readers take it quantized differs between families and readers; load the result in yours before it is "
    "published"
)

# What compressed-tensors stores as ``weight_packed`` instead of ``weight``, and what has one scale of a whole matrix.
_PACKED = ("nvfp4", "nvfp4_w4a4", "mxfp4", "mxfp4_w4a8", "int4_g128", "int4_g32", "int8")
_ONE_SCALE = ("fp8_static", "fp8_tensor")

COMMON: tuple[Fact, ...] = (
    # An MTP layer that is numbered like a decoder layer: DeepSeek-V3 to V3.2, GLM-4.5 to GLM-5. SGLang builds it
    # unquantized beside ModelOpt's NVFP4 (models/deepseek_nextn.py).
    Fact(
        Keep(r"re:(.*\.)?layers\.({layers})\.", "multi-token prediction layer"),
        counted_by="num_nextn_predict_layers",
        fails="SGLang builds it unquantized beside NVFP4 and cannot load it; vLLM reads it",
        readers=("sglang",),
        containers=("modelopt",),
        mtp=True,
    ),
    # nn.Linear in vLLM's deepseek_mtp.py and glm4_moe_mtp.py, SGLang's deepseek_nextn.py and glm4_moe_nextn.py. Those
    # of families whose MTP layers are not numbered like decoder layers do take codes (Nemotron-H).
    Fact(
        Keep(r"re:((language_)?model\.)*layers\.\d+\.eh_proj$", "projection into the multi-token prediction layer"),
        fails=(
            "vLLM and SGLang build it as a plain linear layer: they stop with a KeyError, or draft with random weights "
            "or with codes for numbers; the model without its speculative decoding loads"
        ),
        readers=("vllm", "sglang"),
    ),
    # DeepSeek's sparse attention (DeepSeek-V3.2, GLM-5). Readers make one bfloat16 matrix of wk and weights_proj; wk in
    # DeepSeek's own FP8 layout is decoded first.
    Fact(
        Keep(r"re:(.*\.)?indexer\.wk$", "key projection of the sparse-attention indexer"),
        fails=_UNQUANTIZED,
        readers=("vllm", "sglang", "trtllm"),
        containers=("compressed_tensors", "modelopt", "mxfp8_hf", "quark"),
    ),
    Fact(
        Keep(r"re:(.*\.)?indexer\.weights_proj$", "head weights of the sparse-attention indexer"),
        fails=_UNQUANTIZED,
        readers=("vllm", "sglang", "trtllm"),
    ),
    # Multi-head latent attention (DeepSeek, Kimi, GLM-5): absorbed into queries and outputs when a model is loaded.
    Fact(
        Keep(r"re:(.*\.)?kv_b_proj$", "readers take it apart when they load it and need at least 8 bits", bits=8),
        fails=(
            "SGLang and TensorRT-LLM take it apart without decoding it when they load the model: SGLang computes with "
            "the packed bytes, TensorRT-LLM stops with an error of its shape; vLLM reads it"
        ),
        readers=("sglang", "trtllm"),
    ),
    # Found by scripts/sglang_loads.py: post_load_weights of SGLang's deepseek_weight_loader.py and kimi_linear.py.
    Fact(
        Keep(r"re:(.*\.)?kv_b_proj$", "readers take it apart when they load it, and look for no packed INT8"),
        fails=(
            "SGLang asks for the plain weight, which compressed-tensors' packed codes have not, and stops with an "
            "AttributeError; vLLM reads it"
        ),
        readers=("sglang",),
        containers=("compressed_tensors",),
        formats=("int8",),
        by_default=False,
    ),
    # Their error is the most expensive (heads, embeddings, routers decide discretely), or readers do not look for
    # quantized weights there (towers, MTP heads).
    Fact(
        Keep(r"re:(.*\.)?(lm_head|output_head|embed_out)$", "language-model head"),
        fails=(
            "vLLM builds the head of DeepSeek-V4, gpt-oss, Qwen3-Next and Step3 unquantized, SGLang that of gpt-oss "
            "and MiniMax-M2, and neither loads it there; SGLang takes other heads in compressed-tensors only where a "
            "target names them"
        ),
    ),
    Fact(
        Keep(r"re:.*(embed|\bwte\b|\bwpe\b|shared_head)", "embedding"),
        fails="readers look up the rows of an embedding as plain numbers and do not find them among the codes",
        readers=("vllm", "sglang", "trtllm"),
    ),
    Fact(Keep(r"re:.*norm\d*$", "norm")),
    Fact(Keep(r"re:.*(\.|_)(gate|router|shared_expert_gate|e_score_correction)$", "router")),
    Fact(Keep(r"re:.*router(\.|$)", "router")),
    Fact(
        Keep(
            r"re:(.*\.)?(visual|vision_tower|vision_model|vision_encoder|image_newline|vision_embed_tokens)(\.|$)",
            "vision tower",
        ),
        fails=_SOME,
    ),
    Fact(
        Keep(
            r"re:(.*\.)?(audio_tower|audio_model|audio_encoder|speech_encoder|talker|token2wav|code2wav)(\.|$)",
            "audio tower",
        ),
        fails=_SOME,
    ),
    Fact(
        Keep(
            r"re:(.*\.)?(multi_modal_projector|mm_projector|connector|aligner|merger|projector)(\.|$)",
            "multimodal projector",
        ),
        fails=_SOME,
    ),
    Fact(Keep(r"re:(.*\.)?mtp(\.|_|$)", "multi-token-prediction head"), fails=_SOME, mtp=True),
    Fact(Keep(r"re:.*conv1d$", "short convolution")),
)

# vLLM's FusedMoE and SGLang's have one quantization method. For compressed-tensors it is that of the first expert's
# gate, up and down projections, which must agree (get_moe_method of both); a list of modules that are not quantized
# leaves a layer's experts out together (is_layer_skipped of vLLM's utils/quant_utils.py).
UNLIKE_EXPERTS = Fact(
    Keep(r"re:(.*\.)?experts\.", "experts of one layer in different formats"),
    fails=(
        "experts of one layer differ in their format, or some are not quantized: vLLM and SGLang build all experts of "
        "a layer alike, and stop or read the others' codes wrong"
    ),
    readers=("vllm", "sglang"),
    by_default=False,
)

# Weights that runtimes fuse into one matrix and therefore give one global scale: leaf names below one parent.
DEFAULT_FUSE: tuple[tuple[str, ...], ...] = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("wq", "wk", "wv"),
    ("query", "key", "value"),
    ("in_proj_qkv", "in_proj_z"),
    ("in_proj_b", "in_proj_a"),
    ("wq_a", "wkv_a"),
)

_GATES = "gates of a linear-attention layer, a few rows each"
_LINEAR_ATTENTION = (
    # Readers make one matrix of the two, of 32 to 64 rows; NVIDIA and llm-compressor leave them in bfloat16.
    Fact(Keep(r"re:(.*\.)?linear_attn\.(in_proj_(a|b|ba)|[ab]_proj)$", _GATES)),
)
_QWEN = (
    *_LINEAR_ATTENTION,
    # SGLang's qwen3_5_mtp.py and vLLM's qwen3_next_mtp.py, qwen3_5_mtp.py.
    Fact(
        Keep(r"re:(.*\.)?mtp\.fc$", "projection into the multi-token prediction layer"),
        fails=(
            "SGLang builds it as a plain linear layer, and so does vLLM beside ModelOpt's NVFP4: they find no place "
            "for codes"
        ),
        readers=("sglang",),
    ),
    Fact(
        Keep(r"re:(.*\.)?mtp\.layers\.", "multi-token prediction layer beside ModelOpt's NVFP4", bits=8),
        fails="SGLang builds it unquantized beside ModelOpt's NVFP4 and cannot load it; vLLM reads it",
        readers=("sglang",),
        containers=("modelopt",),
        by_default=False,
    ),
)
_QWEN3_NEXT = (
    *_QWEN,
    Fact(
        Keep(r"re:(.*\.)?layers\.\d+\.self_attn\.[qkv]_proj$", "attention beside ModelOpt's NVFP4", bits=8),
        fails="SGLang builds q, k and v of Qwen3-Next unquantized beside ModelOpt's NVFP4; vLLM reads them",
        readers=("sglang",),
        containers=("modelopt",),
        by_default=False,
    ),
    # _make_packed_weight_loader of SGLang's qwen3_next.py.
    Fact(
        Keep(r"re:(.*\.)?linear_attn\.in_proj_qkvz$", "linear attention in packed codes"),
        fails=(
            "SGLang asks for the plain weight, which compressed-tensors' packed codes have not, and stops with an "
            "AttributeError; vLLM reads it"
        ),
        readers=("sglang",),
        containers=("compressed_tensors",),
        formats=_PACKED,
        by_default=False,
    ),
    *(
        Fact(
            Keep(r"re:(.*\.)?linear_attn\.in_proj_qkvz$", "linear attention with one scale of the whole matrix"),
            fails="SGLang expects a scale of each part of it and stops with an error of its shape; vLLM reads it",
            readers=("sglang",),
            containers=(container,),
            formats=formats,
            by_default=False,
        )
        for container, formats in (("modelopt", ()), ("compressed_tensors", _ONE_SCALE))
    ),
)


def _kept(pattern: str, what: str, *containers: str, beside: str = "re:.*") -> Fact:
    """A part that SGLang takes for quantized where it is kept. Its models build these layers without their names, or
    under others than the lists of what is not quantized have: found by scripts/sglang_loads.py with --ignore."""
    return Fact(
        Keep(pattern, what),
        fails=(
            "SGLang does not find it by its name in the list of what is kept, takes it for quantized, and loses its "
            "weights without a word or stops"
        ),
        beside=beside,
        readers=("sglang",),
        containers=containers,
        by_default=False,
    )


_CT = "compressed_tensors"
_LINEAR = r"(.*\.)?(.*_proj|w1|w2|w3|fc1|fc2|dense.*|query_key_value)$"
_KEPT_LAYERS = _kept(rf"re:(.*\.)?layers\.\d+\.(self_attn|mlp)\.{_LINEAR}", "layer of the language model")
_KEPT_LAYERS_CT = replace(_KEPT_LAYERS, containers=(_CT,))
# Found by scripts/sglang_loads.py: SGLang's hunyuan.py, phi.py and persimmon.py give the head no name to look it up by.
_HEAD_AS_CODES = Fact(
    Keep(r"re:(.*\.)?layers\.", "a model whose head SGLang does not name, in ModelOpt's layout"),
    fails=(
        "SGLang takes the head of this family for codes wherever something is in ModelOpt's layout, and stops or, in "
        "FP8, computes with it without a word; it reads --container compressed_tensors"
    ),
    readers=("sglang",),
    containers=("modelopt",),
    by_default=False,
)
_GEMMA4_TOWER = replace(
    _kept(
        r"re:(.*\.)?vision_tower\.encoder\.layers\.\d+\.(self_attn|mlp)\.(q|k|v|gate|up)_proj\.linear$",
        "vision tower of Gemma 4",
    ),
    fails=(
        "SGLang does not find the vision tower of Gemma 4 by its names: without a word it loses the weights of one "
        "that is kept and the scales of one that is quantized"
    ),
)
_LATENT = r"re:(.*\.)?self_attn\.(q_a_proj|q_b_proj|kv_a_proj_with_mqa)$"
_MINIMAX_M3 = (("q_proj", "k_proj", "v_proj", "index_q_proj", "index_k_proj"),)
# Towers and projectors that are kept by default, too: these models are read in no format until SGLang finds the names.
_GLM4V = (_kept(r"re:(.*\.)?visual\.(blocks|merger)\.", "vision tower"), _KEPT_LAYERS)
# vLLM makes one matrix of them with q, k and v, so these stay as they are with them.
_DELTA_ATTENTION = (Fact(Keep(r"re:(.*\.)?self_attn\.(b|f_a|f_b|g_a|g_b)_proj$", _GATES)),)
_MAMBA1 = (
    Fact(
        Keep(r"re:(.*\.)?(mamba|mixer)\.(in|x|dt|out)_proj$", "state-space layer that vLLM builds unquantized"),
        fails="vLLM builds the projections of Mamba-1 unquantized and finds no place for their codes",
        readers=("vllm",),
    ),
)


def _mamba2(inner: tuple[str, ...], states: tuple[str, ...], heads: str) -> tuple[ModuleOutputs, ...]:
    """The gate, the input, B, C and the step sizes that vLLM's MambaMixer2 (mamba_mixer2.py) builds of ``in_proj``."""
    return (ModuleOutputs(r"(.*\.)?(mamba|mixer)\.in_proj$", (inner, inner, states, states, (heads,))),)


# create_qkvz_proj of vLLM's and SGLang's Qwen3.5: q, k and v, with z below them. Qwen3-Next's is one output.
_KEYS = ("linear_num_key_heads", "linear_key_head_dim")
_QWEN3_5_OUTPUTS = (
    ModuleOutputs(
        r"(.*\.)?linear_attn\.in_proj_qkv$", (_KEYS, _KEYS, ("linear_num_value_heads", "linear_value_head_dim"))
    ),
)
_GEMMA_SMALL = (
    # Most have 4 to 256 columns, which blocks do not divide well; vendors and llm-compressor leave all of them.
    Fact(Keep(r"re:(.*\.)?(altup|laurel)\.", "small projection")),
    Fact(
        Keep(
            r"re:(.*\.)?(per_layer_(input_gate|projection|model_projection)|altup_(unembed_)?projections)(\.|$)",
            "small projection",
        )
    ),
)
_GEMMA2 = Norms(
    mlp="pre_feedforward_layernorm",
    offset=1.0,
    outputs=("post_attention_layernorm", "post_feedforward_layernorm"),
)
_GLM4 = Norms(outputs=("post_self_attn_layernorm", "post_mlp_layernorm"))
_SIDE_BY_SIDE = Norms("input_layernorm", "input_layernorm", layer_norm=True)
_BEHIND = Norms("", "", outputs=("post_attention_layernorm", "post_feedforward_layernorm"))

_INTERNVL = (
    Fact(
        Keep(r"re:(.*\.)?mlp1\.\d+$", "multimodal projector"),
        fails="vLLM and SGLang build it as plain linear layers and find no place for codes",
        readers=("vllm", "sglang"),
    ),
)

# transformers' modeling_layers.py (MtpModel), vLLM's deepseek_mtp.py, glm4_moe_mtp.py, qwen3_next_mtp.py.
_NUMBERED = Mtp(*(f"model.layers.{{at}}{leaf}" for leaf in ("", ".eh_proj", ".enorm", ".hnorm", ".shared_head.norm")))
_QWEN_MTP = Mtp("mtp.layers.0", "mtp.fc", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm")

FAMILIES: tuple[Family, ...] = (
    Family(
        ("deepseek_v3", "deepseek_v32", "glm_moe_dsa"),
        # deepseek_weight_loader.py of SGLang puts everything of the two side by side that is no number of shape [].
        facts=(
            Fact(
                Keep(r"re:(.*\.)?self_attn\.(q_a_proj|kv_a_proj_with_mqa)$", "latent projections in one"),
                fails=(
                    "SGLang puts the two side by side with all that belongs to them, also the one scale or the shape "
                    "of packed weights in compressed-tensors, and stops with an error of their shape; it reads "
                    "--container modelopt, and vLLM both"
                ),
                readers=("sglang",),
                containers=("compressed_tensors",),
                formats=(*_PACKED, *_ONE_SCALE),
                by_default=False,
            ),
            # is_layer_excluded of SGLang's modelopt_quant.py asks for these by the end of their names.
            Fact(
                Keep(_LATENT, "latent projections of one layer"),
                fails=(
                    "SGLang takes these projections of every layer for kept where ModelOpt's list of what is kept has "
                    "one of them, and stops"
                ),
                beside=_LATENT,
                readers=("sglang",),
                containers=("modelopt",),
                by_default=False,
            ),
        ),
        mtp=_NUMBERED,
        norms=Norms(),
    ),
    # Layers as Llama's: rows with norms alone say where transforms may move factors.
    Family(("llama", "mistral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe"), norms=Norms()),
    Family(
        ("mixtral",),
        facts=(
            _kept(rf"re:(.*\.)?layers\.\d+\.(self_attn|block_sparse_moe\.experts)\.{_LINEAR}", "layer of Mixtral", _CT),
        ),
        norms=Norms(),
    ),
    Family(("mistral3",), facts=(_KEPT_LAYERS,)),
    Family(("qwen2_vl", "qwen2_5_vl"), facts=(_KEPT_LAYERS_CT,), norms=Norms()),
    Family(("qwen3_vl", "qwen3_vl_moe"), facts=(_KEPT_LAYERS,), norms=Norms()),
    Family(("glm4v", "glm4v_moe", "glm_ocr"), facts=_GLM4V),
    Family(("qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text"), norms=Norms()),
    Family(("glm4v_moe_text", "paddleocr_vl_text"), norms=Norms()),
    Family(("granite", "granite_swa", "granite_docling_text"), norms=Norms()),
    Family(("aria_text", "cosmos3_edge_text", "unlimited_ocr_text"), norms=Norms()),
    # q, k and v of each head lie side by side.
    Family(("persimmon",), facts=(_KEPT_LAYERS, _HEAD_AS_CODES), norms=Norms(layer_norm=True, values=False)),
    Family(
        ("inkling2", "inkling2_text"),
        fixed=(
            "its layers also read what earlier blocks of layers wrote, weighted by their size, and convolve and clip "
            "what lies between projections"
        ),
    ),
    Family(("ministral3", "olmoe", "phi3", "helium", "cwm", "iquestcoder"), norms=Norms()),
    Family(("seed_oss", "smollm3"), norms=Norms(), missing=("sglang",)),
    Family(("ernie4_5", "ernie4_5_moe", "exaone_moe", "hy_v3", "mellum", "minimax_m2", "solar_open"), norms=Norms()),
    Family(("internlm3", "minicpm3", "youtu", "arcee"), norms=Norms()),
    Family(("phimoe", "starcoder2", "jais2"), norms=Norms(layer_norm=True)),
    Family(
        ("stablelm",),
        facts=(
            Fact(
                Keep(r"re:(.*\.)?self_attn\.[qkv]_proj$", "attention that SGLang builds unquantized"),
                fails="SGLang builds q, k and v of StableLM unquantized and stops",
                readers=("sglang",),
                by_default=False,
            ),
        ),
        norms=Norms(layer_norm=True),
    ),
    Family(("glm4", "glm4v_text", "glm_ocr_text"), norms=_GLM4),
    Family(("hyperclovax",), norms=Norms(outputs=("post_norm1", "post_norm2"))),
    Family(("exaone4", "olmo2", "olmo3", "flex_olmo"), norms=_BEHIND),
    Family(("cohere", "cohere2", "cohere2_moe"), norms=_SIDE_BY_SIDE),
    Family(("phi",), facts=(_KEPT_LAYERS, _HEAD_AS_CODES), norms=_SIDE_BY_SIDE),
    Family(("lfm2",), norms=Norms("operator_norm", "ffn_norm")),
    Family(
        ("lfm2_moe",),
        facts=(
            _kept(r"re:(.*\.)?feed_forward\.(w1|w2|w3)$", "dense layer of LFM2"),
            _kept(r"re:(.*\.)?feed_forward\.experts\.", "experts of LFM2", _CT),
        ),
    ),
    Family(
        ("lfm2_vl",),
        facts=(
            _kept(r"re:(.*\.)?multi_modal_projector\.", "multimodal projector"),
            _kept(r"re:(.*\.)?language_model\.layers\.", "layer of the language model"),
        ),
    ),
    Family(("apertus",), norms=Norms("attention_layernorm", "feedforward_layernorm")),
    Family(("gemma",), norms=Norms(offset=1.0)),
    Family(("gemma2",), facts=(_KEPT_LAYERS,), norms=_GEMMA2),
    Family(("gemma3_text",), norms=_GEMMA2),
    Family(("gpt2",), norms=Norms("ln_1", "ln_2", layer_norm=True)),
    Family(("gemma3n", "gemma3n_text"), facts=_GEMMA_SMALL),
    Family(
        ("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text"),
        facts=(
            *_GEMMA_SMALL,
            *(replace(_GEMMA4_TOWER, beside=beside) for beside in ("", "re:.*")),
        ),
        # Values pass a norm, and the last layers read those of earlier ones.
        norms=replace(_GEMMA2, offset=0.0, values=False),
    ),
    Family(
        ("deepseek_v4",),
        facts=(
            Fact(
                Keep(r"re:(.*\.)?compressor\.", "compressor of keys and values, which readers build unquantized"),
                fails="vLLM and SGLang build it unquantized and find no place for codes",
                readers=("vllm", "sglang"),
            ),
            Fact(
                Keep(
                    r"re:(.*\.)?attn\.wo_a$",
                    "grouped output projection, which readers decode when they load it",
                    bits=8,
                ),
                fails="SGLang decodes it from FP8 alone when it loads the model",
                readers=("sglang",),
            ),
            # Found by scripts/sglang_loads.py: SGLang's deepseek_v4.py looks for no ``weight_scale`` of the two.
            Fact(
                Keep(r"re:(.*\.)?attn\.(wq_a|wkv)$", "latent projections in one"),
                fails=(
                    "SGLang makes one matrix of wq_a and wkv, and loses their scales of all but DeepSeek's own FP8 "
                    "without a word"
                ),
                readers=("sglang",),
                by_default=False,
            ),
            Fact(
                Keep(r"re:head$", "language-model head"),
                fails="vLLM builds the head of DeepSeek-V4 unquantized and does not load it",
                readers=("vllm",),
            ),
        ),
        fuse=(("wq_a", "wkv"),),
    ),
    Family(("qwen3_next",), facts=_QWEN3_NEXT, mtp=_QWEN_MTP, norms=Norms(offset=1.0)),
    Family(
        ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
        facts=_QWEN,
        mtp=_QWEN_MTP,
        norms=Norms(offset=1.0),
        outputs=_QWEN3_5_OUTPUTS,
    ),
    # in_proj_qkvg of vLLM's olmo_hybrid.py.
    Family(
        ("olmo_hybrid",),
        facts=_LINEAR_ATTENTION,
        fuse=(("q_proj", "k_proj", "v_proj", "g_proj"),),
        missing=("sglang",),
    ),
    Family(
        ("kimi_linear", "kimi_k3", "glm5_next", "glm5_next_text"),
        facts=(*_DELTA_ATTENTION, _kept(r"re:(.*\.)?block_sparse_moe\.", "experts of Kimi-Linear")),
        fuse=(("q_proj", "k_proj", "v_proj", "b_proj", "f_a_proj", "g_a_proj"),),
    ),
    # Of a pure Mamba-1 nothing else is there to quantize, and transformers reads it.
    Family(("mamba", "falcon_mamba"), facts=tuple(replace(fact, by_default=False) for fact in _MAMBA1)),
    Family(("jamba",), facts=_MAMBA1, missing=("sglang",)),
    # Found by scripts/sglang_loads.py: Llama4ForCausalLM of SGLang loads as Llama does, which has no experts. The whole
    # model's loader (mllama4.py) looks for them by these names.
    Family(("llama4",)),
    Family(
        ("llama4_text",),
        facts=(
            Fact(
                Keep(r"re:(.*\.)?feed_forward\.experts\.", "experts of the text model of Llama 4 by itself"),
                fails=(
                    "SGLang leaves the experts of Llama 4's text model by itself random without a word (those of the "
                    "whole model it looks for); vLLM reads them"
                ),
                readers=("sglang",),
                by_default=False,
            ),
        ),
    ),
    # Found by scripts/sglang_loads.py: models/gpt_oss.py of SGLang makes these layers without a quantization.
    Family(
        ("gpt_oss",),
        facts=(
            Fact(
                Keep(r"re:(.*\.)?self_attn\.[qkvo]_proj$", "attention that SGLang builds unquantized"),
                fails=(
                    "SGLang builds the attention of gpt-oss unquantized: without a word it leaves these weights random "
                    "or takes codes for numbers, or it stops; vLLM reads them"
                ),
                readers=("sglang",),
                by_default=False,
            ),
        ),
        interleaved=True,
    ),
    # Found by scripts/sglang_loads.py, as are those of Falcon-H1.
    Family(
        ("glm4_moe",),
        facts=(
            Fact(
                Keep(r"re:(.*\.)?mlp\.shared_experts\.(gate|up)_proj$", "shared experts in packed codes"),
                fails=(
                    "SGLang asks for the dtype of the plain weight, which compressed-tensors' packed codes have not, "
                    "and stops with an AttributeError; vLLM reads it, and SGLang ModelOpt's"
                ),
                readers=("sglang",),
                containers=("compressed_tensors",),
                formats=_PACKED,
                by_default=False,
            ),
        ),
        mtp=_NUMBERED,
        norms=Norms(),
    ),
    Family(
        ("falcon_h1",),
        facts=(
            Fact(
                Keep(r"re:(.*\.)?mamba\.(in|out)_proj$", "state-space layer that SGLang builds unquantized"),
                fails="SGLang builds the state-space layers of Falcon-H1 unquantized and stops; vLLM reads them",
                readers=("sglang",),
                by_default=False,
            ),
        ),
        outputs=_mamba2(("mamba_d_ssm",), ("mamba_n_groups", "mamba_d_state"), "mamba_n_heads"),
    ),
    Family(
        ("step3p5", "step3p7", "step3_text", "step3_vl"),
        facts=(
            Fact(
                Keep(r"re:(.*\.)?self_attn\.g_proj$", "gate of attention heads"),
                fails="SGLang builds it as a plain linear layer and finds no place for codes; vLLM reads it",
                readers=("sglang",),
            ),
            Fact(Keep(r"re:(.*\.)?vit_large_projector(\.|$)", "multimodal projector"), fails=_SOME),
        ),
        experts=GATE_UP_DOWN,
    ),
    # vLLM 0.33 leaves experts of other names (Mixtral's) out without a word.
    Family(
        ("granitemoe", "granitemoeshared"),
        facts=(_kept(r"re:(.*\.)?block_sparse_moe\.(in|out)put_linear$", "experts of Granite"),),
        experts=GATE_UP_DOWN,
        norms=Norms(),
    ),
    # Found by scripts/sglang_loads.py: load_weights of SGLang's granitemoehybrid.py.
    Family(
        ("granitemoehybrid",),
        facts=(
            Fact(
                Keep(r"re:(.*\.)?block_sparse_moe\.", "experts of a Granite hybrid"),
                fails="SGLang hands its experts an argument that they do not take, and stops; vLLM reads them",
                readers=("sglang",),
                by_default=False,
            ),
            Fact(
                Keep(r"re:(.*\.)?layers\.", "Granite hybrid in ModelOpt's layout"),
                fails="SGLang asks ModelOpt's configuration for names that it has none of, and stops; vLLM reads it",
                readers=("sglang",),
                containers=("modelopt",),
                by_default=False,
            ),
            # Found by scripts/vllm_fills.py, as is that of Zamba2.
            Fact(
                Keep(r"re:(.*\.)?block_sparse_moe\.", "experts of a Granite hybrid with inputs in 4 bits"),
                fails=(
                    "vLLM has no name for the scales of their inputs in compressed-tensors, and stops with a KeyError; "
                    "it reads --container modelopt"
                ),
                readers=("vllm",),
                containers=("compressed_tensors",),
                formats=("nvfp4_w4a4",),
                by_default=False,
            ),
        ),
        experts=GATE_UP_DOWN,
        outputs=_mamba2(("mamba_n_heads", "mamba_d_head"), ("mamba_n_groups", "mamba_d_state"), "mamba_n_heads"),
    ),
    Family(
        ("zamba2",),
        facts=(
            Fact(
                Keep(r"re:.*_adapter_list\.", "adapters of shared layers with static scales of inputs"),
                fails="vLLM has no name for the scales of their inputs, and stops; it reads formats without them",
                readers=("vllm",),
                formats=("nvfp4_w4a4", "fp8_static"),
                by_default=False,
            ),
        ),
        outputs=(
            *_mamba2(("mamba_expand", "hidden_size"), ("mamba_ngroups", "mamba_d_state"), "n_mamba_heads"),
            ModuleOutputs(r"(.*\.)?feed_forward\.gate_up_proj(_adapter_list\.\d+\.1)?$", (("intermediate_size",),) * 2),
        ),
        missing=("sglang",),
    ),
    Family(
        ("minimax_m3_vl", "minimax_m3"),
        facts=(Fact(Keep(r"re:(.*\.)?patch_merge_mlp(\.|$)", "multimodal projector"), fails=_SOME),),
        fuse=_MINIMAX_M3,
    ),
    # The text model by itself, in transformers' layout.
    Family(("minimax_m3_vl_text",), fuse=_MINIMAX_M3, missing=("sglang",)),
    Family(("aya_vision", "exaone4_5"), missing=("sglang",)),
    Family(
        ("nemotron_h", "nemotron_h_omni"),
        facts=(
            Fact(Keep(r"re:(.*\.)?fc[12]_latent_proj$", "latent projection around the experts")),
            # SGLang looks for a gate, too, which these experts have not: in the list of what is kept it is not.
            _kept(r"re:(.*\.)?mixer\.experts\.", "experts of Nemotron-H", _CT),
        ),
        outputs=_mamba2(("mamba_num_heads", "mamba_head_dim"), ("n_groups", "ssm_state_size"), "mamba_num_heads"),
    ),
    Family(
        ("hunyuan_v1_moe",),
        facts=(
            Fact(Keep(r"re:(.*\.)?mlp\.gate\.wg$", "router")),
            _KEPT_LAYERS_CT,
            _HEAD_AS_CODES,
        ),
    ),
    Family(("internvl_chat",), facts=_INTERNVL),
    # Found by scripts/sglang_loads.py: SGLang has an InternVLChatModel alone.
    Family(
        ("internvl",),
        facts=(
            *_INTERNVL,
            Fact(
                Keep(r"re:(.*\.)?language_model\.", "InternVL in transformers' layout"),
                fails=(
                    "SGLang leaves InternVL in transformers' layout to transformers' model, and stops or, in ModelOpt "
                    "FP8, takes the head for codes without a word; vLLM reads it"
                ),
                readers=("sglang",),
                by_default=False,
            ),
        ),
    ),
    # Towers and projectors under names of their own.
    Family(
        ("hyperclovax_vision_v2", "lighton_ocr", "paddleocr_vl", "qianfan_ocr", "unlimited_ocr", "video_llava"),
        facts=(
            Fact(
                Keep(
                    r"re:(.*\.)?(vision_projector|vision_projection|mlp_AR|mlp1|sam_model|image_tower|video_tower)(\.|$)",
                    "vision tower or projector",
                ),
                fails=_SOME,
            ),
        ),
    ),
    Family(
        ("phi4_multimodal", "phi4mm"),
        facts=(
            Fact(
                Keep(
                    r"re:(.*\.)?(img|image|audio)_(projection|proj)(_for_vision|_for_speech)?(\.|$)",
                    "multimodal projector",
                ),
                fails="vLLM builds it as plain linear layers and finds no place for codes",
                readers=("vllm",),
            ),
            Fact(Keep(r"re:(.*\.)?lora_(A|B)(\.|$)", "adapter")),
        ),
    ),
)
