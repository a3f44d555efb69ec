"""Compare steps of small mixtures of experts on one GPU and on several, and load what they saved without Unsloth.

    python -m benchmarks.correctness.mixtures --work /tmp/mixtures --json benchmarks/results/correctness/mixtures.json

Random Qwen3-MoE and gpt-oss models take three steps of SGD on the demo's rows: with an adapter on attention, with one
on the experts too, and with every parameter, with both backends. The weight updates of the layouts are compared, and
the adapter or model has to give the run's evaluation loss in plain Transformers and PEFT.
"""

from __future__ import annotations

import argparse
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.common.models import write_model
from benchmarks.common.runs import REPO, reload, update_difference, write_results
from benchmarks.correctness.sharding import SGD, STEPS, Job, launch

# Of the demo's tokenizer.
VOCABULARY = 883
KINDS = ("qwen3_moe", "gpt_oss")
PARTS = {"attention": "", "experts": "--lora_target_parameters all-experts", "full": "--method full"}


def make_mixture(kind: str, folder: Path) -> None:
    """Write a random model of four layers with the demo's tokenizer."""
    import transformers

    shared: dict[str, Any] = {
        "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
        "vocab_size": VOCABULARY, "initializer_range": 0.05, "num_experts_per_tok": 2, "dtype": "float32",
    }  # fmt: skip
    if kind == "qwen3_moe":
        sizes = {"intermediate_size": 256, "moe_intermediate_size": 128, "num_experts": 8, "norm_topk_prob": True}
        config: Any = transformers.Qwen3MoeConfig(**shared, **sizes)
    else:
        config = transformers.GptOssConfig(**shared, intermediate_size=128, num_local_experts=8, sliding_window=64)
    write_model(config, folder)


def main() -> None:
    """Read the command line, train, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("/tmp/mixtures"))
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--only", nargs="*", default=[], help="only the runs whose name holds one of these words")
    parser.add_argument("--side_by_side", type=int, default=8, help="runs at a time; the models are tiny")
    args = parser.parse_args()
    for kind in KINDS:
        make_mixture(kind, args.work / kind)
    rows = f"--dataset {REPO}/demo/train.jsonl --eval_dataset {REPO}/demo/eval.jsonl"
    jobs = []
    for kind in KINDS:
        for backend in ("unsloth", "transformers"):
            for part, options in PARTS.items():
                precision = "bf16" if (backend, part) == ("unsloth", "full") else "fp32"
                words = (
                    f"--model {args.work}/{kind} {rows} --backend {backend} {options} {SGD} {STEPS} "
                    f"--precision {precision}"
                )
                name = f"{kind}_{backend}_{part}"
                if not args.only or any(word in name for word in args.only):
                    jobs += [
                        (Job(f"{name}_one", "ddp", f"{words} --per_device_train_batch_size 8"), 1),
                        (Job(f"{name}_several", "ddp", f"{words} --per_device_train_batch_size 1"), args.processes),
                    ]
    results: dict[str, dict[str, Any]] = {}
    with ThreadPoolExecutor(max_workers=args.side_by_side) as pool:
        for result in pool.map(lambda job: launch(job[0], args.work, job[1], limit=240), jobs):
            results[result["name"]] = result
            write_results(args.json, processes=args.processes, runs=list(results.values()))
        good = [name for name, result in results.items() if "losses" in result]
        for name in good:
            single = name.replace("_several", "_one")
            if name != single and single in good:
                kind = next(kind for kind in KINDS if name.startswith(kind))
                initial = args.work / kind if "_full_" in name else None
                results[name]["update_difference"] = update_difference(args.work, name, single, initial)
        # Kept before the results are loaded: a benchmark that is ended loses little.
        write_results(args.json, processes=args.processes, runs=list(results.values()))
        for name, loss in zip(good, pool.map(lambda n: reload(args.work / "outputs" / n), good), strict=True):
            results[name]["reload"] = loss
    for name, result in results.items():
        if "losses" not in result:
            print(f"{name:36} rc {result['exit_code']} {result['log'][-1500:]}", flush=True)
            continue
        shown = {key: result.get(key) for key in ("update_difference", "reload")}
        print(f"{name:36} {shown} run {result['summary']['eval_loss']}", flush=True)
    write_results(args.json, processes=args.processes, runs=list(results.values()))


if __name__ == "__main__":
    main()
