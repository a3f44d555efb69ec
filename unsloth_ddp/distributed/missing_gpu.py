"""Explain why torch sees no GPU on a machine where one was evidently expected, before a run uses the CPU instead."""

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from unsloth_ddp.config.options import Settings
from unsloth_ddp.config.parse import is_demo_model
from unsloth_ddp.utils.errors import UserError, one_line

VISIBLE = "CUDA_VISIBLE_DEVICES"
# CUDA takes the devices up to the first name that it does not know: a number, or the start of a GPU's or MIG slice's
# id.
A_DEVICE = re.compile(r"\s*(\d+|(GPU|MIG)-[\w/-]+)\s*(,|$)")
NUMBERED = re.compile(r"Error \d+: .+")


@dataclass(frozen=True)
class MissingGpu:
    """Say why torch sees no GPU where one was expected, and what to do about it; both are parts of a sentence.

    Args:
        hidden: CUDA_VISIBLE_DEVICES hides the machine's GPUs, as someone sets it who wants the CPU.
    """

    cause: str
    fix: str
    hidden: bool = False

    @property
    def warning(self) -> str:
        """Return the sentence for what goes on with the CPU."""
        return f"{self.cause}, so the CPU is used; {self.fix}."

    @property
    def refusal(self) -> str:
        """Return the sentence for what does not use the CPU unasked."""
        return f"{self.cause}; {self.fix}, or give --use_cpu to train on the CPU."


def has_nvidia() -> bool:
    """Return whether NVIDIA's driver is loaded or a GPU's device file exists."""
    return Path("/proc/driver/nvidia/version").exists() or bool(list(Path("/dev").glob("nvidia[0-9]*")))


def explain_missing_gpu(
    visible: str | None, driver: bool, torch_cuda: str | None, torch_error: str
) -> MissingGpu | None:
    """Return why torch sees no GPU; None where nothing speaks for one, as on a machine without GPUs.

    Args:
        visible: CUDA_VISIBLE_DEVICES; None where it is not set.
        driver: the machine has NVIDIA's driver loaded, or a GPU's device file.
        torch_cuda: torch.version.cuda; None for a build without CUDA.
        torch_error: what torch gives as its reason for seeing none; "" if it gives none.
    """
    names = visible is not None and A_DEVICE.match(visible) is not None
    if visible is not None and not names:
        hides = f"{VISIBLE} is {visible!r}, which hides this machine's GPUs"
        return MissingGpu(hides, "unset it to use them", hidden=True) if driver else None
    if not names and not driver:
        return None
    expected = f"{VISIBLE} is {visible}" if names else "This machine has an NVIDIA driver"
    if torch_cuda is None:
        return MissingGpu(f"{expected}, but this torch is built without CUDA", "install the kit's own with uv sync")
    # "Error 802: system not yet initialized" stands behind a question.
    numbered = NUMBERED.search(torch_error)
    first = (numbered[0] if numbered else torch_error.partition(". ")[0]).rstrip(".")
    found_none = f"{expected}, but torch finds no GPU" + (f" ({first})" if first else "")
    if "too old" in first:
        install = "uv venv --clear, uv pip install --torch-backend=auto -e ., and begin commands with uv run --no-sync"
        return MissingGpu(
            found_none, f"update the driver to one for CUDA {torch_cuda}, or install torch for this driver: {install}"
        )
    return MissingGpu(found_none, "check nvidia-smi (a container needs --gpus all)")


def find_missing_gpu(environ: Mapping[str, str] = os.environ) -> MissingGpu | None:
    """Return why torch sees no GPU on this machine, or None where none was expected; call this only if it sees none."""
    import torch

    visible, driver = environ.get(VISIBLE), has_nvidia()
    # ROCm reads CUDA_VISIBLE_DEVICES too, and its reasons are others.
    if (visible is None and not driver) or torch.version.hip is not None:
        return None
    torch_error = ""
    if torch.version.cuda is not None:
        try:
            torch.cuda.init()
        except Exception as error:
            torch_error = one_line(error)
    return explain_missing_gpu(visible, driver, torch.version.cuda, torch_error)


def check_cpu_is_meant(settings: Settings) -> None:
    """Print why the CPU is used where a GPU was expected; call this where torch sees none and nobody asked for the CPU.

    The demo trains on the CPU in seconds, and hidden GPUs are hidden on purpose: there a sentence is enough. Any other
    model would train for days on a machine whose driver only needs an update.

    Raises:
        UserError: a GPU was expected for a model other than the demo's.
    """
    missing = find_missing_gpu()
    if missing is None:
        return
    if not missing.hidden and not is_demo_model(settings):
        raise UserError(missing.refusal)
    print(missing.warning, flush=True)


def warn_of_cpu() -> None:
    """Print to stderr why the CPU is used where a GPU was expected, for commands that may use it."""
    if (missing := find_missing_gpu()) is not None:
        print(missing.warning, file=sys.stderr, flush=True)
