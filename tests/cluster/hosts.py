"""Several hosts on one machine: network namespaces on a switch of their own, each with its name and address.

The switch is a bridge in one more namespace, so nothing of the machine's own network is touched or reached, the
addresses are the same in every network, and networks made side by side never meet.

    with make_hosts(2) as (node1, node2):
        process = node1.start(["bash", "cluster/node.sh", ...], output=folder / "node1.txt", environ={...})
        node2.slow("1mbit")
        node2.cut_off()
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.conftest import REPO
from tests.waiting import wait_until

PREFIX = "ddp-test"
SUBNET = "10.77.0"
# The command takes the place of the shell, so the process that is started is the command itself.
ENTER = 'mount --make-rprivate / && mount --bind "$0" /etc/hosts && hostname "$1" && shift && exec "$@"'


def missing() -> str | None:
    """What keeps this machine from having hosts, for a skip; None where they can be made."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need Linux and root"
    for tool, package in (("ip", "iproute2"), ("tc", "iproute2"), ("unshare", "util-linux")):
        if shutil.which(tool) is None:
            return f"{tool} is missing (Debian's package {package})"
    name = f"{PREFIX}-{os.getpid()}-{secrets.token_hex(3)}-try"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if tried.returncode != 0:
        return f"network namespaces cannot be made here: {tried.stderr.strip()}"
    with contextlib.ExitStack() as stack:
        stack.callback(_remove_namespace, name)
        link = "ip -n NAME link add p0 type veth peer name p1 && ip -n NAME link add s0 type bridge".replace(
            "NAME", name
        )
        tried = subprocess.run(["bash", "-c", link], capture_output=True, text=True)
        if tried.returncode != 0:
            return f"virtual links cannot be made here: {tried.stderr.strip()}"
        entered = subprocess.run(["ip", "netns", "exec", name, "unshare", "-m", "-u", "true"], capture_output=True)
        if entered.returncode != 0:
            return f"unshare -m -u is refused here: {entered.stderr.decode().strip()}"
    return None


@dataclass
class Host:
    """One host: a namespace `namespace` in which this machine is called `name` and has the address `address`."""

    name: str
    address: str
    namespace: str
    switch: str
    port: str
    hosts_file: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(
        self,
        command: Sequence[str],
        output: Path,
        environ: dict[str, str] | None = None,
        cwd: Path = REPO,
    ) -> subprocess.Popen[bytes]:
        """Start `command` here, with all that it prints in the file `output`; the process is the leader of its group.

        `environ` is added to this process's own environment, without what a launcher or an earlier test left there.
        """
        output.parent.mkdir(parents=True, exist_ok=True)
        enter = ["ip", "netns", "exec", self.namespace, "unshare", "-m", "-u", "bash", "-c", ENTER]
        with output.open("ab") as file:
            process = subprocess.Popen(
                [*enter, str(self.hosts_file), self.name, *map(str, command)],
                cwd=cwd,
                env=clean_environment() | (environ or {}),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.processes.append(process)
        return process

    def run(
        self, command: Sequence[str], output: Path, environ: dict[str, str] | None = None, timeout: float = 60
    ) -> tuple[int, str]:
        """Run `command` here to its end: its exit code, and what it printed."""
        process = self.start(command, output, environ)
        return process.wait(timeout=timeout), output.read_text(errors="replace")

    def pids(self) -> list[int]:
        """Every process of this host, children and grandchildren included."""
        found = subprocess.run(["ip", "netns", "pids", self.namespace], capture_output=True, text=True)
        return [int(pid) for pid in found.stdout.split()]

    def slow(self, rate: str) -> None:
        """Let at most `rate` (tc's words: 1mbit, 500kbit) through its link, in both directions."""
        for namespace, device in ((self.namespace, "eth0"), (self.switch, self.port)):
            shape = f"qdisc replace dev {device} root tbf rate {rate} burst 32kbit latency 400ms"
            _do("tc", "-n", namespace, *shape.split())

    def fast(self) -> None:
        """Take the limit of `slow` away."""
        for namespace, device in ((self.namespace, "eth0"), (self.switch, self.port)):
            _do("tc", "-n", namespace, "qdisc", "del", "dev", device, "root")

    def cut_off(self) -> None:
        """Pull its cable: its addresses and processes stay, nothing arrives any more, and nobody is told."""
        _do("ip", "-n", self.switch, "link", "set", self.port, "down")

    def reconnect(self) -> None:
        """Put the cable back."""
        _do("ip", "-n", self.switch, "link", "set", self.port, "up")

    def firewall(self, port: int) -> None:
        """Drop silently what comes in from other hosts for TCP port `port`; skips the test where there is no nft."""
        if shutil.which("nft") is None:
            pytest.skip("nft is missing (Debian's package nftables)")
        rule = f"add rule inet test in iifname eth0 tcp dport {port} drop"
        rules = f"add table inet test; add chain inet test in {{ type filter hook input priority 0; }}; {rule}"
        _do("ip", "netns", "exec", self.namespace, "nft", rules)

    def power_off(self) -> None:
        """Kill every process of this host at once, and pull its cable first, as when a machine loses its power."""
        self.cut_off()
        _kill_all(self.namespace)


@contextlib.contextmanager
def make_hosts(count: int) -> Iterator[list[Host]]:
    """`count` hosts, node1 at 10.77.0.1, node2 at 10.77.0.2, ..., which know each other by name.

    On leaving, every process in them is killed and nothing of them stays, whatever happened inside.
    """
    _remove_leftovers()
    network = f"{PREFIX}-{os.getpid()}-{secrets.token_hex(3)}"
    switch = f"{network}-switch"
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=f"{network}-")))
        hosts_file = folder / "hosts"
        names = "".join(f"{SUBNET}.{n} node{n}\n" for n in range(1, count + 1))
        hosts_file.write_text(f"127.0.0.1 localhost\n{names}")

        stack.callback(_remove_namespace, switch)
        _do("ip", "netns", "add", switch)
        _do("ip", "-n", switch, "link", "add", "switch", "type", "bridge")
        _do("ip", "-n", switch, "link", "set", "switch", "up")
        hosts = []
        for n in range(1, count + 1):
            host = Host(f"node{n}", f"{SUBNET}.{n}", f"{network}-node{n}", switch, f"port{n}", hosts_file)
            stack.callback(_remove_namespace, host.namespace)
            _connect(host)
            stack.callback(_reap, host)
            hosts.append(host)
        yield hosts


def _connect(host: Host) -> None:
    _do("ip", "netns", "add", host.namespace)
    pair = f"link add {host.port} type veth peer name eth0 netns {host.namespace}"
    _do("ip", "-n", host.switch, *pair.split())
    _do("ip", "-n", host.switch, *f"link set {host.port} master switch up".split())
    _do("ip", "-n", host.namespace, *f"addr add {host.address}/24 dev eth0".split())
    _do("ip", "-n", host.namespace, "link", "set", "eth0", "up")
    _do("ip", "-n", host.namespace, "link", "set", "lo", "up")


def clean_environment() -> dict[str, str]:
    """This process's environment without what describes a job: launchers', schedulers' and the kit's variables."""
    job = ("ACCELERATE_", "TENSORBOARD_", "TORCHELASTIC_", "SLURM_", "PBS_", "GLOO_", "NCCL_", "UNSLOTH_", "PYTEST_")
    names = {"NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "GPUS_PER_NODE", "RANK", "LOCAL_RANK"}
    names |= {"WORLD_SIZE", "LOCAL_WORLD_SIZE"}
    kept = {k: v for k, v in os.environ.items() if k not in names and not k.startswith(job)}
    return kept | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "UV_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}


def wait_for_all(processes: Sequence[subprocess.Popen[bytes]], timeout: float) -> list[int]:
    """The exit codes of `processes`; a job that runs longer than `timeout` seconds is a hang and fails the test."""
    wait_until(lambda: all(p.poll() is not None for p in processes), timeout, "every host's command to end")
    return [p.returncode for p in processes]


def _do(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")


def _kill_all(namespace: str) -> None:
    """Kill every process of a namespace, also those that are born meanwhile."""
    for _ in range(50):
        found = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True).stdout.split()
        if not found:
            return
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.05)


def _reap(host: Host) -> None:
    _kill_all(host.namespace)
    for process in host.processes:
        process.wait(timeout=60)


def _remove_namespace(name: str) -> None:
    if Path("/run/netns", name).exists():
        _kill_all(name)
        subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _remove_leftovers() -> None:
    """Remove the namespaces of test processes that were killed before they could."""
    for path in Path("/run/netns").glob(f"{PREFIX}-*"):
        owner = path.name.removeprefix(f"{PREFIX}-").split("-")[0]
        if owner.isdigit() and not Path("/proc", owner).exists():
            _remove_namespace(path.name)
