"""Write the checks as a table for people and as JSON for programs."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from unsloth_ddp.preflight.bandwidth import CollectiveTiming
from unsloth_ddp.preflight.checks import Check, exit_code, name_nodes, summarize_checks, worst_verdict
from unsloth_ddp.utils.json_file import write_json
from unsloth_ddp.utils.tables import Column, fit_text, render_table

COLOURS = {"ok": "green", "warning": "yellow", "failure": "bold red"}


def show_checks(
    checks: Sequence[Check],
    title: str,
    hosts: Mapping[int, str],
    timings: Sequence[CollectiveTiming] = (),
    *,
    json_file: str | None,
    writes: bool,
) -> int:
    """Print the table, or JSON in its place; return the exit code.

    Args:
        hosts: the name of every node.
        json_file: a file that gets the JSON too, "-" for standard output in place of the table, None for neither.
        writes: this node writes the file.
    """
    content = checks_as_json(checks, hosts, timings)
    if json_file == "-":
        print(json.dumps(content, indent=2), flush=True)
    else:
        print(render_checks(checks, title, colour=sys.stdout.isatty()))
        print(fit_text(verdict_line(checks)), flush=True)
    if json_file not in (None, "-") and writes:
        try:
            write_json(Path(str(json_file)), content)
        except OSError as error:
            print_message(f"preflight: --json {json_file} cannot be written: {error.strerror}; name another file.")
    return exit_code(checks)


def render_checks(checks: Sequence[Check], title: str, *, width: int | None = None, colour: bool = False) -> str:
    """Return the table: check, value of each node, verdict, remedy."""
    rows = [[check.name, merge_values(check.values), check.verdict, check.remedy] for check in checks]
    columns = [Column("Check"), Column("Found"), Column("Verdict", styles=COLOURS), Column("What to do")]
    if not any(check.remedy for check in checks):
        rows, columns = [row[:3] for row in rows], columns[:3]
    return render_table(columns, rows, title=title, width=width, colour=colour, rules=True)


def merge_values(values: Mapping[int, str]) -> str:
    """Return one line per value, with the nodes that have it; the value alone if all nodes agree."""
    if len(set(values.values())) == 1:
        return next(iter(values.values()))
    by_value: dict[str, list[int]] = {}
    for node, value in values.items():
        by_value.setdefault(value, []).append(node)
    return "\n".join(f"{name_nodes(nodes)}: {value}" for value, nodes in by_value.items())


def verdict_line(checks: Sequence[Check]) -> str:
    """Return the last line of the output: the overall verdict."""
    text = {
        "ok": "all checks passed; training can start",
        "warning": f"{summarize_checks(checks)}; training can start",
        "failure": f"{summarize_checks(checks)}; fix the failures before training",
    }[worst_verdict(check.verdict for check in checks)]
    return f"preflight: {text}."


def checks_as_json(
    checks: Sequence[Check], hosts: Mapping[int, str], timings: Sequence[CollectiveTiming]
) -> dict[str, Any]:
    """Return everything in the table, and the figures behind the bandwidth rows."""
    return {
        "verdict": worst_verdict(check.verdict for check in checks),
        "exit_code": exit_code(checks),
        "nodes": {str(node): host for node, host in sorted(hosts.items())},
        "checks": [
            {**dataclasses.asdict(check), "values": {str(node): text for node, text in check.values.items()}}
            for check in checks
        ],
        "timings": [{**dataclasses.asdict(t), "bus_gbit_per_second": t.gbit} for t in timings],
    }


def print_message(sentence: str) -> None:
    """Print a sentence beside the table, to standard error."""
    print(sentence, file=sys.stderr, flush=True)
