"""Roles decide; names and shapes do not."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from steptron.config.schema import OptimizerConfig, RoleOptimizerConfig
from steptron.model.layer_spec import ParameterRole, ParameterSpec, model_spec
from steptron.optim.rules import HIDDEN_MATRICES, ORTHOGONALISABLE, TRAINED_ROLES, Algorithm, Rule, rule_of
from tests.model.helpers import small_config


def options(**changes: Any) -> OptimizerConfig:
    return OptimizerConfig(**({"lr": 1.0, "weight_decay": 0.2} | changes))


def test_every_role_has_a_rule() -> None:
    for role in TRAINED_ROLES:
        muon = role in HIDDEN_MATRICES
        assert rule_of(options(), role) == Rule(Algorithm.MUON if muon else Algorithm.ADAMW, 1.0, 0.2), role
        assert rule_of(options(name="adamw"), role) == Rule(Algorithm.ADAMW, 1.0, 0.2)
        assert rule_of(options(name="sgd"), role) == Rule(Algorithm.SGD, 1.0, 0.2)
    assert set(ParameterRole) - set(TRAINED_ROLES) == {ParameterRole.ROUTER_BIAS}


def test_hidden_matrices_are_what_lies_between_embedding_and_heads() -> None:
    others = {
        ParameterRole.EMBEDDING,
        ParameterRole.HEAD,
        ParameterRole.NORM,
        ParameterRole.SINK,
        ParameterRole.ROUTER,
        ParameterRole.ROUTER_BIAS,
        ParameterRole.VALUE_HEAD,
    }
    assert (
        set(ParameterRole) - HIDDEN_MATRICES == others and {ParameterRole.ROUTER} == ORTHOGONALISABLE - HIDDEN_MATRICES
    )
    # And they are matrices: in every model each has two axes, or three with that of the experts.
    spec = model_spec(small_config(layout="S3F1+heads+gate+sink", value_head=True))
    seen: dict[ParameterRole, ParameterSpec] = {m.role: p for p in spec.parameters() for m in p.matrices}
    assert seen.keys() == set(ParameterRole)
    assert all(len(seen[role].shape) == (3 if seen[role].is_expert else 2) for role in ORTHOGONALISABLE)


@pytest.mark.parametrize("decay_norms", [True, False])
def test_norms_and_sinks_decay_by_option(decay_norms: bool) -> None:
    undecayed = {role for role in TRAINED_ROLES if not rule_of(options(decay_norms=decay_norms), role).weight_decay}
    assert undecayed == (set() if decay_norms else {ParameterRole.NORM, ParameterRole.SINK})


@pytest.mark.parametrize("name", ["muon", "adamw", "sgd"])
def test_a_role_of_its_own(name: str) -> None:
    roles = {
        "norm": RoleOptimizerConfig(decay=True, lr_multiplier=2.0),
        "head": RoleOptimizerConfig(decay=False),
        "router": RoleOptimizerConfig(lr_multiplier=0.0),
    }
    config = options(name=name, roles=roles, decay_norms=False)
    rules = {role: rule_of(config, role) for role in TRAINED_ROLES}
    own = {ParameterRole.NORM: (2.0, 0.2), ParameterRole.HEAD: (1.0, 0.0), ParameterRole.ROUTER: (0.0, 0.2)}
    for role, rule in rules.items():
        expected = own.get(role, (1.0, 0.0 if role is ParameterRole.SINK else 0.2))
        assert (rule.lr_multiplier, rule.weight_decay) == expected, role


def test_muon_or_adamw_by_role() -> None:
    roles = {"router": RoleOptimizerConfig(optimizer="muon"), "query": RoleOptimizerConfig(optimizer="adamw")}
    config = options(roles=roles)
    assert rule_of(config, ParameterRole.ROUTER).algorithm is Algorithm.MUON
    assert rule_of(config, ParameterRole.QUERY).algorithm is Algorithm.ADAMW
    assert rule_of(config, ParameterRole.KEY).algorithm is Algorithm.MUON


def test_rules_and_layouts_need_no_torch() -> None:
    """The planner reads them."""
    code = "import sys, steptron.optim.buffer_plan; assert 'torch' not in sys.modules and 'megatron' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
