"""``config.json`` of the released checkpoint, and our model configuration: both ways. No torch here.

The release's file has 45 keys. Reading refuses, by name, whatever this project does not compute the way the file asks
for; writing refuses whatever the file has no key for. Neither leaves a value out silently.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pydantic import ValidationError

from steptron.checkpoint.released.config_format import DEFAULT_NORM_EPS
from steptron.checkpoint.released.config_keys import ConfigKeys
from steptron.checkpoint.released.config_reader import ConfigReader, read_dtype
from steptron.checkpoint.released.config_writer import inexpressible, model_keys, over_base, wrong_clamps, wrong_scaling
from steptron.checkpoint.released.names import Precision
from steptron.checkpoint.released.transformers_config import released_keys
from steptron.config.schema import ModelConfig
from steptron.errors import ConfigError
from steptron.model.layer_spec import model_spec


def read_model_config(raw: Mapping[str, object], source: str) -> ModelConfig:
    """The architecture that a released ``config.json`` describes.

    Every key of the release must be there, except those outside the model (token ids, lengths, names of classes).
    Null is read as "none" for ``rope_scaling``, ``swiglu_limits``, ``swiglu_limits_shared``, ``use_rope_layers`` and
    ``attention_other_setting`` (sliding layers then have the full layers' heads); ``rms_norm_eps`` may be absent
    (1e-5). Other keys are refused unless their value is null, false or empty, or they are transformers' and change
    nothing in the forward pass. The file may also be one that transformers saved (see ``transformers_config``).

    Per-layer arrays have an entry for each decoder layer and each MTP depth. ``rope_theta``,
    ``partial_rotary_factors`` and the limits may stop at the decoder layers, as transformers trims them: the depths
    then have the sliding layers' RoPE and no limits. ``layer_types`` may not, because the kind of the depths is in it.
    ``moe_layers_enum`` may not be absent either: without it, implementations disagree about which layers are dense
    (the first one, or the first three), and none reads ``moe_layer_offset`` and ``moe_every_n_layer``.

    ``+heads`` is in the layout where sliding layers have another number of heads than full ones. What the file cannot
    say has our defaults: ``mtp.chain`` pre_norm, ``mtp.head`` own, ``clamp.position`` after_silu, ``init``. A model
    without any sliding layer gets the full layers' RoPE, without scaling, as ``sliding.rope``.

    Args:
        raw: content of the file.
        source: its name, for the error.

    Raises:
        ConfigError: lists every missing, unknown, wrong and unsupported key with the value that would be right.
    """
    values, names, problems = released_keys(raw)
    reader = ConfigReader(ConfigKeys(values, names, problems))
    fields = reader.model()
    if not problems:
        try:
            return ModelConfig.model_validate(fields)
        except ValidationError as error:
            problems += [f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors()]
    raise ConfigError(source, problems)


def read_precision(raw: Mapping[str, object], source: str) -> Precision:
    """The dtype of the stored weights: ``torch_dtype``, or ``dtype`` as newer transformers call it.

    Raises:
        ConfigError: neither is there, they differ, or the dtype is another one than bfloat16 and float32.
    """
    given = {key: raw[key] for key in ("torch_dtype", "dtype") if key in raw}
    values, names, problems = released_keys(given)
    precision = read_dtype(ConfigKeys(values, names, problems))
    if precision is None or problems:
        raise ConfigError(source, problems)
    return precision


def write_model_config(
    model: ModelConfig,
    precision: Precision,
    *,
    base: Mapping[str, object] | None = None,
    bos_token_id: int | None = None,
    eos_token_id: int | Sequence[int] | None = None,
    max_position_embeddings: int | None = None,
) -> dict[str, object]:
    """The released ``config.json`` of a model: the release's keys, without ``auto_map`` unless ``base`` has it.

    ``mtp.head: shared`` can be written: an exported checkpoint then holds the main output matrix once more for every
    depth. Attention kinds that the model does not have leave no trace in the file, nor does ``model.init``.

    Args:
        model: the architecture.
        precision: of the stored weights.
        base: the config.json that the weights came with. Keys that a ModelConfig does not hold are taken from it
            (token ids, lengths, ``architectures``, ``auto_map``, ``transformers_version`` and the like), everything
            else is written from ``model``, equal numbers in the form they have there. Must be readable by
            ``read_model_config``.
        bos_token_id, eos_token_id: token ids; when unset those of ``base``, or null.
        max_position_embeddings: longest sequence in tokens, also written as ``max_seq_len``; when unset that of
            ``base``.

    Raises:
        ConfigError: lists what the released layout cannot express (attention sinks, a post-norm MTP chain, clamps
            before SiLU, different scaling of full and sliding layers), what is wrong with the model, and a missing
            ``max_position_embeddings``.
    """
    title = "the model as a released config.json"
    problems = list(inexpressible(model))
    try:
        spec = model_spec(model)
    except ValueError as error:
        raise ConfigError(title, [*problems, str(error)]) from error
    problems += wrong_clamps(model)
    problems += wrong_scaling(spec)
    longest = max_position_embeddings or (base or {}).get("max_position_embeddings")
    if longest is None:
        problems.append("max_position_embeddings: neither given nor in the config.json that the weights came with")
    if problems:
        raise ConfigError(title, problems)

    written = model_keys(model, spec, precision)
    if model.norm_eps != DEFAULT_NORM_EPS or (base or {}).get("rms_norm_eps") is not None:
        written["rms_norm_eps"] = model.norm_eps
    if base is not None:
        read_model_config(base, "config.json that the weights came with")
    written = over_base(written, base or {})
    if bos_token_id is not None:
        written["bos_token_id"] = bos_token_id
    if eos_token_id is not None:
        written["eos_token_id"] = eos_token_id if isinstance(eos_token_id, int) else list(eos_token_id)
    written["max_position_embeddings"] = longest
    if max_position_embeddings is not None or written.get("max_seq_len") is None:
        written["max_seq_len"] = longest
    # What would be refused on the way back, such as more selected experts than there are, is not written.
    read_model_config(written, title)
    return written
