"""Run notebooks and their scripts for real on CPU processes, and compare steps, losses, weights and files.

    uv run benchmarks/notebooks/real_runs.py NOTEBOOK.ipynb ...

Nothing is stubbed: the notebooks have to make their models and rows themselves, as those of
tests/notebook/real_notebooks.py do. run_corpus.py checks the others with stubs.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import random
import socket
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Seen:
    """Hold what one process did in one program: the values that went backward, logged losses, weights, files."""

    backward: list[float] = field(default_factory=list)
    steps: int = 0
    logged: list[float] = field(default_factory=list)
    weights: float = 0.0  # the norm of all weights after the last step
    error: str = ""
    files: list[str] = field(default_factory=list)


def play(programs: dict[str, list[str]], out: Path, ports: list[int]) -> None:
    """Run programs, given as pieces of code, one after the other as one rank, each in a folder of its own name."""
    import torch

    sys.path.insert(0, str(ROOT))
    rank = int(os.environ.get("RANK", 0))
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"  # the launcher's store is at one port only
    results = {}
    for (name, pieces), port in zip(programs.items(), ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        folder = out / name
        folder.mkdir(parents=True, exist_ok=True)
        os.chdir(folder)
        results[name] = asdict(_observed(pieces, folder))
        if torch.distributed.is_initialized():  # after an error
            torch.distributed.destroy_process_group()
        state = importlib.import_module("accelerate.state")
        for kind in (state.AcceleratorState, state.PartialState, state.GradientState):
            kind._shared_state.clear()
    (out / f"seen_{rank}.json").write_text(json.dumps(results))


def _observed(pieces: list[str], folder: Path) -> Seen:
    import torch
    import transformers
    from torch.optim.optimizer import register_optimizer_step_post_hook

    seen, whole = Seen(), {"__name__": "__main__", "display": print}
    backward, train = torch.Tensor.backward, transformers.Trainer.train

    def noting_backward(tensor: Any, *args: Any, **options: Any) -> None:
        seen.backward.append(float(tensor.detach()))
        backward(tensor, *args, **options)

    def noting_train(trainer: Any, *args: Any, **options: Any) -> Any:
        done = train(trainer, *args, **options)
        seen.logged += [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        return done

    def stepped(optimizer: Any, *_: Any) -> None:
        seen.steps += 1
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        seen.weights = math.sqrt(sum(float(weight.detach().double().pow(2).sum()) for weight in weights))

    for seed in (random.seed, torch.manual_seed):
        seed(0)
    hook = register_optimizer_step_post_hook(stepped)
    torch.Tensor.backward, transformers.Trainer.train = noting_backward, noting_train  # type: ignore[method-assign]
    try:
        for number, piece in enumerate(pieces):
            exec(compile(piece, f"{folder.name}_{number}.py", "exec"), whole)
    except (Exception, SystemExit) as error:
        seen.error = f"{type(error).__name__}: {error}"[:500]
    finally:
        hook.remove()
        torch.Tensor.backward, transformers.Trainer.train = backward, train  # type: ignore[method-assign]
    seen.files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    return seen


def differences(notebook: Seen, alone: Seen, ranks: list[Seen], *, alike: bool) -> list[str]:
    """Return what a script does otherwise than its notebook.

    Alone it has to give the same values, to the digit. Several processes have to take as many steps, save the same
    files and, where each row has a loss of its own and nothing is drawn (`alike`), end with the same weights.
    """
    found = [f"{who} ends with {seen.error}" for who, seen in _named(notebook, alone, ranks) if seen.error]
    if found:
        return found
    if alone != notebook:
        fields = [name for name, value in asdict(notebook).items() if value != getattr(alone, name)]
        found.append(f"alone it differs in {', '.join(fields)}")
    for rank, seen in enumerate(ranks):
        if seen.steps != notebook.steps:
            found.append(f"rank {rank} takes {seen.steps} steps, the notebook {notebook.steps}")
        if alike and not math.isclose(seen.weights, notebook.weights, rel_tol=1e-5):
            found.append(f"rank {rank} ends with weights of norm {seen.weights}, the notebook {notebook.weights}")
    # Each rank of several keeps the state of its random generators in a checkpoint.
    if missing := {name for name in notebook.files if "rng_state" not in name} - set(ranks[0].files):
        found.append(f"missing files: {sorted(missing)[:3]}")
    if len({round(seen.weights, 6) for seen in ranks}) > 1:
        found.append(f"the ranks end with different weights: {[seen.weights for seen in ranks]}")
    return found


def _named(notebook: Seen, alone: Seen, ranks: list[Seen]) -> list[tuple[str, Seen]]:
    return [("the notebook", notebook), ("the script alone", alone), *((f"rank {i}", s) for i, s in enumerate(ranks))]


def read_seen(out: Path, processes: int) -> list[dict[str, Seen]]:
    """Return what each rank of a run has seen, by program."""
    texts = [json.loads((out / f"seen_{rank}.json").read_text()) for rank in range(processes)]
    return [{name: Seen(**values) for name, values in seen.items()} for seen in texts]


def free_ports(count: int) -> list[int]:
    """Return ports that nobody listens on now."""
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def main() -> int:
    """Run the notebooks that are named, and say what their scripts do otherwise."""
    from harness import read_cells

    sys.path.insert(0, str(ROOT))
    from unsloth_ddp.notebook.convert import convert

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebooks", nargs="+", type=Path)
    parser.add_argument("--steps-only", action="store_true", help="rows are drawn, or a loss takes them together")
    parser.add_argument("--play", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.play:
        play(**{**json.loads(options.notebooks[0].read_text()), "out": options.play})
        return 0
    names = [path.stem for path in options.notebooks]
    cells = {path.stem: [cell.source for cell in read_cells(path)] for path in options.notebooks}
    scripts = {path.stem: [convert(path).script] for path in options.notebooks}
    with tempfile.TemporaryDirectory() as folder:
        runs = []
        for label, programs, processes in (("notebook", cells, 1), ("alone", scripts, 1), ("ranks", scripts, 2)):
            out = Path(folder) / label
            out.mkdir()
            job = out / "job.json"
            job.write_text(json.dumps({"programs": programs, "ports": free_ports(len(names))}))
            start = [sys.executable] if processes == 1 else [*_TORCHRUN, str(processes)]
            subprocess.run([*start, __file__, str(job), "--play", str(out)], env=os.environ | CPU, check=True)
            runs.append(read_seen(out, processes))
    worst = 0
    for name in names:
        found = differences(
            runs[0][0][name], runs[1][0][name], [r[name] for r in runs[2]], alike=not options.steps_only
        )
        worst = max(worst, len(found))
        print(f"{name}: {'; '.join(found) or 'the same'}")
    return int(worst > 0)


_TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node"]
CPU = {"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "1", "UNSLOTH_ALLOW_CPU": "1", "OMP_NUM_THREADS": "1"}
CPU |= {
    "HF_HUB_OFFLINE": "1",
    "WANDB_MODE": "offline",
    "PYTHONHASHSEED": "0",
    "TQDM_DISABLE": "1",
    "TRITON_INTERPRET": "1",
}

if __name__ == "__main__":
    sys.exit(main())
