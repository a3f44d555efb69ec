"""Plan the launches of a parity check: launchers, processes, shapes of one global batch, and their plain steps."""

import dataclasses
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from unsloth_ddp.config.options import DataSettings, OutputSettings, Settings
from unsloth_ddp.config.parse import REPO
from unsloth_ddp.utils.units import counted

# Small, so that a later step does not amplify the rounding of an earlier one: layouts of the demo are 1.4e-6 apart on
# a CPU with 0.1, and 2.2e-7 with 0.01.
LEARNING_RATE = 0.01
MICRO_BATCHES_A_PROCESS = 4

LauncherName = Literal["python", "accelerate"]


@dataclass(frozen=True)
class Launch:
    """One way to spread the global batch over processes, micro-batches and accumulation steps."""

    launcher: LauncherName
    processes: int
    per_device: int
    accumulation: int

    @property
    def name(self) -> str:
        """The name of the launch's folder."""
        return f"{self.launcher}_{self.processes}x{self.per_device}x{self.accumulation}"

    @property
    def shape(self) -> str:
        """Rows per device x accumulation steps."""
        return f"{self.per_device} x {self.accumulation}"

    @property
    def name_for_people(self) -> str:
        """`accelerate with 2 processes, 4 x 1`."""
        return f"{self.launcher} with {counted(self.processes, 'process')}, {self.shape}"


def plan_launches(processes: int, micro_batches: Sequence[int]) -> list[Launch]:
    """Return the launches, the reference first: one process, no launcher, the smallest micro-batch.

    Every micro-batch size is run by plain python and on all processes, and one by accelerate with a single process.
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


def visible_gpus(environ: Mapping[str, str], count: int) -> list[str]:
    """Return the names of the `count` GPUs that torch sees, as in CUDA_VISIBLE_DEVICES."""
    named = [name.strip() for name in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return named[:count] if named else [str(index) for index in range(count)]


def launch_command(launch: Launch, script: Path, config: Path, cpu: bool) -> list[str]:
    """Return the command line of one launch."""
    if launch.launcher == "python":
        return [sys.executable, str(script), "--config", str(config)]
    name = "cpu" if cpu else "ddp"
    launcher = [sys.executable, "-m", "accelerate.commands.launch"]
    launcher += ["--config_file", str(REPO / "accelerate_configs" / f"{name}.yaml")]
    return [*launcher, "--num_processes", str(launch.processes), str(script), "--config", str(config)]


def choose_precision(settings: Settings, backend: str) -> str:
    """Return the precision: the user's, else fp32, which shows the arithmetic; Unsloth's method full needs bf16."""
    if settings.precision != "auto":
        return settings.precision
    return "bf16" if backend == "unsloth" and settings.method == "full" else "fp32"


def launch_settings(
    launch: Launch, settings: Settings, steps: int, precision: str, rows: Path, output: Path
) -> Settings:
    """Return the user's settings reduced to a few plain steps over `rows`, without randomness and extra output."""
    reduced = {
        **{field.name: getattr(OutputSettings(), field.name) for field in dataclasses.fields(OutputSettings)},
        "max_steps": steps,
        "optim": "sgd",
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "warmup_steps": 0.0,
        "weight_decay": 0.0,
        "max_grad_norm": 0.0,
        "lora_dropout": 0.0,
        "precision": precision,
        # 16-bit weights would lose most of a step to rounding.
        "full_weights": "fp32",
        "trainer_args": {},
        "per_device_train_batch_size": launch.per_device,
        "gradient_accumulation_steps": launch.accumulation,
        "global_batch_size": None,
        "global_batch_tokens": None,
        "dataset": [str(rows)],
        "dataset_config": None,
        "eval_dataset": [],
        "eval_fraction": 0.0,
        "packing": "on" if settings.packing == "on" else "off",
        "streaming": False,
        "shuffle_buffer": DataSettings.shuffle_buffer,
        "output_dir": str(output),
        "run_name": launch.name,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
    }
    return dataclasses.replace(settings, **reduced)


def describe_omissions(settings: Settings, precision: str, on_gpus: bool = False) -> list[str]:
    """Return a sentence for each setting of the run that the check, in `precision`, leaves out."""
    sentences = []
    if settings.lora_dropout:
        sentences.append(f"lora_dropout {settings.lora_dropout} is left out: every layout draws it differently.")
    if settings.trainer_args:
        sentences.append(f"trainer_args are left out ({', '.join(settings.trainer_args)}).")
    if settings.streaming:
        sentences.append("streaming is left out: the rows of these few steps are read before the launches.")
    in_16_bit = precision != "fp32" or (settings.precision == "auto" and on_gpus)
    if settings.packing == "auto" and in_16_bit:
        sentences.append(
            "packing auto is left out: it depends on the number of processes; --packing on checks packed rows."
        )
    if settings.method != "full" and settings.lora_modules_to_save:
        sentences.append(
            f"lora_modules_to_save ({', '.join(settings.lora_modules_to_save)}) are trained but not compared."
        )
    if settings.method == "full" and settings.full_weights == "bf16":
        sentences.append("full_weights bf16 is left out: 16-bit weights would lose most of a step to rounding.")
    return sentences
