"""Small notebooks for the tests, and what became of them."""

import importlib
import json
import re
from pathlib import Path
from typing import Any

from unsloth_ddp.notebook.convert import convert_notebook
from unsloth_ddp.notebook.read.reader import from_node
from unsloth_ddp.notebook.types import Conversion, ConversionOptions
from unsloth_ddp.notebook.write.helpers import HELPERS
from unsloth_ddp.notebook.write.prologue import Names

LOAD = "from unsloth import FastLanguageModel\nmodel, tokenizer = FastLanguageModel.from_pretrained('m')"
TRAIN = (
    "from trl import SFTConfig, SFTTrainer\n"
    "trainer = SFTTrainer(model=model, train_dataset=dataset, args=SFTConfig(\n"
    "    per_device_train_batch_size = 2,\n"
    "    gradient_accumulation_steps = 4, # note\n"
    "))\n"
    "trainer.train()"
)


def notebook(*cells: str, **metadata: Any) -> dict[str, Any]:
    """A notebook with these code cells; a cell that starts with `md:` is markdown."""
    made = []
    for source in cells:
        if source.startswith("md:"):
            made.append({"cell_type": "markdown", "metadata": {}, "source": source[3:]})
        else:
            made.append({"cell_type": "code", "metadata": {}, "source": source, "outputs": [], "execution_count": None})
    return {"nbformat": 4, "nbformat_minor": 5, "metadata": metadata, "cells": made}


def convert_cells(*cells: str, **options: Any) -> Conversion:
    """The conversion of a notebook with these cells."""
    return convert_notebook(from_node(notebook(*cells), "test.ipynb"), ConversionOptions(**options))


def body(conversion: Conversion, *, comments: bool = False) -> str:
    """The script's cells, without the prologue and the end, and without the converter's comments."""
    text = re.sub(
        r"(# %%\n)?# ddp: each process takes its own GPU.*?set_device\(\w+\)\n(elif .*?\n    raise .*?\n)?\n?",
        "",
        conversion.script,
        flags=re.DOTALL,
    )
    start = text.index("# %%", text.index("# endregion"))
    text = text[start : text.rindex("# %%")]
    lines = [line for line in text.splitlines() if comments or not line.lstrip().startswith("# ddp:")]
    return "\n".join(lines) + "\n"


def helpers(*names: str, **given: Any) -> dict[str, Any]:
    """The names of a script with these helpers and what they need, as the one process of it; `given` says otherwise."""
    needed = Names(frozenset(), used=set(names)).needed()
    modules = {"os"}.union(*(HELPERS[name].modules for name in needed))
    space = {module: importlib.import_module(module) for module in modules}
    space |= {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "IS_MAIN": True, **given}
    for name in HELPERS:
        if name in needed - given.keys():
            exec(HELPERS[name].source, space)
    return space


def kinds(conversion: Conversion) -> list[str]:
    """The kinds of the warnings."""
    return [entry.kind for entry in conversion.report.warnings]


def write(path: Path, *cells: str, **metadata: Any) -> Path:
    """A notebook file with these cells."""
    path.write_text(json.dumps(notebook(*cells, **metadata)))
    return path
