"""Tell which task a file of TRL asks for, since TRL's files do not name their trainer."""

from collections.abc import Mapping
from typing import Any, get_args

from unsloth_ddp.config.options import TYPES
from unsloth_ddp.config.upstream_names import other_trl_configs
from unsloth_ddp.utils.errors import UserError

# The losses of TRL's supervised fine-tuning, and those of its DPO and KTO that are offered here.
SFT_LOSSES = ("nll", "chunked_nll", "dft")
PAIR_LOSSES = get_args(TYPES["preference_loss"])
KTO_LOSSES = ("kto",)


def task_of_trl(given: Mapping[str, Any]) -> str:
    """Return dpo or kto for a file of TRL that has keys of DPOTrainer or KTOTrainer, or a loss of theirs; otherwise sft.

    Raises:
        UserError: the file is for a trainer that has no counterpart, with the keys and the trainers' configs that have the most
            of them; or it has a loss that is not offered.
    """
    own = {name: [key for key in given if key in fields] for name, fields in other_trl_configs().items()}
    most = max(map(len, own.values()), default=0)
    configs = [name for name, found in own.items() if found and len(found) == most]
    losses = losses_of(given)
    if losses == [*KTO_LOSSES] or configs == ["KTOConfig"]:
        if other := [loss for loss in losses if loss not in KTO_LOSSES]:
            raise UserError(f"loss_type {other[0][:100]} is not offered; the loss of labelled answers is kto.")
        return "kto"
    if "DPOConfig" in configs and (configs == ["DPOConfig"] or losses):
        if other := [loss for loss in losses if loss not in (*PAIR_LOSSES, "sft")]:
            raise UserError(
                f"loss_type {other[0][:100]} is not offered; the losses of pairs are {', '.join(PAIR_LOSSES)}."
            )
        return "dpo"
    if most:
        keys = next(keys for keys in own.values() if len(keys) == most)
        raise UserError(
            f"{', '.join(keys)} {'is' if most == 1 else 'are'} for TRL's {', '.join(configs)}, and port reads files for SFTConfig, "
            "DPOConfig and KTOConfig; a loss_type of DPO or KTO says which."
        )
    if losses and all(loss in (*PAIR_LOSSES, "sft") for loss in losses):
        return "dpo"
    if other := [loss for loss in losses if loss not in SFT_LOSSES]:
        raise UserError(
            f"loss_type {other[0][:100]} is for another trainer of TRL, and port reads files for SFTConfig, DPOConfig and KTOConfig."
        )
    return "sft"


def losses_of(given: Mapping[str, Any]) -> list[str]:
    """Return the losses that loss_type names."""
    named = given.get("loss_type", [])
    return [str(loss) for loss in (named if isinstance(named, list) else [named])]
