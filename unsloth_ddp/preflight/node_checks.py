"""Run the checks of one node, before any process group exists."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unsloth_ddp.config.options import Settings
from unsloth_ddp.data.checked_rows import check_first_rows
from unsloth_ddp.distributed.missing_gpu import VISIBLE, explain_missing_gpu, has_nvidia
from unsloth_ddp.distributed.runtime import asks_for_cpu, choose_backend
from unsloth_ddp.distributed.sharding import (
    check_offload,
    check_sharding,
    copies_from_environment,
    describe_sharding,
    offload_from_environment,
    sharding_from_environment,
    unsupported_by_unsloth,
)
from unsloth_ddp.preflight import disk_space, machine, network
from unsloth_ddp.preflight.checks import Check, not_checked
from unsloth_ddp.preflight.environment import check_node_rank
from unsloth_ddp.preflight.folders import (
    NodeFolders,
    find_datasets_cache,
    output_folder,
    read_data_sizes,
    read_model_size,
)
from unsloth_ddp.preflight.machine_facts import read_clock_error, read_driver_cuda, read_driver_version
from unsloth_ddp.preflight.network_facts import (
    find_port_holder,
    find_route_interface,
    is_here,
    read_infiniband_ports,
    read_interfaces,
    resolve_name,
)
from unsloth_ddp.preflight.process_info import ProcessInfo
from unsloth_ddp.preflight.time_limit import run_with_limit
from unsloth_ddp.utils.errors import UserError, one_line
from unsloth_ddp.utils.units import counted

CHECK_SECONDS = 20
# Rows of every file that are read; a .json file has to be read to its end for them.
FIRST_ROWS = 100
ROWS_SECONDS = 60


def run_check(name: str, node: int, check: Callable[[], Check], seconds: float = CHECK_SECONDS) -> Check:
    """Run a check with a time limit; an error or a timeout becomes a warning."""
    try:
        return run_with_limit(check, seconds)
    except Exception as error:
        return not_checked(name, node, f"{type(error).__name__}: {one_line(error)}")


def check_network(process: ProcessInfo, environ: Mapping[str, str]) -> list[Check]:
    """Check this node's names, interfaces and, on node 0, the port to listen on."""
    node, nodes = process.node_rank, process.nodes
    addresses = resolve_name(process.master)
    local = is_here(addresses)

    def interface() -> Check:
        wanted = {n: environ[n] for n in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME") if environ.get(n)}
        found = read_interfaces()
        by_route = find_route_interface(addresses, found)
        return network.check_network_interface(node, found, by_route, wanted, nodes)

    def own_name() -> Check:
        gloo, one_machine = environ.get("GLOO_SOCKET_IFNAME"), network.is_loopback(process.master)
        return network.check_host_name(node, process.host, resolve_name(process.host), nodes, gloo, one_machine)

    checks = [
        run_check("node rank", node, lambda: check_node_rank(node, nodes)),
        run_check("host name", node, own_name),
        run_check(
            "master address", node, lambda: network.check_master_address(node, process.master, addresses, local, nodes)
        ),
    ]
    if not process.launched and node == 0 and nodes > 1 and local:
        checks.append(
            run_check(
                "master port", node, lambda: network.check_free_port(node, process.port, find_port_holder(process.port))
            )
        )
    checks.append(run_check("network interface", node, interface))
    disabled = environ.get("NCCL_IB_DISABLE") == "1"
    checks.append(
        run_check(
            "InfiniBand / RoCE", node, lambda: network.check_infiniband(node, read_infiniband_ports(), disabled, nodes)
        )
    )
    return checks


@dataclass(frozen=True)
class MachineChecks:
    """The checks of this node's clock, disks, shared memory, GPUs, sharding and driver.

    Args:
        devices, reason: the result of machine_facts.read_gpus.
    """

    process: ProcessInfo
    settings: Settings
    environ: Mapping[str, str]
    folders: NodeFolders
    devices: Sequence[Mapping[str, Any]]
    reason: str

    @property
    def node(self) -> int:
        """Return the number of this node."""
        return self.process.node_rank

    @property
    def cpu(self) -> bool:
        """Return whether the run asks for the CPU."""
        return asks_for_cpu(self.settings, self.environ)

    @property
    def processes(self) -> int:
        """Return the number of processes on this node; 0 when no launcher has started them yet."""
        return self.process.ranks.local_world_size if self.process.launched else 0

    def run(self) -> list[Check]:
        """Run the checks one after the other."""
        node, nodes = self.node, self.process.nodes
        checks = [
            run_check("clock", node, lambda: machine.check_clock(node, read_clock_error(), nodes)),
            run_check("output folder", node, self._output),
            run_check("compiled cache", node, self._temporary),
            run_check("datasets cache", node, self._cache),
            run_check("rows", node, self._rows, ROWS_SECONDS),
            run_check("shared memory", node, self._memory),
            run_check("GPUs", node, self._gpus),
            run_check("precision", node, self._precision),
            run_check("sharding", node, self._sharding),
        ]
        if not self.cpu and (self.devices or has_nvidia()):
            checks.append(run_check("driver and CUDA", node, self._driver, 60))
        return checks

    def _output(self) -> Check:
        config, weights = read_model_size(self.settings)
        # The other nodes write logs only, unless every rank writes its part of a checkpoint.
        whole = self.node == 0 or sharding_from_environment(self.environ) != "none"
        needed = disk_space.estimate_run_bytes(self.settings, config, weights) if whole else machine.LOGS_WANTED
        folder = self.folders.probe(output_folder(self.settings))
        return machine.check_folder(
            "output folder", self.node, folder, needed, "checkpoints and the result", "--output_dir"
        )

    def _temporary(self) -> Check:
        path = self.settings.compiled_cache_dir or self.environ.get("UNSLOTH_COMPILE_LOCATION") or tempfile.gettempdir()
        folder = self.folders.probe(Path(path).expanduser())
        wanted = machine.LOGS_WANTED if self.cpu else machine.CACHE_WANTED
        return machine.check_folder(
            "compiled cache", self.node, folder, wanted, "compiled modules", "--compiled_cache_dir or TMPDIR"
        )

    def _cache(self) -> Check:
        needed = disk_space.estimate_cache_bytes(sum(read_data_sizes(self.settings)))
        folder = self.folders.probe(find_datasets_cache(self.environ))
        return machine.check_folder(
            "datasets cache", self.node, folder, needed, "tokenized rows", "HF_HOME or HF_DATASETS_CACHE"
        )

    def _memory(self) -> Check:
        usage = shutil.disk_usage("/dev/shm")  # noqa: S108 (nothing is written there)
        several = max(self.processes, int(self.environ.get("GPUS_PER_NODE") or 0))
        return machine.check_shared_memory(
            self.node, usage.free, usage.total, several, bool(self.devices) and not self.cpu
        )

    def _gpus(self) -> Check:
        import torch

        expected, visible = self.environ.get("GPUS_PER_NODE"), self.environ.get(VISIBLE)
        missing = None if self.devices else explain_missing_gpu(visible, has_nvidia(), torch.version.cuda, self.reason)
        return machine.check_gpus(
            self.node,
            self.devices,
            cpu=self.cpu,
            missing=missing,
            expected=int(expected) if expected else None,
            processes=self.processes,
            visible=visible,
        )

    def _driver(self) -> Check:
        import torch

        return machine.check_driver(self.node, read_driver_version(), read_driver_cuda(), torch.version.cuda)

    def _precision(self) -> Check:
        used = [] if self.cpu else self.devices
        return machine.check_precision(
            self.node, used, self.settings.precision, self.settings.method, self.settings.full_weights
        )

    def _sharding(self) -> Check:
        process, settings, environ = self.process, self.settings, self.environ
        wanted = sharding_from_environment(environ)
        accelerator = bool(self.devices) and not self.cpu
        try:
            offload = offload_from_environment(environ)
            backend = choose_backend(settings.backend, accelerator, unsupported_by_unsloth(settings, wanted, offload))
            # Without a launcher the number of processes is not known; with one process fsdp2 is refused.
            processes = process.ranks.world_size if process.launched else 2
            copies = copies_from_environment(environ, processes, process.nodes) if process.launched else 1
            device = "cuda" if accelerator else "cpu"
            check_sharding(wanted, settings, device, backend, processes)
            check_offload(offload, wanted, settings, backend, device)
        except UserError as error:
            return Check("sharding", {self.node: wanted}, "failure", str(error))
        return Check("sharding", {self.node: describe_sharding(wanted, offload, copies, processes)})

    def _rows(self) -> Check:
        try:
            read = check_first_rows(self.settings, FIRST_ROWS)
        except UserError as error:
            return Check("rows", {self.node: "refused"}, "failure", str(error))
        parts = [f"first {read.rows:,} of {counted(read.files, 'file')}"] if read.files else []
        parts += ["Hub datasets not read"] if read.hub else []
        return Check("rows", {self.node: "; ".join(parts) or "none"})
