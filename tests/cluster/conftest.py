"""Fixtures of the cluster group: hosts made of network namespaces."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.hosts import Host, make_hosts, missing, wait_for_all
from tests.cluster.jobs import NODE_SH, RUN_SECONDS, Job
from tests.conftest import DEMO_MODEL


@pytest.fixture(scope="session")
def can_make_hosts() -> None:
    """Skip, saying what is missing, where hosts cannot be made."""
    reason = missing()
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture
def two_hosts(can_make_hosts: None) -> Iterator[list[Host]]:
    """node1 and node2, on a network of their own."""
    with make_hosts(2) as hosts:
        yield hosts


@pytest.fixture
def three_hosts(can_make_hosts: None) -> Iterator[list[Host]]:
    """node1, node2 and node3, on a network of their own."""
    with make_hosts(3) as hosts:
        yield hosts


@pytest.fixture(scope="session")
def job(uneven_rows: Path) -> Job:
    """The demo's model (made without importing torch here) and the uneven rows."""
    return Job(DEMO_MODEL, uneven_rows)


@pytest.fixture(scope="session")
def one_host(can_make_hosts: None, job: Job, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The same training on one host, without a variable or interruption: the run's folder, and the output."""
    folder = tmp_path_factory.mktemp("one_host")
    with make_hosts(1) as hosts:
        words = [*job.words, "--no_preflight", "--run_name", "one"]
        process = hosts[0].start(["bash", NODE_SH, *words], folder / "node1.txt", cwd=folder)
        codes = wait_for_all([process], RUN_SECONDS)
    text = (folder / "node1.txt").read_text()
    assert codes == [0], text
    return folder / "outputs" / "one", text
