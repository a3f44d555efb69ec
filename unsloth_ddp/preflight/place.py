"""Which process of which job this is, with a launcher or without one."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from unsloth_ddp.distributed.ranks import Ranks
from unsloth_ddp.preflight.verdicts import DEFAULT_PORT


@dataclass(frozen=True)
class Place:
    """A process in its job. Without a launcher there is one process a node, whose rank is NODE_RANK."""

    ranks: Ranks
    launched: bool
    nodes: int
    node_rank: int
    master: str
    port: int
    host: str

    @property
    def speaks(self) -> bool:
        """Whether this process prints what concerns its node."""
        return self.ranks.is_local_main


def is_launched(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether accelerate launch or torchrun started this process."""
    return "RANK" in environ or "WORLD_SIZE" in environ


def find_place(environ: Mapping[str, str] = os.environ) -> Place:
    """Where this process stands; the variables have passed verdicts.environment.

    A NODE_RANK that no node can have is kept, so that the other nodes can be told whose it is.
    """
    master = environ.get("MASTER_ADDR") or "localhost"
    port = int(environ.get("MASTER_PORT") or DEFAULT_PORT)
    host = socket.gethostname()
    if is_launched(environ):
        rank, local_rank, world, local_world = (
            int(environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
        )
        ranks = Ranks(rank, local_rank, world, local_world)
        # A launcher may have named this machine by an address that others reach; on one node nobody else is to come.
        master = "127.0.0.1" if ranks.nodes == 1 else master
        return Place(ranks, True, ranks.nodes, ranks.node_rank, master, port, host)
    nodes = int(environ.get("NNODES") or 1)
    node_rank = int(environ.get("NODE_RANK") or 0)
    return Place(Ranks(node_rank, 0, nodes, 1), False, nodes, node_rank, master, port, host)
