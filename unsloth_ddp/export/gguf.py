"""Export a run as a GGUF file for llama.cpp, and with a Modelfile for Ollama."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from unsloth_ddp.export.folder import whole_or_absent
from unsloth_ddp.export.llama_cpp import CONVERTED, LlamaCpp, ask_gguf, run_converter, run_quantizer
from unsloth_ddp.export.merged import ANSWER_LENGTH, write_merged
from unsloth_ddp.export.modelfile import render_modelfile
from unsloth_ddp.model.trained import load_trained_tokenizer, stop_tokens
from unsloth_ddp.run.result import RunResult


def export_gguf(
    result: RunResult, target: Path, tools: LlamaCpp, kind: str, question: str, *, plain: bool, modelfile: bool
) -> tuple[str | None, str | None]:
    """Write a folder with the GGUF file, and a Modelfile if asked, whole or not at all.

    Args:
        kind: data type of the weights, one of CONVERTED or QUANTIZED.

    Returns:
        The answer to the question, None if no program here can ask it; and what is missing in the Modelfile, if anything.

    Raises:
        UserError: the run cannot be merged, converted or quantized, or llama.cpp does not load what was made.
    """
    missing = None
    with whole_or_absent(target) as aside:
        whole = aside / "whole"
        tokenizer = write_for_conversion(result, whole)
        file = aside / f"{result.run.name}-{kind}.gguf"
        if kind in CONVERTED:
            run_converter(tools, whole, file, kind)
        else:
            sixteen_bit = aside / "bf16.gguf"
            run_converter(tools, whole, sixteen_bit, "bf16")
            run_quantizer(tools, sixteen_bit, file, kind)
            sixteen_bit.unlink()
        shutil.rmtree(whole)
        answer = ask_gguf(tools, file, question, ANSWER_LENGTH, plain=plain)
        if modelfile:
            text, missing = render_modelfile(tokenizer, file.name, stop_tokens(result.settings, tokenizer), plain=plain)
            (aside / "Modelfile").write_text(text, encoding="utf-8")
    return answer, missing


def write_for_conversion(result: RunResult, folder: Path) -> Any:
    """Write the run's whole model to `folder` as the converter has to see it; return its tokenizer.

    A GGUF file names one token as the end of generation, which the converter takes from the tokenizer's EOS. Where
    the run's answers end with another token, that becomes the EOS.
    """
    if result.is_adapter:
        write_merged(result, folder)
    else:
        folder.mkdir()
        for path in result.folder.iterdir():
            if path.suffix in (".json", ".jinja", ".model", ".txt") or path.name.startswith("model"):
                (folder / path.name).symlink_to(path)
    tokenizer = load_trained_tokenizer(result.settings, folder)
    ends = stop_tokens(result.settings, tokenizer)
    template = str(tokenizer.chat_template or "")
    if tokenizer.eos_token_id not in ends and "eos_token" not in template:
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(ends[0])
        for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"):
            (folder / name).unlink(missing_ok=True)
        tokenizer.save_pretrained(folder)
    return tokenizer
