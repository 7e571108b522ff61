"""The engine: what it generates is what the training forward says, however it is computed."""

from __future__ import annotations

import random

import pytest
import torch

from steptron.engine.engine import Engine, EngineOptions
from steptron.engine.request import GeneratedToken, Request
from steptron.engine.sampling import Sampling
from steptron.errors import UserError
from steptron.model.assembly import StepModel
from tests.data.corpora import small_tokenizer
from tests.engine.helpers import (
    VOCABULARY,
    WINDOW,
    deviation,
    new_model,
    predictable_model,
    random_requests,
    small_model,
    training_forward,
)

TOLERANCE = 2e-5


def engine_of(model: StepModel | None = None, **options: object) -> Engine:
    fields = {"longest_sequence": 128, "cache_tokens": 256, "sequences": 8, "step_tokens": 32, "block_size": 4}
    return Engine(model or small_model(), EngineOptions(**{**fields, **options}))  # type: ignore[arg-type]


def assert_nothing_is_kept(engine: Engine) -> None:
    assert not engine.has_work
    assert all(group.pool.num_available == group.pool.num_blocks for group in engine.groups)


@pytest.mark.parametrize("drafts", [0, 1, 2])
@pytest.mark.parametrize("step_tokens", [5, 32, 256])
def test_log_probabilities_are_those_of_training(drafts: int, step_tokens: int) -> None:
    """Prompts of 1 to 60 tokens, whole and in chunks, beside others that come and go; windows are 4 tokens."""
    engine = engine_of(drafts=drafts, step_tokens=step_tokens)
    requests = random_requests(20, seed=drafts)
    assert any(len(request.prompt) > 10 * WINDOW for request in requests)
    for request, (answer, reason) in zip(requests, engine.generate(requests), strict=True):
        assert len(answer) == request.max_tokens and reason == "length"
        assert deviation(small_model(), request, answer) < TOLERANCE
    assert_nothing_is_kept(engine)


def test_sequences_that_gave_their_blocks_away_go_on_as_if_nothing_had_been() -> None:
    requests = random_requests(20, seed=1)
    engine = engine_of(cache_tokens=128, drafts=2)
    answers = engine.generate(requests)
    assert engine.statistics.preemptions > 0 and engine.num_waiting == 0
    # What waits for room is counted when it gets some.
    assert engine.statistics.shared_tokens < sum(len(request.prompt) + request.max_tokens for request in requests)
    for request, (answer, _) in zip(requests, answers, strict=True):
        assert len(answer) == request.max_tokens and deviation(small_model(), request, answer) < TOLERANCE
    assert_nothing_is_kept(engine)


def test_what_is_sampled_depends_on_the_seed_alone() -> None:
    """Not on what is computed beside it, nor on chunks."""
    requests = random_requests(12, seed=2)
    together = engine_of().generate(requests)
    apart = [engine_of(step_tokens=7).generate([request])[0] for request in requests]
    assert [tokens_of(answer) for answer, _ in together] == [tokens_of(answer) for answer, _ in apart]
    other = engine_of().generate([Request(requests[0].prompt, Sampling(seed=99), max_tokens=40)])[0][0]
    assert tokens_of(other) != tokens_of(
        engine_of().generate([Request(requests[0].prompt, Sampling(seed=98), max_tokens=40)])[0][0]
    )


def tokens_of(answer: list[GeneratedToken]) -> list[int]:
    return [one.token for one in answer]


def test_greedy_answers_are_the_same_with_drafts() -> None:
    """On 100 prompts, but from where the two likeliest tokens are all but equal."""
    draw = random.Random(3)
    requests = [
        Request(tuple(draw.randrange(VOCABULARY) for _ in range(draw.randint(1, 30))), Sampling(0.0), max_tokens=24)
        for _ in range(100)
    ]
    model = predictable_model()
    plain = engine_of(model, cache_tokens=2048, step_tokens=256, sequences=32).generate(requests)
    drafting = engine_of(model, cache_tokens=2048, step_tokens=256, sequences=32, drafts=2)
    near_ties = []
    for request, (one, _), (other, _) in zip(requests, plain, drafting.generate(requests), strict=True):
        if tokens_of(one) != tokens_of(other):
            place = next(n for n, pair in enumerate(zip(one, other, strict=True)) if pair[0].token != pair[1].token)
            expected_TV = training_forward(model, [*request.prompt, *tokens_of(one)])
            first, second = expected_TV[len(request.prompt) - 1 + place].topk(2).values.tolist()
            assert first - second < 1e-5
            near_ties.append((request.prompt, place))
    assert len(near_ties) <= 1, near_ties
    drafted, accepted = drafting.statistics.drafted_D, drafting.statistics.accepted_D
    assert all(0.1 < right / all_ < 0.95 for right, all_ in zip(accepted, drafted, strict=True)), (accepted, drafted)
    assert drafting.statistics.steps < 0.9 * 100 * 24 / 32 * 2


def test_log_probabilities_as_sampled_are_those_after_temperature_and_truncation() -> None:
    ((answer, _),) = engine_of().generate(
        [Request((1, 2, 3), Sampling(temperature=0.5, top_k=5, seed=1), max_tokens=30, alternatives=7)]
    )
    for one in answer:
        tokens, raw = zip(*one.alternatives, strict=True)
        assert list(raw) == sorted(raw, reverse=True) and one.token in tokens[:5]
        scaled = torch.tensor(raw[:5]).double() / 0.5
        own = scaled[tokens.index(one.token)] - scaled.logsumexp(0)
        assert one.log_probability == pytest.approx(float(own), abs=1e-5)
        assert one.raw_log_probability == pytest.approx(raw[tokens.index(one.token)], abs=1e-6)
    ((greedy, _),) = engine_of().generate([Request((1, 2, 3), Sampling(0.0), max_tokens=3)])
    assert [one.log_probability for one in greedy] == [0.0] * 3 and greedy[0].raw_log_probability < 0


def test_answers_of_one_prompt_share_what_is_cached_of_it() -> None:
    prompt = tuple(range(40))
    engine = engine_of(cache_tokens=512, step_tokens=64)
    requests = [Request(prompt, Sampling(seed=seed), max_tokens=8) for seed in range(8)]
    answers = engine.generate(requests)
    assert engine.statistics.shared_tokens == 7 * 36  # whole blocks of 4; the last token has to be computed
    assert engine.statistics.computed_tokens < 40 + 7 * 4 + 8 * 8 + 1
    for request, (answer, _) in zip(requests, answers, strict=True):
        assert deviation(small_model(), request, answer) < TOLERANCE
    assert len({tuple(tokens_of(answer)) for answer, _ in answers}) > 1
    before = engine.statistics.computed_tokens
    later = engine.generate([Request((*prompt, 7, 7), max_tokens=1)])
    assert engine.statistics.computed_tokens == before + 2
    assert deviation(small_model(), Request((*prompt, 7, 7)), later[0][0]) < TOLERANCE
    assert_nothing_is_kept(engine)


def test_nothing_is_shared_where_it_is_not_wanted() -> None:
    engine = engine_of(share_prefixes=False)
    engine.generate([Request(tuple(range(20)), max_tokens=2)] * 2)
    assert engine.statistics.shared_tokens == 0


def test_sliding_layers_keep_their_window_alone() -> None:
    engine = engine_of(longest_sequence=4096, cache_tokens=4096, sequences=1, step_tokens=16)
    full, sliding = engine.groups
    assert full.window is None and sliding.window == WINDOW
    assert sliding.pool.num_blocks == -(-(WINDOW + 16) // 4) + 1
    request = Request(tuple(range(VOCABULARY)) * 10, max_tokens=50)
    ((answer, _),) = engine.generate([request])
    assert deviation(small_model(), request, answer) < TOLERANCE


def test_end_tokens_stop_strings_and_limits() -> None:
    model, tokenizer = small_model(), small_tokenizer()
    greedy = Sampling(0.0)
    ((answer, reason),) = engine_of().generate([Request((5, 6), greedy, max_tokens=12)])
    tokens = tokens_of(answer)
    assert reason == "length" and len(tokens) == 12
    third = tokens[2]
    stopped = tokens[: tokens.index(third) + 1]
    ((answer, reason),) = engine_of().generate([Request((5, 6), greedy, max_tokens=12, stop_tokens=frozenset([third]))])
    assert (tokens_of(answer), reason) == (stopped, "stop")
    for drafts in (0, 2):
        ending = Engine(model, EngineOptions(128, 256, 8, 32, 4, drafts), end_tokens=[third])
        ((answer, reason),) = ending.generate([Request((5, 6), greedy, max_tokens=12)])
        assert (tokens_of(answer), reason) == (stopped, "eos")
        ((answer, reason),) = ending.generate([Request((5, 6), greedy, max_tokens=12, ignore_eos=True)])
        assert (tokens_of(answer), reason) == (tokens, "length")
    ((answer, reason),) = engine_of(longest_sequence=6, cache_tokens=8).generate(
        [Request((5, 6), greedy, max_tokens=99)]
    )
    assert (tokens_of(answer), reason) == (tokens[:4], "length")
    # Text: the first 48 ids of the tokenizer are special tokens and bytes.
    writing = Engine(model, EngineOptions(128, 256, 8, 32, 4), tokenizer)
    ids, text = writing.add_all([Request((5, 6), greedy, max_tokens=12, ignore_eos=True)]), ""
    while writing.has_work:
        text += "".join(update.text for update in writing.step())
    assert text == tokenizer.decode(tokens, skip_special=True) and len(text) > 4
    stop = text[3:5]
    ids = writing.add_all([Request((5, 6), greedy, max_tokens=12, ignore_eos=True, stop=("never", stop))])
    seen, last = "", None
    while writing.has_work:
        for update in writing.step():
            seen, last = seen + update.text, update
    assert last is not None and (last.id, last.stop_reason) == (ids[0], "stop")
    assert seen == text[: text.index(stop)]


def test_ends_that_others_bring_about() -> None:
    now = [0.0]
    engine = Engine(small_model(), EngineOptions(128, 256, 2, 32, 4), clock=lambda: now[0])
    patient, hasty, unwanted, waiting = engine.add_all(
        [
            Request((1,), max_tokens=100),
            Request((2,), max_tokens=100, deadline_seconds=5.0),
            Request((3,), max_tokens=100),
            Request((4,), max_tokens=100, deadline_seconds=5.0),
        ]
    )
    for _ in range(3):
        engine.step()
    assert (engine.num_running, engine.num_waiting) == (2, 2)
    engine.abort(unwanted, "nobody listens")
    engine.abort(unwanted)
    engine.abort(12345)
    now[0] = 5.0
    ends = {update.id: update for update in engine.step() if update.stop_reason}
    assert {number: update.stop_reason for number, update in ends.items()} == {
        unwanted: "aborted",
        hasty: "deadline",
        waiting: "deadline",
    }
    assert ends[unwanted].detail == "nobody listens" and ends[hasty].detail == "5 s are over"
    while engine.has_work:
        last = engine.step()[-1]
    assert (last.id, last.stop_reason) == (patient, "length")
    assert engine.statistics.ended == {"aborted": 1, "deadline": 2, "length": 1}
    assert_nothing_is_kept(engine)


@pytest.mark.parametrize("drafts", [0, 2])
def test_new_weights_between_two_steps(drafts: int) -> None:
    """Each token has the version that computed it; with recomputation its log-probability is what that version says."""
    old, new = new_model(0), new_model(1)
    tensors = {name: tensor.detach().clone() for name, tensor in new.logical_tensors()}
    engine = engine_of(new_model(0), drafts=drafts)
    requests = random_requests(10, seed=5, longest_prompt=30)
    answers: dict[int, list[GeneratedToken]] = {number: [] for number in engine.add_all(requests)}
    for number in range(10_000):
        if number == 12:
            engine.load_weights(1, tensors, cache="recompute")
        for update in engine.step():
            answers[update.id] += update.tokens
        if not engine.has_work:
            break
    mixed = 0
    for request, answer in zip(requests, answers.values(), strict=True):
        versions = [one.version for one in answer]
        assert versions == sorted(versions) and len(answer) == request.max_tokens
        mixed += len(set(versions)) == 2
        tokens = [*request.prompt, *tokens_of(answer)]
        expected = [training_forward(model, tokens) for model in (old, new)]
        for place, one in enumerate(answer, start=len(request.prompt) - 1):
            assert abs(float(expected[one.version][place, one.token]) - one.raw_log_probability) < TOLERANCE
    assert mixed >= 3


def test_kept_caches_are_of_the_old_weights_and_nobody_else_gets_them() -> None:
    tensors = {name: tensor.detach().clone() for name, tensor in new_model(1).logical_tensors()}
    engine, prompt = engine_of(new_model(0)), tuple(range(30))
    (number,) = engine.add_all([Request(prompt, max_tokens=20)])
    answer: list[GeneratedToken] = []
    for _ in range(4):
        answer += [token for update in engine.step() for token in update.tokens]
    computed = engine.statistics.computed_tokens
    engine.load_weights(3, tensors, cache="keep")
    answer += [token for update in engine.step() for token in update.tokens]
    assert engine.statistics.computed_tokens == computed + 1
    assert answer[-1].version == 3
    tokens = [*prompt, *tokens_of(answer)]
    said = answer[-1].raw_log_probability
    for model in (small_model(0), new_model(1)):
        assert abs(float(training_forward(model, tokens)[len(tokens) - 2, tokens[-1]]) - said) > 1e-3
    # Another request with the same prompt gets what the new weights compute.
    request = Request(prompt, Sampling(seed=1), max_tokens=3)
    (other,) = engine.add_all([request])
    fresh: list[GeneratedToken] = []
    while engine.has_work:
        fresh += [token for update in engine.step() if update.id == other for token in update.tokens]
    assert engine.statistics.shared_tokens == 0 and deviation(new_model(1), request, fresh) < TOLERANCE
    assert number != other


def test_weights_that_are_not_the_models_change_nothing() -> None:
    engine = engine_of(new_model(0))
    before = {name: tensor.clone() for name, tensor in engine.model.logical_tensors()}
    good = {name: tensor + 1 for name, tensor in before.items()}
    name = "layers.3.attention.input_projection.weight"
    for tensors, version, said in (
        ({key: value for key, value in good.items() if key != name}, 1, f"missing {name}"),
        ({**good, "more": before[name]}, 1, "unknown more"),
        ({**good, name: before[name][1:]}, 1, f"{name} is ["),
        (good, 0, "versions only rise"),
    ):
        with pytest.raises(UserError, match=said.replace("[", r"\[")):
            engine.load_weights(version, tensors)
    assert engine.version == 0
    assert all(torch.equal(before[key], tensor) for key, tensor in engine.model.logical_tensors())


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (Request(()), "the prompt is empty"),
        (Request((VOCABULARY,)), "outside of the vocabulary: they are 0 to 47"),
        (Request((1,) * 128), "the prompt has 128 tokens: with an answer it has 128 at most"),
        (Request((1,), max_tokens=0), "max_tokens is 0"),
        (Request((1,), stop=("x",)), "stop strings need a tokenizer"),
        (Request((1,), alternatives=49), "alternatives is 49"),
        (Request((1,), Sampling(temperature=-1)), "temperature is -1"),
    ],
)
def test_requests_that_cannot_be_honoured(request_: Request, said: str) -> None:
    engine = engine_of()
    with pytest.raises(UserError, match=said):
        engine.add_all([Request((1,)), request_])
    assert not engine.has_work, "some were taken"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"cache_tokens": 100}, "cache_tokens is 100, less than longest_sequence"),
        ({"drafts": 3}, "drafts is 3: the model has 2 MTP depths"),
        ({"block_size": 0}, "block_size is 0"),
    ],
)
def test_options_that_do_not_fit(options: dict[str, int], said: str) -> None:
    with pytest.raises(UserError, match=said):
        engine_of(**options)
