"""Read and check the environment variables that describe the job and this process's position in it."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from unsloth_ddp.distributed.ranks import Ranks
from unsloth_ddp.preflight.checks import Finding, Verdict, failure

DEFAULT_PORT = 6001


def check_environment(environ: Mapping[str, str], launched: bool) -> Finding:
    """Check that the variables that describe the job are set, are numbers and agree with each other."""
    problems = launcher_problems(environ) if launched else node_problems(environ)
    names: tuple[str, ...] = ("NNODES", "NODE_RANK", "GPUS_PER_NODE", "MASTER_ADDR", "MASTER_PORT")
    if launched:
        names = (*names, "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    shown = ", ".join(f"{name}={environ[name]}" for name in names if environ.get(name)) or "none set: one node"
    verdict: Verdict = "failure" if problems else "ok"
    elsewhere = environ.get("SLURM_NNODES") or environ.get("SLURM_JOB_NUM_NODES") or ""
    if not problems and not launched and not environ.get("NNODES") and elsewhere.isdigit() and int(elsewhere) > 1:
        problems = [f"Slurm gave this job {elsewhere} nodes, but NNODES is not set, so only this one is checked."]
        verdict = "warning"
    return Finding(shown, verdict, " ".join(problems))


def node_problems(environ: Mapping[str, str]) -> list[str]:
    """Return one sentence for each fault of the variables that a user sets on each node."""
    problems = _not_numbers(environ, ("NNODES", "GPUS_PER_NODE", "MASTER_PORT"), least=1)
    problems += _not_numbers(environ, ("NODE_RANK",), least=0)
    if problems:
        return problems
    nodes, rank = int(environ.get("NNODES") or 1), environ.get("NODE_RANK")
    if nodes > 1:
        for name in ("NODE_RANK", "MASTER_ADDR"):
            if not environ.get(name):
                problems.append(f"NNODES is {nodes}, but {name} is not set on this node; set it.")
    elif rank and int(rank) > 0 and not environ.get("NNODES"):
        problems.append(f"NODE_RANK is {rank}, but NNODES is not set; set it to the number of nodes.")
    if int(environ.get("MASTER_PORT") or DEFAULT_PORT) > 65535:
        problems.append(f"MASTER_PORT is {environ['MASTER_PORT']}, but ports end at 65535; choose another.")
    return problems


def launcher_problems(environ: Mapping[str, str]) -> list[str]:
    """Return one sentence for each fault of a launcher's variables and of the user's beside them."""
    numbers = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    missing = [name for name in numbers if not environ.get(name)]
    if missing:
        return [f"{', '.join(missing)} not set beside RANK and WORLD_SIZE; start with accelerate launch or torchrun."]
    problems = _not_numbers(environ, ("WORLD_SIZE", "LOCAL_WORLD_SIZE"), least=1)
    problems += _not_numbers(environ, ("RANK", "LOCAL_RANK", "NODE_RANK"), least=0)
    problems += _not_numbers(environ, ("NNODES", "GPUS_PER_NODE", "MASTER_PORT"), least=1)
    if problems:
        return problems
    rank, world, local_rank, local_world = (int(environ[name]) for name in numbers)
    if rank >= world or local_rank >= local_world or local_world > world:
        problems.append(
            f"RANK {rank} of WORLD_SIZE {world} and LOCAL_RANK {local_rank} of LOCAL_WORLD_SIZE {local_world} "
            "contradict each other; start with accelerate launch or torchrun."
        )
    if world % local_world:
        problems.append(
            f"LOCAL_WORLD_SIZE {local_world} does not divide WORLD_SIZE {world}; start the same number on every node."
        )
    if world > 1:
        problems += [
            f"{name} is not set by the launcher." for name in ("MASTER_ADDR", "MASTER_PORT") if not environ.get(name)
        ]
    for name, found, meaning in (
        ("NNODES", world // local_world, "the launcher started"),
        ("NODE_RANK", rank // local_world, "to the launcher this is"),
        ("GPUS_PER_NODE", local_world, "processes on this node are"),
    ):
        if environ.get(name) and int(environ[name]) != found:
            problems.append(f"{name} is {environ[name]}, but {meaning} {found}; give the launcher the same number.")
    return problems


def _not_numbers(environ: Mapping[str, str], names: Sequence[str], least: int) -> list[str]:
    return [
        f"{name} is {environ[name]!r}, but it takes a whole number of at least {least}; correct it."
        for name in names
        if environ.get(name) and not (environ[name].isdecimal() and int(environ[name]) >= least)
    ]


def check_node_rank(node: int, nodes: int) -> Finding:
    """Check that a node's rank is one of 0 to nodes - 1."""
    if node < nodes:
        return Finding(f"{node} of {nodes}")
    last = f"from 0 to {nodes - 1}" if nodes > 1 else "0 alone"
    remedy = f"NODE_RANK is {node}, but with NNODES {nodes} ranks go {last}; number the nodes from 0."
    return failure(f"{node} of {nodes}", remedy)


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
    """Read this process's position from variables that check_environment has accepted.

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
