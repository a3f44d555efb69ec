"""Port the data sets of a file: lists of mappings (axolotl, TRL), and names in dataset_info.json (LLaMA-Factory)."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unsloth_ddp.data.sources.rows import is_file
from unsloth_ddp.port.ported import Ported
from unsloth_ddp.utils.errors import UserError

# Kinds of rows that the kit tells apart by the names of their columns.
KNOWN_KINDS = ("alpaca", "chat_template", "sharegpt", "completion")
# Kinds of pairs and labelled answers, likewise.
KNOWN_PREFERENCES = ("chat_template", "chatml", "llama3", "orpo")
TEXT_COLUMNS = ("field", "text_column")
# Names of a message's role and text, and the columns in which the kit reads messages with these names.
OPENAI, SHAREGPT = ("role", "content"), ("from", "value")
CHAT_COLUMNS = {OPENAI: ("messages", "conversations"), SHAREGPT: ("conversations",)}
NOT_NEEDED = ("path", "type", "split", "name", "data_files", "ds_type", "trust_remote_code", "conversation", "field_messages",
              "message_field_role", "message_field_content", "message_property_mappings", *TEXT_COLUMNS)  # fmt: skip
# Values that ask for what the kit does: it trains the assistant's turns, each with the token that ends it.
AS_HERE = {
    "roles_to_train": (["assistant"], ["gpt"], ["gpt", "assistant"], ["assistant", "gpt"]),
    "train_on_eos": ("turn",),
}
# Of LLaMA-Factory's data sets: the columns that the kit reads too.
KNOWN_LLAMA_FACTORY = {
    "prompt": ("instruction",), "query": ("input",), "response": ("output",), "messages": ("messages", "conversations"),
    "system": ("system",), "tools": ("tools",), "chosen": ("chosen",), "rejected": ("rejected",),
    "kto_tag": ("kto_tag", "label"), "images": ("images", "image"),
}  # fmt: skip


def plain_path(value: str) -> str:
    """Return a path relative to the working directory as the kit's files have it, where ./ means the file's folder."""
    if value.startswith("../"):
        return str(Path(value).resolve())
    return os.path.normpath(value) if value.startswith("./") else value


def port_mappings(option: str, ported: Ported, name: str, entries: Any, given: Mapping[str, Any]) -> None:
    """Port a list of data sets, each a mapping with path, type, split and name, for an option."""
    entries = entries if isinstance(entries, list) else [entries]
    if not all(isinstance(entry, dict) and isinstance(entry.get("path"), str) for entry in entries):
        raise UserError(f"{name} is not a list of mappings with a path, so the file cannot be ported.")
    sources: list[str] = []
    for entry in entries:
        sources += _sources(ported, name, entry)
        _note_columns(ported, f"{name} {entry['path']}", entry)
    ported.add({option: sources}, name)
    splits = {str(entry["split"]) for entry in entries if entry.get("split")}
    configs = {str(entry["name"]) for entry in entries if entry.get("name")}
    for found, target in ((splits, f"{option}_split"), (configs, "dataset_config")):
        if len(found) == 1:
            ported.add({target: found.pop()}, name)
        elif found:
            ported.to_do.append(
                f"{name} has several values for {target} ({', '.join(sorted(found))}); a run takes one."
            )


def _sources(ported: Ported, name: str, entry: dict[str, Any]) -> list[str]:
    files = entry.get("data_files") or []
    files = files if isinstance(files, list) else [files]
    if not files:
        return [plain_path(entry["path"])]
    if is_file(entry["path"]):
        return [str(Path(plain_path(entry["path"])) / str(file)) for file in files]
    if entry["path"] in ("json", "csv", "parquet"):
        return [plain_path(str(file)) for file in files]
    ported.to_do.append(
        f"{name}: of {entry['path']} only {', '.join(map(str, files))} is meant; download it and name it."
    )
    return [entry["path"]]


def _note_columns(ported: Ported, name: str, entry: dict[str, Any]) -> None:
    kind = entry.get("type") or "chat_template"
    base = kind.split(".")[0].split(":")[0] if isinstance(kind, str) else "a mapping"
    if (task := ported.options.get("task", "sft")) != "sft":
        if base not in KNOWN_PREFERENCES:
            columns = "prompt, completion and label" if task == "kto" else "prompt, chosen and rejected"
            ported.to_do.append(f"{name} is of type {base}; give its rows the columns {columns}.")
        return
    if base not in KNOWN_KINDS:
        ported.to_do.append(
            f"{name} is of type {base}, which the kit does not know; give its rows the columns messages, or instruction and "
            "output, or prompt and completion, or text."
        )
    if base == "alpaca":
        ported.left_out[name] = "rows with instruction and output become chats in the model's template, not in Alpaca's"
    if base == "completion":
        ported.add({"loss_on": "all"}, name)
    for key in TEXT_COLUMNS:
        if entry.get(key) not in (None, "", "text"):
            ported.to_do.append(f"{name} has its rows in the column {entry[key]}; rename it text.")
    if base in ("chat_template", "sharegpt") and (renamed := _renamed(entry, base)):
        ported.to_do.append(f"{name}: rename {renamed}.")
    others = [
        key for key, value in entry.items() if value and key not in NOT_NEEDED and value not in AS_HERE.get(key, ())
    ]
    if others:
        ported.left_out[f"{name}: {', '.join(others)}"] = "the kit has no such option for a dataset"


def _renamed(entry: dict[str, Any], base: str) -> str:
    """Return what to rename in a dataset of chats so that the kit reads it; "" where nothing has to be."""
    mapped = entry.get("message_property_mappings")
    mapped = mapped if isinstance(mapped, dict) else {}
    usual = SHAREGPT if base == "sharegpt" else OPENAI
    found = tuple(
        str(mapped.get(part) or entry.get(f"message_field_{part}") or name)
        for part, name in zip(OPENAI, usual, strict=True)
    )
    column = str(entry.get("field_messages") or CHAT_COLUMNS[usual][0])
    names = found if found in CHAT_COLUMNS else OPENAI
    changes = [f"{old} to {new}" for old, new in zip(found, names, strict=True) if old != new]
    changes = [f"{' and '.join(changes)} in its messages"] if changes else []
    if column not in CHAT_COLUMNS[names]:
        changes.insert(0, f"the column {column} to {CHAT_COLUMNS[names][0]}")
    return ", and ".join(changes)


def port_names(ported: Ported, option: str, value: Any, folder: str | None) -> None:
    """Port data sets that LLaMA-Factory names in `folder`/dataset_info.json."""
    names = [str(part) for part in value] if isinstance(value, list) else [p.strip() for p in str(value).split(",")]
    place, info = _dataset_info(ported.folder, folder or "data")
    sources = []
    for known in names:
        entry = info.get(known)
        if isinstance(entry, dict):
            sources.append(_registered(ported, known, entry, place, option))
            continue
        sources.append(plain_path(known))
        if not is_file(known) and "/" not in known:
            ported.to_do.append(
                f"{option} {known} is a name in LLaMA-Factory's dataset_info.json; give its file or Hub id."
            )
    ported.add({option: sources}, option)


def _dataset_info(folder: Path, named: str) -> tuple[Path, dict[str, Any]]:
    """Return the folder of dataset_info.json and its content; empty where it is not found."""
    for base in (Path.cwd(), folder, *list(folder.resolve().parents)[:2]):
        place = base / named
        try:
            found = json.loads((place / "dataset_info.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(found, dict):
            return place, found
    return folder, {}


def _registered(ported: Ported, name: str, entry: dict[str, Any], place: Path, option: str) -> str:
    if entry.get("ranking") and ported.options.get("task", "sft") in ("sft", "kto"):
        raise UserError(f"dataset {name} holds pairs of answers, and the file trains on single ones; give stage: dpo.")
    for column, title in (entry.get("columns") or {}).items():
        if title not in KNOWN_LLAMA_FACTORY.get(column, ()):
            ported.to_do.append(
                f"dataset {name} has its {column} in the column {title}, which is not read under that name."
            )
    tags = {key: tag for key, tag in (entry.get("tags") or {}).items() if tag not in ("role", "content", "user", "assistant",
            "system", "tool", "from", "value", "human", "gpt", "function_call", "observation")}  # fmt: skip
    if tags:
        ported.to_do.append(
            f"dataset {name} has messages with other names ({', '.join(map(str, tags.values()))}); rename them."
        )
    if hub := entry.get("hf_hub_url"):
        given = {"dataset_config": entry.get("subset"), f"{option}_split": entry.get("split")}
        ported.add({key: value for key, value in given.items() if value}, name)
        return str(hub)
    return str(place / str(entry.get("file_name", name)))
