"""Run the checks of one node, before any process group exists."""

import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from unsloth_ddp.config.options import Settings
from unsloth_ddp.data.sources.checked_rows import check_first_rows
from unsloth_ddp.distributed.missing_gpu import VISIBLE, explain_missing_gpu, has_nvidia
from unsloth_ddp.distributed.runtime import asks_for_cpu
from unsloth_ddp.distributed.sharding import (
    check_offload,
    check_sharding,
    copies_from_environment,
    describe_sharding,
    offload_from_environment,
    sharding_from_environment,
)
from unsloth_ddp.model.backend import BackendFacts, choose_backend
from unsloth_ddp.preflight.checks import CHECK_SECONDS, Check, Finding, failure, run_check
from unsloth_ddp.preflight.job import ProcessInfo, check_node_rank
from unsloth_ddp.preflight.node import disks, machine, network
from unsloth_ddp.utils.errors import UserError
from unsloth_ddp.utils.units import MIB, counted

# Rows of every file that are read; a .json file has to be read to its end for them.
FIRST_ROWS = 100
# Of checks that may take longer than others.
SECONDS = {"rows": 60}


def network_checks(process: ProcessInfo, environ: Mapping[str, str]) -> list[Check]:
    """Check this node's names, interfaces and, on node 0, the port to listen on."""
    node, nodes, port = process.ranks.node_rank, process.ranks.nodes, process.port
    addresses = network.resolve_name(process.master)
    local = network.is_here(addresses)
    patterns = {name: environ[name] for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME") if environ.get(name)}
    checks: dict[str, Callable[[], Finding]] = {
        "node rank": lambda: check_node_rank(node, nodes),
        "host name": lambda: network.check_host_name(
            process.host,
            network.resolve_name(process.host),
            nodes,
            environ.get("GLOO_SOCKET_IFNAME"),
            network.is_loopback(process.master),
        ),
        "master address": lambda: network.check_master_address(node, process.master, addresses, local, nodes),
        "master port": lambda: network.check_free_port(port, network.find_port_holder(port)),
        "network interface": lambda: network.check_network_interface(network.read_interfaces(), patterns, nodes),
        "InfiniBand / RoCE": lambda: network.check_infiniband(
            network.read_infiniband_ports(), environ.get("NCCL_IB_DISABLE") == "1", nodes
        ),
    }
    if process.launched or node > 0 or nodes == 1 or not local:
        del checks["master port"]
    return [run_check(name, node, check) for name, check in checks.items()]


def machine_checks(
    process: ProcessInfo,
    settings: Settings,
    environ: Mapping[str, str],
    devices: Sequence[Mapping[str, Any]],
    torch_error: str,
) -> list[Check]:
    """Check this node's disks, rows, shared memory, GPUs, precision and sharding.

    Args:
        devices: the GPUs that torch sees.
        torch_error: torch's reason for seeing none.
    """
    cpu = asks_for_cpu(settings, environ)
    # No launcher has started the processes yet.
    processes = process.ranks.local_world_size if process.launched else 0
    node = process.ranks.node_rank

    def output() -> Finding:
        # The other nodes write logs only, unless every rank writes its part of a checkpoint.
        whole = node == 0 or sharding_from_environment(environ) != "none"
        needed = disks.estimate_run_bytes(settings, *disks.read_model_size(settings)) if whole else disks.LOGS_WANTED
        return disks.check_folder(disks.output_folder(settings), needed, "checkpoints and the result", "--output_dir")

    def compiled_cache() -> Finding:
        path = settings.compiled_cache_dir or environ.get("UNSLOTH_COMPILE_LOCATION") or tempfile.gettempdir()
        needed = disks.LOGS_WANTED if cpu else disks.CACHE_WANTED
        option = "--compiled_cache_dir or TMPDIR"
        return disks.check_folder(Path(path).expanduser(), needed, "compiled modules", option)

    def datasets_cache() -> Finding:
        # Reading, formatting and tokenizing each keep their result to the end.
        needed = 4 * sum(disks.read_data_sizes(settings)) + 256 * MIB
        folder = disks.find_datasets_cache(environ)
        return disks.check_folder(folder, needed, "tokenized rows", "HF_HOME or HF_DATASETS_CACHE")

    def shared_memory() -> Finding:
        usage = shutil.disk_usage("/dev/shm")  # noqa: S108 (nothing is written there)
        several = max(processes, int(environ.get("GPUS_PER_NODE") or 0))
        return machine.check_shared_memory(usage.free, usage.total, several, bool(devices) and not cpu)

    def gpus() -> Finding:
        expected, visible = environ.get("GPUS_PER_NODE"), environ.get(VISIBLE)
        missing = None
        # With --use_cpu nothing has imported torch yet, which may take longer than the time limit of a check.
        if not devices and not cpu:
            import torch

            missing = explain_missing_gpu(visible, has_nvidia(), torch.version.cuda, torch_error)
        return machine.check_gpus(
            devices,
            cpu=cpu,
            missing=missing,
            expected=int(expected) if expected else None,
            processes=processes,
            visible=visible,
        )

    checks: dict[str, Callable[[], Finding]] = {
        "output folder": output,
        "compiled cache": compiled_cache,
        "datasets cache": datasets_cache,
        "rows": lambda: check_rows(settings),
        "shared memory": shared_memory,
        "GPUs": gpus,
        "precision": lambda: machine.check_precision(
            [] if cpu else devices, settings.precision, settings.method, settings.full_weights
        ),
        "sharding": lambda: check_launch(process, settings, environ, bool(devices) and not cpu),
    }
    return [run_check(name, node, check, SECONDS.get(name, CHECK_SECONDS)) for name, check in checks.items()]


def check_launch(process: ProcessInfo, settings: Settings, environ: Mapping[str, str], accelerator: bool) -> Finding:
    """Check that the run can have the sharding that the launcher asks for."""
    sharding = sharding_from_environment(environ)
    try:
        offload = offload_from_environment(environ)
        # Without a launcher the number of processes is not known; with one process fsdp2 is refused.
        processes = process.ranks.world_size if process.launched else 2
        copies = copies_from_environment(environ, processes, process.ranks.nodes) if process.launched else 1
        device = "cuda" if accelerator else "cpu"
        check_sharding(sharding, settings, device, processes)
        check_offload(offload, sharding, settings, device)
        # Refuses Unsloth where it cannot train.
        choose_backend(BackendFacts(settings, accelerator, sharding, offload))
    except UserError as error:
        return failure(sharding, str(error))
    return Finding(describe_sharding(sharding, offload, copies, processes))


def check_rows(settings: Settings) -> Finding:
    try:
        read = check_first_rows(settings, FIRST_ROWS)
    except UserError as error:
        return failure("refused", str(error))
    parts = [f"first {read.rows:,} of {counted(read.files, 'file')}"] if read.files else []
    parts += ["Hub datasets not read"] if read.hub else []
    return Finding("; ".join(parts) or "none")
