"""Megatron-Core on CPU and gloo: every part that Steptron uses, against plain PyTorch."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from steptron.platform import megatron_cpu
from tests.worker_pool import REPOSITORY, WorkerPool


def _in_fresh_process(code: str) -> str:
    """Runs code in a new interpreter; returns its output, standard error included."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=REPOSITORY,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def _config(**kwargs: Any) -> Any:
    from megatron.core.transformer import TransformerConfig

    defaults: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 8,
        "num_attention_heads": 2,
        "use_cpu_initialization": True,
        "gradient_accumulation_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        "add_bias_linear": False,
    }
    return TransformerConfig(**{**defaults, **kwargs})


# -------------------------------------------------------------------------- what is replaced


def test_torch_is_untouched_and_later_imports_are_changed_quietly() -> None:
    output = _in_fresh_process(
        """
        import sys
        sys.modules["triton"] = None  # torch for CPU only comes without it
        import torch
        import torch._dynamo  # replaces torch.manual_seed itself when it is first imported

        def names(module):
            return {name: id(value) for name, value in vars(module).items()}

        watched = [torch, torch.cuda, torch.cuda.random, torch.distributed, torch.Tensor, torch.autograd, torch.nn]
        before = [names(module) for module in watched]
        from steptron.platform import megatron_cpu
        megatron_cpu.install()
        megatron_cpu.install()
        import megatron.core
        from megatron.core import dist_checkpointing, tensor_parallel
        from megatron.core.transformer.moe import token_dispatcher
        tensor_parallel.model_parallel_cuda_manual_seed(1, tp_rank=0, ep_rank=0, etp_rank=0)
        for module, old in zip(watched, before):
            new = names(module)
            changed = [name for name in old if new.get(name) != old[name] and not name.startswith("__")]
            assert not changed, (module, changed)
        assert not torch.cuda.is_initialized()
        assert torch.compile(lambda x: x + 1, backend="eager")(torch.zeros(1)).item() == 1
        assert sum(type(finder).__module__.startswith("steptron") for finder in sys.meta_path) == 1
        assert token_dispatcher.torch is not torch
        assert str(token_dispatcher.torch.cuda.current_device()) == "cpu"
        assert token_dispatcher.torch.zeros(2, device="cuda").device.type == "cpu"
        assert token_dispatcher.torch.cuda.is_available() is False
        """
    )
    assert "megatron" not in output and "Apex" not in output, output


def test_modules_imported_before_are_changed_and_uncompiled() -> None:
    _in_fresh_process(
        """
        import megatron.core
        from megatron.core.fusions import fused_bias_swiglu
        from megatron.core.tensor_parallel import cross_entropy
        assert hasattr(fused_bias_swiglu.swiglu, "_torchdynamo_orig_callable")
        from steptron.platform import megatron_cpu
        megatron_cpu.install()
        assert str(cross_entropy.torch.cuda.current_device()) == "cpu"
        assert not hasattr(fused_bias_swiglu.swiglu, "_torchdynamo_orig_callable")
        """
    )


def test_the_list_of_replacements_is_readable_and_every_name_exists() -> None:
    import importlib

    for replacement in megatron_cpu.REPLACED:
        assert len(replacement.why) > 10
        if "*" in replacement.module:
            continue
        owner: Any = importlib.import_module(replacement.module)
        for name in replacement.name.split("."):
            owner = getattr(owner, name)


# ------------------------------------------------------------------------- tensor-parallel layers


def _linear_and_cross_entropy(rank: int, world_size: int) -> dict[str, float]:
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world_size)
    tensor_parallel.model_parallel_cuda_manual_seed(7)
    config = _config(tensor_model_parallel_size=world_size, params_dtype=torch.float64)
    init = partial(nn.init.normal_, std=0.5)
    layers = tensor_parallel
    embedding = layers.VocabParallelEmbedding(12, 8, init_method=init, config=config)
    column = layers.ColumnParallelLinear(8, 16, config=config, init_method=init, bias=False, skip_bias_add=False)
    row = layers.RowParallelLinear(
        16, 12, config=config, init_method=init, bias=False, input_is_parallel=True, skip_bias_add=False
    )
    tp_group = parallel_state.get_tensor_model_parallel_group()

    def full(weight: torch.Tensor, dim: int) -> torch.Tensor:
        parts = [torch.empty_like(weight) for _ in range(world_size)]
        dist.all_gather(parts, weight.detach().contiguous(), group=tp_group)
        return torch.cat(parts, dim).requires_grad_()

    generator = torch.Generator().manual_seed(3)
    tokens_SB = torch.randint(0, 12, (5, 2), generator=generator)
    labels_SB = torch.randint(0, 12, (5, 2), generator=generator)
    hidden, _ = column(embedding(tokens_SB))
    logits, _ = row(torch.tanh(hidden))
    logits_part = layers.scatter_to_tensor_model_parallel_region(logits)
    loss = layers.vocab_parallel_cross_entropy(logits_part.clone(), labels_SB).sum()
    loss.backward()

    plain = {
        "embedding": full(embedding.weight, 0),
        "column": full(column.weight, 0),
        "row": full(row.weight, 1),
    }
    plain_logits = F.linear(
        torch.tanh(F.linear(F.embedding(tokens_SB, plain["embedding"]), plain["column"])), plain["row"]
    )
    plain_loss = F.cross_entropy(plain_logits.flatten(0, 1), labels_SB.flatten(), reduction="sum")
    plain_loss.backward()
    errors = {"logits": (logits - plain_logits).abs().max().item(), "loss": (loss - plain_loss).abs().item()}
    for name, layer, dim in (("embedding", embedding, 0), ("column", column, 0), ("row", row, 1)):
        wanted = plain[name].grad
        assert wanted is not None and wanted.abs().max() > 1e-3
        errors[name] = (layer.weight.grad - wanted.chunk(world_size, dim)[rank]).abs().max().item()
    return errors


@pytest.mark.parametrize("world_size", [1, 2])
def test_parallel_layers_equal_plain_ones(pool: WorkerPool, world_size: int) -> None:
    for errors in pool.run(world_size, _linear_and_cross_entropy):
        # Megatron's cross entropy works in fp32 whatever its input is.
        assert max(errors.values()) < 1e-5, errors
        assert errors["logits"] < 1e-12


# ------------------------------------------------------------------------------ expert parallelism


def _uneven_all_to_all(rank: int, world_size: int, sizes_as: str) -> None:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.mappings import all_to_all

    parallel_state.initialize_model_parallel(expert_model_parallel_size=world_size)
    group = parallel_state.get_expert_model_parallel_group()
    # rank 0 sends 0 rows to itself and 3 to rank 1; rank 1 sends 2 rows to rank 0 and 1 to itself
    sent = [[0, 3], [2, 1]]
    mine = sent[rank]
    received = [row[rank] for row in sent]
    convert: Callable[[list[int]], Any] = torch.tensor if sizes_as == "tensor" else list
    x_TH = (torch.arange(sum(mine) * 2, dtype=torch.float64).view(-1, 2) + 100 * rank).requires_grad_()
    y_TH = all_to_all(group, x_TH, convert(received), convert(mine))
    expected = {0: [[100.0, 101], [102, 103]], 1: [[0.0, 1], [2, 3], [4, 5], [104, 105]]}[rank]
    assert y_TH.tolist() == expected
    weight_TH = torch.arange(y_TH.numel(), dtype=torch.float64).view_as(y_TH) + 10 * rank
    (y_TH * weight_TH).sum().backward()
    assert x_TH.grad is not None
    expected_grad = {0: [[10.0, 11], [12, 13], [14, 15]], 1: [[0.0, 1], [2, 3], [16, 17]]}[rank]
    assert x_TH.grad.tolist() == expected_grad


@pytest.mark.parametrize("sizes_as", ["list", "tensor"])
def test_megatrons_all_to_all_with_uneven_sizes(pool: WorkerPool, sizes_as: str) -> None:
    pool.run(2, _uneven_all_to_all, sizes_as)


def _dispatch_and_combine(rank: int, world_size: int, kind: str) -> dict[str, float]:
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.moe import token_dispatcher

    num_experts, top_k, hidden = 8, 2, 8
    parallel_state.initialize_model_parallel(expert_model_parallel_size=world_size)
    config = _config(
        num_moe_experts=num_experts,
        moe_router_topk=top_k,
        expert_model_parallel_size=world_size,
        moe_token_dispatcher_type=kind,
    )
    local = num_experts // world_size
    groups = ProcessGroupCollection.use_mpu_process_groups()
    dispatcher_type = {
        "alltoall": token_dispatcher.MoEAlltoAllTokenDispatcher,
        "allgather": token_dispatcher.MoEAllGatherTokenDispatcher,
    }[kind]
    dispatcher = dispatcher_type(local, list(range(rank * local, (rank + 1) * local)), config, pg_collection=groups)

    generator = torch.Generator().manual_seed(10 + rank)
    x_SBH = torch.randn(6, 2, hidden, dtype=torch.float64, generator=generator, requires_grad=True)
    scores_TE = torch.rand(12, num_experts, dtype=torch.float64, generator=generator)
    scores_TE[:, 5] = 0  # an expert without tokens
    scores_TE.requires_grad_()
    routing_map_TE = torch.zeros(12, num_experts, dtype=torch.bool)
    routing_map_TE.scatter_(1, scores_TE.topk(top_k, dim=1).indices, True)
    probs_TE = scores_TE * routing_map_TE

    tokens, probs = dispatcher.dispatch_preprocess(x_SBH, routing_map_TE, probs_TE)
    tokens, probs = dispatcher.token_dispatch(tokens, probs)
    tokens, tokens_per_expert, probs = dispatcher.dispatch_postprocess(tokens, probs)
    assert tokens.shape[0] == int(tokens_per_expert.sum())
    expert_scale = torch.arange(rank * local + 1, (rank + 1) * local + 1, dtype=torch.float64)
    scale = torch.repeat_interleave(expert_scale, tokens_per_expert)
    output = dispatcher.combine_preprocess(tokens * (probs * scale).unsqueeze(-1))
    output = dispatcher.token_combine(output)
    y_SBH = dispatcher.combine_postprocess(output)
    weight_SBH = torch.randn(y_SBH.shape, dtype=torch.float64, generator=generator)
    grads = torch.autograd.grad((y_SBH * weight_SBH).sum(), (x_SBH, scores_TE))

    all_scales_E = torch.arange(1, num_experts + 1, dtype=torch.float64)
    plain_SBH = x_SBH * (scores_TE * routing_map_TE * all_scales_E).sum(1).view(6, 2, 1)
    plain_grads = torch.autograd.grad((plain_SBH * weight_SBH).sum(), (x_SBH, scores_TE))
    assert plain_grads[1].abs().max() > 0.1
    return {
        "value": (y_SBH - plain_SBH).abs().max().item(),
        "tokens": (grads[0] - plain_grads[0]).abs().max().item(),
        "scores": (grads[1] - plain_grads[1]).abs().max().item(),
    }


@pytest.mark.parametrize("kind", ["alltoall", "allgather"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_dispatch_then_combine_is_the_weighted_sum_of_experts(pool: WorkerPool, kind: str, world_size: int) -> None:
    for errors in pool.run(world_size, _dispatch_and_combine, kind):
        assert max(errors.values()) < 1e-12, errors


# ---------------------------------------------------------------------------------------- pipeline

_MICROBATCHES, _SEQUENCE, _BATCH, _HIDDEN = 4, 3, 2, 4


class _Stage(nn.Module):
    """One linear layer with a nonlinearity; the last one is followed by a squared error."""

    def __init__(self, config: Any, index: int, pre_process: bool) -> None:
        super().__init__()
        self.config = config
        self.model_type = None  # read by the interleaved schedule
        self.pre_process = pre_process
        generator = torch.Generator().manual_seed(50 + index)
        self.weight = nn.Parameter(torch.randn(_HIDDEN, _HIDDEN, dtype=torch.float64, generator=generator))
        self.received: torch.Tensor | None = None

    def set_input_tensor(self, tensor: Any) -> None:
        self.received = tensor[0] if isinstance(tensor, list) else tensor

    def forward(self, x_SBH: torch.Tensor) -> torch.Tensor:
        if not self.pre_process:
            assert self.received is not None
            x_SBH = self.received
        return torch.tanh(F.linear(x_SBH, self.weight))


def _batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    shape = (_MICROBATCHES, _SEQUENCE, _BATCH, _HIDDEN)
    return list(torch.randn(shape, dtype=torch.float64, generator=generator))


def _loss(y_SBH: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = ((y_SBH - 0.25) ** 2).sum()
    # A copy: the schedule divides the loss by the number of micro-batches in place.
    return loss, {"loss": loss.detach().clone()}


def _forward_step(data: Iterator[torch.Tensor], stage: _Stage) -> tuple[torch.Tensor, Callable[..., Any]]:
    return stage(next(data)), _loss


def _pipelined_gradients(rank: int, world_size: int, chunks: int, batched: bool) -> tuple[list[Any], list[float]]:
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    interleaving = {"virtual_pipeline_model_parallel_size": chunks} if chunks > 1 else {}
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=world_size, **interleaving)
    config = _config(
        num_layers=world_size * chunks,
        hidden_size=_HIDDEN,
        pipeline_model_parallel_size=world_size,
        pipeline_dtype=torch.float64,
        batch_p2p_comm=batched,
        deallocate_pipeline_outputs=True,
        **interleaving,
    )
    indices = [rank + chunk * world_size for chunk in range(chunks)]
    model = [_Stage(config, index, pre_process=index == 0) for index in indices]
    run = get_forward_backward_func()
    losses = run(
        forward_step_func=_forward_step,
        data_iterator=[iter(_batches()) for _ in model] if chunks > 1 else iter(_batches()),
        model=model if chunks > 1 else model[0],
        num_microbatches=_MICROBATCHES,
        seq_length=_SEQUENCE,
        micro_batch_size=_BATCH,
        forward_only=False,
    )
    gradients = [(index, stage.weight.grad) for index, stage in zip(indices, model, strict=True)]
    return gradients, [entry["loss"].item() for entry in losses]


@pytest.mark.parametrize(
    ("world_size", "chunks", "batched"),
    [(1, 1, True), (2, 1, True), (2, 1, False), (4, 1, True), (2, 2, False), (4, 2, True)],
)
def test_pipelined_gradients_equal_those_of_one_process(
    pool: WorkerPool, world_size: int, chunks: int, batched: bool
) -> None:
    results = pool.run(world_size, _pipelined_gradients, chunks, batched)

    stages = [_Stage(None, index, pre_process=True) for index in range(world_size * chunks)]
    losses = []
    for batch in _batches():
        y_SBH = batch
        for stage in stages:
            y_SBH = stage(y_SBH)
        loss, _ = _loss(y_SBH)
        (loss / _MICROBATCHES).backward()
        losses.append(loss.item())

    gradients = dict(pair for result, _ in results for pair in result)
    assert sorted(gradients) == list(range(len(stages)))
    for index, stage in enumerate(stages):
        assert stage.weight.grad is not None and stage.weight.grad.abs().max() > 1e-4
        torch.testing.assert_close(gradients[index], stage.weight.grad, rtol=0, atol=1e-13)
    assert results[-1][1] == pytest.approx(losses, rel=1e-13)


# ------------------------------------------------------------- random numbers, recompute, checkpoints


def _rng_and_recompute(rank: int, world_size: int) -> tuple[list[float], list[float]]:
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world_size)
    tensor_parallel.model_parallel_cuda_manual_seed(11)
    with tensor_parallel.get_cuda_rng_tracker().fork():
        different = torch.rand(2).tolist()
    same = torch.rand(2).tolist()

    x = torch.randn(16, dtype=torch.float64, requires_grad=True)
    seen = []

    def dropped(value: torch.Tensor) -> torch.Tensor:
        result = F.dropout(value, 0.5)
        seen.append(result.detach().clone())
        return result.sin()

    tensor_parallel.checkpoint(dropped, False, x).sum().backward()
    assert len(seen) == 2 and torch.equal(seen[0], seen[1]), "recomputation drew other random numbers"
    return same, different


def test_rng_tracker_and_recompute_use_the_cpu_generator(pool: WorkerPool) -> None:
    (same_0, different_0), (same_1, different_1) = pool.run(2, _rng_and_recompute)
    assert same_0 == same_1
    assert different_0 != different_1


def _save_and_load(rank: int, world_size: int, folder: str) -> None:
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.serialization import (
        get_default_load_sharded_strategy,
        get_default_save_sharded_strategy,
    )
    from megatron.core.dist_checkpointing.strategies.fully_parallel import (
        FullyParallelLoadStrategyWrapper,
        FullyParallelSaveStrategyWrapper,
    )

    parallel_state.initialize_model_parallel()
    group = parallel_state.get_data_parallel_group()

    def state(fill: bool) -> dict[str, Any]:
        split = torch.arange(6.0).view(3, 2) + 10 * rank if fill else torch.zeros(3, 2)
        whole = torch.arange(5.0) if fill else torch.zeros(5)
        return {
            "split": ShardedTensor.from_rank_offsets("split", split, (0, rank, world_size)),
            "whole": ShardedTensor.from_rank_offsets("whole", whole, replica_id=rank),
            "step": 17,
        }

    save = FullyParallelSaveStrategyWrapper(get_default_save_sharded_strategy(), group)
    dist_checkpointing.save(state(fill=True), folder, save)
    dist.barrier()
    load = FullyParallelLoadStrategyWrapper(get_default_load_sharded_strategy(folder), group)
    for strategy in (None, load):
        loaded = dist_checkpointing.load(state(fill=False), folder, strategy)
        assert loaded["split"].tolist() == (torch.arange(6.0).view(3, 2) + 10 * rank).tolist()
        assert loaded["whole"].tolist() == [0.0, 1, 2, 3, 4]
        assert loaded["step"] == 17


def test_distributed_checkpoint_round_trip(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(2, _save_and_load, str(tmp_path))


# -------------------------------------------------------------------------------------------- data


def test_indexed_dataset_round_trip(tmp_path: Path) -> None:
    import numpy as np
    from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(str(tmp_path / "tokens.bin"), dtype=np.uint16)
    for document in ([1, 2, 3], [4], [5, 6]):
        builder.add_item(torch.tensor(document))
        builder.end_document()
    builder.finalize(str(tmp_path / "tokens.idx"))
    dataset = IndexedDataset(str(tmp_path / "tokens"))
    assert [dataset[index].tolist() for index in range(len(dataset))] == [[1, 2, 3], [4], [5, 6]]
