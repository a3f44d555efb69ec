"""The hosts leave nothing behind. That links are slow, cut or firewalled is shown by the tests that need it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.cluster.hosts import make_hosts
from tests.waiting import wait_until

pytestmark = pytest.mark.cluster


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
