"""Which layer clips its activations at which limit."""

from __future__ import annotations

from steptron.model.layer_spec import DenseFfnSpec, MoeFfnSpec, model_spec
from tests.model.helpers import build_model, small_config


def test_limits_reach_the_layers_they_name() -> None:
    """Routed experts take ``clamp.routed``, shared experts and dense layers ``clamp.shared``, MTP none."""
    config = small_config()
    layers = model_spec(config).layers
    limits = {
        layer.index: (layer.ffn.expert_clamp, layer.ffn.shared.clamp)
        for layer in layers
        if isinstance(layer.ffn, MoeFfnSpec)
    }
    assert limits == {1: (None, None), 2: (None, None), 3: (1.0, None), 4: (1.0, 1.5)}

    model = build_model(config)
    for index, (routed, shared) in limits.items():
        ffn = model.layers[str(index)].ffn
        assert (ffn.experts.spec.expert_clamp, ffn.shared.spec.clamp) == (routed, shared)
    assert all(depth.layer.ffn.spec.clamp is None for depth in model.mtp)


def test_a_dense_layer_takes_the_shared_limit() -> None:
    dense = model_spec(small_config(clamp={"shared": {0: 2.0}})).layers[0].ffn
    assert isinstance(dense, DenseFfnSpec) and dense.clamp == 2.0
