"""Instabilities planted in runs of `nano`, and what the metrics server's alerts make of them.

Kinds of runs:
  healthy    nothing is planted: no alert may come.
  blow_up    of one expert of the last MoE layer W_up is multiplied by c and W_down divided by it in every forward and
             backward pass, c a growing power of 2, and what the optimizer sees is scaled back: loss, gradients and
             parameters stay those of the healthy run, bit for bit, while the expert's intermediate grows.
  growth     W_down of that expert grows by a factor after every step: its output does, and training goes on with it.
  collapse   W_up and W_down of that expert shrink after every step, while the router goes on sending it tokens.

    python -m tools.reproduce.planted [--healthy 10] [--steps 240] [--folder runs/soak/planted]

Runs a server of its own, trains, prints a table, and ends with status 1 where an alert is missing, is of another layer
or expert, comes late, or comes in a healthy run.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from steptron.config.loader import load
from steptron.config.schema import PretrainConfig
from steptron.data.batch import MicroBatch
from steptron.model.moe import MoeFfn
from steptron.optim.schedule import learning_rate
from steptron.parallel.mesh import Mesh, build_mesh
from steptron.platform import megatron_cpu
from steptron.telemetry.matrices import owned_parts
from steptron.telemetry.run import Telemetry
from steptron.telemetry.stopwatch import Stopwatch
from steptron.train.step import Flags, Observation, TrainStep
from steptron_metrics.reading.source import open_source
from steptron_metrics.server.local import Server, running
from steptron_metrics.settings import Settings

NANO = Path(__file__).resolve().parents[2] / "configs" / "pretrain" / "nano.yaml"
LAYER, EXPERT = 8, 5
"""Last MoE layer of nano, and the expert that something is planted in."""
START = 140
"""First step with something planted: the warm-up of the rules is over."""
GROWTH, SHRINKAGE = 1.25, 0.85
"""Factors a step; blow_up doubles every fourth step."""
WITHIN = {"blow_up": 40, "growth": 40, "collapse": 60}
"""Steps from the first planted one within which the alert must come."""
RULES = {
    "blow_up": {"blow_up_intermediate"},
    "growth": {"blow_up_output"},
    "collapse": {"expert_collapse"},
}
OVERRIDES = (
    "model.clamp={}",  # a clamp is what keeps an expert from blowing up
    "data.sequence_length=128",
    "train.global_batch_size=8",
    "train.micro_batch_size=4",
    "optimizer.lr=2e-3",
)


@dataclass(frozen=True)
class Outcome:
    """What came of a run.

    Attributes:
        kind, seed: of the run.
        losses: of its steps.
        alerts: as the server has them.
    """

    kind: str
    seed: int
    losses: list[float]
    alerts: list[dict[str, Any]]

    @property
    def problem(self) -> str | None:
        """What the alerts should have done otherwise; None: nothing."""
        if self.kind == "healthy":
            rules = sorted({alert["rule"] for alert in self.alerts})
            return f"alerts in a healthy run: {', '.join(rules)}" if rules else None
        expected = [alert for alert in self.alerts if alert["rule"] in RULES[self.kind]]
        if not expected:
            return f"no alert {', '.join(RULES[self.kind])}"
        first = min(expected, key=lambda alert: alert["since_iteration"])
        if (first["layer"], first["item"]) != (LAYER, EXPERT):
            return f"alert about layer {first['layer']}, expert {first['item']}"
        if not START <= first["since_iteration"] <= START + WITHIN[self.kind]:
            return f"alert at step {first['since_iteration']}, planted from {START} on"
        others = [a for a in self.alerts if (a["layer"], a["item"]) != (LAYER, EXPERT)]
        if self.kind == "blow_up" and others:
            return f"alerts about others: {[(a['rule'], a['layer'], a['item']) for a in others]}"
        return None

    @property
    def delay(self) -> int | None:
        """Steps from the first planted one to the alert."""
        own = [alert["since_iteration"] for alert in self.alerts if alert["rule"] in RULES.get(self.kind, ())]
        return min(own) - START if own else None


# ------------------------------------------------------------------------------------------ planting


class Planted:
    """What is planted in a step, around its parts.

    Args:
        step: the model, all of whose experts are here.
        kind: of the run.
    """

    def __init__(self, step: TrainStep, kind: str) -> None:
        self._step, self._kind = step, kind
        (layer,) = (chunk.layers[str(LAYER)] for chunk in step.chunks if str(LAYER) in chunk.layers)
        assert isinstance(layer.ffn, MoeFfn)
        self._experts = layer.ffn.experts
        self._width = self._experts.spec.expert_hidden_size
        self._factor = 1.0
        if kind == "blow_up":
            self._accumulate = step.accumulate_gradients
            step.accumulate_gradients = self._scaled_pass  # type: ignore[method-assign]

    def before(self, number: int) -> None:
        """Before a step."""
        self._factor = 2.0 ** ((number - START) // 4 + 1) if number >= START else 1.0

    @torch.no_grad()
    def after(self, number: int) -> None:
        """After a step's update."""
        if number < START:
            return
        if self._kind == "growth":
            self._down.mul_(GROWTH)
        elif self._kind == "collapse":
            self._up.mul_(SHRINKAGE)
            self._down.mul_(SHRINKAGE)

    @property
    def _up(self) -> torch.Tensor:
        return self._experts.gate_up_projection[EXPERT, self._width :]

    @property
    def _down(self) -> torch.Tensor:
        return self._experts.down_projection[EXPERT]

    def _scaled_pass(self, batches: Sequence[MicroBatch], flags: Flags = Flags()) -> Observation:  # noqa: B008
        """Powers of 2 round nothing: all but the intermediate is as without them."""
        self._scale(self._factor)
        observed = self._accumulate(batches, flags)
        self._scale(1 / self._factor)
        for part in owned_parts(self._step.sharded.owned, self._step.spec):
            if (part.item.layer, part.item.item) == (LAYER, EXPERT):
                factor = {"expert_up": self._factor, "expert_down": 1 / self._factor}.get(part.item.role, 1.0)
                part.of(part.piece.gradient).mul_(factor)
        return observed

    @torch.no_grad()
    def _scale(self, factor: float) -> None:
        self._up.mul_(factor)
        self._down.mul_(1 / factor)


# ------------------------------------------------------------------------------------------ training


class Source:
    """Micro-batches of a random Markov chain, which a small model learns quickly.

    Args:
        config: vocabulary and sizes.
        seed: of chain and stream.
    """

    def __init__(self, config: PretrainConfig, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._config = config
        vocabulary = config.model.vocab_size
        self._next = torch.randint(0, vocabulary, (vocabulary, 4), generator=self._generator)

    def batches(self) -> list[MicroBatch]:
        """Those of a step."""
        size, length = self._config.train.micro_batch_size, self._config.data.sequence_length
        return [self._batch(size, length) for _ in range(self._config.train.micro_batches(1))]

    def _batch(self, size: int, length: int) -> MicroBatch:
        choices = torch.randint(0, 4, (size, length + 1), generator=self._generator)
        token = torch.randint(0, len(self._next), (size,), generator=self._generator)
        stream = torch.empty(size, length + 1, dtype=torch.int64)
        for place in range(length + 1):
            stream[:, place] = token
            token = self._next[token, choices[:, place]]
        return MicroBatch(
            tokens_BS=stream[:, :-1].contiguous(),
            labels_BS=stream[:, 1:].contiguous(),
            loss_mask_BS=torch.ones(size, length, dtype=torch.bool),
            positions_BS=torch.arange(length).repeat(size, 1),
            documents_BS=torch.zeros(size, length, dtype=torch.int64),
        )


def train(kind: str, seed: int, steps: int, server: Server, folder: Path, mesh: Mesh) -> Outcome:
    """One run in this process, which the mesh is of alone."""
    name = f"{kind}-{seed}"
    output = folder / name
    output.mkdir(parents=True, exist_ok=True)
    overrides = (*OVERRIDES, f"train.steps={steps}", f"train.seed={seed}", f"train.output={output}")
    config = load(NANO, [*overrides, f"telemetry.server={server.address}", f"telemetry.run={name}"]).config
    device = torch.device("cpu")
    stopwatch = Stopwatch(device)
    step = TrainStep(config, mesh, device, stopwatch=stopwatch)
    source, planted, losses = Source(config, seed), Planted(step, kind), []
    with Telemetry(config, step, stopwatch, lambda text: None) as telemetry:
        for number in range(1, steps + 1):
            planted.before(number)
            lr = learning_rate(config.optimizer, number - 1, steps)
            telemetry.begin(number)
            result = step.run(source.batches(), lr, config.balance.bias.rate)
            telemetry.end(result.observed, result.gradient_norm, number, {"train.learning_rate": lr})
            planted.after(number)
            losses.append(result.observed.losses.total)
            if number == steps:
                telemetry.event("finished", "")
            telemetry.send()
    _wait_until_stored(server, name, steps)
    return Outcome(kind, seed, losses, [asdict(alert) for alert in open_source(server.http_address).alerts(name)])


def _wait_until_stored(server: Server, run: str, steps: int, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while True:
        if any((one.name, one.iterations) == (run, steps) for one in open_source(server.http_address).runs()):
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"the metrics server has not stored {steps} iterations of {run} within {seconds:g} s")
        time.sleep(0.1)


# ------------------------------------------------------------------------------------------ the command


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--healthy", type=int, default=10, help="healthy runs, of seeds 1, 2, ... (%(default)s)")
    parser.add_argument("--planted", type=int, default=3, help="runs of each planted kind (%(default)s)")
    parser.add_argument("--steps", type=int, default=240, help="of each run (%(default)s)")
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/soak/planted"), help="where all is kept (%(default)s)"
    )
    options = parser.parse_args()
    runs = [("healthy", seed) for seed in range(1, options.healthy + 1)]
    runs += [(kind, seed) for kind in RULES for seed in range(1, options.planted + 1)]
    outcomes: list[Outcome] = []
    options.folder.mkdir(parents=True, exist_ok=True)

    megatron_cpu.install()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = build_mesh(load(NANO, OVERRIDES).config.parallel)
    with running(Settings(options.folder / "server", port=0, http_port=0)) as server:
        for kind, seed in runs:
            outcomes.append(train(kind, seed, options.steps, server, options.folder, mesh))
    dist.destroy_process_group()
    table = Table("run", "last loss", "alerts", "steps until", "verdict")
    for outcome in outcomes:
        told = ", ".join(sorted({f"{a['rule']} {a['subject']}" for a in outcome.alerts})) or "-"
        delay = "-" if outcome.delay is None else str(outcome.delay)
        last = f"{outcome.losses[-1]:.4f}"
        table.add_row(f"{outcome.kind} {outcome.seed}", last, told, delay, outcome.problem or "as it should be")
    Console(width=140).print(table)
    healthy = {outcome.seed: outcome.losses for outcome in outcomes if outcome.kind == "healthy"}
    same = [o.losses == healthy[o.seed] for o in outcomes if o.kind == "blow_up" and o.seed in healthy]
    print(
        f"blow_up: losses of {sum(same)} of {len(same)} runs are those of the healthy run of the same seed, bit for bit"
    )
    return 1 if any(outcome.problem for outcome in outcomes) or not all(same) else 0


if __name__ == "__main__":
    sys.exit(main())
