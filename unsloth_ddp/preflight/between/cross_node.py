"""Compare what all nodes have to agree on: pure functions from plain values by node to rows of the table."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from unsloth_ddp.config.options import OPTIONS, Settings
from unsloth_ddp.preflight.checks import Check, Verdict, merge_checks, name_nodes, not_checked
from unsloth_ddp.preflight.node.disks import output_folder
from unsloth_ddp.preflight.node.machine import list_gpus
from unsloth_ddp.utils.errors import one_line

# Packages that only log or convert; every other one decides what a run computes or how ranks communicate.
LOGGING_PACKAGES = ("tensorboard", "nbconvert")
# These depend on the hardware of each node, so they may differ.
PER_NODE_VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_IB_GID_INDEX", "NCCL_TOPO_FILE")
NUMERIC_VARIABLES = (
    "ACCELERATE_MIXED_PRECISION", "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "CUBLAS_WORKSPACE_CONFIG", "UNSLOTH_FORCE_FLOAT32", "ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED",
    "PARALLELISM_CONFIG_DP_REPLICATE_SIZE", "PARALLELISM_CONFIG_DP_SHARD_SIZE",
)  # fmt: skip
# Options that name files or folders.
PATHS = tuple(name for name, option in OPTIONS.items() if option.path)
# The report of each node by its number.
Reports = Mapping[int, Mapping[str, Any]]


def _differing(by_node: Mapping[int, Mapping[str, Any]]) -> tuple[list[str], list[str]]:
    """Return all names of the nodes' values, and those whose values differ."""
    names = list(dict.fromkeys(name for values in by_node.values() for name in values))
    return names, [name for name in names if len({values.get(name) for values in by_node.values()}) > 1]


def compare_versions(by_node: Mapping[int, Mapping[str, str]]) -> list[Check]:
    """Compare Python, torch, CUDA, NCCL and packages: one row for all that agree, one for each that differs."""
    names, differing = _differing(by_node)
    first = next(iter(by_node.values()))
    alike = ", ".join(f"{name} {first[name]}" for name in names if name not in differing)
    rows = [Check("versions", dict.fromkeys(sorted(by_node), alike))]
    for name in differing:
        by_version = {node: by_node[node].get(name, "not installed") for node in sorted(by_node)}
        minor = name == "python" and len({v.rpartition(".")[0] for v in by_version.values()}) == 1
        verdict: Verdict = "warning" if minor or name in LOGGING_PACKAGES else "failure"
        remedy = "Use one environment on every node: uv sync --locked from the same uv.lock."
        rows.append(Check(f"version of {name}", by_version, verdict, remedy))
    return rows


def compare_code(by_node: Mapping[int, str]) -> Check:
    """Compare the checksum of the kit's files."""
    shown = {node: f"files {checksum[:10]}" for node, checksum in sorted(by_node.items())}
    if len(set(shown.values())) == 1:
        return Check("kit", shown)
    return Check("kit", shown, "failure", "The nodes run different code: check out the same commit on every node.")


def compare_settings(by_node: Mapping[int, Mapping[str, Any]], paths: Sequence[str]) -> Check:
    """Compare every option of the run; only paths may differ, since the content of files is compared too."""
    flat = {node: flatten_options(options) for node, options in by_node.items()}
    names, differing = _differing(flat)
    if not differing:
        alike = f"{len(names)} options{', equal on all nodes' if len(flat) > 1 else ''}"
        return Check("settings", dict.fromkeys(sorted(by_node), alike))
    shown = {
        node: ", ".join(f"{name}={options.get(name, 'not set')[:200]}" for name in differing)
        for node, options in sorted(flat.items())
    }
    hard = [name for name in differing if name.partition(".")[0] not in paths]
    if hard:
        remedy = f"{', '.join(hard)} differ: give the same options (the same --config) on every node."
        return Check("settings", shown, "failure", remedy)
    remedy = f"{', '.join(differing)} name different paths; that is right if each node uses its own disk."
    return Check("settings", shown, "warning", remedy)


def flatten_options(options: Mapping[str, Any]) -> dict[str, str]:
    """Return options as text, each key of a mapping as an option of its own."""
    flat: dict[str, str] = {}
    for name, value in options.items():
        if isinstance(value, Mapping):
            flat |= {f"{name}.{key}": json.dumps(item, sort_keys=True) for key, item in value.items()}
        else:
            flat[name] = value if isinstance(value, str) else json.dumps(value)
    return flat


def compare_files(name: str, by_node: Mapping[int, Mapping[str, Mapping[str, Any]]], what: str) -> list[Check]:
    """Compare files by content: one row for all that agree, one for each that differs or is missing.

    Args:
        by_node: label -> {"content": text}, {"missing": path}, {"refused": reason} or {"hub": commit or None}.
        what: the word for these files in the remedy.
    """
    rows, alike = [], []
    for label in dict.fromkeys(label for files in by_node.values() for label in files):
        entries = {node: by_node[node].get(label, {"missing": label}) for node in sorted(by_node)}
        shown = {node: describe_file(entry) for node, entry in entries.items()}
        missing = [node for node, entry in entries.items() if "missing" in entry]
        refused = [entry["refused"] for entry in entries.values() if "refused" in entry]
        verdict: Verdict = "failure"
        if refused:
            remedy = refused[0]
        elif missing:
            remedy = (
                f"{label} is missing on {name_nodes(missing)}: copy it there, or keep it in a folder all nodes share."
            )
            if len(missing) == len(by_node):
                remedy = f"{label} is missing: give a path that exists with --{what}."
        elif len(set(shown.values())) == 1:
            alike.append(f"{label} {shown[min(shown)]}")
            continue
        elif any("content" in entry for entry in entries.values()):
            remedy = f"The nodes would train on different {what}s: copy the same files to every node."
        elif any(entry["hub"] is None for entry in entries.values()):
            verdict = "warning"
            remedy = f"Some nodes still have to download this {what}: pin a revision, or download it on every node."
        else:
            remedy = f"The nodes' caches hold different commits of this {what}: remove the older, or pin a revision."
        rows.append(Check(f"{name}: {label}", shown, verdict, remedy))
    if alike:
        rows.insert(0, Check(name, dict.fromkeys(sorted(by_node), ", ".join(alike))))
    return rows


def describe_file(entry: Mapping[str, Any]) -> str:
    """Return what a node has of a file or a Hub source."""
    if "hub" in entry:
        return f"from the Hub, commit {entry['hub'][:10]} in the cache" if entry["hub"] else "from the Hub, not cached"
    return str(entry.get("content") or ("missing" if "missing" in entry else "refused"))


def compare_variables(by_node: Mapping[int, Mapping[str, str]]) -> Check:
    """Compare the environment variables that decide how ranks communicate and compute."""
    judged = [n for n in sorted(_differing(by_node)[1]) if n not in PER_NODE_VARIABLES]
    if not judged:
        shown = {
            node: ", ".join(f"{n}={v[:200]}" for n, v in sorted(variables.items())) or "none set"
            for node, variables in sorted(by_node.items())
        }
        return Check("environment flags", shown)
    shown = {
        node: ", ".join(f"{n}={variables[n][:200]}" if n in variables else f"{n} not set" for n in judged)
        for node, variables in sorted(by_node.items())
    }
    verdict: Verdict = "failure" if any(n in NUMERIC_VARIABLES for n in judged) else "warning"
    return Check("environment flags", shown, verdict, f"Set {', '.join(judged)} to the same value on every node.")


def compare_gpus(by_node: Mapping[int, Sequence[Mapping[str, Any]]]) -> Check:
    """Compare the number and type of GPUs of the nodes.

    Args:
        by_node: name, memory (bytes) and compute capability of each GPU.
    """
    shown = {node: list_gpus(devices) for node, devices in sorted(by_node.items())}
    name = "same GPUs"
    if len({len(devices) for devices in by_node.values()}) > 1:
        remedy = "Every node needs the same number of GPUs; set CUDA_VISIBLE_DEVICES or GPUS_PER_NODE to the smallest."
        return Check(name, shown, "failure", remedy)
    everywhere = [device for devices in by_node.values() for device in devices]
    if len({str(device.get("capability", "")).partition(".")[0] for device in everywhere}) > 1:
        remedy = "GPUs of different generations compute differently (bf16, kernels); use nodes of one type."
        return Check(name, shown, "failure", remedy)
    if len({device["name"] for device in everywhere}) > 1:
        return Check(name, shown, "warning", "The slowest and smallest GPU sets the pace and the batch for all.")
    return Check(name, shown)


def check_shared_folder(path: str, shared: Mapping[int, bool | None], sharded: bool) -> Check:
    """Check whether all nodes see one output folder.

    Args:
        shared: whether each other node found node 0's file; None where it could not look. Empty for one node.
        sharded: every rank writes its part of each checkpoint (ZeRO, FSDP2).
    """
    if not shared:
        return Check("output folder shared", {0: "one node"})
    words = {True: "shared with node 0", False: "its own disk", None: "not known"}
    values = {0: path, **{node: words[sees_file] for node, sees_file in sorted(shared.items())}}
    verdict: Verdict = "warning"
    if False in shared.values() and sharded:
        verdict = "failure"
        remedy = (
            "Sharded runs write a part of each checkpoint from every node: put --output_dir on a file system that all "
            "nodes share (NFS), or use accelerate_configs/multi_node.yaml (DDP)."
        )
    elif False in shared.values():
        remedy = (
            "Checkpoints and the result are written on node 0 alone. To resume, start with the same node as node 0, or "
            "copy the newest checkpoint to the same path on every node first. Model and data are read from each node's "
            "own disk. With a shared file system (NFS) none of this is needed."
        )
    elif None in shared.values():
        remedy = "Preflight could not check this; check by hand that all nodes see one output folder."
    else:
        verdict, remedy = "ok", ""
    return Check("output folder shared", values, verdict, remedy)


# ---- the reports of all nodes ----


def compare_reports(reports: Reports, ranks: int, *, cpu: bool, settings: Settings, sharded: bool) -> list[Check]:
    """Return the rows of all nodes, merged, and the rows that compare the nodes.

    Args:
        ranks: of the job; there is nothing to compare one with.
        cpu: the run is on the CPU.
        sharded: every rank writes its part of a checkpoint.
    """
    # JSON has made text of the nodes' numbers.
    rows = merge_checks(
        [
            Check(**{**check, "values": {int(node): text for node, text in check["values"].items()}})
            for report in reports.values()
            for check in report["checks"]
        ]
    )
    identities = {number: report["identity"] for number, report in reports.items()}

    def compare(name: str, rows_of: Callable[[dict[int, Any]], Check | list[Check]], row: str = "") -> list[Check]:
        """Compare one part of the identities; a node that could not read it gets a warning."""
        part = {number: mine[name] for number, mine in identities.items() if name in mine}
        unknown = {number: mine["unknown"][name] for number, mine in identities.items() if name in mine["unknown"]}
        bad = [not_checked(cause).row(row or name, number) for number, cause in unknown.items()]
        try:
            good = rows_of(part) if part else []
        except Exception as error:
            cause = f"{type(error).__name__}: {one_line(error)}"
            good = [not_checked(cause).row(row or name, number) for number in reports]
        return merge_checks(bad) + (good if isinstance(good, list) else [good])

    rows += compare("versions", compare_versions)
    rows += compare("code", compare_code, "kit")
    rows += compare("settings", lambda by_node: compare_settings(by_node, PATHS))
    rows += compare("data", lambda by_node: compare_files("data", by_node, "dataset"))
    rows += compare("model", lambda by_node: compare_files("model", by_node, "model"))
    rows += compare("flags", compare_variables, "environment flags")
    if ranks == 1:
        return rows
    if not cpu:
        rows += compare("gpus", compare_gpus, "same GPUs")
    others = {number: report for number, report in reports.items() if number}
    shared = {number: report["shared"] for number, report in others.items()}
    rows.append(check_shared_folder(str(output_folder(settings)), shared, sharded))
    return rows
