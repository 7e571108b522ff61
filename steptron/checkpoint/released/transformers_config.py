"""config.json as ``transformers`` saves it, in the keys of the release.

``transformers`` (5.24, ``Step3p7TextConfig``) reads the release's config.json, but saves it with other keys: per-layer
arrays without the MTP depths, RoPE by kind of attention, the heads of sliding layers as overrides of single layers.
Keys of both forms may stand side by side; then they must say the same.
"""

from __future__ import annotations

from collections.abc import Mapping

from steptron.checkpoint.released.config_keys import layer_numbers, shown, whole_number

RENAMED = {
    "dtype": "torch_dtype",
    "num_key_value_heads": "num_attention_groups",
    "n_routed_experts": "moe_num_experts",
    "num_local_experts": "moe_num_experts",
    "num_experts_per_tok": "moe_top_k",
    "share_expert_dims": "share_expert_dim",
    "num_mtp_layers": "num_nextn_predict_layers",
}
"""Other names of the same value (its ``attribute_map``, and ``dtype``)."""

RESHAPED = (
    "mtp_layer_types",
    "mlp_layer_types",
    "mtp_mlp_layer_types",
    "num_sliding_attention_heads",
    "per_layer_config",
    "rope_parameters",
    "query_pre_attn_scalar",
)
"""Keys that hold what the release's ``layer_types``, ``moe_layers_enum``, ``attention_other_setting``, ``rope_theta``,
``partial_rotary_factors``, ``rope_scaling``, ``yarn_only_types`` and ``head_dim`` hold, in another form."""

_KINDS = ("full_attention", "sliding_attention")


def released_keys(raw: Mapping[str, object]) -> tuple[dict[str, object], dict[str, str], list[str]]:
    """Rewrites keys of transformers' form as the release's.

    Args:
        raw: content of a config.json, in either form.

    Returns:
        The content without transformers' keys; by the release's name, the keys that each rewritten value came from;
        and what is wrong with transformers' keys, one line each.
    """
    rewriter = _Rewriter(dict(raw))
    rewriter.rename()
    rewriter.layer_types()
    rewriter.moe_layers()
    rewriter.rope()
    rewriter.heads()
    rewriter.attention_scale()
    return rewriter.values, rewriter.names, rewriter.problems


class _Rewriter:
    def __init__(self, values: dict[str, object]) -> None:
        self.values = values
        self.names: dict[str, str] = {}
        self.problems: list[str] = []

    def rename(self) -> None:
        for other, key in RENAMED.items():
            if other in self.values:
                self._set(key, self.values.pop(other), other)

    def layer_types(self) -> None:
        depths = self._pop_list("mtp_layer_types")
        kinds, layers = self.values.get("layer_types"), self._layers()
        if depths is None or not isinstance(kinds, list) or layers is None:
            return
        if len(kinds) == layers:
            self.values["layer_types"] = kinds + depths
            self.names["layer_types"] = "layer_types + mtp_layer_types"
        elif kinds[layers:] != depths:
            self.problems.append(
                f"mtp_layer_types is {shown(depths)}, but layer_types ends with {shown(kinds[layers:])} for the MTP "
                "depths: they must be equal"
            )

    def moe_layers(self) -> None:
        decoder, depths = self._pop_list("mlp_layer_types"), self._pop_list("mtp_mlp_layer_types")
        layers = self._layers()
        if layers is None or (decoder is None and depths is None):
            return
        if decoder is None:
            self.problems.append("mtp_mlp_layer_types stands alone: mlp_layer_types must stand beside it")
            return
        if len(decoder) != layers:
            self.problems.append(
                f"mlp_layer_types is a list of {len(decoder)}: it must have num_hidden_layers ({layers}) entries"
            )
            return
        kinds = decoder + (depths or [])
        if wrong := [kind for kind in kinds if kind not in ("dense", "sparse")]:
            self.problems.append(
                f"mlp_layer_types and mtp_mlp_layer_types hold {shown(wrong[0])}: every entry must be dense or sparse"
            )
            return
        sparse = [index for index, kind in enumerate(kinds) if kind == "sparse"]
        if layer_numbers(self.values.get("moe_layers_enum")) != sparse:
            names = "mlp_layer_types" if depths is None else "mlp_layer_types + mtp_mlp_layer_types"
            self._set("moe_layers_enum", sparse, names)

    def rope(self) -> None:
        parameters = self.values.pop("rope_parameters", None)
        kinds = self.values.get("layer_types")
        if parameters is None:
            return
        expected = "a mapping with full_attention and sliding_attention, each with rope_type and rope_theta"
        if not isinstance(parameters, dict) or not all(
            kind in _KINDS and isinstance(inner, dict) and {"rope_type", "rope_theta"} <= set(inner)
            for kind, inner in parameters.items()
        ):
            self.problems.append(f"rope_parameters is {shown(parameters)}: it must be {expected}")
            return
        if not isinstance(kinds, list):
            return
        if absent := [kind for kind in _KINDS if kind in kinds and kind not in parameters]:
            self.problems.append(
                f"rope_parameters lacks {', '.join(absent)}, which layer_types has: it must be {expected}"
            )
            return
        by_layer = [parameters.get(kind, {}) if isinstance(kind, str) else {} for kind in kinds]
        self._set("rope_theta", [inner.get("rope_theta") for inner in by_layer], "rope_parameters: rope_theta")
        self._set(
            "partial_rotary_factors",
            [inner.get("partial_rotary_factor", 1.0) for inner in by_layer],
            "rope_parameters: partial_rotary_factor",
        )
        scaled = {
            kind: {key: value for key, value in inner.items() if key not in ("rope_theta", "partial_rotary_factor")}
            for kind, inner in parameters.items()
        }
        unscaled = {"rope_type": "default"}
        scaled = {kind: scaling for kind, scaling in scaled.items() if scaling != unscaled}
        scalings = list(scaled.values())
        if any(scaling != scalings[0] for scaling in scalings):
            self.problems.append(
                "rope_parameters has another scaling for full_attention than for sliding_attention: "
                "it must be one for all scaled layers"
            )
        elif scalings:
            self._set("rope_scaling", scalings[0], "rope_parameters")
            self._set("yarn_only_types", list(scaled), "rope_parameters")
        else:
            self._set("rope_scaling", None, "rope_parameters")
            self.values.setdefault("yarn_only_types", [])

    def heads(self) -> None:
        heads = self.values.pop("num_sliding_attention_heads", None)
        overrides = self.values.pop("per_layer_config", None)
        if heads is not None:
            setting = {
                "attention_type": "sliding_attention",
                "num_attention_heads": heads,
                "num_attention_groups": self.values.get("num_attention_groups"),
                "head_dim": self.values.get("head_dim"),
                "true_head_dim": self.values.get("head_dim"),
            }
            self._set("attention_other_setting", setting, "num_sliding_attention_heads")
        if not overrides:
            return
        kinds, layers = self.values.get("layer_types"), self._layers()
        setting_found = self.values.get("attention_other_setting")
        if not isinstance(kinds, list) or layers is None:
            return
        heads = (setting_found if isinstance(setting_found, dict) else self.values).get("num_attention_heads")
        wanted = {
            index: {"num_attention_heads": heads}
            for index, kind in enumerate(kinds[:layers])
            if kind == "sliding_attention"
        }
        given = {_number(index): inner for index, inner in overrides.items()} if isinstance(overrides, dict) else None
        if given != wanted:
            self.problems.append(
                f"per_layer_config is {shown(overrides)}: it must give every sliding layer "
                f"{{num_attention_heads: {shown(heads)}}} and no layer anything else"
            )

    def attention_scale(self) -> None:
        scalar, head_dim = self.values.pop("query_pre_attn_scalar", None), self.values.get("head_dim")
        if scalar is not None and (isinstance(scalar, bool) or scalar != head_dim):
            self.problems.append(
                f"query_pre_attn_scalar is {shown(scalar)}: it must be head_dim ({shown(head_dim)}), as scores are "
                "divided by its square root"
            )

    def _set(self, key: str, value: object, name: str) -> None:
        if self.values.get(key) is None:
            self.values[key] = value
            self.names[key] = name
        elif self.values[key] != value:
            also = self.names.get(key, key)
            self.problems.append(
                f"{name} and {also} say different things ({shown(value)} and {shown(self.values[key])}): "
                f"leave one out or make them equal"
            )

    def _pop_list(self, key: str) -> list[object] | None:
        value = self.values.pop(key, None)
        if value is None or isinstance(value, list):
            return value
        self.problems.append(f"{key} is {shown(value)}: it must be a list")
        return None

    def _layers(self) -> int | None:
        return whole_number(self.values.get("num_hidden_layers"))


def _number(layer: object) -> object:
    """A layer's number from a key of ``per_layer_config``: text, with leading zeros beside larger numbers."""
    return int(layer) if isinstance(layer, str) and layer.isdecimal() and len(layer) < 10 else layer
