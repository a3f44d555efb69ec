"""Measure speed and memory of training an image-text model: the kit, and Unsloth as in its notebooks and tuned by hand.

    python -m benchmarks.speed.images --json benchmarks/results/speed/images.json
    python -m benchmarks.speed.images --cpu --json FILE            tries the script with a tiny model

A random-weight model of the shape of Qwen3-VL-2B or Gemma 4 E2B (`--model`) answers questions about one image a row:
384 to 640 pixels a side, 144 to 400 image tokens, or at most 280 (Gemma 4). LoRA of rank 16. The rows of a step are the
same number for all but the notebooks' settings (8). Tokens are counted without padding. Unsloth's collator supervises
the assistant's answer and all text around it; `kit_all` does so too.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.common.models import scale_query_norms
from benchmarks.common.runs import REPO, launch_command, log_history, run_logged, train, write_results
from unsloth_ddp.utils.versions import versions

ROWS_A_STEP = 32
MAX_LENGTH = 2048
# Layers of the tower whose outputs reach the decoder, by the number of its layers.
DEEPSTACK = {24: [5, 11, 17], 27: [8, 16, 24]}


def qwen3_vl(text: tuple[int, int, int, int], tower: tuple[int, int, int], *, tied: bool) -> tuple[Any, Any]:
    """Return the values of a Qwen3-VL model's config.json, and arguments of its image processor.

    Args:
        text: hidden size, feed-forward size, layers and heads of the text decoder.
        tower: the same of the image tower without its heads (16).
    """
    (hidden, intermediate, layers, heads), (tower_hidden, tower_intermediate, depth) = text, tower
    return {
        "tie_word_embeddings": tied,
        "text_config": {
            "hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers,
            "num_attention_heads": heads, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
            "max_position_embeddings": 40960,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5000000.0, "mrope_section": [24, 20, 20]},
        },
        "vision_config": {
            "depth": depth, "hidden_size": tower_hidden, "intermediate_size": tower_intermediate, "num_heads": 16,
            "patch_size": 16, "out_hidden_size": hidden, "num_position_embeddings": 2304,
            "deepstack_visual_indexes": DEEPSTACK[depth],
        },
    }, {"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2,
        "size": {"shortest_edge": 65536, "longest_edge": 16777216}}  # fmt: skip


# Values of the published config.json, and arguments of the image processor.
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen3_vl": qwen3_vl((2048, 6144, 28, 16), (1024, 4096, 24), tied=True),
    "qwen3_vl_4b": qwen3_vl((2560, 9728, 36, 32), (1024, 4096, 24), tied=True),
    "qwen3_vl_8b": qwen3_vl((4096, 12288, 36, 32), (1152, 4304, 27), tied=False),
    "gemma3_4b": ({
        "tie_word_embeddings": True, "mm_tokens_per_image": 256,
        "text_config": {
            "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256, "sliding_window": 1024, "vocab_size": 262208,
        },
        "vision_config": {
            "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16,
            "image_size": 896,
            "patch_size": 14,
        },
    }, {"size": {"height": 896, "width": 896}}),
    # Most of its 5 billion weights are embeddings that each layer adds.
    "gemma4": ({
        "tie_word_embeddings": True,
        "text_config": {
            "hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 35, "num_attention_heads": 8,
            "num_key_value_heads": 1,
            "num_kv_shared_layers": 20, "use_double_wide_mlp": True, "final_logit_softcapping": 30.0,
            "sliding_window": 512,
            "hidden_size_per_layer_input": 256, "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
        },
        "vision_config": {"use_clipped_linears": True}, "audio_config": {},
    }, {}),
}  # fmt: skip
TUNED = [
    "--bits", "16", "--adapt", "text", "--checkpointing", "none", "--optim", "adamw_torch_fused",
    "--logging_steps", "5", "--workers", "4", "--keep_size",
]  # fmt: skip
# Rows of a micro-batch and further options. The notebooks take four micro-batches a step.
PEERS: dict[str, tuple[int, list[str]]] = {
    "unsloth_notebook": (2, []),
    "unsloth_tuned": (16, TUNED),
    "unsloth_tuned_small": (8, TUNED),
}
KIT = {
    "kit": [],
    "kit_transformers": ["--backend", "transformers"],
    "kit_unsloth": ["--backend", "unsloth"],
    "kit_uncompiled": ["--cuda_graphs", "off"],
    "kit_all": ["--loss_on", "all"],
    "kit_qlora": ["--method", "qlora", "--backend", "transformers"],
    "kit_qlora_unsloth": ["--method", "qlora", "--backend", "unsloth"],
}


def write_model(kind: str, folder: Path, *, tiny: bool) -> None:
    """Write the random model and its processor; the tokenizer is the demo's."""
    import torch
    import transformers

    from tests.tiny_vision import KINDS, save_processor, save_vision, vision_tokenizer

    if tiny:
        save_vision(kind, folder)
        return
    values, sizes = MODELS[kind]
    kind = kind.removesuffix("_4b").removesuffix("_8b")
    if kind == "gemma3":
        KINDS[kind]["arguments"] = {"image_seq_length": values["mm_tokens_per_image"]}
    tokenizer, ids = vision_tokenizer(kind)
    model_class = getattr(transformers, KINDS[kind]["model"])
    config = model_class.config_class(**values, **ids)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(config.text_config, name, getattr(tokenizer, name))
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = model_class._from_config(config, dtype=torch.bfloat16)
    scale_query_norms(model)
    model.save_pretrained(folder)
    save_processor(kind, folder, tokenizer, sizes)


def write_rows(path: Path, count: int, *, tiny: bool) -> None:
    """Write chats with one image each, and the images beside them."""
    import numpy
    from PIL import Image

    rng = random.Random(0)
    pairs = [json.loads(line)["messages"][:2] for line in (REPO / "demo/train.jsonl").read_text().splitlines()]

    def text(median: float) -> str:
        pairs_a_row = max(1, round(rng.lognormvariate(math.log(median), 0.6) / 13))
        return " ".join(message["content"] for pair in rng.choices(pairs, k=pairs_a_row) for message in pair)

    with path.open("w") as file:
        for number in range(count):
            width, height = (28 * rng.randint(2, 3) if tiny else 32 * rng.randint(12, 20) for _ in range(2))
            # Smooth colours with some noise compress about as a photograph does.
            grid = numpy.random.default_rng(number).integers(0, 255, (12, 12, 3), dtype=numpy.uint8)
            Image.fromarray(grid).resize((width, height), Image.Resampling.BICUBIC).save(path.parent / f"{number}.jpg")
            question = [{"type": "image", "image": f"{number}.jpg"}, {"type": "text", "text": text(10 if tiny else 40)}]
            answer = [{"type": "text", "text": text(10 if tiny else 100)}]
            row = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": row}) + "\n")


def kit(name: str, work: Path, rows: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Train with the kit's defaults; the first log lines are not counted."""
    steps, logging = (3, 1) if args.cpu else (args.steps, 5)
    options = f"--model {work}/model --dataset {rows} --max_length {MAX_LENGTH} --global_batch_size {args.rows_a_step}"
    options += f" --max_steps {steps} --logging_steps {logging} --save_strategy no --compare_answers 0 --report_to none"
    config = "cpu.yaml" if args.cpu else "single_gpu.yaml"
    words = [*launch_command(config, 1), "train_ddp.py", *options.split(), *KIT[name], "--overwrite"]
    words += [] if "--method" in words else ["--method", "lora"]
    trained = train(words, name, work, args.limit)
    if "summary" not in trained:
        return {**trained, "error": trained["log"][-3000:]}
    history = [entry for entry in log_history(work / "outputs" / name) if "tokens_per_second" in entry]
    speeds = [entry["tokens_per_second"] for entry in history[min(2, len(history) - 1) :]]
    # Not from the steps: a step of packs has another number of rows.
    all_rows, all_tokens = (
        int(count.replace(",", ""))
        for count in re.findall(r"training rows +([\d,]+) \(([\d,]+) tokens", (work / f"{name}.log").read_text())[0]
    )
    tokens_a_row = all_tokens / all_rows
    peak = max(entry.get("peak_memory_bytes", 0) for entry in history)
    return {**trained, **figures(speeds, tokens_a_row, peak), "intervals": speeds}


def peer(name: str, work: Path, rows: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Train with Unsloth's own trainer."""
    batch, options = PEERS[name]
    accumulation = max(1, args.rows_a_step // batch) if options else 4
    result, log = work / f"{name}.json", work / f"{name}.log"
    command = [
        sys.executable, str(REPO / "benchmarks/speed/peers/unsloth_vision.py"), "--model", str(work / "model"),
        "--rows", str(rows), "--max_length", str(MAX_LENGTH), "--batch", str(min(batch, args.rows_a_step)),
        "--accumulation", str(accumulation), "--seconds", str(args.seconds), "--json", str(result), *options,
    ]  # fmt: skip
    environ = {"TRITON_INTERPRET": "1"} if args.cpu else {}
    result.unlink(missing_ok=True)
    code = run_logged(command, log, args.limit, environ, cwd=work)
    command_facts = {"name": name, "command": " ".join(command[1:]), "exit_code": code}
    if not result.is_file():
        return {**command_facts, "error": log.read_text()[-3000:]}
    measured = json.loads(result.read_text())
    tokens, steps = (sum(interval[place] for interval in measured["intervals"]) for place in (0, 2))
    speeds = [tokens / seconds for tokens, seconds, _ in measured["intervals"]]
    rows_a_step = min(batch, args.rows_a_step) * accumulation
    return {
        **measured,
        **command_facts,
        **figures(speeds, tokens / (steps * rows_a_step), measured.get("peak_memory_bytes", 0)),
    }


def figures(speeds: list[float], tokens_a_row: float, peak: int) -> dict[str, float]:
    """Return the figures that all have in common."""
    speed = statistics.median(speeds)
    return {
        "tokens_per_second": speed,
        "rows_per_second": speed / tokens_a_row,
        "tokens_a_row": tokens_a_row,
        "peak_gib": peak / 2**30,
    }


def main() -> None:
    """Read the command line, and measure one after the other on the first visible GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="qwen3_vl")
    parser.add_argument("--work", type=Path, default=Path("/tmp/images_speed"))
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument(
        "--only", nargs="*", choices=[*KIT, *PEERS], default=["kit", "unsloth_tuned", "kit_all", "unsloth_notebook"]
    )
    parser.add_argument("--rows_a_step", type=int, default=ROWS_A_STEP)
    parser.add_argument(
        "--steps",
        type=int,
        default=220,
        help="of the kit, which compiles from 200 on; those of the first two log lines are not counted",
    )
    parser.add_argument("--seconds", type=float, default=15, help="of a peer's steps that are measured")
    parser.add_argument("--limit", type=float, default=300, help="seconds of a run at most")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and tiny images")
    parser.add_argument("--cpu", action="store_true", help="try the script on a CPU, with a tiny model")
    parser.add_argument("--prepare", action="store_true", help="write the model and the rows, and end")
    options = parser.parse_args()
    sys.path.insert(0, str(REPO))
    work, tiny = options.work.absolute() / options.model, options.tiny or options.cpu
    rows = work / "rows" / "rows.jsonl"
    if options.prepare:
        rows.parent.mkdir(parents=True, exist_ok=True)
        write_rows(rows, 32 if tiny else 1024, tiny=tiny)
        write_model(options.model, work / "model", tiny=tiny)
        return
    if not (work / "model" / "tokenizer_config.json").is_file():
        # In a process of its own, which gives the GPU's memory back.
        words = [sys.executable, "-m", "benchmarks.speed.images", *sys.argv[1:], "--prepare"]
        subprocess.run(words, cwd=REPO, check=True)
    results: list[dict[str, Any]] = []
    for name in options.only:
        result = kit(name, work, rows, options) if name in KIT else peer(name, work, rows, options)
        results.append({"name": name, **result})
        shown = ("tokens_per_second", "rows_per_second", "tokens_a_row", "peak_gib", "error")
        print(f"{name:20} { {key: result.get(key) for key in shown} }", flush=True)
        write_results(
            options.json,
            versions=versions(),
            model=options.model,
            rows_a_step=options.rows_a_step,
            tiny=tiny,
            runs=results,
        )


if __name__ == "__main__":
    main()
