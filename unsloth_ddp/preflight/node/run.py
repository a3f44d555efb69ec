"""Run the checks of one node, before any process group exists."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unsloth_ddp.config.options import Settings
from unsloth_ddp.data.sources.checked_rows import check_first_rows
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
    node, nodes, port = process.node_rank, process.nodes, process.port
    addresses = network.resolve_name(process.master)
    local = network.is_here(addresses)

    def own_name() -> Finding:
        own = network.resolve_name(process.host)
        gloo, one_machine = environ.get("GLOO_SOCKET_IFNAME"), network.is_loopback(process.master)
        return network.check_host_name(process.host, own, nodes, gloo, one_machine)

    def interface() -> Finding:
        wanted = {n: environ[n] for n in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME") if environ.get(n)}
        found = network.read_interfaces()
        by_route = network.find_route_interface(addresses, found)
        return network.check_network_interface(found, by_route, wanted, nodes)

    def infiniband() -> Finding:
        disabled = environ.get("NCCL_IB_DISABLE") == "1"
        return network.check_infiniband(network.read_infiniband_ports(), disabled, nodes)

    checks: dict[str, Callable[[], Finding]] = {
        "node rank": lambda: check_node_rank(node, nodes),
        "host name": own_name,
        "master address": lambda: network.check_master_address(node, process.master, addresses, local, nodes),
        "master port": lambda: network.check_free_port(port, network.find_port_holder(port)),
        "network interface": interface,
        "InfiniBand / RoCE": infiniband,
    }
    if process.launched or node > 0 or nodes == 1 or not local:
        del checks["master port"]
    return [run_check(name, node, check) for name, check in checks.items()]


@dataclass(frozen=True)
class MachineChecks:
    """The checks of this node's disks, rows, shared memory, GPUs, precision and sharding."""

    process: ProcessInfo
    settings: Settings
    environ: Mapping[str, str]
    devices: Sequence[Mapping[str, Any]]
    reason: str

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
        checks: dict[str, Callable[[], Finding]] = {
            "output folder": self._output,
            "compiled cache": self._temporary,
            "datasets cache": self._cache,
            "rows": self._rows,
            "shared memory": self._memory,
            "GPUs": self._gpus,
            "precision": self._precision,
            "sharding": self._sharding,
        }
        node = self.process.node_rank
        return [run_check(name, node, check, SECONDS.get(name, CHECK_SECONDS)) for name, check in checks.items()]

    def _output(self) -> Finding:
        config, weights = disks.read_model_size(self.settings)
        # The other nodes write logs only, unless every rank writes its part of a checkpoint.
        whole = self.process.node_rank == 0 or sharding_from_environment(self.environ) != "none"
        needed = disks.estimate_run_bytes(self.settings, config, weights) if whole else disks.LOGS_WANTED
        folder = disks.probe(disks.output_folder(self.settings))
        return disks.check_folder(folder, needed, "checkpoints and the result", "--output_dir")

    def _temporary(self) -> Finding:
        path = self.settings.compiled_cache_dir or self.environ.get("UNSLOTH_COMPILE_LOCATION") or tempfile.gettempdir()
        folder = disks.probe(Path(path).expanduser())
        wanted = disks.LOGS_WANTED if self.cpu else disks.CACHE_WANTED
        return disks.check_folder(folder, wanted, "compiled modules", "--compiled_cache_dir or TMPDIR")

    def _cache(self) -> Finding:
        # Reading, formatting and tokenizing each keep their result to the end.
        needed = 4 * sum(disks.read_data_sizes(self.settings)) + 256 * MIB
        folder = disks.probe(disks.find_datasets_cache(self.environ))
        return disks.check_folder(folder, needed, "tokenized rows", "HF_HOME or HF_DATASETS_CACHE")

    def _memory(self) -> Finding:
        usage = shutil.disk_usage("/dev/shm")  # noqa: S108 (nothing is written there)
        several = max(self.processes, int(self.environ.get("GPUS_PER_NODE") or 0))
        return machine.check_shared_memory(usage.free, usage.total, several, bool(self.devices) and not self.cpu)

    def _gpus(self) -> Finding:
        import torch

        expected, visible = self.environ.get("GPUS_PER_NODE"), self.environ.get(VISIBLE)
        missing = None if self.devices else explain_missing_gpu(visible, has_nvidia(), torch.version.cuda, self.reason)
        return machine.check_gpus(
            self.devices,
            cpu=self.cpu,
            missing=missing,
            expected=int(expected) if expected else None,
            processes=self.processes,
            visible=visible,
        )

    def _precision(self) -> Finding:
        used = [] if self.cpu else self.devices
        return machine.check_precision(used, self.settings.precision, self.settings.method, self.settings.full_weights)

    def _sharding(self) -> Finding:
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
            return failure(wanted, str(error))
        return Finding(describe_sharding(wanted, offload, copies, processes))

    def _rows(self) -> Finding:
        try:
            read = check_first_rows(self.settings, FIRST_ROWS)
        except UserError as error:
            return failure("refused", str(error))
        parts = [f"first {read.rows:,} of {counted(read.files, 'file')}"] if read.files else []
        parts += ["Hub datasets not read"] if read.hub else []
        return Finding("; ".join(parts) or "none")
