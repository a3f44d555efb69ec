"""Port the keys of a file, by the table of aliases and a few rules for keys that say more than one thing."""

import re
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, get_args

from unsloth_ddp.config.aliases import ALIASES, OTHER_VALUES, TOOLS
from unsloth_ddp.config.options import OPTIONS, TYPES, Settings
from unsloth_ddp.config.questionable import ADAPTER
from unsloth_ddp.config.trainer_args import OWNED_ARGS, RefusedField, check_trainer_args
from unsloth_ddp.config.upstream_names import known_names, other_trl_configs, sft_config_fields
from unsloth_ddp.data.sources.rows import is_file
from unsloth_ddp.port.ported import Ported
from unsloth_ddp.port.rows import plain_path, port_mappings, port_names
from unsloth_ddp.utils.errors import UserError
from unsloth_ddp.utils.files.sources import read_source

AXOLOTL, LLAMA_FACTORY, TRL = TOOLS["A"], TOOLS["L"], TOOLS["T"]
PORTED_TOOLS = {"axolotl": AXOLOTL, "llamafactory": LLAMA_FACTORY, "trl": TRL}

# What each tool does where its file says nothing and the kit does otherwise: axolotl's schemas, LLaMA-Factory's hparams
# with Transformers' TrainingArguments, TRL's SFTConfig and ModelConfig.
DEFAULTS: dict[str, dict[str, Any]] = {
    AXOLOTL: {
        "method": "full", "max_length": 512, "overlong": "drop", "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 1, "lr_scheduler_type": "cosine", "warmup_steps": 0.03, "save_strategy": "epoch",
    },
    LLAMA_FACTORY: {
        "lora_r": 8, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "num_train_epochs": 3.0,
        "learning_rate": 5e-5,
    },
    TRL: {
        "method": "full", "max_length": 1024, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1,
        "num_train_epochs": 3.0, "learning_rate": 2e-5, "lora_alpha": 32, "lora_dropout": 0.05,
    },
}  # fmt: skip
# A file with one of these asks for something else than supervised fine-tuning of all weights, LoRA or QLoRA.
TASK_KEYS = ("task", "stage", "rl")
REFUSED = ("stage", "rl", "adapter", "finetuning_type", "reward_model", "pretraining_dataset", "relora")
# The losses of TRL's supervised fine-tuning, and those of its DPO that are offered here.
SFT_LOSSES = ("nll", "chunked_nll", "dft")
PAIR_LOSSES = get_args(TYPES["preference_loss"])


def detect_tool(content: Mapping[str, Any]) -> str:
    """Return the tool that most keys of a file belong to.

    Raises:
        UserError: it is not a file of a tool that can be ported.
    """
    counts = Counter(letter for key in content if key in ALIASES for letter in ALIASES[key].tools if letter in "ALT")
    if not counts:
        raise UserError(
            "its keys are those of none of axolotl, LLaMA-Factory and TRL; name the tool with --tool, or see "
            "docs/keys.md."
        )
    return TOOLS[counts.most_common(1)[0][0]]


def task_of_trl(content: Mapping[str, Any]) -> str:
    """Return dpo or kto for a file of TRL with keys or a loss of DPOTrainer or KTOTrainer, and sft for others.

    Raises:
        UserError: the file is for a trainer that has no counterpart (named with its keys), or has a loss that is not
            offered.
    """
    keys_by_config = {name: [key for key in content if key in fields] for name, fields in other_trl_configs().items()}
    most_keys = max(map(len, keys_by_config.values()), default=0)
    configs = [
        name for name, keys_of_config in keys_by_config.items() if keys_of_config and len(keys_of_config) == most_keys
    ]
    losses = losses_of(content)
    if losses == ["kto"] or configs == ["KTOConfig"]:
        if other := [loss for loss in losses if loss != "kto"]:
            raise UserError(f"loss_type {other[0][:100]} is not offered; the loss of labelled answers is kto.")
        return "kto"
    if "DPOConfig" in configs and (configs == ["DPOConfig"] or losses):
        if other := [loss for loss in losses if loss not in (*PAIR_LOSSES, "sft")]:
            raise UserError(
                f"loss_type {other[0][:100]} is not offered; the losses of pairs are {', '.join(PAIR_LOSSES)}."
            )
        return "dpo"
    if most_keys:
        keys = next(keys for keys in keys_by_config.values() if len(keys) == most_keys)
        raise UserError(
            f"{', '.join(keys)} {'is' if most_keys == 1 else 'are'} for TRL's {', '.join(configs)}, and port reads "
            "files for SFTConfig, DPOConfig and KTOConfig; a loss_type of DPO or KTO says which."
        )
    if losses and all(loss in (*PAIR_LOSSES, "sft") for loss in losses):
        return "dpo"
    if other := [loss for loss in losses if loss not in SFT_LOSSES]:
        raise UserError(
            f"loss_type {other[0][:100]} is for another trainer of TRL, and port reads files for SFTConfig, DPOConfig "
            "and KTOConfig."
        )
    return "sft"


def losses_of(content: Mapping[str, Any]) -> list[str]:
    """Return the losses that loss_type names."""
    named = content.get("loss_type", [])
    return [str(loss) for loss in (named if isinstance(named, list) else [named])]


def port(content: Mapping[str, Any], tool: str, folder: Path) -> Ported:
    """Return the kit's options for the content of a file of `tool`.

    Raises:
        UserError: the file asks for something that the kit does not do.
    """
    content = {key: value for key, value in content.items() if value not in (None, "", [], {})}
    ported = Ported(tool, folder, content)
    if tool == TRL:
        task = task_of_trl(content)
        ported.add({"task": task}, "the trainer")
        ported.left_out["the trainer"] = f"TRL's files do not name it; this is the run of trl {task}"
    # The task first, since how rows and other keys are read depends on it.
    for key, value in sorted(content.items(), key=lambda item: item[0] not in TASK_KEYS):
        rule = RULES.get(key)
        if rule:
            rule(ported, key, value)
        elif key in WITH_ANOTHER:
            continue
        elif key in ALIASES:
            _port_alias(ported, key, value)
        elif key in OPTIONS:
            ported.add({key: value}, key)
        elif key in OWNED_ARGS:
            if value is not False:
                ported.left_out[key] = OWNED_ARGS[key]
        # TRL refuses tf32 where the GPU has none, even if it is off.
        elif key in sft_config_fields() and (key, value) != ("tf32", False):
            ported.options.setdefault("trainer_args", {})[key] = value
        elif value is not False:
            ported.left_out[key] = "the kit has no such option"
    _complete(ported)
    _leave_out_refused(ported)
    return ported


def _leave_out_refused(ported: Ported) -> None:
    """Leave out fields for trainer_args that the kit refuses."""
    while ported.options.get("trainer_args"):
        try:
            check_trainer_args(Settings(**ported.options))
            return
        except RefusedField as refused:
            del ported.options["trainer_args"][refused.name]
            ported.left_out[refused.name] = str(refused).removeprefix(f"trainer_args: {refused.name} ").rstrip(".")
    ported.options.pop("trainer_args", None)


def _port_alias(ported: Ported, key: str, value: Any) -> None:
    options = ALIASES[key].translate(value)
    if options is not None:
        ported.add(options, key)
    elif value is False and key not in REFUSED:
        return
    elif key in REFUSED:
        raise UserError(f"{key} {str(value)[:100]} cannot be ported: {ALIASES[key].note}.")
    else:
        ported.left_out[key] = ALIASES[key].note


# Keys that say something only together with another one, whose rule reads them.
WITH_ANOTHER = (
    "dataset_dir", "max_samples", "interleave_probs", "mix_strategy", "loss_weights", "disable_dropout",
)  # fmt: skip
Rule = Callable[[Ported, str, Any], None]


def _run_folder(ported: Ported, key: str, value: Any) -> None:
    """Other tools write a run to output_dir itself, the kit to <output_dir>/<run_name>."""
    folder = Path(plain_path(str(value)))
    if ported.content.get("run_name") or not folder.name:
        ported.add({"output_dir": str(folder)}, key)
    else:
        ported.add({"output_dir": str(folder.parent), "run_name": folder.name}, key)


def _recompute(ported: Ported, key: str, value: Any) -> None:
    if str(value).lower() in ("offload", "unsloth"):
        ported.add({"gradient_checkpointing": "unsloth"}, key)
    elif value is not False:
        ported.left_out[key] = "the kit recomputes activations where they do not fit (gradient_checkpointing auto)"


def _sharding(ported: Ported, key: str, value: Any) -> None:
    named_stage = re.search(r"(?:zero|z|stage)[_-]?([0-3])", str(value).lower()) if key == "deepspeed" else None
    stage = named_stage[1] if named_stage else ""
    if key == "deepspeed":
        ported.launch_config = {"0": "ddp", "3": "zero3"}.get(stage, "zero2")
    elif value:
        ported.launch_config = "fsdp2"
    instead = f"ZeRO-{stage} is not offered; " if stage in ("0", "1") else ""
    ported.left_out[key] = f"{instead}start with accelerate_configs/{ported.launch_config}.yaml"
    if key == "deepspeed" and "offload" in str(value).lower() and ported.launch_config != "ddp":
        ported.left_out[key] += f"; {ported.launch_config}_offload.yaml uses host memory too"


def _wandb(ported: Ported, key: str, value: Any) -> None:
    ported.add({"report_to": ["wandb"]}, key)
    ported.left_out[key] = f"set {key.upper()} in the environment"


def _template(ported: Ported, key: str, value: Any) -> None:
    if value == "chatml":
        ported.add({"chat_template": "chatml"}, key)
    elif value != "tokenizer_default":
        ported.left_out[key] = ALIASES["template"].note


def _split_names(option: str, ported: Ported, key: str, value: Any) -> None:
    names = [part.strip() for part in value.split(",")] if isinstance(value, str) else value
    ported.add({option: ["all-linear"] if names in (["all"], ["all-linear"]) else names}, key)


def _a_number_per_epoch(strategy: str, ported: Ported, key: str, value: Any) -> None:
    ported.add({strategy: "epoch" if value else "no"}, key)
    if value not in (0, 1):
        ported.left_out[key] = f"once an epoch instead of {value} times; give {strategy.split('_')[0]}_steps for more"


def _dataset_names(ported: Ported, key: str, value: Any) -> None:
    if ported.tool == LLAMA_FACTORY:
        port_names(ported, key, value)
    else:
        ported.add({key: [plain_path(str(item)) for item in (value if isinstance(value, list) else [value])]}, key)


def _dataset_name(ported: Ported, key: str, value: Any) -> None:
    """TRL evaluates on the test split of the training data, where it evaluates at all."""
    ported.add({"dataset": [plain_path(str(value))]}, key)
    if ported.content.get("eval_strategy", "no") not in ("no", False):
        ported.add({"eval_dataset": [plain_path(str(value))]}, key)


def _model(ported: Ported, key: str, value: Any) -> None:
    ported.add({"model": plain_path(str(value))}, key)


def _upstream_name(option: str, ported: Ported, key: str, value: Any) -> None:
    name = OTHER_VALUES[option].get(str(value).lower(), value)
    if (names := known_names(option)) and name not in names:
        ported.left_out[key] = f"{str(value)[:100]} is not a name that Transformers knows; the default is used"
    else:
        ported.add({option: name}, key)


def _warmup(ported: Ported, key: str, value: Any) -> None:
    """warmup_steps wins over warmup_ratio, as in Transformers."""
    if not ported.content.get("warmup_steps"):
        ported.add({"warmup_steps": value}, key)


def _pair_loss(ported: Ported, key: str, value: Any) -> None:
    """TRL's loss of a pair or of a labelled answer, with sft beside it for the cross entropy of the chosen answers."""
    if ported.options.get("task") == "kto":
        return
    losses, weights = (
        losses_of(ported.content),
        ported.content.get("loss_weights") or [1.0] * len(losses_of(ported.content)),
    )
    weight_of = dict(zip(losses, weights if isinstance(weights, list) else [weights], strict=False))
    if ported.options.get("task") != "dpo":
        ported.options.setdefault("trainer_args", {})[key] = value
        return
    of_pairs = [loss for loss in losses if loss != "sft"]
    if len(of_pairs) != 1 or weight_of.get(of_pairs[0], 1.0) != 1.0:
        raise UserError(
            f"loss_type {losses} with loss_weights {weights}: one loss of weight 1 is offered, and sft beside it."
        )
    ported.add({"preference_loss": of_pairs[0]}, key)
    if "sft" in weight_of:
        ported.add({"sft_weight": weight_of["sft"]}, key)


def _leave_out(why: str, ported: Ported, key: str, value: Any) -> None:
    ported.left_out[key] = why


RULES: dict[str, Rule] = {
    "output_dir": _run_folder,
    "gradient_checkpointing": _recompute,
    "gradient_checkpointing_kwargs": _recompute,
    "attn_implementation": partial(_leave_out, ALIASES["flash_attention"].note),
    "deepspeed": _sharding,
    "fsdp": _sharding,
    "fsdp_config": _sharding,
    "fsdp_version": _sharding,
    "wandb_project": _wandb,
    "wandb_name": _wandb,
    "chat_template": _template,
    "lora_target": partial(_split_names, "lora_target_modules"),
    "lora_target_modules": partial(_split_names, "lora_target_modules"),
    "lora_target_parameters": partial(_split_names, "lora_target_parameters"),
    "additional_target": partial(_split_names, "lora_modules_to_save"),
    "evals_per_epoch": partial(_a_number_per_epoch, "eval_strategy"),
    "saves_per_epoch": partial(_a_number_per_epoch, "save_strategy"),
    "datasets": partial(port_mappings, "dataset"),
    "test_datasets": partial(port_mappings, "eval_dataset"),
    "dataset": _dataset_names,
    "eval_dataset": _dataset_names,
    "dataset_name": _dataset_name,
    "base_model": _model,
    "model_name_or_path": _model,
    "optimizer": partial(_upstream_name, "optim"),
    "optim": partial(_upstream_name, "optim"),
    "lr_scheduler": partial(_upstream_name, "lr_scheduler_type"),
    "lr_scheduler_type": partial(_upstream_name, "lr_scheduler_type"),
    "warmup_ratio": _warmup,
    "loss_type": _pair_loss,
    "env": partial(_leave_out, "set these variables in the environment"),
}


def _complete(ported: Ported) -> None:
    """Add the tool's own defaults, and take out what contradicts the rest."""
    options = ported.options
    if renamed := [f"{old}={new}" for old, (new, _) in ported.columns.items() if old != new]:
        ported.add({"columns": renamed}, "columns")
    if ported.revisions:
        sources = [read_source(text).name for text in (*options.get("dataset", []), *options.get("eval_dataset", []))]
        names = [name for name in dict.fromkeys(sources) if not is_file(name)]
        ported.add({"dataset_revision": [ported.revisions.get(name, "main") for name in names]}, "revision")
    of_task = {"learning_rate": 1e-6} if ported.tool == TRL and options["task"] != "sft" else {}
    for option, value in {**DEFAULTS[ported.tool], **of_task}.items():
        options.setdefault(option, value)
    if options.get("task", "sft") != "sft":
        _fit_task(ported)
    if ported.tool == LLAMA_FACTORY:
        options.setdefault("lora_alpha", 2 * options["lora_r"])
        options.setdefault("method", "lora")
        if options["method"] == "qlora" and ported.content.get("finetuning_type") == "full":
            raise UserError("finetuning_type full with quantization_bit contradict each other; remove one of them.")
    if options["method"] == "full":
        for option in ADAPTER:
            options.pop(option, None)
    if ported.tool == TRL and "loss_on" not in options and options["task"] == "sft":
        ported.left_out["loss_on"] = (
            "TRL trains on every token of chats unless assistant_only_loss is set, the kit on the assistant's; give "
            "loss_on all for TRL's way"
        )
    evaluated = options.get("eval_dataset") or options.get("eval_fraction")
    strategy = options.get("eval_strategy")
    if not evaluated and options.pop("early_stopping_patience", None):
        ported.left_out["early_stopping_patience"] = "there are no evaluation rows; give eval_dataset or eval_fraction"
    if strategy in ("steps", "epoch") and not evaluated:
        del options["eval_strategy"]
        options.pop("eval_steps", None)
        ported.left_out["eval_strategy"] = "there are no evaluation rows; give eval_dataset or eval_fraction"
    elif strategy in ("no", "epoch") and "eval_steps" in options:
        del options["eval_steps"]
    _fit_sharding(ported)
    for option in ("model", "dataset"):
        if not options.get(option):
            ported.to_do.append(f"The file names no {option}; give --{option}.")


def _fit_task(ported: Ported) -> None:
    """Take out what the kit refuses when it compares answers, so that the result runs."""
    for option, refused in (("packing", "on"), ("loss_on", "all")):
        if ported.options.get(option) == refused:
            del ported.options[option]
            ported.left_out[option] = f"it does not work with task {ported.options['task']}"


def _fit_sharding(ported: Ported) -> None:
    """Change what the kit refuses with the sharding of the file, so that the result runs."""
    options = ported.options
    if ported.launch_config == "zero3" and options["method"] == "qlora":
        ported.launch_config = "fsdp2"
        ported.left_out["deepspeed"] = (
            "start with accelerate_configs/fsdp2.yaml, since ZeRO-3 cannot gather packed 4-bit weights"
        )
    if ported.launch_config == "zero3" and options["method"] == "full" and options.get("backend") != "transformers":
        options["backend"] = "transformers"
        ported.left_out["backend"] = "transformers, since full training with ZeRO-3 is wrong with Unsloth"
    if ported.launch_config in ("zero3", "fsdp2") and options.get("gradient_checkpointing") == "unsloth":
        options["gradient_checkpointing"] = "torch"
        ported.left_out["gradient_checkpointing"] = (
            f"torch, since unsloth cannot be combined with {ported.launch_config}"
        )
