"""Train the demo in two checkouts of the kit on a CPU, and compare the adapters bit by bit.

    python -m benchmarks.correctness.same_weights --before ../kit-before --json
    benchmarks/results/correctness/same_weights.json

Both checkouts run with this interpreter, so that the packages are the same. Cases: one and two processes, streamed
rows, packed rows, and a run that is killed between two checkpoints and resumed by the same command.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

STEPS = 30
SHORT = f"--config recipes/demo.yaml --max_steps {STEPS} --save_steps 10 --compare_answers 0 --report_to none"
CASES: dict[str, tuple[int, str]] = {
    "one process": (1, ""),
    "two processes": (2, ""),
    "streamed, one process": (1, "--streaming"),
    "streamed, two processes": (2, "--streaming"),
    "packed, two processes": (2, "--packing on"),
    "dropout, two processes": (2, "--lora_dropout 0.1"),
    "every parameter, one process": (1, "--method full"),
}
KILLED = ("one process", "two processes", "streamed, two processes")


def command(processes: int, options: str, output: Path, name: str) -> list[str]:
    """The command line of one run, to be started in a checkout."""
    argv = ["train_ddp.py", *SHORT.split(), *options.split(), "--output_dir", str(output), "--run_name", name]
    if processes == 1:
        return [sys.executable, *argv]
    launcher = ["-m", "accelerate.commands.launch", "--config_file", "accelerate_configs/cpu.yaml"]
    return [sys.executable, *launcher, "--num_processes", str(processes), "--main_process_port", "0", *argv]


def train(checkout: Path, processes: int, options: str, output: Path, name: str, *, kill: bool) -> Path:
    """Run to the end, killed once after the second checkpoint if asked; returns the run's folder."""
    environ = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    started = command(processes, options, output, name)
    if kill:
        process = subprocess.Popen(
            started, cwd=checkout, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, process_group=0
        )
        while not (output / name / "checkpoint-20" / "manifest.json").exists():
            if process.poll() is not None:
                raise RuntimeError(f"{name}: the run ended before it could be killed")
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    completed = subprocess.run(started, cwd=checkout, env=environ, capture_output=True, text=True, timeout=900)
    if completed.returncode:
        raise RuntimeError(f"{name} failed in {checkout}:\n{completed.stdout[-3000:]}\n{completed.stderr[-3000:]}")
    return output / name


def weights_hash(folder: Path) -> str:
    """SHA-256 over the names, shapes and bytes of every saved weight."""
    digest = hashlib.sha256()
    for path in sorted([*folder.glob("adapter_model*.safetensors"), *folder.glob("model*.safetensors")]):
        for name, tensor in sorted(load_file(path).items()):
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
            digest.update(tensor.contiguous().view(-1).view(dtype=torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def main() -> None:
    """Run every case in both checkouts and print one line a case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, help="checkout of the code to compare with")
    parser.add_argument("--after", type=Path, default=Path.cwd(), help="checkout of the code that changed")
    parser.add_argument("--known", type=Path, help="JSON of an earlier call, whose hashes of --before are taken")
    parser.add_argument("--only", help="run the cases whose name holds this text")
    parser.add_argument("--json", type=Path, help="where to write the hashes")
    args = parser.parse_args()
    earlier_hashes: dict[str, str] = {}
    if args.known:
        earlier_hashes = {row["case"]: row["before"] for row in json.loads(args.known.read_text())["cases"]}
    rows: list[dict[str, Any]] = []
    for case, (processes, options) in CASES.items():
        if args.only and args.only not in case:
            continue
        for kill in (False, True) if case in KILLED else (False,):
            name = f"{case}{', killed and resumed' if kill else ''}"
            hashes = []
            for checkout in (args.before.resolve(), args.after.resolve()):
                if checkout == args.before.resolve() and name in earlier_hashes:
                    hashes.append(earlier_hashes[name])
                    continue
                output = Path(tempfile.mkdtemp(prefix="same_weights_"))
                try:
                    run = name.replace(", ", "-").replace(" ", "_")
                    hashes.append(weights_hash(train(checkout, processes, options, output, run, kill=kill)))
                finally:
                    shutil.rmtree(output, ignore_errors=True)
            rows.append({"case": name, "before": hashes[0], "after": hashes[1], "same": hashes[0] == hashes[1]})
            print(
                f"{'same     ' if rows[-1]['same'] else 'DIFFERENT'}  {name}  {hashes[0][:12]} {hashes[1][:12]}",
                flush=True,
            )
    if args.json:
        args.json.write_text(json.dumps({"command": " ".join(sys.argv), "cases": rows}, indent=1) + "\n")
    sys.exit(0 if all(row["same"] for row in rows) else 1)


if __name__ == "__main__":
    main()
