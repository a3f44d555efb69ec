"""Name settings that do nothing beside others, and valid settings with which a run learns little."""

from pathlib import Path

from unsloth_ddp.config.options import Settings
from unsloth_ddp.utils.files.sources import read_source
from unsloth_ddp.utils.units import counted

# The learning rates of recipes/ for adapters and for every parameter.
USUAL_RATE = {"lora": 2e-4, "qlora": 2e-4, "full": 1e-5}
# Those of runs on preferences: of recipes/ for adapters, TRL's default for every parameter.
USUAL_PREFERENCE_RATE = {"lora": 2e-5, "qlora": 2e-5, "full": 1e-6}
# Times more or less than that are worth a sentence; a method's rate given to the other is.
FAR = 19.0
FEW_STEPS = 10
MANY_CUT = 0.5


def questionable_settings(
    settings: Settings,
    *,
    steps: int,
    steps_per_epoch: int | None,
    rows: int | None,
    rows_per_step: float,
    truncated: int,
    unsupervised: int,
    cut_answers: int,
) -> list[str]:
    """Return a sentence for each setting that leaves little to learn from this run.

    Args:
        steps: Optimizer steps of the whole run.
        steps_per_epoch: None where the rows are streamed and their number is not known.
        rows: Training rows after dropping, None where they are streamed.
        rows_per_step: Rows (not packs) that one optimizer step takes, over all processes.
        truncated: Rows over max_length that were cut.
        unsupervised: Rows without a supervised token, of a stream among its first rows.
        cut_answers: Those of them that were over max_length.
    """
    sentences = []
    warmup, rate = settings.warmup_steps, settings.learning_rate
    # A short run has a sentence of its own.
    if warmup >= 1 and warmup >= steps >= FEW_STEPS and settings.lr_scheduler_type != "constant":
        sentences.append(
            f"warmup_steps {warmup:g} is not below the {counted(steps, 'step')} of the run, so learning_rate is never "
            "reached; give fewer, or a fraction of all steps such as 0.05."
        )
    usual = (USUAL_PREFERENCE_RATE if settings.trains_preferences else USUAL_RATE)[settings.method]
    if "adam" in settings.optim and not usual / FAR < rate < usual * FAR:
        sentences.append(
            f"learning_rate {rate:g} is {'high' if rate > usual else 'low'} for method {settings.method} with "
            f"{settings.optim}; {usual:g} is usual."
        )
    if rows is not None and rows_per_step > rows and steps_per_epoch == 1:
        sentences.append(
            f"A step takes {counted(round(rows_per_step), 'row')}, more than the {rows:,} of the set, so an epoch is "
            "one step; lower --global_batch_size."
        )
    if rows and truncated >= MANY_CUT * rows:
        sentences.append(
            f"max_length {settings.max_length} cuts {truncated:,} of {counted(rows, 'row')}, so their ends are not "
            "learned; raise --max_length."
        )
    if unsupervised:
        fix = "remove such rows"
        if cut_answers:
            answers = counted(cut_answers, "answer")
            fix = f"max_length {settings.max_length} cuts off {answers}, so raise it, or give --overlong drop"
        sentences.append(f"Nothing is learned from {counted(unsupervised, 'row')} without a supervised token; {fix}.")
    if steps < FEW_STEPS:
        # max_steps, where given, is the length of the run, whatever the epochs and the batch are.
        more = "--max_steps" if settings.max_steps > 0 else "--num_train_epochs or lower --global_batch_size"
        sentences.append(
            f"The run has {counted(steps, 'optimizer step')}, which is little to learn from; raise {more}."
        )
    trained = {_whole_name(text, settings.dataset_split) for text in settings.dataset}
    both = [text for text in settings.eval_dataset if _whole_name(text, settings.eval_dataset_split) in trained]
    if both:
        sentences.append(
            f"eval_dataset {both[0]} is trained on too, so its loss does not show what the model does with other rows; "
            "give other rows, or --eval_fraction."
        )
    return sentences


def _whole_name(text: str, split: str) -> tuple[str, str]:
    """Return the same for the same slice of a file, or for the same split of a Hub dataset."""
    source = read_source(text)
    path = Path(source.name).expanduser()
    if path.exists():
        return str(path.resolve()), source.split_of("")
    return f"{source.name}@{source.subset}", source.split_of(split)


# The options of an adapter.
ADAPTER = (
    "lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_target_parameters", "lora_modules_to_save",
    "lora_trainable_tokens", "use_rslora",
)  # fmt: skip


def ignored_settings(settings: Settings) -> list[str]:
    """Return a sentence for each option with another value than its default that has no effect in this run."""
    reasons: dict[str, str] = {}
    if settings.method == "full":
        reasons |= dict.fromkeys(ADAPTER, "method full trains every weight, without an adapter")
    else:
        reasons["full_weights"] = f"method {settings.method} trains an adapter, and it is for method full"
    if not settings.push_to_hub:
        reasons |= dict.fromkeys(("hub_model_id", "hub_private_repo"), "nothing is uploaded without --push_to_hub")
    if settings.save_strategy != "steps":
        reasons["save_steps"] = f"save_strategy is {settings.save_strategy}"
    if settings.early_stopping_patience:
        early = "with early_stopping_patience a checkpoint is written at each evaluation"
        reasons |= dict.fromkeys(("save_strategy", "save_steps"), early)
    if settings.lr_scheduler_type == "constant":
        reasons["warmup_steps"] = "the schedule constant has no warm-up; constant_with_warmup has one"
    standard = Settings()
    passed = []
    if settings.trainer_args.get("ddp_broadcast_buffers") and not settings.ddp_find_unused_parameters:
        passed.append(
            "trainer_args ddp_broadcast_buffers is ignored: a rank may repeat a step alone; it has an effect with "
            "--ddp_find_unused_parameters."
        )
    return passed + [
        f"{name} {_shown(getattr(settings, name))} is ignored: {why}."
        for name, why in reasons.items()
        if getattr(settings, name) != getattr(standard, name)
    ]


def _shown(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
