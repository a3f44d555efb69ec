"""Fine-tune a language model with LoRA, QLoRA or full parameters, on one process or many.

The demo, on any machine:
    uv run python train_ddp.py
All GPUs of one node:
    uv run accelerate launch --config_file accelerate_configs/ddp.yaml train_ddp.py \\
        --config recipes/qwen3_8b_lora.yaml --dataset my_chats.jsonl
One GPU, no launcher:
    uv run python train_ddp.py --model MODEL --dataset ROWS
torchrun works too:
    uv run torchrun --nproc_per_node 4 train_ddp.py --model MODEL --dataset ROWS
"""

from __future__ import annotations

import gc
import sys

from unsloth_ddp.config.parse import parse_settings
from unsloth_ddp.distributed.exit_codes import EXIT_FAILURE, exit_with, note_exit_code, quiet
from unsloth_ddp.distributed.ranks import Ranks, forget_mpi, ranks_from_environment
from unsloth_ddp.distributed.runtime import keep_tuned_kernels, let_idle_threads_sleep, let_memory_segments_grow
from unsloth_ddp.run.context import Run, open_run
from unsloth_ddp.run.outcomes import RunEnd
from unsloth_ddp.utils.errors import UserError, panics_raised
from unsloth_ddp.utils.known_errors import explain, report
from unsloth_ddp.utils.streams import protect_streams


def train(run: Run) -> None:
    """Train one run from its rows to its result."""
    # Imports torch, which takes seconds: a mistake in the settings has been reported by now.
    from unsloth_ddp.run import stages

    stages.check_model(run)
    stages.read_examples(run)
    stages.import_backend(run)
    config = stages.make_config(run)
    stages.check_processor(run)
    resume = stages.find_resume_point(run)
    model, tokenizer = stages.load_model(run)
    data = stages.prepare_data(run, model, tokenizer, resume)
    trainer = stages.make_trainer(run, config, model, tokenizer, data)
    stages.begin(run, trainer, resume)
    answered = stages.answer_before_training(run, trainer)
    summary = stages.train_from(run, trainer, resume)
    stages.finish(run, trainer, answered, summary)


def main() -> None:
    """Read the settings and train; report a user's mistake in one sentence, and other errors with their cause."""
    # Collections would walk all that is imported again and again. The stages turn them on where rows are read and after
    # imports.
    gc.disable()
    protect_streams()
    let_idle_threads_sleep()
    keep_tuned_kernels()
    let_memory_segments_grow()
    ranks = Ranks()
    try:
        forget_mpi()
        ranks = ranks_from_environment()
        # Only the main process prints; the others write to their logs.
        with (
            quiet(not ranks.is_main),
            open_run(parse_settings(sys.argv[1:], __doc__ or ""), ranks) as run,
            panics_raised(),
        ):
            train(run)
    except RunEnd as end:
        if ranks.is_main or end.alone:
            print(end, file=sys.stderr if end.alone else sys.stdout, flush=True)
        note_exit_code(end.exit_code, sentence=str(end))
        sys.exit(end.exit_code)
    except UserError as error:
        exit_with(error, ranks.is_main)
    except Exception as error:
        report(error, explained=ranks.is_local_main)
        sentence = f"{type(error).__name__}: {error}"
        note_exit_code(EXIT_FAILURE, sentence=f"{sentence}\n{explain(sentence)}".rstrip())
        sys.exit(EXIT_FAILURE)


if __name__ == "__main__":
    main()
