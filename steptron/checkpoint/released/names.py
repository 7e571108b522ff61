"""The released checkpoint's tensors: their names, shapes and dtypes, and the logical matrices that they hold.

One released tensor is one logical matrix; experts of a layer are stacked in both. The MTP depths count on from the
last decoder layer: depth k of a model of n layers is ``model.layers.<n + k>``. No torch here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from steptron.errors import UserError
from steptron.model.layer_spec import LayerSpec, LogicalMatrix, ModelSpec, MtpSpec, ParameterRole, ParameterSpec

Precision = Literal["fp32", "bf16"]

ELEMENT_BYTES = {"fp32": 4, "bf16": 2}

_LAYER = {
    "attention_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "attention.query.weight": "self_attn.q_proj.weight",
    "attention.key.weight": "self_attn.k_proj.weight",
    "attention.value.weight": "self_attn.v_proj.weight",
    "attention.gate.weight": "self_attn.g_proj.weight",
    "attention.query_norm.weight": "self_attn.q_norm.weight",
    "attention.key_norm.weight": "self_attn.k_norm.weight",
    "attention.output_projection.weight": "self_attn.o_proj.weight",
    "ffn.gate.weight": "mlp.gate_proj.weight",
    "ffn.up.weight": "mlp.up_proj.weight",
    "ffn.down.weight": "mlp.down_proj.weight",
    "ffn.router.weight": "moe.gate.weight",
    "ffn.router.bias": "moe.router_bias",
    "ffn.experts.gate.weight": "moe.gate_proj.weight",
    "ffn.experts.up.weight": "moe.up_proj.weight",
    "ffn.experts.down.weight": "moe.down_proj.weight",
    # The shared expert lies beside the routed ones, not among them.
    "ffn.shared.gate.weight": "share_expert.gate_proj.weight",
    "ffn.shared.up.weight": "share_expert.up_proj.weight",
    "ffn.shared.down.weight": "share_expert.down_proj.weight",
}
_MTP = {
    "embedding_norm.weight": "enorm.weight",
    "hidden_norm.weight": "hnorm.weight",
    "projection.weight": "eh_proj.weight",
    "final_norm.weight": "transformer.shared_head.norm.weight",
    "head.weight": "transformer.shared_head.output.weight",
}
_MODEL = {
    "embedding.weight": "model.embed_tokens.weight",
    "final_norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}


@dataclass(frozen=True)
class ReleasedTensor:
    """A tensor of the released layout.

    Attributes:
        name: its released name.
        matrix: the logical matrix that it holds.
        parameter: the stored parameter of which that matrix is a part.
    """

    name: str
    matrix: LogicalMatrix
    parameter: ParameterSpec

    @property
    def shape(self) -> tuple[int, ...]:
        return self.parameter.matrix_shape(self.matrix)

    def precision(self, of_model: Precision) -> Precision:
        """The tensor's own in a model of this precision: the router's selection bias is always fp32."""
        return "fp32" if self.matrix.role is ParameterRole.ROUTER_BIAS else of_model

    def num_bytes(self, of_model: Precision) -> int:
        return math.prod(self.shape) * ELEMENT_BYTES[self.precision(of_model)]


def released_tensors(spec: ModelSpec) -> list[ReleasedTensor]:
    """Every tensor of a model in the released layout, in the model's order.

    The released layout has an output matrix for every MTP depth. Where the depths share the main one
    (``model.mtp.head: shared``), each of theirs is that matrix once more.

    Raises:
        UserError: a parameter has no released name (attention sinks, a value head); the message names it.
    """
    if spec.value_head:
        raise UserError("value_head.weight has no place in the released layout")
    main = [
        _tensor(parameter, matrix, _MODEL[matrix.name])
        for parameter in spec.main_parameters()
        for matrix in parameter.matrices
        if matrix.name in _MODEL
    ]
    embedding, *last = main
    tensors = [embedding]
    for layer in spec.layers:
        tensors += _layer_tensors(layer, f"model.layers.{layer.index}")
    tensors += last
    for depth in spec.mtp:
        tensors += _depth_tensors(depth, f"model.layers.{len(spec.layers) + depth.layer.index}", last[-1])
    return tensors


def _depth_tensors(depth: MtpSpec, prefix: str, main_head: ReleasedTensor) -> list[ReleasedTensor]:
    tensors = _layer_tensors(depth.layer, prefix)
    for parameter in depth.parameters():
        name = parameter.name.removeprefix(f"{depth.prefix}.")
        if name in _MTP:
            tensors.append(_tensor(parameter, parameter.matrices[0], f"{prefix}.{_MTP[name]}"))
    if not depth.own_head:
        tensors.append(_tensor(main_head.parameter, main_head.matrix, f"{prefix}.{_MTP['head.weight']}"))
    return tensors


def _layer_tensors(layer: LayerSpec, prefix: str) -> list[ReleasedTensor]:
    tensors = []
    for parameter in layer.parameters():
        for matrix in parameter.matrices:
            name = matrix.name.removeprefix(f"{layer.prefix}.")
            if name not in _LAYER:
                raise UserError(f"{matrix.name} has no place in the released layout")
            tensors.append(_tensor(parameter, matrix, f"{prefix}.{_LAYER[name]}"))
    return tensors


def _tensor(parameter: ParameterSpec, matrix: LogicalMatrix, name: str) -> ReleasedTensor:
    return ReleasedTensor(name, matrix, parameter)
