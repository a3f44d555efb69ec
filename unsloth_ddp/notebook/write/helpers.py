"""Hold the source text of the helpers that a converted script may need.

Each is written into a script only where the script uses it, with the modules and the helpers that it names. None
imports
torch before it is called: a notebook may set variables, or look at sys.modules, before its first heavy import.
"""

import ast
import re
import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class Helper:
    """A helper's source, the standard modules it reads, and the helpers it calls."""

    source: str
    modules: set[str]
    needs: set[str]


def _helpers(text: str) -> dict[str, Helper]:
    """Split a text at its lines `# %% NAME`."""
    _, *parts = re.split(r"^# %% (\w+)\n", text, flags=re.MULTILINE)
    sources = dict(zip(parts[::2], parts[1::2], strict=True))
    helpers = {}
    for name, source in sources.items():
        nodes = list(ast.walk(ast.parse(source)))
        read = {n.id for n in nodes if isinstance(n, ast.Name)} - {n.arg for n in nodes if isinstance(n, ast.arg)}
        helpers[name] = Helper(source, read & sys.stdlib_module_names, read & sources.keys() - {name})
    return helpers


HELPERS = _helpers(r'''
# %% START_FOLDER
START_FOLDER = os.getcwd()
# %% quiet_print
if not IS_MAIN:

    def print(*args, **kwargs):
        """Print on the main process only."""
# %% display
def display(*values, **options):
    """Print what the notebook displayed."""
    print(*values, sep="\n")
# %% wait_group
def wait_group():
    """Return a gloo group: it can wait for hours while one process saves, where NCCL would time out."""
    import torch
    import torch.distributed as dist

    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, timeout=datetime.timedelta(minutes=30))
        wait_group.made = None  # one from before, which Accelerate may have ended, is gone
    if wait_group.made is None:
        wait_group.made = dist.new_group(backend="gloo", timeout=datetime.timedelta(hours=24))
    return wait_group.made


wait_group.made = None
# %% wait_for_everyone
def wait_for_everyone():
    """Wait until every process is here."""
    if WORLD_SIZE > 1:
        group = wait_group()
        sys.modules["torch.distributed"].barrier(group=group)
# %% main_process_first
@contextlib.contextmanager
def main_process_first():
    """Let one process a node go first, so that the others find its downloads and caches."""
    if LOCAL_RANK != 0:
        wait_for_everyone()
    yield
    if LOCAL_RANK == 0:
        wait_for_everyone()
# %% from_main
def from_main(make):
    """Call make() on the main process and return its value on every process."""
    if WORLD_SIZE == 1:
        return make()
    box, group = [make() if IS_MAIN else None], wait_group()
    sys.modules["torch.distributed"].broadcast_object_list(box, src=0, group=group)
    return box[0]
# %% NoRun
class NoRun:
    """Stands for a tracked run on the other processes: takes every call and does nothing."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args, **kwargs):
        return self

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None
# %% shared_decision
def shared_decision(method):
    """Take a callback's decisions (stop, save, evaluate) from the main process: all must take the same."""

    @functools.wraps(method)
    def decide(self, args, state, control, **kwargs):
        control = method(self, args, state, control, **kwargs) or control
        flags = {name: value for name, value in vars(control).items() if name.startswith("should_")}
        vars(control).update(from_main(lambda: flags))
        return control

    return decide
# %% accumulation_steps
def accumulation_steps(global_batch, per_device, multiple=1):
    """Return the accumulation that keeps the notebook's global batch over all processes, or the nearest to it."""
    at_once = per_device * WORLD_SIZE
    unit = multiple // math.gcd(multiple, at_once)
    steps = max(1, round(global_batch / (at_once * unit))) * unit
    if IS_MAIN and steps * at_once != global_batch:
        print(f"Global batch {steps * at_once} instead of {global_batch}: WORLD_SIZE {WORLD_SIZE} does not divide it.")
    accumulation_steps.shared.add((per_device, steps))
    return steps


accumulation_steps.shared = set()  # batches that are shared among the processes already
# %% batch_per_process
def batch_per_process(batch, accumulation, least=1):
    """Return the notebook's batch, or as much of it as divides what falls to one process of the global batch."""
    share = max(1, batch * accumulation // WORLD_SIZE)
    sizes = [size for size in range(min(least, batch), batch + 1) if share % size == 0]
    return max(sizes, default=max(min(least, batch), min(batch, share)))
# %% ddp_settings
def ddp_settings(config, search=False):
    """Return the settings that DDP needs, as far as the installed release has them; None leaves the search to it."""
    made = [kind.__init__ for kind in config.__mro__] if isinstance(config, type) else [config]
    known = {name for function in made for name in inspect.signature(function).parameters}
    if IS_MAIN and WORLD_SIZE > 1 and "average_tokens_across_devices" not in known:
        print("This release averages the loss on each process separately, so rows weigh less beside long ones.")
    wanted = {"ddp_find_unused_parameters": search, "average_tokens_across_devices": True}
    return {name: value for name, value in wanted.items() if name in known and value is not None}
# %% ddp_configured
def ddp_configured(args, per_device, search=False, least=1, **others):
    """Return a trainer's arguments with what DDP needs, and with other values."""
    if not hasattr(args, "per_device_train_batch_size"):
        return args
    batch, steps = args.per_device_train_batch_size, args.gradient_accumulation_steps
    if (batch, steps) not in accumulation_steps.shared:
        whole, batch = batch * steps, per_device or batch_per_process(batch, steps, least)
        steps = accumulation_steps(whole, batch, getattr(args, "num_generations", None) or 1)
    args.per_device_train_batch_size, args.gradient_accumulation_steps = batch, steps
    if hasattr(args, "generation_batch_size"):  # computed from the others when the arguments were made
        args.steps_per_generation = steps
        args.generation_batch_size = batch * WORLD_SIZE * steps
    for name, value in {**ddp_settings(type(args), search), **others}.items():
        setattr(args, name, value)
    return args
# %% split_batches
def split_batches():
    """Return the argument by which Accelerate gives each process its part of every batch of a DataLoader."""
    import accelerate

    if "dataloader_config" in inspect.signature(accelerate.Accelerator).parameters:
        return {"dataloader_config": accelerate.utils.DataLoaderConfiguration(split_batches=True)}
    return {"split_batches": True}
# %% shared_batch
def shared_batch(batch):
    """Return the notebook's batch, or the next larger one that the number of processes divides."""
    shared = math.ceil(batch / WORLD_SIZE) * WORLD_SIZE
    if IS_MAIN and shared != batch:
        print(f"Batches of {shared} rows instead of {batch}: WORLD_SIZE {WORLD_SIZE} does not divide it.")
    return shared
# %% share_rows
class share_rows:
    """Yields this process's part of each batch of a DataLoader; all processes draw the same batches."""

    weight = 1.0  # of this process's rows in the current batch, where an equal share weighs 1

    def __new__(cls, loader):
        if WORLD_SIZE == 1:
            return loader
        if not hasattr(loader, "shared"):  # kept, so that a later epoch draws another order
            loader.shared = super().__new__(cls)
            loader.shared.prepare(loader)
        return loader.shared

    def prepare(self, loader):
        import torch

        streams = torch.utils.data.IterableDataset
        if getattr(loader, "batch_sampler", None) is None or isinstance(loader.dataset, streams):
            raise SystemExit("This loop's loader has no batches to share among processes: share its rows by hand.")
        batch = getattr(loader.batch_sampler, "batch_size", WORLD_SIZE)
        if IS_MAIN and batch < WORLD_SIZE:
            print(f"Batches of {batch} rows are too few for {WORLD_SIZE} processes: some wait; use larger batches.")
        if getattr(loader.sampler, "generator", loader) is None:
            loader.sampler.generator = torch.Generator().manual_seed(SHARED_SEED)
        names = ("collate_fn", "num_workers", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context")
        options = {name: getattr(loader, name) for name in (*names, "prefetch_factor", "persistent_workers")}
        self.batches, self.weights = loader.batch_sampler, []
        options["generator"] = loader.generator
        self.loader = torch.utils.data.DataLoader(loader.dataset, batch_sampler=Parts(self), **options)

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        self.weights.clear()
        for rows in self.loader:
            share_rows.weight = self.weights.pop(0)
            yield rows


class Parts:
    """The rows of each batch that are this process's; one at least, which weighs nothing if the batch has too few."""

    def __init__(self, shared):
        self.shared = shared

    def __len__(self):
        return len(self.shared.batches)

    def __iter__(self):
        for batch in self.shared.batches:
            rows = batch[RANK::WORLD_SIZE]
            self.shared.weights.append(len(rows) * WORLD_SIZE / len(batch))
            yield rows or batch[:1]


SHARED_SEED = 3407
# %% same_weights
def same_weights(optimizer):
    """Start from the main process's weights: those that no checkpoint holds were drawn by each process."""
    if WORLD_SIZE > 1 and wait_group():
        for group in optimizer.param_groups:
            for weight in group["params"]:
                sys.modules["torch.distributed"].broadcast(weight.data, src=0)
# %% average_gradients
def average_gradients(optimizer):
    """Average the gradients over the processes, each weighed by its rows of the batch."""
    if WORLD_SIZE == 1:
        return
    import torch

    wait_group()
    weights = [weight for group in optimizer.param_groups for weight in group["params"] if weight.requires_grad]
    has = torch.tensor([float(weight.grad is not None) for weight in weights], device=weights[0].device)
    torch.distributed.all_reduce(has, op=torch.distributed.ReduceOp.MAX)
    used = [weight for weight, one in zip(weights, has.tolist()) if one]
    for kind in sorted({str(weight.dtype) for weight in used}):
        same = [weight for weight in used if str(weight.dtype) == kind]
        for weight in same:
            weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
        flat = torch.cat([weight.grad.reshape(-1) for weight in same]) * (share_rows.weight / WORLD_SIZE)
        torch.distributed.all_reduce(flat)
        for weight, part in zip(same, flat.split([weight.numel() for weight in same])):
            weight.grad.copy_(part.view_as(weight))
# %% same_draws
def same_draws(seed, *generators):
    """Seed the global generators, or those named, so that every process draws the same."""
    for name in generators or ("random", "numpy", "torch"):
        module = importlib.import_module("numpy.random" if name == "numpy" else name)
        (module.manual_seed if name == "torch" else module.seed)(seed)
# %% child_environment
def child_environment(given=None):
    """Return the environment for a command: with the launcher's variables it would join this job and hang."""
    own = r"((LOCAL|NODE|GROUP|ROLE)_)?(RANK|WORLD_SIZE)$|ROLE_NAME$|MASTER_(ADDR|PORT)$"
    own += "|(TORCHELASTIC|ACCELERATE|PET|FSDP|DEEPSPEED|OMPI|PMIX?|MV2)_"
    return {name: value for name, value in (given or os.environ).items() if not re.match(own, name)}
# %% keep_launched
def keep_launched():
    """Restore the launcher's variables and the choice of GPUs, which the notebook may have changed."""
    for name in {"CUDA_VISIBLE_DEVICES", *keep_launched.given}:
        if name in keep_launched.given:
            os.environ[name] = keep_launched.given[name]
        else:
            os.environ.pop(name, None)


keep_launched.given = {name: value for name, value in os.environ.items() if name not in child_environment()}
keep_launched.given |= {name: os.environ[name] for name in ("CUDA_VISIBLE_DEVICES",) if name in os.environ}
keep_launched.given.pop("ACCELERATE_MIXED_PRECISION", None)  # a setting, which is the notebook's to choose
# %% own_shell
def own_shell(command):
    """Return a shell command that first removes the launcher's variables: with them it would join this job and hang."""
    names = [name for name in os.environ if name not in child_environment() and name.isidentifier()]
    return f"unset {' '.join(names)}\n{command}" if names else command
# %% run_shell
def run_shell(command, arguments="", program=None):
    """Run a command, or a program with the command as its input; a failure is shown and does not stop the script."""
    words = [*shlex.split(program or "bash -s"), *shlex.split(arguments)]
    if program is None:
        words[1:2] = ["-c", command, "bash"]
    given = {} if program is None else {"input": command, "text": True}
    return subprocess.run(words, env=child_environment(), **given).returncode
# %% shell_output
def shell_output(command):
    """Return the lines that a command prints."""
    done = subprocess.run(
        ["bash", "-c", command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=child_environment()
    )
    return done.stdout.splitlines()
# %% run_async
def run_async(awaitable, loop=asyncio.new_event_loop()):
    """Do what `await` at a notebook's top level does, on one event loop for the whole script."""
    asyncio.set_event_loop(loop)
    return loop.run_until_complete(awaitable)
# %% secret
def secret(name):
    """Return a secret of the notebook's host from the environment."""
    if IS_MAIN and name not in os.environ:
        print(f"The notebook's secret {name} is not set: export {name}=... before the start, if it is needed.")
    return os.environ.get(name)
# %% uploaded_files
def uploaded_files():
    """Return the files that the notebook asked to upload, as name: bytes."""
    paths = os.environ.get("UPLOADED_FILES", "").split(":")
    if paths == [""]:
        raise SystemExit("The notebook asks for an upload here: export UPLOADED_FILES=path[:path ...] and start again.")
    return {os.path.basename(path): open(path, "rb").read() for path in paths}
# %% hub_login
def hub_login(token=None, *rest, **options):
    """Log in to the Hugging Face Hub if there is a token; a script does not ask for one."""
    from huggingface_hub import get_token, login

    if token:
        login(token, **options)
    elif get_token() is None:
        print("Not logged in to the Hugging Face Hub: run `hf auth login` or set HF_TOKEN, if it is needed.")
# %% wandb_login
def wandb_login(key=None, **options):
    """Log in to W&B if there is a key; without one the run stays on this machine."""
    import wandb

    if key or wandb.api.api_key:
        return wandb.login(key=key, **options)
    os.environ["WANDB_MODE"] = "offline"
    print("No key for W&B: its run stays on this machine. Set WANDB_API_KEY to upload it.")
# %% finish
def finish(*names):
    """Wait for the last save of the main process, drop the models, and leave the process group."""
    for name in names:
        globals().pop(name, None)
    gc.collect()
    leave_process_group(wait=True)


@atexit.register
def leave_process_group(wait=False):
    """Leave the process group if there is one: Accelerate's end_training ends it. After an error nobody waits."""
    dist = sys.modules.get("torch.distributed")
    if dist and dist.is_available() and dist.is_initialized():
        if wait:
            wait_for_everyone()
        dist.destroy_process_group()
# %% keep_names
# The notebook changes its names through globals(): what this script needs is found among the built-in names after that.
vars(builtins).update({name: value for name, value in globals().items() if not name.startswith("__")})
''')
