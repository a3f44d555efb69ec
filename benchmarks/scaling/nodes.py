"""Run two "nodes" on one machine, each with half of its GPUs: cluster/node.sh twice, with every kind of sharding.

    python -m benchmarks.scaling.nodes --json benchmarks/results/scaling/nodes_gpu.json
    python -m benchmarks.scaling.nodes --cpu 4 --json benchmarks/results/scaling/nodes_eight_cpu.json

CUDA_VISIBLE_DEVICES splits the GPUs, and NCCL_HOSTID makes NCCL treat the halves as two hosts, so that traffic between
them crosses the machine's network interface. Each run takes three steps of SGD in fp32; its weight update is compared
with that of one launcher with as many processes. With --cpu each node has so many processes on the CPU, and only DDP is
run.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.common.runs import REPO, update_difference, write_results
from benchmarks.correctness.sharding import STEPS, Job, launch

# Seconds that a run may take; processes on a CPU share its cores.
LIMIT = 600
OPTIONS = f"--config recipes/demo.yaml --precision fp32 --per_device_train_batch_size 2 {STEPS}".replace(
    "--global_batch_size 8", "--global_batch_size 16"
)


def own_address() -> tuple[str, str]:
    """Return an interface of this machine that is not loopback, and its IPv4 address."""
    for interface, addresses in psutil.net_if_addrs().items():
        for address in addresses:
            if address.family == socket.AF_INET and not address.address.startswith("127."):
                return interface, address.address
    raise SystemExit("this machine has no address but loopback's")


def environ_of(node: int, port: int, half: int) -> dict[str, str]:
    """Return the environment of one of two nodes with `half` processes each."""
    interface, address = own_address()
    return {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": ",".join(str(half * node + gpu) for gpu in range(half)),
        "NNODES": "2",
        "NODE_RANK": str(node),
        "MASTER_ADDR": address,
        # The machine's own name may lead to loopback.
        "GLOO_SOCKET_IFNAME": interface,
        "NCCL_SOCKET_IFNAME": interface,
        "MASTER_PORT": str(port),
        "GPUS_PER_NODE": str(half),
        "NCCL_HOSTID": f"node{node}",
    }


def two_nodes(name: str, work: Path, port: int, arguments: list[str], half: int) -> dict[str, Any]:
    """Run node.sh on both nodes, each with `half` processes; return exit codes, seconds and output."""
    began = time.perf_counter()
    processes = []
    for node in (0, 1):
        environ = environ_of(node, port, half) | {
            "NCCL_DEBUG": "INFO",
            "NCCL_DEBUG_FILE": str(work / f"{name}_nccl_{node}.%p.txt"),
        }
        command = ["bash", "cluster/node.sh", *arguments]
        with (work / f"{name}_node{node}.log").open("w") as log:
            processes.append(subprocess.Popen(command, cwd=REPO, env=environ, stdout=log, stderr=subprocess.STDOUT))
    try:
        codes = [process.wait(timeout=LIMIT) for process in processes]
    except subprocess.TimeoutExpired:
        # node.sh ends what it started.
        for process in processes:
            process.terminate()
        raise
    logs = [(work / f"{name}_node{node}.log").read_text()[-6000:] for node in (0, 1)]
    over_network = any("NET/Socket" in p.read_text() or "NET/IB" in p.read_text() for p in work.glob(f"{name}_nccl_*"))
    result = {"name": name, "command": " ".join(["bash cluster/node.sh", *arguments]), "codes": codes}
    return result | {"seconds": round(time.perf_counter() - began, 1), "nccl_over_network": over_network, "said": logs}


def main() -> None:
    """Run DDP with its preflight alone on the machine, then the others side by side."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("/tmp/nodes_gpu"))
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--cpu", type=int, default=0, help="processes of each node on the CPU [0: all GPUs]")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    output = ["--output_dir", str(args.work / "outputs")]
    half = args.cpu or torch.cuda.device_count() // 2
    ddp = [*OPTIONS.split(), *output, "--run_name", "nodes_ddp", *(["--cpu"] if args.cpu else [])]
    results = [two_nodes("nodes_ddp", args.work, 6001, ddp, half)]
    with ThreadPoolExecutor() as pool:
        alone = Job("one_launcher", "cpu" if args.cpu else "ddp", OPTIONS)
        reference = pool.submit(launch, alone, args.work, half * 2, limit=LIMIT)
        others = []
        for number, sharding in enumerate(() if args.cpu else ("zero2", "zero3", "fsdp2")):
            name = f"nodes_{sharding}"
            options = [*OPTIONS.split(), *output, "--run_name", name, "--sharding", sharding, "--no_preflight"]
            others.append(pool.submit(two_nodes, name, args.work, 6101 + 10 * number, options, half))
        results += [other.result() for other in others]
        single = reference.result()
    print("one launcher", single["exit_code"], single.get("losses"), flush=True)
    for result in results:
        if result["codes"] == [0, 0] and "losses" in single:
            result["update_difference"] = update_difference(args.work, result["name"], "one_launcher")
            del result["said"][1:]
        print({key: value for key, value in result.items() if key != "said"}, flush=True)
        print("\n".join(result["said"]), flush=True)
    write_results(args.json, one_launcher=single, runs=results)


if __name__ == "__main__":
    main()
