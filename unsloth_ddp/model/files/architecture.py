"""Refuse a model whose architecture the installed Transformers does not have, and name a way to train it."""

import re
from importlib import metadata
from pathlib import Path
from typing import Any

from unsloth_ddp.utils.errors import UserError

# Files of Transformers that list the types of models. They are read as text: Transformers must not precede Unsloth.
LISTS_OF_TYPES = ("auto_mappings.py", "configuration_auto.py")


def check_architecture(model: str, config: dict[str, Any] | None) -> None:
    """Refuse a model_type that neither Transformers nor code of the model defines.

    Args:
        config: content of the model's config.json; None if it cannot be read yet.

    Raises:
        UserError: with the releases that wrote the config, is installed, and is the newest for Unsloth; a command.
    """
    config = config or {}
    kind, code = config.get("model_type"), config.get("auto_map")
    if not isinstance(kind, str) or (isinstance(code, dict) and "AutoConfig" in code) or _is_listed(kind):
        return
    installed, wrote = metadata.version("transformers"), str(config.get("transformers_version") or "")
    # A development version is no release.
    is_newer = bool(re.fullmatch(r"\d+(\.\d+)+", wrote)) and _parts(wrote) > _parts(installed)
    raise UserError(
        f"model {model} is of type {kind[:100]}, which Transformers {installed} does not have"
        f"{f' (its config.json asks for {wrote[:30]})' if wrote else ''}{_limit_of_unsloth()}; train it without "
        "Unsloth: add --backend transformers, and begin the command with uv run --with "
        f"'transformers>{'=' + wrote if is_newer else installed}' python -m accelerate.commands.launch instead of "
        "accelerate launch."
    )


def _is_listed(kind: str) -> bool:
    folder = Path(str(metadata.distribution("transformers").locate_file("transformers/models/auto")))
    files = [folder / name for name in LISTS_OF_TYPES if (folder / name).is_file()]
    return not files or any(f'"{kind}"' in path.read_text(encoding="utf-8") for path in files)


def _limit_of_unsloth() -> str:
    try:
        requirements = metadata.requires("unsloth") or []
    except metadata.PackageNotFoundError:
        return ""
    limits = (re.match(r"transformers\b[^;]*?<=?([\d.]+)", line) for line in requirements)
    newest = next((limit[1] for limit in limits if limit), None)
    return f"; Unsloth {metadata.version('unsloth')} takes none newer than {newest}" if newest else ""


def _parts(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)]
