"""The engine: requests in, tokens out, one step of all running sequences after the other.

A step takes the next tokens of every running sequence: the one that was sampled last, with what was drafted to follow
it, or a chunk of a prompt. Requests join and leave between any two steps. Who runs longest goes first; where blocks run
out, the youngest gives its own back and is computed again later.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from steptron.data.tokenizer import Tokenizer
from steptron.engine.blocks import OutOfBlocks, block_keys, more_keys
from steptron.engine.cache import Blocks, CacheSize, layer_groups
from steptron.engine.context import Work
from steptron.engine.draft_policy import DraftPolicy, FixedDrafts, MeasuredDrafts
from steptron.engine.request import GeneratedToken, Request, StopReason, Update
from steptron.engine.runner import Drafting, Runner
from steptron.engine.sampling import log_probabilities, verify
from steptron.engine.sequence import Sequence, TextEnd
from steptron.engine.statistics import Statistics
from steptron.errors import UserError, some_of
from steptron.model.assembly import StepModel


@dataclass(frozen=True)
class EngineOptions:
    """How an engine works.

    Attributes:
        longest_sequence: tokens of prompt and answer together, at most.
        cache_tokens: tokens that the full layers keep, of all sequences together; at least ``longest_sequence``.
        sequences: that run at once, at most.
        step_tokens: tokens of a step, at most; longer prompts are computed in chunks.
        block_size: tokens of a block of the cache.
        drafts: tokens to draft with the MTP depths, at most; 0 drafts none.
        measure_drafts: whether to draft only as many as are seen to pay; what is sampled then depends on time.
        share_prefixes: whether what is cached of a prompt serves others that begin alike.
    """

    longest_sequence: int = 4096
    cache_tokens: int = 65_536
    sequences: int = 64
    step_tokens: int = 512
    block_size: int = 16
    drafts: int = 0
    measure_drafts: bool = False
    share_prefixes: bool = True


class Engine:
    """Generates with a model in this process. Not for several threads at once.

    Args:
        model: whole, on one process, in evaluation mode; its MTP depths that run can draft.
        options: how.
        tokenizer: for text and stop strings; its end-of-document token ends answers.
        end_tokens: ids that end answers beside it.
        version: of the model's weights.
        clock: seconds, for deadlines.

    Raises:
        UserError: options that do not fit together or the model.
    """

    def __init__(
        self,
        model: StepModel,
        options: EngineOptions,
        tokenizer: Tokenizer | None = None,
        end_tokens: Iterable[int] = (),
        version: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        _check(options, model)
        self.model = model
        self.options = options
        self.tokenizer = tokenizer
        self.end_tokens = frozenset([*end_tokens, *([] if tokenizer is None else [tokenizer.eod_id])])
        self.version = version
        self.statistics = Statistics(options.drafts)
        size = CacheSize(options.block_size, options.cache_tokens, options.sequences, options.step_tokens)
        like = next(model.parameters()).detach()
        self.groups = layer_groups(model.spec, options.drafts, size, like)
        self._runner = Runner(model, self.groups)
        self._policy: DraftPolicy = (MeasuredDrafts if options.measure_drafts else FixedDrafts)(options.drafts)
        self._clock = clock
        self._sequences: dict[int, Sequence] = {}
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._ended: list[Update] = []
        self._next_id = 0

    # ------------------------------------------------------------------------------- requests

    def add(self, request: Request) -> int:
        """Takes a request; the answer comes with :meth:`step`.

        Raises:
            UserError: it cannot be honoured; the message says why.
        """
        return self.add_all([request])[0]

    def add_all(self, requests: list[Request]) -> list[int]:
        """Takes requests; of those with the same prompt, given together, the first computes it for all.

        Raises:
            UserError: one of them cannot be honoured; none is taken.
        """
        for request in requests:
            self._check_request(request)
        now, firsts = self._clock(), dict[tuple[int, ...], Sequence]()
        ids = []
        for request in requests:
            sequence = Sequence(
                id=self._next_id,
                request=request,
                expires=None if request.deadline_seconds is None else now + request.deadline_seconds,
                text=None if self.tokenizer is None else TextEnd(self.tokenizer.stream_decoder(), request.stop),
                tokens=list(request.prompt),
                blocks=[Blocks() for _ in self.groups],
                version=self.version,
                follows=firsts.get(request.prompt) if self.options.share_prefixes else None,
            )
            firsts.setdefault(request.prompt, sequence)
            self._next_id += 1
            self._sequences[sequence.id] = sequence
            self._waiting.append(sequence)
            ids.append(sequence.id)
        return ids

    def abort(self, request_id: int, detail: str = "") -> None:
        """Ends a request; nothing happens where it has ended."""
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self._end(sequence, "aborted", detail)

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._sequences or self._ended)

    @property
    def num_running(self) -> int:
        """Sequences that have blocks of the cache."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for room."""
        return len(self._waiting)

    # ------------------------------------------------------------------------------- steps

    def step(self) -> list[Update]:
        """Computes the next tokens of all running sequences.

        Returns:
            What is new, with the end of those that have ended since the last step.
        """
        now = self._clock()
        for sequence in [own for own in self._sequences.values() if own.expires is not None and own.expires <= now]:
            self._end(sequence, "deadline", f"{sequence.request.deadline_seconds:g} s are over")
        updates, self._ended = self._ended, []
        chosen = self._choose()
        if chosen:
            began, drafted = self._clock(), {len(sequence.drafts) for sequence, _ in chosen}
            is_prompt = any(sequence.pending > 1 for sequence, _ in chosen)
            computed = self._compute(chosen)
            self.statistics.steps += 1
            if not is_prompt and len(drafted) == 1:
                tokens = sum(len(update.tokens) for update in computed)
                self._policy.observe(len(chosen), drafted.pop(), tokens, self._clock() - began)
            updates += computed
        return updates

    def generate(self, requests: list[Request]) -> list[tuple[list[GeneratedToken], StopReason]]:
        """Answers of some requests, in their order, once all have ended. For use without a server.

        Raises:
            UserError: one of them cannot be honoured.
        """
        ids = self.add_all(requests)
        tokens: dict[int, list[GeneratedToken]] = {number: [] for number in ids}
        reasons: dict[int, StopReason] = {}
        while len(reasons) < len(ids):
            for update in self.step():
                if update.id in tokens:
                    tokens[update.id] += update.tokens
                    if update.stop_reason is not None:
                        reasons[update.id] = update.stop_reason
        return [(tokens[number], reasons[number]) for number in ids]

    def _choose(self) -> list[tuple[Sequence, int]]:
        """The sequences of a step with how many of their tokens, drafts included; the cache has room for them."""
        budget, chosen = self.options.step_tokens, list[tuple[Sequence, int]]()
        for sequence in list(self._running):
            if budget == 0:
                break
            if sequence not in self._running:  # gave its blocks to an older one
                continue
            count = min(sequence.pending + len(sequence.drafts), budget)
            if self._make_room(sequence, count):
                chosen.append((sequence, count))
                budget -= count
        passed_over: list[Sequence] = []
        while self._waiting and budget > 0 and len(self._running) < self.options.sequences:
            sequence = self._waiting.popleft()
            if self._is_being_computed(sequence.follows):
                passed_over.append(sequence)
                continue
            self._share_prefix(sequence)
            count = min(sequence.pending, budget)
            if not self._fits(sequence):
                self._give_back(sequence)
                self._waiting.appendleft(sequence)
                break
            for group, blocks in zip(self.groups, sequence.blocks, strict=True):
                group.extend(blocks, sequence.computed + count)
            self.statistics.shared_tokens += sequence.computed
            self._running.append(sequence)
            chosen.append((sequence, count))
            budget -= count
        self._waiting.extendleft(reversed(passed_over))
        # Those with equally many tokens are computed together.
        return sorted(chosen, key=lambda item: item[1])

    def _make_room(self, sequence: Sequence, count: int) -> bool:
        """Blocks for the next tokens of a running sequence, the youngest's if need be; False where it is that one."""
        while True:
            try:
                for group, blocks in zip(self.groups, sequence.blocks, strict=True):
                    group.extend(blocks, sequence.computed + count)
                return True
            except OutOfBlocks:
                youngest = self._running[-1]
                self._preempt(youngest)
                if youngest is sequence:
                    return False

    def _fits(self, sequence: Sequence) -> bool:
        """Whether all that is known of a sequence, and a token more, finds room beside those that run."""
        places = len(sequence.tokens) + 1
        for group, blocks in zip(self.groups, sequence.blocks, strict=True):
            visible = places if group.window is None else min(places, group.window + self.options.step_tokens)
            if -(-visible // group.block_size) - len(blocks.held) > group.pool.num_available:
                return False
        return True

    def _is_being_computed(self, first: Sequence | None) -> bool:
        return first is not None and first.id in self._sequences and first.computed < len(first.request.prompt)

    def _share_prefix(self, sequence: Sequence) -> None:
        """Takes what is cached of the sequence's beginning; the last token is always computed, for its logits."""
        sequence.version = self.version
        if not self.options.share_prefixes:
            return
        keys = block_keys(sequence.tokens[:-1], self.options.block_size, self.version)
        while keys and not all(group.has(keys) for group in self.groups):
            keys.pop()
        for group, blocks in zip(self.groups, sequence.blocks, strict=True):
            group.share(blocks, keys)
        sequence.keys = keys
        sequence.computed = len(keys) * self.options.block_size

    def _preempt(self, sequence: Sequence) -> None:
        """Takes a sequence's blocks; it is the next to get some."""
        self._running.remove(sequence)
        self._give_back(sequence)
        self._waiting.appendleft(sequence)
        self.statistics.preemptions += 1

    def _give_back(self, sequence: Sequence) -> None:
        for group, blocks in zip(self.groups, sequence.blocks, strict=True):
            group.release(blocks)
        sequence.forget()

    def _compute(self, chosen: list[tuple[Sequence, int]]) -> list[Update]:
        work = [Work(sequence.blocks, sequence.computed, count) for sequence, count in chosen]
        tokens: list[int] = []
        for sequence, count in chosen:
            drafted = [draft.token for draft in sequence.drafts]
            tokens += [*sequence.tokens[sequence.computed :], *drafted][:count]
        hidden = self._runner.hidden(tokens, work).split([count for _, count in chosen])
        self.statistics.computed_tokens += len(tokens)
        ready: list[tuple[Sequence, Tensor]] = []
        for (sequence, count), hidden_NH in zip(chosen, hidden, strict=True):
            if count < sequence.pending:
                sequence.drafts = []
                self._advance(sequence, hidden_NH)
            else:
                # Drafts beyond what the step has room for are forgotten.
                sequence.drafts = sequence.drafts[: count - sequence.pending]
                ready.append((sequence, hidden_NH))
        updates = self._sample(ready)
        self._draft([sequence for sequence, _ in ready if sequence.id in self._sequences])
        return updates

    def _sample(self, ready: list[tuple[Sequence, Tensor]]) -> list[Update]:
        """The next tokens of sequences of which all that is known, and what was drafted, is computed."""
        if not ready:
            return []
        rows = [1 + len(sequence.drafts) for sequence, _ in ready]
        logits_NV = self._runner.logits(torch.cat([h_NH[-own:] for (_, h_NH), own in zip(ready, rows, strict=True)]))
        sequences = [sequence for sequence, _ in ready]
        sampling = [own.request.sampling for own, count in zip(sequences, rows, strict=True) for _ in range(count)]
        log_p_NV = log_probabilities(logits_NV, sampling)
        chosen = verify(
            log_p_NV,
            [own.drafts for own in sequences],
            [own.request.sampling.seed for own in sequences],
            [len(own.tokens) for own in sequences],
        )
        begins = [0, *itertools.accumulate(rows)]
        described = self._described(
            logits_NV,
            log_p_NV,
            [
                (begin + row, token, own.request.alternatives)
                for begin, own, (tokens, _) in zip(begins, sequences, chosen, strict=False)
                for row, token in enumerate(tokens)
            ],
        )
        updates = []
        for (sequence, hidden_NH), (tokens, accepted) in zip(ready, chosen, strict=True):
            drafted = len(sequence.drafts)
            self.statistics.count_drafts(drafted, accepted)
            self._advance(sequence, hidden_NH[: len(hidden_NH) - drafted + accepted])
            sequence.drafts = []
            updates.append(self._accept(sequence, list(itertools.islice(described, len(tokens)))))
        return updates

    def _described(
        self, logits_NV: Tensor, log_p_NV: Tensor, chosen: list[tuple[int, int, int]]
    ) -> Iterator[GeneratedToken]:
        """Tokens with their log-probabilities, given for each its row, its id and how many alternatives are wanted."""
        rows, tokens, alternatives = (list(part) for part in zip(*chosen, strict=True))
        log_p = log_p_NV[rows, tokens].tolist()
        norms_N = logits_NV.logsumexp(dim=-1)
        raw = (logits_NV[rows, tokens] - norms_N[rows]).tolist()
        for row, token, wanted, as_sampled, own in zip(rows, tokens, alternatives, log_p, raw, strict=True):
            likeliest: tuple[tuple[int, float], ...] = ()
            if wanted:
                values, ids = (logits_NV[row] - norms_N[row]).topk(wanted)
                likeliest = tuple(zip(ids.tolist(), values.tolist(), strict=True))
            yield GeneratedToken(token, as_sampled, own, self.version, likeliest)

    def _accept(self, sequence: Sequence, tokens: list[GeneratedToken]) -> Update:
        """Puts tokens into an answer, as far as it goes."""
        added, text = list[GeneratedToken](), ""
        reason: StopReason | None = None
        for one in tokens:
            added.append(one)
            sequence.tokens.append(one.token)
            reason, more = self._end_after(sequence, one.token, len(sequence.generated) + len(added))
            text += more
            if reason is not None:
                break
        sequence.generated += added
        self.statistics.generated_tokens += len(added)
        if reason is not None:
            self._remove(sequence)
            self.statistics.ended[reason] += 1
        return Update(sequence.id, tuple(added), text, reason)

    def _end_after(self, sequence: Sequence, token: int, generated: int) -> tuple[StopReason | None, str]:
        """Whether an answer ends with a token, why, and the text that is certain by then."""
        request, text = sequence.request, sequence.text
        if token in self.end_tokens and not request.ignore_eos:
            return "eos", "" if text is None else text.finish()
        if token in request.stop_tokens:
            return "stop", "" if text is None else text.finish()
        more, stopped = ("", False) if text is None else text.push(token)
        if stopped:
            return "stop", more
        if generated >= request.max_tokens or len(sequence.tokens) >= self.options.longest_sequence:
            return "length", more if text is None else more + text.finish()
        return None, more

    def _advance(self, sequence: Sequence, hidden_NH: Tensor) -> None:
        """More of a sequence is computed, and is what it is: what others may use of it can be found."""
        sequence.computed += len(hidden_NH)
        if self.options.drafts:
            window = self.model.spec.mtp[0].layer.attention.window
            earlier = [] if sequence.hidden_NH is None else [sequence.hidden_NH]
            # Older places are not seen by the next one.
            sequence.hidden_NH = torch.cat([*earlier, hidden_NH])[0 if window is None else -max(window - 1, 1) :]
        if self.options.share_prefixes and sequence.version == self.version:
            before = len(sequence.keys)
            if more_keys(sequence.keys, sequence.tokens[: sequence.computed], self.options.block_size, self.version):
                for group, blocks in zip(self.groups, sequence.blocks, strict=True):
                    group.publish(blocks, sequence.keys, before)
        for group, blocks in zip(self.groups, sequence.blocks, strict=True):
            group.trim(blocks, sequence.computed)

    def _draft(self, sequences: list[Sequence]) -> None:
        """Drafts what may follow the last token of sequences, of which all others are computed."""
        depths = self._policy.choose(len(self._running))
        items: list[tuple[Sequence, Drafting]] = []
        for sequence in sequences if depths else ():
            # The last token of an answer is never a draft: one more is sampled after those that are accepted.
            if self._left(sequence) > 1 and sequence.hidden_NH is not None:
                start = sequence.computed - len(sequence.hidden_NH)
                known = sequence.tokens[start + 1 :]
                item = Drafting(sequence.blocks, start, sequence.hidden_NH, known, sequence.request.sampling)
                items.append((sequence, item))
        if not items:
            return
        items.sort(key=lambda item: len(item[1].known))
        self._runner.draft([item for _, item in items], depths)
        for sequence, item in items:
            sequence.drafts = item.drafts[: self._left(sequence) - 1]
            # The deeper depths have seen drafts at the last places, in the place of tokens that will be known.
            sequence.hidden_NH = item.hidden_NH[len(item.hidden_NH) - min(depths - 1, len(item.hidden_NH)) :]

    def _left(self, sequence: Sequence) -> int:
        """Tokens that an answer may still get."""
        return min(
            sequence.request.max_tokens - len(sequence.generated),
            self.options.longest_sequence - len(sequence.tokens),
        )

    # ------------------------------------------------------------------------------- ends

    def _end(self, sequence: Sequence, reason: StopReason, detail: str) -> None:
        text = "" if sequence.text is None else sequence.text.finish()
        self._remove(sequence)
        self.statistics.ended[reason] += 1
        self._ended.append(Update(sequence.id, (), text, reason, detail))

    def _remove(self, sequence: Sequence) -> None:
        del self._sequences[sequence.id]
        if sequence in self._running:
            self._running.remove(sequence)
        else:
            self._waiting.remove(sequence)
        self._give_back(sequence)

    # ------------------------------------------------------------------------------- weights

    def load_weights(
        self, version: int, tensors: Mapping[str, Tensor], cache: Literal["keep", "recompute"] = "recompute"
    ) -> None:
        """Takes new weights, between two steps. Answers that are under way go on with them.

        Args:
            version: of the weights; a higher one than before.
            tensors: all of the model's, by logical name.
            cache: what becomes of what old weights have computed of answers under way: ``keep`` it, or ``recompute`` it
                with the new ones, so that each new token is what they say.

        Raises:
            UserError: the version is no later one, or the tensors are not the model's; nothing has changed then.
        """
        if version <= self.version:
            raise UserError(f"weights of version {version} come after version {self.version}: versions only rise")
        own = dict(self.model.logical_tensors())
        problems = _differences(own, tensors)
        if problems:
            raise UserError(f"weights of version {version} are not this model's: {'; '.join(problems)}")
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(tensors[name])
        self.version = version
        for group in self.groups:
            group.pool.forget_all()
        for sequence in reversed(self._running.copy()):
            if cache == "recompute":
                self._running.remove(sequence)
                self._give_back(sequence)
                self._waiting.appendleft(sequence)
            else:
                sequence.version = None
        self.statistics.weight_updates += 1

    # ------------------------------------------------------------------------------- checks

    def _check_request(self, request: Request) -> None:
        problems = request.sampling.problems()
        longest, vocabulary = self.options.longest_sequence, self.model.spec.vocab_size
        if not request.prompt:
            problems.append("the prompt is empty: it has one token at least")
        elif not all(0 <= token < vocabulary for token in request.prompt):
            problems.append(f"the prompt has ids outside of the vocabulary: they are 0 to {vocabulary - 1}")
        if len(request.prompt) >= longest:
            problems.append(f"the prompt has {len(request.prompt):,} tokens: with an answer it has {longest:,} at most")
        if request.max_tokens < 1:
            problems.append(f"max_tokens is {request.max_tokens}: it is 1 at least")
        if request.stop and self.tokenizer is None:
            problems.append("stop strings need a tokenizer: give stop_tokens")
        if not all(request.stop):
            problems.append("a stop string is empty")
        if not 0 <= request.alternatives <= vocabulary:
            problems.append(f"alternatives is {request.alternatives}: it is between 0 and {vocabulary}")
        if problems:
            raise UserError("; ".join(problems))


def _check(options: EngineOptions, model: StepModel) -> None:
    problems = []
    for name in ("longest_sequence", "sequences", "step_tokens", "block_size"):
        if (value := getattr(options, name)) < 1:
            problems.append(f"{name} is {value}: it is 1 at least")
    if options.cache_tokens < options.longest_sequence:
        problems.append(
            f"cache_tokens is {options.cache_tokens}, less than longest_sequence ({options.longest_sequence}): "
            "one sequence has to fit"
        )
    if not 0 <= options.drafts <= model.mtp_depths:
        problems.append(f"drafts is {options.drafts}: the model has {model.mtp_depths} MTP depths to draft with")
    if problems:
        raise UserError("; ".join(problems))


def _differences(own: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> list[str]:
    missing, unknown = sorted(own.keys() - given.keys()), sorted(given.keys() - own.keys())
    shapes = [
        f"{name} is {list(given[name].shape)}, not {list(tensor.shape)}"
        for name, tensor in own.items()
        if name in given and given[name].shape != tensor.shape
    ]
    return [
        *([f"missing {some_of(missing)}"] if missing else []),
        *([f"unknown {some_of(unknown)}"] if unknown else []),
        *shapes[:20],
    ]
