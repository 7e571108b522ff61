"""Runs token ids through a model under any layout, forward only, with Megatron-Core's schedules.

One row is one micro-batch, as one document. Data-parallel ranks share the rows; each runs equally many, because the
experts' dispatch is a collective of all of them, so rows of zeros are added that nothing is read from.

Rows are padded on the right with token id 0 to a length that context- and tensor-parallel ranks share evenly. That
changes no token's value: attention is causal, routing is by token and drops none, and where an MTP depth looks past
the end of the row it sees the embedding of token id 0, which is just what stands in the padding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func

from steptron.checkpoint.weights import Weights, refuse_damaged
from steptron.config.schema import PretrainConfig
from steptron.data.batch import MicroBatch
from steptron.inspection.cursor import Cursor
from steptron.model.assembly import StepModel
from steptron.model.chunks import ModelChunks, build_chunks
from steptron.model.kernels import choose_kernels
from steptron.model.layer_spec import model_spec
from steptron.model.transformer_config import DTYPES, transformer_config
from steptron.parallel.mesh import Mesh, build_mesh

OnLogits = Callable[[torch.Tensor, torch.Tensor], None]
"""Called with the main logits [1, T, V] and those of the MTP depths [depths, 1, T, V] of a context-parallel share."""


@dataclass(frozen=True)
class LoadedModel:
    """What this process holds of a model, with its weights.

    Attributes:
        config: the whole configuration.
        chunks: the model chunks.
        mesh: the process groups.
        device: where parameters live.
    """

    config: PretrainConfig
    chunks: ModelChunks
    mesh: Mesh
    device: torch.device

    def padded(self, length: int) -> int:
        """The shortest length of rows from this one on that the layout can share."""
        context, tensor = self.mesh.context_size, self.mesh.tensor_size
        unit = math.lcm(2 * context if context > 1 else 1, context * tensor)
        return -(-length // unit) * unit


def load_model(weights: Weights, config: PretrainConfig, device: torch.device) -> LoadedModel:
    """Builds this process's part of a model and reads it; the default process group must exist.

    Operations are the fastest that all machines of the run have.

    Args:
        weights: where from.
        config: a checked configuration; its model may have other options than the weights' own.
        device: where parameters live.

    Raises:
        ConfigError: lists the tensors that are missing or have another shape.
        UserError: a file cannot be read or is damaged.
    """
    mesh = build_mesh(config.parallel)
    engine = transformer_config(
        config.model,
        config.parallel,
        DTYPES[config.train.precision],
        kernels=choose_kernels(config.train, config.parallel, device),
    )
    with torch.device(device):
        chunks = build_chunks(config, model_spec(config.model), engine, mesh)
    refuse_damaged(weights)
    weights.load_into(chunks, mesh)
    chunks.train(False)
    return LoadedModel(config, chunks, mesh, device)


@torch.no_grad()
def run_forward(model: LoadedModel, ids_BS: torch.Tensor, cursor: Cursor, on_logits: OnLogits) -> None:
    """Runs the rows; every process calls it with the same ids.

    Args:
        model: what this process holds.
        ids_BS: int64 [B, S], at least one row.
        cursor: for ``model.padded(S)`` tokens; says, while hooks of the model's modules run, what is in hand.
        on_logits: called in the last stage, on the first of the tensor-parallel ranks, with the cursor at the row.
    """
    rows = _own_rows(model, len(ids_BS))
    length = model.padded(ids_BS.shape[1])

    def forward(iterator: Iterator[int | None], chunk: StepModel) -> tuple[torch.Tensor, Callable[..., None]]:
        cursor.row = next(iterator)
        output = chunk.logits(_batch(ids_BS, cursor.row, length, model.device))
        if isinstance(output, torch.Tensor):
            return output, _nothing
        if model.mesh.tensor_rank == 0 and cursor.row is not None:
            on_logits(*output)
        return output[0], _nothing

    get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=[iter(rows) for _ in model.chunks],
        model=list(model.chunks),
        num_microbatches=len(rows),
        seq_length=length,
        micro_batch_size=1,
        forward_only=True,
        collect_non_loss_data=True,
    )


def _own_rows(model: LoadedModel, batch: int) -> list[int | None]:
    """The rows of this data-parallel rank; None where it has none but others do."""
    rank, size = model.mesh.data_rank, model.mesh.data_size
    count = -(-batch // size)
    if len(model.chunks) > 1:
        # The interleaved schedule takes micro-batches in groups of as many as there are pipeline ranks.
        count = -(-count // model.mesh.pipeline_size) * model.mesh.pipeline_size
    return [row if row < batch else None for row in range(rank, rank + count * size, size)]


def _batch(ids_BS: torch.Tensor, row: int | None, length: int, device: torch.device) -> MicroBatch:
    tokens = torch.zeros(1, length, dtype=torch.int64)
    if row is not None:
        tokens[0, : ids_BS.shape[1]] = ids_BS[row]
    zeros, positions = torch.zeros_like(tokens), torch.arange(length).unsqueeze(0)
    return MicroBatch(tokens, zeros, zeros.bool(), positions, zeros).to(device)


def _nothing(output: torch.Tensor, non_loss_data: bool = True) -> None:
    """Megatron-Core's hook for what a run collects; ours are called where the values are made."""
