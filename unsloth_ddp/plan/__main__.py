"""Estimate memory, steps and time of a run before renting GPUs.

    uv run python -m unsloth_ddp.plan --config recipes/qwen3_8b_lora.yaml --dataset my_chats.jsonl \\
        --nodes 4 --gpus_per_node 8 --gpu_memory 80GB

Reads the model's config.json and tokenizer, and the rows; no weights are downloaded, nothing is trained and no GPU is
needed.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from unsloth_ddp.config.command_line import Parser, make_command_parser, run_command
from unsloth_ddp.config.declare import Bounds
from unsloth_ddp.config.options import Settings
from unsloth_ddp.config.parse import parse_settings
from unsloth_ddp.data.sources.hub import use_cache_if_hub_is_unreachable
from unsloth_ddp.distributed.missing_gpu import has_nvidia
from unsloth_ddp.distributed.precision import AMPERE, check_full_weights, choose_precision, has_bf16
from unsloth_ddp.distributed.ranks import Ranks
from unsloth_ddp.distributed.runtime import Runtime, quiet_imports
from unsloth_ddp.run.file_checks import check_data
from unsloth_ddp.utils.errors import UserError
from unsloth_ddp.utils.files.json import write_as_asked
from unsloth_ddp.utils.streams import protect_streams
from unsloth_ddp.utils.units import parse_memory

if TYPE_CHECKING:
    from unsloth_ddp.sizing.micro_batch import RowLengths

# Transformers accepts these only on a GPU, and the check of the training arguments runs on the CPU.
GPU_ONLY = ("tf32",)


def make_parser() -> Parser:
    """Return the parser of the plan's own options; all others are those of train_ddp.py."""
    parser = make_command_parser("python -m unsloth_ddp.plan", __doc__)
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="machines [1]")
    parser.add_argument(
        "--gpus_per_node", type=int, metavar="N", help="GPUs per machine [those of this machine, or 1 without a GPU]"
    )
    parser.add_argument(
        "--gpu_memory", metavar="SIZE", help="memory of a GPU, such as 80GB or 139GiB [that of this machine's]"
    )
    parser.add_argument(
        "--compute_capability", metavar="X.Y",
        help="compute capability of the GPU: 7.5 for a T4 or RTX 20, 7.0 for a V100, which have no bf16 and no flash "
            "attention [this machine's, or 8.0 without a GPU]",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the plan to FILE as JSON")
    return parser


def plan(argv: list[str]) -> None:
    """Read the command line, compute the plan and print it."""
    options, rest = make_parser().parse_known_args(argv)
    settings = parse_settings(rest, __doc__ or "", make_parser())
    gpu_memory = parse_memory("--gpu_memory", options.gpu_memory) if options.gpu_memory else None
    capability = _parse_capability(options.compute_capability)
    # Options on the GPU mean another machine's.
    gpu = None if gpu_memory or options.compute_capability or options.gpus_per_node else find_gpu()
    if gpu:
        gpu_memory, capability = gpu.memory, gpu.capability
    gpus_per_node = options.gpus_per_node or (gpu.number if gpu else 1)
    for name, count in (("nodes", options.nodes), ("gpus_per_node", gpus_per_node)):
        Bounds(above=0).check(f"--{name}", count)
    settings = with_precision_of(settings, capability)
    check_data(settings, options.nodes * gpus_per_node)
    use_cache_if_hub_is_unreachable(settings)
    quiet_imports()
    # Imported here, so that mistakes in the options are reported before torch is loaded, which takes seconds.
    import transformers

    from unsloth_ddp.data.order.packing import BatchRequest, plan_step
    from unsloth_ddp.model.backend import with_backend
    from unsloth_ddp.model.files.check import base_of_reference
    from unsloth_ddp.plan.compute import Hardware, make_plan
    from unsloth_ddp.plan.report import plan_as_json, render_plan
    from unsloth_ddp.sizing.choose import planned_packing
    from unsloth_ddp.sizing.count import read_model_shape

    request = BatchRequest.of(settings, options.nodes * gpus_per_node)
    # Rows over the model's length are only counted here.
    transformers.utils.logging.set_verbosity_error()
    hardware = Hardware(options.nodes, gpus_per_node, gpu_memory, capability, gpu.name if gpu else None)
    check_training_arguments(settings)
    settings = with_backend(settings)
    shape = read_model_shape(settings)
    of_reference = base_of_reference(settings)
    reference = read_model_shape(of_reference) if of_reference else None
    rows = tokenize_rows(settings)
    if rows.images and (with_images := with_backend(settings, images=True)) != settings:
        settings, shape = with_images, read_model_shape(with_images)
    decision = planned_packing(settings, shape, capability, images=rows.images)
    batch, packing, _ = plan_step(request, rows.unpadded, decision)
    rows = rows.packed(packing)
    run_plan = make_plan(settings, shape, rows, batch, hardware, reference)
    print(render_plan(run_plan, colour=sys.stdout.isatty()), flush=True)
    if options.json:
        write_as_asked("--json", options.json, plan_as_json(run_plan))


class Gpu(NamedTuple):
    """The first GPU that a run on this machine would use, with its memory in bytes, and how many there are."""

    name: str
    memory: float
    capability: tuple[int, int]
    number: int


def find_gpu() -> Gpu | None:
    """Return the GPU of this machine, or None without one, for which torch is not imported."""
    if not has_nvidia():
        return None
    import torch

    if not torch.cuda.is_available():
        return None
    gpu = torch.cuda.get_device_properties(0)
    return Gpu(gpu.name, gpu.total_memory, (gpu.major, gpu.minor), torch.cuda.device_count())


def tokenize_rows(settings: Settings) -> RowLengths:
    """Tokenize the training rows with the model's tokenizer, with the checks of train_ddp.py.

    Raises:
        UserError: as in a run, for a bad row, a missing tokenizer or data without supervised tokens.
    """
    from unsloth_ddp.data.dataset import row_lengths, tokenize_examples
    from unsloth_ddp.data.node_folder import node_folder
    from unsloth_ddp.data.sources.examples import read_examples
    from unsloth_ddp.model.files.chat_template import template_variables
    from unsloth_ddp.model.loading.load import load_tokenizer
    from unsloth_ddp.sizing.micro_batch import RowLengths

    runtime = Runtime(Ranks(), backend="transformers", device_type="cpu", precision="fp32", device_name="CPU")
    with node_folder(runtime) as folder:
        read_examples(settings, runtime, folder, template_variables(settings))
        rows, _ = tokenize_examples(settings, runtime, folder, load_tokenizer(settings))
        # The row after these only fills up the last step; see batch_plan.RowOrder. A pair counts with both its rows, a
        # labelled answer without its mismatched one.
        lengths, supervised, all_tokens, trained = (
            each[:-1] for each in (rows.lengths(), rows.supervised(), row_lengths(rows.dataset), rows.trained_lengths())
        )
        pixels = rows.pixels()[:-1] if rows.processing is not None else None
    return RowLengths(
        lengths, supervised, streamed=rows.streamed, pixels=pixels, all_tokens=all_tokens, trained=trained
    )


def check_training_arguments(settings: Settings) -> None:
    """Build TRL's config, the optimizer and the schedule of a run on the CPU, with a model of one parameter.

    Raises:
        UserError: as in a run, for an unknown optimizer, schedule or trainer_args that the libraries refuse.
    """
    from unsloth_ddp.data.order.batch_plan import BatchPlan
    from unsloth_ddp.training.sft_config import make_config

    runtime = Runtime(Ranks(), backend="transformers", device_type="cpu", precision="fp32", device_name="CPU")
    anywhere = {name: value for name, value in settings.trainer_args.items() if name not in GPU_ONLY}
    on_cpu = dataclasses.replace(settings, trainer_args=anywhere, use_cpu=True, precision="fp32")
    make_config(on_cpu, runtime, BatchPlan(1, 1, 1), Path(settings.output_dir) / "plan")


def _parse_capability(text: str | None) -> tuple[int, int]:
    if text is None:
        return AMPERE
    capability = re.fullmatch(r"(\d{1,2})\.(\d)", text)
    if not capability:
        raise UserError(f"--compute_capability is {text}, but it has the form 7.5 (NVIDIA lists that of every GPU).")
    return int(capability[1]), int(capability[2])


def with_precision_of(settings: Settings, capability: tuple[int, int]) -> Settings:
    """Return the settings with the precision that a run would choose on GPUs of this compute capability.

    Raises:
        UserError: the GPUs do not have the precision that is asked for.
    """
    gpu = f"a GPU of compute capability {capability[0]}.{capability[1]}"
    precision = choose_precision(settings.precision, gpu, has_bf16(capability))
    check_full_weights(settings.method, settings.full_weights, precision)
    return dataclasses.replace(settings, precision=precision)


def main(argv: list[str]) -> int:
    """Plan; return the exit code."""
    return run_command("plan", plan, argv)


if __name__ == "__main__":
    protect_streams()
    sys.exit(main(sys.argv[1:]))
