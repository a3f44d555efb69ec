"""Name options that do nothing beside the others that were given."""

from __future__ import annotations

from unsloth_ddp.config.options import Settings

# The options of an adapter.
ADAPTER = (
    "lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_target_parameters", "lora_modules_to_save",
    "use_rslora",
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
        f"{name} {_shown(getattr(settings, name))} is ignored: {reason}."
        for name, reason in reasons.items()
        if getattr(settings, name) != getattr(standard, name)
    ]


def _shown(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
