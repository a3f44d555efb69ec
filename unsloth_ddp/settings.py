"""Every option of a run, once: typed dataclasses, one per topic, read from a YAML file and the command line.

The command line wins over the file, the file over the defaults below. Nothing heavier than PyYAML is imported
here, because the settings decide what may be imported next (Unsloth has to come before Transformers, TRL and
PEFT). That is also why TRL's own TrlParser, whose conventions this follows, is not used.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn

import yaml

from unsloth_ddp.errors import UserError

DEMO_RECIPE = Path(__file__).resolve().parent.parent / "recipes" / "demo.yaml"


def option(default: Any, text: str, **metadata: Any) -> Any:
    """A dataclass field with a one-line help text; a list default is copied for every instance."""
    metadata["help"] = text
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass
class ModelSettings:
    """Model"""

    model: str | None = option(None, "Hub id or folder of the base model.", path=True)
    model_revision: str | None = option(None, "Branch, tag or commit of the model on the Hub.")
    method: Literal["lora", "qlora", "full"] = option(
        "lora", "lora: adapter on 16-bit weights; qlora: adapter on 4-bit weights; full: every parameter."
    )
    backend: Literal["auto", "unsloth", "transformers"] = option(
        "auto", "auto: Unsloth where an accelerator is found, Transformers + PEFT elsewhere."
    )
    precision: Literal["auto", "bf16", "fp16", "fp32"] = option(
        "auto", "Compute precision; auto: bf16 or fp16 on a GPU (whichever it has), fp32 on a CPU."
    )
    full_weights: Literal["fp32", "bf16"] = option(
        "fp32",
        "method full: what the trained weights are kept in; bf16 halves the memory and rounds small updates away.",
    )
    attn_implementation: str | None = option(None, "Attention of the transformers backend (sdpa, eager, ...).")
    trust_remote_code: bool = option(False, "Run Python code that comes with the model.")
    use_safetensors: bool = option(True, "Refuse weights in pickle files.")


@dataclass
class LoraSettings:
    """LoRA and QLoRA"""

    lora_r: int = option(16, "Rank of the adapter.")
    lora_alpha: int = option(16, "Scale of the adapter: alpha / r.")
    lora_dropout: float = option(0.0, "Dropout before the adapter.")
    lora_target_modules: list[str] = option(
        ["all-linear"], "Modules that get an adapter; all-linear: every linear layer."
    )
    lora_modules_to_save: list[str] = option(
        [], "Modules trained in full beside the adapter (embed_tokens, lm_head, ...)."
    )
    use_rslora: bool = option(False, "Scale by alpha / sqrt(r) instead (rank-stabilised LoRA).")


@dataclass
class DataSettings:
    """Data"""

    dataset: list[str] = option([], "Training rows: .jsonl, .json, .parquet, .csv files, or Hub ids.", path=True)
    dataset_config: str | None = option(None, "Configuration name of a Hub dataset.")
    dataset_split: str = option("train", "Split of a Hub dataset to train on.")
    eval_dataset: list[str] = option([], "Evaluation rows, given like --dataset.", path=True)
    eval_dataset_split: str = option("test", "Split of a Hub dataset given to --eval_dataset.")
    eval_fraction: float = option(
        0.0, "Fraction of --dataset set aside (seeded) for evaluation when no --eval_dataset is given."
    )
    max_length: int = option(2048, "Longest row, in tokens.")
    overlong: Literal["truncate", "drop"] = option("truncate", "What happens to rows over max_length.")
    chat_template: str | None = option(
        None, "A Jinja file, or chatml; default: the tokenizer's own template.", path=True
    )
    loss_on: Literal["assistant", "all"] = option("assistant", "Which tokens are supervised: the assistant's, or all.")
    dataset_num_proc: int = option(1, "Processes that tokenize, on each node.")


@dataclass
class BatchSettings:
    """Batch"""

    per_device_train_batch_size: int = option(1, "Rows in one forward pass of one process.")
    global_batch_size: int | None = option(
        None,
        "Rows in one optimizer step over all processes; accumulation follows from it (16 unless accumulation is set).",
    )
    gradient_accumulation_steps: int | None = option(None, "Set accumulation directly instead of --global_batch_size.")
    per_device_eval_batch_size: int = option(8, "Rows in one forward pass of one process during evaluation.")


@dataclass
class TrainingSettings:
    """Training"""

    num_train_epochs: float = option(1.0, "Passes over the training rows.")
    max_steps: int = option(-1, "Optimizer steps; a positive number overrides num_train_epochs.")
    learning_rate: float = option(2e-4, "Peak learning rate.")
    lr_scheduler_type: str = option("linear", "Schedule of the learning rate, by its Transformers name.")
    warmup_steps: float = option(0.0, "Steps of warm-up; below 1, a fraction of all steps.")
    weight_decay: float = option(0.0, "Weight decay.")
    max_grad_norm: float = option(1.0, "Clip gradients to this norm; 0: never.")
    optim: str = option("adamw_torch_fused", "Optimizer, by its Transformers name (adamw_8bit, sgd, ...).")
    gradient_checkpointing: Literal["none", "torch", "unsloth"] = option(
        "torch",
        "Recompute activations: none is fastest, torch saves memory, unsloth also offloads them (unsloth backend).",
    )
    seed: int = option(42, "Seed of the adapter's initial weights, the row order and dropout.")
    ddp_find_unused_parameters: bool = option(False, "For models that skip some trainable weights in a forward pass.")
    ddp_timeout: int = option(1800, "Seconds a collective may take before the run is stopped.")
    use_cpu: bool = option(False, "Train on the CPU even where a GPU is found.")
    trainer_args: dict[str, Any] = option({}, "Any other SFTConfig field, as a mapping (JSON on the command line).")


@dataclass
class OutputSettings:
    """Output"""

    output_dir: str = option("outputs", "Folder of all runs; this run is written to <output_dir>/<run_name>/.")
    run_name: str | None = option(None, "Name of the run; default: model, method and time.")
    overwrite: bool = option(False, "Replace an earlier run of the same name.")
    resume_from_checkpoint: str | None = option(
        None, "A checkpoint folder, or true: the newest one of this run (give its --run_name).", path=True
    )
    logging_steps: int = option(10, "Steps between two log lines.")
    eval_strategy: Literal["auto", "no", "steps", "epoch"] = option(
        "auto", "When to evaluate; auto: at every epoch's end."
    )
    eval_steps: int | None = option(None, "Steps between two evaluations; sets eval_strategy to steps.")
    save_strategy: Literal["no", "steps", "epoch"] = option("steps", "When to write a checkpoint.")
    save_steps: int = option(500, "Steps between two checkpoints.")
    save_total_limit: int | None = option(2, "Checkpoints to keep.")
    report_to: list[str] = option(
        ["tensorboard"], "Trackers by their Transformers names (tensorboard, wandb, ...), or none."
    )
    merge: bool = option(False, "lora and qlora: also write the merged 16-bit model, to <run>/merged/.")
    push_to_hub: bool = option(False, "Upload the finished adapter or model.")
    hub_model_id: str | None = option(None, "Where to upload; default: your account and the run's name.")
    hub_private_repo: bool = option(True, "Create the Hub repository as private.")
    compare_answers: int = option(
        0, "Generate answers to this many evaluation rows before and after, and count exact ones."
    )


@dataclass
class UnslothSettings:
    """Unsloth"""

    compiled_cache_dir: str | None = option(
        None,
        "Folder of Unsloth's compiled modules; default: one of this job's own on each node's local disk.",
        path=True,
    )
    clear_compiled_cache: bool = option(False, "Empty that folder first.")


TOPICS = (
    ModelSettings,
    LoraSettings,
    DataSettings,
    BatchSettings,
    TrainingSettings,
    OutputSettings,
    UnslothSettings,
)


@dataclass
class Settings(
    UnslothSettings, OutputSettings, TrainingSettings, BatchSettings, DataSettings, LoraSettings, ModelSettings
):
    """All options of one run, flat, as they stand in a YAML file."""

    def save(self, path: Path) -> None:
        """Write the resolved settings; `--config <path>` repeats the run."""
        path.write_text(yaml.safe_dump(dataclasses.asdict(self), sort_keys=False), encoding="utf-8")


FIELDS = {f.name: f for f in dataclasses.fields(Settings)}
TYPES = typing.get_type_hints(Settings)


def coerce(name: str, value: Any, source: str) -> Any:
    """`value` as the type of option `name`; a UserError names the value, where it came from and what is accepted."""
    wanted = TYPES[name]
    accepts = _accepted(wanted)

    def refuse() -> NoReturn:
        raise UserError(f"{source}: {name} is {value!r}, but it takes {accepts}.")

    if typing.get_origin(wanted) is types.UnionType:
        if value is None or (isinstance(value, str) and value.lower() in ("none", "null")):
            return None
        wanted = next(t for t in typing.get_args(wanted) if t is not type(None))
    if typing.get_origin(wanted) is Literal:
        # YAML reads an unquoted no as False, and `no` is a strategy.
        value = "no" if value is False else value
        return value if value in typing.get_args(wanted) else refuse()
    if typing.get_origin(wanted) is list:
        items = value if isinstance(value, list) else [value]
        return items if all(isinstance(item, str) for item in items) else refuse()
    if typing.get_origin(wanted) is dict:
        return _mapping(value) if _mapping(value) is not None else refuse()
    if wanted is bool:
        known = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
        return known.get(str(value).lower()) if str(value).lower() in known else refuse()
    if isinstance(value, bool):
        return "true" if wanted is str and value else refuse()
    try:
        number = float(value) if wanted in (int, float) else None
    except (TypeError, ValueError):
        refuse()
    if wanted is int:
        return int(number) if number is not None and number.is_integer() else refuse()
    if wanted is float:
        return number if number == number and abs(number) != float("inf") else refuse()
    return value if isinstance(value, str) and value else refuse()


def _mapping(value: Any) -> dict[str, Any] | None:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError:
            return None
    return value if isinstance(value, dict) else None


def _accepted(wanted: Any) -> str:
    """What an option takes, in words."""
    if typing.get_origin(wanted) is types.UnionType:
        return " or ".join("none" if t is type(None) else _accepted(t) for t in typing.get_args(wanted))
    if typing.get_origin(wanted) is Literal:
        return " or ".join(typing.get_args(wanted))
    if typing.get_origin(wanted) is list:
        return "text, or a list of texts"
    if typing.get_origin(wanted) is dict:
        return "a mapping (JSON on the command line)"
    return {int: "a whole number", float: "a number", bool: "true or false"}.get(wanted, "text")


def unknown_option(name: str, source: str) -> UserError:
    """The refusal of an option that does not exist, with the nearest that does."""
    near = difflib.get_close_matches(name, FIELDS, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else "train_ddp.py --help lists them all."
    return UserError(f"{source}: there is no option {name}; {hint}")


def read_config(path: Path) -> dict[str, Any]:
    """The options of a YAML file, checked. Paths that begin with ./ or ../ are relative to the file."""
    if not path.is_file():
        raise UserError(f"--config {path}: there is no such file; recipes/ holds examples.")
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=_UniqueKeys)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"--config {path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise UserError(f"--config {path} holds no options; write one `name: value` a line.")
    options = {}
    for name, value in content.items():
        if name not in FIELDS:
            raise unknown_option(name, str(path))
        value = coerce(name, value, str(path))
        options[name] = _relative_to(path.parent, value) if FIELDS[name].metadata.get("path") else value
    return options


class _UniqueKeys(yaml.SafeLoader):
    """A YAML loader that refuses an option given twice, where PyYAML silently keeps the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"{key} is given twice", node.start_mark)
        return super().construct_mapping(node, deep)


def _relative_to(folder: Path, value: Any) -> Any:
    if isinstance(value, list):
        return [_relative_to(folder, item) for item in value]
    if isinstance(value, str) and value.startswith(("./", "../")):
        return str((folder / value).resolve())
    return value


class _Parser(argparse.ArgumentParser):
    """argparse that raises instead of printing its usage from every rank."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"command line: {message}.")


def make_parser(description: str) -> argparse.ArgumentParser:
    """The command line: one group of options a topic, each option as text that `coerce` reads."""
    parser = _Parser(
        prog="train_ddp.py",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file of options; the command line wins over it.")
    for topic in TOPICS:
        group = parser.add_argument_group(str(topic.__doc__))
        for f in dataclasses.fields(topic):
            default = f.default if f.default is not dataclasses.MISSING else f.default_factory()  # type: ignore[misc]
            text = f"{f.metadata['help']} [{_shown(default)}]".replace("%", "%%")
            kind = TYPES[f.name]
            if kind is bool:
                group.add_argument(f"--{f.name}", nargs="?", const="true", metavar="BOOL", help=text)
                group.add_argument(
                    f"--no_{f.name}", dest=f.name, action="store_const", const="false", help=argparse.SUPPRESS
                )
            elif typing.get_origin(kind) is list:
                group.add_argument(f"--{f.name}", nargs="+", metavar="NAME", help=text)
            else:
                values = typing.get_args(kind) if typing.get_origin(kind) is Literal else ()
                metavar = "{" + ",".join(values) + "}" if values else "VALUE"
                group.add_argument(f"--{f.name}", metavar=metavar, help=text)
    return parser


def _shown(default: Any) -> str:
    if isinstance(default, list):
        return " ".join(default) or "none"
    return (
        "none"
        if default is None or default == {}
        else str(default).lower()
        if isinstance(default, bool)
        else str(default)
    )


def parse_settings(argv: list[str], description: str = "") -> Settings:
    """The settings of a run from its command line; with neither config, model nor dataset, those of the demo.

    Raises:
        UserError: an unknown option, a value of the wrong type, or settings that contradict each other.
    """
    argv = [_with_underscores(word) for word in argv]
    given, unknown = make_parser(description).parse_known_args(argv)
    if unknown:
        name = unknown[0].split("=")[0]
        if not name.startswith("-"):
            raise UserError(f"command line: {name} stands alone; every value follows an option such as --dataset.")
        raise unknown_option(name.lstrip("-"), "command line")
    on_command_line = {name: coerce(name, v, "command line") for name, v in vars(given).items() if name != "config"}
    config = getattr(given, "config", None)
    if config is None and not {"model", "dataset"} & on_command_line.keys():
        config = DEMO_RECIPE
    options = {**(read_config(Path(config)) if config else {}), **on_command_line}
    settings = Settings(**options)
    check(settings)
    return settings


def _with_underscores(word: str) -> str:
    """--global-batch-size=8 as --global_batch_size=8, so that both spellings work."""
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return "--" + name[2:].replace("-", "_") + equals + value


def check(settings: Settings) -> None:
    """Refuse settings that cannot be meant, with the fix.

    Raises:
        UserError: naming the first contradiction found.
    """
    if not settings.model:
        raise UserError("No model: give --model with a Hub id or a folder.")
    if not settings.dataset:
        raise UserError("No training data: give --dataset with a file or a Hub id.")
    positive = ("lora_r", "lora_alpha", "max_length", "per_device_train_batch_size", "per_device_eval_batch_size")
    positive += ("global_batch_size", "gradient_accumulation_steps", "num_train_epochs", "logging_steps", "eval_steps")
    positive += ("save_steps", "save_total_limit", "dataset_num_proc", "ddp_timeout", "learning_rate")
    for name in positive:
        value = getattr(settings, name)
        if value is not None and value <= 0:
            raise UserError(f"{name} is {value}, but it has to be above 0.")
    for name in ("weight_decay", "max_grad_norm", "warmup_steps", "lora_dropout", "compare_answers", "seed"):
        if getattr(settings, name) < 0:
            raise UserError(f"{name} is {getattr(settings, name)}, but it has to be 0 or above.")
    if settings.max_steps == 0:
        raise UserError("max_steps is 0, so nothing would be trained; give a positive number, or -1 to follow epochs.")
    if settings.lora_dropout >= 1:
        raise UserError(f"lora_dropout is {settings.lora_dropout}, but it is a fraction below 1.")
    if not 0 <= settings.eval_fraction < 1:
        raise UserError(f"eval_fraction is {settings.eval_fraction}, but it is a fraction from 0 to below 1.")
    if settings.eval_fraction and settings.eval_dataset:
        raise UserError("eval_fraction and eval_dataset are both given; keep the one that names your evaluation rows.")
    if settings.merge and settings.method == "full":
        raise UserError("merge is for lora and qlora; method full already writes a whole model, so leave merge out.")
    if settings.run_name and (Path(settings.run_name).name != settings.run_name or settings.run_name in (".", "..")):
        raise UserError(f"run_name {settings.run_name!r} is not a plain folder name; use letters, digits, - and _.")
