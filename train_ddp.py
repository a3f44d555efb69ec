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

from unsloth_ddp.config.parse import Settings, parse_settings
from unsloth_ddp.data.hub import use_cache_if_hub_is_unreachable
from unsloth_ddp.data.revisions import dataset_revisions, pin_revisions
from unsloth_ddp.data.sources import checked_files
from unsloth_ddp.distributed.backend import import_backend
from unsloth_ddp.distributed.exit_codes import EXIT_FAILURE, exit_with, note_exit_code, quiet
from unsloth_ddp.distributed.ranks import Ranks, ranks_from_environment
from unsloth_ddp.distributed.runtime import started
from unsloth_ddp.distributed.signals import Stop
from unsloth_ddp.model.files_check import check_local_model
from unsloth_ddp.utils.errors import UserError
from unsloth_ddp.utils.known_errors import report


def train(settings: Settings, ranks: Ranks) -> int:
    """One run: processes, rows, model, trainer, steps, files; returns the exit code."""
    began = time.perf_counter()
    stop = Stop(ranks.is_main)
    stop.listen(settings.max_time)
    if ranks.nodes == 1:
        # What one of several nodes lacks is told to all of them, once they have met.
        check_local_model(str(settings.model), safetensors_only=settings.use_safetensors)
        checked_files(settings.dataset, streaming=settings.streaming)
        checked_files(settings.eval_dataset)
        dataset_revisions(settings)
    use_cache_if_hub_is_unreachable(settings)
    # Imported here, so that a mistake in the settings is told before the seconds that torch takes to load.
    from unsloth_ddp.checkpoints import checkpoint
    from unsloth_ddp.data import dataset as data
    from unsloth_ddp.data import examples, identity, node_folder, packing
    from unsloth_ddp.distributed import sharding
    from unsloth_ddp.distributed import watchdog as watch
    from unsloth_ddp.model import attention
    from unsloth_ddp.model import load as models
    from unsloth_ddp.run import answers, output
    from unsloth_ddp.training import metrics as telemetry

    request = packing.BatchRequest.of(settings, ranks.world_size)
    with (
        started(settings, ranks) as runtime,
        watch.watched(settings, runtime) as stop.ended,
        node_folder.node_folder(runtime) as shared_folder,
    ):
        pin_revisions(settings, runtime)
        run_folder = output.choose_run_folder(settings, runtime)
        runtime.on_main(lambda: output.check_upload(settings))
        models.check_model(settings, runtime)
        examples.read_examples(settings, runtime, shared_folder)
        facts = checkpoint.run_facts(settings, runtime)
        if settings.packing == "off" or (settings.packing == "auto" and runtime.device_type == "cpu"):
            facts |= checkpoint.batch_facts(request.plan)
        start = checkpoint.choose(settings, runtime, run_folder, output.continues(settings, run_folder))
        if start:
            checkpoint.check(start, facts, settings, runtime)
            start = checkpoint.bring(start, runtime)

        import_backend(runtime, settings)
        output.stop_library_output(runtime)
        from unsloth_ddp.training.sft_config import make_config
        from unsloth_ddp.training.trainer import make_trainer

        config = make_config(settings, runtime, request.plan, run_folder)
        model, tokenizer = models.load_model(settings, runtime)
        rows, eval_rows = data.tokenize_examples(settings, runtime, shared_folder, tokenizer)
        models.stop_at(model, tokenizer, rows.dataset)
        models.check_positions(settings, model, data.longest_row(settings, rows, eval_rows))
        choice = attention.choose_packing(settings, runtime, model)
        plan, rows, choice = data.fill_steps(request, rows, choice)

        facts |= checkpoint.batch_facts(plan) | identity.data_identity(settings, runtime, plan, rows)
        if start:
            checkpoint.check(start, facts, settings, runtime)
            if settings.resume == "auto":
                print(start.sentence)
        checkpoints = checkpoint.Checkpoints(
            runtime, run_folder, facts, telemetry.versions(), settings.save_total_limit
        )
        trainer = make_trainer(settings, runtime, plan, config, model, tokenizer, rows, eval_rows, checkpoints, stop)
        chosen = trainer.fit(start)
        changes = checkpoint.check(start, checkpoints.facts, settings, runtime) if start else []
        output.open_run_folder(settings, runtime, run_folder)
        checkpoints.shared = checkpoint.is_shared(runtime, run_folder)
        checkpoint.check_sharing(runtime, run_folder, checkpoints.shared)
        for sentence in changes:
            print(sentence)
        for sentence in sharding.what_is_ignored(runtime.sharding, settings, ranks.nodes):
            print(sentence)
        described = telemetry.describe_run(
            settings, runtime, trainer.plan, choice, chosen, model, rows, eval_rows, run_folder,
            head_chooses=trainer.head is not None,
        )  # fmt: skip
        print(described, flush=True)

        compared = 0 if sharding.shards_weights(runtime.sharding) else settings.compare_answers
        asked = answers.questions(examples.held_out_examples(shared_folder, compared))
        before = answers.answer(model, tokenizer, asked, runtime)
        summary = trainer.run(start)
        if summary is None:
            return output.stopped(checkpoints, stop, run_folder)
        after = answers.answer(model, tokenizer, asked, runtime)

        if problem := checkpoints.save_final(trainer.write_final):
            return output.not_saved(checkpoints, problem)
        if settings.merge:
            problem = checkpoints.save_folder("merged", lambda aside: models.save_merged(settings, run_folder, aside))
            if problem:
                return output.not_finished(run_folder, "the merged model", problem)
        if asked:
            summary |= answers.compare(asked, before, after)
        summary["wall_time_seconds"] = time.perf_counter() - began
        if problem := checkpoints.in_main(lambda: output.finish(settings, run_folder, summary)):
            return output.not_finished(run_folder, output.SUMMARY_FILE, problem)
        del trainer, model
        return output.check_saves(checkpoints)


def main() -> None:
    """Read the settings, run, and turn a user's mistake into one sentence, and other errors into their cause."""
    ranks = Ranks()
    try:
        ranks = ranks_from_environment()
        # Only the main process speaks; what the others have to say is in their logs.
        with quiet(not ranks.is_main):
            code = train(parse_settings(sys.argv[1:], __doc__ or ""), ranks)
    except UserError as error:
        exit_with(error, ranks.is_main)
    except Exception as error:
        report(error, explained=ranks.is_local_main)
        note_exit_code(EXIT_FAILURE)
        sys.exit(EXIT_FAILURE)
    if code:
        note_exit_code(code)
        sys.exit(code)


if __name__ == "__main__":
    main()
