"""Render the region at the top of a converted script: ranks, settings and the helpers that the script uses."""

import re
from dataclasses import dataclass, field

from unsloth_ddp.notebook.syntax.tree import closure
from unsloth_ddp.notebook.write.helpers import HELPERS

RANKS = """\
RANK = int(os.environ.get("RANK", 0))
LOCAL_RANK = int(os.environ.get("LOCAL_RANK", 0))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))
IS_MAIN = RANK == 0
"""

HASHES = """\
# Python orders sets of strings by hashes that differ from process to process; the seed is read at start-up only.
if WORLD_SIZE > 1 and os.environ.get("PYTHONHASHSEED", "random") == "random":
    os.environ["PYTHONHASHSEED"] = "0"
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
"""

FLAGS = """\
# Older Unsloth releases need both under DDP; newer ones ignore them. Unsloth reads them when it is imported.
os.environ["UNSLOTH_DISABLE_TRAINER_PATCHING"] = "1"
os.environ["UNSLOTH_NO_CUDA_EXTENSIONS"] = "1"
"""

DEVICE = """\
# ddp: each process takes its own GPU before anything can touch GPU 0
import torch

if torch.cuda.is_available():
    torch.cuda.set_device(LOCAL_RANK)
"""

NO_GPU = """\
elif not getattr(torch, "accelerator", torch.cuda).is_available() and "UNSLOTH_ALLOW_CPU" not in os.environ:
    raise SystemExit("No GPU is visible here, and this script needs one for each process; nvidia-smi lists them.")
"""

REGION = "# region DDP: added by the converter; what follows is the notebook"
END_REGION = "# endregion"

# Modules whose names the region or the device's lines take.
MODULES = sorted({"os", "torch", *(module for helper in HELPERS.values() for module in helper.modules)})

# display has to keep its name: the notebook calls it without binding it.
IDENTIFIERS = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "IS_MAIN"),
    *(name for name in HELPERS if name not in ("quiet_print", "display", "keep_names")),
    "leave_process_group",
)


@dataclass
class Names:
    """The region's names in one script; a name that the notebook uses itself gets a prefix."""

    shadowed: frozenset[str]
    modules: frozenset[str] = frozenset()  # modules of the region whose names the notebook uses for something else
    used: set[str] = field(default_factory=lambda: {"finish"})

    def __getitem__(self, name: str) -> str:
        """Return the identifier for `name`, and record that the script needs it."""
        if name in HELPERS:
            self.used.add(name)
        return f"ddp_{name}" if name in self.shadowed else name

    def needed(self) -> set[str]:
        """Return the helpers in use and those that they use."""
        return closure(self.used, lambda name: HELPERS[name].needs)


def render_region(names: Names, environment: list[str], quiet: str, device: str, *, unsloth: bool, hashes: bool) -> str:
    """Render the region at the top of the script.

    `environment` has the lines that set what libraries read on import and the notebook sets later; `quiet` is the
    comment above the print of the other processes; `device` chooses the process's GPU, where nothing runs before it.
    """
    needed = names.needed()
    modules = {"os"}.union(*(HELPERS[name].modules for name in needed), {"sys"} if hashes else ())
    parts = ["".join(_import(module, names) for module in sorted(modules)), RANKS]
    parts += [HASHES] if hashes else []
    parts += [FLAGS] if unsloth else []
    if environment:
        parts.append("# The notebook sets these later, but they are read on import.\n" + "".join(environment))
    head = "\n".join(parts)
    texts = [
        (quiet + "\n" if name == "quiet_print" else "") + HELPERS[name].source for name in HELPERS if name in needed
    ]
    region = f"{REGION}\n" + _rename(head + "\n\n" + "\n\n".join(texts), names, names.modules - {"torch"})
    device = f"\n\n{device}" if device else "\n"
    return f"{region}{device}\n{END_REGION}\n"


def render_device(names: Names, *, needs_gpu: bool) -> str:
    """Render the lines that choose the process's GPU, for just before the first import that could touch one."""
    text = _rename(DEVICE + (NO_GPU if needs_gpu else ""), names, names.modules & {"torch", "os"})
    return text.replace("import torch\n", _import("torch", names))


def _import(module: str, names: Names) -> str:
    return f"import {module} as ddp_{module}\n" if module in names.modules else f"import {module}\n"


def _rename(text: str, names: Names, modules: frozenset[str]) -> str:
    for name in (*IDENTIFIERS, *modules):
        if name in names.shadowed or name in modules:
            text = re.sub(rf'(?<![\w".])(?<!import ){name}(?![\w"])', f"ddp_{name}", text)
    return text
