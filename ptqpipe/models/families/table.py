"""The table of families. A new family is a row of `FAMILIES`.

What holds for every model stands in `defaults.py`, what several rows share in `shared.py`. What readers do is their own
source, of the versions in ``models/reader_facts.py``.
"""

from dataclasses import replace

from ptqpipe.models.families import defaults as common, shared
from ptqpipe.models.families.family import GATE_UP_DOWN, Family, Keep, ModuleOutputs, Norms, ReaderIssue, fails

# Adapters that are a part of the model, as it is published.
MERGED_BY_READERS = ReaderIssue(Keep(r"re:(.*\.)?lora_(A|B)(\.|$)", "adapter"))

# fmt: off
FAMILIES: tuple[Family, ...] = (
    Family(
        ("deepseek_v3", "deepseek_v32", "kimi_k2", "glm_moe_dsa"),
        # deepseek_weight_loader.py of SGLang puts everything of the two side by side that is no number of shape [].
        issues=(
            fails("sglang", r"re:(.*\.)?self_attn\.(q_a_proj|kv_a_proj_with_mqa)$", "latent projections in one",
                "SGLang puts the two side by side with all that belongs to them, also the one scale or the shape of "
                "packed weights in compressed-tensors, and stops with an error of their shape; it reads ModelOpt's "
                "layout, and vLLM both", containers=("compressed_tensors",),
                formats=(*shared.PACKED, *shared.ONE_SCALE)),
        ),
        mtp=shared.NUMBERED,
        norms=Norms(),
    ),
    # Layers as Llama's: rows with norms alone say where transforms may move factors.
    Family(("llama", "mistral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe"), norms=Norms()),
    Family(
        ("mixtral",),
        issues=(
            shared.kept(
                rf"re:(.*\.)?layers\.\d+\.(self_attn|block_sparse_moe\.experts)\.{shared.LINEAR}",
                "layer of Mixtral",
                shared.CT,
            ),
        ),
        norms=Norms(),
    ),
    Family(("mistral3",), issues=(shared.KEPT_LAYERS,)),
    Family(("qwen2_vl", "qwen2_5_vl"), issues=(shared.KEPT_LAYERS_CT,), norms=Norms()),
    Family(("qwen3_vl", "qwen3_vl_moe"), issues=(shared.KEPT_LAYERS,), norms=Norms()),
    Family(("glm4v", "glm4v_moe", "glm_ocr"), issues=shared.GLM4V),
    Family(("qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text"), norms=Norms()),
    Family(("glm4v_moe_text", "paddleocr_vl_text"), norms=Norms()),
    Family(("granite", "granite_swa", "granite_docling_text"), norms=Norms()),
    Family(("aria_text", "cosmos3_edge_text", "unlimited_ocr_text"), norms=Norms()),
    # q, k and v of each head lie side by side.
    Family(
        ("persimmon",), issues=(shared.KEPT_LAYERS, shared.HEAD_AS_CODES), norms=Norms(layer_norm=True, values=False)
    ),
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
        issues=(
            fails("sglang", r"re:(.*\.)?self_attn\.[qkv]_proj$", "attention that SGLang builds unquantized",
                "SGLang builds q, k and v of StableLM unquantized and stops"),
        ),
        norms=Norms(layer_norm=True),
    ),
    Family(("glm4", "glm4v_text", "glm_ocr_text"), norms=shared.GLM4),
    Family(("hyperclovax",), norms=Norms(outputs=("post_norm1", "post_norm2"))),
    Family(("exaone4", "olmo2", "olmo3", "flex_olmo"), norms=shared.BEHIND),
    Family(("cohere", "cohere2", "cohere2_moe"), norms=shared.SIDE_BY_SIDE),
    Family(("phi",), issues=(shared.KEPT_LAYERS, shared.HEAD_AS_CODES), norms=shared.SIDE_BY_SIDE),
    Family(("lfm2",), norms=Norms("operator_norm", "ffn_norm", tied=True)),  # vLLM's
    Family(
        ("lfm2_moe",),
        issues=(
            shared.kept(r"re:(.*\.)?feed_forward\.(w1|w2|w3)$", "dense layer of LFM2"),
            shared.kept(r"re:(.*\.)?feed_forward\.experts\.", "experts of LFM2", shared.CT),
        ),
    ),
    Family(
        ("lfm2_vl",),
        issues=(
            shared.kept(r"re:(.*\.)?multi_modal_projector\.", "multimodal projector"),
            shared.kept(r"re:(.*\.)?language_model\.layers\.", "layer of the language model"),
        ),
    ),
    Family(("apertus",), norms=Norms("attention_layernorm", "feedforward_layernorm")),
    Family(("gemma",), norms=Norms(offset=1.0, tied=True)),  # SGLang's
    Family(("gemma2",), issues=(shared.KEPT_LAYERS,), norms=shared.GEMMA2),
    Family(("gemma3_text",), norms=shared.GEMMA2),
    Family(("gpt2",), norms=Norms("ln_1", "ln_2", layer_norm=True)),
    Family(("gemma3n", "gemma3n_text"), issues=shared.GEMMA_SMALL),
    Family(
        ("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text"),
        issues=(
            *shared.GEMMA_SMALL,
            *(replace(shared.GEMMA4_TOWER, unless_quantized=pattern) for pattern in ("", "re:.*")),
        ),
        # Values pass a norm, and the last layers read those of earlier ones.
        norms=replace(shared.GEMMA2, offset=0.0, values=False),
    ),
    Family(
        ("deepseek_v4",),
        issues=(
            ReaderIssue(
                Keep(r"re:(.*\.)?compressor\.", "compressor of keys and values, which readers build unquantized"),
                symptom="vLLM and SGLang build it unquantized and find no place for codes", readers=("vllm", "sglang")),
            ReaderIssue(
                Keep(r"re:(.*\.)?attn\.wo_a$", "grouped output projection, which readers decode when they load it",
                    bits=8),
                symptom="SGLang decodes it from FP8 alone when it loads the model", readers=("sglang",)),
            # Found by labs/readers/sglang_loads.py: SGLang's deepseek_v4.py looks for no ``weight_scale`` of the two.
            fails("sglang", r"re:(.*\.)?attn\.(wq_a|wkv)$", "latent projections in one",
                "SGLang makes one matrix of wq_a and wkv, and loses their scales of all but DeepSeek's own FP8 "
                "without a word"),
            ReaderIssue(Keep(r"re:head$", "language-model head"), symptom="vLLM builds the head of DeepSeek-V4 "
                "unquantized and does not load it", readers=("vllm",)),
        ),
        fuse=(("wq_a", "wkv"),),
    ),
    Family(("qwen3_next",), issues=shared.QWEN3_NEXT, mtp=shared.QWEN_MTP, norms=Norms(offset=1.0)),
    Family(
        ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
        issues=shared.QWEN,
        mtp=shared.QWEN_MTP,
        norms=Norms(offset=1.0),
        outputs=shared.QWEN3_5_OUTPUTS,
    ),
    # Qwen3.8-Flash-Next: vLLM's models/qwen4_exp/nvidia. Its n-gram tables are embeddings.
    Family(
        ("qwen4_exp", "qwen4_exp_text"),
        issues=shared.QWEN4_EXP,
        fixed="its layers read a learned mixture of several residual streams",
        outputs=shared.QWEN3_5_OUTPUTS,
    ),
    # in_proj_qkvg of vLLM's olmo_hybrid.py.
    Family(
        ("olmo_hybrid",),
        fuse=(("q_proj", "k_proj", "v_proj", "g_proj"),),
        missing=("sglang",),
    ),
    Family(
        ("kimi_linear", "kimi_k3", "glm5_next", "glm5_next_text"),
        issues=(*shared.DELTA_ATTENTION, shared.kept(r"re:(.*\.)?block_sparse_moe\.", "experts of Kimi-Linear")),
        fuse=(("q_proj", "k_proj", "v_proj", "b_proj", "f_a_proj", "g_a_proj"),),
    ),
    # Of a pure Mamba-1 nothing else is there to quantize, and transformers reads it.
    Family(("mamba", "falcon_mamba"), issues=tuple(replace(issue, by_default=False) for issue in shared.MAMBA1)),
    Family(("jamba",), issues=shared.MAMBA1, missing=("sglang",)),
    # Found by labs/readers/sglang_loads.py: Llama4ForCausalLM of SGLang loads as Llama does, which has no experts. The
    # whole model's loader (mllama4.py) looks for them by these names.
    Family(("llama4",)),
    Family(
        ("llama4_text",),
        issues=(
            fails("sglang", r"re:(.*\.)?feed_forward\.experts\.", "experts of the text model of Llama 4 by itself",
                "SGLang leaves the experts of Llama 4's text model by itself random without a word (those of the "
                "whole model it looks for); vLLM reads them"),
        ),
    ),
    # Found by labs/readers/sglang_loads.py: models/gpt_oss.py of SGLang makes these layers without a quantization.
    Family(
        ("gpt_oss",),
        issues=(
            fails("sglang", r"re:(.*\.)?self_attn\.[qkvo]_proj$", "attention that SGLang builds unquantized",
                "SGLang builds the attention of gpt-oss unquantized: without a word it leaves these weights random "
                "or takes codes for numbers, or it stops; vLLM reads them"),
        ),
        interleaved=True,
    ),
    # Found by labs/readers/sglang_loads.py, as are those of Falcon-H1.
    Family(
        ("glm4_moe",),
        issues=(
            fails("sglang", r"re:(.*\.)?mlp\.shared_experts\.(gate|up)_proj$", "shared experts in packed codes",
                "SGLang asks for the dtype of the plain weight, which compressed-tensors' packed codes have not, and "
                "stops with an AttributeError; vLLM reads it, and SGLang ModelOpt's",
                containers=("compressed_tensors",), formats=shared.PACKED),
        ),
        mtp=shared.NUMBERED,
        norms=Norms(),
    ),
    Family(
        ("falcon_h1",),
        issues=(
            fails("sglang", r"re:(.*\.)?mamba\.(in|out)_proj$", "state-space layer that SGLang builds unquantized",
                "SGLang builds the state-space layers of Falcon-H1 unquantized and stops; vLLM reads them"),
        ),
        outputs=shared.mamba2(("mamba_d_ssm",), ("mamba_n_groups", "mamba_d_state"), "mamba_n_heads"),
    ),
    Family(
        ("step3p5", "step3p7", "step3_text", "step3_vl"),
        issues=(
            ReaderIssue(Keep(r"re:(.*\.)?self_attn\.g_proj$", "gate of attention heads"),
                symptom="SGLang builds it as a plain linear layer and finds no place for codes; vLLM reads it",
                readers=("sglang",)),
            ReaderIssue(Keep(r"re:(.*\.)?vit_large_projector(\.|$)", "multimodal projector"),
                symptom=common.READERS_DIFFER),
        ),
        experts=GATE_UP_DOWN,
    ),
    # vLLM leaves experts of other names (Mixtral's) out without a word.
    Family(
        ("granitemoe", "granitemoeshared"),
        issues=(shared.kept(r"re:(.*\.)?block_sparse_moe\.(in|out)put_linear$", "experts of Granite"),),
        experts=GATE_UP_DOWN,
        norms=Norms(),
    ),
    # Found by labs/readers/sglang_loads.py: load_weights of SGLang's granitemoehybrid.py.
    Family(
        ("granitemoehybrid",),
        issues=(
            fails("sglang", r"re:(.*\.)?block_sparse_moe\.", "experts of a Granite hybrid",
                "SGLang hands its experts an argument that they do not take, and stops; vLLM reads them"),
            fails("sglang", r"re:(.*\.)?layers\.", "Granite hybrid in ModelOpt's layout",
                "SGLang asks ModelOpt's configuration for names that it has none of, and stops; vLLM reads it",
                containers=("modelopt",)),
            # Found by labs/readers/vllm_fills.py, as is that of Zamba2.
            fails("vllm", r"re:(.*\.)?block_sparse_moe\.", "experts of a Granite hybrid with inputs in 4 bits",
                "vLLM has no name for the scales of their inputs in compressed-tensors, and stops with a KeyError; it "
                "reads ModelOpt's layout", containers=("compressed_tensors",), formats=("nvfp4_w4a4",)),
        ),
        experts=GATE_UP_DOWN,
        outputs=shared.mamba2(("mamba_n_heads", "mamba_d_head"), ("mamba_n_groups", "mamba_d_state"), "mamba_n_heads"),
    ),
    Family(
        ("zamba2",),
        issues=(
            fails("vllm", r"re:.*_adapter_list\.", "adapters of shared layers with static scales of inputs",
                "vLLM has no name for the scales of their inputs, and stops; it reads formats without them",
                formats=("nvfp4_w4a4", "fp8_static")),
        ),
        outputs=(
            *shared.mamba2(("mamba_expand", "hidden_size"), ("mamba_ngroups", "mamba_d_state"), "n_mamba_heads"),
            ModuleOutputs(r"(.*\.)?feed_forward\.gate_up_proj(_adapter_list\.\d+\.1)?$", (("intermediate_size",),) * 2),
        ),
        missing=("sglang",),
    ),
    Family(
        ("minimax_m3_vl", "minimax_m3"),
        issues=(
            ReaderIssue(Keep(r"re:(.*\.)?patch_merge_mlp(\.|$)", "multimodal projector"),
                symptom=common.READERS_DIFFER),
        ),
        fuse=shared.MINIMAX_M3,
    ),
    # The text model by itself, in transformers' layout.
    Family(("minimax_m3_vl_text",), fuse=shared.MINIMAX_M3, missing=("sglang",)),
    Family(("aya_vision", "exaone4_5"), missing=("sglang",)),
    Family(
        ("nemotron_h", "nemotron_h_omni"),
        issues=(
            ReaderIssue(Keep(r"re:(.*\.)?fc[12]_latent_proj$", "latent projection around the experts")),
            # SGLang looks for a gate, too, which these experts have not: in the list of what is kept it is not.
            shared.kept(r"re:(.*\.)?mixer\.experts\.", "experts of Nemotron-H", shared.CT),
        ),
        outputs=shared.mamba2(("mamba_num_heads", "mamba_head_dim"), ("n_groups", "ssm_state_size"), "mamba_num_heads"),
    ),
    Family(
        ("hunyuan_v1_moe",),
        issues=(
            ReaderIssue(Keep(r"re:(.*\.)?mlp\.gate\.wg$", "router")),
            shared.KEPT_LAYERS_CT,
            shared.HEAD_AS_CODES,
        ),
    ),
    Family(("internvl_chat",), issues=shared.INTERNVL),
    # Found by labs/readers/sglang_loads.py: SGLang has an InternVLChatModel alone.
    Family(
        ("internvl",),
        issues=(
            *shared.INTERNVL,
            fails("sglang", r"re:(.*\.)?language_model\.", "InternVL in transformers' layout",
                "SGLang leaves InternVL in transformers' layout to transformers' model, and stops or, in ModelOpt "
                "FP8, takes the head for codes without a word; vLLM reads it"),
        ),
    ),
    # Towers and projectors under names of their own.
    Family(
        ("hyperclovax_vision_v2", "lighton_ocr", "paddleocr_vl", "qianfan_ocr", "unlimited_ocr", "video_llava"),
        issues=(
            ReaderIssue(
                Keep(r"re:(.*\.)?(vision_projector|vision_projection|mlp_AR|mlp1|sam_model|image_tower|video_tower)(\.|$)",
                    "vision tower or projector"),
                symptom=common.READERS_DIFFER),
        ),
    ),
    Family(
        ("phi4_multimodal", "phi4mm"),
        issues=(
            ReaderIssue(
                Keep(r"re:(.*\.)?(img|image|audio)_(projection|proj)(_for_vision|_for_speech)?(\.|$)",
                    "multimodal projector"),
                symptom="vLLM builds it as plain linear layers and finds no place for codes", readers=("vllm",)),
            MERGED_BY_READERS,
        ),
    ),
)
# fmt: on
