"""Does this job take the same step on one process and on many? Run it before a long job.

Take the options you train with; a few steps are made with each launcher and shape, and compared:
    uv run python -m unsloth_ddp.parity --config recipes/qwen3_8b_lora.yaml --dataset my_chats.jsonl
The demo:
    uv run python -m unsloth_ddp.parity

Every launch trains the first few rows of the data with plain gradient descent, since Adam divides each gradient by
its own size and so makes rounding errors as large as steps; without dropout, clipping or a schedule; and in fp32,
unless --precision is given. What is compared is the change of the weights and the losses. Exit code 0: they agree;
1: they differ, or a launch failed; 2: a mistake in the options.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal

from unsloth_ddp.errors import UserError
from unsloth_ddp.options import OutputSettings
from unsloth_ddp.rows import check_source, read_rows
from unsloth_ddp.runtime import EXIT_USER_ERROR, choose_backend, use_cache_if_hub_is_unreachable
from unsloth_ddp.settings import Parser, Settings, parse_settings
from unsloth_ddp.sharding import sharding_from_environment

REPO = Path(__file__).resolve().parent.parent
# Small, so that a later step does not amplify the rounding of an earlier one: with 0.1 layouts of the demo are 1.4e-6
# apart on a CPU, with 0.01 2.2e-7.
LEARNING_RATE = 0.01
MICRO_BATCHES_A_PROCESS = 4
# Above this share of the update, the rounding of the saved weights hides what is looked for.
COARSEST_FLOOR = 0.1
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

LauncherName = Literal["python", "accelerate"]


# ---- what is launched: pure ----


@dataclass(frozen=True)
class Launch:
    """One way to lay the same global batch out."""

    launcher: LauncherName
    processes: int
    per_device: int
    accumulation: int

    @property
    def name(self) -> str:
        """A folder name."""
        return f"{self.launcher}_{self.processes}x{self.per_device}x{self.accumulation}"

    @property
    def shape(self) -> str:
        """Rows a device x accumulation."""
        return f"{self.per_device} x {self.accumulation}"


def plan_launches(processes: int, micro_batches: Sequence[int]) -> list[Launch]:
    """The launches of a check, the reference first: one process, no launcher, the smallest micro-batch.

    Every micro-batch size is run by plain python and on all processes; accelerate's own single process once.
    """
    sizes = sorted(set(micro_batches))
    common = math.lcm(*sizes)
    rows_a_process = common * math.ceil(MICRO_BATCHES_A_PROCESS / common)
    global_batch = processes * rows_a_process

    def launch(launcher: LauncherName, count: int, size: int) -> Launch:
        return Launch(launcher, count, size, global_batch // (count * size))

    return [
        *(launch("python", 1, size) for size in sizes),
        launch("accelerate", 1, sizes[0]),
        *(launch("accelerate", processes, size) for size in sizes if processes > 1),
    ]


def waves(launches: Sequence[Launch], gpus: Sequence[str]) -> Iterator[list[tuple[Launch, list[str]]]]:
    """Launches that may run side by side, each with GPUs of its own; on a CPU one after another.

    Args:
        gpus: the visible GPUs, as CUDA_VISIBLE_DEVICES names them; none on a CPU.
    """
    wave: list[tuple[Launch, list[str]]] = []
    free = list(gpus)
    for launch in launches:
        if wave and (not gpus or len(free) < launch.processes):
            yield wave
            wave, free = [], list(gpus)
        wave.append((launch, [free.pop(0) for _ in range(launch.processes)] if gpus else []))
    if wave:
        yield wave


def command(launch: Launch, script: Path, config: Path, cpu: bool) -> list[str]:
    """The command line of one launch."""
    if launch.launcher == "python":
        return [sys.executable, str(script), "--config", str(config)]
    name = "cpu" if cpu else "ddp"
    launcher = [sys.executable, "-m", "accelerate.commands.launch"]
    launcher += ["--config_file", str(REPO / "accelerate_configs" / f"{name}.yaml")]
    return [*launcher, "--num_processes", str(launch.processes), str(script), "--config", str(config)]


def choose_precision(settings: Settings, backend: str) -> str:
    """fp32, which shows the arithmetic, unless the user named another; Unsloth trains every parameter in 16 bit only."""
    if settings.precision != "auto":
        return settings.precision
    return "bf16" if backend == "unsloth" and settings.method == "full" else "fp32"


def settings_of(launch: Launch, settings: Settings, steps: int, precision: str, rows: Path, output: Path) -> Settings:
    """The user's settings, but a few plain steps over `rows`, with nothing random left and nothing written but weights."""
    untouched = {f.name: getattr(OutputSettings(), f.name) for f in dataclasses.fields(OutputSettings)}
    few_steps = {
        "max_steps": steps,
        "optim": "sgd",
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "warmup_steps": 0.0,
        "weight_decay": 0.0,
        "max_grad_norm": 0.0,
        "lora_dropout": 0.0,
        "precision": precision,
        # 16-bit weights would round most of a step away.
        "full_weights": "fp32",
        "trainer_args": {},
    }
    layout = {
        "per_device_train_batch_size": launch.per_device,
        "gradient_accumulation_steps": launch.accumulation,
        "global_batch_size": None,
    }
    data = {"dataset": [str(rows)], "dataset_config": None, "eval_dataset": [], "eval_fraction": 0.0}
    written = {
        "output_dir": str(output),
        "run_name": launch.name,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
    }
    return dataclasses.replace(settings, **{**untouched, **few_steps, **layout, **data, **written})


def what_is_left_out(settings: Settings) -> list[str]:
    """Sentences on the settings of a run that the check does without."""
    said = []
    if settings.lora_dropout:
        said.append(f"lora_dropout {settings.lora_dropout} is left out: it is drawn anew in every layout.")
    if settings.trainer_args:
        said.append(f"trainer_args are left out ({', '.join(settings.trainer_args)}).")
    if settings.method == "full" and settings.full_weights == "bf16":
        said.append("full_weights bf16 is left out: 16-bit weights would round most of a step away.")
    return said


# ---- what is compared: pure ----


@dataclass(frozen=True)
class Tolerance:
    """How far the update and the losses of two layouts may be apart, relatively, and why."""

    value: float
    reason: str


FP32 = "fp32 differs by rounding alone; measured: at most 3.5e-7 on a CPU, 2.6e-7 on H200s"
AUTOCAST = "16-bit products depend on the shape of the batch; measured with Unsloth and bf16 on H200s: 2e-2 to 4e-2"
TOLERANCES: dict[tuple[str, str], Tolerance] = {
    ("transformers", "fp32"): Tolerance(1e-6, FP32),
    ("unsloth", "fp32"): Tolerance(1e-6, FP32),
    ("unsloth", "bf16"): Tolerance(6e-2, AUTOCAST),
    ("transformers", "bf16"): Tolerance(6e-2, AUTOCAST + "; with Transformers on a CPU 3e-3"),
    ("unsloth", "fp16"): Tolerance(6e-2, AUTOCAST + "; fp16 is held to the same, not measured"),
    ("transformers", "fp16"): Tolerance(6e-2, AUTOCAST + "; fp16 is held to the same, not measured"),
}


def widened(tolerance: Tolerance, floor: float) -> Tolerance:
    """The tolerance where weights are stored whose own rounding hides `floor` of the update."""
    if not floor:
        return tolerance
    return Tolerance(
        tolerance.value + floor, f"{tolerance.reason}; {floor:.1e} more for the rounding of stored weights"
    )


@dataclass
class Outcome:
    """What a launch came to. `error` holds its last lines where it failed."""

    launch: Launch
    seconds: float
    folder: Path
    losses: list[float] = dataclasses.field(default_factory=list)
    error: str = ""


@dataclass
class Row:
    """One line of the table; the differences are relative to the first launch, None for a failed one."""

    launch: Launch
    seconds: float
    update: float | None
    loss: float | None
    verdict: Literal["reference", "agrees", "differs", "failed"]


def loss_difference(losses: Sequence[float], reference: Sequence[float]) -> float:
    """The largest relative difference of a step's loss; infinite where a step is missing or not finite."""
    if len(losses) != len(reference) or not losses:
        return math.inf
    differences = [abs(a - b) / abs(b) if b else abs(a) for a, b in zip(losses, reference, strict=True)]
    return max(differences) if all(math.isfinite(d) for d in differences) else math.inf


def judge(update: float, loss: float, tolerance: Tolerance) -> Literal["agrees", "differs"]:
    """A NaN does not agree."""
    return "agrees" if update <= tolerance.value and loss <= tolerance.value else "differs"


def verdict(rows: Sequence[Row], tolerance: Tolerance) -> tuple[bool, str]:
    """Whether all launches agree, and the sentence to end with."""
    failed = [row for row in rows if row.verdict == "failed"]
    different = [row for row in rows if row.verdict == "differs"]
    if failed:
        return False, f"FAILED: {len(failed)} of {len(rows)} launches did not run to their end."
    if different:
        worst = max(different, key=lambda row: max(row.update or 0, row.loss or 0)).launch
        return False, (
            f"DIFFER: {len(different)} of {len(rows)} launches are further than {tolerance.value:.1e} from the first, "
            f"the worst {worst.launcher} with {worst.processes} process(es), {worst.shape}."
        )
    return True, f"AGREE: all {len(rows)} launches take the same steps, within {tolerance.value:.1e}."


# ---- weights ----


def update_difference(reference: Path, other: Path, initial: Path | None, steps: int) -> tuple[float, float]:
    """(|update - reference update| / |reference update|, rounding floor of that figure), over all tensors at once.

    Args:
        reference, other: folders of finished runs.
        initial: folder of the model before training; None for adapters, whose B starts at zero and so is its own
            update.

    The floor is 0 for adapters. A trained weight w is stored after each step to a precision u, so two runs differ by
    up to u |w| a step though their steps were the same; over `steps` steps of two runs that adds up to
    sqrt(2 steps) u |w| / |update|. Tensors are read one at a time.
    """
    import torch

    distance = length = weights = 0.0
    coarsest = 0.0
    with _tensors(reference) as theirs, _tensors(other) as mine, _tensors(initial or reference) as first:
        if theirs.keys() != mine.keys():
            return math.inf, 0.0
        names = [n for n in theirs if "lora_B" in n] if initial is None else [n for n in theirs if n in first]
        if not names:
            raise UserError(f"{reference} holds no weights that could be compared; is it a run of another kind?")
        for name in names:
            a, b = theirs[name].get_tensor(name), mine[name].get_tensor(name)
            coarsest = max(coarsest, torch.finfo(a.dtype).eps / 2)
            a, b = a.double(), b.double()
            start = torch.zeros_like(a) if initial is None else first[name].get_tensor(name).double()
            distance += (a - b).square().sum().item()
            length += (a - start).square().sum().item()
            weights += a.square().sum().item()
    if not length:
        raise UserError("The weights did not change, so there is nothing to compare; are all rows without an answer?")
    floor = 0.0 if initial is None else math.sqrt(2 * steps * weights / length) * coarsest
    return math.sqrt(distance / length), floor


@contextlib.contextmanager
def _tensors(folder: Path) -> Iterator[dict[str, Any]]:
    """Name of every tensor in a folder's safetensors files -> the open file that holds it."""
    from safetensors import safe_open

    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(safe_open(path, "pt")) for path in sorted(folder.glob("*.safetensors"))]
        yield {name: file for file in files for name in file.keys()}  # noqa: SIM118


def model_folder(settings: Settings) -> Path:
    """The folder of the model before training, in the Hub's cache where it is not local."""
    path = Path(str(settings.model)).expanduser()
    if path.is_dir():
        return path
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(str(settings.model), revision=settings.model_revision, local_files_only=True))


# ---- processes ----


def write_rows(settings: Settings, count: int, path: Path) -> int:
    """Copy the first `count` rows of the data; returns how many there are."""
    for source in settings.dataset:
        check_source(source)
    rows = chain.from_iterable(
        read_rows(source, settings.dataset_split, settings.dataset_config) for source in settings.dataset
    )
    lines = [json.dumps(row.columns, default=str) for row in islice(rows, count)]
    if not lines:
        raise UserError(f"dataset {', '.join(settings.dataset)} holds no rows.")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return len(lines)


def run_launch(launch: Launch, script: Path, config: Path, output: Path, gpus: list[str], timeout: float) -> Outcome:
    """Run one launch to its end, or end it after `timeout` seconds."""
    folder, log = output / launch.name, output / f"{launch.name}.log"
    environ = {name: value for name, value in os.environ.items() if not name.startswith("ACCELERATE_")}
    if gpus:
        environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    began = time.perf_counter()
    words = command(launch, script, config, cpu=not gpus)
    with log.open("w") as file:
        process = subprocess.Popen(words, env=environ, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        late = False
        try:
            code = process.wait(timeout=timeout)
        except subprocess.TimeoutExpired:
            code, late = 1, True
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    seconds = time.perf_counter() - began
    ended = f"ended after {timeout:.0f} s" if late else f"exit code {code}"
    return outcome_of(launch, seconds, folder, "" if code == 0 else ended, log.read_text(errors="replace"))


def outcome_of(launch: Launch, seconds: float, folder: Path, failure: str, log: str) -> Outcome:
    """What a launch that has ended came to; `failure` says in a few words how it failed, if it did."""
    if not failure and not (folder / "trainer_state.json").is_file():
        failure = "nothing was saved"
    if failure:
        return Outcome(launch, seconds, folder, error=f"({failure})\n{last_lines(log)}")
    return Outcome(launch, seconds, folder, logged_losses(folder))


def last_lines(text: str, count: int = 20) -> str:
    """The end of a log, progress bars left out."""
    lines = [line.rpartition("\r")[2].rstrip() for line in text.splitlines()]
    return "\n".join([line for line in lines if line][-count:])


def logged_losses(folder: Path) -> list[float]:
    """The loss of every step of a finished run."""
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return [entry["loss"] for entry in history if "loss" in entry]


def compare(reference: Outcome, outcome: Outcome, initial: Path | None, tolerance: Tolerance) -> tuple[Row, Tolerance]:
    """The table's row of one launch and the tolerance it was held to; `initial` as in update_difference."""
    launch, seconds = outcome.launch, outcome.seconds
    if outcome.error:
        return Row(launch, seconds, None, None, "failed"), tolerance
    if outcome is reference:
        return Row(launch, seconds, 0.0, 0.0, "reference"), tolerance
    update, floor = update_difference(reference.folder, outcome.folder, initial, len(reference.losses))
    if floor > COARSEST_FLOOR:
        raise UserError(
            f"The saved weights are rounded so coarsely ({floor:.0%} of the update) that the updates cannot be compared; "
            "use --backend transformers, or --method lora."
        )
    held_to = widened(tolerance, floor)
    loss = loss_difference(outcome.losses, reference.losses)
    return Row(launch, seconds, update, loss, judge(update, loss, held_to)), held_to


@dataclass(frozen=True)
class Check:
    """What is to be checked: the user's settings and where and how to launch them."""

    settings: Settings
    launches: list[Launch]
    gpus: list[str]
    script: Path
    steps: int
    precision: str
    tolerance: Tolerance
    timeout: float


def run_check(check: Check, folder: Path) -> tuple[list[Row], Tolerance, list[str]]:
    """Launch everything and compare; returns the table's rows, the tolerance used and what failed launches said last.

    Where the reference fails the others are not tried. Weights are removed once they have been compared.
    """
    global_batch = check.launches[0].per_device * check.launches[0].accumulation
    # The last step is not full, as at the end of an epoch, and its rows do not divide evenly.
    wanted = (check.steps - 1) * global_batch + global_batch // 2 + 1
    rows_file = folder / "rows.jsonl"
    found = write_rows(check.settings, wanted, rows_file)
    print(
        f"{found} rows, {check.steps} steps of {global_batch} rows, the last one not full; {len(check.launches)} launches."
    )

    def run(launch: Launch, gpus: list[str]) -> Outcome:
        config = folder / f"{launch.name}.yaml"
        settings_of(launch, check.settings, check.steps, check.precision, rows_file, folder).save(config)
        return run_launch(launch, check.script, config, folder, gpus, check.timeout)

    rows: list[Row] = []
    errors: list[str] = []
    tolerance, reference, initial = check.tolerance, None, None
    with ThreadPoolExecutor(max_workers=max(1, len(check.gpus))) as pool:
        for wave in waves(check.launches, check.gpus):
            for outcome in pool.map(run, *zip(*wave, strict=True)):
                launch = outcome.launch
                told = f"{launch.launcher}, {launch.processes} process(es), {launch.shape}"
                print(f"  {told}: {'FAILED' if outcome.error else 'done'}, {outcome.seconds:.0f} s", flush=True)
                if outcome.error:
                    errors.append(f"{told} {outcome.error}")
                if reference is None:
                    reference = outcome
                    initial = model_folder(check.settings) if check.settings.method == "full" else None
                if reference.error and outcome is not reference:
                    continue
                row, held_to = compare(reference, outcome, initial, check.tolerance)
                rows.append(row)
                tolerance = max(tolerance, held_to, key=lambda t: t.value)
                if outcome is not reference:
                    shutil.rmtree(outcome.folder, ignore_errors=True)
            if reference is not None and reference.error:
                break
    return rows, tolerance, errors


# ---- the command ----


def make_parser() -> argparse.ArgumentParser:
    """The options of the check itself; all others are those of train_ddp.py."""
    parser = Parser(
        prog="python -m unsloth_ddp.parity",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        epilog="All other options are those of train_ddp.py.",
    )
    parser.add_argument("--processes", type=int, help="processes to compare with one [every visible GPU; 2 on a CPU]")
    parser.add_argument("--steps", type=int, default=3, help="optimizer steps of each launch [3]")
    parser.add_argument(
        "--micro_batches", type=int, nargs="+", metavar="ROWS",
        help="rows a device to try [1 and the run's own, or 1 and 2]",
    )  # fmt: skip
    parser.add_argument("--tolerance", type=float, help="relative difference allowed [by backend and precision]")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the table there")
    parser.add_argument("--script", type=Path, default=REPO / "train_ddp.py", help="the script to check [train_ddp.py]")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds a launch may take [1800]")
    return parser


def visible_gpus(environ: Mapping[str, str], count: int) -> list[str]:
    """The `count` GPUs that torch shows, as CUDA_VISIBLE_DEVICES names them."""
    named = [name.strip() for name in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return named[:count] if named else [str(index) for index in range(count)]


def prepare(argv: list[str]) -> tuple[Check, argparse.Namespace]:
    """The check that a command line asks for.

    Raises:
        UserError: a mistake in the options, or the command was given to a launcher.
    """
    given, rest = make_parser().parse_known_args(argv)
    if any(name in os.environ for name in LAUNCHER_VARIABLES[:2]):
        raise UserError("The check starts the launchers itself; start it with plain python, once, on one machine.")
    if sharding_from_environment(os.environ) != "none":
        raise UserError("The check compares DDP with one process; unset the variables that ask for sharding.")
    settings = parse_settings(rest, __doc__ or "")
    for name in ("processes", "steps", "tolerance", "timeout"):
        if getattr(given, name) is not None and getattr(given, name) <= 0:
            raise UserError(f"--{name} is {getattr(given, name):g}, but it has to be above 0.")
    if not given.script.is_file():
        raise UserError(f"--script {given.script}: there is no such file.")
    use_cache_if_hub_is_unreachable(settings)
    import torch

    cuda = torch.cuda.is_available() and not settings.use_cpu
    gpus = visible_gpus(os.environ, torch.cuda.device_count()) if cuda else []
    processes = given.processes or (len(gpus) if gpus else 2)
    if gpus and processes > len(gpus):
        raise UserError(f"--processes is {processes}, but {len(gpus)} GPUs are visible; give at most that many.")
    backend = choose_backend(settings.backend, cuda)
    precision = choose_precision(settings, backend)
    sizes = given.micro_batches or [1, max(2, settings.per_device_train_batch_size)]
    if min(sizes) <= 0:
        raise UserError(f"--micro_batches holds {min(sizes)}, but every number of rows has to be above 0.")
    launches = plan_launches(processes, sizes)
    tolerance = TOLERANCES[backend, precision]
    if given.tolerance:
        tolerance = Tolerance(given.tolerance, "given on the command line")
    return Check(
        settings, launches, gpus, given.script.resolve(), given.steps, precision, tolerance, given.timeout
    ), given


def print_table(rows: Sequence[Row], check: Check) -> None:
    """The table, its first line the reference."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE, title="Difference from the first line, relative", title_justify="left")
    table.add_column("launch")
    for name in ("processes", "rows a device x accumulation", "weight update", "loss", "seconds"):
        table.add_column(name, justify="right")
    table.add_column("verdict")
    for row in rows:
        differences = [
            "-" if d is None or row.verdict == "reference" else "0" if d == 0 else f"{d:.1e}"
            for d in (row.update, row.loss)
        ]
        launch = row.launch
        table.add_row(
            launch.launcher, str(launch.processes), launch.shape, *differences, f"{row.seconds:.0f}", row.verdict
        )
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def write_json(
    path: Path, rows: Sequence[Row], check: Check, tolerance: Tolerance, agree: bool, errors: list[str]
) -> None:
    """Everything that was measured."""
    from unsloth_ddp.telemetry import versions

    content = {
        "agree": agree,
        "tolerance": dataclasses.asdict(tolerance),
        "precision": check.precision,
        "steps": check.steps,
        "learning_rate": LEARNING_RATE,
        "gpus": len(check.gpus),
        "settings": dataclasses.asdict(check.settings),
        "launches": [dataclasses.asdict(row) for row in rows],
        "errors": errors,
        "versions": versions(),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main(argv: list[str]) -> int:
    """Run the check; returns the exit code."""
    try:
        check, given = prepare(argv)
        for sentence in what_is_left_out(check.settings):
            print(sentence)
        device = f"{len(check.gpus)} GPU(s)" if check.gpus else "CPU"
        print(
            f"{check.settings.model}, method {check.settings.method}, {check.precision}, {device}, SGD {LEARNING_RATE}."
        )
        with tempfile.TemporaryDirectory(prefix="unsloth_ddp_parity_") as folder:
            rows, tolerance, errors = run_check(check, Path(folder))
    except UserError as error:
        print(f"parity: error: {error}", file=sys.stderr, flush=True)
        return EXIT_USER_ERROR
    agree, sentence = verdict(rows, tolerance)
    print_table(rows, check)
    for text in errors:
        print(f"\n{text}\n")
    print(sentence)
    print(f"Tolerance: {tolerance.value:.1e} ({tolerance.reason}).")
    if given.json:
        write_json(given.json, rows, check, tolerance, agree, errors)
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
