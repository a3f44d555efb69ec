"""Import Unsloth if it is the backend; no other module does.

The order process group, Unsloth, Transformers is what Unsloth needs: it patches Transformers, TRL and PEFT when it is
imported, and pins each rank to its GPU.
"""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from unsloth_ddp.config.options import Settings
from unsloth_ddp.distributed.runtime import Runtime
from unsloth_ddp.utils.errors import UserError, os_reason

# Suffixes of the files in a folder of Unsloth's compiled modules, beside __pycache__.
COMPILED = (".py", ".pyc", ".lock")


def import_backend(runtime: Runtime, settings: Settings) -> None:
    """Import Unsloth if it is the backend: after the process group exists, before Transformers, TRL and PEFT.

    Raises:
        UserError: Unsloth is installed but does not import on this machine.
    """
    if runtime.backend != "unsloth":
        if settings.compiled_cache_dir or settings.clear_compiled_cache:
            print("compiled_cache_dir and clear_compiled_cache are ignored: only the unsloth backend compiles modules.")
        return
    runtime.cleanup.enter_context(_compiled_cache(runtime, settings))
    try:
        _import_unsloth()
    except ImportError as error:
        raise UserError(
            f"backend unsloth: Unsloth does not import here ({error}); use --backend transformers."
        ) from None


def _import_unsloth() -> None:
    """Import Unsloth, and have it rewrite SFTTrainer, the base of the kit's trainer, but no other trainer of TRL.

    Rewriting the others takes 3 to 8 s of a start (benchmarks/results/speed/whole_jobs_3.json).
    """
    import torch

    # With this variable, which is for machines without a GPU, Unsloth rewrites none of them. It would also take AMD's
    # GPUs for NVIDIA's.
    variable = "UNSLOTH_ALLOW_CPU"
    if torch.version.cuda is None or not torch.cuda.is_available() or variable in os.environ:
        import unsloth

        return
    os.environ[variable] = "1"
    try:
        import unsloth  # noqa: F401
    finally:
        del os.environ[variable]
    import trl
    from unsloth.models import rl

    if not trl.SFTTrainer.__name__.startswith("Unsloth"):
        rl._patch_trl_rl_trainers("sft_trainer")


@contextlib.contextmanager
def _compiled_cache(runtime: Runtime, settings: Settings) -> Iterator[None]:
    """Point Unsloth at a folder for its compiled modules, before it is imported.

    Unless the user names one, it is a new folder on the node's local disk, which the ranks of the node share and the
    first of them removes at the end. Other jobs and a shared home folder never see it.
    """
    named = settings.compiled_cache_dir or os.environ.get("UNSLOTH_COMPILE_LOCATION")

    def prepare() -> str:
        if not named:
            return tempfile.mkdtemp(prefix="unsloth_compiled_cache_")
        folder = Path(named).expanduser().resolve()
        try:
            if settings.clear_compiled_cache:
                _clear_compiled_modules(folder)
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"compiled_cache_dir {folder} cannot be written: {os_reason(error)}; name another, or none."
            ) from None
        return str(folder)

    folder = runtime.broadcast_from_node_main(prepare)
    os.environ["UNSLOTH_COMPILE_LOCATION"] = folder
    try:
        yield
    finally:
        if not named and runtime.ranks.is_local_main:
            shutil.rmtree(folder, ignore_errors=True)


def _clear_compiled_modules(folder: Path) -> None:
    """Remove a folder of compiled modules, or refuse one that holds anything else."""
    if not folder.exists():
        return
    other = next(
        (path for path in folder.iterdir() if path.suffix not in COMPILED and path.name != "__pycache__"), None
    )
    if other is None and Path.cwd().is_relative_to(folder):
        other = Path.cwd()
    if other is not None:
        raise UserError(
            f"compiled_cache_dir {folder} holds {other.name}, which is not a compiled module, so clear_compiled_cache "
            "leaves it alone; name a folder that holds nothing else."
        )
    shutil.rmtree(folder)
