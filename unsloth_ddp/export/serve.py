"""Write the command that serves a run with vLLM."""

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from unsloth_ddp.export.folder import whole_or_absent
from unsloth_ddp.model.files.check import ADAPTER_FILE, read_model_file
from unsloth_ddp.model.loading.load import eos_tokens
from unsloth_ddp.model.loading.trained import load_trained_tokenizer, stop_tokens
from unsloth_ddp.run.result import RunResult
from unsloth_ddp.utils.errors import UserError

# Values that vLLM takes for --max-lora-rank (vllm/config/lora.py).
VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


def vllm_command(result: RunResult, make_folder: Callable[[], Path]) -> str:
    """Return the command that serves the run with vLLM: an adapter beside its base model, or a whole model.

    Args:
        make_folder: returns the folder for a generation_config.json, which is written where the base model alone would
            not stop at the end of an answer.

    Raises:
        UserError: vLLM does not load such an adapter.
    """
    settings = result.settings
    trust = ["--trust-remote-code"] if settings.trust_remote_code else []
    if not result.is_adapter:
        return shlex.join(["vllm", "serve", str(result.folder), *trust])
    adapter = read_model_file(str(result.folder), ADAPTER_FILE) or {}
    rank = _rank_for_vllm(adapter)
    words = ["vllm", "serve", str(settings.model)]
    if settings.model_revision:
        words += ["--revision", settings.model_revision]
    words += ["--enable-lora", "--lora-modules", f"{result.run.name}={result.folder}", "--max-lora-rank", str(rank)]
    # vLLM takes tokenizer, template and stop tokens from the base model.
    template = result.folder / "chat_template.jinja"
    if template.is_file():
        words += ["--chat-template", str(template)]
    if (generation := _generation_config(result)) is not None:
        folder = make_folder()
        with whole_or_absent(folder) as aside:
            (aside / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n", encoding="utf-8")
        words += ["--generation-config", str(folder)]
    return shlex.join([*words, *trust])


def _rank_for_vllm(adapter: dict[str, Any]) -> int:
    """Return the smallest value of --max-lora-rank that an adapter fits in.

    Raises:
        UserError: vLLM does not load the adapter.
    """
    merge = "export it with --to merged and serve that folder"
    # vLLM ignores adapters on experts or fails with them (pull requests 41384 and 52194 of vllm-project/vllm).
    for key, what in (
        ("modules_to_save", "modules trained whole"),
        ("target_parameters", "experts, as PEFT writes them"),
    ):
        if names := adapter.get(key):
            raise UserError(f"vLLM does not load adapters with {what} ({', '.join(map(str, names))}); {merge}.")
    ranks = [adapter.get("r"), *(adapter.get("rank_pattern") or {}).values()]
    rank = max((value for value in ranks if isinstance(value, int)), default=0)
    fitting = next((value for value in VLLM_RANKS if value >= rank), None)
    if fitting is None:
        raise UserError(f"vLLM loads adapters of rank {VLLM_RANKS[-1]} at most, and this one has {rank}; {merge}.")
    return fitting


def _generation_config(result: RunResult) -> dict[str, Any] | None:
    """Return the base model's generation config with the run's stop tokens; None if the base stops there already."""
    import transformers

    settings = result.settings
    source: dict[str, Any] = {"revision": settings.model_revision, "trust_remote_code": settings.trust_remote_code}
    try:
        config = transformers.GenerationConfig.from_pretrained(str(settings.model), **source)
    except OSError:
        # Models without generation_config.json stop at the EOS of their config.json.
        config = transformers.GenerationConfig.from_model_config(
            transformers.AutoConfig.from_pretrained(str(settings.model), **source)
        )
    tokenizer = load_trained_tokenizer(settings, result.folder)
    config_ends = eos_tokens(config)
    # vLLM stops at the tokenizer's EOS by itself.
    added = [token for token in stop_tokens(settings, tokenizer) if token not in (*config_ends, tokenizer.eos_token_id)]
    if not added:
        return None
    config.eos_token_id = [*config_ends, *added]
    return dict(config.to_diff_dict())
