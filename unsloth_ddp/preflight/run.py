"""One preflight from beginning to end: this node alone, the meeting, what is compared, the measurement, the verdict."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from unsloth_ddp.config.parse import Settings
from unsloth_ddp.distributed.runtime import asks_for_cpu
from unsloth_ddp.distributed.sharding import sharding_from_environment
from unsloth_ddp.preflight import bandwidth, compare, identity, node, table, together, verdicts
from unsloth_ddp.preflight.bandwidth import Timing
from unsloth_ddp.preflight.bounded import bounded, unless_stuck
from unsloth_ddp.preflight.checks import Check, exit_code, merge, summary, unmade
from unsloth_ddp.preflight.place import Place, find_place, is_launched
from unsloth_ddp.preflight.speed import Speed
from unsloth_ddp.preflight.together import Lost, Meeting
from unsloth_ddp.utils.errors import one_line
from unsloth_ddp.utils.json_file import write_json

# Reading data to be compared, and unsloth doctor beside it, take their time.
IDENTITY_SECONDS = 200
FACTS_SECONDS = 240
# A measurement has its own limits inside.
SPEED_SECONDS = 150
SPARE_SECONDS = 20
# Node 0 tells the others the time one by one.
CLOCKS_SECONDS = 60
# Until node 0 has its own facts, and those of the slowest node.
GO_SECONDS = CLOCKS_SECONDS + 2 * FACTS_SECONDS + SPARE_SECONDS
# Longer than the output folder is looked into.
FOLDER_SECONDS = 3 * together.TOKEN_SECONDS


@dataclasses.dataclass(frozen=True)
class Options:
    """preflight's own options.

    Args:
        timeout: seconds to wait for the other nodes.
        json: a file for the result, "-" for standard output in place of the table, None for neither.
    """

    timeout: float = 60
    json: str | None = None


class Session:
    """What one process carries through a preflight."""

    def __init__(self, options: Options, settings: Settings, environ: Mapping[str, str], place: Place) -> None:
        self.options = options
        self.settings = settings
        self.environ = environ
        self.place = place
        self.folders = node.NodeFolders()
        self.doctor: node.Doctor | None = None
        self.cpu = asks_for_cpu(settings, environ)
        self.sharded = sharding_from_environment(environ) != "none"
        self.devices: list[dict[str, Any]] = []
        self.no_gpu = ""

    def run(self) -> int:
        """The exit code, after everything has been printed."""
        with contextlib.ExitStack() as cleanup:
            cleanup.callback(self.folders.remove)
            self.devices, self.no_gpu = node.look_for_gpus(self.cpu)
            if self.place.speaks and not self.cpu and (self.devices or node.has_nvidia()):
                self.doctor = node.Doctor()
                cleanup.callback(self.doctor.end)
            mine = self._alone() if self.place.speaks else []
            if self.place.ranks.world_size == 1:
                return self._end_alone(mine)
            return self._with_others(mine)

    # ---- this node ----

    def _alone(self) -> list[Check]:
        return [
            verdicts.environment(self.place.node_rank, self.environ, self.place.launched),
            *node.network_checks(self.place, self.environ),
            *node.machine_checks(self.place, self.settings, self.environ, self.folders, self.devices, self.no_gpu),
        ]

    def _end_alone(self, checks: list[Check]) -> int:
        """One process: what it is made of is shown, with nothing to compare it with."""
        report = self._report(checks, None)
        rows = self._compared({0: report}, {0: self._own_gpu()})
        rows.append(bandwidth.no_speed("one process", "", [0], "ok"))
        return self._show(rows, "Preflight of this node", {0: self.place.host}, [])

    def _report(self, checks: list[Check], shared: bool | None, skew: Any = None) -> dict[str, Any]:
        """All that this node hands in, ready for JSON."""
        number = self.place.node_rank
        mine = identity.identity(self.settings, self.environ, self.devices, IDENTITY_SECONDS)
        if self.doctor is not None:
            doctor = self.doctor
            limit = node.DOCTOR_SECONDS + SPARE_SECONDS
            checks = [*checks, node.attempt("unsloth doctor --gpus", number, lambda: doctor.check(number), limit)]
        return {
            "host": self.place.host,
            "checks": [dataclasses.asdict(check) for check in checks],
            "identity": mine,
            "fast_ports": any("ACTIVE" in port["state"] for port in node.infiniband_ports()),
            "shared": shared,
            "skew": skew,
        }

    def _own_gpu(self) -> str:
        """The GPU that this process would use, by its uuid; "" without one."""
        own = self.place.ranks.local_rank
        return str(self.devices[own]["uuid"]) if own < len(self.devices) else ""

    # ---- all nodes ----

    def _with_others(self, mine: list[Check]) -> int:
        place = self.place
        master_is_here = self._master_is_here()
        if place.speaks and place.nodes > 1:
            say(
                f"preflight: node {place.node_rank} of {place.nodes} ({place.host}) waits up to "
                f"{self.options.timeout:.0f} s for the others at {place.master}:{place.port}."
            )
        meeting, arrived = together.meet(place, master_is_here, self.options.timeout)
        if meeting is None or any(check.verdict == "failure" for check in arrived):
            code = self._end_without_others(mine, arrived)
            if meeting is not None:
                meeting.leave()
            return code
        try:
            code = self._together(meeting, mine, arrived)
        except (Lost, TimeoutError) as error:
            code = self._lost(mine, arrived, error)
        meeting.leave()
        return code

    def _master_is_here(self) -> bool:
        addresses = node.resolve(self.place.master)
        own = node.own_addresses()
        return any(address in own or verdicts.is_loopback(address) for address in addresses)

    def _end_without_others(self, mine: list[Check], arrived: list[Check]) -> int:
        """The group did not form: each node shows what it saw by itself, and says what is missing."""
        if not self.place.speaks:
            return 1
        checks = [*mine, *arrived]
        if self.doctor is not None:
            checks.append(self.doctor.check(self.place.node_rank))
        title = f"Preflight of node {self.place.node_rank} ({self.place.host}) alone: the nodes did not come together"
        code = self._show(checks, title, {self.place.node_rank: self.place.host}, [])
        for check in arrived:
            if check.verdict == "failure":
                say(check.remedy)
        return code

    def _lost(self, mine: list[Check], arrived: list[Check], error: Exception) -> int:
        if not self.place.speaks:
            return 1
        remedy = f"The others went away or did not go on ({one_line(error)}): look at node 0's output."
        checks = [*mine, *arrived, Check("answers", {self.place.node_rank: "no answer"}, "failure", remedy)]
        title = f"Preflight of node {self.place.node_rank} ({self.place.host}) alone: the others were lost"
        return self._show(checks, title, {self.place.node_rank: self.place.host}, [])

    def _together(self, meeting: Meeting, mine: list[Check], arrived: list[Check]) -> int:
        """All are here: hand in, compare, measure; rank 0 judges and tells the others what it came to."""
        ranks = self.place.ranks
        if ranks.is_main:
            report, token = self._master_report(meeting, [*mine, *arrived])
        elif ranks.is_local_main:
            report, token = self._node_report(meeting, [*mine, *arrived]), None
        if ranks.is_local_main:
            meeting.put(f"node/{self.place.node_rank}", report)
        meeting.put(f"gpu/{ranks.rank}", self._own_gpu())
        if ranks.is_main:
            return self._judge(meeting, token)
        go = meeting.get("go", GO_SECONDS)
        if go:
            self._measure(meeting, go)
        result = meeting.get("result", SPEED_SECONDS + 2 * SPARE_SECONDS)
        if ranks.is_local_main and result["code"]:
            say(f"preflight: node 0 ({result['host']}) found {result['summary']} and shows the table.")
        return int(result["code"])

    def _node_report(self, meeting: Meeting, checks: list[Check]) -> dict[str, Any]:
        skew = together.ask_clock(meeting, CLOCKS_SECONDS)
        report = self._report(checks, None, skew)
        left = meeting.get("token", FACTS_SECONDS)
        if left is not None:
            folder = node.output_folder(self.settings)
            report["shared"] = unless_stuck(lambda: together.find_token(folder, left[0], left[1]), FOLDER_SECONDS)
        return report

    def _master_report(self, meeting: Meeting, checks: list[Check]) -> tuple[dict[str, Any], Path | None]:
        ranks = self.place.ranks
        folder = node.output_folder(self.settings)
        left = unless_stuck(lambda: together.leave_token(folder), FOLDER_SECONDS)
        meeting.put("token", None if left is None else [left[0].name, left[1]])
        together.serve_clock(meeting, range(ranks.local_world_size, ranks.world_size, ranks.local_world_size))
        return self._report(checks, True), None if left is None else left[0]

    # ---- rank 0 ----

    def _judge(self, meeting: Meeting, token: Path | None) -> int:
        place = self.place
        ranks = place.ranks
        nodes = range(place.nodes)
        reports = meeting.gather("node", nodes, FACTS_SECONDS)
        if token is not None:
            with contextlib.suppress(OSError):
                token.unlink()
        gpus = meeting.gather("gpu", range(ranks.world_size), SPARE_SECONDS)
        rows = self._compared(reports, gpus)
        hosts = {number: report["host"] for number, report in reports.items()}
        missing = [number for number in nodes if number not in reports]
        if missing:
            rows.append(compare.undelivered(missing, hosts, FACTS_SECONDS, "facts"))
        timings: list[Timing] = []
        blockers = bandwidth.speed_blockers(rows)
        if blockers:
            meeting.put("go", "")
            reason = f"{', '.join(dict.fromkeys(blockers))} failed"
            rows.append(bandwidth.no_speed(reason, "Mend that first.", sorted(reports), "warning"))
        else:
            backend = "nccl" if not self.cpu and all(r["identity"].get("gpus") for r in reports.values()) else "gloo"
            meeting.put("go", backend)
            self._measure(meeting, backend)
            speed_rows, timings = self._speed_rows(meeting, backend, reports)
            rows += speed_rows
        title = f"Preflight of {place.nodes} node{'s' if place.nodes > 1 else ''}, {ranks.world_size} processes"
        code = self._show(rows, title, hosts, timings)
        meeting.put("result", {"code": code, "host": place.host, "summary": summary(rows)})
        return code

    def _measure(self, meeting: Meeting, backend: str) -> None:
        """Take part in the measurement, and hand in what it came to, also when it hangs."""
        speed = Speed(self.place, backend)
        outcome: dict[str, Any] = {"error": None, "phase": "", "timings": []}
        try:
            timings = bounded(lambda: speed.run(meeting.group_store()), SPEED_SECONDS)
            outcome["timings"] = [dataclasses.asdict(timing) for timing in timings]
        except TimeoutError:
            outcome |= {"error": "", "phase": speed.phase}
        except Exception as error:
            outcome |= {"error": str(error), "phase": speed.phase}
        meeting.put(f"speed/{self.place.ranks.rank}", outcome)

    def _speed_rows(
        self, meeting: Meeting, backend: str, reports: Mapping[int, Any]
    ) -> tuple[list[Check], list[Timing]]:
        ranks = self.place.ranks
        node_of = {rank: rank // ranks.local_world_size for rank in range(ranks.world_size)}
        outcomes = meeting.gather("speed", node_of, SPARE_SECONDS)
        stuck = {rank: outcomes[rank]["error"] if rank in outcomes else "" for rank in node_of}
        stuck = {rank: error for rank, error in stuck.items() if error is not None}
        if stuck:
            phases = [outcomes[rank]["phase"] for rank in stuck if rank in outcomes]
            return [bandwidth.group_failed("gloo" if "gloo" in phases else backend, stuck, node_of, SPEED_SECONDS)], []
        timings = []
        for rank, outcome in outcomes.items():
            for values in outcome["timings"]:
                timing = Timing(**values)
                first = rank == 0 or (timing.scope == "inside" and rank % ranks.local_world_size == 0)
                if first or not timing.right:
                    timings.append(timing)
        fast = any(report["fast_ports"] for report in reports.values())
        rows = bandwidth.speed(timings, backend, fast, sorted(reports))
        return rows or [bandwidth.no_speed("one process", "", sorted(reports), "ok")], timings

    def _compared(self, reports: Mapping[int, Any], gpus: Mapping[int, str]) -> list[Check]:
        """The rows of every node merged, then those that need all of them."""
        checks = [as_check(c) for report in reports.values() for c in report["checks"]]
        rows = merge(checks)
        identities = {number: report["identity"] for number, report in reports.items()}

        def part(name: str) -> dict[int, Any]:
            return {number: found[name] for number, found in identities.items() if name in found}

        def guarded(name: str, rows_of: Callable[[dict[int, Any]], Check | list[Check]], row: str = "") -> list[Check]:
            unknown = {n: found["unknown"][name] for n, found in identities.items() if name in found["unknown"]}
            bad = [unmade(row or name, number, reason) for number, reason in unknown.items()]
            try:
                good = rows_of(part(name)) if part(name) else []
            except Exception as error:
                good = [unmade(row or name, number, f"{type(error).__name__}: {error}") for number in reports]
            return merge(bad) + (good if isinstance(good, list) else [good])

        local = self.place.ranks.local_world_size
        node_of = {rank: rank // local for rank in gpus}
        uuids = {rank: uuid for rank, uuid in gpus.items() if uuid}
        rows += guarded("versions", compare.versions)
        rows += guarded("code", compare.code, "kit")
        rows += guarded("settings", lambda found: compare.settings(found, identity.PATHS))
        rows += guarded("data", lambda found: compare.files("data", found, "dataset"))
        rows += guarded("model", lambda found: compare.files("model", found, "model"))
        rows += guarded("flags", compare.variables, "environment flags")
        if self.place.ranks.world_size > 1:
            if not self.cpu:
                rows += guarded("gpus", compare.gpus, "same GPUs")
            if uuids:
                rows.append(compare.one_gpu_each(uuids, node_of))
            others = {number: report for number, report in reports.items() if number}
            path = str(node.output_folder(self.settings))
            rows.append(compare.shared_folder(path, {n: r["shared"] for n, r in others.items()}, self.sharded))
            if others:
                skews = {n: None if r["skew"] is None else (r["skew"][0], r["skew"][1]) for n, r in others.items()}
                rows.append(compare.clocks(skews))
        return rows

    # ---- what is printed ----

    def _show(self, checks: Sequence[Check], title: str, hosts: Mapping[int, str], timings: Sequence[Timing]) -> int:
        return show(self.options, merge(checks), title, hosts, timings, writes=self.place.node_rank == 0)


def show(
    options: Options,
    rows: Sequence[Check],
    title: str,
    hosts: Mapping[int, str],
    timings: Sequence[Timing] = (),
    *,
    writes: bool,
) -> int:
    """Print the table, or the JSON that was asked for; returns the exit code.

    Args:
        hosts: the name of every node.
        writes: this node is the one that writes the file named by --json.
    """
    content = table.as_json(rows, hosts, timings)
    if options.json == "-":
        print(json.dumps(content, indent=2), flush=True)
    else:
        print(table.render(rows, title, colour=sys.stdout.isatty()))
        print(table.verdict_line(rows), flush=True)
    if options.json not in (None, "-") and writes:
        try:
            write_json(Path(str(options.json)), content)
        except OSError as error:
            say(f"preflight: --json {options.json} cannot be written: {error.strerror}.")
    return exit_code(rows)


def as_check(values: Mapping[str, Any]) -> Check:
    """A Check that has been through JSON, where keys are text."""
    return Check(**{**values, "values": {int(n): text for n, text in values["values"].items()}})


def say(sentence: str) -> None:
    """Tell the user something beside the table."""
    print(sentence, file=sys.stderr, flush=True)


def run(options: Options, settings: Settings, environ: Mapping[str, str] = os.environ) -> int:
    """A whole preflight in this process; returns its exit code.

    Raises:
        UserError: the launcher asks for a sharding that the kit does not have.
    """
    number = int(environ["NODE_RANK"]) if environ.get("NODE_RANK", "").isdecimal() else 0
    first = verdicts.environment(number, environ, is_launched(environ))
    if first.verdict == "failure" and not is_readable(environ):
        if environ.get("LOCAL_RANK", "0") == "0":
            show(options, [first], "Preflight of this node", {number: socket.gethostname()}, writes=number == 0)
        return 1
    return Session(options, settings, environ, find_place(environ)).run()


def is_readable(environ: Mapping[str, str]) -> bool:
    """Whether a place can be told from the variables, even from some that contradict each other."""
    if not is_launched(environ):
        return not verdicts.node_problems(environ)
    try:
        place = find_place(environ)
    except (KeyError, ValueError, ZeroDivisionError):
        return False
    ranks = place.ranks
    return ranks.rank < ranks.world_size and ranks.world_size % ranks.local_world_size == 0
