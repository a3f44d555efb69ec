"""Run a preflight in one process of the job: check this node, meet the others, compare, measure, print."""

import contextlib
import dataclasses
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from unsloth_ddp.config.options import Settings
from unsloth_ddp.distributed.runtime import asks_for_cpu
from unsloth_ddp.distributed.sharding import sharding_from_environment
from unsloth_ddp.preflight import job
from unsloth_ddp.preflight.between import bandwidth
from unsloth_ddp.preflight.between.arrivals import missing_answers
from unsloth_ddp.preflight.between.bandwidth import CollectiveBenchmark, CollectiveTiming
from unsloth_ddp.preflight.between.cross_node import Reports, compare_reports
from unsloth_ddp.preflight.between.rendezvous import Rendezvous, RendezvousError, join_rendezvous
from unsloth_ddp.preflight.checks import (
    Check,
    merge_checks,
    print_message,
    run_check,
    run_or_none,
    run_with_limit,
    show_checks,
    summarize_checks,
)
from unsloth_ddp.preflight.node import disks
from unsloth_ddp.preflight.node.identity import collect_identity
from unsloth_ddp.preflight.node.machine import read_gpus
from unsloth_ddp.preflight.node.network import is_here, resolve_name
from unsloth_ddp.preflight.node.run import machine_checks, network_checks
from unsloth_ddp.utils.errors import one_line
from unsloth_ddp.utils.units import counted

# Hashing the data takes its time.
IDENTITY_SECONDS = 200
REPORT_SECONDS = 220
# The measurement has its own limits inside.
MEASURE_SECONDS = 150
SPARE_SECONDS = 20
# Node 0 needs its own report and that of the slowest node before it starts the measurement.
START_SECONDS = 2 * REPORT_SECONDS + SPARE_SECONDS
# Longer than a node looks for node 0's file in the output folder.
FOLDER_SECONDS = 3 * disks.TOKEN_SECONDS


@dataclasses.dataclass(frozen=True)
class PreflightOptions:
    """The options of preflight itself.

    Args:
        timeout: seconds to wait for the other nodes.
        json: a file for the result, "-" for standard output in place of the table, None for neither.
    """

    timeout: float = 60
    json: str | None = None


def run_preflight(options: PreflightOptions, settings: Settings, environ: Mapping[str, str] = os.environ) -> int:
    """Run a whole preflight in this process; return its exit code.

    Raises:
        UserError: the launcher asks for a sharding that the kit does not support.
    """
    if job.place_problems(environ) if job.is_launched(environ) else job.node_problems(environ):
        # This process has no place among the others, which will say that its node did not arrive.
        if environ.get("LOCAL_RANK", "0") == "0":
            number = int(environ["NODE_RANK"]) if environ.get("NODE_RANK", "").isdecimal() else 0
            row = run_check("environment", number, lambda: job.check_environment(environ))
            hosts = {number: socket.gethostname()}
            show_checks([row], "Preflight of this node", hosts, json_file=options.json, writes=number == 0)
        return 1
    return Preflight(options, settings, environ).run()


class Preflight:
    """One process's part in a preflight. The first process of each node reports for the node; rank 0 judges."""

    def __init__(self, options: PreflightOptions, settings: Settings, environ: Mapping[str, str]) -> None:
        self.options = options
        self.settings = settings
        self.environ = environ
        self.process = job.read_process_info(environ)
        self.ranks = self.process.ranks
        self.cpu = asks_for_cpu(settings, environ)
        self.sharded = sharding_from_environment(environ) != "none"
        self.devices, self.no_gpu_reason = read_gpus(self.cpu)

    def run(self) -> int:
        checks = []
        if self.ranks.is_local_main:
            checks = [
                run_check("environment", self.ranks.node_rank, lambda: job.check_environment(self.environ)),
                *network_checks(self.process, self.environ),
            ]
            checks += machine_checks(self.process, self.settings, self.environ, self.devices, self.no_gpu_reason)
        if self.ranks.world_size == 1:
            # There is nothing to compare one process's facts with.
            rows = self._compare({0: self._report(checks, None)})
            rows.append(bandwidth.not_measured("one process", "", [0], "ok"))
            return self._show(rows, "Preflight of this node", {0: self.process.host}, [])
        return self._run_with_others(checks)

    def _report(self, checks: list[Check], shared: bool | None) -> dict[str, Any]:
        """Return everything that this node sends to node 0, ready for JSON."""
        return {
            "host": self.process.host,
            "checks": [dataclasses.asdict(check) for check in checks],
            "identity": collect_identity(self.settings, self.environ, self.devices, IDENTITY_SECONDS),
            "shared": shared,
        }

    # ---- all nodes ----

    def _run_with_others(self, checks: list[Check]) -> int:
        process, node = self.process, self.ranks.node_rank
        if self.ranks.is_local_main and self.ranks.nodes > 1:
            print_message(
                f"preflight: node {node} of {self.ranks.nodes} ({process.host}) waits up to "
                f"{self.options.timeout:.0f} s for the others at {process.master}:{process.port}."
            )
        meeting, arrived = join_rendezvous(process, is_here(resolve_name(process.master)), self.options.timeout)
        failed = [check for check in arrived if check.verdict == "failure"]
        checks = [*checks, *arrived]
        if meeting is None or failed:
            code = self._show_alone(checks, "the nodes did not come together", [check.remedy for check in failed])
        else:
            try:
                code = self._compare_and_measure(meeting, checks)
            except (RendezvousError, TimeoutError) as error:
                remedy = f"The other nodes ended or stopped answering ({one_line(error)}): look at node 0's output."
                checks.append(Check("answers", {node: "no answer"}, "failure", remedy))
                code = self._show_alone(checks, "the connection to the others was lost")
        if meeting is not None:
            meeting.leave()
        return code

    def _show_alone(self, checks: list[Check], cause: str, remedies: Sequence[str] = ()) -> int:
        """Show this node's own checks, and what is to be done once more below them."""
        if not self.ranks.is_local_main:
            return 1
        number, host = self.ranks.node_rank, self.process.host
        code = self._show(checks, f"Preflight of node {number} ({host}) alone: {cause}", {number: host}, [])
        for remedy in remedies:
            print_message(remedy)
        return code

    def _compare_and_measure(self, meeting: Rendezvous, checks: list[Check]) -> int:
        """Send this node's report, take part in the measurement, and return rank 0's exit code."""
        ranks, folder = self.ranks, disks.output_folder(self.settings)
        written = None
        if ranks.is_main:
            written = run_or_none(lambda: disks.write_token(folder), FOLDER_SECONDS)
            meeting.put("token", None if written is None else [written[0].name, written[1]])
        if ranks.is_local_main:
            report = self._report(checks, True if ranks.is_main else None)
            token = None if ranks.is_main else meeting.get("token", REPORT_SECONDS)
            if token is not None:
                report["shared"] = run_or_none(lambda: disks.find_token(folder, *token), FOLDER_SECONDS)
            meeting.put(f"node/{ranks.node_rank}", report)
        if ranks.is_main:
            return self._judge(meeting, None if written is None else written[0])
        if backend := meeting.get("go", START_SECONDS):
            self._measure(meeting, backend)
        result = meeting.get("result", MEASURE_SECONDS + 2 * SPARE_SECONDS)
        if ranks.is_local_main and result["code"]:
            print_message(f"preflight: node 0 ({result['host']}) found {result['summary']} and shows the table.")
        return int(result["code"])

    # ---- rank 0 ----

    def _judge(self, meeting: Rendezvous, token: Path | None) -> int:
        ranks, nodes = self.ranks, range(self.ranks.nodes)
        reports = meeting.gather("node", nodes, REPORT_SECONDS)
        if token is not None:
            with contextlib.suppress(OSError):
                token.unlink()
        rows = self._compare(reports)
        hosts = {number: report["host"] for number, report in reports.items()}
        missing = [number for number in nodes if number not in reports]
        if missing:
            rows.append(missing_answers(missing, hosts, REPORT_SECONDS))
        timings: list[CollectiveTiming] = []
        blockers = bandwidth.find_blockers(rows)
        if blockers:
            meeting.put("go", "")
            cause = f"{', '.join(dict.fromkeys(blockers))} failed"
            rows.append(bandwidth.not_measured(cause, "Fix that first.", sorted(reports), "warning"))
        else:
            backend = "nccl" if not self.cpu and all(r["identity"].get("gpus") for r in reports.values()) else "gloo"
            meeting.put("go", backend)
            self._measure(meeting, backend)
            bandwidth_rows, timings = self._judge_bandwidth(meeting, backend, reports)
            rows += bandwidth_rows
        title = f"Preflight of {counted(ranks.nodes, 'node')}, {counted(ranks.world_size, 'process')}"
        code = self._show(rows, title, hosts, timings)
        meeting.put("result", {"code": code, "host": self.process.host, "summary": summarize_checks(rows)})
        return code

    def _measure(self, meeting: Rendezvous, backend: str) -> None:
        """Take part in the measurement and send the result, also when it hangs."""
        benchmark = CollectiveBenchmark(self.process, backend)
        outcome: dict[str, Any] = {"error": None, "phase": "", "timings": []}
        try:
            timings = run_with_limit(lambda: benchmark.run(meeting.open_group_store()), MEASURE_SECONDS)
            outcome["timings"] = [dataclasses.asdict(timing) for timing in timings]
        except TimeoutError:
            outcome |= {"error": "", "phase": benchmark.phase}
        except Exception as error:
            outcome |= {"error": str(error), "phase": benchmark.phase}
        meeting.put(f"speed/{self.ranks.rank}", outcome)

    def _judge_bandwidth(
        self, meeting: Rendezvous, backend: str, reports: Reports
    ) -> tuple[list[Check], list[CollectiveTiming]]:
        ranks = self.ranks
        node_of = {rank: rank // ranks.local_world_size for rank in range(ranks.world_size)}
        outcomes = meeting.gather("speed", node_of, SPARE_SECONDS)
        stuck = {rank: outcomes[rank]["error"] if rank in outcomes else "" for rank in node_of}
        stuck = {rank: error for rank, error in stuck.items() if error is not None}
        if stuck:
            phases = [outcomes[rank]["phase"] for rank in stuck if rank in outcomes]
            failed_backend = "gloo" if "gloo" in phases else backend
            return [bandwidth.failed_group(failed_backend, stuck, node_of, MEASURE_SECONDS)], []
        timings = []
        for rank, outcome in outcomes.items():
            for values in outcome["timings"]:
                timing = CollectiveTiming(**values)
                first = rank == 0 or (timing.scope == "inside" and rank % ranks.local_world_size == 0)
                if first or not timing.right:
                    timings.append(timing)
        return bandwidth.check_bandwidth(timings, backend, sorted(reports)), timings

    def _compare(self, reports: Reports) -> list[Check]:
        ranks = self.ranks.world_size
        return compare_reports(reports, ranks, cpu=self.cpu, settings=self.settings, sharded=self.sharded)

    def _show(
        self, checks: Sequence[Check], title: str, hosts: Mapping[int, str], timings: Sequence[CollectiveTiming]
    ) -> int:
        figures = [{**dataclasses.asdict(timing), "bus_gbit_per_second": timing.gbit} for timing in timings]
        writes = self.ranks.node_rank == 0
        return show_checks(merge_checks(checks), title, hosts, figures, json_file=self.options.json, writes=writes)
