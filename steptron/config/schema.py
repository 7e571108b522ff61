"""The typed configuration tree.

One pydantic model per concern; every field carries a one-line description with its unit. A field
is refused where it cannot be honoured, never ignored: what a single section can know is checked
here, what needs several sections (or the number of processes) is checked in
``steptron.config.checks``.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PositiveFloat, PositiveInt, model_validator

NonNegativeInt = Annotated[int, Field(ge=0)]
# Sizes of tensors and lengths of runs; the product of two fits into 64 bits.
Size = Annotated[int, Field(gt=0, le=2**31 - 1)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
# Their product, times a matrix's scale, must be a float32 number.
LearningRate = Annotated[float, Field(gt=0, le=1e30)]
Multiplier = Annotated[float, Field(ge=0, le=1e4)]
DecayRate = Annotated[float, Field(ge=0, lt=1)]
# float32 makes 0 of much smaller numbers, and 0/0 of what they should keep finite.
Seconds = Annotated[float, Field(gt=0, le=604_800)]
Epsilon = Annotated[float, Field(ge=1e-30)]


def names_file(text: str) -> bool:
    """Whether text can be the path of a file or folder: not empty, no NUL, no character without an encoding."""
    try:
        return b"\0" not in os.fsencode(text) and text != ""
    except UnicodeEncodeError:
        return False


def _check_path(value: object) -> object:
    if isinstance(value, str) and not names_file(value):
        raise ValueError("not the name of a file")
    return value


# Text from YAML becomes a path; every other type must be given as it is (see Section).
FilePath = Annotated[Path, Field(strict=False), BeforeValidator(_check_path)]


class Section(BaseModel):
    """Base of every section.

    Unknown keys are errors; values are not converted (no ``"10"`` or ``1.0`` for 10), must be finite
    and never change after loading.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, validate_default=True)


# ---------------------------------------------------------------------------------------- model


class RopeScalingConfig(Section):
    """llama3 frequency scaling of rotary embeddings (facts of the release: 2, 1, 32, 131072)."""

    factor: PositiveFloat = Field(description="divisor of the low frequencies")
    low_freq_factor: PositiveFloat = Field(
        1.0, description="periods per original length below which a frequency is fully scaled"
    )
    high_freq_factor: PositiveFloat = Field(
        32.0, description="periods per original length above which a frequency is kept"
    )
    original_length: Size = Field(description="context length before scaling, tokens")


class RopeConfig(Section):
    """Rotary position embedding of one attention kind."""

    theta: PositiveFloat = Field(description="base of the frequencies")
    rotary_fraction: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0, description="share of the head dimensions that is rotated"
    )
    scaling: RopeScalingConfig | None = Field(None, description="frequency scaling; none by default")


class AttentionConfig(Section):
    """Shape of one attention kind (full or sliding)."""

    num_heads: Size = Field(description="query heads")
    num_kv_groups: Size = Field(description="key-value heads")
    rope: RopeConfig = Field(description="rotary position embedding")


class SlidingAttentionConfig(AttentionConfig):
    """Sliding-window attention."""

    window: Size = Field(description="visible keys, the token itself included")


class MoeConfig(Section):
    """Mixture-of-experts feed-forward layers."""

    num_experts: PositiveInt = Field(le=1_000_000, description="routed experts per layer")
    top_k: Size = Field(description="experts selected per token")
    expert_hidden_size: Size = Field(description="width of one routed expert")
    shared_hidden_size: Size = Field(description="width of the shared expert")
    scaling_factor: PositiveFloat = Field(3.0, description="factor on the renormalised routing weights")


class ClampConfig(Section):
    """Activation clipping limits by decoder layer index (from 0); layers not named are not clamped."""

    routed: dict[int, PositiveFloat] = Field(default_factory=dict, description="limit of the routed experts, by layer")
    shared: dict[int, PositiveFloat] = Field(
        default_factory=dict, description="limit of the shared expert and of dense layers, by layer"
    )
    position: Literal["after_silu", "before_silu"] = Field(
        "after_silu", description="where the gate branch is clamped; the release clamps after SiLU"
    )


class MtpConfig(Section):
    """Multi-token-prediction depths."""

    depths: NonNegativeInt = Field(0, le=100, description="number of MTP modules")
    chain: Literal["pre_norm", "post_norm"] = Field(
        "pre_norm", description="hidden state handed to a depth: before or after the final norm"
    )
    head: Literal["own", "shared"] = Field("own", description="output matrix of a depth: its own, or the main model's")


class InitConfig(Section):
    """Initial values; every tensor's values are a pure function of (seed, logical name)."""

    std: PositiveFloat = Field(0.02, description="standard deviation of matrices")
    embedding_std: PositiveFloat | None = Field(
        None, description="standard deviation of the embedding; `std` when unset"
    )
    head_std: PositiveFloat | None = Field(
        None, description="standard deviation of the output matrices; `std` when unset"
    )
    router_std: PositiveFloat | None = Field(None, description="standard deviation of the router; `std` when unset")
    value_head_std: PositiveFloat = Field(1e-5, description="standard deviation of the value head")
    scale_residual_by_depth: bool = Field(
        True, description="divide the std of matrices that write to the residual by sqrt(2 x layers)"
    )


class ModelConfig(Section):
    """The architecture."""

    vocab_size: Size = Field(description="rows of the embedding and of the output matrices")
    hidden_size: Size = Field(description="width of the residual stream")
    num_layers: PositiveInt = Field(le=10_000, description="decoder layers, without MTP")
    num_dense_layers: NonNegativeInt = Field(description="leading layers with a dense feed-forward; the others are MoE")
    layout: str = Field(
        "S3F1+heads+gate",
        description="attention layout: FFFF, S1F1 or S3F1 after one leading full layer, then +heads, +gate, +sink",
    )
    head_dim: Size = Field(description="dimensions of one attention head")
    dense_hidden_size: Size = Field(description="width of the dense feed-forward layers and of the MTP depths")
    full: AttentionConfig = Field(description="full attention layers")
    sliding: SlidingAttentionConfig = Field(description="sliding-window attention layers")
    moe: MoeConfig = Field(description="mixture-of-experts layers")
    clamp: ClampConfig = Field(default_factory=ClampConfig, description="activation clipping")
    mtp: MtpConfig = Field(default_factory=MtpConfig, description="multi-token prediction")
    value_head: bool = Field(
        False,
        description="an output of one number for each token beside the output matrix, for a critic; pre-training keeps "
        "its weights as they are",
    )
    norm_eps: Epsilon = Field(1e-5, description="epsilon of every RMSNorm")
    init: InitConfig = Field(default_factory=InitConfig, description="initial values")


# ------------------------------------------------------------------------------------- balance


class BiasScheduleConfig(Section):
    """Loss-free balancing: rate u of the selection-bias update over training."""

    rate: NonNegativeFloat = Field(1e-3, description="update rate u per step; 0 turns the update off")
    decay_start_step: NonNegativeInt | None = Field(
        None, description="step at which u starts to fall linearly; never when unset"
    )
    decay_steps: PositiveInt | None = Field(None, description="steps over which u falls linearly to 0")
    final_rate: NonNegativeFloat | None = Field(
        None, description="u at the end of the run or stage, to which it goes linearly from `rate`; constant when unset"
    )


class BalanceConfig(Section):
    """Expert balance."""

    ep_loss_coefficient: NonNegativeFloat = Field(
        1e-3,
        description="weight of the EP-group balance loss; 0 turns it off, and so does a single group, for which "
        "the loss is constant",
    )
    ep_groups: PositiveInt | None = Field(
        None,
        description="groups G of the balance loss; the expert-parallel size (`parallel.expert`) when unset, "
        "and with 1 the loss, then constant, is left out",
    )
    bias: BiasScheduleConfig = Field(default_factory=BiasScheduleConfig, description="selection-bias update")
    freeze_router: bool = Field(
        False,
        description="keep router weights and selection biases as they are; "
        "`bias.rate` and `ep_loss_coefficient` are then 0 by default",
    )

    @model_validator(mode="before")
    @classmethod
    def _no_balancing_of_a_frozen_router(cls, values: Any) -> Any:
        """A frozen router's default bias rate and balance loss are 0; what was asked for is left to the checks."""
        if not isinstance(values, dict) or values.get("freeze_router") is not True:
            return values
        values = {"ep_loss_coefficient": 0.0, **values}
        bias = values.get("bias", {})
        return {**values, "bias": {"rate": 0.0, **bias}} if isinstance(bias, dict) else values


class LossConfig(Section):
    """How the parts of the training loss are combined."""

    mtp_weight: NonNegativeFloat = Field(0.3, description="weight of the MTP loss")
    mtp_decay: PositiveFloat = Field(0.6, description="ratio of the weights of successive MTP depths")
    mtp_train_depths: NonNegativeInt = Field(
        1,
        description="MTP depths that are trained, from the nearest on; others are frozen; 0 by default without MTP",
    )


# ------------------------------------------------------------------------------------ parallel


class ParallelConfig(Section):
    """How the model is laid over processes; what is left of the world size is data parallelism.

    Attention and dense layers are laid over tensor x context x data ranks, the experts of the same stage over
    expert x expert-data ranks, independently.
    """

    pipeline: PositiveInt = Field(1, description="pipeline stages")
    virtual_pipeline: PositiveInt = Field(
        1, description="model chunks per pipeline rank (interleaved schedule); with more than 1, pipeline must be too"
    )
    pipeline_layout: str | None = Field(
        None,
        description="what each of the pipeline x virtual_pipeline stages holds, in Megatron-Core's notation: E "
        "embedding, t decoder layer, m MTP depth, L loss, | between stages, (tt|)*3 repeats; an even split when unset",
    )
    expert: PositiveInt = Field(
        1, description="expert-parallel ranks, taken from a stage's tensor x context x data ranks"
    )
    tensor: PositiveInt = Field(1, description="tensor-parallel ranks (with sequence parallelism); experts stay whole")
    context: PositiveInt = Field(1, description="context-parallel ranks: each holds a share of every sequence")
    dispatcher: Literal["alltoall", "allgather", "flex"] = Field(
        "alltoall", description="how tokens travel to their experts; flex is DeepEP's, on GPUs"
    )
    overlap_expert_communication: bool = Field(
        False, description="compute the shared expert while tokens travel to the routed ones; on GPUs"
    )
    node_size: PositiveInt | None = Field(
        None,
        description="ranks per node; when set, gradients are reduced within nodes first, then between them",
    )
    timeout_seconds: PositiveInt = Field(
        600, le=604_800, description="longest wait for other processes, seconds; at most a week"
    )


RecomputePart = Literal["attention", "ffn", "norm", "activation", "moe_permutation"]


class RecomputeRuleConfig(Section):
    """Parts of some layers whose activations are computed again in the backward pass instead of being kept."""

    layers: str = Field(
        "all",
        description="which layers, separated by commas: all, full, sliding, dense, moe, mtp, or decoder layers by "
        "number such as 0-3",
    )
    parts: list[RecomputePart] = Field(
        min_length=1,
        description="attention: the attention block with its norm; ffn: the feed-forward block with its norm; norm: "
        "the norms' outputs; activation: the SwiGLU products; moe_permutation: token copies at their experts",
    )


# ---------------------------------------------------------------------------------------- data


class DatasetConfig(Section):
    """One indexed dataset of a blend."""

    path: FilePath = Field(description="folder written by `steptron data build`")
    weight: PositiveFloat = Field(
        1.0, description="share of tokens (of rows with packing best_fit), relative to the other datasets"
    )


class DataConfig(Section):
    """Training and validation data."""

    train: list[DatasetConfig] = Field(min_length=1, description="datasets to train on, blended by tokens")
    validation: list[DatasetConfig] = Field(
        default_factory=list, description="datasets to validate on; the validation split of `train` when empty"
    )
    sequence_length: Size = Field(description="tokens per sequence")
    document_attention: Literal["isolated", "crossing"] = Field(
        "isolated", description="whether attention stops at document borders and positions restart there"
    )
    packing: Literal["stream", "best_fit"] = Field(
        "stream",
        description="how sequences are filled: cut out of a stream of documents, or with whole documents and padding",
    )
    metadata: Literal["in_loss", "context_only"] = Field(
        "in_loss", description="whether metadata at the beginning of documents count in the loss"
    )
    metadata_in_loss_tokens: PositiveInt | None = Field(
        None,
        description="with metadata in_loss: tokens of the run or stage, padding counted, after which they are context "
        "only; never when unset",
    )
    seed: NonNegativeInt = Field(1234, description="seed of the order of samples")
    index_cache: FilePath | None = Field(
        None,
        description="folder of the orders of documents and samples, which all processes share; when unset, each "
        "process holds its own in memory",
    )


# --------------------------------------------------------------------------------------- train


class ScheduleSegmentConfig(Section):
    """One segment of a staged learning-rate schedule."""

    steps: Size = Field(description="length, optimizer steps")
    kind: Literal["constant", "linear", "cosine"] = Field("cosine", description="shape of the segment")
    end_lr: NonNegativeFloat = Field(description="learning rate at the end of the segment")


class ScheduleConfig(Section):
    """Learning rate over optimizer steps: linear warm-up from 0, then one shape, or stages."""

    kind: Literal["cosine", "constant", "staged"] = Field("cosine", description="shape after the warm-up")
    warmup_steps: NonNegativeInt = Field(0, description="steps of linear warm-up from 0 to `optimizer.lr`")
    warmup_fraction: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0, description="the same as a share of the steps of the run or stage, rounded to whole steps"
    )
    min_lr: NonNegativeFloat = Field(0.0, description="final learning rate of the cosine")
    segments: list[ScheduleSegmentConfig] = Field(
        default_factory=list, description="segments after the warm-up, for kind `staged`"
    )


class MuonDiagnosticsConfig(Section):
    """What is written down about Muon's updates, to `muon/` in the run's folder."""

    every_steps: PositiveInt | None = Field(None, description="steps between records of every matrix; off when unset")
    sample: PositiveInt = Field(
        8,
        description="matrices of each rank and record whose orthogonality error and stable rank are computed; records "
        "go through all matrices in turn",
    )


class MuonConfig(Section):
    """Muon: momentum, orthogonalised by Polar Express."""

    momentum: DecayRate = Field(0.95, description="decay of the momentum, which adds up gradients")
    nesterov: bool = Field(True, description="orthogonalise gradient + momentum x buffer instead of the buffer")
    steps: Annotated[int, Field(gt=0, le=100)] = Field(
        6, description="Polar-Express steps; beyond the eighth its last row repeats"
    )
    precision: Literal["fp16", "bf16", "fp32"] = Field(
        "fp16", description="dtype of the state and intermediates of Polar Express, after normalisation in fp32"
    )
    scale: Literal["match_rms_adamw", "spectral", "shape_scaling", "unit_rms_norm"] = Field(
        "match_rms_adamw",
        description="factor of the orthogonal update of a matrix [out, in]: 0.2 sqrt(max(out, in)), "
        "sqrt(max(out, in)), sqrt(max(1, out / in)) or sqrt(out / in)",
    )
    batch_elements: Size = Field(
        1 << 26, description="elements of the equal matrices that are orthogonalised at once, one matrix at least"
    )
    diagnostics: MuonDiagnosticsConfig = Field(
        default_factory=MuonDiagnosticsConfig, description="records of the updates"
    )


class RoleOptimizerConfig(Section):
    """What one role's parameters have of their own."""

    optimizer: Literal["muon", "adamw"] | None = Field(
        None,
        description="under `optimizer.name: muon`: which of both; by default Muon for hidden matrices, else AdamW",
    )
    lr_multiplier: Multiplier = Field(1.0, description="times the learning rate")
    decay: bool | None = Field(None, description="whether the weights decay; as usual for the role when unset")


class ShardingConfig(Section):
    """ZeRO-1: every rank keeps the optimizer's state for its share of the parameters that it holds with others."""

    reduction: Literal["auto", "reduce_scatter", "all_reduce"] = Field(
        "auto",
        description="how gradients are added up: reduce_scatter brings each to its owner alone, and pads where "
        "matrices do not divide evenly; all_reduce to all; auto decides for each buffer by `max_padding`",
    )
    max_padding: NonNegativeFloat = Field(
        0.15, description="with reduction auto: most padding of a buffer that is reduce-scattered, over its elements"
    )
    overlap_gather: bool = Field(
        True,
        description="updated parameters come in while the next forward pass runs, each waited for where it is used",
    )


class WeightClippingConfig(Section):
    """Clipping of experts' projections by what they put out, for comparison with activation clipping."""

    threshold: PositiveFloat | None = Field(
        None,
        description="largest norm of an expert projection's output over the tokens since the last checkpoint; larger "
        "ones are scaled back at a checkpoint; off when unset",
    )


class OptimizerConfig(Section):
    """The optimizer."""

    name: Literal["muon", "adamw", "sgd"] = Field(
        "muon",
        description="optimizer; muon takes AdamW for what is no hidden matrix; sgd (without momentum) serves "
        "comparisons of layouts",
    )
    lr: LearningRate = Field(description="peak learning rate")
    muon: MuonConfig = Field(default_factory=MuonConfig, description="Muon's own settings")
    beta1: DecayRate = Field(0.9, description="AdamW's decay of the first moment")
    beta2: DecayRate = Field(0.95, description="AdamW's decay of the second moment")
    eps: Epsilon = Field(1e-8, description="AdamW's epsilon of the denominator")
    weight_decay: NonNegativeFloat = Field(0.1, description="decoupled weight decay")
    decay_norms: bool = Field(
        True, description="apply weight decay to zero-centred norm weights too, as the report's trainer does"
    )
    roles: dict[str, RoleOptimizerConfig] = Field(
        default_factory=dict,
        description="settings of the parameters of a role, by its name (`steptron config roles` lists them)",
    )
    clip_grad_norm: NonNegativeFloat = Field(1.0, description="largest global gradient norm; 0 turns clipping off")
    schedule: ScheduleConfig = Field(default_factory=ScheduleConfig, description="learning-rate schedule")
    sharding: ShardingConfig = Field(default_factory=ShardingConfig, description="who owns what (ZeRO-1)")
    weight_clipping: WeightClippingConfig = Field(
        default_factory=WeightClippingConfig, description="clipping of experts' projections"
    )


class BatchRampConfig(Section):
    """Batch size ramp: from `start` in equal increments over `sequences` consumed sequences."""

    start: Size = Field(description="first global batch size, sequences")
    increment: Size = Field(description="sequences added at each step of the ramp")
    sequences: PositiveInt = Field(description="consumed sequences over which the ramp goes")


class CheckpointConfig(Section):
    """Saving and resuming."""

    every_steps: PositiveInt | None = Field(None, description="steps between checkpoints; only at the end when unset")
    asynchronous: bool = Field(
        True, description="go on training while a checkpoint is written; the state is copied in memory first"
    )
    keep: PositiveInt = Field(2, description="newest checkpoints that are kept")
    keep_every_steps: PositiveInt | None = Field(
        None, description="checkpoints at multiples of this many steps are kept for good; none when unset"
    )
    keep_best: NonNegativeInt = Field(
        0, description="checkpoints of lowest validation loss that are kept, of those at whose step the run validates"
    )
    keep_requested: NonNegativeInt = Field(
        2, description="newest checkpoints that alerts have asked for that are kept, each with the one before it"
    )
    tolerated_failures: NonNegativeInt = Field(
        2, description="checkpoints in a row that may fail to be written before the run stops; the last one may not"
    )
    verify: Literal["checksums", "sizes"] = Field(
        "checksums",
        description="how a run tests the checkpoint that it starts or goes on from: every byte, or only files' sizes",
    )


RejectedStepPolicy = Literal["stop", "skip", "roll_back"]
"""What a run does about a step that must not be made."""


class LossSpikeConfig(Section):
    """Steps whose loss jumps."""

    threshold: PositiveFloat | None = Field(
        None,
        description="nats by which the main head's loss may exceed the median of the steps before; not looked at when "
        "unset",
    )
    window: Size = Field(32, description="steps whose median is the usual loss; nothing is judged before as many")
    policy: RejectedStepPolicy = Field(
        "skip",
        description="stop the run; skip the batch without an update; roll back to the last checkpoint and leave out "
        "the data from there to the batch",
    )


class FaultsConfig(Section):
    """What a run does when something goes wrong."""

    on_non_finite: RejectedStepPolicy = Field(
        "stop",
        description="a loss or gradient is NaN or infinite: stop, skip the batch, or roll back to the last checkpoint "
        "and leave out the data from there to the batch",
    )
    loss_spike: LossSpikeConfig = Field(default_factory=LossSpikeConfig, description="steps whose loss jumps")
    max_in_a_row: PositiveInt = Field(
        3, description="skipped batches and roll-backs without a good step beyond them, after which the run stops"
    )
    replica_check_every_steps: PositiveInt | None = Field(
        None,
        description="steps between comparisons of parameters that several ranks hold, bit by bit; off when unset",
    )
    dead_after_seconds: Seconds = Field(
        30.0, ge=1, description="a process that gives no sign of life for so long counts as dead, and the run ends"
    )
    hang_after_seconds: Seconds | None = Field(
        None,
        description="time without progress after which the run counts as hanging: the stacks of all processes are "
        "written, and it ends; four fifths of parallel.timeout_seconds when unset",
    )


class ValidationConfig(Section):
    """Periodic validation."""

    every_steps: PositiveInt | None = Field(None, description="steps between validations; only at the end when unset")
    batches: PositiveInt = Field(
        8, description="global batches per validation, dealt to datasets by weight, one at least"
    )


class LoggingConfig(Section):
    """Where progress is written."""

    every_steps: PositiveInt = Field(1, description="steps between records")
    tensorboard: bool = Field(True, description="write TensorBoard files")
    wandb_project: str | None = Field(None, description="Weights & Biases project; off when unset")


class InitialWeightsMissingConfig(Section):
    """What becomes of parts of the model that the initial weights do not have."""

    mtp: Literal["refuse", "clone"] = Field(
        "refuse", description="MTP depths beyond theirs: refuse to start, or start each as a copy of depth 1"
    )
    value_head: Literal["refuse", "initialise"] = Field(
        "refuse", description="value head: refuse to start, or draw it at random (`model.init.value_head_std`)"
    )


class TrainConfig(Section):
    """The training loop."""

    output: FilePath = Field(description="folder of the run: checkpoints, logs, plots")
    steps: Size = Field(description="optimizer steps")
    global_batch_size: Size = Field(description="sequences per optimizer step, over all ranks")
    micro_batch_size: Size = Field(description="sequences per forward pass of one rank")
    batch_ramp: BatchRampConfig | None = Field(None, description="batch-size ramp; none by default")
    precision: Literal["fp32", "bf16"] = Field(
        "fp32", description="dtype of parameters and residual; bf16 keeps fp32 master weights"
    )
    products: Literal["auto", "fp32", "bf16"] = Field(
        "fp32",
        description="operands of matrix products under precision fp32 on CPUs: bf16 rounds them and adds up in "
        "float32 (needs AVX512-BF16 or AMX); auto takes bf16 where it is faster",
    )
    kernels: Literal["auto", "native", "plain"] = Field(
        "auto",
        description="operations on CPUs: native, compiled at installation, for precision fp32; plain, of torch; auto "
        "takes native where it can be used",
    )
    recompute: list[RecomputeRuleConfig] = Field(
        default_factory=list,
        description="what is computed again in the backward pass to save memory; every rule that names a layer counts",
    )
    initial_weights: FilePath | None = Field(
        None,
        description="weights that a new run starts from: a checkpoint, a run's folder or a released model's folder; "
        "drawn at random (`model.init`) when unset",
    )
    initial_weights_missing: InitialWeightsMissingConfig = Field(
        default_factory=InitialWeightsMissingConfig, description="parts of the model that they do not have"
    )
    freeze_backbone: bool = Field(
        False, description="train only the MTP depths of loss.mtp_train_depths; everything else stays as it is"
    )
    seed: NonNegativeInt = Field(1234, description="seed of the initial values")
    deterministic: bool = Field(False, description="use only deterministic operations")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="device; auto takes CUDA where there is one")
    threads: Annotated[int, Field(gt=0, le=4096)] | None = Field(
        None, description="CPU threads per process; when unset, OMP_NUM_THREADS or its share of the physical cores"
    )
    peak_tflops: PositiveFloat | None = Field(
        None, description="peak of one device in TFLOP/s, for MFU; known GPUs are looked up"
    )
    validation: ValidationConfig = Field(default_factory=ValidationConfig, description="periodic validation")
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig, description="saving and resuming")
    logging: LoggingConfig = Field(default_factory=LoggingConfig, description="progress records")
    faults: FaultsConfig = Field(default_factory=FaultsConfig, description="what to do when something goes wrong")

    def micro_batches(self, data_ranks: int) -> int:
        """Micro-batches of each of ``data_ranks`` data-parallel ranks in a step at the full batch size."""
        return self.global_batch_size // (self.micro_batch_size * data_ranks)


class TelemetryConfig(Section):
    """What goes to the metrics server, beside the run's own log."""

    server: str | None = Field(None, description="address of the metrics server, host:port; off when unset")
    run: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")] | None = Field(
        None, description="name of the run at the server; the last two parts of `train.output` when unset"
    )
    certificate: FilePath | None = Field(
        None, description="PEM file of the authority that signed the server's certificate; no TLS when unset"
    )
    every_steps: dict[str, NonNegativeInt] = Field(
        default_factory=dict,
        description="steps between measurements, by quantity, of matrices also by quantity and role; 0: never",
    )
    keep: dict[str, Literal["folded", "micro_batches"]] = Field(
        default_factory=dict,
        description="what is sent of a quantity that is measured in every micro-batch: every value, or count, sum, "
        "sum of squares, minimum and maximum of the step",
    )
    spool_gb: PositiveFloat = Field(
        1.0, description="GiB per rank in `train.output` for what the server has not yet taken"
    )


class StageConfig(Section):
    """What a stage of a curriculum is, beside the settings in which it differs from the rest of the file."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")] = Field(description="name of the stage")
    tokens: Annotated[int, Field(gt=0, lt=2**63)] | None = Field(
        None, description="tokens, padding counted, at or past which the stage ends, at a step boundary"
    )
    epochs: Annotated[float, Field(gt=0, le=1_000_000, allow_inf_nan=False)] | None = Field(
        None,
        description="instead of tokens: as many sequences as so many passes over all of the stage's training data have",
    )
    clone_mtp: bool = Field(
        False, description="begin with MTP depth 1 copied to the other depths that the stage trains"
    )


class PretrainConfig(Section):
    """The whole configuration of `steptron pretrain`; of a curriculum, that of one of its stages."""

    model: ModelConfig = Field(description="the architecture")
    balance: BalanceConfig = Field(default_factory=BalanceConfig, description="expert balance")
    loss: LossConfig = Field(default_factory=LossConfig, description="parts of the loss")
    parallel: ParallelConfig = Field(default_factory=ParallelConfig, description="layout over processes")
    data: DataConfig = Field(description="data")
    optimizer: OptimizerConfig = Field(description="optimizer")
    train: TrainConfig = Field(description="training loop")
    telemetry: TelemetryConfig = Field(
        default_factory=TelemetryConfig, description="measurements for the metrics server"
    )

    @model_validator(mode="before")
    @classmethod
    def _no_training_of_absent_mtp(cls, values: Any) -> Any:
        """Without MTP depths the default number of trained ones is 0."""
        if not isinstance(values, dict):
            return values
        model, loss = values.get("model"), values.get("loss", {})
        if isinstance(model, dict):
            mtp = model.get("mtp", {})
            depths = mtp.get("depths", 0) if isinstance(mtp, dict) else None
        else:
            depths = model.mtp.depths if isinstance(model, ModelConfig) else None
        return {**values, "loss": {"mtp_train_depths": 0, **loss}} if depths == 0 and isinstance(loss, dict) else values
