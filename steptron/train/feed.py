"""Which sequences a process trains on."""

from __future__ import annotations

import torch

from steptron.data.batch import MicroBatch
from steptron.data.samples import Samples
from steptron.parallel.mesh import Mesh


def global_batch(
    source: Samples, first: int, batch_size: int, micro_batch_size: int, mesh: Mesh, device: torch.device
) -> list[MicroBatch]:
    """This data-parallel rank's micro-batches of the sequences first … first + batch_size - 1.

    Micro-batch j of the global batch is the same sequences under every layout; data-parallel ranks take them in turn.
    """
    own = range(first + mesh.data_rank * micro_batch_size, first + batch_size, mesh.data_size * micro_batch_size)
    return [source.micro_batch(start, micro_batch_size).to(device) for start in own]
