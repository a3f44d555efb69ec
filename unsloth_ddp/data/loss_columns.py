"""Obey columns that say which messages are learned, and refuse those whose meaning is not clear. Pure functions."""

from collections.abc import Mapping
from typing import Any

from unsloth_ddp.data.sources.messages import directs_loss, is_loss_flag
from unsloth_ddp.data.sources.values import from_json, is_empty
from unsloth_ddp.utils.errors import UserError

# The lists that say for each message whether it is learned; 1 is yes, although the name is that of a mask.
MASK = "loss_mask"
# The key of a message that has the flag of a column.
KEY = "is_in_loss"
WRITE_FLAGS = "write train: false into the messages that are not to be learned, and remove the column"
# Flags as a CSV file has them.
WRITTEN = {"0": 0, "false": 0, "0.0": 0, "1": 1, "true": 1, "1.0": 1}


def loss_directions(columns: Mapping[str, Any]) -> dict[str, list[int] | None]:
    """Return the columns that direct the loss, with the flags of the messages; None where the whole row is learned.

    Args:
        columns: of a row, without those of its format.

    Raises:
        UserError: a row that is not to be learned, or a direction that is not read.
    """
    directions: dict[str, list[int] | None] = {}
    for name, value in columns.items():
        if is_empty(value) or not directs_loss(name):
            continue
        flag = value
        if isinstance(value, str):
            # As a CSV file has it.
            is_list = value.lstrip().startswith("[")
            flag = from_json(value, name[:100]) if is_list else WRITTEN.get(value.strip().lower())
        if flag is None or isinstance(flag, dict):
            continue  # a text, such as the name of a train
        flags = flag if isinstance(flag, list) else [flag]
        if not all(isinstance(item, bool | int | float) and item in (0, 1) for item in flags) or not _is_read(name):
            if isinstance(flag, list) or flag:
                raise UserError(
                    f"the row has {name[:100]} ({str(value)[:40]}), which says what is learned and is not read; "
                    f"{WRITE_FLAGS}."
                )
            continue  # nothing is masked
        if isinstance(flag, list):
            directions[name] = [int(item) for item in flag]
        elif flag:
            directions[name] = None
        else:
            raise UserError(f"the row has {name[:100]} {str(value)[:20]}, so it is not to be learned; remove it.")
    return directions


def _is_read(name: str) -> bool:
    """Return whether 1 under a name means that something is learned."""
    if name.lower().replace("-", "_") == MASK:
        return True
    try:
        return is_loss_flag(name)
    except UserError:
        return False


def with_loss_flags(turns: list[Any], directions: Mapping[str, list[int] | None]) -> list[Any]:
    """Return the turns of a row with the flags of its columns.

    Raises:
        UserError: there are not as many flags as turns.
    """
    for name, flags in directions.items():
        if flags is None:
            continue
        if len(flags) != len(turns):
            raise UserError(
                f"the row has {len(flags)} values in {name[:100]} and {len(turns)} messages; give one for each, or "
                f"{WRITE_FLAGS}."
            )
        turns = [
            {**turn, KEY: flag} if isinstance(turn, dict) else turn for turn, flag in zip(turns, flags, strict=True)
        ]
    return turns
