"""Classify calls by what they do outside the process, from their name and where that was imported from."""

import re
from enum import Enum

import libcst as cst

from unsloth_ddp.notebook.syntax.arguments import code, keyword
from unsloth_ddp.notebook.syntax.ipython import command_of, ipython_call, without_installs
from unsloth_ddp.notebook.syntax.tree import BUILTINS
from unsloth_ddp.notebook.syntax.usage import CallSite


class Effect(Enum):
    """The kinds of effect that decide where a statement may run."""

    TRAIN = "train"
    TRAINER = "trainer"
    LOOP = "hand-written loop"
    LOAD = "load"
    DATA = "data"
    INFER = "inference"
    PRINT = "print"
    SHOW = "display"
    STATS = "memory statistics"
    SAVE = "save"
    FILE = "writes files"
    SHELL = "shell"
    SERVER = "starts a server"
    PAID = "paid service"
    LOGIN = "login"
    TRACK = "speaks to a tracker"
    INPUT = "asks the user"
    RANDOM = "unseeded random"
    MODE = "for_inference or for_training"
    STATE = "changes the process"
    SYNC = "waits for other processes"
    GATHER = "gathers from other processes"
    JOIN = "joins the other processes"


# Only the main process: nothing in them is needed to train.
MAIN_ONLY = {Effect.INFER, Effect.PRINT, Effect.SHOW, Effect.STATS, Effect.SAVE, Effect.PAID, Effect.FILE}
# Once, whatever needs their result.
ONCE = {Effect.FILE, Effect.PAID, Effect.SERVER, Effect.SHELL, Effect.LOGIN, Effect.TRACK, Effect.SAVE}
# One process a node: what they leave behind lives on the node.
PER_NODE = {Effect.SERVER, Effect.SHELL, Effect.LOGIN}

# Methods of a trainer that train, or evaluate; a trainer may be driven by hand, step by step.
_TRAIN = re.compile(
    r"^(train|fit|learn|evaluate|validate|test|predict|hyperparameter_search|step|\w+_step|train_\w+|training_loop)$"
)
_HOLDS_TRAINER = re.compile(r"^\w*trainer\d*$")
# What makes an object whose methods wait for the other processes.
makes_accelerator = re.compile(
    r"^(accelerate|lightning|lightning_fabric|pytorch_lightning)\.(\w+\.)*(Accelerator|Fabric)$"
).match
_JOINS = re.compile(
    r"^((\w+\.)*\w*TrainingArguments|(\w+\.)*\w*(SFT|GRPO|DPO|KTO|ORPO|CPO|RLOO|PPO|Reward)Config"
    r"|(accelerate|lightning)\.(\w+\.)*(Accelerator|PartialState|AcceleratorState|Fabric)"
    r"|torch\.distributed\.init_process_group|deepspeed\.init\w*)$"
)
_INFER = {
    "generate", "fast_generate", "infer", "chat", "batch_chat", "generate_speech", "generate_text", "stream_generate",
}  # fmt: skip
_SAVE = re.compile(
    r"^(save_pretrained\w*|save_vocabulary|push_to_hub\w*|save_model|save_lora|save_state|save_metrics|save_checkpoint|save_adapter"
    r"|save_to_disk|upload_file|upload_folder|upload_large_folder|create_repo|create_model_card|log_metrics|quantize_gguf"
    r"|save_to_gguf\w*|export_\w+)$"
)
_FILE_METHODS = {"to_csv", "to_json", "to_parquet", "to_excel", "to_pickle", "write_text", "write_bytes", "savefig"}
_FILE_METHODS |= {"mkdir", "unlink", "rmdir", "touch", "extractall", "download_file", "process_file", "write_video"}
_FILE_CALLS = re.compile(
    r"^(os\.(makedirs|mkdir|remove|unlink|rename|replace|rmdir|removedirs|symlink)|shutil\.\w+|json\.dump|pickle\.dump"
    r"|yaml\.(safe_)?dump|joblib\.dump|numpy\.(save|savez|savez_compressed|savetxt)|torch\.save|torchaudio\.save"
    r"|soundfile\.write|scipy\.io\.wavfile\.write|cv2\.imwrite|urllib\.request\.urlretrieve|wget\.download"
    r"|gdown\.\w+|safetensors\.torch\.save_file|imageio\.\w*write|zipfile\.ZipFile|torchvision\.utils\.save_image)$"
)
_SHELL_CALLS = re.compile(
    r"^(subprocess\.(run|call|check_call|check_output|getoutput|getstatusoutput)|os\.(system|popen))$"
)
_SERVER_CALLS = re.compile(
    r"^(subprocess\.Popen|threading\.Thread|multiprocessing\.Process|uvicorn\.run|\w*launch_openenv|asyncio\.create_subprocess_\w+"
    r"|http\.server\.\w+|pyngrok\.ngrok\.\w+|unsloth\.dataprep\.\w+\.from_pretrained)$"
)
_PAID = re.compile(
    r"(\.completions\.create|\.responses\.create|\.messages\.create|\.embeddings\.create|\.images\.generate"
    r"|\.generate_content|\.chat\.complete|\.fine_tuning\.jobs\.create|^litellm\.\w*completion|^requests\.post|^httpx\.post)$"
)
_LOGIN = re.compile(
    r"^(huggingface_hub\.(\w+\.)*(notebook_login|login|interpreter_login)|wandb\.login|kagglehub\.login|ee\.Authenticate"
    r"|trackio\.login|comet_ml\.login|mlflow\.login)$"
)
# Functions of a tracker use its run, but for those that log in, fetch what was stored, or start trials.
TRACKERS = r"(wandb|trackio|mlflow|comet_ml|neptune|swanlab|clearml|aim|dvclive)"
_TRACK = re.compile(
    rf"^({TRACKERS}\.([a-z]\w*\.)*(?!login$|agent$|sweep$|restore$|load_|download)[a-z]\w*"
    r"|huggingface_hub\.(\w+\.)*Repository"
    r"|torch\.utils\.tensorboard\.(\w+\.)*SummaryWriter|tensorboardX\.SummaryWriter)$"
)
# What these return is the run itself, which no other process can use.
starts_run = re.compile(
    r"^((wandb|trackio)\.init|comet_ml\.start|neptune\.init_run|mlflow\.(start_run|active_run)"
    r"|huggingface_hub\.(\w+\.)*Repository|torch\.utils\.tensorboard\.(\w+\.)*SummaryWriter|tensorboardX\.SummaryWriter)$"
).match
# What these return differs by process: the clock, random names, process numbers.
differs_by_process = re.compile(
    r"^(datetime\.(datetime|date)\.(now|utcnow|today)|time\.(time|time_ns|strftime|ctime|asctime|localtime|gmtime)"
    r"|uuid\.uuid[14]|os\.getpid|tempfile\.mkdtemp|secrets\.\w+)$"
).match
_INPUT = {"input", "getpass.getpass", "getpass"}
# What fetches data or files, or prepares them in a cache.
downloads_data = re.compile(
    r"(^|\.)(load_dataset|(\w+_)?download(_\w+)?"
    r"|standardize_sharegpt|standardize_data_formats|to_sharegpt|train_on_responses_only|from_generator)$"
).search
_DATA_METHODS = {"map", "filter"}
_PRINT = {"print", "pprint", "pprint.pprint", "pprint.pp", "rich.print", "builtins.print", "sys.stdout.write"}
_SHOW_MODULES = ("IPython.", "matplotlib.", "seaborn.", "ipywidgets.", "plotly.", "google.colab.output", "gradio.")
_SHOW_METHODS = {"head", "tail", "describe", "info", "print_trainable_parameters", "value_counts", "summary", "show"}
_SHOW_METHODS |= {"apply_chat_template", "decode", "batch_decode", "tokenize", "convert_ids_to_tokens", "isnull", "sum"}
_STATS = re.compile(
    r"^torch\.cuda\.(get_device_properties|max_memory_\w+|memory_\w+|mem_get_info|get_device_name|list_gpu_processes)$"
)
_STATE = re.compile(
    r"^(os\.(chdir|putenv|unsetenv|umask|environ\.(pop\w*|update|setdefault|clear|__\w+__))|exit|quit|SystemExit|sys\.exit"
    r"|sys\.(path\.\w+|set\w+|modules\.(pop\w*|update|setdefault|clear))|random\.seed|numpy\.random\.seed|torch\.set_\w+"
    r"|torch\.(cuda\.)?manual_seed\w*|torch\.backends\..*|warnings\.\w+|(\w+\.)*set_seed|(\w+\.)*set_start_method)$"
)
_SYNC = {"main_process_first", "local_main_process_first", "wait_for_everyone", "barrier", "split_between_processes"}
_SYNC |= {"all_reduce", "all_gather", "all_gather_object", "broadcast", "broadcast_object_list", "gather_for_metrics"}
# The global generators, by the module that owns each, and what draws from them.
GENERATORS = ("random", "numpy", "torch")
_RANDOM = re.compile(
    r"^((?P<random>random)\.(shuffle|sample|choice|choices|randint|random|uniform|randrange|gauss|normalvariate|getrandbits)"
    r"|(?P<numpy>numpy)\.random\.(shuffle|permutation|choice|randint|rand|randn|random|random_sample|uniform|normal)"
    r"|(?P<torch>torch)\.(rand|randn|randint|randperm|multinomial|bernoulli|utils\.data\.random_split))$"
)
_SEEDS_ONE = {
    "random.seed": "random",
    "numpy.random.seed": "numpy",
    "torch.manual_seed": "torch",
    "torch.random.manual_seed": "torch",
}
_SEEDS_ALL = re.compile(
    r"^(transformers|accelerate|trl|lightning|pytorch_lightning)\.(\w+\.)*"
    r"(set_seed|seed_everything|enable_full_determinism)$"
)
# Those of tokenizers count words.
names_trainer = re.compile(r"^(?!(Bpe|WordPiece|WordLevel|Unigram)Trainer$)([A-Z]\w*)?Trainer$").match
# The libraries and classes of Keras.
is_keras = re.compile(r"^(\w*keras\w*|tensorflow)(\.|$)|(^|\.)TF[A-Z]\w*(\.from_pretrained)?$").search
# Libraries whose trainings run on machines of their own.
is_remote = re.compile(r"^(sagemaker|kubeflow|vertexai|google\.cloud\.aiplatform|azure\.ai\.ml|ray\.train)\.").match
REMOTE_STARTS = {"train", "fit", "deploy", "run", "submit", "create_job"}
# The from_pretrained of one of Unsloth's loaders.
is_loader_call = re.compile(r"(^|\.)Fast[A-Z]\w*\.from_pretrained$").search
_BY_PATH = {
    Effect.JOIN: _JOINS, Effect.PAID: _PAID, Effect.LOGIN: _LOGIN, Effect.TRACK: _TRACK, Effect.STATS: _STATS,
    Effect.STATE: _STATE,
}  # fmt: skip
_PURE_BUILTINS = BUILTINS - {"print", "exec", "eval", "open", "input", "setattr", "delattr", "__import__", "compile"}


class TrainerClasses(frozenset[str]):
    """Hold what the notebook calls trainers' classes, its own too, and its classes that are none."""

    others: frozenset[str] = frozenset()


def is_trainer_call(site: CallSite, classes: TrainerClasses) -> bool:
    """Return whether a call constructs a trainer: a class called ...Trainer, or the notebook's subclass of one."""
    return bool(site.node.args) and makes_trainer(site, classes)


def makes_trainer(site: CallSite, classes: TrainerClasses) -> bool:
    """Return whether a call makes a trainer, with or without arguments."""
    return site.path not in classes.others and (bool(names_trainer(site.tail)) or site.path in classes)


def is_trainer_method(site: CallSite, trainers: set[str]) -> bool:
    """Return whether a call is that of a trainer's own method."""
    named = site.root in trainers or bool(_HOLDS_TRAINER.match(site.root))
    is_its_method = site.path.count(".") == 1 and site.tail != "model"  # `trainer.model(...)` calls the model alone
    return is_its_method and named and (not site.passed or bool(_TRAIN.match(site.tail)))


def draws_from(site: CallSite, full: str) -> str | None:
    """Return the global generator that a call draws from, or None."""
    draw = _RANDOM.match(full)
    if draw is None or any(arg.keyword and arg.keyword.value == "generator" for arg in site.node.args):
        return None
    return next(name for name in GENERATORS if draw[name])


def seeded_by(site: CallSite, full: str) -> set[str]:
    """Return the global generators that a call seeds."""
    if not site.node.args or any(isinstance(a.value, cst.Name) and a.value.value == "None" for a in site.node.args):
        return set()  # without one they start from the machine's entropy
    if _SEEDS_ALL.match(full):
        return set(GENERATORS)
    return {_SEEDS_ONE[full]} if full in _SEEDS_ONE else set()


def call_effects(site: CallSite, full: str, trainers: set[str], classes: TrainerClasses) -> set[Effect]:
    """Return the effects of one call. `full` is its path with imports resolved; `trainers` are names that hold one."""
    tail = site.tail
    if is_trainer_call(site, classes):
        return {Effect.TRAINER}
    if is_loader_call(site.path):
        return {Effect.LOAD}
    if is_trainer_method(site, trainers):
        saves = {Effect.SAVE} if _SAVE.match(tail) else set()  # it asks for itself on which process
        return {Effect.TRAIN} if _TRAIN.match(tail) else {Effect.SYNC} | saves
    if tail in ("for_inference", "for_training"):
        return {Effect.MODE}
    effects = {effect for effect, pattern in _BY_PATH.items() if pattern.search(full)}
    effects -= {Effect.TRACK} if site.passed else set()  # a value of a run, which is not called
    if tail == "backward" and site.is_method:
        effects.add(Effect.LOOP)
    # "." also where a library's function was imported under its own name; not for a function of the notebook
    if ("." in full and tail in _INFER and Effect.PAID not in effects) or full == "transformers.pipeline":
        effects.add(Effect.INFER)
    if _SAVE.match(tail) or (tail == "save" and site.root.startswith(("model", "trainer"))):
        effects.add(Effect.SAVE)
    if _writes_file(site, full):
        effects.add(Effect.FILE)
    effects |= _process_effects(site, full)
    if not site.is_method and tail in ("notebook_login", "login"):
        effects.add(Effect.LOGIN)
    if full in _INPUT:
        effects.add(Effect.INPUT)
    if _is_data(site, full):
        effects.add(Effect.DATA)
    if site.is_method and tail in _SYNC:
        effects.add(Effect.SYNC)
    if draws_from(site, full):
        effects.add(Effect.RANDOM)
    return effects | _display_effects(site, full)


def _display_effects(site: CallSite, full: str) -> set[Effect]:
    if full in _PRINT or (not site.is_method and site.tail in ("pprint", "print_highlight")):
        return {Effect.PRINT}
    if full.startswith(_SHOW_MODULES) or (not site.is_method and site.tail == "display"):
        return {Effect.SHOW}
    if site.bare and (site.tail in _SHOW_METHODS or (not site.is_method and site.tail in _PURE_BUILTINS)):
        return {Effect.SHOW}
    return set()


def _process_effects(site: CallSite, full: str) -> set[Effect]:
    command = command_of(site.node)
    if command and not without_installs(command)[0]:
        return set()  # it is left out
    call = ipython_call(site.node)
    if call is not None:
        if call.command:
            return {Effect.SHELL}
        return {Effect.FILE} if call.args[:1] in (("writefile",), ("file",)) else set()
    if _SHELL_CALLS.match(full):
        return {Effect.SHELL}
    return {Effect.SERVER} if _SERVER_CALLS.match(full) or site.tail == "launch_openenv" else set()


def _is_data(site: CallSite, full: str) -> bool:
    download = keyword(site.node, "download")  # as torchvision's datasets have it
    if downloads_data(full) or (download is not None and code(download.value) == "True"):
        return True
    maps = site.is_method and site.tail in _DATA_METHODS and site.root not in ("pool", "executor")
    return maps and bool(site.node.args)


def _writes_file(site: CallSite, full: str) -> bool:
    if site.tail in ("open", "File", "GFile"):
        return any(_is_write_mode(arg) for arg in site.node.args)
    if site.tail in ("to_csv", "to_json", "to_sql"):
        return bool(site.node.args)
    if site.is_method and site.tail == "save" and site.node.args:
        return not site.root.startswith(("model", "trainer")) or full.startswith(("torch.", "numpy."))
    return (site.is_method and site.tail in _FILE_METHODS) or bool(_FILE_CALLS.match(full))


def _is_write_mode(arg: cst.Arg) -> bool:
    named = arg.keyword is None or arg.keyword.value == "mode"
    mode = arg.value.evaluated_value if named and isinstance(arg.value, cst.SimpleString) else None
    return isinstance(mode, str) and bool(re.fullmatch(r"(?=.*[wxa+])[rwxabt+]{1,4}", mode))
