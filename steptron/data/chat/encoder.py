"""From lines of conversations to tokens: what each worker process does."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from steptron.data.chat.checks import check_trainable
from steptron.data.chat.conversation import Conversation, parse_conversation
from steptron.data.chat.masks import SampleTokenizer, TokenizedSample
from steptron.data.chat.pieces import Sample
from steptron.data.chat.problems import BadConversation, ConversationError
from steptron.data.chat.special import special_tokens
from steptron.data.chat.template import ChatTemplate
from steptron.data.encoding import EncodedBatch, is_validation
from steptron.data.readers import BadDocument, RawDocument
from steptron.data.tokenizer import Tokenizer


@dataclass
class Counts:
    """Conversations, the samples they became, and those samples' tokens and trained tokens."""

    conversations: int = 0
    samples: int = 0
    tokens: int = 0
    trained_tokens: int = 0

    def add(self, other: Counts) -> None:
        self.conversations += other.conversations
        self.samples += other.samples
        self.tokens += other.tokens
        self.trained_tokens += other.trained_tokens


@dataclass(frozen=True)
class EncodedConversations:
    """A batch of conversations as tokens, in input order.

    Attributes:
        documents: the samples.
        domains: counts by domain; "" for conversations that name none.
        bad: the refused conversations.
        passed_over: conversations of domains that were not asked for, by domain.
    """

    documents: EncodedBatch
    domains: dict[str, Counts]
    bad: list[BadConversation]
    passed_over: Counter[str]


@dataclass(frozen=True)
class ReadConversation:
    """A conversation that may be trained on.

    Attributes:
        raw: its line.
        conversation: what the line says.
        samples: its samples before they are tokens.
        identity: what copies of it share, however their lines are written.
    """

    raw: RawDocument
    conversation: Conversation
    samples: list[Sample]
    identity: bytes


@dataclass(frozen=True)
class ChatEncoder:
    """What turns batches of lines into tokens: a pure function of its fields and the lines.

    Attributes:
        tokenizer: what texts are tokenized with.
        template: how conversations are written.
        seed, validation_fraction: decide, with its content, which split a conversation belongs to.
        dtype: of the tokens.
        max_tokens: a conversation with a longer sample is refused; None refuses none.
        domains: others are passed over; None passes none over.
    """

    tokenizer: Tokenizer
    template: ChatTemplate
    seed: int
    validation_fraction: float
    dtype: np.dtype
    max_tokens: int | None = None
    domains: frozenset[str] | None = None
    samples: SampleTokenizer = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "samples", SampleTokenizer(self.tokenizer, special_tokens(self.tokenizer)))

    def __reduce__(self) -> tuple[object, ...]:
        """How a worker process rebuilds it: the tokenizer from the content of its file."""
        tokenizer = (self.tokenizer.file_bytes, self.tokenizer.eod_token)
        rest = (self.template, self.seed, self.validation_fraction, self.dtype, self.max_tokens, self.domains)
        return _rebuilt, (tokenizer, *rest)

    def encode(self, items: Sequence[RawDocument | BadDocument]) -> EncodedConversations:
        """Checks, renders and tokenizes a batch."""
        outcomes, passed_over = self._chosen([read_conversation(item, self.template) for item in items])
        rendered = [sample for read in outcomes if isinstance(read, ReadConversation) for sample in read.samples]
        tokenized = iter(self.samples.tokenize(rendered))
        kept: list[_Kept] = []
        bad: list[BadConversation] = []
        for outcome in outcomes:
            if isinstance(outcome, BadConversation):
                bad.append(outcome)
                continue
            entry = _Kept(outcome, [next(tokenized) for _ in outcome.samples])
            longest = max(sample.tokens_T.size for sample in entry.tokenized)
            if self.max_tokens is not None and longest > self.max_tokens:
                message = f"{longest:,} tokens, more than --max-tokens {self.max_tokens:,} allows: it is never cut"
                bad.append(BadConversation(outcome.raw.file, outcome.raw.line, None, "too_long", message))
            else:
                kept.append(entry)
        return EncodedConversations(self._joined(kept), _by_domain(kept), bad, passed_over)

    def _chosen(
        self, outcomes: list[ReadConversation | BadConversation]
    ) -> tuple[list[ReadConversation | BadConversation], Counter[str]]:
        """Those of the domains asked for, with all that are broken: nobody knows what they belong to."""
        kept: list[ReadConversation | BadConversation] = []
        passed_over: Counter[str] = Counter()
        for outcome in outcomes:
            domain = outcome.conversation.domain or "" if isinstance(outcome, ReadConversation) else None
            if self.domains is None or domain is None or domain in self.domains:
                kept.append(outcome)
            else:
                passed_over[domain] += 1
        return kept, passed_over

    def _joined(self, kept: Sequence[_Kept]) -> EncodedBatch:
        samples = [sample for entry in kept for sample in entry.tokenized]
        counts = [len(entry.tokenized) for entry in kept]
        # UTF-8 bytes of each sample's text, and of what is not trained of it.
        bytes_D2 = np.array([_bytes_of(sample) for entry in kept for sample in entry.read.samples], np.int64).reshape(
            -1, 2
        )
        validation = [is_validation(entry.read.identity, self.seed, self.validation_fraction) for entry in kept]
        return EncodedBatch(
            tokens_T=np.concatenate([np.zeros(0, np.int64), *(one.tokens_T for one in samples)]).astype(self.dtype),
            loss_mask_T=np.concatenate([np.zeros(0, np.uint8), *(one.loss_mask_T for one in samples)]),
            lengths_D=np.array([one.tokens_T.size for one in samples], np.int64),
            validation_D=np.repeat(np.array(validation, np.bool_), counts),
            text_bytes_D=bytes_D2[:, 0],
            masked_bytes_D=bytes_D2[:, 1],
            sources_D=np.repeat(np.array([entry.read.raw.source for entry in kept], np.int64), counts),
            bad=[],
        )


@dataclass(frozen=True)
class _Kept:
    read: ReadConversation
    tokenized: list[TokenizedSample]


def read_conversation(item: RawDocument | BadDocument, template: ChatTemplate) -> ReadConversation | BadConversation:
    """Reads, checks and renders one line."""
    if isinstance(item, BadDocument):
        return BadConversation(item.file, item.line, None, item.kind, item.message)
    try:
        line = item.payload.decode("utf-8")
        conversation = parse_conversation(line)
        check_trainable(conversation)
        return ReadConversation(item, conversation, template.samples(conversation), _identity(conversation))
    except UnicodeDecodeError as error:
        message = f"byte 0x{item.payload[error.start]:02x} at byte {error.start} of the line: {error.reason}"
        return BadConversation(item.file, item.line, None, "invalid_utf8", message)
    except ConversationError as error:
        return BadConversation(item.file, item.line, error.turn, error.kind, error.message)
    except RecursionError:  # what could just be parsed may be too deep to be walked through or written again
        return BadConversation(item.file, item.line, None, "invalid_json", "values are nested too deep")


def _bytes_of(sample: Sample) -> tuple[int, int]:
    """UTF-8 bytes of a sample's text, and of what is not trained of it."""
    masked = trained = 0
    for run in sample:
        size = len(run.text.encode("utf-8"))
        if run.trained:
            trained += size
        else:
            masked += size
    return masked + trained, masked


def _by_domain(kept: Sequence[_Kept]) -> dict[str, Counts]:
    domains: dict[str, Counts] = {}
    for entry in kept:
        tokens = sum(sample.tokens_T.size for sample in entry.tokenized)
        trained = sum(int(sample.loss_mask_T.sum()) for sample in entry.tokenized)
        counts = Counts(1, len(entry.tokenized), tokens, trained)
        domains.setdefault(entry.read.conversation.domain or "", Counts()).add(counts)
    return domains


def _identity(conversation: Conversation) -> bytes:
    """Decides the split: the messages and tools, without masks and domain."""
    turns = [
        (message.role, message.content, message.reasoning, [(call.name, call.arguments) for call in message.tool_calls])
        for message in conversation.messages
    ]
    return json.dumps([turns, conversation.tools], ensure_ascii=False).encode("utf-8")


def _rebuilt(
    tokenizer: tuple[bytes, str],
    template: ChatTemplate,
    seed: int,
    validation_fraction: float,
    dtype: np.dtype,
    max_tokens: int | None,
    domains: frozenset[str] | None,
) -> ChatEncoder:
    return ChatEncoder(Tokenizer(*tokenizer), template, seed, validation_fraction, dtype, max_tokens, domains)
