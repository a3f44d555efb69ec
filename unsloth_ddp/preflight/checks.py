"""Run checks with a time limit, merge them over nodes, and write them as a table and as JSON."""

import dataclasses
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from unsloth_ddp.utils.errors import one_line
from unsloth_ddp.utils.files.json import write_json
from unsloth_ddp.utils.tables import Column, fit_text, render_table
from unsloth_ddp.utils.threads import in_thread
from unsloth_ddp.utils.units import counted

T = TypeVar("T")

CHECK_SECONDS = 20

Verdict = Literal["ok", "warning", "failure"]
SEVERITY: dict[Verdict, int] = {"ok": 0, "warning": 1, "failure": 2}


@dataclass(frozen=True)
class Check:
    """One row of the table: the property checked, the value seen on each node, the verdict and the remedy."""

    name: str
    values: dict[int, str]
    verdict: Verdict = "ok"
    remedy: str = ""


@dataclass(frozen=True)
class Finding:
    """Hold what a check found on one node: the value shown, the verdict and the remedy."""

    shown: str
    verdict: Verdict = "ok"
    remedy: str = ""

    def row(self, name: str, node: int) -> Check:
        return Check(name, {node: self.shown}, self.verdict, self.remedy)


def failure(shown: str, remedy: str) -> Finding:
    return Finding(shown, "failure", remedy)


def warning(shown: str, remedy: str) -> Finding:
    return Finding(shown, "warning", remedy)


def run_check(name: str, node: int, check: Callable[[], Finding], seconds: float = CHECK_SECONDS) -> Check:
    """Run a check of one node with a time limit; an error or a timeout becomes a warning."""
    try:
        return run_with_limit(check, seconds).row(name, node)
    except Exception as error:
        return not_checked(f"{type(error).__name__}: {one_line(error)}").row(name, node)


def worst_verdict(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the most severe verdict; ok for none."""
    return max(verdicts, key=lambda v: SEVERITY[v], default="ok")


def merge_checks(checks: Sequence[Check]) -> list[Check]:
    """Merge the checks of all nodes to one row per name, in order of first appearance.

    A remedy that only some nodes need begins with their numbers.
    """
    rows: list[Check] = []
    for name in dict.fromkeys(check.name for check in checks):
        same = [check for check in checks if check.name == name]
        nodes = {node for check in same for node in check.values}
        remedies: dict[str, set[int]] = {}
        for check in same:
            if check.remedy:
                remedies.setdefault(check.remedy, set()).update(check.values)
        texts = [text if on == nodes else f"{name_nodes(on).capitalize()}: {text}" for text, on in remedies.items()]
        values = {node: value for check in same for node, value in check.values.items()}
        rows.append(Check(name, dict(sorted(values.items())), worst_verdict(c.verdict for c in same), "\n".join(texts)))
    return rows


def name_nodes(nodes: Iterable[int]) -> str:
    """Return `node 3`, or `nodes 0-3, 7`."""
    numbers = sorted(nodes)
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)
    return f"node {text}" if len(numbers) == 1 else f"nodes {text}"


def not_checked(cause: str) -> Finding:
    """Return a warning for a check that could not run; it says nothing about the node."""
    return warning(f"not checked: {cause}", "Preflight could not check this; check it by hand.")


def summarize_checks(checks: Sequence[Check]) -> str:
    """Return `2 failures (data, kit) and 1 warning (clock)`, or `all ok`."""
    parts = []
    for verdict in ("failure", "warning"):
        names = [check.name for check in checks if check.verdict == verdict]
        if names:
            parts.append(f"{counted(len(names), verdict)} ({', '.join(names)})")
    return " and ".join(parts) or "all ok"


def run_with_limit(work: Callable[[], T], seconds: float) -> T:
    """Return the result of `work`, which may hang (a dead file system, a stuck driver), run in a thread of its own.

    Raises:
        TimeoutError: `work` did not end in time. Its thread is abandoned and does not keep the process alive.
    """
    future = in_thread(work, "check")
    if wait([future], seconds).done:
        return future.result()
    raise TimeoutError(f"no answer within {seconds:.0f} s")


def run_or_none(work: Callable[[], T], seconds: float) -> T | None:
    """Return the result of `work`, or None after the limit, as on a network file system whose server is gone."""
    try:
        return run_with_limit(work, seconds)
    except TimeoutError:
        return None


COLOURS = {"ok": "green", "warning": "yellow", "failure": "bold red"}


def show_checks(
    checks: Sequence[Check],
    title: str,
    hosts: Mapping[int, str],
    timings: Sequence[Mapping[str, Any]] = (),
    *,
    json_file: str | None,
    writes: bool,
) -> int:
    """Print the table, or JSON in its place; return the exit code.

    Args:
        hosts: the name of every node.
        timings: the figures behind the bandwidth rows.
        json_file: a file that gets the JSON too, "-" for standard output in place of the table, None for neither.
        writes: this node writes the file.
    """
    worst = worst_verdict(check.verdict for check in checks)
    code = int(worst == "failure")
    content = {
        "verdict": worst,
        "exit_code": code,
        "nodes": {str(node): host for node, host in sorted(hosts.items())},
        "checks": [dataclasses.asdict(check) for check in checks],
        "timings": list(timings),
    }
    if json_file == "-":
        print(json.dumps(content, indent=2), flush=True)
    else:
        last = {
            "ok": "all checks passed; training can start",
            "warning": f"{summarize_checks(checks)}; training can start",
            "failure": f"{summarize_checks(checks)}; fix the failures before training",
        }[worst]
        print(render_checks(checks, title, colour=sys.stdout.isatty()))
        print(fit_text(f"preflight: {last}."), flush=True)
    if json_file not in (None, "-") and writes:
        try:
            write_json(Path(str(json_file)), content)
        except OSError as error:
            print_message(f"preflight: --json {json_file} cannot be written: {error.strerror}; name another file.")
    return code


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


def print_message(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)
