"""A whole model from a checkpoint, in one process, for inference."""

from __future__ import annotations

from pathlib import Path

import torch

from steptron.checkpoint.manifest import read_config
from steptron.checkpoint.save_load import load_model
from steptron.config.schema import ParallelConfig, PretrainConfig
from steptron.model.assembly import StepModel
from steptron.model.chunks import ModelChunks
from steptron.model.layer_spec import model_spec
from steptron.model.stages import Stage
from steptron.model.transformer_config import DTYPES, transformer_config
from steptron.parallel.mesh import build_mesh
from steptron_kernels.select import select


def restore_model(
    folder: Path, device: torch.device, mtp_depths: int | None = None
) -> tuple[StepModel, PretrainConfig]:
    """Builds the checkpoint's model on one process, whatever layout it was saved under.

    ``mtp_depths`` MTP depths run, all by default. The default process group must exist, with one process.

    Raises:
        UserError: the folder is no checkpoint of a model of this version.
    """
    config = read_config(folder)
    single = ParallelConfig(timeout_seconds=config.parallel.timeout_seconds)
    mesh = build_mesh(single)
    spec = model_spec(config.model)
    dtype = DTYPES[config.train.precision]
    # Whatever the run used on its machines, this one computes with what it has.
    engine = transformer_config(config.model, single, dtype, kernels=select("auto", "fp32", device, dtype))
    with torch.device(device):
        model = StepModel(spec, Stage.whole(len(spec.layers)), engine, mesh.groups, mtp_depths)
    load_model(folder, ModelChunks([model]), mesh)
    return model.eval(), config
