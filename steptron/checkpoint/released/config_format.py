"""The vocabulary of the release's config.json: its keys, names of kinds and dtypes, values without an alternative."""

from __future__ import annotations

from steptron.checkpoint.released.names import Precision
from steptron.config.layout import AttentionKind

DEFAULT_NORM_EPS = 1e-5
"""Epsilon of the norms where the file has no ``rms_norm_eps``: the default of the release's configuration class."""

KINDS = {"full_attention": AttentionKind.FULL, "sliding_attention": AttentionKind.SLIDING}
KIND_NAMES = {kind: name for name, kind in KINDS.items()}
DTYPES: dict[str, Precision] = {"bfloat16": "bf16", "float32": "fp32"}
DTYPE_NAMES = {precision: name for name, precision in DTYPES.items()}
SCALING_KEYS = ("rope_type", "factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
OTHER_ATTENTION_KEYS = (
    "attention_type",
    "num_attention_heads",
    "num_attention_groups",
    "head_dim",
    "true_head_dim",
)

# Keys with one value that this project computes, and why another one is refused.
ONLY: dict[str, tuple[object, str]] = {
    "model_type": ("step3p5", "other models are not supported"),
    "att_impl_type": ("GQA", "grouped queries are the only kind of attention here"),
    "use_qk_norm": (True, "queries and keys are always normalised"),
    "zero_centered": (True, "norms multiply by 1 + weight"),
    "sink": (False, "the release has no tensors for attention sinks"),
    "tie_word_embeddings": (False, "the output matrix is always its own"),
    "norm_expert_weight": (True, "routing weights are always renormalised"),
    "moe_router_activation": ("sigmoid", "other routing scores are not supported"),
    "use_moe_router_bias": (True, "experts are always selected with a bias"),
    "need_fp32_gate": (True, "routing scores are always computed in fp32"),
}
# The same for keys that the release does not have.
ONLY_IF_PRESENT: dict[str, tuple[object, str]] = {
    "hidden_act": ("silu", "feed-forward layers are SwiGLU"),
    "attention_bias": (False, "no projection has a bias"),
    "mlp_bias": (False, "no projection has a bias"),
    "quantization_config": (None, "quantised weights are not supported"),
}

# Keys of the release that change nothing in the forward pass.
OUTSIDE_THE_MODEL = (
    "architectures",
    "auto_map",
    "bos_token_id",
    "eos_token_id",
    "max_position_embeddings",
    "max_seq_len",
)
# What is written where there is no file to take it from.
NO_BASE: dict[str, object] = {
    "architectures": ["Step3p5ForCausalLM"],
    "bos_token_id": None,
    "eos_token_id": None,
    "yarn_only_types": [],
}
# Keys of transformers' PretrainedConfig that change nothing in the forward pass either: names of classes and labels,
# the form of outputs, initial values and generation.
GENERIC = (
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_name_or_path",
    "chunk_size_feed_forward",
    "do_sample",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "id2label",
    "initializer_range",
    "label2id",
    "max_length",
    "max_new_tokens",
    "name_or_path",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "pad_token_id",
    "problem_type",
    "repetition_penalty",
    "return_dict",
    "sep_token_id",
    "temperature",
    "tokenizer_class",
    "top_k",
    "top_p",
    "torchscript",
    "transformers_version",
    "use_cache",
)
READ = (
    "attention_dropout",
    "attention_other_setting",
    "head_dim",
    "hidden_size",
    "intermediate_size",
    "layer_types",
    "moe_every_n_layer",
    "moe_intermediate_size",
    "moe_layer_offset",
    "moe_layers_enum",
    "moe_num_experts",
    "moe_router_scaling_factor",
    "moe_top_k",
    "num_attention_groups",
    "num_attention_heads",
    "num_hidden_layers",
    "num_nextn_predict_layers",
    "partial_rotary_factors",
    "rms_norm_eps",
    "rope_scaling",
    "rope_theta",
    "share_expert_dim",
    "sliding_window",
    "swiglu_limits",
    "swiglu_limits_shared",
    "torch_dtype",
    "use_head_wise_attn_gate",
    "use_moe",
    "use_rope_layers",
    "vocab_size",
    "yarn_only_types",
)
KNOWN = frozenset({*READ, *ONLY, *ONLY_IF_PRESENT, *OUTSIDE_THE_MODEL, *GENERIC})
