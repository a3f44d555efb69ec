"""Time replayed micro-batches of a few layers by variant: backend, adapter copies, fused norm, attention, FP8, QLoRA.

    python -m benchmarks.speed.cuda_graphs_layers --work /tmp/layers --json FILE --gpus 0 1
    python -m benchmarks.speed.cuda_graphs_layers --work /tmp/layers --json FILE --variants 8b_long 8b_long_varlen
    python -m benchmarks.speed.cuda_graphs_layers --work /tmp/layers --tiny --variants 8b_chat 8b_chat_no_copies

Replays the forward and backward pass of one micro-batch of LoRA, on random-weight models of Qwen3-8B's shape cut to 4
layers and of Qwen3-1.7B's cut to 6. Each variant is a process. Up to --at_once of them a GPU are prepared side by side.
Once all are ready, they are measured one after the other on each GPU, the kernels (torch.profiler) included, so that
nothing compiles meanwhile. A variant fails if it uses no CUDA graph, or if its pass is not what its name says.

Names end with what is left out or chosen: `no_copies` (adapters in bf16, unsloth_ddp/training/step/adapter_copies.py),
`no_norm` (Unsloth's fused norm of queries and keys), `neither`, `varlen` (rows of one pack each through varlen_attn, not
as sequences of a batch), `one` (one pack per micro-batch). --tiny tries the script on a CPU, which computes what a
CUDA graph would, with the demo's model and Transformers.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

from benchmarks.common.prepared_run import Prepared, compiled_graphs, prepared_run
from benchmarks.common.rows import chat_rows, full_rows
from benchmarks.common.runs import REPO, make_model, write_results
from unsloth_ddp.utils.versions import versions

OPTIONS = "--packing on --gradient_checkpointing none --precision bf16 --max_steps 200 --global_batch_size 64"
OPTIONS += " --save_strategy no --report_to none --seed 5 --resume no"
# Of Unsloth's kernels; a variable that is set keeps the kit from switching it on.
NORM_SWITCH, NORM_KERNEL = "UNSLOTH_FUSED_QKNORM_ROPE", "qk_norm_rope"
ATTENTION_KERNELS = ("flash", "sdpa", "cudnn::fusion")
WARM, ROUNDS, PASSES, PROFILED = 5, 6, 10, 4
KERNELS = 25
# Tokens of the longest row of each work, and rows.
WORKS = {"chat": (2048, 400), "full": (2048, 24), "long": (8192, 8)}
TINY_TOKENS = 256
# name: (shape, layers)
MODELS = {"8b": ("qwen3_8b", 4), "1.7b": ("qwen3_1.7b", 6)}


@dataclass(frozen=True)
class Variant:
    """Describe a run whose micro-batch is measured.

    Args:
        model: of MODELS.
        work: of WORKS: chats of several rows to a pack, or rows of one pack each.
        packs: of a micro-batch.
        copies: adapters are multiplied by their copies in bf16.
        fused_norm: Unsloth's fused norm may be used; Transformers has none.
        sequences: packs of one row each are sequences of a batch; else they go through varlen_attn.
    """

    model: str
    work: str = "chat"
    packs: int = 4
    backend: str = "unsloth"
    method: str = "lora"
    fp8: bool = False
    copies: bool = True
    fused_norm: bool = True
    sequences: bool = True


def _variants() -> dict[str, Variant]:
    found: dict[str, Variant] = {}
    for model in MODELS:
        chat = Variant(model)
        fp8 = replace(chat, backend="transformers", fp8=True)
        found |= {
            f"{model}_chat": chat,
            f"{model}_chat_no_copies": replace(chat, copies=False),
            f"{model}_chat_neither": replace(chat, copies=False, fused_norm=False),
            f"{model}_transformers": replace(chat, backend="transformers"),
            f"{model}_fp8": fp8,
            f"{model}_fp8_no_copies": replace(fp8, copies=False),
        }
    large, small = Variant("8b"), Variant("1.7b", packs=1)
    full, long = replace(large, work="full"), replace(large, work="long", packs=1)
    return found | {
        "1.7b_one": small,
        "1.7b_one_neither": replace(small, copies=False, fused_norm=False),
        "8b_chat_no_norm": replace(large, fused_norm=False),
        "8b_qlora": replace(large, method="qlora"),
        "8b_full": full,
        "8b_full_varlen": replace(full, sequences=False),
        "8b_long": long,
        "8b_long_varlen": replace(long, sequences=False),
    }


VARIANTS = _variants()


def tiny(variant: Variant) -> Variant | None:
    """Return the variant as a CPU can run it; None if it cannot."""
    return None if variant.fp8 or variant.method == "qlora" else replace(variant, backend="transformers")


def options(variant: Variant, model: Path, rows: Path, output: Path, *, cpu: bool) -> list[str]:
    """Return the options of the run, as train_ddp.py takes them."""
    longest = TINY_TOKENS if cpu else WORKS[variant.work][0]
    words = ["--model", model, "--dataset", rows, "--output_dir", output, "--run_name", "measured"]
    words += ["--max_length", longest, "--per_device_train_batch_size", variant.packs]
    words += ["--backend", variant.backend, "--method", variant.method, *OPTIONS.split()]
    words += [] if cpu else ["--cuda_graphs", "on"]
    return [str(word) for word in [*words, *(["--fp8"] if variant.fp8 else [])]]


@contextmanager
def left_out(variant: Variant) -> Iterator[None]:
    """Prepare runs inside the block without what the variant leaves out."""
    from unsloth_ddp.sizing import graphs
    from unsloth_ddp.training.step import adapter_copies

    copied = adapter_copies.ADAPTER_LAYER if variant.copies else re.compile("(?!)")
    single_rows = graphs.are_single_rows if variant.sequences else lambda train: False
    with (
        mock.patch.dict(os.environ),
        mock.patch.object(adapter_copies, "ADAPTER_LAYER", copied),
        mock.patch.object(graphs, "are_single_rows", single_rows),
    ):
        os.environ.pop(NORM_SWITCH, None)
        if not variant.fused_norm:
            os.environ[NORM_SWITCH] = "0"
        yield


def mismatch(variant: Variant, found: dict[str, Any], *, cpu: bool) -> str | None:
    """Return why a pass is not the one that the variant names; None if it is."""
    if "ms" not in found:
        return f"the run uses no CUDA graphs: {found['choice']}"
    if bool(found["copies"]) != variant.copies:
        return f"{found['copies']} matrices of adapters have copies"
    if bool(found["sequences"]) != (variant.sequences and variant.work != "chat"):
        return f"{found['sequences']} packs are sequences of a batch"
    wanted = variant.fused_norm and variant.backend == "unsloth"
    if not cpu and found["fused_norm"] != wanted:
        return f"the fused norm was {'used' if found['fused_norm'] else 'not used'}"
    return None


def time_passes(prepared: Prepared, ready: Path) -> dict[str, Any]:
    """Record the first micro-batch, create `ready`, wait for a line on the standard input, and measure.

    Returns:
        times in milliseconds, of forward and backward pass together; `kernels` are (name, launches, ms) per micro-batch.
    """
    import torch

    captured, size = prepared.captured, prepared.trainer.args.per_device_train_batch_size
    found: dict[str, Any] = {"choice": prepared.trainer.step.graphs.choice.reason}
    if captured is None:
        return found
    cuda = prepared.runner.device.type == "cuda"
    batch, one = prepared.batch(0, size), torch.ones((), device=prepared.runner.device)

    def replay(times: int) -> None:
        for _ in range(times):
            captured.run(batch, one)
        if cuda:
            torch.cuda.synchronize()

    loss = captured.run(batch, one)[0].item()
    found |= {"packs": size, "tokens": captured.shape.tokens, "sequences": captured.shape.sequences}
    found |= {"head": batch["padded_batch"].head, "copies": len(captured.adapters.layers), "loss": loss}
    ready.touch()
    sys.stdin.readline()
    warm, rounds, passes, profiled = (WARM, ROUNDS, PASSES, PROFILED) if cuda else (1, 2, 1, 1)
    replay(warm)
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        replay(passes)
        times.append((time.perf_counter() - began) / passes * 1000)
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CUDA if cuda else activity.CPU]) as profiler:
        replay(profiled)
    spent = "self_device_time_total" if cuda else "self_cpu_time_total"
    events = [(e.key, e.count / profiled, getattr(e, spent) / profiled / 1000) for e in profiler.key_averages()]
    found |= {"ms": median(times), "ms_of_rounds": sorted(times), "peak_gib": captured.peak_bytes / 2**30}
    return found | kernel_summary(events) | {"compiled_graphs": compiled_graphs()}


def kernel_summary(events: list[tuple[str, float, float]]) -> dict[str, Any]:
    """Return the longest kernels, and sums over all.

    Args:
        events: (name, launches, milliseconds) of each kernel, per micro-batch.
    """
    ordered = sorted(events, key=lambda event: -event[2])
    return {
        "launches": sum(count for _, count, _ in ordered),
        "kernel_ms": sum(ms for *_, ms in ordered),
        "attention_ms": sum(ms for name, _, ms in ordered if any(part in name for part in ATTENTION_KERNELS)),
        "fused_norm": any(NORM_KERNEL in name for name, *_ in ordered),
        "kernels": [[name[:150], count, round(ms, 3)] for name, count, ms in ordered[:KERNELS]],
    }


def measure(variant: Variant, argv: list[str], ready: Path) -> dict[str, Any]:
    """Prepare the run of a variant and time its micro-batch."""
    began = time.monotonic()
    with left_out(variant), prepared_run(argv) as prepared:
        seconds = time.monotonic() - began
        return {"prepared_s": round(seconds, 1)} | time_passes(prepared, ready)


@dataclass
class Child:
    """Hold the process of a variant, and where it writes."""

    name: str
    variant: Variant
    folder: Path
    process: subprocess.Popen[bytes]

    @property
    def ready(self) -> Path:
        """The file that the process creates once it is prepared."""
        return self.folder / "ready"

    def kill(self) -> None:
        """End the process and wait for it."""
        self.process.kill()
        self.process.wait()

    def error(self, reason: str) -> dict[str, Any]:
        """Return the result of a process that failed."""
        output = (self.folder / "output.txt").read_text(errors="replace")[-1500:]
        return {"asked": asdict(self.variant), "error": reason, "output": output}

    def result(self, limit: float, *, cpu: bool) -> dict[str, Any]:
        """Let the process measure, and return what it found."""
        if self.process.poll() is None:
            try:
                self.process.communicate(b"\n", limit)
            except subprocess.TimeoutExpired:
                self.kill()
                return self.error(f"over {limit:.0f} s")
        if self.process.returncode:
            return self.error(f"exit code {self.process.returncode}")
        found = json.loads((self.folder / "found.json").read_text())
        reason = mismatch(self.variant, found, cpu=cpu)
        return {"asked": asdict(self.variant), **found, **({} if reason is None else {"error": reason})}


def start(name: str, variant: Variant, work: Path, gpu: str | None) -> Child:
    """Start the process that prepares a variant; a GPU of None is a CPU."""
    folder = work / name
    folder.mkdir(parents=True, exist_ok=True)
    for left in ("ready", "found.json"):
        (folder / left).unlink(missing_ok=True)
    model = REPO / "demo/model" if gpu is None else work / variant.model
    words = options(variant, model, work / f"{variant.work}.jsonl", folder / "outputs", cpu=gpu is None)
    caches = {"UNSLOTH_COMPILE_LOCATION": "unsloth_compiled", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
    environ = os.environ | {variable: str(folder / place) for variable, place in caches.items()}
    # Many processes prepare at once.
    environ |= {"CUDA_VISIBLE_DEVICES": gpu or "", "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "4"}
    command = [sys.executable, "-m", "benchmarks.speed.cuda_graphs_layers", "--work", str(folder)]
    command += ["--child", json.dumps(asdict(variant)), "--", *words]
    with (folder / "output.txt").open("wb") as output:
        process = subprocess.Popen(
            command, cwd=REPO, env=environ, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT
        )
    return Child(name, variant, folder, process)


def measure_all(variants: dict[str, Variant], work: Path, gpus: list[str], limit: float) -> dict[str, dict[str, Any]]:
    """Prepare variants side by side, then measure them one after the other on each GPU; return their results by name.

    Args:
        gpus: empty on a CPU.
        limit: seconds for the preparation of all, and again for the measurement of each.
    """
    lanes: list[str | None] = [*gpus] or [None]
    children: list[list[Child]] = [[] for _ in lanes]
    results: dict[str, dict[str, Any]] = {}
    try:
        for index, (name, variant) in enumerate(variants.items()):
            lane = index % len(lanes)
            children[lane].append(start(name, variant, work, lanes[lane]))
        deadline = time.monotonic() + limit
        waiting = [child for lane in children for child in lane]
        while waiting and time.monotonic() < deadline:
            time.sleep(0.2)
            waiting = [child for child in waiting if not child.ready.exists() and child.process.poll() is None]
        for child in waiting:
            child.kill()
            results[child.name] = child.error(f"not ready after {limit:.0f} s")

        def in_turn(lane: list[Child]) -> dict[str, dict[str, Any]]:
            return {child.name: child.result(limit, cpu=not gpus) for child in lane if child not in waiting}

        with ThreadPoolExecutor(len(lanes)) as pool:
            for found in pool.map(in_turn, children):
                results |= found
    finally:
        for child in (child for lane in children for child in lane):
            child.kill()
    return {name: results[name] for name in variants}


def prepare_inputs(variants: dict[str, Variant], work: Path, gpus: list[str]) -> None:
    """Write the rows, and the models that are not there yet; a CPU takes the demo's model."""
    for name, (tokens, count) in WORKS.items():
        longest = tokens if gpus else TINY_TOKENS
        rows = work / f"{name}.jsonl"
        if name == "chat":
            chat_rows(rows, count, seed=3, longest=longest)
        else:
            full_rows(rows, count, seed=3, tokens=longest)
    names = {variant.model for variant in variants.values()} if gpus else set()
    missing = [name for name in sorted(names) if not (work / name / "tokenizer_config.json").is_file()]
    makers = []
    for index, name in enumerate(missing):
        shape, layers = MODELS[name]
        gpu = {"CUDA_VISIBLE_DEVICES": gpus[index % len(gpus)]}
        makers.append(make_model(shape, work / name, gpu, layers=layers))
    if {maker.wait() for maker in makers} - {0}:
        sys.exit("a model could not be written")


def main() -> None:
    """Measure the variants, print a line for each, write the results, and fail if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for models, rows and caches")
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument(
        "--variants", nargs="+", choices=VARIANTS, default=[*VARIANTS], metavar="NAME", help=", ".join(VARIANTS)
    )
    parser.add_argument("--gpus", nargs="+", default=["0"], help="ids of the GPUs to spread the variants over")
    parser.add_argument("--at_once", type=int, default=8, help="variants that a GPU's memory holds side by side")
    parser.add_argument("--tiny", action="store_true", help="try the script on a CPU, with the demo's model")
    parser.add_argument("--seconds", type=float, default=180, help="limit to prepare, and to measure each")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("options", nargs="*", help=argparse.SUPPRESS)
    given = parser.parse_args()
    work = given.work.absolute()
    work.mkdir(parents=True, exist_ok=True)
    if given.child is not None:
        found = measure(Variant(**json.loads(given.child)), given.options, work / "ready")
        (work / "found.json").write_text(json.dumps(found))
        return
    gpus = [] if given.tiny else given.gpus
    asked = {name: tiny(VARIANTS[name]) if given.tiny else VARIANTS[name] for name in given.variants}
    variants = {name: variant for name, variant in asked.items() if variant is not None}
    if len(variants) < len(asked):
        print(f"not on a CPU: {', '.join(asked.keys() - variants.keys())}", flush=True)
    prepare_inputs(variants, work, gpus)
    names, size = list(variants), given.at_once * max(1, len(gpus))
    results: dict[str, dict[str, Any]] = {}
    for first in range(0, len(names), size):
        group = {name: variants[name] for name in names[first : first + size]}
        results |= measure_all(group, work, gpus, given.seconds)
    failed = [name for name, result in results.items() if "error" in result]
    for name, result in results.items():
        said = result["error"] if name in failed else f"{result['ms']:.2f} ms, {result['launches']:.0f} kernels"
        print(f"{name}: {said}", flush=True)
    if given.json is not None:
        shim = os.environ.get("VARLEN_SHIM")
        write_results(given.json, versions=versions(), VARLEN_SHIM=shim, models=MODELS, variants=results, failed=failed)
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
