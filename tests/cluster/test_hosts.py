"""The hosts themselves: names, addresses, links that are slowed, cut off, firewalled, and nothing left behind."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cluster.hosts import make_hosts
from tests.waiting import wait_until

pytestmark = pytest.mark.cluster

# Listens on a port until killed, and takes whatever comes.
LISTEN = """
import socket, sys
with socket.create_server(("", int(sys.argv[1]))) as server:
    print("listening", flush=True)
    while True:
        connection, _ = server.accept()
        while connection.recv(65536):
            pass
        connection.close()
"""
# Sends bytes to a port and waits until all are taken; exit code 1 where that is refused or takes over two seconds.
SEND = """
import socket, sys
name, port, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
try:
    with socket.create_connection((name, port), timeout=2) as connection:
        connection.settimeout(20)
        connection.sendall(bytes(size))
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1)
except OSError as error:
    sys.exit(str(error))
"""


@pytest.fixture
def send(two_hosts, tmp_path):
    """Send this many bytes from node2 to node1's port 6001: the exit code."""
    node1, node2 = two_hosts
    node1.start([sys.executable, "-c", LISTEN, "6001"], tmp_path / "listen.txt")
    wait_until(lambda: "listening" in (tmp_path / "listen.txt").read_text(), 60, "the listener")

    def run(size: int) -> int:
        return node2.run([sys.executable, "-c", SEND, "node1", "6001", str(size)], tmp_path / "send.txt")[0]

    return run


def test_a_host_has_its_own_name_address_and_hosts_file(two_hosts, tmp_path):
    for host in two_hosts:
        code, text = host.run(["bash", "-c", "hostname; getent hosts node1 node2"], tmp_path / host.name)
        assert code == 0
        assert text.split() == [host.name, "10.77.0.1", "node1", "10.77.0.2", "node2"]


def test_a_link_is_cut_and_mended(two_hosts, send):
    assert send(1000) == 0
    two_hosts[1].cut_off()
    assert send(1000) == 1
    two_hosts[1].reconnect()
    # A switch takes a moment to see that the cable is back.
    wait_until(lambda: send(1000) == 0, 60, "the link to be back")


def test_a_slow_link_is_slow(two_hosts, send):
    two_hosts[1].slow("1mbit")
    began = time.monotonic()
    assert send(250_000) == 0
    assert 1.5 < time.monotonic() - began < 20  # 2 Mbit over 1 Mbit/s


def test_a_firewall_drops(two_hosts, send):
    two_hosts[0].firewall(6001)
    assert send(10) == 1


def test_nothing_is_left_behind(can_make_hosts, tmp_path):
    with pytest.raises(KeyError), make_hosts(2) as hosts:
        process = hosts[0].start(["bash", "-c", "sleep 600 & sleep 600"], tmp_path / "out")
        wait_until(lambda: len(hosts[0].pids()) == 3, 60, "the children")
        pids = hosts[0].pids()
        raise KeyError
    assert process.returncode == -9
    wait_until(lambda: not any(Path("/proc", str(pid)).exists() for pid in pids), 60, "the children to be gone")
    namespaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    assert not any(host.namespace in namespaces or host.switch in namespaces for host in hosts)
