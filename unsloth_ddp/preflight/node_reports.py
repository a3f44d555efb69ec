"""Turn the reports of all nodes into rows of the table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from unsloth_ddp.config.options import Settings
from unsloth_ddp.preflight import cross_node, identity
from unsloth_ddp.preflight.checks import Check, merge_checks, not_checked
from unsloth_ddp.preflight.folders import output_folder
from unsloth_ddp.utils.errors import one_line

# The report of each node by its number.
Reports = Mapping[int, Mapping[str, Any]]


def decode_check(values: Mapping[str, Any]) -> Check:
    """Return a Check that has been through JSON, where keys are text."""
    return Check(**{**values, "values": {int(n): text for n, text in values["values"].items()}})


def compare_reports(
    reports: Reports, gpus: Mapping[int, str], local_world_size: int, *, cpu: bool, settings: Settings, sharded: bool
) -> list[Check]:
    """Return the rows of all nodes, merged, and the rows that compare the nodes.

    Args:
        gpus: uuid of each rank's GPU; "" without one.
        cpu: the run is on the CPU.
        sharded: every rank writes its part of a checkpoint.
    """
    rows = merge_checks([decode_check(check) for report in reports.values() for check in report["checks"]])
    identities = {number: report["identity"] for number, report in reports.items()}

    def compare(name: str, rows_of: Callable[[dict[int, Any]], Check | list[Check]], row: str = "") -> list[Check]:
        """Compare one part of the identities; a node that could not read it gets a warning."""
        found = {number: mine[name] for number, mine in identities.items() if name in mine}
        unknown = {number: mine["unknown"][name] for number, mine in identities.items() if name in mine["unknown"]}
        bad = [not_checked(row or name, number, reason) for number, reason in unknown.items()]
        try:
            good = rows_of(found) if found else []
        except Exception as error:
            good = [
                not_checked(row or name, number, f"{type(error).__name__}: {one_line(error)}") for number in reports
            ]
        return merge_checks(bad) + (good if isinstance(good, list) else [good])

    rows += compare("versions", cross_node.compare_versions)
    rows += compare("code", cross_node.compare_code, "kit")
    rows += compare("settings", lambda found: cross_node.compare_settings(found, identity.PATHS))
    rows += compare("data", lambda found: cross_node.compare_files("data", found, "dataset"))
    rows += compare("model", lambda found: cross_node.compare_files("model", found, "model"))
    rows += compare("flags", cross_node.compare_variables, "environment flags")
    if len(gpus) == 1:
        return rows
    if not cpu:
        rows += compare("gpus", cross_node.compare_gpus, "same GPUs")
    uuids = {rank: uuid for rank, uuid in gpus.items() if uuid}
    if uuids:
        node_of = {rank: rank // local_world_size for rank in gpus}
        rows.append(cross_node.check_one_gpu_per_rank(uuids, node_of))
    others = {number: report for number, report in reports.items() if number}
    shared = {number: report["shared"] for number, report in others.items()}
    rows.append(cross_node.check_shared_folder(str(output_folder(settings)), shared, sharded))
    if others:
        skews = {n: None if r["skew"] is None else (r["skew"][0], r["skew"][1]) for n, r in others.items()}
        rows.append(cross_node.compare_clocks(skews))
    return rows
