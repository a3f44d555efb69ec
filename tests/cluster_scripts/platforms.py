"""The commands of cluster/skypilot.yaml, dstack.yml, jobset.yaml and trainjob.yaml, and what each platform sets.

Variables are those of SkyPilot 0.14, dstack 0.22, JobSet 0.12 and Kubeflow Trainer 2.3, read from their sources.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from typing import Any

import yaml

from tests.conftest import REPO

NAMES = ("skypilot.yaml", "dstack.yml", "jobset.yaml", "trainjob.yaml")
TRAINING = re.compile(r"-m Qwen/Qwen3-8B -d \S+ --method lora")
# The name of a run, as the variables below make it.
RUN_NAMES = dict(
    zip(NAMES, ("sky-managed-2026-01-02-03-04-05-678901_unsloth-ddp_7-0", *["unsloth-ddp"] * 3), strict=True)
)


@dataclass
class Started:
    """A command and its environment, as a platform starts it on one node."""

    command: list[str]
    environ: dict[str, str]


def read(name: str) -> list[dict[str, Any]]:
    """Return the YAML documents of a file."""
    return list(yaml.safe_load_all((REPO / "cluster" / name).read_text()))


def node_command(name: str, addresses: list[str], rank: int, gpus: int, training: list[str]) -> Started:
    """Return what the platform runs on node `rank`, with `training` in place of the file's model, rows and method.

    Args:
        addresses: of every node; that of node 0 stands for the DNS name that Kubernetes would have.
    """
    document = read(name)[-1]
    if name == "skypilot.yaml":
        # SkyPilot runs the text with bash.
        return Started(["bash", "-c", _with_training(document["run"], training)], {
            "SKYPILOT_NODE_IPS": "\n".join(addresses),
            "SKYPILOT_NODE_RANK": str(rank),
            "SKYPILOT_NUM_NODES": str(len(addresses)),
            "SKYPILOT_NUM_GPUS_PER_NODE": str(gpus),
            "SKYPILOT_TASK_ID": RUN_NAMES[name],
            "UNSLOTH_DDP_SECRET": "told to nobody",
        })  # fmt: skip
    if name == "dstack.yml":
        # dstack joins the commands, and runs them with the shell that is asked for.
        joined = " && ".join(command.strip() for command in document["commands"])
        return Started([document["shell"], "-c", _with_training(joined, training)], {
            "DSTACK_NODES_IPS": "\n".join(addresses),
            "DSTACK_MASTER_NODE_IP": addresses[0],
            "DSTACK_NODE_RANK": str(rank),
            "DSTACK_NODES_NUM": str(len(addresses)),
            "DSTACK_GPUS_PER_NODE": str(gpus),
            "DSTACK_RUN_NAME": document["name"],
            "UNSLOTH_DDP_SECRET": "told to nobody",
        })  # fmt: skip
    if name == "jobset.yaml":
        labels = {
            "jobset-name": document["metadata"]["name"],
            "job-index": str(rank),
            "replicatedjob-replicas": str(document["spec"]["replicatedJobs"][0]["replicas"]),
        }
        container = container_of(document["spec"])
        environ = _environ(container, labels)
        assert environ["MASTER_ADDR"] == "unsloth-ddp-node-0-0.unsloth-ddp"
        arguments = container["args"]
    else:
        runtime = read(name)[0]
        container = container_of(runtime["spec"]["template"]["spec"])
        arguments = document["spec"]["trainer"]["args"]
        environ = _environ(container, {"jobset-name": document["metadata"]["name"]}) | {
            "PET_NNODES": str(document["spec"]["trainer"]["numNodes"]),
            "PET_NPROC_PER_NODE": "auto",
            "PET_NODE_RANK": str(rank),
            "PET_MASTER_PORT": "29500",
        }
    environ["MASTER_ADDR" if name == "jobset.yaml" else "PET_MASTER_ADDR"] = addresses[0]
    assert arguments[0] == "--output_dir=/checkpoints"
    return Started([*container["command"], arguments[0], *training], environ)


def container_of(jobset: dict[str, Any]) -> dict[str, Any]:
    """Return the one container of a JobSet's specification."""
    (job,) = jobset["replicatedJobs"]
    (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
    assert (job["name"], container["name"]) == ("node", "node")
    return container


def _with_training(text: str, training: list[str]) -> str:
    found, count = TRAINING.subn(shlex.join(training).replace("\\", r"\\"), text)
    assert count == 1, text
    return found


def _environ(container: dict[str, Any], labels: dict[str, str]) -> dict[str, str]:
    """Return a container's variables as the kubelet makes them: labels, secrets, and $(NAME) of variables before."""
    made: dict[str, str] = {}
    for entry in container["env"]:
        if "value" in entry:
            made[entry["name"]] = re.sub(r"\$\((\w+)\)", lambda match: made[match[1]], entry["value"])
        elif "secretKeyRef" in entry["valueFrom"]:
            made[entry["name"]] = "told to nobody"
        else:
            path = entry["valueFrom"]["fieldRef"]["fieldPath"]
            made[entry["name"]] = labels[re.fullmatch(r"metadata\.labels\['jobset\.sigs\.k8s\.io/(.+)'\]", path)[1]]  # type: ignore[index]
    return made
