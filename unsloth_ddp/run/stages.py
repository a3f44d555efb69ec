"""Carry out the stages of a run, in the order in which train_ddp.py calls them.

A stage calls the packages below with what it needs of the run, and checks a resume as soon as it has learned something
that a checkpoint can contradict. Modules that import Transformers or TRL are imported in the stages that follow
import_backend: Unsloth has to be imported before them.
"""

from __future__ import annotations

import contextlib
import gc
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unsloth_ddp.checkpoints import resume_point
from unsloth_ddp.checkpoints.identity import batch_identity, run_identity, trained_identity
from unsloth_ddp.checkpoints.resume_point import ResumePoint
from unsloth_ddp.checkpoints.writer import Checkpoints
from unsloth_ddp.config.questionable import ignored_settings
from unsloth_ddp.data import dataset
from unsloth_ddp.data.images.processing import load_processing
from unsloth_ddp.data.order.batch_plan import check_layouts
from unsloth_ddp.data.order.packing import BatchRequest
from unsloth_ddp.data.preview import preview_first_row
from unsloth_ddp.data.sources import examples
from unsloth_ddp.data.sources.identity import data_identity, same_everywhere
from unsloth_ddp.data.sources.revisions import ignored_hub_options
from unsloth_ddp.data.training_data import TrainingData
from unsloth_ddp.distributed import backend, sharding
from unsloth_ddp.distributed.exit_codes import note_finished
from unsloth_ddp.distributed.ranks import node_range
from unsloth_ddp.distributed.watch.progress import seconds_since_start
from unsloth_ddp.model.adapter import merge, merge_check
from unsloth_ddp.model.backend import decide_backend
from unsloth_ddp.model.files.chat_template import template_variables
from unsloth_ddp.model.files.check import check_reference
from unsloth_ddp.model.files.find import tokenizer_bytes
from unsloth_ddp.model.files.identity import opened_files
from unsloth_ddp.model.loading import load
from unsloth_ddp.model.loading.reference_model import check_reference_tokens
from unsloth_ddp.model.packing.attention import choose_packing, prove_prompts_shared, prove_rows_apart
from unsloth_ddp.model.packing.tower_attention import join_images
from unsloth_ddp.model.vocabulary import vocabulary_of
from unsloth_ddp.run import answers
from unsloth_ddp.run import summary as summary_file
from unsloth_ddp.run.context import Run
from unsloth_ddp.run.documents import write as documents
from unsloth_ddp.run.documents.files import SETTINGS_FILE
from unsloth_ddp.run.folder import continues, open_run_folder, write_settings
from unsloth_ddp.run.logs import start_logging, stop_library_output
from unsloth_ddp.run.outcomes import RunEnd, not_finished, not_saved, stopped, without_memory
from unsloth_ddp.sizing.ladder import OutOfMemory
from unsloth_ddp.sizing.refuse import check_memory
from unsloth_ddp.utils.versions import versions

if TYPE_CHECKING:
    from unsloth_ddp.training.trainer import DDPTrainer

# Evaluation questions, and the model's answers before training.
Answered = tuple[list[answers.Question], list[str]]


def check_model(run: Run) -> None:
    """Refuse a model or options that this machine cannot load, before anything is imported or read for it."""
    load.check_model(run.settings, run.runtime)
    run.runtime.on_main(lambda: check_reference(run.settings, run.runtime.decided_backend))
    check_memory(run.settings, run.runtime)
    for sentence in [*ignored_settings(run.settings), *ignored_hub_options(run.settings)]:
        print(sentence, flush=True)


def _collect_garbage_again() -> None:
    """Turn garbage collections on after imports; what is imported stays, so they do not walk it."""
    gc.freeze()
    gc.enable()


def read_examples(run: Run) -> None:
    """Read and check every row into the node's folder, before anything slow is imported; `auto` may wait for them."""
    _collect_garbage_again()
    run.runtime.progress.seconds["start"] = seconds_since_start()
    print(f"Reading rows from {', '.join(run.settings.dataset)[:200]} ...", flush=True)
    with run.runtime.progress.timing("rows"):
        variables = template_variables(run.settings)
        examples.read_examples(run.settings, run.runtime, run.node_folder, variables)
        run.images = examples.have_images(run.node_folder)


def import_backend(run: Run) -> None:
    """Import Unsloth, if it is the backend; from here on Transformers and TRL may be imported."""
    settings, runtime = run.settings, run.runtime
    decide_backend(settings, runtime, images=run.images)
    print(f"Importing {'Unsloth' if runtime.backend == 'unsloth' else 'Transformers'} ...", flush=True)
    gc.disable()
    with runtime.progress.timing("import"):
        backend.import_backend(runtime, settings)
    stop_library_output(runtime)


def make_config(run: Run) -> Any:
    """Return TRL's SFTConfig; a mistake in it is found before the model is loaded, which needs it with ZeRO-3."""
    with run.runtime.progress.timing("import"):
        from unsloth_ddp.training.sft_config import make_config

        _collect_garbage_again()
        # Every rank refuses the same values, and only one of them tells.
        return run.runtime.on_every_rank(lambda: make_config(run.settings, run.runtime, _request(run).plan, run.folder))


def check_processor(run: Run) -> None:
    """Refuse images whose processor cannot be loaded, before the model is."""
    if run.images:
        run.runtime.on_main(lambda: load_processing(run.settings), per_node=True)


def find_resume_point(run: Run) -> ResumePoint | None:
    """Return the checkpoint to resume from, if any, brought to every node and compared with the settings."""
    settings, runtime = run.settings, run.runtime
    run.identify(**run_identity(settings, runtime))
    if settings.packing == "off" or (settings.packing == "auto" and runtime.device_type == "cpu"):
        run.identify(**batch_identity(_request(run).plan))
    point = resume_point.find_resume_point(settings, runtime, run.folder, continues(settings, run.folder))
    if point is None:
        return None
    # Before the model is loaded, files that an earlier start opened are compared.
    _identify_files(run, point)
    resume_point.check_resume(point, run.identity, settings, runtime)
    return resume_point.fetch(point, runtime)


def _identify_files(run: Run, resume: ResumePoint | None) -> None:
    """Add the files that loading has opened to what identifies the run; every rank calls this.

    Raises:
        UserError: a node has another file than rank 0.
    """
    earlier = resume.manifest.run.get("files") if resume else None
    run.identify(files=opened_files(run.settings, run.runtime, earlier if isinstance(earlier, dict) else ()))


def load_model(run: Run) -> tuple[Any, Any]:
    """Return the model, on this process's device, and its tokenizer."""
    print(f"Loading model {run.settings.model} ...", flush=True)
    with run.runtime.progress.timing("load"):
        model, tokenizer = load.load_model(run.settings, run.runtime)
        check_reference_tokens(run.settings, run.runtime, tokenizer)
    run.identify(**trained_identity(model))
    return model, tokenizer


def prepare_data(run: Run, model: Any, tokenizer: Any, resume: ResumePoint | None) -> TrainingData:
    """Tokenize the rows once per node, and decide how they are packed and how they fill the steps."""
    settings, runtime = run.settings, run.runtime
    print("Tokenizing rows ...", flush=True)
    # A resumed run keeps the date that its chat template printed when it began.
    template_date = resume.manifest.run.get("chat_template_date") if resume else None
    with runtime.progress.timing("tokenize"):
        vocabulary = vocabulary_of(settings, runtime, model, tokenizer)
        train, evaluation = dataset.tokenize_examples(
            settings, runtime, run.node_folder, tokenizer, template_date, vocabulary
        )
    added = load.stop_at(model, train.stop_tokens)
    if added and settings.method != "full":
        names = ", ".join(f"{tokenizer.convert_ids_to_tokens(ids=token)} ({token})" for token in added)
        print(
            f"The answers end with {names}, at which the base model does not stop. The merged model stops there; with "
            "the adapter alone, add it to eos_token_id when you generate."
        )
    load.check_positions(settings, model, dataset.longest_row(settings, train, evaluation))
    if train.processing is not None:
        join_images(runtime, model)
    with runtime.progress.timing("check_of_packs"):
        choice = choose_packing(settings, runtime, model, images=train.processing is not None)
        choice = prove_rows_apart(settings, runtime, model, train.first_tokens(), choice, train.processing)
        choice = prove_prompts_shared(settings, runtime, model, train.first_tokens(), choice)
    plan, train, packing = dataset.fill_steps(_request(run), train, choice)
    if nodes := node_range():
        check_layouts(
            plan,
            nodes,
            runtime.ranks.local_world_size,
            lambda processes: dataset.fill_steps(BatchRequest.of(settings, processes), train, choice)[0],
            f"{'--packing on ' if train.packing and settings.packing != 'on' else ''}--global_batch_size",
        )
    run.identify(**batch_identity(plan), **data_identity(settings, runtime, plan, train))
    _identify_files(run, resume)
    if evaluation:
        same_everywhere(evaluation, runtime, "evaluation")
    if resume:
        resume_point.check_resume(resume, run.identity, settings, runtime)
        if settings.resume == "auto":
            print(
                f"Resuming from {resume.folder}, step {resume.manifest.step}; use --overwrite or another --run_name to "
                "start again."
            )
    return TrainingData(train, evaluation, plan, packing)


def make_trainer(run: Run, config: Any, model: Any, tokenizer: Any, data: TrainingData) -> DDPTrainer:
    settings, runtime = run.settings, run.runtime
    with runtime.progress.timing("trainer"):
        from unsloth_ddp.sizing.trial import trained_bytes
        from unsloth_ddp.training.trainer import DDPTrainer

        limit, min_bytes = settings.save_total_limit, trained_bytes(model) + tokenizer_bytes(settings)
        checkpoints = Checkpoints(runtime, run.folder, run.identity, versions(), limit, min_bytes)
        return DDPTrainer(settings, runtime, config, model, tokenizer, data, checkpoints, run.stop)


def begin(run: Run, trainer: DDPTrainer, resume: ResumePoint | None) -> None:
    """Choose the micro-batch, open the run's folder, and print how the run trains."""
    settings, runtime = run.settings, run.runtime
    print("Preparing the first step ...", flush=True)
    decision = trainer.choose_rung(resume)
    # A reference has been loaded by now.
    _identify_files(run, resume)
    changes = resume_point.check_resume(resume, run.identity, settings, runtime) if resume else []
    open_run_folder(settings, runtime, run.folder)
    start_logging(run.folder, runtime)
    trainer.checkpoints.open()
    documents.begin(settings, runtime, trainer, run.folder, resume, plain_text=examples.trains_on_text(run.node_folder))
    warnings = sharding.sharding_warnings(runtime.sharding, settings, runtime.ranks.nodes, runtime.copies)
    for sentence in [*changes, *warnings]:
        print(sentence)
    print(summary_file.describe_run(settings, runtime, trainer, decision, run.folder), flush=True)
    for sentence in summary_file.questionable(settings, trainer.data, decision):
        print(sentence, flush=True)
    print(preview_first_row(trainer.data.train, trainer.processing_class, settings.max_length), flush=True)


def answer_before_training(run: Run, trainer: DDPTrainer) -> Answered:
    """Return the evaluation questions that --compare_answers asks for, and the model's answers to them."""
    # With sharded weights no GPU has the whole model to answer with.
    count = 0 if sharding.shards_weights(run.runtime.sharding) else run.settings.compare_answers
    questions = answers.questions(examples.held_out_examples(run.node_folder, count))
    answers.say_too_long(trainer.processing_class, questions)
    with run.runtime.progress.timing("answers"):
        old_answers = _answer(run, trainer, questions)
    return (questions, old_answers) if old_answers is not None else ([], [])


def _answer(run: Run, trainer: DDPTrainer, questions: list[answers.Question]) -> list[str] | None:
    processing = trainer.data.train.processing
    return answers.answer(trainer.model, trainer.processing_class, questions, run.runtime, processing)


def train_from(run: Run, trainer: DDPTrainer, resume: ResumePoint | None) -> dict[str, Any]:
    """Train to the end, and return the summary.

    Raises:
        RunEnd: the ranks stopped together.
    """
    try:
        seconds = trainer.train_from(resume)
        if not trainer.stopped:
            run.stop.finishing = True
            return summary_file.summarize(run.settings, run.runtime, trainer, seconds)
    except OutOfMemory as error:
        trainer.save_without_memory(error)
        ranks, state = run.runtime.ranks, trainer.state
        location = str(run.runtime.locations[ranks.rank]) if ranks.world_size > 1 else ""
        step = min(state.global_step + 1, state.max_steps)
        raise without_memory(error, step, trainer.checkpoints.last, location=location) from error
    cause, checkpoints = str(run.stop.agreed_cause), trainer.checkpoints
    documents.stopped(run.runtime, trainer, run.folder, cause, seconds)
    if checkpoints.last is None:
        raise RunEnd(f"Stopped on {cause} without a complete checkpoint: {checkpoints.failed}.")
    raise stopped(cause, checkpoints.last, named=run.named)


def finish(run: Run, trainer: DDPTrainer, answered: Answered, summary: dict[str, Any]) -> None:
    """Write the result, compare the answers, write the summary.

    Raises:
        RunEnd: a part of that could not be written.
    """
    settings, checkpoints = run.settings, trainer.checkpoints
    questions, old_answers = answered
    removed = run.runtime.broadcast_from_main(lambda: _restore_settings(run))
    if problem := checkpoints.save_final(trainer.write_final):
        raise not_saved(run.folder, problem, checkpoints.last)
    if (new_answers := _answer(run, trainer, questions)) is None:
        questions, old_answers, new_answers = [], [], []
    if settings.merge and (problem := checkpoints.save_folder("merged", lambda aside: _merge(run, trainer, aside))):
        raise not_finished(run.folder, "the merged model", problem, checkpoints.last)
    if questions:
        summary |= answers.report(questions, old_answers, new_answers)
    summary["wall_time_seconds"] = time.perf_counter() - run.began
    facts = documents.answer_facts(questions, old_answers, new_answers)
    documents.finished(run.runtime, trainer, run.folder, summary, facts)
    if problem := checkpoints.in_main(lambda: summary_file.finish(settings, run.folder, summary)):
        raise not_finished(run.folder, summary_file.SUMMARY_FILE, problem, checkpoints.last)
    if problem := run.runtime.broadcast_from_main(lambda: _removed_meanwhile(run)):
        raise not_saved(run.folder, problem, None)
    if removed:
        raise RunEnd(
            f"The result is in {run.folder}, but that folder was removed while the run trained, and with it the logs "
            "and checkpoints that it held then; look for what removes it (a clean-up of scratch disks, say)."
        )
    if checkpoints.failed is not None and not checkpoints.written:
        raise RunEnd(
            f"The result is written and complete, but no checkpoint was: {checkpoints.failed}. Nothing is left to do "
            "for this run; look after the disk before the next one."
        )
    note_finished()


def _restore_settings(run: Run) -> bool:
    """Return whether somebody removed the run's folder; if so, write its settings again for the next start."""
    if (run.folder / SETTINGS_FILE).is_file():
        return False
    with contextlib.suppress(OSError):  # the save of the result tells it
        run.folder.mkdir(parents=True, exist_ok=True)
        write_settings(run.settings, run.folder)
    return True


def _removed_meanwhile(run: Run) -> str | None:
    """Return what became of the result if somebody removed the run's folder while it was written."""
    if not _restore_settings(run):
        return None
    # What is left is no finished run.
    (run.folder / summary_file.SUMMARY_FILE).unlink(missing_ok=True)
    return "somebody removed that folder meanwhile"


def _merge(run: Run, trainer: DDPTrainer, folder: Path) -> None:
    """Write the merged model into `folder`, and compare it with the adapter on the first rows."""
    rows = trainer.data.train
    merge.save_merged(run.settings, run.folder, folder, rows.stop_tokens)
    first = [rows.examples[index]["input_ids"].tolist() for index in range(min(merge_check.ROWS, len(rows.examples)))]
    merge_check.check_merged(run.settings, run.folder, folder, first)


def _request(run: Run) -> BatchRequest:
    return BatchRequest.of(run.settings, run.runtime.ranks.world_size)
