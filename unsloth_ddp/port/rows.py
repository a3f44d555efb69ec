"""Port the datasets of a file: lists of mappings (axolotl, TRL), and names in dataset_info.json (LLaMA-Factory)."""

import json
import os
from pathlib import Path
from typing import Any

from unsloth_ddp.data.sources.rows import is_file
from unsloth_ddp.port.ported import Ported
from unsloth_ddp.utils.errors import UserError
from unsloth_ddp.utils.files.sources import Source

# Kinds of rows that the kit tells apart by the names of their columns.
KNOWN_KINDS = ("alpaca", "chat_template", "sharegpt", "completion")
# Kinds of pairs and labelled answers, likewise.
KNOWN_PREFERENCES = ("chat_template", "chatml", "llama3", "orpo")
# Names of a message's role and text, and the columns in which the kit reads messages with these names.
OPENAI, SHAREGPT = ("role", "content"), ("from", "value")
CHAT_COLUMNS = {OPENAI: ("messages", "conversations"), SHAREGPT: ("conversations",)}
# Keys of axolotl that name a column, and the kit's name of it.
COLUMN_KEYS = {
    "field": "text", "text_column": "text", "field_instruction": "instruction", "field_input": "input",
    "field_output": "output",
    "field_system": "system", "field_prompt": "prompt", "field_chosen": "chosen", "field_rejected": "rejected",
    "field_completion": "completion", "field_label": "label", "field_tools": "tools",
}  # fmt: skip
READ_KEYS = ("path", "type", "split", "name", "data_files", "data_dir", "revision", "shards", "shards_idx", "ds_type",
             "trust_remote_code", "conversation", "field_messages", "message_field_role", "message_field_content",
             "message_property_mappings", *COLUMN_KEYS)  # fmt: skip
# Values that ask for what the kit does: it trains the assistant's turns, each with the token that ends it.
AS_HERE = {
    "roles_to_train": (["assistant"], ["gpt"], ["gpt", "assistant"], ["assistant", "gpt"]),
    "train_on_eos": ("turn",),
}
DEFAULT_SPLITS = {"dataset": "train", "eval_dataset": "test"}
# Columns of LLaMA-Factory's datasets, and the names under which the kit reads them; the first one is given with
# columns.
LLAMA_FACTORY_COLUMNS = {
    "prompt": ("instruction",), "query": ("input",), "response": ("output",), "messages": ("messages", "conversations"),
    "system": ("system",), "tools": ("tools",), "chosen": ("chosen",), "rejected": ("rejected",),
    "history": ("history",),
    "kto_tag": ("kto_tag", "label"), "images": ("images", "image"),
}  # fmt: skip
LLAMA_FACTORY_TAGS = ("role", "content", "user", "assistant", "system", "tool", "from", "value", "human", "gpt",
                      "function_call", "observation")  # fmt: skip
LLAMA_FACTORY_KEYS = ("hf_hub_url", "ms_hub_url", "om_hub_url", "file_name", "formatting", "ranking", "subset", "split",
                      "num_samples", "columns", "tags")  # fmt: skip


def plain_path(value: str) -> str:
    """Return a path relative to the working directory as the kit's files have it, where ./ means the file's folder."""
    if value.startswith("../"):
        return str(Path(value).resolve())
    return os.path.normpath(value) if value.startswith("./") else value


def port_mappings(option: str, ported: Ported, name: str, entries: Any) -> None:
    """Port a list of datasets, each a mapping with path, type, split and name, for an option."""
    entries = entries if isinstance(entries, list) else [entries]
    if not all(isinstance(entry, dict) and isinstance(entry.get("path"), str) for entry in entries):
        raise UserError(f"{name} is not a list of mappings with a path, so the file cannot be ported.")
    sources: list[Source] = []
    for entry in entries:
        title = f"{name} {entry['path']}"
        split, subset = (str(entry[key]) if entry.get(key) else None for key in ("split", "name"))
        if shards := entry.get("shards"):
            split = _slice_of_shards(ported, title, split, shards, entry.get("shards_idx") or 0)
        for path in _paths(ported, name, entry):
            # A file has slices, but no splits and no subset.
            part = None if split == DEFAULT_SPLITS[option] or (is_file(path) and "[" not in (split or "")) else split
            sources.append(Source(path, None if is_file(path) else subset, part))
        _port_columns(ported, title, entry)
    ported.add({option: [str(source) for source in sources]}, name)
    ported.revisions |= {entry["path"]: str(entry["revision"]) for entry in entries if entry.get("revision")}


def _slice_of_shards(ported: Ported, title: str, split: str | None, shards: Any, index: Any) -> str | None:
    if "[" in (split or "") or not all(isinstance(number, int) for number in (shards, index)) or shards > 100:
        ported.to_do.append(f"{title} takes shard {index} of {shards}; give that slice of it, such as [:10%].")
        return split
    ported.left_out[f"{title}: shards"] = "its rows are taken in their order, and axolotl shuffles them first"
    return f"{split or ''}[{round(100 * index / shards)}%:{round(100 * (index + 1) / shards)}%]"


def _paths(ported: Ported, name: str, entry: dict[str, Any]) -> list[str]:
    files = entry.get("data_files") or []
    files = files if isinstance(files, list) else [files]
    if not files:
        if entry.get("data_dir"):
            ported.to_do.append(
                f"{name}: of {entry['path']} only the folder {entry['data_dir']} is meant; download it and name its "
                f"files."
            )
        return [plain_path(entry["path"])]
    if is_file(entry["path"]):
        return [str(Path(plain_path(entry["path"])) / str(file)) for file in files]
    if entry["path"] in ("json", "csv", "parquet"):
        return [plain_path(str(file)) for file in files]
    ported.to_do.append(
        f"{name}: of {entry['path']} only {', '.join(map(str, files))} is meant; download it and name it."
    )
    return [entry["path"]]


def _port_columns(ported: Ported, title: str, entry: dict[str, Any]) -> None:
    """Port the type of a dataset's rows and the names of their columns, and say what is not read."""
    row_type = entry.get("type") or "chat_template"
    # A type may be a mapping of its own, with the names of columns and a prompt that is not used.
    inner = row_type if isinstance(row_type, dict) else {}
    base = "alpaca" if inner else str(row_type).split(".")[0].split(":")[0]
    task = ported.options.get("task", "sft")
    if task != "sft" and base not in KNOWN_PREFERENCES and not inner:
        columns = "prompt, completion and label" if task == "kto" else "prompt, chosen and rejected"
        ported.to_do.append(f"{title} is of type {base}; give its rows the columns {columns}.")
    elif task == "sft" and base not in KNOWN_KINDS:
        ported.to_do.append(
            f"{title} is of type {base}, which the kit does not know; give its rows the columns messages, or "
            "instruction and output, or prompt and completion, or text."
        )
    if base == "alpaca":
        ported.left_out[title] = (
            "rows with instruction and output become chats in the model's template, not in Alpaca's"
        )
    names = {str(source[key]): new for source in (entry, inner) for key, new in COLUMN_KEYS.items() if source.get(key)}
    if base in ("chat_template", "sharegpt"):
        names |= _port_messages(ported, title, entry, base)
    ported.rename(title, names)
    others = [
        key for key, value in entry.items() if value and key not in READ_KEYS and value not in AS_HERE.get(key, ())
    ]
    others += [f"type {key}" for key, value in inner.items() if value and key not in COLUMN_KEYS]
    if others:
        ported.left_out[f"{title}: {', '.join(others)}"] = "the kit has no such option for a dataset"


def _port_messages(ported: Ported, title: str, entry: dict[str, Any], base: str) -> dict[str, str]:
    """Return how to rename the column of a dataset's chats; other names in its messages are something to do."""
    mapped = entry.get("message_property_mappings")
    mapped = mapped if isinstance(mapped, dict) else {}
    usual = SHAREGPT if base == "sharegpt" else OPENAI
    pair = tuple(
        str(mapped.get(part) or entry.get(f"message_field_{part}") or name)
        for part, name in zip(OPENAI, usual, strict=True)
    )
    names = pair if pair in CHAT_COLUMNS else OPENAI
    changes = [f"{old} to {new}" for old, new in zip(pair, names, strict=True) if old != new]
    if changes:
        ported.to_do.append(f"{title}: rename {' and '.join(changes)} in its messages.")
    column = str(entry.get("field_messages") or CHAT_COLUMNS[usual][0])
    return {column: column if column in CHAT_COLUMNS[names] else CHAT_COLUMNS[names][0]}


def port_names(ported: Ported, option: str, value: Any) -> None:
    """Port datasets that LLaMA-Factory names in its dataset_info.json, with max_samples and interleave_probs."""
    names = [str(part) for part in value] if isinstance(value, list) else [p.strip() for p in str(value).split(",")]
    folder, info = _dataset_info(ported.folder, ported.content.get("dataset_dir") or "data")
    sources = []
    for name in names:
        entry = info.get(name)
        entry = entry if isinstance(entry, dict) else {"file_name": None, "plain": plain_path(name)}
        if "plain" in entry and not is_file(name) and "/" not in name:
            ported.to_do.append(
                f"{option} {name} is a name in LLaMA-Factory's dataset_info.json; give its file or Hub id."
            )
        sources.append(_registered(ported, name, entry, folder))
    if option == "dataset":
        sources = _with_weights(ported, sources)
    ported.add({option: [str(source) for source in sources]}, option)


def _with_weights(ported: Ported, sources: list[Source]) -> list[Source]:
    probabilities, strategy = ported.content.get("interleave_probs"), ported.content.get("mix_strategy", "concat")
    if strategy == "concat" or len(sources) == 1:
        return sources
    words = str(probabilities).split(",") if probabilities and not isinstance(probabilities, list) else probabilities
    try:
        weights = [float(word) for word in words or ["1"] * len(sources)]
    except ValueError:
        weights = []
    if len(weights) != len(sources):
        ported.to_do.append(
            f"interleave_probs {probabilities} are not {len(sources)} numbers; give each dataset its weight."
        )
        return sources
    if strategy != "interleave_under":
        ported.to_do.append(
            f"mix_strategy {strategy} repeats the rows of datasets that end early, and here none is repeated; name "
            "those several times instead of weighting them."
        )
    return [source._replace(weight=weight) for source, weight in zip(sources, weights, strict=True)]


def _dataset_info(folder: Path, named: str) -> tuple[Path, dict[str, Any]]:
    """Return the folder of dataset_info.json and its content; empty where it is not found."""
    for base in (Path.cwd(), folder, *list(folder.resolve().parents)[:2]):
        place = base / named
        try:
            content = json.loads((place / "dataset_info.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(content, dict):
            return place, content
    return folder, {}


def _registered(ported: Ported, name: str, entry: dict[str, Any], folder: Path) -> Source:
    """Return a dataset of dataset_info.json, or one that is named itself (`plain`), with at most max_samples rows."""
    if entry.get("ranking") and ported.options.get("task", "sft") in ("sft", "kto"):
        raise UserError(f"dataset {name} holds pairs of answers, and the file trains on single ones; give stage: dpo.")
    title = f"dataset {name}"
    columns = entry.get("columns") or {}
    for column in [column for column in columns if column not in LLAMA_FACTORY_COLUMNS]:
        ported.to_do.append(f"{title} has a column {column} ({columns[column]}), which the kit does not read.")
    names = {
        str(old): str(old) if old in LLAMA_FACTORY_COLUMNS[column] else LLAMA_FACTORY_COLUMNS[column][0]
        for column, old in columns.items()
        if column in LLAMA_FACTORY_COLUMNS and old
    }
    ported.rename(title, names)
    tags = [str(tag) for tag in (entry.get("tags") or {}).values() if tag not in LLAMA_FACTORY_TAGS]
    if tags:
        ported.to_do.append(f"{title} has messages with other names ({', '.join(tags)}); rename them.")
    if others := [key for key, value in entry.items() if value and key not in (*LLAMA_FACTORY_KEYS, "plain")]:
        ported.to_do.append(
            f"{title} has {', '.join(others)} in dataset_info.json, which port does not read; name the files that are "
            f"meant."
        )
    split = _first_rows(ported, title, entry)
    if hub := entry.get("hf_hub_url"):
        return Source(str(hub), entry.get("subset"), split)
    return Source(entry.get("plain") or str(folder / str(entry.get("file_name", name))), None, split)


def _first_rows(ported: Ported, title: str, entry: dict[str, Any]) -> str | None:
    """Return the split of a dataset, cut to the number of samples that the file or the dataset's entry wants."""
    split, samples = entry.get("split"), (entry.get("num_samples"), ported.content.get("max_samples"))
    counts = [count for count in samples if isinstance(count, int)]
    if not counts:
        return split
    if "[" in (split or ""):
        ported.to_do.append(f"{title} is cut to {min(counts)} rows; give a slice of {split}.")
        return split
    if entry.get("num_samples"):
        ported.left_out[f"{title}: num_samples"] = "the first rows are taken, and LLaMA-Factory draws them"
    return f"{split or ''}[:{min(counts)}]"
