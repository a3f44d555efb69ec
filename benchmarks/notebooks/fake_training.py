"""Stand-ins for training arguments, trainers and ranks, which remember what the program asked of them.

A trainer's train() also calls the program's reward functions once, in the phase "in_train", because they run on every
rank of a real run. Standard library only.
"""

import base64
import importlib
import inspect
import os
import pickle
import re
from typing import Any

from events import RECORDER
from fake_data import FakeDataset
from stubs import CLASSES, RULES, VALUES, Base, Stub, Text

DEFAULTS: dict[str, Any] = {
    "per_device_train_batch_size": 8,
    "per_device_eval_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_generations": 8,
    "max_steps": -1,
    "num_train_epochs": 3.0,
    "output_dir": "trainer_output",
    "generation_batch_size": None,
    "steps_per_generation": None,
    "ddp_find_unused_parameters": None,
    "dataloader_drop_last": False,
    "save_steps": 500,
    "n_gpu": 1,
}
WATCHED = (
    "ddp_find_unused_parameters",
    "average_tokens_across_devices",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "num_generations",
    "report_to",
)


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def launched(stub: Stub, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run what `notebook_launcher` would start processes for, as one of them."""
    function, given, *_ = [*args, kwargs.get("args", ())]
    return function(*given)


class Group:
    """Return whether torch.distributed is initialized; collectives before that are errors, as in the real library."""

    ready = False

    @classmethod
    def start(cls, how: str) -> None:
        if world_size() > 1 and not cls.ready:
            cls.ready = True
            importlib.import_module("torch.distributed")  # as whatever joins the processes does
            RECORDER.add("group", "init", text=how)

    @classmethod
    def stop(cls) -> None:
        if cls.ready:
            RECORDER.add("group", "destroy")
        cls.ready = False

    @classmethod
    def collective(cls, name: str) -> None:
        if not cls.ready and name.startswith("torch.distributed."):
            raise ValueError(
                "Default process group has not been initialized, please make sure to call init_process_group."
            )
        RECORDER.add("collective", name)


class Config(Base):
    """Training arguments of any class; building them starts the process group, as transformers does."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if args:
            kwargs.setdefault("output_dir", args[0])
        self.__dict__.update(kwargs)
        self.__dict__["_class"] = type(self).__name__
        if type(self).__name__.endswith("Arguments") or "per_device_train_batch_size" in kwargs:
            Group.start(f"{type(self).__name__}()")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        ranks = {"world_size": world_size, "process_index": rank, "local_process_index": local_rank}
        if name in ranks:
            return ranks[name]()
        if name in DEFAULTS:
            return DEFAULTS[name]
        return Stub(f"{type(self).__name__}.{name}")

    def to_dict(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if not k.startswith("_")}


def signature_of(defaults: dict[str, Any]) -> inspect.Signature:
    """The signature of a constructor that has these keywords and takes any others."""
    keyword = inspect.Parameter.KEYWORD_ONLY
    known = [inspect.Parameter(name, keyword, default=value) for name, value in defaults.items()]
    first = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY) for name in ("self",)]
    rest = [inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD)]
    return inspect.Signature([*first, *known, *rest])


Config.__init__.__signature__ = signature_of({**DEFAULTS, "average_tokens_across_devices": True})  # type: ignore[attr-defined]


LAUNCHED = re.compile(
    r"((LOCAL|NODE|GROUP|ROLE)_)?(RANK|WORLD_SIZE)$|LOCAL_WORLD_SIZE$|MASTER_(ADDR|PORT)$|PYTHONHASHSEED$|UNSLOTH_DIS|UNSLOTH_NO"
)


def process() -> dict[str, Any]:
    """What a training finds in its process: the variables, the launcher's apart, and the folder."""
    own = {name: value for name, value in os.environ.items() if not LAUNCHED.match(name)}
    ranks = [os.environ.get(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")]
    return {"variables": own, "ranks": ranks, "folder": os.path.basename(os.getcwd())}


class Trainer(Base):
    """Any trainer: remembers its configuration, its data and that it trained."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        config = kwargs.get("args") or next((a for a in args if isinstance(a, Config)), None)
        if config is None:
            Group.start(f"{type(self).__name__}()")
        data = kwargs.get("train_dataset")
        self.__dict__.update(kwargs)
        self.__dict__.update(args=config if config is not None else Config(), options=kwargs)
        self.__dict__["has_arguments"] = config is not None or any(name in kwargs for name in WATCHED)
        if data is not None:
            self.train_dataset = data
        if args and "model" not in kwargs:
            self.model = args[0]
        given = {name: value for name, value in kwargs.items() if name not in ("model", "args")}
        given["trains"] = getattr(self.__dict__.get("model"), "__dict__", {}).get("_origin")
        RECORDER.add("trainer", self.kind(), **self.settings(), given=plain(given), config=plain(self.args))

    def kind(self) -> str:
        """The library's class: a program's own subclass is named by what it extends."""
        return next(c.__name__ for c in type(self).__mro__ if c.__dict__.get("_library"))

    def settings(self) -> dict[str, Any]:
        """The watched settings as they stand, with those that nobody set left out."""
        given = {**self.options, **self.args.__dict__}
        return {"settings": {name: plain(given[name]) for name in WATCHED if name in given}}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in ("train_dataset", "eval_dataset"):
            return FakeDataset()
        return Stub(f"trainer.{name}")

    def train(self, *args: Any, **kwargs: Any) -> Any:
        Group.collective("train")
        RECORDER.add("train", self.kind(), arguments=self.has_arguments, process=process(), **self.settings())
        RECORDER.phase = "in_train"
        try:
            for function in rewards_of(self):
                call_reward(function)
        finally:
            RECORDER.phase = ""
        return TrainOutput()

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        Group.collective("evaluate")
        return dict.fromkeys(("eval_loss", "eval_runtime"), 1.0)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        Group.collective("predict")
        return Stub("predictions")

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return Stub("loss")

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        self.together("save", "save_model")

    def save_state(self, *args: Any, **kwargs: Any) -> None:
        self.together("save", "save_state")

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self.together("save", "save_checkpoint")  # Lightning's

    def push_to_hub(self, *args: Any, **kwargs: Any) -> None:
        self.together("push", "push_to_hub")

    def together(self, kind: str, name: str) -> None:
        """Do what every rank has to call, and one of them performs."""
        Group.collective(name)
        if rank() == 0:
            RECORDER.add(kind, name)

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Train as `train` does, a step at a time: a PPO trainer driven by hand."""
        Group.collective("step")
        return Stub("stats")

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        Group.collective("generate")
        return Stub("responses")


class TrainOutput(Base):
    """The result of train()."""

    def __init__(self) -> None:
        self.metrics = {"train_runtime": 60.0, "train_loss": 1.0, "train_samples_per_second": 1.0}
        self.training_loss, self.global_step = 1.0, 10

    def __getitem__(self, index: int) -> Any:
        return (self.global_step, self.training_loss, self.metrics)[index]


def plain(value: Any, depth: int = 0) -> Any:
    """A value that JSON can hold and two runs can compare: no addresses, nothing too long."""
    if isinstance(value, FakeDataset):
        return {"rows": [plain(row, depth + 1) for row in value.rows]} if depth < 3 else "dataset"
    if isinstance(value, list | tuple):
        return [plain(v, depth + 1) for v in value[:50]] if depth < 6 else "..."
    if isinstance(value, dict):
        return {str(k): plain(v, depth + 1) for k, v in list(value.items())[:50]} if depth < 6 else "..."
    if isinstance(value, Config):
        return {"class": type(value).__name__, **plain(value.to_dict(), depth + 1)}
    if value is None or type(value) in (bool, int, float):
        return value
    if isinstance(value, str):
        return str(value)[:400]
    if inspect.isroutine(value) or inspect.isclass(value):
        return value.__name__
    return ADDRESS.sub("", str(value))[:400] if isinstance(value, Stub) else type(value).__name__


ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def rewards_of(trainer: Any) -> list[Any]:
    given = trainer.__dict__.get("reward_funcs") or []
    given = given if isinstance(given, list | tuple) else [given]
    return [f for f in given if inspect.isfunction(f)]


def call_reward(function: Any) -> None:
    """Call a reward function as a trainer does, on two made-up completions."""
    message = [{"role": "assistant", "content": Text("1", "completion")}]
    given: dict[str, Any] = {"prompts": [message, message], "completions": [message, message]}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY) and name not in given:
            given[name] = [Text("1", name), Text("1", name)]
    try:
        function(**given)
    except NameError:
        raise
    except Exception as error:
        RECORDER.add("reward_error", type(error).__name__, text=str(error)[:100])


def real_class(base: type) -> Any:
    def make(path: str, name: str) -> type:
        return type(name, (base,), {"_library": True, "__doc__": None})

    return make


def error_class(path: str, name: str) -> type:
    return type(name, (Exception,), {})


TOGETHER = (
    "prepare",
    "gather",
    "gather_for_metrics",
    "reduce",
    "pad_across_processes",
    "save_state",
    "load_state",
    "backward",
)


class State(Base):
    """accelerate's PartialState and Accelerator."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        Group.start("PartialState()")

    process_index = property(lambda self: rank())
    local_process_index = property(lambda self: local_rank())
    num_processes = property(lambda self: world_size())
    is_main_process = property(lambda self: rank() == 0)
    is_local_main_process = property(lambda self: local_rank() == 0)
    is_last_process = property(lambda self: rank() == world_size() - 1)
    device = property(lambda self: f"cuda:{local_rank()}")

    def wait_for_everyone(self) -> None:
        RECORDER.add("collective", "wait_for_everyone")

    def main_process_first(self) -> Any:
        RECORDER.add("collective", "main_process_first")
        return Stub("context")

    local_main_process_first = main_process_first

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def method(*args: Any, **kwargs: Any) -> Any:
            RECORDER.add("collective", name)
            return args if len(args) > 1 else args[0] if args else Stub(f"accelerator.{name}")

        return method if name in TOGETHER else Stub(f"accelerator.{name}")

    def print(self, *args: Any, **kwargs: Any) -> None:
        if rank() == 0:
            print(*args, **kwargs)

    def on_main_process(self, function: Any) -> Any:
        return function if rank() == 0 else (lambda *args, **kwargs: None)

    on_local_main_process = on_main_process

    def destroy_process_group(self, group: Any = None) -> None:
        Group.stop()

    end_training = destroy_process_group


COLLECTIVES = (
    "barrier monitored_barrier all_reduce broadcast broadcast_object_list all_gather all_gather_object gather "
    "gather_object scatter scatter_object_list reduce reduce_scatter all_to_all"
)


def collective(stub: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    Group.collective(stub._name)
    return Stub("work")


BROADCASTS: list[str] = []  # what this rank sent, pickled
RECEIVED: list[str] = []  # what the sending rank sent in its own run, in order


def broadcast_objects(stub: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """broadcast_object_list: the sender's objects must pickle, the others get them."""
    Group.collective(stub._name)
    box = args[0] if args else kwargs["object_list"]
    if rank() == 0:
        BROADCASTS.append(base64.b64encode(pickle.dumps(list(box))).decode())
    elif RECEIVED:
        box[:] = pickle.loads(base64.b64decode(RECEIVED.pop(0)))
    return box


def gathered(name: str) -> Any:
    def run(stub: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        Group.collective(name)
        return args[0] if args else None

    return run


def install() -> None:
    """Register the names."""
    for suffix in ("Error", "Exception", "Warning", "Timeout"):
        CLASSES.append((suffix, error_class))
    CLASSES.append(("Trainer", real_class(Trainer)))
    CLASSES.append(("TrainingArguments", real_class(Config)))
    CLASSES.append(("Config", real_class(Config)))
    dist = "torch.distributed"
    for name in COLLECTIVES.split():
        RULES[f"{dist}.{name}"] = collective
    for module in ("accelerate.utils", "accelerate"):
        for name in ("gather_object", "broadcast_object_list", "gather", "broadcast", "reduce"):
            RULES[f"{module}.{name}"] = gathered(name)
    RULES[f"{dist}.broadcast_object_list"] = RULES["accelerate.utils.broadcast_object_list"] = broadcast_objects
    RULES[f"{dist}.init_process_group"] = lambda stub, args, kwargs: Group.start("init_process_group()")
    RULES[f"{dist}.destroy_process_group"] = lambda stub, args, kwargs: Group.stop()
    RULES[f"{dist}.is_available"] = lambda stub, args, kwargs: True
    RULES[f"{dist}.is_initialized"] = lambda stub, args, kwargs: Group.ready
    RULES[f"{dist}.get_rank"] = lambda stub, args, kwargs: rank() if Group.ready else 0
    RULES[f"{dist}.get_world_size"] = lambda stub, args, kwargs: world_size() if Group.ready else 1
    RULES["accelerate.notebook_launcher"] = launched
    for name in ("PartialState", "Accelerator"):
        for module in ("accelerate", "accelerate.state", "accelerate.accelerator"):
            VALUES[f"{module}.{name}"] = State
