"""Which algorithm updates a parameter, how fast, and whether it decays: by its declared role alone. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from steptron.config.schema import OptimizerConfig, RoleOptimizerConfig
from steptron.model.layer_spec import ParameterRole


class Algorithm(StrEnum):
    """What turns a gradient into an update; the values are those of the configuration."""

    MUON = "muon"
    ADAMW = "adamw"
    SGD = "sgd"


HIDDEN_MATRICES = frozenset(
    {
        ParameterRole.QUERY,
        ParameterRole.KEY,
        ParameterRole.VALUE,
        ParameterRole.HEAD_GATE,
        ParameterRole.ATTENTION_OUTPUT,
        ParameterRole.FFN_GATE,
        ParameterRole.FFN_UP,
        ParameterRole.FFN_DOWN,
        ParameterRole.EXPERT_GATE,
        ParameterRole.EXPERT_UP,
        ParameterRole.EXPERT_DOWN,
        ParameterRole.SHARED_GATE,
        ParameterRole.SHARED_UP,
        ParameterRole.SHARED_DOWN,
        ParameterRole.MTP_PROJECTION,
    }
)
"""Roles that Muon takes by default."""
ORTHOGONALISABLE = HIDDEN_MATRICES | {ParameterRole.ROUTER}
"""Roles that it can take. A router's rows are scores of experts rather than features: AdamW by default."""
TRAINED_ROLES = tuple(role for role in ParameterRole if role is not ParameterRole.ROUTER_BIAS)
"""Roles of parameters that get gradients."""


@dataclass(frozen=True)
class Rule:
    """How the parameters of a role are updated.

    Attributes:
        algorithm: what computes the update.
        lr_multiplier: times the learning rate of the step.
        weight_decay: decoupled, times the learning rate.
    """

    algorithm: Algorithm
    lr_multiplier: float
    weight_decay: float


def rule_of(config: OptimizerConfig, role: ParameterRole) -> Rule:
    """The rule of a role.

    Norms (zero-centred, so that decay pulls gamma towards 1) and sinks decay only with ``decay_norms``, unless
    ``roles`` says otherwise.
    """
    own = config.roles.get(role.value, RoleOptimizerConfig())
    algorithm = Algorithm(config.name)
    if algorithm is Algorithm.MUON:
        by_default = Algorithm.MUON if role in HIDDEN_MATRICES else Algorithm.ADAMW
        algorithm = by_default if own.optimizer is None else Algorithm(own.optimizer)
    decays = own.decay
    if decays is None:
        decays = config.decay_norms or role not in (ParameterRole.NORM, ParameterRole.SINK)
    return Rule(algorithm, own.lr_multiplier, config.weight_decay if decays else 0.0)
