"""Whether a run can go on from a checkpoint under the configuration it is given now."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from steptron.checkpoint.manifest import Manifest
from steptron.config.differences import differences as all_differences
from steptron.config.schema import PretrainConfig, RoleOptimizerConfig, Section
from steptron.errors import UserError
from steptron.model.layer_spec import model_spec, trained_parameters
from steptron.optim.rules import TRAINED_ROLES, rule_of

_FIXED = ("model.", "optimizer.name", "train.precision")
_FREE = (
    "model.init.",
    "data.index_cache",
    "train.output",
    "train.initial_weights",
    "train.device",
    "train.threads",
    "train.kernels",
    "train.logging.",
    "parallel.timeout_seconds",
    "optimizer.sharding.overlap_gather",
    "optimizer.muon.diagnostics.",
)
"""Initial values are used up; the others say where and how a process works, not what it computes."""


def changes(saved: PretrainConfig, now: PretrainConfig, manifest: Manifest, datasets: list[str]) -> list[str]:
    """What differs between the checkpoint's configuration and the present one, a line each.

    Args:
        saved: the checkpoint's configuration.
        now: the run's.
        manifest: the checkpoint's manifest.
        datasets: content hashes of the run's training datasets.

    Raises:
        UserError: the state in the checkpoint has another meaning under the present configuration: another
            model, optimizer (for any role of the model's parameters) or precision. The message names each field and
            both values.
    """
    roles = saved.optimizer.roles | now.optimizer.roles
    found = list(_lines(_with_roles(saved, roles), _with_roles(now, roles), ""))
    fixed = [text for key, text in found if key.startswith(_FIXED) and not key.startswith(_FREE)]
    if not fixed:
        fixed = list(_other_algorithms(saved, now))
    if fixed:
        listed = "\n".join(f"  - {text}" for text in fixed)
        raise UserError(
            "this run's checkpoint was trained with other settings, under which its state has another meaning:\n"
            f"{listed}\nset them back, give another train.output, or start over with --fresh"
        )
    noted = [text for key, text in found if not key.startswith(_FREE)]
    if len(manifest.datasets) == len(datasets):
        noted += [
            f"data.train.{number}: the dataset has other content"
            for number, (before, after) in enumerate(zip(manifest.datasets, datasets, strict=True))
            if before != after
        ]
    return noted


def newly_trained(saved: PretrainConfig, now: PretrainConfig) -> frozenset[str]:
    """Logical matrices that get gradients now and had none before: a checkpoint has no optimizer state of them."""
    before, after = (
        {matrix.name for parameter in trained_parameters(config) for matrix in parameter.matrices}
        for config in (saved, now)
    )
    return frozenset(after - before)


def _other_algorithms(saved: PretrainConfig, now: PretrainConfig) -> Iterator[str]:
    """Roles of the model whose parameters another algorithm updated, whose state is of another kind; what else a role
    or Muon may be set to changes how that state is used, not what it is."""
    held = {matrix.role for parameter in model_spec(now.model).parameters() for matrix in parameter.matrices}
    for role in TRAINED_ROLES:
        before, after = (rule_of(config.optimizer, role).algorithm for config in (saved, now))
        if role in held and before is not after:
            yield f"optimizer.roles.{role.value}.optimizer: {before} before, {after} now"


def _with_roles(config: PretrainConfig, roles: Iterable[str]) -> dict[str, Any]:
    """A configuration as plain values, in which these roles have theirs, if only by default."""
    plain = config.model_dump(mode="json")
    unset = RoleOptimizerConfig().model_dump(mode="json")
    plain["optimizer"]["roles"] = {role: plain["optimizer"]["roles"].get(role, unset) for role in roles}
    return plain


def differences(saved: Section, now: Section, key: str) -> list[str]:
    """What differs between two sections of the same kind, a line for each value; ``key`` is their dotted name."""
    return [text for _, text in _lines(saved.model_dump(mode="json"), now.model_dump(mode="json"), key)]


def _lines(saved: object, now: object, key: str) -> Iterator[tuple[str, str]]:
    for name, before, after in all_differences(saved, now, key):
        yield name, f"{name}: {before} before, {after} now"
