"""The stages of a run: what each is configured as, and where in the run it lies.

A run without stages is a curriculum of one. A stage is the file's configuration with its own settings on top; it ends
at the first step boundary at or past its budget of tokens, counted from where it truly began, padding included. All of
this is known before the run starts: the number of a step tells its stage, and what every schedule says at it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from steptron.config.batch_schedule import BatchSchedule
from steptron.config.differences import differences
from steptron.config.schema import PretrainConfig, StageConfig

VARYING = (
    "model.full.rope.",
    "balance.",
    "loss.",
    "data.train",
    "data.validation",
    "data.sequence_length",
    "data.document_attention",
    "data.packing",
    "data.metadata",
    "optimizer.lr",
    "optimizer.schedule.",
    "optimizer.weight_decay",
    "optimizer.clip_grad_norm",
    "train.steps",
    "train.global_batch_size",
    "train.micro_batch_size",
    "train.batch_ramp",
    "train.freeze_backbone",
    "train.recompute",
    "train.validation.",
    "train.checkpoint.every_steps",
)
"""What stages may differ in: what a model is and where its run is kept stays the same."""


@dataclass(frozen=True)
class Stage:
    """A part of a run.

    Attributes:
        config: of the run while it is in the stage; ``train.steps`` are the stage's alone.
        name: empty where the run has no stages.
        tokens: budget, padding counted; None where the run has no stages.
        clone_mtp: the stage begins with MTP depth 1 copied to the others that it trains.
        number: from 0.
        first_step: steps of the stages before.
        first_sequence: sequences that they consume.
        first_token: tokens that they consume, padding counted.
    """

    config: PretrainConfig
    name: str = ""
    tokens: int | None = None
    clone_mtp: bool = False
    number: int = 0
    first_step: int = 0
    first_sequence: int = 0
    first_token: int = 0

    @property
    def last_step(self) -> int:
        """Steps done when it ends."""
        return self.first_step + self.config.train.steps

    @property
    def sequences(self) -> int:
        """Sequences that it consumes."""
        return BatchSchedule(self.config.train).consumed_after(self.config.train.steps)

    @property
    def consumed_tokens(self) -> int:
        """Tokens that it consumes, padding counted: its budget, and what its last step goes beyond it."""
        return self.sequences * self.config.data.sequence_length

    def consumed_before(self, step: int) -> int:
        """Sequences of the run consumed by its first ``step`` steps; ``step`` lies in the stage or at its borders."""
        return self.first_sequence + BatchSchedule(self.config.train).consumed_after(step - self.first_step)


@dataclass(frozen=True)
class Curriculum:
    """The stages of a run, in their order; at least one."""

    stages: tuple[Stage, ...]

    @classmethod
    def of(cls, config: PretrainConfig) -> Curriculum:
        """Of a run without stages."""
        return cls((Stage(config),))

    @classmethod
    def joined(cls, parts: Sequence[tuple[StageConfig, PretrainConfig]]) -> Curriculum:
        """From what each stage is and how the run is configured in it, whatever its ``train.steps``.

        Raises:
            ValueError: a stage needs more steps than a run may have.
        """
        stages: list[Stage] = []
        step = sequence = token = 0
        for number, (head, config) in enumerate(parts):
            assert head.tokens is not None, "the loader has counted what the tokens of its epochs are"
            sequences = -(-head.tokens // config.data.sequence_length)
            steps = BatchSchedule(config.train).steps_to_consume(sequences)
            if step + steps > 2**31 - 1:
                raise ValueError(f"stages.{number}.tokens ({head.tokens}): the run would have more than 2^31 - 1 steps")
            config = config.model_copy(update={"train": config.train.model_copy(update={"steps": steps})})
            stage = Stage(config, head.name, head.tokens, head.clone_mtp, number, step, sequence, token)
            stages.append(stage)
            step, sequence, token = stage.last_step, sequence + stage.sequences, token + stage.consumed_tokens
        return cls(tuple(stages))

    @property
    def is_staged(self) -> bool:
        """Whether the run has stages of its own."""
        return bool(self.stages[0].name)

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.stages[-1].last_step

    @property
    def sequences(self) -> int:
        """Sequences of the whole run."""
        return self.stages[-1].first_sequence + self.stages[-1].sequences

    def after(self, step: int) -> Stage:
        """The stage that goes on after ``step`` steps; the last one after all."""
        return next((stage for stage in self.stages if step < stage.last_step), self.stages[-1])

    def before(self, step: int) -> Stage:
        """The stage that made the last of ``step`` steps; the first one before all."""
        return next((stage for stage in self.stages if step <= stage.last_step), self.stages[-1])

    def through(self, name: str) -> Curriculum:
        """The run up to the end of a stage.

        Raises:
            KeyError: there is no stage of that name.
        """
        return Curriculum(self.stages[: self.named(name).number + 1])

    def named(self, name: str) -> Stage:
        """The stage of a name.

        Raises:
            KeyError: there is none; the message names those that there are.
        """
        for stage in self.stages:
            if stage.name == name:
                return stage
        raise KeyError(f"no stage is named {name!r}; there are {', '.join(stage.name for stage in self.stages)}")

    def problems(self) -> Iterator[str]:
        """What stages may not differ in, and names given twice."""
        seen: dict[str, int] = {}
        first = self.stages[0].config.model_dump(mode="json")
        for stage in self.stages:
            if stage.name in seen:
                yield f"stages.{stage.number}.name: {stage.name} is the name of stages.{seen[stage.name]} already"
            seen.setdefault(stage.name, stage.number)
            for key, one, other in differences(first, stage.config.model_dump(mode="json")):
                if not key.startswith(VARYING):
                    yield (
                        f"stages.{stage.number} ({stage.name}): {key} is {other}, but {one} in stages.0: it is the "
                        "same in all stages of a run; set it beside stages"
                    )
