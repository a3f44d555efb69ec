"""Fine-tune a language model with LoRA, QLoRA or full parameters, on one process or many.

The embedded demo, on any machine:
    uv run accelerate launch train_ddp.py
All GPUs of one node:
    uv run accelerate launch --config_file accelerate_configs/ddp.yaml train_ddp.py \\
        --config recipes/qwen3_8b_lora.yaml --dataset my_chats.jsonl
One GPU, no launcher:
    uv run python train_ddp.py --model MODEL --dataset ROWS
torchrun works too:
    uv run torchrun --nproc_per_node 4 train_ddp.py --model MODEL --dataset ROWS
"""

from __future__ import annotations

import sys
import time

from unsloth_ddp.errors import UserError
from unsloth_ddp.runtime import (
    Ranks,
    exit_with,
    import_backend,
    quiet,
    ranks_from_environment,
    started,
    use_cache_if_hub_is_unreachable,
)
from unsloth_ddp.settings import Settings, parse_settings


def train(settings: Settings, ranks: Ranks) -> None:
    """One run: processes, rows, model, trainer, steps, files."""
    began = time.perf_counter()
    use_cache_if_hub_is_unreachable(settings)
    # Imported here, so that a mistake in the settings is told before the seconds that torch takes to load.
    from unsloth_ddp import answers, attention, checkpoint, data, output, packing, sharding, telemetry
    from unsloth_ddp import model as models

    request = packing.Request.of(settings, ranks.world_size)
    with started(settings, ranks) as runtime, data.node_folder(runtime) as node_folder:
        models.check_model(settings, runtime)
        data.read_examples(settings, runtime, node_folder)
        run_folder = output.choose_run_folder(settings, runtime)
        resume = checkpoint.find_checkpoint(settings.resume_from_checkpoint, run_folder)

        import_backend(runtime, settings)
        output.stop_library_output(runtime)
        from unsloth_ddp.trainer import make_config, make_trainer

        config = make_config(settings, runtime, request.plan, run_folder)
        model, tokenizer = models.load_model(settings, runtime)
        rows, eval_rows = data.tokenize_examples(settings, runtime, node_folder, tokenizer)
        models.stop_at(model, tokenizer, rows.dataset)
        choice = attention.choose_packing(settings, runtime, model)
        plan, rows, choice = data.fill_steps(request, rows, choice)

        trainer = make_trainer(settings, runtime, plan, config, model, tokenizer, rows, eval_rows)
        output.open_run_folder(settings, runtime, run_folder)
        for sentence in sharding.what_is_ignored(runtime.sharding, settings, ranks.nodes):
            print(sentence)
        print(telemetry.describe_run(settings, runtime, plan, choice, model, rows, eval_rows, run_folder), flush=True)

        compared = 0 if sharding.shards_weights(runtime.sharding) else settings.compare_answers
        asked = answers.questions(data.held_out_examples(node_folder, compared))
        before = answers.answer(model, tokenizer, asked, runtime)
        summary = trainer.run(resume)
        after = answers.answer(model, tokenizer, asked, runtime)

        trainer.save_model(str(run_folder))
        if settings.merge:
            runtime.alone(lambda: models.save_merged(settings, run_folder, run_folder / "merged"))
        if asked:
            summary |= answers.compare(asked, before, after)
        summary["wall_time_seconds"] = time.perf_counter() - began
        runtime.alone(lambda: output.finish(settings, run_folder, summary))
        del trainer, model


def main() -> None:
    """Read the settings, run, and turn a user's mistake into one sentence."""
    ranks = Ranks()
    try:
        ranks = ranks_from_environment()
        # Only the main process speaks; what the others have to say is in their logs.
        with quiet(not ranks.is_main):
            train(parse_settings(sys.argv[1:], __doc__ or ""), ranks)
    except UserError as error:
        exit_with(error, ranks.is_main)


if __name__ == "__main__":
    main()
