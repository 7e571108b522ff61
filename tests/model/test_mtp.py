"""MTP: which token each depth sees and predicts, against slow loops."""

from __future__ import annotations

import pytest
import torch

from steptron.config.schema import MtpConfig
from steptron.data.batch import MicroBatch
from steptron.model.mtp import mtp_loss_mask
from steptron.model.sequence import SequenceContext
from steptron.parallel.sequence_shard import SequenceShard
from tests.model.helpers import build_model, fill, gradients, random_batch, relative_error, small_config

DOCUMENTS = [[7, 5], [3, 1, 6], [12], [2, 2, 2, 2, 2, 2], [1, 8]]
LENGTH = 12


def packed() -> MicroBatch:
    """Documents of ragged lengths, padding at the end of some rows, some spans masked."""
    batch = random_batch(48, len(DOCUMENTS), LENGTH, seed=0, documents=DOCUMENTS)
    kept = torch.rand(batch.loss_mask_BS.shape, generator=torch.Generator().manual_seed(1)) < 0.8
    return MicroBatch(
        batch.tokens_BS, batch.labels_BS, batch.loss_mask_BS & kept, batch.positions_BS, batch.documents_BS
    )


def targets_by_loops(batch: MicroBatch, depth: int) -> list[tuple[int, int, int]]:
    """(row, position, target token) of depth k (0 is the main head): the token at t + 1 + k counts and
    lies in t's document."""
    found = []
    rows, length = batch.tokens_BS.shape
    for b in range(rows):
        for t in range(length):
            last = t + depth  # the position whose next token is the target
            if last >= length or not batch.loss_mask_BS[b, last]:
                continue
            if batch.documents_BS[b, last] != batch.documents_BS[b, t] or batch.documents_BS[b, t] < 0:
                continue
            found.append((b, t, int(batch.labels_BS[b, last])))
    return found


@pytest.mark.parametrize("depth", [1, 2, 3, 11, 12, 20])
def test_loss_mask(depth: int) -> None:
    batch = packed()
    mask = torch.zeros(batch.tokens_BS.shape, dtype=torch.bool)
    for b, t, _ in targets_by_loops(batch, depth):
        mask[b, t] = True
    assert torch.equal(mtp_loss_mask(batch, depth), mask)
    assert mask.any() == (depth <= 10)  # the longest document has 12 tokens, 11 of them with a target


def test_loss_mask_when_attention_crosses_documents() -> None:
    """All of a row is one document then, and the last label still lies past its end."""
    batch = random_batch(48, 1, 6, seed=2)
    whole = MicroBatch(
        batch.tokens_BS, batch.labels_BS, torch.ones(1, 6, dtype=torch.bool), batch.positions_BS, batch.documents_BS
    )
    assert mtp_loss_mask(whole, 2).tolist() == [[True, True, True, True, False, False]]


@pytest.mark.parametrize("mtp", [MtpConfig(depths=3), MtpConfig(depths=3, chain="post_norm", head="shared")])
def test_losses_are_those_of_the_logits_at_the_right_targets(mtp: MtpConfig) -> None:
    config = small_config(mtp=mtp)
    model, batch = build_model(config), packed()
    fill(model, seed=1)
    with torch.no_grad():
        sums = model(batch)
        main, depths = model.logits(batch)
    for k, logits in enumerate([main, *depths]):
        log_probabilities = logits.double().log_softmax(dim=-1)
        total = -sum(log_probabilities[b, t, target].item() for b, t, target in targets_by_loops(batch, k))
        assert sums[k].item() == pytest.approx(total, rel=1e-6)


def test_a_depth_sees_the_tokens_before_its_target_and_no_further() -> None:
    """Depth k at t has read tokens up to t + 1 + k; its target, t + 2 + k, and all after it must not matter."""
    model = build_model(small_config(mtp=MtpConfig(depths=3)))
    fill(model, seed=2)
    batch = random_batch(48, 1, LENGTH, seed=3)
    with torch.no_grad():
        main, depths = model.logits(batch)
        for changed in range(LENGTH):
            tokens = batch.tokens_BS.clone()
            tokens[0, changed] = (tokens[0, changed] + 1) % 48
            other = MicroBatch(tokens, batch.labels_BS, batch.loss_mask_BS, batch.positions_BS, batch.documents_BS)
            other_main, other_depths = model.logits(other)
            for k, (before, after) in enumerate(zip([main, *depths], [other_main, *other_depths], strict=True)):
                moved = (before - after).abs().amax(dim=-1)[0] > 1e-4
                for t in range(LENGTH):
                    if t + k < changed:  # k = 0 is the main head, which reads up to t
                        assert not moved[t], f"head {k} at {t} sees token {changed}"
                    if t + k == changed:
                        assert moved[t], f"head {k} at {t} does not see token {changed}"


def test_packed_documents_give_the_losses_and_gradients_of_documents_apart() -> None:
    """No token of another document or of the padding reaches a loss, on any depth."""
    model = build_model(small_config(mtp=MtpConfig(depths=3)))
    fill(model, seed=4)
    batch = random_batch(48, len(DOCUMENTS), LENGTH, seed=5, documents=DOCUMENTS)
    together = model(batch)
    together.sum().backward()
    together_gradients = gradients(model)
    model.zero_grad()

    apart = torch.zeros(4, dtype=torch.float64)
    for b, lengths in enumerate(DOCUMENTS):
        start = 0
        for size in lengths:
            part = slice(start, start + size)
            alone = MicroBatch(
                batch.tokens_BS[b : b + 1, part],
                batch.labels_BS[b : b + 1, part],
                batch.loss_mask_BS[b : b + 1, part],
                torch.arange(size).unsqueeze(0),
                torch.zeros(1, size, dtype=torch.int64),
            )
            sums = model(alone)
            sums.sum().backward()
            apart += sums.detach()
            start += size
    assert together.detach().double().tolist() == pytest.approx(apart.tolist(), rel=1e-6)
    for name, gradient in gradients(model).items():
        assert relative_error(gradient, together_gradients[name]) < 1e-5, name


def test_depths_that_do_not_train_are_frozen_and_change_nothing() -> None:
    config = small_config(mtp=MtpConfig(depths=3))
    batch, all_depths = packed(), build_model(config)
    some = build_model(config, mtp_depths=1)
    fill(all_depths, seed=6)
    fill(some, seed=6)
    sums = some(batch)
    assert sums.shape == (2,) and torch.equal(sums, all_depths(batch)[:2])
    sums.sum().backward()
    frozen = {name for name, p in some.named_parameters() if not p.requires_grad}
    assert frozen == {p.name for p in some.spec.parameters() if p.name.startswith(("mtp.1.", "mtp.2."))}
    assert gradients(some).keys() == {name for name, p in some.named_parameters() if p.requires_grad}
    assert dict(some.named_parameters()).keys() == dict(all_depths.named_parameters()).keys()


def test_no_depth_running_leaves_the_main_loss() -> None:
    config = small_config(mtp=MtpConfig(depths=2))
    batch, model, without = packed(), build_model(config), build_model(config, mtp_depths=0)
    fill(model, seed=7)
    fill(without, seed=7)
    sums = without(batch)
    assert sums.shape == (1,) and torch.equal(sums[0], model(batch)[0])
    assert without.logits(batch)[1].shape[0] == 0


def test_shared_head_is_the_main_one_and_collects_all_gradients() -> None:
    batch = packed()
    own = build_model(small_config(mtp=MtpConfig(depths=2, head="own")))
    shared = build_model(small_config(mtp=MtpConfig(depths=2, head="shared")))
    fill(own, seed=8)
    with torch.no_grad():
        for depth in own.mtp:
            depth.head.weight.copy_(own.head.weight)
        for name, tensor in shared.logical_tensors():
            tensor.copy_(dict(own.logical_tensors())[name])
    assert not any(name.startswith("mtp.") and ".head." in name for name, _ in shared.named_parameters())
    assert torch.equal(own(batch), shared(batch))
    own(batch).sum().backward()
    shared(batch).sum().backward()
    total = own.head.weight.grad + own.mtp[0].head.weight.grad + own.mtp[1].head.weight.grad
    assert relative_error(shared.head.weight.grad, total) < 1e-6


@pytest.mark.parametrize("chain", ["pre_norm", "post_norm"])
def test_chain(chain: str) -> None:
    """Each depth from its parts: which hidden state it is handed."""
    model = build_model(small_config(mtp=MtpConfig(depths=2, chain=chain)))
    fill(model, seed=9)
    batch = random_batch(48, 2, LENGTH, seed=10)
    with torch.no_grad():
        _, logits = model.logits(batch)
        sequence = SequenceContext(batch.positions_BS, batch.documents_BS, SequenceShard.whole(LENGTH))
        x = model.embedding.weight[batch.tokens_BS].transpose(0, 1)
        for layer in model.layers.values():
            x = layer(x, sequence, None)
        handed = x if chain == "pre_norm" else model.final_norm(x)
        for k, depth in enumerate(model.mtp):
            following = torch.zeros_like(batch.tokens_BS)
            for t in range(LENGTH):
                if t + 1 + k < LENGTH:
                    following[:, t] = batch.tokens_BS[:, t + 1 + k]
            e = depth.embedding_norm(model.embedding.weight[following].transpose(0, 1))
            y = torch.cat([e, depth.hidden_norm(handed)], dim=-1) @ depth.projection.weight.t()
            y = depth.layer(y, sequence, None)
            normed = depth.final_norm(y)
            expected = (normed @ depth.head.weight.t()).transpose(0, 1)
            assert relative_error(logits[k], expected) < 1e-6
            handed = y if chain == "pre_norm" else normed
