"""Fixtures of the cluster group: hosts made of network namespaces."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.hosts import Host, make_hosts, missing


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
