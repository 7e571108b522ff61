"""LayerSpec: the single truth about a layer, as plain data.

Computed once from the model configuration. The model, the FLOPs and memory planner, the optimizer's
split into logical matrices, the checkpoint names and telemetry all read it; none re-derives it.
No torch here: specs can be read anywhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from steptron.config.layout import AttentionKind, parse_layout
from steptron.config.recompute import NamedLayer, recomputed_parts
from steptron.config.schema import AttentionConfig, ModelConfig, PretrainConfig, RecomputePart, RecomputeRuleConfig


class LayerRole(StrEnum):
    DECODER = "decoder"
    MTP = "mtp"


class ParameterRole(StrEnum):
    """What a parameter is for; optimizers, initialisation and telemetry choose by it."""

    EMBEDDING = "embedding"
    HEAD = "head"
    NORM = "norm"
    SINK = "sink"
    QUERY = "query"
    KEY = "key"
    VALUE = "value"
    HEAD_GATE = "head_gate"
    ATTENTION_OUTPUT = "attention_output"
    FFN_GATE = "ffn_gate"
    FFN_UP = "ffn_up"
    FFN_DOWN = "ffn_down"
    ROUTER = "router"
    ROUTER_BIAS = "router_bias"
    EXPERT_GATE = "expert_gate"
    EXPERT_UP = "expert_up"
    EXPERT_DOWN = "expert_down"
    SHARED_GATE = "shared_gate"
    SHARED_UP = "shared_up"
    SHARED_DOWN = "shared_down"
    MTP_PROJECTION = "mtp_projection"
    VALUE_HEAD = "value_head"


RESIDUAL_WRITERS = frozenset(
    {ParameterRole.ATTENTION_OUTPUT, ParameterRole.FFN_DOWN, ParameterRole.EXPERT_DOWN, ParameterRole.SHARED_DOWN}
)
EXPERT_ROLES = frozenset({ParameterRole.EXPERT_GATE, ParameterRole.EXPERT_UP, ParameterRole.EXPERT_DOWN})


@dataclass(frozen=True)
class LogicalMatrix:
    """A matrix (or vector) that the mathematics knows, inside a stored parameter.

    ``rows`` is its slice of the stored parameter's row axis: axis 0, or axis 1 of stacked experts
    (whose axis 0 counts experts). ``name`` is the checkpoint name.
    """

    name: str
    role: ParameterRole
    rows: tuple[int, int]


@dataclass(frozen=True)
class ParameterSpec:
    """A stored parameter of the whole model (not of one rank): name, full shape, logical parts."""

    name: str
    shape: tuple[int, ...]
    matrices: tuple[LogicalMatrix, ...]

    @property
    def role(self) -> ParameterRole:
        """The role of a parameter that holds one logical matrix; of the first one otherwise."""
        return self.matrices[0].role

    @property
    def is_expert(self) -> bool:
        return self.role in EXPERT_ROLES

    def matrix_shape(self, matrix: LogicalMatrix) -> tuple[int, ...]:
        """Shape of one of its logical matrices; of an expert's, of the stack of all experts."""
        rows = matrix.rows[1] - matrix.rows[0]
        if self.is_expert:
            experts, _, columns = self.shape
            return (experts, rows, columns)
        return (rows, *self.shape[1:])

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class RopeScaling:
    """llama3 frequency scaling; ``original_length`` in tokens."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_length: int


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding over the first ``rotary_dim`` dimensions of a head."""

    theta: float
    rotary_dim: int
    scaling: RopeScaling | None


@dataclass(frozen=True)
class AttentionSpec:
    kind: AttentionKind
    num_heads: int
    num_kv_groups: int
    head_dim: int
    window: int | None
    """Visible keys, the token itself included; None means all."""
    rope: RopeSpec
    gate: bool
    sink: bool

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_groups * self.head_dim


@dataclass(frozen=True)
class DenseFfnSpec:
    hidden_size: int
    clamp: float | None
    clamp_after_silu: bool


@dataclass(frozen=True)
class MoeFfnSpec:
    num_experts: int
    top_k: int
    scaling_factor: float
    expert_hidden_size: int
    expert_clamp: float | None
    shared: DenseFfnSpec
    clamp_after_silu: bool


@dataclass(frozen=True)
class LayerSpec:
    """One transformer layer. ``index`` counts decoder layers, or MTP depths, from 0."""

    index: int
    role: LayerRole
    hidden_size: int
    norm_eps: float
    attention: AttentionSpec
    ffn: DenseFfnSpec | MoeFfnSpec
    recompute: frozenset[RecomputePart] = frozenset()
    """What is computed again in the backward pass; never a part that lies inside another one of the set."""

    @property
    def named(self) -> NamedLayer:
        """What rules of ``train.recompute`` can name the layer by."""
        number = self.index if self.role is LayerRole.DECODER else None
        return NamedLayer(number, self.attention.kind, isinstance(self.ffn, MoeFfnSpec))

    @property
    def prefix(self) -> str:
        """Prefix of the layer's parameter names."""
        return f"layers.{self.index}" if self.role is LayerRole.DECODER else f"mtp.{self.index}.layer"

    def parameters(self) -> list[ParameterSpec]:
        """Every parameter of the layer, in module order."""
        return [
            _vector(f"{self.prefix}.attention_norm.weight", self.hidden_size, ParameterRole.NORM),
            *_attention_parameters(f"{self.prefix}.attention", self.attention, self.hidden_size),
            _vector(f"{self.prefix}.ffn_norm.weight", self.hidden_size, ParameterRole.NORM),
            *_ffn_parameters(f"{self.prefix}.ffn", self.ffn, self.hidden_size),
        ]


@dataclass(frozen=True)
class MtpSpec:
    """One MTP depth: norms of both inputs, their projection, a layer, its own norm and head."""

    layer: LayerSpec
    vocab_size: int
    pre_norm_chain: bool
    own_head: bool

    @property
    def prefix(self) -> str:
        return f"mtp.{self.layer.index}"

    def parameters(self) -> list[ParameterSpec]:
        """Every parameter of the depth, in module order."""
        hidden = self.layer.hidden_size
        parameters = [
            _vector(f"{self.prefix}.embedding_norm.weight", hidden, ParameterRole.NORM),
            _vector(f"{self.prefix}.hidden_norm.weight", hidden, ParameterRole.NORM),
            _matrix(f"{self.prefix}.projection.weight", hidden, 2 * hidden, ParameterRole.MTP_PROJECTION),
            *self.layer.parameters(),
            _vector(f"{self.prefix}.final_norm.weight", hidden, ParameterRole.NORM),
        ]
        if self.own_head:
            parameters.append(_matrix(f"{self.prefix}.head.weight", self.vocab_size, hidden, ParameterRole.HEAD))
        return parameters


@dataclass(frozen=True)
class ModelSpec:
    """The whole model: decoder layers and MTP depths between an embedding and a head, beside which a critic has a value
    head."""

    vocab_size: int
    hidden_size: int
    norm_eps: float
    layers: tuple[LayerSpec, ...]
    mtp: tuple[MtpSpec, ...]
    value_head: bool = False

    def main_parameters(self) -> list[ParameterSpec]:
        """Every parameter of the main model (without MTP and value head), in module order."""
        return [
            _matrix("embedding.weight", self.vocab_size, self.hidden_size, ParameterRole.EMBEDDING),
            *(parameter for layer in self.layers for parameter in layer.parameters()),
            _vector("final_norm.weight", self.hidden_size, ParameterRole.NORM),
            _matrix("head.weight", self.vocab_size, self.hidden_size, ParameterRole.HEAD),
        ]

    def value_head_parameters(self) -> list[ParameterSpec]:
        """The value head's, where the model has one."""
        return [_matrix("value_head.weight", 1, self.hidden_size, ParameterRole.VALUE_HEAD)] if self.value_head else []

    def parameters(self) -> list[ParameterSpec]:
        """Every parameter of the model, MTP and value head included, in module order."""
        mtp = [parameter for depth in self.mtp for parameter in depth.parameters()]
        return self.main_parameters() + mtp + self.value_head_parameters()

    def trained_parameters(
        self, mtp_depths: int, freeze_router: bool, freeze_backbone: bool = False
    ) -> list[ParameterSpec]:
        """Those that get gradients in pre-training, in module order, when so many MTP depths run: no selection biases,
        no router that is frozen, and no value head, of which the loss knows nothing; only the MTP depths' where all
        else, the embedding that they share included, is frozen."""
        untrained = {ParameterRole.ROUTER_BIAS} | ({ParameterRole.ROUTER} if freeze_router else set())
        running = [parameter for depth in self.mtp[:mtp_depths] for parameter in depth.parameters()]
        candidates = running if freeze_backbone else self.main_parameters() + running
        return [parameter for parameter in candidates if parameter.role not in untrained]

    @property
    def moe_layers(self) -> tuple[LayerSpec, ...]:
        return tuple(layer for layer in self.layers if isinstance(layer.ffn, MoeFfnSpec))


def trained_parameters(config: PretrainConfig) -> list[ParameterSpec]:
    """Those that get gradients in a run, in module order."""
    return model_spec(config.model).trained_parameters(
        config.loss.mtp_train_depths, config.balance.freeze_router, config.train.freeze_backbone
    )


def model_spec(config: ModelConfig, recompute: Sequence[RecomputeRuleConfig] = ()) -> ModelSpec:
    """Computes the specs of every layer and MTP depth.

    Args:
        config: the architecture.
        recompute: rules that say what layers compute again in the backward pass.

    Raises:
        ValueError: the layout string or a rule's layers cannot be read, or heads do not divide by groups.
    """
    pattern, options = parse_layout(config.layout)
    layers = []
    for index in range(config.num_layers):
        kind = AttentionKind.FULL if index == 0 else pattern[(index - 1) % len(pattern)]
        ffn: DenseFfnSpec | MoeFfnSpec
        if index < config.num_dense_layers:
            ffn = _dense_ffn(config, index)
        else:
            ffn = _moe_ffn(config, index)
        layers.append(_layer(config, index, LayerRole.DECODER, kind, options, ffn, recompute))
    mtp = tuple(
        MtpSpec(
            layer=_layer(
                config, depth, LayerRole.MTP, AttentionKind.SLIDING, options, _dense_ffn(config, None), recompute
            ),
            vocab_size=config.vocab_size,
            pre_norm_chain=config.mtp.chain == "pre_norm",
            own_head=config.mtp.head == "own",
        )
        for depth in range(config.mtp.depths)
    )
    return ModelSpec(config.vocab_size, config.hidden_size, config.norm_eps, tuple(layers), mtp, config.value_head)


def _layer(
    config: ModelConfig,
    index: int,
    role: LayerRole,
    kind: AttentionKind,
    options: frozenset[str],
    ffn: DenseFfnSpec | MoeFfnSpec,
    recompute: Sequence[RecomputeRuleConfig],
) -> LayerSpec:
    sliding = kind is AttentionKind.SLIDING
    shape: AttentionConfig = config.sliding if sliding else config.full
    num_heads = shape.num_heads if "heads" in options else config.full.num_heads
    rotary_dim = round(shape.rope.rotary_fraction * config.head_dim)
    if rotary_dim % 2 or rotary_dim == 0:
        raise ValueError(
            f"model.{kind.value}.rope.rotary_fraction x model.head_dim gives {rotary_dim} rotated dimensions; "
            "the number must be even and positive"
        )
    if num_heads % shape.num_kv_groups:
        raise ValueError(
            f"model.{kind.value}.num_heads ({num_heads}) must be a multiple of "
            f"model.{kind.value}.num_kv_groups ({shape.num_kv_groups})"
        )
    scaling = shape.rope.scaling
    attention = AttentionSpec(
        kind=kind,
        num_heads=num_heads,
        num_kv_groups=shape.num_kv_groups,
        head_dim=config.head_dim,
        window=config.sliding.window if sliding else None,
        rope=RopeSpec(
            theta=shape.rope.theta,
            rotary_dim=rotary_dim,
            scaling=RopeScaling(**scaling.model_dump()) if scaling else None,
        ),
        gate="gate" in options,
        sink="sink" in options,
    )
    layer = LayerSpec(index, role, config.hidden_size, config.norm_eps, attention, ffn)
    return replace(layer, recompute=recomputed_parts(recompute, layer.named))


def _dense_ffn(config: ModelConfig, index: int | None) -> DenseFfnSpec:
    clamp = config.clamp.shared.get(index) if index is not None else None
    return DenseFfnSpec(config.dense_hidden_size, clamp, config.clamp.position == "after_silu")


def _moe_ffn(config: ModelConfig, index: int) -> MoeFfnSpec:
    after_silu = config.clamp.position == "after_silu"
    return MoeFfnSpec(
        num_experts=config.moe.num_experts,
        top_k=config.moe.top_k,
        scaling_factor=config.moe.scaling_factor,
        expert_hidden_size=config.moe.expert_hidden_size,
        expert_clamp=config.clamp.routed.get(index),
        shared=DenseFfnSpec(config.moe.shared_hidden_size, config.clamp.shared.get(index), after_silu),
        clamp_after_silu=after_silu,
    )


def _vector(name: str, size: int, role: ParameterRole) -> ParameterSpec:
    return ParameterSpec(name, (size,), (LogicalMatrix(name, role, (0, size)),))


def _matrix(name: str, rows: int, columns: int, role: ParameterRole) -> ParameterSpec:
    return ParameterSpec(name, (rows, columns), (LogicalMatrix(name, role, (0, rows)),))


def _fused(
    name: str, parts: list[tuple[str, int, ParameterRole]], columns: int, experts: int | None = None
) -> ParameterSpec:
    """A parameter that stores several logical matrices one above the other."""
    matrices, row = [], 0
    for part, rows, role in parts:
        matrices.append(LogicalMatrix(part, role, (row, row + rows)))
        row += rows
    shape = (row, columns) if experts is None else (experts, row, columns)
    return ParameterSpec(name, shape, tuple(matrices))


def _attention_parameters(prefix: str, spec: AttentionSpec, hidden: int) -> list[ParameterSpec]:
    projections = [
        (f"{prefix}.query.weight", spec.query_size, ParameterRole.QUERY),
        (f"{prefix}.key.weight", spec.kv_size, ParameterRole.KEY),
        (f"{prefix}.value.weight", spec.kv_size, ParameterRole.VALUE),
    ]
    if spec.gate:
        projections.append((f"{prefix}.gate.weight", spec.num_heads, ParameterRole.HEAD_GATE))
    parameters = [
        _fused(f"{prefix}.input_projection.weight", projections, hidden),
        _vector(f"{prefix}.query_norm.weight", spec.head_dim, ParameterRole.NORM),
        _vector(f"{prefix}.key_norm.weight", spec.head_dim, ParameterRole.NORM),
        _matrix(f"{prefix}.output_projection.weight", hidden, spec.query_size, ParameterRole.ATTENTION_OUTPUT),
    ]
    if spec.sink:
        parameters.append(_vector(f"{prefix}.sink", spec.num_heads, ParameterRole.SINK))
    return parameters


def _ffn_parameters(prefix: str, spec: DenseFfnSpec | MoeFfnSpec, hidden: int) -> list[ParameterSpec]:
    if isinstance(spec, DenseFfnSpec):
        roles = (ParameterRole.FFN_GATE, ParameterRole.FFN_UP, ParameterRole.FFN_DOWN)
        return _glu_parameters(prefix, spec.hidden_size, hidden, roles)
    shared_roles = (ParameterRole.SHARED_GATE, ParameterRole.SHARED_UP, ParameterRole.SHARED_DOWN)
    expert_roles = (ParameterRole.EXPERT_GATE, ParameterRole.EXPERT_UP, ParameterRole.EXPERT_DOWN)
    return [
        _matrix(f"{prefix}.router.weight", spec.num_experts, hidden, ParameterRole.ROUTER),
        _vector(f"{prefix}.router.bias", spec.num_experts, ParameterRole.ROUTER_BIAS),
        *_glu_parameters(f"{prefix}.experts", spec.expert_hidden_size, hidden, expert_roles, spec.num_experts),
        *_glu_parameters(f"{prefix}.shared", spec.shared.hidden_size, hidden, shared_roles),
    ]


def _glu_parameters(
    prefix: str,
    width: int,
    hidden: int,
    roles: tuple[ParameterRole, ParameterRole, ParameterRole],
    experts: int | None = None,
) -> list[ParameterSpec]:
    gate, up, down = roles
    suffix = "" if experts is not None else ".weight"
    return [
        _fused(
            f"{prefix}.gate_up_projection{suffix}",
            [(f"{prefix}.gate.weight", width, gate), (f"{prefix}.up.weight", width, up)],
            hidden,
            experts,
        ),
        _fused(f"{prefix}.down_projection{suffix}", [(f"{prefix}.down.weight", hidden, down)], width, experts),
    ]
