"""Preflight on several hosts: what is wrong is named, on every node, and no node waits for ever.

What differs between nodes is in tests/preflight/test_ranks.py.
"""

from __future__ import annotations

import json
import re
import sys
import time
from dataclasses import dataclass

import pytest

from tests.cluster.hosts import Host, wait_for_all
from tests.waiting import wait_until

pytestmark = pytest.mark.cluster

PYTHON = [sys.executable, "-m", "unsloth_ddp.preflight", "--use_cpu"]
# What preflight needs beside waiting: imports, facts, and the measurement, on a busy machine.
WORK_SECONDS = 90


@dataclass
class Outcome:
    """What preflight came to on each host."""

    codes: list[int]
    outputs: list[str]
    seconds: float
    report: dict

    def check(self, name: str) -> dict:
        """The row of that name in node 0's report."""
        (found,) = [row for row in self.report["checks"] if row["name"] == name]
        return found


@pytest.fixture
def preflight(tmp_path):
    """Run preflight without a launcher on these hosts, each with its own additions to environment and options."""

    def run(
        hosts: list[Host],
        environ: list[dict[str, str]] | None = None,
        options: list[list[str]] | None = None,
        nodes: int | None = None,
        timeout: float = 150,
    ) -> Outcome:
        began = time.monotonic()
        processes = []
        for number, host in enumerate(hosts):
            env = {"NNODES": str(nodes or len(hosts)), "NODE_RANK": str(number), "MASTER_ADDR": "node1"}
            env |= environ[number] if environ else {}
            argv = ["--output_dir", str(tmp_path / "outputs"), "--timeout", str(timeout)]
            argv += ["--json", str(tmp_path / "report.json")] + (options[number] if options else [])
            processes.append(host.start([*PYTHON, *argv], tmp_path / f"{host.name}.txt", env))
        codes = wait_for_all(processes, 2 * timeout + WORK_SECONDS)
        outputs = [(tmp_path / f"{host.name}.txt").read_text() for host in hosts]
        path = tmp_path / "report.json"
        report = json.loads(path.read_text()) if path.exists() else {"checks": []}
        return Outcome(codes, [" ".join(text.split()) for text in outputs], time.monotonic() - began, report)

    return run


def words(output: str) -> str:
    """What was printed, without the table's lines, so that a sentence can be found whole."""
    return " ".join(output.replace("│", " ").split())


def test_two_good_hosts_pass_and_node_0_speaks(two_hosts, preflight):
    done = preflight(two_hosts)
    assert done.codes == [0, 0], done.outputs
    assert done.report["nodes"] == {"0": "node1", "1": "node2"}
    assert {row["verdict"] for row in done.report["checks"]} <= {"ok", "warning"}
    assert done.check("output folder shared")["values"]["1"] == "shared with node 0"
    assert done.check("sums are right")["verdict"] == "ok"
    between = [t for t in done.report["timings"] if t["scope"] == "between"]
    assert between
    assert all(t["ranks"] == 2 and t["bus_gbit_per_second"] > 0 for t in between)
    assert "Preflight of 2 nodes" in done.outputs[0]
    assert "Verdict" not in done.outputs[1]


def test_a_rank_taken_twice_names_both_hosts(three_hosts, preflight):
    done = preflight(three_hosts, environ=[{}, {}, {"NODE_RANK": "1"}])
    assert done.codes == [1, 1, 1]
    assert done.seconds < 150  # nobody waited until the time was up
    for output in done.outputs:
        assert "Node rank 1 was taken 2 times, by node2 and node3" in output
        assert "So node 2 is missing." in output


def test_a_missing_node_is_named_by_all_others(three_hosts, preflight):
    done = preflight(three_hosts[:2], nodes=3, timeout=45)
    assert done.codes == [1, 1]
    assert done.seconds < 200
    for output in done.outputs:
        assert "Node 2 did not arrive at node1:6001 within 45 s" in output
    assert "Preflight of node 1 (node2) alone" in done.outputs[1]


def test_a_port_in_use_is_named_on_both_sides(two_hosts, preflight, tmp_path):
    squatter = "import socket, time; s = socket.create_server(('', 6001)); print('on', flush=True); time.sleep(600)"
    two_hosts[0].start([sys.executable, "-c", squatter], tmp_path / "squatter.txt")
    wait_until(lambda: "on" in (tmp_path / "squatter.txt").read_text(), 60, "the other program")
    done = preflight(two_hosts)
    assert done.codes == [1, 1]
    assert "MASTER_PORT 6001 is in use on node 0 by python" in words(done.outputs[0])
    assert "another program listens there" in words(done.outputs[1])


def test_a_closed_port_is_told_from_a_missing_node(two_hosts, preflight):
    two_hosts[0].firewall(6001)
    done = preflight(two_hosts, timeout=8)
    assert done.codes == [1, 1]
    assert "Node 1 did not arrive" in done.outputs[0]
    assert "open the firewall for MASTER_PORT 6001" in words(done.outputs[1])


def test_a_slow_link_is_a_warning_with_its_speed(two_hosts, preflight):
    two_hosts[1].slow("1mbit")
    done = preflight(two_hosts)
    assert done.codes == [0, 0], done.outputs
    row = done.check("all-reduce, between nodes (one rank each)")
    assert row["verdict"] == "warning"
    assert "below the 10 Gbit/s" in row["remedy"]
    speeds = [t["bus_gbit_per_second"] for t in done.report["timings"]]
    assert speeds and all(speed < 0.003 for speed in speeds)


def test_a_host_name_that_leads_to_loopback_is_refused(two_hosts, preflight, tmp_path):
    # As Debian writes it; each test's hosts share the file.
    text = two_hosts[0].hosts_file.read_text()
    two_hosts[0].hosts_file.write_text("127.0.1.1 node1\n" + text.replace("10.77.0.1 node1\n", ""))
    done = preflight(two_hosts, timeout=8)
    assert done.codes == [1, 1]
    assert "MASTER_ADDR node1 resolves to 127.0.1.1, a loopback address" in words(done.outputs[0])


@pytest.mark.slow
def test_a_link_cut_while_waiting_ends(three_hosts, preflight):
    three_hosts[2].cut_off()
    done = preflight(three_hosts, timeout=45)
    assert done.codes == [1, 1, 1]
    assert "Node 2 did not arrive" in done.outputs[0]
    assert "Node 0 did not answer at node1:6001 within" in done.outputs[2]


@pytest.mark.slow
def test_a_link_cut_after_arriving_ends_both_sides(two_hosts, tmp_path):
    processes = []
    for number, host in enumerate(two_hosts):
        environ = {"NNODES": "3", "NODE_RANK": str(number), "MASTER_ADDR": "node1"}
        argv = ["--output_dir", str(tmp_path / "outputs"), "--timeout", "40"]
        processes.append(host.start([*PYTHON, *argv], tmp_path / f"{host.name}.txt", environ))

    def connected() -> bool:
        # 6001 is 1771, 10.77.0.2 is 02004D0A, 01 an established connection.
        table = two_hosts[0].run(["cat", "/proc/net/tcp", "/proc/net/tcp6"], tmp_path / "tcp.txt")[1]
        (tmp_path / "tcp.txt").unlink()
        return any(re.search(r":1771 \S*02004D0A:\S+ 01 ", line) for line in table.splitlines())

    wait_until(connected, 90, "node2 to arrive")
    two_hosts[1].cut_off()
    assert wait_for_all(processes, 100) == [1, 1]
    outputs = [words((tmp_path / f"{host.name}.txt").read_text()) for host in two_hosts]
    assert "Node 2 did not arrive" in outputs[0]
    assert "Node 0 (node1) went away while this node waited" in outputs[1]


@pytest.mark.slow
def test_accelerate_launch_on_two_hosts_measures_inside_and_between(two_hosts, tmp_path):
    processes = []
    for number, host in enumerate(two_hosts):
        command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", "accelerate_configs/cpu.yaml"]
        command += ["--num_machines", "2", "--num_processes", "4", "--machine_rank", str(number)]
        command += ["--main_process_ip", "node1", "--main_process_port", "6001", "-m", "unsloth_ddp.preflight"]
        command += ["--use_cpu", "--output_dir", str(tmp_path / "outputs"), "--json", str(tmp_path / "report.json")]
        environ = {"NNODES": "2", "NODE_RANK": str(number), "GPUS_PER_NODE": "2"}
        processes.append(host.start(command, tmp_path / f"{host.name}.txt", environ))
    codes = wait_for_all(processes, 150)
    outputs = [(tmp_path / f"{host.name}.txt").read_text() for host in two_hosts]
    assert codes == [0, 0], "\n".join(outputs)
    report = json.loads((tmp_path / "report.json").read_text())
    scopes = {t["scope"]: t["ranks"] for t in report["timings"]}
    assert scopes == {"inside": 2, "between": 2, "all": 4}
    assert outputs[0].count("Preflight of 2 nodes, 4 processes") == 1
    assert "Verdict" not in outputs[1]
