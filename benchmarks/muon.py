"""A step of Muon beside torch's, on two CPU threads.

Both update the same matrices from the same gradients: momentum, Nesterov, six steps of orthogonalisation, decoupled
decay, 0.2 sqrt(max). ``torch.optim.Muon`` iterates in bfloat16; for float32 its iteration is replaced by the same
operations on float32 tensors. A ratio is torch's median time over ours at the same dtype; float16, which torch does
not have, stands beside our float32. The contenders take turns.

    python -m benchmarks.muon
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest import mock

from steptron.platform import malloc, threads

os.environ.update(threads.default_environment())  # read when torch is imported

import torch
from torch import Tensor
from torch.optim import _muon as torch_muon

from benchmarks.harness import interleave, median, print_result, print_table
from steptron.config.loader import load_section
from steptron.config.schema import ModelConfig, MuonConfig, OptimizerConfig, Section
from steptron.model.layer_spec import LogicalMatrix, ParameterRole, ParameterSpec, model_spec
from steptron.model.parameter_shards import Place, shard
from steptron.optim.buffer_plan import Piece, plan_buffers
from steptron.optim.muon import DTYPES, Muon
from steptron.optim.owned import OwnedPiece
from steptron.optim.rules import Algorithm
from steptron_kernels import extension
from steptron_kernels.polar_express.choose import choose

TINY = Path(__file__).parent.parent / "configs" / "model" / "tiny.yaml"
THREADS = 2
LEARNING_RATE, STEPS = 1e-3, 6
OPTIMIZER = OptimizerConfig(name="muon", lr=LEARNING_RATE, weight_decay=0.1, muon=MuonConfig(steps=STEPS))
MANY, LARGE, FP16 = 2.0, 0.95, 0.95
"""Least ratios: many equal matrices, large ones, and float16 over float32."""


class ModelFile(Section):
    """A file of ``configs/model``."""

    model: ModelConfig


def pieces_of(specs: Sequence[ParameterSpec]) -> list[Piece]:
    """The logical matrices that Muon updates, experts one by one."""
    plans = plan_buffers([shard(spec, Place()) for spec in specs], OPTIMIZER, 1, {"dp_cp": 1, "expt_dp": 1})
    return [piece for plan in plans for piece in plan.pieces if piece.rule.algorithm is Algorithm.MUON]


def equal_matrices(count: int, rows: int, columns: int) -> list[Piece]:
    role = ParameterRole.FFN_DOWN
    names = [f"matrix{number}" for number in range(count)]
    return pieces_of([ParameterSpec(name, (rows, columns), (LogicalMatrix(name, role, (0, rows)),)) for name in names])


def shape_of(piece: Piece) -> tuple[int, int]:
    assert piece.matrix is not None
    return piece.matrix.shape


def in_float32(gradient: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """torch's iteration, on float32 tensors."""
    a, b, c = coefficients
    is_tall = gradient.size(0) > gradient.size(1)
    x = gradient.T if is_tall else gradient
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


def torchs(pieces: Sequence[Piece], gradients: Sequence[Tensor], precision: str) -> Callable[[], None]:
    parameters = []
    for piece, gradient in zip(pieces, gradients, strict=True):
        parameter = torch.nn.Parameter(torch.zeros(shape_of(piece)))
        parameter.grad = gradient.view(shape_of(piece))
        parameters.append(parameter)
    muon = torch.optim.Muon(
        parameters, LEARNING_RATE, OPTIMIZER.weight_decay, ns_steps=STEPS, adjust_lr_fn="match_rms_adamw"
    )
    if precision == "bf16":
        return muon.step

    def step() -> None:
        with mock.patch.object(torch_muon, "_zeropower_via_newtonschulz", in_float32):
            muon.step()

    return step


def ours(pieces: Sequence[Piece], gradients: Sequence[Tensor], precision: str) -> Callable[[], None]:
    owned = [
        OwnedPiece(piece, torch.zeros(gradient.numel()), gradient)
        for piece, gradient in zip(pieces, gradients, strict=True)
    ]
    config = OPTIMIZER.muon.model_copy(update={"precision": precision})
    muon = Muon(config, owned, choose(torch.device("cpu"), native=True))
    return lambda: muon.step(LEARNING_RATE)


def compare(pieces: Sequence[Piece], rounds: int) -> dict[str, float]:
    """Median seconds by contender."""
    torch.manual_seed(0)
    gradients = [torch.randn(rows * columns) for rows, columns in map(shape_of, pieces)]
    contenders = {f"torch {precision}": torchs(pieces, gradients, precision) for precision in ("bf16", "fp32")}
    contenders |= {precision: ours(pieces, gradients, precision) for precision in DTYPES}
    return {name: median(seconds) for name, seconds in interleave(contenders, rounds, warmup=1).items()}


def cases() -> dict[str, tuple[list[Piece], float]]:
    """Matrices, and the least ratio to torch at equal dtype."""
    tiny = load_section(TINY, ModelFile).model
    return {
        "tiny": (pieces_of(model_spec(tiny).parameters()), MANY),
        "64 of 320 x 1024": (equal_matrices(64, 320, 1024), MANY),
        "4 of 1280 x 4096": (equal_matrices(4, 1280, 4096), LARGE),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    extension.require()
    malloc.keep_freed_memory()
    torch.set_num_threads(THREADS)
    ratios: dict[str, float] = {}
    targets: dict[str, float] = {}
    rows = []
    for name, (pieces, least) in cases().items():
        seconds = compare(pieces, rounds)
        pairs = {
            "bf16": ("torch bf16", "bf16", least),
            "fp32": ("torch fp32", "fp32", least),
            "fp16 to fp32": ("fp32", "fp16", FP16),
        }
        own = {title: seconds[other] / seconds[us] for title, (other, us, _) in pairs.items()}
        ratios |= {f"{name}: {title}": ratio for title, ratio in own.items()}
        targets |= {f"{name}: {title}": at_least for title, (_, _, at_least) in pairs.items()}
        times = (f"{1e3 * seconds[column]:.1f}" for column in ("torch bf16", "torch fp32", *DTYPES))
        rows.append([name, str(len(pieces)), *times, *(f"{ratio:.2f}" for ratio in own.values())])
    columns = ["ms", "matrices", "torch bf16", "torch fp32", *DTYPES, "bf16 ratio", "fp32 ratio", "fp16 to fp32"]
    print_table("A step of Muon", columns, rows)
    print_result("muon", ratios, targets)


if __name__ == "__main__":
    main()
