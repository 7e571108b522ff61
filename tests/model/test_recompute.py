"""Recomputation: the same numbers, bit by bit, from less memory, and nothing counted twice."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from steptron.config.loader import load
from steptron.config.schema import (
    ClampConfig,
    ModelConfig,
    MtpConfig,
    ParallelConfig,
    RecomputePart,
    RecomputeRuleConfig,
)
from steptron.data.batch import MicroBatch
from steptron.model.assembly import StepModel
from steptron.model.balance import BalanceContext, LayerBalance
from steptron.model.block import TransformerLayer
from steptron.model.dispatch import Dispatched
from steptron.model.layer_spec import LayerSpec, MoeFfnSpec, model_spec
from steptron.model.moe import MoeFfn
from steptron.model.sequence import SequenceContext
from steptron.model.stages import Stage
from steptron.model.transformer_config import transformer_config
from steptron.parallel.mesh import Mesh, build_mesh
from steptron.parallel.sequence_shard import SequenceShard
from steptron.train.step import TrainStep
from steptron_kernels.select import PLAIN, Kernels, native
from tests.live_memory import LiveMemory
from tests.model.helpers import fill, gradients, random_batch, relative_error, single_process, small_config
from tests.parallel.layouts import NANO, make_batches, reduced_gradients
from tests.worker_pool import WorkerPool

PARTS: list[RecomputePart] = ["attention", "ffn", "norm", "activation", "moe_permutation"]
INSIDE: list[RecomputePart] = ["norm", "activation", "moe_permutation"]
KERNELS: dict[str, Callable[[], Kernels]] = {"plain": lambda: PLAIN, "native": lambda: native("fp32")}
GROUPS, COEFFICIENT = 2, 0.3
BYTES = 4

Rules = list[tuple[str, list[RecomputePart]]]


@dataclass(frozen=True)
class Seen:
    """One forward and backward: results, bytes in memory in between, and calls of each layer's router."""

    sums: Tensor
    gradients: dict[str, Tensor]
    balance: dict[int, LayerBalance]
    kept: int
    router_calls: dict[int, int]
    dispatch_calls: dict[int, int]
    rows: int

    def assert_same_numbers(self, other: Seen) -> None:
        assert torch.equal(self.sums, other.sums)
        assert self.gradients.keys() == other.gradients.keys()
        different = [name for name, grad in self.gradients.items() if not torch.equal(grad, other.gradients[name])]
        assert not different
        assert self.balance.keys() == other.balance.keys()
        for index, layer in self.balance.items():
            expected = other.balance[index]
            assert torch.equal(layer.tokens_per_expert_E, expected.tokens_per_expert_E)
            assert torch.equal(layer.ep_loss, expected.ep_loss)
            assert torch.equal(layer.confidence, expected.confidence)


def ragged() -> MicroBatch:
    """3 rows of 30 tokens, padding included."""
    return random_batch(48, 3, 30, seed=3, documents=[[3, 14, 9], [20], [1, 1, 5, 12]])


def run(
    rules: Rules,
    kernels: Kernels = PLAIN,
    config: ModelConfig | None = None,
    batch: MicroBatch | None = None,
    mesh: Mesh | None = None,
    parallel: ParallelConfig | None = None,
    coefficient: float = COEFFICIENT,
    bias_of_first_half: float = 0.0,
) -> Seen:
    config, batch = config or small_config(), batch or ragged()
    spec = model_spec(config, [RecomputeRuleConfig(layers=layers, parts=parts) for layers, parts in rules])
    engine = transformer_config(config, parallel or ParallelConfig(), torch.float32, kernels=kernels)
    model = StepModel(spec, Stage.whole(config.num_layers), engine, (mesh or single_process()).groups)
    fill(model, seed=1)
    router_calls, dispatch_calls, rows = dict.fromkeys(model.routers(), 0), dict.fromkeys(model.routers(), 0), 0
    for index, router in model.routers().items():
        router.bias[: config.moe.num_experts // 2] += bias_of_first_half
        router.register_forward_hook(lambda *_, i=index: router_calls.update({i: router_calls[i] + 1}))
        moe = model.layers[str(index)].ffn
        assert isinstance(moe, MoeFfn)

        def dispatch(*args: Any, i: int = index, original: Any = moe.dispatcher.dispatch) -> Dispatched:
            nonlocal rows
            dispatched: Dispatched = original(*args)
            rows += int(dispatched.tokens_per_expert_E.sum()) if dispatch_calls[i] == 0 else 0
            dispatch_calls[i] += 1
            return dispatched

        moe.dispatcher.dispatch = dispatch  # type: ignore[method-assign, assignment]
    valid = (batch.documents_BS >= 0).t().flatten()
    balance = BalanceContext(GROUPS, coefficient, None if valid.all() else valid, int(valid.sum()))
    live = LiveMemory(*model.parameters())
    with live:
        sums = model(batch, balance)
    kept = live.bytes() if mesh is None else live.settled_bytes()
    before = dict(balance.layers)
    (sums * torch.tensor([1.0, 0.7, 0.4])[: len(sums)]).sum().backward()
    assert balance.layers.keys() == before.keys()
    return Seen(sums.detach(), gradients(model), balance.layers, kept, router_calls, dispatch_calls, rows)


@functools.cache
def reference(kernels: str = "plain") -> Seen:
    """Without recomputation."""
    return run([], KERNELS[kernels]())


ALONE: list[Rules] = [[("all", [part])] for part in PARTS]
TOGETHER: list[Rules] = [
    [("all", PARTS)],
    [("all", INSIDE)],
    [("all", ["attention", "norm", "activation", "moe_permutation"])],
    [("all", ["ffn", "norm"])],
    [("full", ["attention"]), ("moe", ["activation", "moe_permutation"]), ("mtp", ["ffn"]), ("0-1,3", ["norm"])],
    [("sliding", ["attention", "ffn"]), ("dense", ["activation"])],
    [("2-3", ["ffn"])],
]


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("rules", ALONE + TOGETHER, ids=str)
def test_same_numbers(kernels: str, rules: Rules) -> None:
    own = run(rules, KERNELS[kernels]())
    own.assert_same_numbers(reference(kernels))
    if rules != [("all", ["moe_permutation"])] or kernels == "plain":  # native experts do not keep rows anyhow
        assert own.kept < reference(kernels).kept


def test_same_numbers_in_bfloat16() -> None:
    def train(rules: Rules) -> dict[str, Tensor]:
        config = small_config()
        spec = model_spec(config, [RecomputeRuleConfig(layers=layers, parts=parts) for layers, parts in rules])
        engine = transformer_config(config, ParallelConfig(), torch.bfloat16)
        model = StepModel(spec, Stage.whole(5), engine, single_process().groups)
        fill(model, seed=1)
        model(ragged()).sum().backward()
        return gradients(model)

    expected = train([])
    for rules in ([("all", PARTS)], [("all", INSIDE)]):
        own = train(rules)
        assert all(torch.equal(own[name], gradient) for name, gradient in expected.items())


# ------------------------------------------------------------------------------------------- memory

WIDE = small_config(
    hidden_size=64,
    dense_hidden_size=96,
    moe={"num_experts": 4, "top_k": 2, "expert_hidden_size": 64, "shared_hidden_size": 48},
    clamp={"routed": {3: 1.0}, "shared": {4: 1.5}},
)
"""Sizes against which scales, scores and indices are small."""
TOKENS = 3 * 30


def freed_by(part: RecomputePart, layer: LayerSpec, plain: bool) -> tuple[int, int]:
    """Elements per token that a layer does not keep, as docs/recompute.md says: the large ones, and at most all."""
    H, attention, ffn = layer.hidden_size, layer.attention, layer.ffn
    n, g, D = attention.num_heads, attention.num_kv_groups, attention.head_dim
    if part == "norm":
        return 2 * H, 2 * (H + 1)
    if part == "attention":
        elements = H + (n + 2 * g) * D + n + (n + g) * D + 2 * n * D
        return elements, elements + 1 + (n + g) + 3 * n
    dense = ffn.shared if isinstance(ffn, MoeFfnSpec) else ffn
    F = dense.hidden_size
    products = F * ((4 if dense.clamp else 2) if plain else 1)
    rows = inner = 0
    if isinstance(ffn, MoeFfnSpec):
        K, E = ffn.top_k, ffn.num_experts
        inner = 2 * K * ffn.expert_hidden_size
        if plain:
            rows = K * H
            products += K * ffn.expert_hidden_size * (5 if ffn.expert_clamp else 3)
    if part == "activation":
        return products, products
    if part == "moe_permutation":
        return rows, rows
    elements = H + 2 * F + products + inner + rows
    if not isinstance(ffn, MoeFfnSpec):
        return elements, elements + 1
    # Scores, weights and indices, and rows that fill up the native experts' blocks.
    return elements, elements + 1 + 3 * E + 16 * K + (0 if plain else inner)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("part", PARTS)
def test_memory_between_forward_and_backward(kernels: str, part: RecomputePart) -> None:
    spec = model_spec(WIDE)
    layers = [*spec.layers, *(depth.layer for depth in spec.mtp)]
    bounds = [freed_by(part, layer, kernels == "plain") for layer in layers]
    least, most = (TOKENS * BYTES * sum(bound[i] for bound in bounds) for i in (0, 1))
    freed = run([], KERNELS[kernels](), WIDE).kept - run([("all", [part])], KERNELS[kernels](), WIDE).kept
    assert least <= freed <= most


@pytest.mark.parametrize("kernels", KERNELS)
def test_parts_save_independently(kernels: str) -> None:
    """None keeps what another one gives up, such as the norm's output that the second dispatch reads."""
    kept = {
        rules: run([("all", list(rules))] if rules else [], KERNELS[kernels](), WIDE).kept
        for rules in ((), *((part,) for part in INSIDE), tuple(INSIDE))
    }
    assert kept[()] - kept[tuple(INSIDE)] == sum(kept[()] - kept[(part,)] for part in INSIDE)


# --------------------------------------------------------------------------------------- statistics


def test_layers_run_again_and_are_counted_once() -> None:
    """The router runs twice in the layers that the rule names, and what it saw is there once."""
    once = reference()
    own = run([("1-2", ["ffn"])])
    assert set(once.router_calls.values()) == {1}
    assert own.router_calls == {1: 2, 2: 2, 3: 1, 4: 1}
    own.assert_same_numbers(once)
    counted = sum(int(layer.tokens_per_expert_E.sum()) for layer in own.balance.values())
    assert counted == 4 * 2 * int((ragged().documents_BS >= 0).sum())


def test_the_balance_loss_has_its_gradient_once() -> None:
    """Its own share of the router's gradient is as large as without recomputation, neither absent nor doubled."""
    name = "layers.2.ffn.router.weight"
    without = run([], coefficient=0.0).gradients[name]
    share = reference().gradients[name] - without
    assert float(share.norm()) > 1e-3 * float(without.norm())
    for rules in ([("all", ["ffn"])], [("all", PARTS)], [("all", INSIDE)]):
        own = run(rules).gradients[name] - run(rules, coefficient=0.0).gradients[name]  # type: ignore[arg-type]
        assert torch.equal(own, share)


def test_without_gradients_nothing_runs_again() -> None:
    spec = model_spec(small_config(), [RecomputeRuleConfig(parts=PARTS)])
    engine = transformer_config(small_config(), ParallelConfig(), torch.float32)
    models = [StepModel(s, Stage.whole(5), engine, single_process().groups) for s in (model_spec(small_config()), spec)]
    with torch.no_grad():
        for model in models:
            fill(model, seed=1)
        assert torch.equal(models[0](ragged()), models[1](ragged()))


# ---------------------------------------------------------------------------------- expert parallel

THREE_LAYERS = WIDE.model_copy(
    update={"num_layers": 3, "mtp": MtpConfig(), "clamp": ClampConfig(routed={2: 1.0}, shared={1: 1.5})}
)
EXPERT_RULES: list[Rules] = [
    [("all", ["ffn"])],
    [("all", ["moe_permutation"])],
    [("all", INSIDE)],
    [("moe", ["attention", "moe_permutation"]), ("1", ["ffn"])],
]


def expert_parallel(rank: int, world_size: int, dispatcher: str, kernels: str, bias: float) -> list[Seen]:
    """Rank 0's micro-batch has padding, the others' has not; ``bias`` draws tokens to the first half of the experts."""
    parallel = ParallelConfig(expert=world_size, dispatcher=dispatcher)  # type: ignore[arg-type]
    mesh = build_mesh(parallel)
    batch = ragged() if rank == 0 else random_batch(48, 3, 30, seed=20 + rank)
    return [
        run(rules, KERNELS[kernels](), THREE_LAYERS, batch, mesh, parallel, bias_of_first_half=bias)
        for rules in ([], *EXPERT_RULES)
    ]


@pytest.mark.parametrize(
    "kernels, bias",
    [("plain", 0.0), ("plain", 50.0), ("native", 0.0)],
    ids=["plain", "a rank without rows", "native"],
)
@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
def test_expert_parallel(pool: WorkerPool, dispatcher: str, kernels: str, bias: float) -> None:
    for rank, (expected, *others) in enumerate(pool.run(2, expert_parallel, dispatcher, kernels, bias)):
        assert (expected.rows == 0) == (bias > 0 and rank == 1)
        assert expected.dispatch_calls == {1: 1, 2: 1}
        for own in others:
            own.assert_same_numbers(expected)
            assert own.kept < expected.kept or own.rows == 0
        ffn, permutation, inside, mixed = others
        for again in (ffn, permutation, inside, mixed):
            assert again.dispatch_calls == {1: 2, 2: 2}
        assert set(permutation.router_calls.values()) == {1}
        indices = 2 * TOKENS * WIDE.moe.top_k * 2 * 8  # of 2 layers
        rows = expected.rows * WIDE.hidden_size * BYTES
        assert rows <= expected.kept - permutation.kept <= rows + indices


# ---------------------------------------------------------------------- tensor and context parallel


def layer_of_a_layout(rank: int, world_size: int, field: str) -> list[tuple[list[Tensor], int]]:
    """A MoE layer with cut attention or cut sequences: output and gradients, and bytes kept, for several rules."""
    parallel = ParallelConfig().model_copy(update={field: world_size})
    mesh = build_mesh(parallel)
    batch = random_batch(48, 3, 32, seed=3, documents=[[3, 14, 9], [20], [1, 1, 5, 12]])
    shard = SequenceShard.balanced(32, mesh.context_rank, mesh.context_size)
    own_T = torch.full((shard.size // mesh.tensor_size * 3,), True)
    results = []
    sets: list[list[RecomputePart]] = [[], ["attention"], ["ffn"], INSIDE, PARTS]
    for parts in sets:
        spec = model_spec(WIDE, [RecomputeRuleConfig(parts=parts)] if parts else []).layers[1]
        layer = TransformerLayer(spec, transformer_config(WIDE, parallel, torch.float32), mesh.groups)
        generator = torch.Generator().manual_seed(5 + rank)
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter, std=0.2, generator=generator)
        x = torch.randn(len(own_T) // 3, 3, 64, generator=generator).requires_grad_()
        context = SequenceContext(
            batch.positions_BS, batch.documents_BS, shard, mesh.groups.cp if mesh.context_size > 1 else None
        )
        balance = BalanceContext(GROUPS, COEFFICIENT, own_T, 96, mesh.groups.tp_cp)
        live = LiveMemory(*layer.parameters(), x)
        with live:
            y = layer(x, context, balance)
        kept = live.settled_bytes()
        (y * y).sum().backward()
        seen = balance.layers[1]
        gradients = [x.grad, *(p.grad for p in layer.parameters())]
        results.append(([y.detach(), seen.ep_loss, seen.tokens_per_expert_E, *gradients], kept))
    return results


@pytest.mark.parametrize("field", ["tensor", "context"])
def test_tensor_and_context_parallel(pool: WorkerPool, field: str) -> None:
    """Megatron's cut linear layers keep the norm's output and the SwiGLU product as ours do."""
    for (expected, kept), *others in pool.run(2, layer_of_a_layout, field):
        assert all(gradient is not None for gradient in expected)
        for tensors, _ in others:
            assert all(torch.equal(a, b) for a, b in zip(tensors, expected, strict=True))
        attention, ffn, inside, everything = (kept - own for _, own in others)
        per_token = sum(freed_by(part, model_spec(WIDE).layers[1], plain=True)[1] for part in INSIDE)
        assert inside == 3 * 32 // 2 * per_token * BYTES
        assert attention > 0 and everything == attention + ffn


# -------------------------------------------------------------------------------------- whole steps


def train(rank: int, world_size: int, overrides: list[str]) -> tuple[list[Tensor], list[float], int]:
    """Gradients of a global batch of nano, losses, and calls of the routers for each MoE layer and micro-batch."""
    config = load(NANO, [*overrides, "data.sequence_length=48"]).config
    mesh = build_mesh(config.parallel)
    step = TrainStep(config, mesh, torch.device("cpu"))
    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    routers = step.chunks.routers().values()
    for router in routers:
        router.register_forward_hook(count)
    batches = make_batches()[mesh.data_rank :: mesh.data_size]
    observed = step.accumulate_gradients(batches)
    losses = observed.losses
    assert calls % (len(batches) * len(routers)) == 0
    return (
        [observed.tokens_per_expert_LE, *reduced_gradients(step).values()],
        [losses.lm, *losses.mtp, losses.ep or 0.0, losses.total],
        calls // (len(batches) * len(routers)),
    )


EVERYTHING = "train.recompute=[{layers: all, parts: [attention, ffn]}]"
RULES_BY_LAYER = (
    "train.recompute=[{layers: full, parts: [attention]}, {layers: moe, parts: [moe_permutation, activation, norm]}, "
    "{layers: '0-1', parts: [ffn]}, {layers: mtp, parts: [norm, attention]}]"
)


@pytest.mark.parametrize("layout", [[], ["parallel.expert=2"], ["parallel.pipeline=2"]], ids=["one", "EP2", "PP2"])
def test_training_steps(pool: WorkerPool, layout: list[str]) -> None:
    """Several micro-batches in flight: one's second forward comes between another one's first and its backward."""
    world_size = 1 if not layout else 2
    expected = pool.run(world_size, train, layout)
    for rules, router_calls in ((EVERYTHING, 2), (RULES_BY_LAYER, 1)):
        for own, reference in zip(pool.run(world_size, train, [*layout, rules]), expected, strict=True):
            assert own[1] == reference[1] and own[2] == router_calls
            assert all(torch.equal(a, b) for a, b in zip(own[0], reference[0], strict=True))


# ------------------------------------------------------------------------------------------ overlap


class FakeStream:
    """Writes down who waits for whom."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self._log = name, log

    def wait_stream(self, other: FakeStream) -> None:
        self._log.append(f"{self.name} waits for {other.name}")


def test_shared_expert_beside_the_routed_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """On its own stream, which waits for its input and is waited for; the same numbers. Streams are imitated here."""
    log: list[str] = []
    main, side = FakeStream("main", log), FakeStream("side", log)

    @contextlib.contextmanager
    def on(stream: FakeStream) -> Iterator[None]:
        log.append(f"{stream.name}:")
        yield
        log.append("main:")

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: side)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: main)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(Tensor, "record_stream", lambda tensor, stream: log.append(f"kept for {stream.name}"))
    results = []
    for overlap in (False, True):
        engine = transformer_config(WIDE, ParallelConfig(overlap_expert_communication=overlap), torch.float32)
        spec = model_spec(WIDE).layers[1].ffn
        assert isinstance(spec, MoeFfnSpec)
        layer = MoeFfn(spec, 1, 64, engine, single_process().groups)
        layer.shared.register_forward_hook(lambda *_: log.append("shared"))
        layer.experts.register_forward_hook(lambda *_: log.append("routed"))
        generator = torch.Generator().manual_seed(3)
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter, std=0.2, generator=generator)
        h = torch.randn(11, 2, 64, generator=generator).requires_grad_()
        y = layer(h, None)
        (y * y).sum().backward()
        results.append([y.detach(), h.grad, *(p.grad for p in layer.parameters())])
    assert log[:2] == ["routed", "shared"]
    assert log[2:] == [
        *["side waits for main", "kept for side", "side:", "shared", "main:"],
        *["routed", "main waits for side", "kept for main"],
    ]
    assert all(relative_error(a, b) < 1e-6 for a, b in zip(*results, strict=True))
