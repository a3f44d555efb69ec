"""Describe this process's position in the job, from the launcher's variables or the user's."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from unsloth_ddp.distributed.ranks import Ranks
from unsloth_ddp.preflight.environment import DEFAULT_PORT


@dataclass(frozen=True)
class ProcessInfo:
    """One process of the job. Without a launcher there is one process per node, and its rank is NODE_RANK."""

    ranks: Ranks
    launched: bool
    nodes: int
    node_rank: int
    master: str
    port: int
    host: str


def is_launched(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether accelerate launch or torchrun started this process."""
    return "RANK" in environ or "WORLD_SIZE" in environ


def read_process_info(environ: Mapping[str, str] = os.environ) -> ProcessInfo:
    """Read this process's position from variables that environment.check_environment has accepted.

    A NODE_RANK outside the job is kept, so that the other nodes can be told which host has it.
    """
    master = environ.get("MASTER_ADDR") or "localhost"
    port = int(environ.get("MASTER_PORT") or DEFAULT_PORT)
    host = socket.gethostname()
    if is_launched(environ):
        rank, local_rank, world, local_world = (
            int(environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
        )
        ranks = Ranks(rank, local_rank, world, local_world)
        # The launcher may have named this machine by an address that others reach; on one node none of them may connect.
        master = "127.0.0.1" if ranks.nodes == 1 else master
        return ProcessInfo(ranks, True, ranks.nodes, ranks.node_rank, master, port, host)
    nodes = int(environ.get("NNODES") or 1)
    node_rank = int(environ.get("NODE_RANK") or 0)
    return ProcessInfo(Ranks(node_rank, 0, nodes, 1), False, nodes, node_rank, master, port, host)
