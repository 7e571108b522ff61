"""Updated parameters come back from their owners, and are waited for where they are needed."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from steptron.config.schema import OptimizerConfig, ParallelConfig, ShardingConfig
from steptron.model.chunks import ModelChunks
from steptron.model.layer_spec import model_spec
from steptron.optim import buckets
from steptron.optim.ownership import Reduction
from steptron.parallel.mesh import build_mesh
from steptron.parallel.parameter_buffer import ParameterBuffer, ParameterGather
from steptron.parallel.replica_group import Work
from steptron.parallel.sharded_model import ShardedModel
from tests.model.helpers import build_model, fill, random_batch, single_process, small_config
from tests.parallel.layouts import sharded_by
from tests.parallel.test_gradient_buffer import make_parameters, plans_for
from tests.worker_pool import WorkerPool


def make_sharded(layout: dict[str, Any], optimizer: str, reduction: str, bucket_elements: int = 2000) -> ShardedModel:
    """All parameters 0."""
    parallel = ParallelConfig(**layout)
    mesh = build_mesh(parallel)
    model = build_model(small_config(), None, mesh, parallel)
    for parameter in model.parameters():
        parameter.detach().zero_()
    config = OptimizerConfig(name=optimizer, lr=1.0, sharding=ShardingConfig(reduction=reduction))
    with mock.patch.object(buckets, "BUCKET_ELEMENTS", bucket_elements):
        return sharded_by(ModelChunks([model]), config, mesh)


def owners_update(
    rank: int, world_size: int, layout: dict[str, Any], optimizer: str, reduction: str
) -> tuple[dict[str, torch.Tensor], set[str]]:
    """Every owner adds rank + 1 to what it owns, twice; what others own it must get from them.

    Returns:
        The parameters, and those whose version did not change when they came in.
    """
    sharded = make_sharded(layout, optimizer, reduction)
    parameters = dict(sharded.chunks[0].module.named_parameters())
    for _ in range(2):
        sharded.gather.wait()
        for piece in sharded.owned:
            piece.weight.add_(rank + 1.0)
        sharded.gather.start()
    versions = {name: p._version for name, p in parameters.items()}
    sharded.gather.wait()
    unseen = {name for name, p in parameters.items() if p._version == versions[name]}
    assert all(p.is_leaf and p.is_contiguous() for p in parameters.values())
    return {name: p.detach().clone() for name, p in parameters.items()}, unseen


GATHERS = [
    (2, {}),
    (4, {}),
    (4, {"node_size": 2}),
    (4, {"expert": 2}),
    (4, {"tensor": 2}),
]


@pytest.mark.parametrize("world_size, layout", GATHERS, ids=str)
@pytest.mark.parametrize(
    "optimizer, reduction",
    [("muon", "auto"), ("muon", "reduce_scatter"), ("muon", "all_reduce"), ("adamw", "reduce_scatter")],
)
def test_all_ranks_get_what_owners_have(
    pool: WorkerPool, world_size: int, layout: dict[str, Any], optimizer: str, reduction: str
) -> None:
    ranks = pool.run(world_size, owners_update, layout, optimizer, reduction)
    owners = {2.0 * (rank + 1) for rank in range(world_size)}
    seen = set()
    for name in ranks[0][0]:
        copies = [values[name] for values, _ in ranks]
        assert all(set(copy.unique().tolist()) <= owners for copy in copies), f"{name} holds what nobody owns"
        seen |= {value for copy in copies for value in copy.unique().tolist()}
        for rank, copy in enumerate(copies):
            # The same part of the parameter lies on the ranks with the same tensor- or expert-parallel rank.
            is_expert, is_cut = "experts" in name, copy.shape != small_shape(name)
            apart = layout.get("expert", 1) if is_expert else layout.get("tensor", 1) if is_cut else 1
            assert torch.equal(copy, copies[rank % apart]), name
    assert seen == owners
    # Packed copies of weights go by the version.
    assert all(unseen == set() for _, unseen in ranks)


def small_shape(name: str) -> torch.Size:
    (parameter,) = (p for p in model_spec(small_config()).parameters() if p.name == name)
    return torch.Size(parameter.shape)


def reordered(rank: int, world_size: int) -> list[float]:
    """Ranks wait for parameters in different orders."""
    sharded = make_sharded({"node_size": 2}, "muon", "reduce_scatter")
    for piece in sharded.owned:
        piece.weight.fill_(7.0)
    sharded.gather.start()
    parameters = list(sharded.chunks[0].module.parameters())
    order = torch.randperm(len(parameters), generator=torch.Generator().manual_seed(rank)).tolist()
    for index in order:
        sharded.gather.wait([parameters[index]])
        assert bool((parameters[index] == 7.0).all())
    return [float(p.detach().min()) for p in parameters]


def test_ranks_may_wait_in_any_order(pool: WorkerPool) -> None:
    for values in pool.run(4, reordered, timeout=60):
        assert set(values) == {7.0}


def test_one_process_moves_and_gathers_nothing() -> None:
    parameters = make_parameters()
    before = {name: p.data_ptr() for name, p in parameters.items()}
    group = mock.Mock()
    group.size.return_value = 1
    (plan,) = plans_for(parameters, 1)
    assert ParameterBuffer(plan, parameters, group).transfers() == []
    assert {name: p.data_ptr() for name, p in parameters.items()} == before


def test_parameters_keep_their_values_and_identity_when_they_move() -> None:
    parameters = make_parameters()
    before = {name: (id(p), p.detach().clone()) for name, p in parameters.items()}
    group = mock.Mock()
    group.size.return_value = 4
    with mock.patch.object(buckets, "BUCKET_ELEMENTS", 10):
        (plan,) = plans_for(parameters, 4)
    ParameterBuffer(plan, parameters, group)
    assert len({p.untyped_storage().data_ptr() for p in parameters.values()}) == 1
    for name, parameter in parameters.items():
        assert id(parameter) == before[name][0] and torch.equal(parameter, before[name][1])
        assert parameter.requires_grad and parameter.is_leaf and parameter.is_contiguous()


def test_parameters_of_different_dtypes_are_refused() -> None:
    """One of them would take the other's dtype."""
    parameters = make_parameters()
    parameters["2"] = torch.nn.Parameter(parameters["2"].detach().bfloat16())
    group = mock.Mock()
    group.size.return_value = 2
    (plan,) = plans_for(parameters, 2)
    with pytest.raises(ValueError, match=r"^2 is torch\.bfloat16 among torch\.float32"):
        ParameterBuffer(plan, parameters, group)


# ------------------------------------------------------------------------------- where waits are


class _Slow:
    """A group whose gathers are complete only when they are waited for, as gloo's may be."""

    cell = 0

    def __init__(self, log: list[str]) -> None:
        self.log = log

    ranks_by_cell = (0, 1)

    def size(self) -> int:
        return 2

    def reduce_scatter(self, data: torch.Tensor) -> Work:
        return _Late(data, self.log, None)

    def all_reduce(self, data: torch.Tensor) -> Work:
        return _Late(data, self.log, None)

    def all_gather(self, data: torch.Tensor) -> Work:
        return _Late(data, self.log, 5.0)

    def broadcast(self, data: torch.Tensor, cell: int) -> Work:
        return _Late(data, self.log, 5.0)


class _Late:
    def __init__(self, data: torch.Tensor, log: list[str], value: float | None) -> None:
        self.data, self.log, self.value = data, log, value

    def wait(self) -> None:
        if self.value is not None:
            self.data.fill_(self.value)
        self.log.append("wait")


@pytest.mark.parametrize("reduction", ["reduce_scatter", "all_reduce"])
def test_parameters_are_waited_for_just_before_their_layer(reduction: str) -> None:
    """The embedding at the start of a forward pass, then layer by layer, then heads and MTP; a second forward pass
    waits for nothing."""
    log: list[str] = []
    with mock.patch("steptron.parallel.mesh.Mesh.replicas", lambda mesh, name: _Slow(log)):
        sharded = make_single(reduction)
    model = sharded.chunks[0].module
    sharded.gather.start()
    seen: dict[str, tuple[bool, bool]] = {}

    def look(name: str, own: list[torch.nn.Parameter], later: list[torch.nn.Parameter]) -> Any:
        def hook(*_: object) -> None:
            seen.setdefault(name, (_all_fives(own), bool(later) and _all_fives(later)))

        return hook

    layers = list(model.layers.values())
    for index, layer in enumerate(layers):
        following = [p for other in layers[index + 1 :] for p in other.parameters()]
        layer.register_forward_pre_hook(look(f"layer {index}", list(layer.parameters()), following))
    heads = [model.head.weight, *model.mtp.parameters()]
    model.embedding.register_forward_pre_hook(look("embedding", [model.embedding.weight], list(layers[0].parameters())))
    layers[-1].register_forward_pre_hook(look("last layer", [], heads))
    model.final_norm.register_forward_pre_hook(look("final norm", heads, []))
    with torch.no_grad():
        sharded.chunks[0](random_batch(48, 1, 6, 0))
    assert all(complete for complete, _ in seen.values()), seen
    # What comes later is still under way.
    assert len(seen) == 3 + len(layers) and not any(later for _, later in seen.values())
    # And nothing is left when the optimizer writes weights again.
    assert _all_fives([p for p in model.parameters() if p.requires_grad])
    waits = len(log)
    with torch.no_grad():
        sharded.chunks[0](random_batch(48, 1, 6, 0))
    assert len(log) == waits > len(layers)


def _all_fives(parameters: list[torch.nn.Parameter]) -> bool:
    return all(bool((parameter == 5.0).all()) for parameter in parameters)


def make_single(reduction: str) -> ShardedModel:
    model = build_model(small_config())
    fill(model, 0)
    config = OptimizerConfig(lr=1.0, sharding=ShardingConfig(reduction=reduction))
    with mock.patch.object(buckets, "BUCKET_ELEMENTS", 1):
        return sharded_by(ModelChunks([model]), config, single_process())


def test_a_new_gather_waits_for_the_one_before() -> None:
    log: list[str] = []
    parameters = make_parameters()
    (plan,) = plans_for(parameters, 2)
    assert plan.layout.reduction is Reduction.REDUCE_SCATTER
    gather = ParameterGather([ParameterBuffer(plan, parameters, _Slow(log))])
    gather.wait()
    assert log == []
    gather.start()
    gather.start()
    assert log == ["wait"]
    gather.wait(list(parameters.values())[:1])
    gather.wait()
    assert log == ["wait", "wait"]
