"""The process groups of a layout."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from steptron.config.schema import ParallelConfig


@dataclass(frozen=True)
class Mesh:
    """This process's place in the layout: Megatron-Core's groups, and ranks and sizes read off them."""

    groups: ProcessGroupCollection

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
    def expert_rank(self) -> int:
        return self.groups.ep.rank()

    @property
    def expert_size(self) -> int:
        return self.groups.ep.size()

    def sum_over_data_and_stages(self, values: torch.Tensor) -> torch.Tensor:
        """Adds up, in place, what data-parallel ranks and pipeline stages each hold a part of."""
        for group in (self.groups.dp_cp, self.groups.pp):
            if group.size() > 1:
                dist.all_reduce(values, group=group)
        return values

    def expert_range(self, num_experts: int) -> tuple[int, int]:
        """First and one-past-last global expert of this process."""
        size = num_experts // self.expert_size
        return self.expert_rank * size, (self.expert_rank + 1) * size


def build_mesh(config: ParallelConfig) -> Mesh:
    """Creates Megatron-Core's process groups inside the initialised default group.

    What the world size leaves over is data parallelism; expert-parallel groups are carved out of
    the data-parallel ranks, and experts keep their own data-parallel groups.
    """
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.tensor,
        pipeline_model_parallel_size=config.pipeline,
        context_parallel_size=config.context,
        expert_model_parallel_size=config.expert,
        expert_tensor_parallel_size=1,
        distributed_timeout_minutes=config.timeout_seconds / 60,
        create_gloo_process_groups=False,
    )
    return Mesh(ProcessGroupCollection.use_mpu_process_groups())
