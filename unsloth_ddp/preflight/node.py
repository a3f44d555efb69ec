"""Stage 1: what one node sees by itself, before any process group exists."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from unsloth_ddp.config.parse import Settings
from unsloth_ddp.data.sources import is_file
from unsloth_ddp.distributed.runtime import asks_for_cpu, choose_backend
from unsloth_ddp.distributed.sharding import check_sharding, sharding_from_environment
from unsloth_ddp.model.files import model_folder, weight_bytes
from unsloth_ddp.preflight import checks, machine, space, verdicts
from unsloth_ddp.preflight.bounded import bounded
from unsloth_ddp.preflight.checks import Check
from unsloth_ddp.preflight.machine import Folder
from unsloth_ddp.preflight.place import Place
from unsloth_ddp.preflight.verdicts import Interface
from unsloth_ddp.utils.errors import UserError, one_line

CHECK_SECONDS = 20
GPU_SECONDS = 60
DOCTOR_SECONDS = 150
LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK")


class NodeFolders:
    """The folders a run writes to, made where they are missing and removed again if still empty at the end."""

    def __init__(self) -> None:
        self.made: list[Path] = []

    def probe(self, path: Path) -> Folder:
        """Write and remove a file; another node may remove an empty shared folder meanwhile, hence the tries."""
        error: OSError | None = None
        for _ in range(3):
            try:
                self._make(path)
                with tempfile.NamedTemporaryFile(dir=path, prefix=".preflight-") as file:
                    file.write(b"x" * 4096)
                    file.flush()
                    os.fsync(file.fileno())
                return Folder(str(path), free=shutil.disk_usage(path).free)
            except OSError as problem:
                error = problem
                if not isinstance(problem, FileNotFoundError):
                    break
        assert error is not None
        return Folder(str(path), error=error.strerror or str(error))

    def _make(self, path: Path) -> None:
        missing = [p for p in (path, *path.parents) if not p.exists()]
        path.mkdir(parents=True, exist_ok=True)
        self.made += missing

    def remove(self) -> None:
        """Take away what `probe` made, unless something is in it."""
        for path in self.made:
            with contextlib.suppress(OSError):
                path.rmdir()
        self.made.clear()


def attempt(name: str, node: int, check: Callable[[], Check], seconds: float = CHECK_SECONDS) -> Check:
    """A check that neither raises nor hangs: what goes wrong is its own warning."""
    try:
        return bounded(check, seconds)
    except Exception as error:
        return checks.unmade(name, node, f"{type(error).__name__}: {one_line(error)}")


def network_checks(place: Place, environ: Mapping[str, str]) -> list[Check]:
    """Names, port (where it is this node's to listen on) and interface."""
    node, nodes = place.node_rank, place.nodes
    addresses = resolve(place.master)
    local = any(address in own_addresses() or verdicts.is_loopback(address) for address in addresses)

    def interface() -> Check:
        wanted = {n: environ[n] for n in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME") if environ.get(n)}
        found = interfaces()
        return verdicts.network_interface(node, found, interface_to(addresses, found), wanted, nodes)

    def own_name() -> Check:
        gloo, one_machine = environ.get("GLOO_SOCKET_IFNAME"), verdicts.is_loopback(place.master)
        return verdicts.host_name(node, place.host, resolve(place.host), nodes, gloo, one_machine)

    checks = [
        attempt("node rank", node, lambda: verdicts.node_rank(node, node, nodes)),
        attempt("host name", node, own_name),
        attempt(
            "master address", node, lambda: verdicts.master_name(node, place.master, addresses, local, node, nodes)
        ),
    ]
    if not place.launched and node == 0 and nodes > 1 and local:
        checks.append(
            attempt("master port", node, lambda: verdicts.free_port(node, place.port, port_holder(place.port)))
        )
    checks.append(attempt("network interface", node, interface))
    disabled = environ.get("NCCL_IB_DISABLE") == "1"
    checks.append(
        attempt("InfiniBand / RoCE", node, lambda: verdicts.infiniband(node, infiniband_ports(), disabled, nodes))
    )
    return checks


def machine_checks(
    place: Place,
    settings: Settings,
    environ: Mapping[str, str],
    folders: NodeFolders,
    devices: Sequence[Mapping[str, Any]],
    reason: str,
) -> list[Check]:
    """Clock, disks, shared memory, GPUs, sharding and driver.

    Args:
        devices, reason: what visible_gpus found.
    """
    node = place.node_rank
    cpu = asks_for_cpu(settings, environ)
    processes = place.ranks.local_world_size if place.launched else 0

    def output() -> Check:
        config, weights = model_size(settings)
        # The other nodes only write logs, unless every rank writes its part of a checkpoint.
        whole = node == 0 or sharding_from_environment(environ) != "none"
        needed = space.run_bytes(settings, config, weights) if whole else machine.LOGS_WANTED
        folder = folders.probe(output_folder(settings))
        return machine.disk("output folder", node, folder, needed, "checkpoints and the result", "--output_dir")

    def temporary() -> Check:
        path = settings.compiled_cache_dir or environ.get("UNSLOTH_COMPILE_LOCATION") or tempfile.gettempdir()
        folder = folders.probe(Path(path).expanduser())
        wanted = machine.LOGS_WANTED if cpu else machine.CACHE_WANTED
        return machine.disk(
            "compiled cache", node, folder, wanted, "compiled modules", "--compiled_cache_dir or TMPDIR"
        )

    def cache() -> Check:
        needed = space.cache_bytes(sum(local_sizes(settings)))
        folder = folders.probe(datasets_cache(environ))
        return machine.disk("datasets cache", node, folder, needed, "tokenized rows", "HF_HOME or HF_DATASETS_CACHE")

    def memory() -> Check:
        usage = shutil.disk_usage("/dev/shm")  # noqa: S108 (nothing is written there)
        several = max(processes, int(environ.get("GPUS_PER_NODE") or 0))
        return machine.shared_memory(node, usage.free, usage.total, several, bool(devices) and not cpu)

    def gpu_check() -> Check:
        expected = environ.get("GPUS_PER_NODE")
        return machine.gpus(
            node,
            devices,
            cpu=cpu,
            hardware=has_nvidia(),
            reason=reason,
            expected=int(expected) if expected else None,
            processes=processes,
            visible=environ.get("CUDA_VISIBLE_DEVICES"),
        )

    def driver() -> Check:
        import torch

        return machine.driver(node, driver_version(), driver_cuda(), torch.version.cuda)

    def sharding() -> Check:
        wanted = sharding_from_environment(environ)
        accelerator = bool(devices) and not cpu
        try:
            backend = choose_backend(settings.backend, accelerator)
            # Without a launcher the number of processes is not known; one alone would be refused by fsdp2.
            processes = place.ranks.world_size if place.launched else 2
            check_sharding(wanted, settings, "cuda" if accelerator else "cpu", backend, processes)
        except UserError as error:
            return Check("sharding", {node: wanted}, "failure", str(error))
        return Check("sharding", {node: wanted})

    checks = [
        attempt("clock", node, lambda: machine.clock(node, clock_error(), place.nodes)),
        attempt("output folder", node, output),
        attempt("compiled cache", node, temporary),
        attempt("datasets cache", node, cache),
        attempt("shared memory", node, memory),
        attempt("GPUs", node, gpu_check),
        attempt("sharding", node, sharding),
    ]
    if not cpu and (devices or has_nvidia()):
        checks.append(attempt("driver and CUDA", node, driver, 60))
    return checks


# ---- network ----


def resolve(name: str) -> list[str]:
    """The addresses a name leads to here, best first; empty when it leads nowhere."""
    try:
        found = bounded(lambda: socket.getaddrinfo(name, None, type=socket.SOCK_STREAM), CHECK_SECONDS)
    except (OSError, TimeoutError, UnicodeError):
        return []
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def interfaces() -> list[Interface]:
    """The network interfaces of this machine."""
    import psutil

    states = psutil.net_if_stats()
    found = []
    for name, entries in sorted(psutil.net_if_addrs().items()):
        addresses = [e.address.partition("%")[0] for e in entries if e.family in (socket.AF_INET, socket.AF_INET6)]
        state = states.get(name)
        speed = state.speed if state and 0 < state.speed < 65535000 else 0
        found.append(Interface(name, tuple(addresses), bool(state and state.isup), speed))
    return found


def own_addresses() -> set[str]:
    """Every address of this machine."""
    return {address for interface in interfaces() for address in interface.addresses}


def interface_to(addresses: list[str], found: list[Interface]) -> str | None:
    """The interface on the way to the first of `addresses`, or the one that holds it."""
    for address in addresses:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            # Nothing is sent: connecting a datagram socket only asks the kernel for the route.
            probe.connect((address, 9))
            source = probe.getsockname()[0]
            return next((i.name for i in found if source in i.addresses), None)
    return None


def infiniband_ports(root: Path = Path("/sys/class/infiniband")) -> list[dict[str, str]]:
    """Name, rate, state and link layer of every InfiniBand or RoCE port."""
    ports = []
    for port in sorted(root.glob("*/ports/*")):
        entry = {"name": f"{port.parent.parent.name}:{port.name}"}
        for name in ("rate", "state", "link_layer"):
            try:
                entry[name] = (port / name).read_text().strip()
            except OSError:
                entry[name] = "unknown"
        ports.append(entry)
    return ports


def port_holder(port: int) -> str | None:
    """Who keeps this machine from listening on `port`; None when nobody does."""
    try:
        with socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET) as probe:
            # As the launcher's own server does, so that a connection of a minute ago does not count.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if probe.family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            probe.bind(("", port))
            probe.listen(1)
        return None
    except OSError as error:
        import psutil

        with contextlib.suppress(psutil.Error, OSError):
            for entry in psutil.net_connections("tcp"):
                if entry.laddr and entry.laddr.port == port and entry.status == psutil.CONN_LISTEN and entry.pid:
                    return f"{psutil.Process(entry.pid).name()} (pid {entry.pid})"
        return f"another program ({error.strerror})"


# ---- machine ----


def clock_error() -> float | None:
    """The kernel's bound on its clock's error in seconds; None where it cannot be asked (adjtimex(2), no rights needed)."""
    buffer = ctypes.create_string_buffer(512)
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "adjtimex") or libc.adjtimex(buffer) < 0 or sys.maxsize < 2**32:
        return None
    # struct timex on 64 bit: int modes, padding, then longs: offset, freq, maxerror (microseconds).
    return ctypes.c_long.from_buffer(buffer, 24).value / 1e6


def output_folder(settings: Settings) -> Path:
    """The folder of all runs."""
    return Path(settings.output_dir).expanduser().resolve()


def datasets_cache(environ: Mapping[str, str]) -> Path:
    """Where datasets keeps its files, by its own rule, without the seconds of importing it."""
    if environ.get("HF_DATASETS_CACHE"):
        return Path(environ["HF_DATASETS_CACHE"]).expanduser()
    from huggingface_hub.constants import HF_HOME

    return Path(HF_HOME) / "datasets"


def local_sizes(settings: Settings) -> list[int]:
    """Bytes of every local data file that is there and is kept as tokens; streamed rows are not."""
    sources = [*([] if settings.streaming else settings.dataset), *settings.eval_dataset]
    paths = [Path(source).expanduser() for source in sources if is_file(source)]
    return [path.stat().st_size for path in paths if path.is_file()]


def model_size(settings: Settings) -> tuple[dict[str, Any] | None, int]:
    """The model's config and the bytes of its weight files, where they are on this machine."""
    folder = model_folder(settings)
    if folder is None or not (folder / "config.json").is_file():
        return None, 0
    return json.loads((folder / "config.json").read_text()), weight_bytes(folder)


# ---- GPUs: thin, and written for torch 2.11 to 2.14 ----


def has_nvidia() -> bool:
    """Whether this machine has NVIDIA's driver loaded or a GPU's device file."""
    return Path("/proc/driver/nvidia/version").exists() or bool(list(Path("/dev").glob("nvidia[0-9]*")))


def look_for_gpus(cpu: bool) -> tuple[list[dict[str, Any]], str]:
    """visible_gpus, without waiting for ever for a stuck driver; nothing for a run on the CPU."""
    if cpu:
        return [], ""
    try:
        return bounded(visible_gpus, GPU_SECONDS)
    except Exception as error:
        return [], f"{type(error).__name__}: {one_line(error)}"


def visible_gpus() -> tuple[list[dict[str, Any]], str]:
    """Name, memory, capability and uuid of the GPUs torch sees, and why it sees none."""
    import torch

    if not torch.cuda.is_available():
        try:
            torch.cuda.init()
        except Exception as error:
            return [], one_line(error)
        return [], ""
    devices = []
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        devices.append(
            {
                "name": found.name,
                "memory": found.total_memory,
                "capability": f"{found.major}.{found.minor}",
                "uuid": str(getattr(found, "uuid", "")),
            }
        )
    return devices, ""


def driver_version() -> str | None:
    """The driver's version, as nvidia-smi gives it."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=CHECK_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.split()[0] if done.stdout.split() else None


def driver_cuda() -> int | None:
    """The newest CUDA that the driver runs, 12080 for 12.8; asked of the driver's own library."""
    version = ctypes.c_int()
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return None if failed else version.value


class Doctor:
    """`unsloth doctor --gpus` in the background: it takes about half a minute."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[str] | None = None
        self.report = ""
        self.began = time.monotonic()
        if importlib.util.find_spec("unsloth_cli") is None:
            self.report = "unsloth is not installed"
            return
        environ = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
        environ = {name: value for name, value in environ.items() if not name.startswith(("TORCHELASTIC_", "GROUP_"))}
        self.output = tempfile.TemporaryFile("w+")  # noqa: SIM115
        script = "from unsloth_cli import app; app()"
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-c", script, "doctor", "--gpus"],
                stdin=subprocess.DEVNULL,
                stdout=self.output,
                stderr=subprocess.STDOUT,
                text=True,
                env=environ,
                start_new_session=True,
            )
        except OSError as error:
            self.report = f"could not be started: {error.strerror}"

    def check(self, node: int) -> Check:
        """Wait for it to end, and judge what it says."""
        if self.process is None:
            return machine.doctor(node, None, self.report)
        try:
            code = self.process.wait(max(1.0, DOCTOR_SECONDS - (time.monotonic() - self.began)))
        except subprocess.TimeoutExpired:
            self.end()
            return machine.doctor(node, None, f"did not end within {DOCTOR_SECONDS} s")
        self.output.seek(0)
        return machine.doctor(node, code, self.output.read())

    def end(self) -> None:
        """Stop it with everything it started."""
        if self.process is not None and self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, 9)
            self.process.wait(5)
