"""The examination before a run: every process joins as in training, and rank 0 gets the report."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from steptron.config.schema import ParallelConfig, PretrainConfig
from steptron.errors import UserError
from steptron.platform import distributed
from steptron.platform.doctor import Check, Report
from steptron.platform.nodes import clocks, collectives, configuration, facts, folders, links, memory
from steptron.platform.nodes.peers import name_ranks, own_place, ranks_by_node, spans
from steptron.platform.nodes.roll import AbsentError, Roll

PLACES = "processes"

# A process that waits in a collective for one that is gone gives up after the group's timeout, later than the others.
_PATIENCE = 3.0
_NAMED_ERRORS = 4  # errors that a message lists


@dataclass
class Findings:
    """What rank 0 knows at the end.

    Attributes:
        checks: the lines of the report, in order.
        measured: by section, what was measured, as JSON holds it.
    """

    checks: list[Check] = field(default_factory=list)
    measured: dict[str, Any] = field(default_factory=dict)

    @property
    def report(self) -> Report:
        return Report(tuple(self.checks))

    def as_json(self) -> dict[str, Any]:
        """Everything, for a file."""
        return {"failed": self.report.failed, "checks": [asdict(check) for check in self.checks], **self.measured}


class _BrokenOffError(Exception):
    """Communication is in doubt: what would come next cannot be relied upon."""


def examine(
    device_name: Literal["auto", "cpu", "cuda"], timeout: float, config: PretrainConfig | None = None
) -> Findings | None:
    """Joins the other processes through training's own start-up, examines, and leaves.

    Args:
        device_name: as ``train.device``.
        timeout: longest wait for another process, seconds.
        config: configuration whose layout, data and output folder are looked at too.

    Returns:
        The findings on rank 0; None elsewhere.

    Raises:
        UserError: this process cannot join, or (elsewhere than on rank 0) the others have gone.
    """
    # A collective that reaches its timeout is to raise here, where the report names who was waited for, and not to
    # end the process from NCCL's watchdog.
    os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
    place = distributed.world()
    try:
        device, _ = distributed.start(device_name, None, timeout)
    except UserError as error:
        if place.rank > 0:
            raise
        return Findings([Check(PLACES, "start", "failed", "the processes did not meet", str(error))])
    findings = Findings()
    try:
        roll = Roll(_get_default_store(), place.rank, place.size, own_place(place.local_rank), timeout)
        address = "127.0.0.1" if place.master is None else place.master[0]
        try:
            Examination(roll, device, address, config, findings).run()
        except _BrokenOffError:
            # The groups are left as they are: destroying them would wait for those who are gone.
            roll.leave()
        else:
            roll.leave()
            distributed.shutdown()
    except AbsentError as error:
        if place.rank > 0:
            raise UserError(str(error)) from error
        findings.checks.append(Check(PLACES, "check-in", "failed", "not all processes are there", str(error)))
    return findings if place.rank == 0 else None


class Examination:
    """All sections in order. Rank 0 fills the findings; the others only take part.

    Args:
        roll: all processes.
        device: of this process, whose default process group exists.
        address: where rank 0 can be reached.
        config: configuration whose layout, data and output folder are looked at too.
        findings: to be filled.
    """

    def __init__(
        self, roll: Roll, device: torch.device, address: str, config: PretrainConfig | None, findings: Findings
    ) -> None:
        self.roll, self.device, self.address, self.config, self.findings = roll, device, address, config, findings

    def run(self) -> None:
        """Runs all sections.

        Raises:
            AbsentError: processes are missing; the message names them.
        """
        roll, peers = self.roll, self.roll.peers
        self._places()
        self._section("facts", lambda: facts.own_facts(self.device), lambda found: facts.compare(found, peers))
        self._section(
            "clocks",
            lambda: clocks.measure(roll, self.address, roll.timeout),
            lambda found: clocks.judge(found, peers),
            clocks.SECTION,
        )
        self._section("memory", self._memory, lambda found: memory.judge(found, peers))
        if self.config is None:
            self._note(Check(folders.SECTION, "data and output", "off", "not looked at", "--config FILE names them"))
        else:
            self._folders(self.config)
        layout = self._layout()
        self._section(
            "collectives",
            lambda: collectives.check_groups(groups_of(layout), self.device),
            lambda found: collectives.judge(found, peers),
            collectives.SECTION,
        )
        several = len(ranks_by_node(peers)) > 1
        for section, schedule in (
            *(((links.BETWEEN_NODES, links.between_nodes(roll.rank, peers)),) if several else ()),
            (links.INSIDE_NODES, links.inside_node(roll.rank, peers)),
        ):
            self._section(
                section,
                lambda schedule=schedule: links.measure(roll.rank, schedule, self.device),  # type: ignore[misc]
                lambda found, section=section: links.judge(  # type: ignore[misc]
                    section, _links(found), peers, links.message_bytes(self.device)
                ),
                section,
            )

    def _section(
        self,
        name: str,
        measure: Callable[[], Any],
        judge: Callable[[list[Any]], list[Check]],
        communicates: str | None = None,
    ) -> None:
        """Measures on every process, and judges on rank 0.

        An error on one process is the report's business. Where processes depend on each other in the
        measurement (``communicates``: its heading), the others' results are in doubt then, and it is the end.
        """
        try:
            own: dict[str, Any] = {"found": measure()}
        except (RuntimeError, OSError) as error:
            own = {"error": str(error) or repr(error)}
        said = self.roll.collect(name, own, _PATIENCE)
        go_on = True
        if said is not None:
            errors = {rank: answer["error"] for rank, answer in enumerate(said) if "error" in answer}
            if errors:
                named = "\n".join(
                    f"{name_ranks([rank], self.roll.peers)}: {errors[rank]}" for rank in list(errors)[:_NAMED_ERRORS]
                )
                what = f"errors on {name_ranks(errors, self.roll.peers)}"
                self.findings.checks.append(Check(communicates or name, "measurement", "failed", what, named))
            else:
                found = [answer["found"] for answer in said]
                self.findings.measured[name] = found
                self.findings.checks += judge(found)
            go_on = not (errors and communicates)
        if not self.roll.tell(f"{name} done", go_on):
            raise _BrokenOffError

    def _places(self) -> None:
        if not self.roll.is_first:
            return
        peers = self.roll.peers
        nodes = ranks_by_node(peers)
        counts = sorted({len(ranks) for ranks in nodes})
        self.findings.measured["processes"] = [asdict(peer) for peer in peers]
        hosts = ", ".join(peers[ranks[0]].host for ranks in nodes[:4]) + (", …" if len(nodes) > 4 else "")
        self._note(
            Check(
                PLACES,
                "all are there",
                "ok",
                f"{len(peers)} on {len(nodes)} node{'s' if len(nodes) > 1 else ''}",
                hosts,
            )
        )
        if len(counts) > 1:
            few = [ranks for ranks in nodes if len(ranks) < counts[-1]]
            advice = "fewer on " + ", ".join(peers[ranks[0]].host for ranks in few[:4])
            self._note(Check(PLACES, "per node", "warning", f"{counts[0]} to {counts[-1]}", advice))
        else:
            self._note(Check(PLACES, "per node", "ok", f"{counts[0]}"))
        scattered = [ranks for ranks in nodes if ranks[-1] - ranks[0] + 1 != len(ranks) or ranks != sorted(ranks)]
        if scattered:
            example = f"{peers[scattered[0][0]].host} has ranks {spans(scattered[0])}"
            advice = f"{example}: expert groups then span nodes; use srun --distribution=block"
            self._note(Check(PLACES, "order", "warning", "ranks of a node are not consecutive", advice))

    def _memory(self) -> dict[str, float]:
        return memory.own_memory(self.device, sum(peer.node == self.roll.own.node for peer in self.roll.peers))

    def _folders(self, config: PretrainConfig) -> None:
        peers = self.roll.peers
        self._section("data", lambda: folders.own_data(config), lambda found: folders.judge_data(found, peers))
        for check in folders.exchange_tokens(self.roll, config.train.output) or ():
            self._note(check)

    def _layout(self) -> ParallelConfig:
        """The configuration's, where it fits, or an example; with this examination's timeout instead of a run's."""
        roll, config = self.roll, self.config
        timeout = {"timeout_seconds": math.ceil(roll.timeout)}
        if config is not None:
            self._section(
                configuration.SECTION,
                lambda: configuration.own_problems(config, roll.size),
                lambda found: configuration.judge(found, roll.peers),
            )
            refused = any(
                check.section == configuration.SECTION and check.status == "failed" for check in self.findings.checks
            )
            if not roll.tell("layout refused", refused):
                return config.parallel.model_copy(update=timeout)
        return example_layout(roll.size, min(map(len, ranks_by_node(roll.peers)))).model_copy(update=timeout)

    def _note(self, check: Check) -> None:
        if self.roll.is_first:
            self.findings.checks.append(check)


def example_layout(size: int, node_size: int) -> ParallelConfig:
    """A layout whose groups are inside nodes (experts) and across them (stages), where none was named.

    Args:
        size: number of processes.
        node_size: smallest number of processes per node.
    """
    pipeline = 2 if size % 2 == 0 else 1
    return ParallelConfig(pipeline=pipeline, expert=math.gcd(size // pipeline, node_size))


def groups_of(layout: ParallelConfig) -> dict[str, dist.ProcessGroup]:
    """The world and Megatron-Core's groups of a layout that this process belongs to, by name."""
    # After start, so that Megatron-Core is imported with its CPU compatibility in place.
    from steptron.parallel.mesh import build_mesh

    mesh = build_mesh(layout)
    groups = mesh.groups
    assert dist.group.WORLD is not None
    by_name = {
        "world": dist.group.WORLD,
        "pipeline": groups.pp,
        "tensor": groups.tp,
        "context": groups.cp,
        "tensor x context": groups.tp_cp,
        "data": groups.dp,
        "context x data": groups.dp_cp,
        "tensor x context x data": groups.tp_dp_cp,
        "expert": groups.ep,
        "expert-data": groups.expt_dp,
    }
    for name, factored in mesh.by_node.items():
        factors = {f"{name} within nodes": factored.intra, f"{name} between nodes": factored.inter}
        by_name |= {label: group for label, group in factors.items() if group is not None}
    return by_name


def _links(found: Sequence[Sequence[Sequence[Any]]]) -> list[links.Link]:
    return [links.Link(*link) for own in found for link in own]


def write_json(findings: Findings, file: Path) -> None:
    """Writes everything that was found.

    Raises:
        UserError: the file cannot be written.
    """
    import json

    try:
        file.write_text(json.dumps(findings.as_json(), indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"--json {file}: {error.strerror}") from error
