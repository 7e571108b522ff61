"""Whoever writes a parameter bumps its version, by which packed copies notice (steptron_kernels.packed_weights)."""

from __future__ import annotations

import pytest
import torch

from steptron.config.schema import OptimizerConfig
from steptron.model.layer_spec import ModelSpec, model_spec
from steptron.optim.base import NamedParameter
from steptron.optim.build import build_optimizer
from tests.model.helpers import small_config


@pytest.mark.parametrize("name", ["adamw", "sgd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_optimizers(name: str, dtype: torch.dtype) -> None:
    spec: ModelSpec = model_spec(small_config())
    tensors = [
        NamedParameter(parameter, torch.nn.Parameter(torch.ones(parameter.shape, dtype=dtype)))
        for parameter in spec.parameters()
    ]
    optimizer = build_optimizer(OptimizerConfig(name=name, lr=0.1), tensors)
    for parameter in tensors:
        parameter.tensor.main_grad = torch.ones(parameter.spec.shape)  # type: ignore[attr-defined]
    versions = [parameter.tensor._version for parameter in tensors]
    optimizer.step(0.1)
    assert all(p.tensor._version > version for p, version in zip(tensors, versions, strict=True))
