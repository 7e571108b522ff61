"""Records named activations of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack

import torch

from steptron.inspection.archive import Array
from steptron.inspection.cursor import Cursor
from steptron.inspection.forward import LoadedModel, run_forward
from steptron.inspection.recording import Recorder
from steptron.inspection.replay import replay_routing
from steptron.inspection.sites import Site


def trace(
    model: LoadedModel,
    ids_BS: torch.Tensor,
    sites: Sequence[Site],
    experts: Mapping[int, torch.Tensor] | None = None,
) -> Iterator[tuple[str, Array]]:
    """Runs token ids and yields the values of sites on rank 0, in the order of the sites.

    Every process must go through it to the end. Hooks are on the model during the run only.

    Args:
        model: what this process holds.
        ids_BS: int64 [B, S].
        sites: which values; see ``steptron.inspection.sites``.
        experts: routing to replay, by layer; see ``steptron.inspection.replay``.

    Yields:
        Name and value [B, S, ...]: float32 of whatever precision the run has; experts int64, ascending by token, with
        their weights in the same order.

    Raises:
        UserError: a process did not send its part in time.
    """
    batch, length = ids_BS.shape
    names = {site.name for site in sites}
    cursor = Cursor.on(model.mesh, model.padded(length))
    recorder = Recorder(cursor)

    def on_logits(main_BTV: torch.Tensor, mtp_DBTV: torch.Tensor) -> None:
        named = [("logits", main_BTV), *((f"mtp.{k}.logits", depth) for k, depth in enumerate(mtp_DBTV))]
        for name, value in named:
            if name in names:
                recorder.record(name, value, of_shard=True)

    with ExitStack() as stack:
        for chunk in model.chunks:
            if experts is not None:
                # Before the recorder's hooks, which so see what was replayed.
                stack.enter_context(replay_routing(chunk.routers(), experts, cursor.take))
            # The last stage has an embedding too, for the tokens that MTP looks ahead to.
            own = [site for site in sites if site.module != "embedding" or chunk.stage.is_first]
            stack.enter_context(recorder.listening(chunk, own))
        run_forward(model, ids_BS, cursor, on_logits)
    yield from recorder.gather([site.name for site in sites], batch, length, model.device)
