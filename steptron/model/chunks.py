"""The model chunks that a rank holds: one, or several with an interleaved pipeline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from steptron.config.schema import PretrainConfig
from steptron.model.assembly import StepModel
from steptron.model.layer_spec import ModelSpec
from steptron.model.router import Router
from steptron.model.stages import chunks_of, stages_of
from steptron.model.transformer_config import StepConfig
from steptron.parallel.mesh import Mesh


class ModelChunks(Sequence[StepModel]):
    """The chunks of one rank, in the order in which a micro-batch meets them, and what they hold together.

    Logical names are unique over the chunks of a rank: layers keep their global index, and the two copies of the
    embedding lie on different ranks.
    """

    def __init__(self, chunks: Sequence[StepModel]) -> None:
        self._chunks = list(chunks)

    def __getitem__(self, index: int) -> StepModel:  # type: ignore[override]
        return self._chunks[index]

    def __len__(self) -> int:
        return len(self._chunks)

    @property
    def spec(self) -> ModelSpec:
        """The whole model."""
        return self._chunks[0].spec

    @property
    def embedding_is_copy(self) -> bool:
        """Whether this rank holds the embedding for MTP only; the first stage's counts."""
        return any(chunk.embedding_is_copy for chunk in self._chunks)

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Parameters by logical name."""
        for chunk in self._chunks:
            yield from chunk.named_parameters()

    def logical_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Parameters and buffers by logical name, as ``ModelSpec.parameters()`` names them."""
        for chunk in self._chunks:
            yield from chunk.logical_tensors()

    def routers(self) -> dict[int, Router]:
        """The routers of this rank, by layer index."""
        return {index: router for chunk in self._chunks for index, router in chunk.routers().items()}

    def train(self, mode: bool = True) -> None:
        """Sets training or evaluation mode."""
        for chunk in self._chunks:
            chunk.train(mode)


def build_chunks(config: PretrainConfig, spec: ModelSpec, engine: StepConfig, mesh: Mesh) -> ModelChunks:
    """Builds what this process holds of a model, on torch's default device; values are whatever memory held.

    Args:
        config: the layout, and what of the model is in training.
        spec: the whole model.
        engine: Megatron-Core's configuration.
        mesh: the process groups.
    """
    stages = stages_of(config.model, config.parallel)
    return ModelChunks(
        [
            StepModel(
                spec,
                stage,
                engine,
                mesh.groups,
                mtp_depths=config.loss.mtp_train_depths,
                freeze_router=config.balance.freeze_router,
                freeze_backbone=config.train.freeze_backbone,
                freeze_value_head=True,  # no loss of pre-training looks at values
            )
            for stage in chunks_of(stages, mesh.pipeline_rank, mesh.pipeline_size)
        ]
    )
