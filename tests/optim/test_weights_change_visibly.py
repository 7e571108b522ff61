"""Whoever writes a parameter bumps its version, by which packed copies notice (steptron_kernels.packed_weights)."""

from __future__ import annotations

import pytest
import torch

from steptron.config.schema import OptimizerConfig
from steptron.model.layer_spec import ModelSpec, ParameterRole, model_spec
from steptron.optim.build import build_optimizer
from steptron_kernels.polar_express.plain import polar_express
from tests.model.helpers import small_config
from tests.optim.pieces import own


@pytest.mark.parametrize("name", ["muon", "adamw", "sgd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_optimizers(name: str, dtype: torch.dtype) -> None:
    spec: ModelSpec = model_spec(small_config())
    specs = [parameter for parameter in spec.parameters() if parameter.role is not ParameterRole.ROUTER_BIAS]
    parameters = {p.name: torch.nn.Parameter(torch.ones(p.shape, dtype=dtype)) for p in specs}
    config = OptimizerConfig(name=name, lr=0.1)
    owned = own(specs, parameters, config)
    optimizer = build_optimizer(config, owned, polar_express)
    for piece in owned:
        piece.gradient.fill_(1.0)
    versions = {name: parameter._version for name, parameter in parameters.items()}
    optimizer.step(0.1)
    assert [name for name, parameter in parameters.items() if parameter._version <= versions[name]] == []
    assert [name for name, parameter in parameters.items() if not (parameter < 1.0).any()] == []
