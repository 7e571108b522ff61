"""Parameter counts from the layer specs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from steptron.model.layer_spec import LayerSpec, ModelSpec, MoeFfnSpec, ParameterRole, ParameterSpec


@dataclass(frozen=True)
class ParameterCounts:
    """Exact counts, in parameters.

    The router's selection bias counts as the released checkpoint stores it: as a parameter, though
    it receives no gradient.

    Attributes:
        main: the main model, without MTP and value head.
        embedding: the embedding, part of ``main``.
        head: the main output matrix, part of ``main``.
        layers: each decoder layer, in order.
        active_layers: each decoder layer, of its experts only the selected ones counted.
        mtp: each MTP depth with its own norms, projection and, where it has one, head.
        active: of the main model, used by one token: embedding and head left out.
        value_head: a critic's output; 0 without one.
    """

    main: int
    embedding: int
    head: int
    layers: tuple[int, ...]
    active_layers: tuple[int, ...]
    mtp: tuple[int, ...]
    active: int
    value_head: int

    @property
    def active_with_head(self) -> int:
        return self.active + self.head

    @property
    def active_with_embedding_and_head(self) -> int:
        return self.active + self.head + self.embedding

    @property
    def total(self) -> int:
        """Main model, every MTP depth and the value head."""
        return self.main + sum(self.mtp) + self.value_head


def count_parameters(spec: ModelSpec) -> ParameterCounts:
    """Counts the parameters of a model."""
    layers = tuple(_size(layer.parameters()) for layer in spec.layers)
    active_layers = tuple(_active_size(layer) for layer in spec.layers)
    main = spec.main_parameters()
    embedding = _size(parameter for parameter in main if parameter.role is ParameterRole.EMBEDDING)
    head = _size(parameter for parameter in main if parameter.role is ParameterRole.HEAD)
    total = _size(main)
    return ParameterCounts(
        main=total,
        embedding=embedding,
        head=head,
        layers=layers,
        active_layers=active_layers,
        mtp=tuple(_size(depth.parameters()) for depth in spec.mtp),
        active=total - embedding - head - sum(layers) + sum(active_layers),
        value_head=_size(spec.value_head_parameters()),
    )


def _active_size(layer: LayerSpec) -> int:
    total = 0
    for parameter in layer.parameters():
        if parameter.is_expert and isinstance(layer.ffn, MoeFfnSpec):
            total += parameter.size // layer.ffn.num_experts * layer.ffn.top_k
        else:
            total += parameter.size
    return total


def _size(parameters: Iterable[ParameterSpec]) -> int:
    return sum(parameter.size for parameter in parameters)
