"""Logits of a run, of the main head and of every MTP depth."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import torch
import torch.distributed as dist

from steptron.inspection.archive import Array
from steptron.inspection.forward import LoadedModel
from steptron.inspection.sites import sites
from steptron.inspection.trace import trace


def logits(
    model: LoadedModel, ids_BS: torch.Tensor, experts: Mapping[int, torch.Tensor] | None = None
) -> Iterator[tuple[str, Array]]:
    """Runs token ids and yields, on rank 0, ``logits`` [B, S, V] and ``mtp_logits`` [depths, B, S, V], float32.

    MTP depth k at position t predicts token t + 2 + k; the tokens past the end that it reads are id 0. Every process
    must go through it to the end.

    Args:
        model: what this process holds.
        ids_BS: int64 [B, S].
        experts: routing to replay, by layer; see ``steptron.inspection.replay``.

    Raises:
        UserError: a process did not send its part in time.
    """
    spec = model.chunks.spec
    heads = [site for site in sites(spec) if site.module is None]
    mtp_logits: Array = np.empty((len(spec.mtp), *ids_BS.shape, spec.vocab_size), dtype=np.float32)
    for number, (name, value) in enumerate(trace(model, ids_BS, heads, experts)):
        if number == 0:
            yield name, value
        else:
            mtp_logits[number - 1] = value
    if dist.get_rank() == 0:
        yield "mtp_logits", mtp_logits
