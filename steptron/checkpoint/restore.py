"""A whole model from its weights, in one process, for inference."""

from __future__ import annotations

import torch

from steptron.checkpoint.weights import Weights, refuse_damaged
from steptron.config.schema import ParallelConfig
from steptron.model.assembly import StepModel
from steptron.model.chunks import ModelChunks
from steptron.model.layer_spec import model_spec
from steptron.model.stages import Stage
from steptron.model.transformer_config import DTYPES, transformer_config
from steptron.parallel.mesh import build_mesh
from steptron_kernels.select import select


def restore_model(weights: Weights, device: torch.device, mtp_depths: int | None = None) -> StepModel:
    """Builds a model on one process, whatever layout its weights were saved under, in the precision they have.

    ``mtp_depths`` MTP depths run, all by default. The default process group must exist, with one process.

    Raises:
        UserError: the weights cannot be read, or a file of the checkpoint is damaged.
    """
    refuse_damaged(weights)
    single = ParallelConfig()
    mesh = build_mesh(single)
    spec = model_spec(weights.model)
    dtype = DTYPES[weights.precision]
    # Whatever the run used on its machines, this one computes with what it has.
    engine = transformer_config(weights.model, single, dtype, kernels=select("auto", "fp32", device, dtype))
    with torch.device(device):
        model = StepModel(spec, Stage.whole(len(spec.layers)), engine, mesh.groups, mtp_depths)
    weights.load_into(ModelChunks([model]), mesh)
    return model.eval()
