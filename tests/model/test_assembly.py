"""StepModel: stages add up to the whole model; padding, frozen parts, balance and precision."""

from __future__ import annotations

import pytest
import torch

from steptron.config.schema import ModelConfig, MtpConfig, ParallelConfig
from steptron.data.batch import MicroBatch
from steptron.model.assembly import StepModel
from steptron.model.balance import BalanceContext, ep_group_loss
from steptron.model.router import Router, Routing
from steptron.model.stages import Stage, split_stages
from tests.model.helpers import (
    assert_all_close,
    build_model,
    fill,
    gradients,
    random_batch,
    relative_error,
    small_config,
    watch_selection_gaps,
)

DOCUMENTS = [[7, 5], [3, 4], [12]]


def packed(seed: int = 0) -> MicroBatch:
    return random_batch(48, 3, 12, seed, documents=DOCUMENTS)


def model_with_values(config: ModelConfig, seed: int = 0, **options) -> StepModel:
    model = build_model(config, **options)
    fill(model, seed)
    return model


def balance_for(batch: MicroBatch, coefficient: float = 0.0, groups: int = 2) -> BalanceContext:
    valid = batch.documents_BS.t().flatten() >= 0
    return BalanceContext(groups, coefficient, None if valid.all() else valid, int(valid.sum()))


# ------------------------------------------------------------------------------------- stages


def run_stages(stages: list[StepModel], batch: MicroBatch) -> torch.Tensor:
    """Forward and backward through stages by hand, as a pipeline would: only tensors pass between."""
    inputs: list[torch.Tensor | None] = []
    outputs: list[torch.Tensor] = []
    for stage in stages:
        received = outputs[-1].detach().requires_grad_() if outputs else None
        inputs.append(received)
        stage.set_input_tensor([received])
        output = stage(batch)
        if stage is not stages[-1]:
            assert output.shape == (12, 3, 32)
        outputs.append(output)
    outputs[-1].sum().backward()
    for output, received in zip(reversed(outputs[:-1]), reversed(inputs[1:]), strict=True):
        output.backward(received.grad)
    return outputs[-1]


@pytest.mark.parametrize("num_stages", [2, 3, 5])
@pytest.mark.parametrize("mtp", [MtpConfig(), MtpConfig(depths=2), MtpConfig(depths=1, head="shared")])
def test_stages_give_the_numbers_of_the_whole_model_bit_for_bit(num_stages: int, mtp: MtpConfig) -> None:
    config, batch = small_config(mtp=mtp), packed()
    whole = model_with_values(config)
    expected = whole(batch)
    expected.sum().backward()
    stages = [model_with_values(config, stage=stage) for stage in split_stages(5, num_stages)]
    assert torch.equal(run_stages(stages, batch), expected)

    whole_gradients = gradients(whole)
    found: dict[str, torch.Tensor] = {}
    for stage in stages:
        for name, gradient in gradients(stage).items():
            found[name] = found[name] + gradient if name in found else gradient
    assert found.keys() == whole_gradients.keys()
    for name, gradient in found.items():
        if name == "embedding.weight":  # two copies, added up in another order
            assert relative_error(gradient, whole_gradients[name]) < 1e-6
        else:
            assert torch.equal(gradient, whole_gradients[name]), name


def test_where_the_embedding_is_held() -> None:
    first, middle, last = split_stages(5, 3)
    for depths, mtp_depths, held in [
        (2, None, [(True, False), (False, False), (True, True)]),
        (2, 1, [(True, False), (False, False), (True, True)]),
        (2, 0, [(True, False), (False, False), (False, False)]),
        (0, None, [(True, False), (False, False), (False, False)]),
    ]:
        config = small_config(mtp=MtpConfig(depths=depths))
        for stage, expected in zip((first, middle, last), held, strict=True):
            model = build_model(config, stage, mtp_depths=mtp_depths)
            assert (hasattr(model, "embedding"), model.embedding_is_copy) == expected
    whole = build_model(small_config())
    assert hasattr(whole, "embedding") and not whole.embedding_is_copy


def test_every_tensor_is_on_exactly_one_stage_but_for_the_embedding() -> None:
    config = small_config()
    names = [name for stage in split_stages(5, 4) for name, _ in build_model(config, stage).logical_tensors()]
    assert sorted(names) == sorted([*(p.name for p in build_model(config).spec.parameters()), "embedding.weight"])


def test_a_later_stage_without_its_input_says_so() -> None:
    model = model_with_values(small_config(), stage=split_stages(5, 2)[1])
    with pytest.raises(AssertionError, match="needs its input tensor"):
        model(packed())


# ------------------------------------------------------------------------------------- padding


def test_padding_reaches_no_loss_no_gradient_and_no_statistic() -> None:
    config, batch = small_config(), packed()
    padding = batch.documents_BS < 0
    assert padding.any()
    results = []
    for fill_token in (0, 17):
        tokens = batch.tokens_BS.masked_fill(padding, fill_token)
        labels = batch.labels_BS.masked_fill(padding, 47 - fill_token)
        model = model_with_values(config)
        changed = MicroBatch(tokens, labels, batch.loss_mask_BS, batch.positions_BS, batch.documents_BS)
        balance = balance_for(changed, coefficient=0.3)
        sums = model(changed, balance)
        sums.sum().backward()
        results.append((sums.detach(), gradients(model), balance))
    (sums, grads, balance), (other_sums, other_grads, other_balance) = results
    torch.testing.assert_close(sums, other_sums, rtol=1e-6, atol=0)
    assert_all_close(grads, other_grads, 2e-6)
    assert balance.layers.keys() == other_balance.layers.keys() == {1, 2, 3, 4}
    for index, seen in balance.layers.items():
        other = other_balance.layers[index]
        assert torch.equal(seen.tokens_per_expert_E, other.tokens_per_expert_E)
        assert int(seen.tokens_per_expert_E.sum()) == int((~padding).sum()) * config.moe.top_k
        torch.testing.assert_close(seen.ep_loss, other.ep_loss, rtol=1e-6, atol=0)
        torch.testing.assert_close(seen.confidence, other.confidence, rtol=1e-6, atol=0)


def test_a_micro_batch_without_any_target_has_zero_loss_and_gradients() -> None:
    model, batch = model_with_values(small_config()), packed()
    empty = MicroBatch(
        batch.tokens_BS,
        batch.labels_BS,
        torch.zeros_like(batch.loss_mask_BS),
        batch.positions_BS,
        batch.documents_BS,
    )
    sums = model(empty)
    sums.sum().backward()
    assert sums.tolist() == [0.0, 0.0, 0.0]
    grads = gradients(model)
    assert grads.keys() == dict(model.named_parameters()).keys()  # every gradient buffer gets its part
    assert all(torch.count_nonzero(g) == 0 for g in grads.values())


def test_a_row_of_padding_alone() -> None:
    model = model_with_values(small_config())
    batch = random_batch(48, 2, 12, 0, documents=[[12], []])
    balance = balance_for(batch, 0.3)
    sums = model(batch, balance)
    sums.sum().backward()
    assert sums.isfinite().all() and all(g.isfinite().all() for g in gradients(model).values())
    alone = random_batch(48, 2, 12, 0, documents=[[12], []])
    first_row = MicroBatch(*(getattr(alone, name)[:1] for name in MicroBatch.__dataclass_fields__))
    torch.testing.assert_close(model(first_row), sums, rtol=1e-6, atol=0)


# ------------------------------------------------------------------------------------- balance


def test_the_balance_loss_adds_its_gradient_once_whatever_the_losses_are_scaled_by() -> None:
    """Total = Σ c_k CE_k + coefficient Σ_layers L_EP; the pipeline only ever sees the first term."""
    config, batch, coefficient = small_config(), packed(), 5.0
    scale = torch.tensor([0.01, 0.002, 0.003])

    attached = model_with_values(config)
    torch.dot(attached(batch, balance_for(batch, coefficient)), scale).backward()

    explicit = model_with_values(config)
    losses: list[torch.Tensor] = []
    valid = batch.documents_BS.t().flatten() >= 0

    def keep(router: Router, inputs: object, routing: Routing) -> None:
        probabilities = routing.scores_TE / routing.scores_TE.sum(dim=1, keepdim=True)
        counts = routing.tokens_per_expert(valid)
        losses.append(ep_group_loss(probabilities, counts, 2, valid, int(valid.sum())))

    for router in explicit.routers().values():
        router.register_forward_hook(keep)
    total = torch.dot(explicit(batch), scale)
    assert len(losses) == 4
    (total + coefficient * torch.stack(losses).sum()).backward()
    assert_all_close(gradients(attached), gradients(explicit), 2e-6)

    without = model_with_values(config)
    torch.dot(without(batch, balance_for(batch, 0.0)), scale).backward()
    assert (
        relative_error(
            gradients(without)["layers.1.ffn.router.weight"], gradients(attached)["layers.1.ffn.router.weight"]
        )
        > 0.01
    )


def test_recording_the_balance_changes_no_loss() -> None:
    model, batch = model_with_values(small_config()), packed()
    assert torch.equal(model(batch), model(batch, balance_for(batch, 0.3)))


def test_a_stage_records_its_own_layers() -> None:
    config, batch = small_config(), packed()
    first, second = (model_with_values(config, stage=stage) for stage in split_stages(5, 2))
    balance = balance_for(batch)
    output = first(batch, balance)
    assert list(balance.layers) == [1, 2]
    second.set_input_tensor([output])
    second(batch, balance)
    assert list(balance.layers) == [1, 2, 3, 4]


def test_frozen_routers_get_no_gradient_and_everything_else_does() -> None:
    model, batch = model_with_values(small_config(), freeze_router=True), packed()
    free = model_with_values(small_config())
    sums = model(batch, balance_for(batch))
    assert torch.equal(sums, free(batch, balance_for(batch)))
    sums.sum().backward()
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert frozen == {f"layers.{i}.ffn.router.weight" for i in (1, 2, 3, 4)}
    assert gradients(model).keys() == dict(model.named_parameters()).keys() - frozen


# ----------------------------------------------------------------------------------- precision


def test_bf16_is_close_to_fp32() -> None:
    """A tenth of a nat: selections flip in bf16 (facts of the release, 4.1), so only losses compare."""
    config = small_config()
    wide = model_with_values(config)
    narrow = build_model(config, dtype=torch.bfloat16)
    fill(narrow, 0)
    dtypes = {name: tensor.dtype for name, tensor in narrow.logical_tensors()}
    assert {name for name, dtype in dtypes.items() if dtype is torch.float32} == {
        f"layers.{i}.ffn.router.bias" for i in (1, 2, 3, 4)
    }
    batch = packed()
    sums, expected = narrow(batch), wide(batch)
    assert sums.dtype is torch.float32
    means = (sums - expected) / batch.loss_mask_BS.sum()
    assert means.abs().max() < 0.1
    sums.sum().backward()
    assert all(g.isfinite().all() and g.dtype is torch.bfloat16 for g in gradients(narrow).values())
    hidden = narrow._run_layers(batch, narrow._sequence(batch), None)
    assert hidden.dtype is torch.bfloat16


def test_random_routing_has_no_near_ties_here() -> None:
    model = model_with_values(small_config())
    gaps = watch_selection_gaps(model)
    model(packed())
    assert min(gaps) > 1e-6


def test_ablation_layouts_differ_from_each_other() -> None:
    """The same values under other layouts are other functions: no option is ignored."""
    batch = packed()
    losses = {
        layout: model_with_values(small_config(layout=layout))(batch).detach()
        for layout in ("FFFF", "S1F1", "S3F1", "S3F1+gate", "S3F1+sink", "S3F1+heads", "S3F1+heads+gate")
    }
    values = [tuple(value.tolist()) for value in losses.values()]
    assert len(set(values)) == len(values)


def test_parallel_configuration_is_accepted_for_uneven_stages() -> None:
    """5 layers over 2 and 4 stages: Megatron's own divisibility rule does not apply to our stages."""
    for stages in (2, 4):
        model = build_model(small_config(), Stage((0, 1), True, False), parallel=ParallelConfig(pipeline=stages))
        assert len(model.layers) == 2
