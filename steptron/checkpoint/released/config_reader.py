"""Reads the keys of a released config.json into the fields of a ModelConfig; collects what is wrong with them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from steptron.checkpoint.released.config_format import (
    DEFAULT_NORM_EPS,
    DTYPES,
    KIND_NAMES,
    KINDS,
    KNOWN,
    ONLY,
    ONLY_IF_PRESENT,
    OTHER_ATTENTION_KEYS,
    SCALING_KEYS,
)
from steptron.checkpoint.released.config_keys import ConfigKeys, finite_number, layer_numbers, shown, whole_number
from steptron.checkpoint.released.names import Precision
from steptron.config.layout import AttentionKind, parse_layout


class ConfigReader:
    """Reads every key of one file."""

    def __init__(self, keys: ConfigKeys) -> None:
        self.keys = keys
        self.layers = keys.whole("num_hidden_layers", 1, 10_000)
        self.depths = keys.whole("num_nextn_predict_layers", 0, 100)
        self.kinds = self._layer_kinds()

    def model(self) -> dict[str, object]:
        """The fields of a ModelConfig; those that could not be read are None."""
        keys = self.keys
        for key, (value, why) in ONLY.items():
            keys.exactly(key, value, why)
        for key, (value, why) in ONLY_IF_PRESENT.items():
            keys.exactly(key, value, why, optional=True)
        if keys.values.get("use_rope_layers", ...) not in ([], None):
            keys.refuse("use_rope_layers", "[]: every layer has rotary embeddings")
        if keys.values.get("attention_dropout") not in (None, 0, 0.0):
            keys.refuse("attention_dropout", "0: there is no dropout")
        read_dtype(keys)
        self._outside_the_model()
        self._unknown_keys()

        rope = self._rope()
        head_dim = keys.whole("head_dim")
        heads, groups = keys.whole("num_attention_heads"), keys.whole("num_attention_groups")
        full = {"num_heads": heads, "num_kv_groups": groups, "rope": rope[AttentionKind.FULL]}
        sliding_heads, sliding_groups = self._sliding_heads(heads, groups, head_dim)
        sliding = {
            "num_heads": sliding_heads,
            "num_kv_groups": sliding_groups,
            "window": keys.whole("sliding_window"),
            "rope": rope[AttentionKind.SLIDING],
        }
        self._check_heads(full, sliding, head_dim)
        dense = self._dense_layers()
        return {
            "vocab_size": keys.whole("vocab_size"),
            "hidden_size": keys.whole("hidden_size"),
            "num_layers": self.layers,
            "num_dense_layers": dense,
            "layout": self._layout(other_heads=sliding_heads != heads),
            "head_dim": head_dim,
            "dense_hidden_size": keys.whole("intermediate_size"),
            "full": full,
            "sliding": sliding,
            "moe": self._moe(has_experts=dense is None or dense != self.layers),
            "clamp": {
                "routed": self._limits("swiglu_limits", dense),
                "shared": self._limits("swiglu_limits_shared", None),
            },
            "mtp": {"depths": self.depths},
            "norm_eps": self._norm_eps(),
        }

    def _outside_the_model(self) -> None:
        """Checks the types of token ids and lengths, which no field of a ModelConfig holds."""
        keys = self.keys
        for key in ("max_position_embeddings", "max_seq_len"):
            if keys.values.get(key) is not None:
                keys.whole(key)
        for key in ("bos_token_id", "eos_token_id"):
            ids = keys.values.get(key)
            if any(
                whole_number(token) is None for token in (ids if isinstance(ids, list) else [ids]) if ids is not None
            ):
                keys.refuse(key, "a token id, a list of them, or null")

    def _unknown_keys(self) -> None:
        for key, value in self.keys.values.items():
            if key not in KNOWN and value is not None and value is not False and value not in ("", [], {}):
                self.keys.problems.append(
                    f"{key} is {shown(value)}: no such key is known, so what it switches on would be left out; remove "
                    "it if the model does not depend on it"
                )

    # ------------------------------------------------------------------------------------ attention

    def _layer_kinds(self) -> list[AttentionKind] | None:
        """The kind of attention of every decoder layer and MTP depth."""
        names = self._per_layer("layer_types", trimmed=False)
        if names is None or self.layers is None:
            return None
        keys = self.keys
        wrong = {index: name for index, name in enumerate(names) if not isinstance(name, str) or name not in KINDS}
        keys.refuse_items("layer_types", wrong, "full_attention or sliding_attention")
        if wrong:
            return None
        kinds = [KINDS[str(name)] for name in names]
        depths = {index: names[index] for index in range(self.layers, len(kinds)) if kinds[index] is AttentionKind.FULL}
        keys.refuse_items("layer_types", depths, "sliding_attention: MTP depths have sliding attention")
        return kinds

    def _layout(self, *, other_heads: bool) -> str | None:
        """The layout string; None where none has these kinds."""
        gate = self.keys.flag("use_head_wise_attn_gate")
        if self.kinds is None:
            return None
        kinds = self.kinds[: self.layers]
        if kinds[0] is AttentionKind.SLIDING:
            self.keys.refuse_items("layer_types", {0: "sliding_attention"}, "full_attention: layer 0 is always full")
            return None
        pattern = _pattern(kinds)
        expected = _repeated(pattern, len(kinds))
        if expected != kinds:
            index = next(index for index, kind in enumerate(kinds) if kind is not expected[index])
            self.keys.refuse_items(
                "layer_types",
                {index: KIND_NAMES[kinds[index]]},
                f"{KIND_NAMES[expected[index]]}: after layer 0 the same numbers of sliding and full layers repeat, "
                f"here {pattern}",
            )
            return None
        sliding = AttentionKind.SLIDING in self.kinds
        return pattern + ("+heads" if other_heads and sliding else "") + ("+gate" if gate else "")

    def _sliding_heads(
        self, full_heads: int | None, full_groups: int | None, head_dim: int | None
    ) -> tuple[int | None, int | None]:
        """Query heads and key-value heads of sliding layers."""
        keys, name = self.keys, "attention_other_setting"
        setting = keys.values.get(name, ...)
        if setting is None:
            return full_heads, full_groups
        if not isinstance(setting, dict):
            keys.refuse(name, f"a mapping with {', '.join(OTHER_ATTENTION_KEYS)}, or null")
            return None, None
        inner = self._inner(name, setting, OTHER_ATTENTION_KEYS)
        inner.exactly("attention_type", "sliding_attention", "it is for the layers that are not full")
        for key in ("head_dim", "true_head_dim"):
            if head_dim is not None and finite_number(setting.get(key)) != head_dim:
                inner.refuse(key, f"{head_dim}, as head_dim: all layers have the same")
        return inner.whole("num_attention_heads"), inner.whole("num_attention_groups")

    def _check_heads(self, full: Mapping[str, Any], sliding: Mapping[str, Any], head_dim: int | None) -> None:
        places = {AttentionKind.FULL: (full, ""), AttentionKind.SLIDING: (sliding, "attention_other_setting.")}
        for kind, (attention, prefix) in places.items():
            heads, groups = attention["num_heads"], attention["num_kv_groups"]
            if self.kinds is None or kind not in self.kinds:
                continue
            own = kind is AttentionKind.FULL or self.keys.values.get("attention_other_setting") is not None
            if own and heads is not None and groups is not None and heads % groups:
                self.keys.problems.append(
                    f"{prefix}num_attention_heads is {heads}: it must be a multiple of "
                    f"{prefix}num_attention_groups ({groups})"
                )
            fraction = (attention["rope"] or {}).get("rotary_fraction")
            rotated = None if head_dim is None or fraction is None else fraction * head_dim
            if rotated is not None and (
                abs(rotated - round(rotated)) > 1e-6 or round(rotated) % 2 or round(rotated) == 0
            ):
                self.keys.problems.append(
                    f"{self.keys.name('partial_rotary_factors')} is {fraction} for {kind.value} layers: times head_dim "
                    f"({head_dim}) it must be a positive even number of rotated dimensions"
                )

    # ------------------------------------------------------------------------------------ rotary embeddings

    def _rope(self) -> dict[AttentionKind, dict[str, object] | None]:
        """The rope section of both kinds; None where something in it could not be read."""
        thetas = self._by_kind("rope_theta", largest=None)
        fractions = self._by_kind("partial_rotary_factors", largest=1.0)
        scalings = self._scalings()
        sections: dict[AttentionKind, dict[str, object] | None] = {}
        for kind in AttentionKind:
            if thetas is None or fractions is None or scalings is None:
                sections[kind] = None
            else:
                sections[kind] = {
                    "theta": thetas[kind],
                    "rotary_fraction": fractions[kind],
                    "scaling": scalings[kind],
                }
        return sections

    def _by_kind(self, key: str, largest: float | None) -> dict[AttentionKind, float] | None:
        """The one value that all layers of a kind have; the full layers' where there is no sliding layer."""
        keys = self.keys
        expected = "a finite number greater than 0" + ("" if largest is None else f", at most {largest:g}")
        given = keys.values.get(key)
        if finite_number(given) is not None:  # one number for all layers
            items: list[object] | None = [given] * len(self.kinds or [None])
        else:
            items = self._per_layer(key, trimmed=True)
        if items is None:
            return None
        numbers = [finite_number(item) for item in items]
        wrong = {
            index: items[index]
            for index, number in enumerate(numbers)
            if number is None or number <= 0 or (largest is not None and number > largest)
        }
        keys.refuse_items(key, wrong, expected)
        if wrong or self.kinds is None:
            return None
        found: dict[AttentionKind, float] = {}
        first: dict[AttentionKind, int] = {}
        different: dict[AttentionKind, dict[int, object]] = {}
        for index, (kind, number) in enumerate(zip(self.kinds, numbers, strict=False)):
            if number is None:
                continue
            if found.setdefault(kind, number) != number:
                different.setdefault(kind, {})[index] = items[index]
            first.setdefault(kind, index)
        for kind, others in different.items():
            same = f"{found[kind]:g}, as layer {first[kind]}: all {kind.value} layers have the same"
            keys.refuse_items(key, others, same)
        if AttentionKind.SLIDING in self.kinds and AttentionKind.SLIDING not in found and AttentionKind.FULL in found:
            keys.refuse(key, f"a list of {len(self.kinds)}: only the MTP depths are sliding, and theirs are not in it")
            return None
        if different or AttentionKind.FULL not in found:
            return None
        return {AttentionKind.SLIDING: found[AttentionKind.FULL], **found}

    def _scalings(self) -> dict[AttentionKind, dict[str, float] | None] | None:
        """The scaling of both kinds; None after a problem."""
        keys, name = self.keys, "rope_scaling"
        types = keys.values.get("yarn_only_types")
        if not isinstance(types, list) or any(not isinstance(kind, str) or kind not in KINDS for kind in types):
            keys.refuse(
                "yarn_only_types", "a list of full_attention and sliding_attention: the layers with rope_scaling"
            )
            types = None
        given = keys.values.get(name, ...)
        if given is None or given == {"rope_type": "default"}:
            return dict.fromkeys(AttentionKind)
        if not isinstance(given, dict):
            keys.refuse(name, f"a mapping with {', '.join(SCALING_KEYS)}, or null")
            return None
        before = len(keys.problems)
        inner = self._inner(name, given, SCALING_KEYS)
        inner.exactly("rope_type", "llama3", "other scalings are not supported")
        scaling = {
            "factor": inner.positive("factor"),
            "low_freq_factor": inner.positive("low_freq_factor"),
            "high_freq_factor": inner.positive("high_freq_factor"),
            "original_length": inner.whole("original_max_position_embeddings"),
        }
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        if low is not None and high is not None and low >= high:
            inner.refuse("low_freq_factor", f"less than {name}.high_freq_factor ({high:g})")
        if types == []:
            keys.refuse(
                "yarn_only_types",
                f"a list of the layers with {name}, full_attention or sliding_attention or both: implementations "
                "disagree about an empty one",
            )
        if len(keys.problems) > before or types is None:
            return None
        found = {key: number for key, number in scaling.items() if number is not None}
        return {kind: found if KIND_NAMES[kind] in types else None for kind in AttentionKind}

    # ------------------------------------------------------------------------------------ feed-forward layers

    def _dense_layers(self) -> int | None:
        """The number of leading dense layers."""
        keys, name, layers = self.keys, "moe_layers_enum", self.layers
        for key, only in (("moe_layer_offset", 0), ("moe_every_n_layer", 1)):
            value = keys.values.get(key)
            if value is not None and finite_number(value) != only:
                keys.refuse(key, f"{only}: {name} alone says which layers are MoE")
        use_moe = keys.flag("use_moe")
        if use_moe is False and keys.values.get(name) in (None, "", []):
            return layers
        numbers = layer_numbers(keys.values.get(name))
        if numbers is None:
            keys.refuse(name, "the numbers of the MoE layers, such as 3,4,5, as text or as a list")
            return None
        if use_moe is False:
            keys.refuse(name, "empty, as use_moe is false")
        elif use_moe is True and not numbers:
            keys.refuse(name, "the numbers of the MoE layers, as use_moe is true")
        if layers is None or not numbers or use_moe is not True:
            return None
        first = min(numbers)
        if any(number >= layers for number in numbers):
            keys.refuse(name, f"a run of layers that ends with {layers - 1}: MTP depths are dense")
        elif sorted(numbers) != list(range(first, layers)):
            keys.refuse(name, f"a run of layers without gaps that ends with the last decoder layer, {layers - 1}")
        return first

    def _moe(self, *, has_experts: bool) -> dict[str, object]:
        keys = self.keys
        experts, top_k = keys.whole("moe_num_experts", 1, 1_000_000), keys.whole("moe_top_k")
        if has_experts and experts is not None and top_k is not None and top_k > experts:
            keys.refuse("moe_top_k", f"at most {keys.name('moe_num_experts')} ({experts})")
        return {
            "num_experts": experts,
            "top_k": top_k,
            "expert_hidden_size": keys.whole("moe_intermediate_size"),
            "shared_hidden_size": keys.whole("share_expert_dim"),
            "scaling_factor": keys.positive("moe_router_scaling_factor"),
        }

    def _limits(self, key: str, dense_layers: int | None) -> dict[int, float]:
        """The clamp limits by layer; 0 and null are no limit.

        Args:
            dense_layers: leading layers that must not have one.
        """
        keys = self.keys
        if key in keys.values and keys.values[key] is None:
            return {}
        items = self._per_layer(key, trimmed=True)
        if items is None or self.layers is None:
            return {}
        numbers = [0.0 if item is None else finite_number(item) for item in items]
        wrong = {index: items[index] for index, number in enumerate(numbers) if number is None or number < 0}
        keys.refuse_items(key, wrong, "a finite number that is not negative, 0 for no limit")
        limits = {index: number for index, number in enumerate(numbers) if number is not None and number > 0}
        in_depths = {index: items[index] for index in limits if index >= self.layers}
        keys.refuse_items(key, in_depths, "0: MTP depths are not clamped")
        in_dense = {index: items[index] for index in limits if index < (dense_layers or 0)}
        keys.refuse_items(
            key, in_dense, "0: the layer is dense, and limits of dense layers are in swiglu_limits_shared"
        )
        return limits

    # ------------------------------------------------------------------------------------ the rest

    def _norm_eps(self) -> float | None:
        if self.keys.values.get("rms_norm_eps") is None:
            return DEFAULT_NORM_EPS
        epsilon = finite_number(self.keys.values["rms_norm_eps"])
        if epsilon is None or epsilon < 1e-30:
            self.keys.refuse("rms_norm_eps", "a finite number of at least 1e-30, or left out for 1e-5")
        return epsilon

    def _per_layer(self, key: str, *, trimmed: bool) -> list[object] | None:
        """A list with an entry per layer and MTP depth.

        Args:
            trimmed: whether the MTP depths may be left out.
        """
        if self.layers is None or self.depths is None:
            if not isinstance(self.keys.values.get(key), list):
                self.keys.refuse(key, "a list with an entry for every decoder layer and MTP depth")
            return None
        lengths = [self.layers + self.depths]
        if trimmed:
            lengths.append(self.layers)
        why = f"num_hidden_layers {self.layers} + num_nextn_predict_layers {self.depths}"
        return self.keys.items(key, lengths, why)

    def _inner(self, name: str, mapping: Mapping[str, object], known: Sequence[str]) -> ConfigKeys:
        """The keys of a mapping inside the file, which report to the same list of problems."""
        label = self.keys.name(name)
        for key in mapping:
            if key not in known:
                self.keys.problems.append(f"{label}.{key} is not known: known keys there are {', '.join(known)}")
        return ConfigKeys(mapping, {key: f"{label}.{key}" for key in known}, self.keys.problems)


def read_dtype(keys: ConfigKeys) -> Precision | None:
    name = keys.values.get("torch_dtype")
    if isinstance(name, str) and name in DTYPES:
        return DTYPES[name]
    keys.refuse("torch_dtype", "bfloat16 or float32")
    return None


def _pattern(kinds: Sequence[AttentionKind]) -> str:
    """The layout pattern that the first layers suggest: the release's where it fits, as it always does for up to four
    layers that begin full and go on sliding."""
    if AttentionKind.SLIDING not in kinds:
        return "FFFF"
    if _repeated("S3F1", len(kinds)) == list(kinds):
        return "S3F1"
    runs = [(kind, len(list(run))) for kind, run in itertools.groupby(kinds[1:])]
    # The first run after layer 0 is full only where no pattern fits.
    sliding = runs[0][1] if runs[0][0] is AttentionKind.SLIDING else 1
    full = runs[1][1] if len(runs) > 1 and runs[0][0] is AttentionKind.SLIDING else 1
    return f"S{sliding}F{full}"


def _repeated(pattern: str, layers: int) -> list[AttentionKind]:
    """The kinds of all decoder layers that a layout pattern stands for."""
    repeat, _ = parse_layout(pattern)
    return [AttentionKind.FULL, *itertools.islice(itertools.cycle(repeat), layers - 1)]
