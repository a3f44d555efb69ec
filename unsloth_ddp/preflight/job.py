"""Read and check the environment variables that describe the job and this process's position in it."""

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from unsloth_ddp.distributed.ranks import Ranks, ranks_from_environment
from unsloth_ddp.preflight.checks import Finding, Verdict, failure
from unsloth_ddp.utils.errors import UserError

DEFAULT_PORT = 6001


def check_environment(environ: Mapping[str, str]) -> Finding:
    """Check that the variables that describe the job are set, are numbers and agree with each other."""
    launched = is_launched(environ)
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
    problems = _not_numbers(environ, ("NNODES", "GPUS_PER_NODE", "MASTER_PORT"), lowest=1)
    problems += _not_numbers(environ, ("NODE_RANK",), lowest=0)
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


def place_problems(environ: Mapping[str, str]) -> list[str]:
    """Return one sentence for each fault of a launcher's variables, without which a process has no place in the job."""
    missing = [name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE") if not environ.get(name)]
    if missing:
        return [f"{', '.join(missing)} not set beside RANK and WORLD_SIZE; start with accelerate launch or torchrun."]
    try:
        ranks = ranks_from_environment(environ)
    except UserError as error:
        return [str(error)]
    if ranks.world_size % ranks.local_world_size:
        return [
            f"LOCAL_WORLD_SIZE {ranks.local_world_size} does not divide WORLD_SIZE {ranks.world_size}; start the same "
            "number on every node."
        ]
    return _not_numbers(environ, ("MASTER_PORT",), lowest=1)


def launcher_problems(environ: Mapping[str, str]) -> list[str]:
    """Return one sentence for each fault of a launcher's variables and of the user's beside them."""
    problems = place_problems(environ) or [
        *_not_numbers(environ, ("NNODES", "GPUS_PER_NODE"), lowest=1),
        *_not_numbers(environ, ("NODE_RANK",), lowest=0),
    ]
    if problems:
        return problems
    ranks = ranks_from_environment(environ)
    for name, actual, meaning in (
        ("NNODES", ranks.nodes, "the launcher started"),
        ("NODE_RANK", ranks.node_rank, "to the launcher this is"),
        ("GPUS_PER_NODE", ranks.local_world_size, "processes on this node are"),
    ):
        if environ.get(name) and int(environ[name]) != actual:
            problems.append(f"{name} is {environ[name]}, but {meaning} {actual}; give the launcher the same number.")
    return problems


def _not_numbers(environ: Mapping[str, str], names: Sequence[str], lowest: int) -> list[str]:
    return [
        f"{name} is {environ[name]!r}, but it takes a whole number of at least {lowest}; correct it."
        for name in names
        if environ.get(name) and not (environ[name].isdecimal() and int(environ[name]) >= lowest)
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
    master: str
    port: int
    host: str


def is_launched(environ: Mapping[str, str]) -> bool:
    """Return whether accelerate launch or torchrun started this process."""
    return "RANK" in environ or "WORLD_SIZE" in environ


def read_process_info(environ: Mapping[str, str] = os.environ) -> ProcessInfo:
    """Read this process's position from variables that check_environment has accepted.

    A NODE_RANK outside the job is kept, so that the other nodes can be told which host has it.
    """
    launched = is_launched(environ)
    if launched:
        ranks = ranks_from_environment(environ)
    else:
        ranks = Ranks(int(environ.get("NODE_RANK") or 0), 0, int(environ.get("NNODES") or 1), 1)
    # The launcher may have named this machine by an address that others reach; on one node none of them may connect.
    one_node = launched and ranks.nodes == 1
    master = "127.0.0.1" if one_node else environ.get("MASTER_ADDR") or "localhost"
    return ProcessInfo(ranks, launched, master, int(environ.get("MASTER_PORT") or DEFAULT_PORT), socket.gethostname())
