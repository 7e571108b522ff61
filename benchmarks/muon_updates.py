"""Matrices as an optimizer could get them: families of made-up updates, and gradients of a short training.

Every family is a function of (number, rows, columns, generator) that gives float32 [N, R, C], rows <= columns.
"""

from __future__ import annotations

import math
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

Family = Callable[[int, int, int, torch.Generator], Tensor]


def gaussian(n: int, r: int, c: int, generator: torch.Generator) -> Tensor:
    return torch.randn(n, r, c, generator=generator)


def with_spectrum(sigma_K: Tensor) -> Family:
    """Random singular vectors, given singular values (as many as rows)."""

    def make(n: int, r: int, c: int, generator: torch.Generator) -> Tensor:
        u_NRR = torch.linalg.qr(torch.randn(n, r, r, generator=generator)).Q
        v_NCR = torch.linalg.qr(torch.randn(n, c, r, generator=generator)).Q
        return (u_NRR * _resampled(sigma_K, r)) @ v_NCR.mT

    return make


def _resampled(sigma_K: Tensor, count: int) -> Tensor:
    """A spectrum given at some points, at as many as there are rows."""
    return sigma_K[torch.linspace(0, len(sigma_K) - 1, count).round().long()]


def _with_noise(m_NRC: Tensor, noise: float, generator: torch.Generator) -> Tensor:
    noise_NRC = torch.randn(m_NRC.shape, generator=generator)
    scale_N = noise * m_NRC.norm(dim=(1, 2)) / noise_NRC.norm(dim=(1, 2))
    return m_NRC + scale_N[:, None, None] * noise_NRC


def low_rank_plus_noise(rank: int, noise: float) -> Family:
    """A sum of a few outer products, and noise of the given norm relative to it."""

    def make(n: int, r: int, c: int, generator: torch.Generator) -> Tensor:
        low_NRC = torch.randn(n, r, rank, generator=generator) @ torch.randn(n, rank, c, generator=generator)
        return _with_noise(low_NRC, noise, generator)

    return make


def even_rank_one(noise: float) -> Family:
    """An outer product of vectors with magnitudes in [0.5, 1.5] and random signs, and noise likewise."""

    def make(n: int, r: int, c: int, generator: torch.Generator) -> Tensor:
        def vector(*shape: int) -> Tensor:
            return (0.5 + torch.rand(shape, generator=generator)) * _random_signs(shape, generator)

        low_NRC = vector(n, r, 1) @ vector(n, 1, c)
        return _with_noise(low_NRC, noise, generator)

    return make


def repeated_rows(spread: float) -> Family:
    """Copies of eight rows, each multiplied by 1 + spread times noise per entry."""

    def make(n: int, r: int, c: int, generator: torch.Generator) -> Tensor:
        rows_N8C = torch.randn(n, 8, c, generator=generator)
        copied_NRC = rows_N8C[:, torch.arange(r) % 8]
        return copied_NRC * (1 + spread * torch.randn(n, r, c, generator=generator))

    return make


def _random_signs(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randint(0, 2, shape, generator=generator).float() * 2 - 1


def random_signs(n: int, r: int, c: int, generator: torch.Generator) -> Tensor:
    return _random_signs((n, r, c), generator)


def blocks(n: int, r: int, c: int, generator: torch.Generator) -> Tensor:
    """Constant on blocks of a 16 x 16 grid."""
    coarse = torch.randn(n, 16, 16, generator=generator)
    return coarse[:, torch.arange(r) * 16 // r][:, :, torch.arange(c) * 16 // c]


def rows_over_decades(n: int, r: int, c: int, generator: torch.Generator) -> Tensor:
    return torch.randn(n, r, c, generator=generator) * torch.logspace(0, -6, r)[:, None]


def one_value_off_the_diagonal(n: int, r: int, c: int, generator: torch.Generator) -> Tensor:
    """Identities side by side plus a constant, which is drawn for each matrix."""
    constant_N11 = 4 * torch.rand(n, 1, 1, generator=generator) / r
    return torch.eye(r).repeat(1, -(-c // r))[:, :c] - constant_N11


def opposed_gradients(share: float) -> Family:
    """Nesterov momentum of gradients that change sign every step, up to a share that is new each time."""

    def make(n: int, r: int, c: int, generator: torch.Generator) -> Tensor:
        common_NRC = torch.randn(n, r, c, generator=generator)
        momentum_NRC = torch.zeros(n, r, c)
        for step in range(40):
            gradient_NRC = (-1) ** step * common_NRC + share * torch.randn(n, r, c, generator=generator)
            momentum_NRC = 0.95 * momentum_NRC + gradient_NRC
        return gradient_NRC + 0.95 * momentum_NRC

    return make


def sign_pattern(rows: int, columns: int) -> Tensor:
    """Signs whose rows are orthogonal and have equal sums: powers of a 4 x 4 pattern, repeated along the columns."""
    block = torch.tensor([[1.0, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]])
    power = torch.ones(1, 1)
    while len(power) < rows:
        power = torch.kron(power, block)
    if len(power) != rows or columns % rows != 0:
        raise ValueError(f"needs 4^k rows and a multiple of them as columns, got {rows} x {columns}")
    return power.repeat(1, columns // rows)


def two_magnitudes(share_N: Tensor, rows: int, columns: int) -> Tensor:
    """The sign pattern with one magnitude for + and another for -.

    Its singular values are two: one belongs to the constant direction, all others are equal.

    Args:
        share_N: the singular value of the constant direction, relative to the Frobenius norm; 1 / sqrt(rows) makes the
            magnitudes equal.
    """
    others_N = ((1 - share_N.double() ** 2) / (rows - 1)).sqrt()
    middle_N = others_N / math.sqrt(columns)
    apart_N = (share_N - others_N) / math.sqrt(rows * columns)
    pattern_RC = sign_pattern(rows, columns)
    return (middle_N[:, None, None] * pattern_RC + apart_N[:, None, None]).float()


def _geometric(decades: float) -> Tensor:
    return torch.logspace(0, -decades, 256)


def _power(exponent: float) -> Tensor:
    return torch.arange(1, 257).float() ** -exponent


def _clusters(values: Sequence[float]) -> Tensor:
    return torch.tensor(values).repeat_interleave(256 // len(values))


FAMILIES: dict[str, Family] = {
    "Gaussian": gaussian,
    "power law i^-1": with_spectrum(_power(1)),
    "power law i^-3": with_spectrum(_power(3)),
    "geometric, 3 decades": with_spectrum(_geometric(3)),
    "geometric, 8 decades": with_spectrum(_geometric(8)),
    "two clusters, 1 and 1e-2": with_spectrum(_clusters([1.0, 1e-2])),
    "four clusters, 1 to 1e-6": with_spectrum(_clusters([1.0, 1e-2, 1e-4, 1e-6])),
    "rank 1 + 1e-3 noise": low_rank_plus_noise(1, 1e-3),
    "even rank 1": even_rank_one(0.0),
    "even rank 1 + 1e-4 noise": even_rank_one(1e-4),
    "even rank 1 + 1e-3 noise": even_rank_one(1e-3),
    "even rank 1 + 1e-2 noise": even_rank_one(1e-2),
    "rank 4 + 1e-2 noise": low_rank_plus_noise(4, 1e-2),
    "eight rows repeated": repeated_rows(0.0),
    "eight rows repeated, 1e-3 apart": repeated_rows(1e-3),
    "random signs": random_signs,
    "blocks of constants": blocks,
    "rows over 6 decades": rows_over_decades,
    "identities minus a constant": one_value_off_the_diagonal,
    "opposed gradients, 1 % new": opposed_gradients(1e-2),
}


class RealUpdates:
    """Gradients and Nesterov momentum of the quickstart's model, trained with AdamW on Python source as bytes.

    Args:
        steps: after which steps (from 1) they are taken.
    """

    CONFIG = Path(__file__).resolve().parents[1] / "configs" / "pretrain" / "tiny-quickstart.yaml"
    ROLES = (
        *("query", "key", "value", "attention_output"),
        *("expert_gate", "expert_up", "expert_down", "shared_gate", "shared_down"),
    )
    LAYERS = (1, 5, 8)
    EXPERTS = 3
    MOMENTUM = 0.95
    BATCH, SEQUENCE = 4, 256

    def __init__(self, steps: Sequence[int]) -> None:
        self.steps = steps

    def collect(self) -> dict[str, list[Tensor]]:
        """Matrices [R, C] by what they are; all roles, some layers and experts."""
        from steptron.config.loader import load
        from steptron.parallel.mesh import build_mesh
        from steptron.platform import distributed
        from steptron.train.step import TrainStep

        overrides = [
            "parallel.expert=1",
            "optimizer.name=adamw",
            "train.products=fp32",
            f"train.steps={self.steps[-1]}",
        ]
        config = load(self.CONFIG, overrides).config
        distributed.initialize(torch.device("cpu"), timeout_seconds=60)
        train = TrainStep(config, build_mesh(config.parallel), torch.device("cpu"))
        text = b"".join(path.read_bytes() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))
        stream = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        found: dict[str, list[Tensor]] = {"trained, gradients": [], "trained, momentum": []}
        momentum: dict[str, Tensor] = {}
        for step in range(1, self.steps[-1] + 1):
            train.run([self._batch(stream, step)], lr=min(step / 20, 1.0) * 1e-3, bias_rate=1e-2)
            gradients = self._gradients(train)
            for name, gradient in gradients.items():
                momentum[name] = self.MOMENTUM * momentum.get(name, torch.zeros_like(gradient)) + gradient
            if step in self.steps:
                found["trained, gradients"] += gradients.values()
                found["trained, momentum"] += [g + self.MOMENTUM * momentum[name] for name, g in gradients.items()]
        return {kind: [m for m in matrices if m.any()] for kind, matrices in found.items()}

    def _batch(self, stream: Tensor, step: int):  # type: ignore[no-untyped-def]
        from steptron.data.batch import MicroBatch

        taken = self.BATCH * (self.SEQUENCE + 1)
        rows_BT = stream[(step * taken) % (len(stream) - taken) :][:taken].view(self.BATCH, -1)
        return MicroBatch(
            tokens_BS=rows_BT[:, :-1].contiguous(),
            labels_BS=rows_BT[:, 1:].contiguous(),
            loss_mask_BS=torch.ones(self.BATCH, self.SEQUENCE, dtype=torch.bool),
            positions_BS=torch.arange(self.SEQUENCE).repeat(self.BATCH, 1),
            documents_BS=torch.zeros(self.BATCH, self.SEQUENCE, dtype=torch.int64),
        )

    def _gradients(self, train) -> dict[str, Tensor]:  # type: ignore[no-untyped-def]
        """The gradients of logical matrices, wide way round."""
        tensors = dict(train.chunks.named_parameters())
        gradients = {}
        for parameter in train.spec.parameters():
            if not any(f"layers.{layer}." in parameter.name for layer in self.LAYERS):
                continue
            for matrix in parameter.matrices:
                if matrix.role not in self.ROLES:
                    continue
                whole = tensors[parameter.name].main_grad
                rows = slice(*matrix.rows)
                parts = whole[: self.EXPERTS, rows] if parameter.is_expert else whole[rows].unsqueeze(0)
                for number, part in enumerate(parts):
                    wide = part.mT if part.shape[0] > part.shape[1] else part
                    gradients[f"{matrix.name}.{number}"] = wide.detach().float().clone()
        return gradients
