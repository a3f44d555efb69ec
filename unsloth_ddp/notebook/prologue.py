"""Render the helpers that a converted script uses, from source text kept here."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

# Name in the templates -> what it needs besides the ranks.
_NEEDS: dict[str, tuple[str, ...]] = {
    "wait_group": (),
    "wait_for_everyone": ("wait_group",),
    "main_process_first": ("wait_for_everyone",),
    "from_main": ("wait_group",),
    "accumulation_steps": (),
    "batch_per_process": (),
    "generation_batch": (),
    "default_of": (),
    "ddp_arguments": ("accumulation_steps", "batch_per_process", "default_of"),
    "same_draws": (),
    "run_shell": (),
    "shell_output": (),
    "run_async": (),
    "finish": ("wait_for_everyone",),
    "quiet_print": (),
}
_MODULES = {
    "wait_group": ("datetime", "os"),
    "main_process_first": ("contextlib",),
    "accumulation_steps": ("math",),
    "default_of": ("inspect",),
    "same_draws": ("random",),
    "run_shell": ("subprocess",),
    "shell_output": ("subprocess",),
    "run_async": ("asyncio",),
    "finish": ("atexit", "gc"),
}

RANKS = """\
RANK = int(os.environ.get("RANK", 0))
LOCAL_RANK = int(os.environ.get("LOCAL_RANK", 0))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))
IS_MAIN = RANK == 0
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

_HELPERS = {
    "quiet_print": '''\
if not IS_MAIN:

    def print(*args, **kwargs):
        """One process speaks for all."""
''',
    "wait_group": '''\
@functools.cache
def wait_group():
    """A gloo group: it can wait for hours while the main process saves, where NCCL would time out."""
    if not dist.is_initialized():
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, timeout=datetime.timedelta(minutes=30))
    return dist.new_group(backend="gloo", timeout=datetime.timedelta(hours=24))
''',
    "wait_for_everyone": '''\
def wait_for_everyone():
    """Go on only when every process is here."""
    if WORLD_SIZE > 1:
        dist.barrier(group=wait_group())
''',
    "main_process_first": '''\
@contextlib.contextmanager
def main_process_first():
    """One process a node goes first, so that the others find its downloads and caches."""
    if LOCAL_RANK != 0:
        wait_for_everyone()
    yield
    if LOCAL_RANK == 0:
        wait_for_everyone()
''',
    "from_main": '''\
def from_main(make):
    """The main process's value of make(), on every process."""
    if WORLD_SIZE == 1:
        return make()
    box = [make() if IS_MAIN else None]
    dist.broadcast_object_list(box, src=0, group=wait_group())
    return box[0]
''',
    "accumulation_steps": '''\
def accumulation_steps(global_batch, per_device, multiple=1):
    """Accumulation that keeps the notebook's global batch over all processes, or the nearest to it."""
    at_once = per_device * WORLD_SIZE
    unit = multiple // math.gcd(multiple, at_once)
    steps = max(1, round(global_batch / (at_once * unit))) * unit
    if IS_MAIN and steps * at_once != global_batch:
        print(f"Global batch {steps * at_once} instead of {global_batch}: {WORLD_SIZE} processes do not divide it.")
    return steps
''',
    "batch_per_process": '''\
def batch_per_process(batch, accumulation, least=1):
    """The notebook's batch, or as much of its global batch as falls to one process."""
    return max(least, min(batch, batch * accumulation // WORLD_SIZE))
''',
    "generation_batch": '''\
def generation_batch(batch, accumulation, generations):
    """The notebook's global batch; Unsloth raises a batch that holds no whole group of generations."""
    whole = batch * accumulation
    return whole if whole % generations == 0 else generations * accumulation
''',
    "default_of": '''\
def default_of(config, name, otherwise):
    """A config's own default: Unsloth's configs differ from TRL's and transformers'."""
    parameter = inspect.signature(config).parameters.get(name)
    return parameter.default if parameter and isinstance(parameter.default, int) else otherwise
''',
    "ddp_arguments": '''\
def ddp_arguments(config, per_device, arguments):
    """A config's arguments, given as a dict, with those that DDP needs."""
    batch = arguments.get("per_device_train_batch_size") or default_of(config, "per_device_train_batch_size", 8)
    steps = arguments.get("gradient_accumulation_steps") or default_of(config, "gradient_accumulation_steps", 1)
    per_device = per_device or batch_per_process(batch, steps)
    return {
        **arguments,
        "per_device_train_batch_size": per_device,
        "gradient_accumulation_steps": accumulation_steps(
            batch * steps, per_device, arguments.get("num_generations") or 1
        ),
        "ddp_find_unused_parameters": False,
        "average_tokens_across_devices": True,
    }
''',
    "same_draws": '''\
def same_draws(seed, *generators):
    """Seed the global generators, or those named, so that every process draws the same."""
    import numpy

    seeds = {"random": random.seed, "numpy": numpy.random.seed, "torch": torch.manual_seed}
    for name in generators or seeds:
        seeds[name](seed)
''',
    "run_shell": '''\
def run_shell(command):
    """Run a command as the notebook did: a failure is shown and does not stop the script."""
    subprocess.run(["bash", "-c", command])
''',
    "shell_output": '''\
def shell_output(command):
    """The lines that a command prints."""
    done = subprocess.run(["bash", "-c", command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return done.stdout.splitlines()
''',
    "run_async": '''\
def run_async(awaitable, loop=asyncio.new_event_loop()):
    """What `await` at a notebook's top level does, on one event loop for the whole script."""
    asyncio.set_event_loop(loop)
    return loop.run_until_complete(awaitable)
''',
    "finish": '''\
def finish(*names):
    """Wait for the main process's last saves, let go of the model, and leave the process group."""
    for name in names:
        globals().pop(name, None)
    gc.collect()
    if WORLD_SIZE > 1:
        wait_for_everyone()
        dist.destroy_process_group()


@atexit.register
def leave_process_group():
    """After an error, too."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
''',
}

# Modules that the prologue imports, as it names them.
MODULES = {name: name for name in ("os", "torch", *(m for needed in _MODULES.values() for m in needed), "functools")}
MODULES["dist"] = "torch.distributed"

IDENTIFIERS = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "IS_MAIN"),
    *(name for name in _HELPERS if name != "quiet_print"),
    "leave_process_group",
)


@dataclass
class Names:
    """The prologue's names in one script; a name that the notebook uses itself gets a prefix."""

    taken: frozenset[str]
    modules: frozenset[str] = frozenset()  # modules of the prologue whose names the notebook uses for something else
    used: set[str] = field(default_factory=lambda: {"finish"})

    def __getitem__(self, name: str) -> str:
        """Return the identifier for `name`, and record that the script needs it."""
        if name in _HELPERS:
            self.used.add(name)
        return f"ddp_{name}" if name in self.taken else name

    def needed(self) -> set[str]:
        """Return the helpers in use and those that they use."""
        found: set[str] = set()
        queue = list(self.used)
        while queue:
            name = queue.pop()
            if name not in found:
                found.add(name)
                queue += _NEEDS[name]
        return found


def render(names: Names, environment: list[str], quiet: str) -> tuple[str, str]:
    """Render the prologue's two parts: ranks and flags, which import nothing heavy, and the device with the helpers."""
    needed = names.needed()
    modules = sorted({"os"}.union(*(_MODULES.get(name, ()) for name in needed)))
    if "wait_group" in needed:
        modules = sorted({*modules, "functools"})
    first = "".join(_import(module, names) for module in modules) + "\n" + RANKS + "\n" + FLAGS
    if environment:
        first += "# The notebook sets these later, but they are read on import.\n" + "".join(environment)
    device = DEVICE.replace("import torch\n", "import torch\nimport torch.distributed as dist\n")
    helpers = [_HELPERS[name] for name in _HELPERS if name in needed]
    helpers = [quiet + "\n" + text if text is _HELPERS["quiet_print"] else text for text in helpers]
    return _rename(first, names), _rename(device + "\n\n" + "\n\n".join(helpers), names)


def _import(module: str, names: Names) -> str:
    return f"import {module} as ddp_{module}\n" if module in names.modules else f"import {module}\n"


def _rename(text: str, names: Names) -> str:
    for name in (*IDENTIFIERS, *names.modules):
        if name in names.taken | names.modules:
            text = re.sub(rf'(?<![\w".])(?<!import ){name}(?![\w"])', f"ddp_{name}", text)
    return text
