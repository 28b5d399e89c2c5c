"""What holds for every model, whatever its family: what is not quantized and why, and what readers make one matrix of.

What readers do is their own source, of the versions in ``models/reader_facts.py``.
"""

from ptqpipe.models.families.family import Keep, ReaderIssue, fails

_UNQUANTIZED = (
    "vLLM, SGLang and TensorRT-LLM build it unquantized and cannot load the model: vLLM stops with a KeyError, the "
    "others with an error of its shape"
)

READERS_DIFFER = (
    "whether readers take it quantized differs between families and readers; load the result in yours before it is "
    "published"
)

GATES = "gates of a linear-attention layer, a few rows each"

# Poolers, projections and heads of any name: each is a small part of the weights and decides over the whole output. It
# holds where layers have numbers.
OUTSIDE = Keep(r"re:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$", "outside of the layers")

# fmt: off
COMMON: tuple[ReaderIssue, ...] = (
    # An MTP layer that is numbered like a decoder layer: DeepSeek-V3 to V3.2, GLM-4.5 to GLM-5. SGLang builds it
    # unquantized beside ModelOpt's NVFP4 (models/deepseek_nextn.py).
    ReaderIssue(Keep(r"re:(.*\.)?layers\.({layers})\.", "multi-token prediction layer"),
        counted_by="num_nextn_predict_layers", symptom="SGLang builds it unquantized beside NVFP4 and cannot load it; "
        "vLLM reads it", readers=("sglang",), containers=("modelopt",), mtp=True),
    # nn.Linear in vLLM's deepseek_mtp.py and glm4_moe_mtp.py, SGLang's deepseek_nextn.py and glm4_moe_nextn.py. Those
    # of families whose MTP layers are not numbered like decoder layers do take codes (Nemotron-H).
    ReaderIssue(
        Keep(r"re:((language_)?model\.)*layers\.\d+\.eh_proj$", "projection into the multi-token prediction layer"),
        symptom="vLLM and SGLang build it as a plain linear layer: they stop with a KeyError, or draft with random "
        "weights or with codes for numbers; the model without its speculative decoding loads",
        readers=("vllm", "sglang")),
    # DeepSeek's sparse attention (DeepSeek-V3.2, GLM-5). Readers make one bfloat16 matrix of wk and weights_proj; wk in
    # DeepSeek's own FP8 layout is decoded first.
    ReaderIssue(Keep(r"re:(.*\.)?indexer\.wk$", "key projection of the sparse-attention indexer"), symptom=_UNQUANTIZED,
        readers=("vllm", "sglang", "trtllm"), containers=("compressed_tensors", "modelopt", "mxfp8_hf", "quark")),
    ReaderIssue(Keep(r"re:(.*\.)?indexer\.weights_proj$", "head weights of the sparse-attention indexer"),
        symptom=_UNQUANTIZED, readers=("vllm", "sglang", "trtllm")),
    # Multi-head latent attention (DeepSeek, Kimi, GLM-5): absorbed into queries and outputs when a model is loaded.
    ReaderIssue(
        Keep(r"re:(.*\.)?kv_b_proj$", "readers take it apart when they load it and need at least 8 bits", bits=8),
        symptom="SGLang and TensorRT-LLM take it apart without decoding it when they load the model: SGLang computes "
        "with the packed bytes, TensorRT-LLM stops with an error of its shape; vLLM reads it",
        readers=("sglang", "trtllm")),
    # Found by labs/readers/sglang_loads.py: post_load_weights of SGLang's deepseek_weight_loader.py and kimi_linear.py.
    fails("sglang", r"re:(.*\.)?kv_b_proj$", "readers take it apart when they load it, and look for no packed INT8",
        "SGLang asks for the plain weight, which compressed-tensors' packed codes have not, and stops with an "
        "AttributeError; vLLM reads it", containers=("compressed_tensors",), formats=("int8",)),
    # Their error is the most expensive (heads, embeddings, routers decide discretely), or readers do not look for
    # quantized weights there (towers, MTP heads).
    ReaderIssue(Keep(r"re:(.*\.)?(lm_head|output_head|embed_out)$", "language-model head"),
        symptom="vLLM builds the head of DeepSeek-V4, gpt-oss, Qwen3-Next and Step3 unquantized, SGLang that of "
        "gpt-oss and MiniMax-M2, and neither loads it there; SGLang takes other heads in compressed-tensors only "
        "where a target names them"),
    ReaderIssue(Keep(r"re:.*(embed|\bwte\b|\bwpe\b|shared_head)", "embedding"),
        symptom="readers look up the rows of an embedding as plain numbers and do not find them among the codes",
        readers=("vllm", "sglang", "trtllm")),
    ReaderIssue(Keep(r"re:(.*\.)?shared$", "embedding")),  # of T5, BART and their kin
    ReaderIssue(Keep(r"re:.*((\.|_)position|rel_pos|relative_)", "table of positions")),
    ReaderIssue(Keep(r"re:.*norm\d*(\.(scale|shift))?$", "norm")),
    ReaderIssue(Keep(r"re:.*(\.|_)(gate|router|shared_expert_gate|e_score_correction)$", "router")),
    ReaderIssue(Keep(r"re:.*router[a-z_]*(\.|$)", "router")),
    ReaderIssue(
        Keep(r"re:(.*\.)?(visual|vision_tower|vision_model|vision_encoder|image_newline|vision_embed_tokens)(\.|$)",
            "vision tower"),
        symptom=READERS_DIFFER),
    ReaderIssue(
        Keep(r"re:(.*\.)?(audio_tower|audio_model|audio_encoder|speech_encoder|talker|token2wav|code2wav)(\.|$)",
            "audio tower"),
        symptom=READERS_DIFFER),
    ReaderIssue(
        Keep(r"re:(.*\.)?(multi_modal_projector|mm_projector|connector|aligner|merger|projector)(\.|$)",
            "multimodal projector"),
        symptom=READERS_DIFFER),
    ReaderIssue(Keep(r"re:(.*\.)?mtp(\.|_|$)", "multi-token-prediction head"), symptom=READERS_DIFFER, mtp=True),
    ReaderIssue(Keep(r"re:.*conv1d$", "short convolution")),
    # Readers make one matrix of the two, of 32 to 64 rows; NVIDIA and llm-compressor leave them in bfloat16.
    ReaderIssue(Keep(r"re:(.*\.)?linear_attn\.(in_proj_(a|b|ba)|[ab]_proj)$", GATES)),
    # Of classification, rewards, questions and detection: a few rows each, and readers build them as they like (vLLM's
    # ``score`` plain).
    ReaderIssue(
        Keep(r"re:(.*\.)?([a-z_]*_)?(head|heads|classifier|class_predictor|score|scores|qa_outputs|pooler|predictions"
            r"|seq_relationship)(\.|$)", "head of a task")),
    # GatedResidual of vLLM's models/qwen4_exp/nvidia/hyperconnection.py.
    ReaderIssue(Keep(r"re:(.*\.)?([a-z_]*_)?hyper_connection(_[a-z_]*)?(\.|$)", "hyper-connection"),
        symptom="vLLM builds it unquantized and finds no place for codes", readers=("vllm",)),
    ReaderIssue(OUTSIDE),
)
# fmt: on

# vLLM's FusedMoE and SGLang's have one quantization method. For compressed-tensors it is that of the first expert's
# gate, up and down projections, which must agree (get_moe_method of both); a list of modules that are not quantized
# leaves a layer's experts out together (is_layer_skipped of vLLM's utils/quant_utils.py).
UNLIKE_EXPERTS = ReaderIssue(
    Keep(r"re:(.*\.)?experts\.", "experts of one layer in different formats"),
    symptom=(
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
