"""Has a trained run really learned, and is its model really what it says?

    python tools/verify_learning.py runs/quickstart/train

Measured from the run's newest checkpoint, in one process; the expert shares on the training data that would
come next, the losses on the validation split:

- the loss, against the unigram entropy of the corpus;
- the smallest share of its layer's tokens that an expert receives, against an equal share;
- how much worse the main loss gets without the routed experts;
- how much worse the loss of MTP depth 1 gets without its hidden input.

Exit code 1 when one of them misses its margin.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from steptron.data.batch import MicroBatch
    from steptron.model.assembly import StepModel

BELOW_UNIGRAM_NATS = 1.0
SMALLEST_EXPERT_SHARE = 0.2
# After so few steps the shared expert has learnt most: 0.19 nats were seen with Muon, 0.45 with AdamW.
EXPERTS_WORTH_NATS = 0.1
MTP_HIDDEN_WORTH_NATS = 0.2


@dataclass(frozen=True)
class Check:
    """One measured figure and the margin that it must reach."""

    what: str
    value: float
    margin: float

    @property
    def holds(self) -> bool:
        return self.value >= self.margin


def verify(run: Path, max_sequences: int = 64) -> list[Check]:
    """Measures a run; the default process group must exist, with one process."""
    from steptron.checkpoint.folder import resolve
    from steptron.checkpoint.manifest import read_config, read_manifest
    from steptron.checkpoint.restore import restore_model
    from steptron.checkpoint.weights import open_weights
    from steptron.data.sampler import SampleSource

    folder = resolve(run)
    model, config = restore_model(open_weights(folder), torch.device("cpu")), read_config(folder)
    source = SampleSource(config.data.validation or config.data.train, "validation", config.data)
    count = min(max_sequences, source.num_samples or 0)
    batches = [source.micro_batch(first, min(4, count - first)) for first in range(0, count, 4)]
    losses, _ = measure(model, batches)
    progress = read_manifest(folder).progress
    assert progress is not None, "a run's checkpoint says how far it had come"
    consumed = progress.consumed_sequences
    training = SampleSource(config.data.train, "train", config.data)
    _, share = measure(model, [training.micro_batch(consumed + first, 4) for first in range(0, max_sequences, 4)])
    with without_routed_experts(model):
        losses_without_experts, _ = measure(model, batches)
    with without_mtp_hidden(model):
        losses_without_hidden, _ = measure(model, batches)
    return [
        Check(
            "validation loss below the unigram entropy, nats", source.unigram_entropy - losses[0], BELOW_UNIGRAM_NATS
        ),
        Check("smallest expert share, of an equal share", share, SMALLEST_EXPERT_SHARE),
        Check("main loss lost without routed experts, nats", losses_without_experts[0] - losses[0], EXPERTS_WORTH_NATS),
        Check(
            "MTP 1 loss lost without its hidden input, nats",
            losses_without_hidden[1] - losses[1],
            MTP_HIDDEN_WORTH_NATS,
        ),
    ]


@torch.no_grad()
def measure(model: StepModel, batches: list[MicroBatch]) -> tuple[list[float], float]:
    """Mean losses [main, MTP 1, …] in nats, and the smallest expert's tokens over its layer's mean."""
    from megatron.core import parallel_state

    from steptron.model.balance import BalanceContext
    from steptron.train.losses import count_tokens

    counts = count_tokens(batches, model.mtp_depths, parallel_state.get_data_parallel_group())
    sums = torch.zeros(1 + model.mtp_depths, dtype=torch.float64)
    tokens: dict[int, torch.Tensor] = {}
    for batch, num_valid in zip(batches, counts.local_valid, strict=True):
        balance = BalanceContext(1, 0.0, batch.documents_BS.t().flatten() >= 0, num_valid)
        sums += model(batch, balance).double()
        for index, layer in balance.layers.items():
            tokens[index] = tokens.get(index, 0) + layer.tokens_per_expert_E
    share = min(float(tokens_E.min() / tokens_E.double().mean()) for tokens_E in tokens.values())
    return (sums / torch.tensor(counts.targets)).tolist(), share


@contextmanager
def without_routed_experts(model: StepModel) -> Iterator[None]:
    """The routed experts give nothing; the shared expert stays."""
    from steptron.model.experts import GroupedExperts

    with _replaced_outputs([m for m in model.modules() if isinstance(m, GroupedExperts)], torch.zeros_like):
        yield


@contextmanager
def without_mtp_hidden(model: StepModel) -> Iterator[None]:
    """MTP depth 1 sees the next token's embedding only."""
    with _replaced_outputs([model.get_submodule("mtp.0.hidden_norm")], torch.zeros_like):
        yield


@contextmanager
def _replaced_outputs(
    modules: list[torch.nn.Module], replace: Callable[[torch.Tensor], torch.Tensor]
) -> Iterator[None]:
    handles = [module.register_forward_hook(lambda _module, _inputs, output: replace(output)) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=Path, help="folder of a run, or a checkpoint")
    run = parser.parse_args().run

    from steptron.platform import distributed

    warnings.simplefilter("ignore", FutureWarning)  # deprecations inside the engine
    distributed.start("cpu", threads=None, timeout_seconds=60)
    checks = verify(run)
    for check in checks:
        verdict = "ok" if check.holds else "MISSED"
        print(f"{check.what:<50} {check.value:8.3f}   at least {check.margin:<5} {verdict}")
    distributed.shutdown()
    return 0 if all(check.holds for check in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
