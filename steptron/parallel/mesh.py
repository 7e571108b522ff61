"""The process groups of a layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from steptron.config.schema import ParallelConfig
from steptron.model.parameter_shards import Place
from steptron.parallel.factored_group import FactoredGroup
from steptron.parallel.replica_group import ReplicaGroup, WholeGroup


@dataclass(frozen=True)
class Mesh:
    """This process's place in the layout: Megatron-Core's groups, and ranks and sizes read off them.

    Attributes:
        groups: Megatron-Core's groups.
        by_node: those of them over which gradients are added up within nodes first, factored, by their names.
    """

    groups: ProcessGroupCollection
    by_node: Mapping[str, FactoredGroup] = field(default_factory=dict)

    @property
    def pipeline_rank(self) -> int:
        return self.groups.pp.rank()

    @property
    def pipeline_size(self) -> int:
        return self.groups.pp.size()

    @property
    def data_rank(self) -> int:
        return self.groups.dp.rank()

    @property
    def data_size(self) -> int:
        return self.groups.dp.size()

    @property
    def tensor_rank(self) -> int:
        return self.groups.tp.rank()

    @property
    def tensor_size(self) -> int:
        return self.groups.tp.size()

    @property
    def context_rank(self) -> int:
        return self.groups.cp.rank()

    @property
    def context_size(self) -> int:
        return self.groups.cp.size()

    @property
    def expert_rank(self) -> int:
        return self.groups.ep.rank()

    @property
    def expert_size(self) -> int:
        return self.groups.ep.size()

    @property
    def place(self) -> Place:
        """Which part of each parameter of its stage this process holds."""
        return Place(self.tensor_rank, self.tensor_size, self.expert_rank, self.expert_size)

    def replicas(self, name: str) -> ReplicaGroup:
        """Ranks that hold the same part of a parameter, and add up its gradients: one of the groups that
        ``steptron.model.parameter_shards.replicas_of`` names."""
        return self.by_node.get(name) or WholeGroup(getattr(self.groups, name))

    def add_up(self, values: torch.Tensor) -> torch.Tensor:
        """Adds up, in place, what every process holds a part of."""
        if dist.get_world_size() > 1:
            dist.all_reduce(values)
        return values


def build_mesh(config: ParallelConfig) -> Mesh:
    """Creates Megatron-Core's process groups inside the initialised default group.

    What the world size leaves over is data parallelism. The same tensor x context x data ranks of a
    stage are laid out a second time, as expert x expert-data ranks, for the experts.
    """
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.tensor,
        pipeline_model_parallel_size=config.pipeline,
        virtual_pipeline_model_parallel_size=config.virtual_pipeline if config.virtual_pipeline > 1 else None,
        context_parallel_size=config.context,
        expert_model_parallel_size=config.expert,
        expert_tensor_parallel_size=1,
        distributed_timeout_minutes=config.timeout_seconds / 60,
        create_gloo_process_groups=False,
    )
    groups = ProcessGroupCollection.use_mpu_process_groups()
    if config.node_size is None:
        return Mesh(groups)
    timeout = timedelta(seconds=config.timeout_seconds)
    names = ("dp_cp", "tp_dp_cp", "expt_dp")
    return Mesh(groups, {name: FactoredGroup(getattr(groups, name), config.node_size, timeout) for name in names})
