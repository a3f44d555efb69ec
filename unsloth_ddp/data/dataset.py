"""Tokenize the examples of a run once per node and share them between the node's ranks.

The first process of each node tokenizes into a folder beside the datasets cache; the other ranks wait and map the
same files into memory. batch_plan.py decides which rows a rank sees, and in which order.
"""

import dataclasses
import json
import os
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow.compute as pc

from unsloth_ddp.config.options import Settings
from unsloth_ddp.config.task_options import PAIR_TASKS
from unsloth_ddp.data.arrow_rows import ArrowRows, PackedRows
from unsloth_ddp.data.chat.labels import IGNORED
from unsloth_ddp.data.chat.template import prints_date, use_template_of_processor
from unsloth_ddp.data.chat.tokenize import EncodedRow, Encoder, encode_row
from unsloth_ddp.data.images.processing import ImageProcessing, load_processing
from unsloth_ddp.data.node_folder import room_for_rows
from unsloth_ddp.data.order.batch_plan import BatchPlan
from unsloth_ddp.data.order.mismatched import join_mismatched_rows
from unsloth_ddp.data.order.packing import BatchRequest, Packing, PackingDecision, plan_step
from unsloth_ddp.data.row_report import column_of, most_frequent, report
from unsloth_ddp.data.sources.examples import have_images
from unsloth_ddp.data.sources.formats import Example
from unsloth_ddp.data.vocabulary import Vocabulary
from unsloth_ddp.distributed.runtime import Runtime
from unsloth_ddp.utils.errors import UserError
from unsloth_ddp.utils.redaction import printable
from unsloth_ddp.utils.units import counted

ROWS_AT_A_TIME = 100
ROWS_WITH_PROGRESS_BAR = 10_000
FIRST_ROWS = 8
# A process is started in about the time in which it tokenizes so many rows of a chat.
ROWS_A_PROCESS, MOST_PROCESSES = 1000, 8
# Columns for messages about the rows, which are removed from the tokenized set.
REPORT_FEATURES = datasets.Features(
    {
        "stop_tokens": datasets.List(datasets.Value("int32")),
        "notes": datasets.List(datasets.Value("string")),
        "unread_keys": datasets.List(datasets.Value("string")),
        "written_tokens": datasets.List(datasets.Value("string")),
        "problem": datasets.Value("string"),
        "cuts_image": datasets.Value("bool"),
    }
)
TOKEN_FEATURES = datasets.Features(
    {
        "input_ids": datasets.List(datasets.Value("int32")),
        "labels": datasets.List(datasets.Value("int32")),
        "overlong": datasets.Value("bool"),
        "supervised": datasets.Value("int32"),
    }
)
# Further columns of the tasks, and of rows with images.
PARTS = {"parts": datasets.List(datasets.Value("int32"))}
DESIRABLE = {"desirable": datasets.List(datasets.Value("int32"))}
IMAGES = {
    "images": datasets.List(datasets.Value("string")),
    "rendered": datasets.Value("string"),
    "pixels": datasets.Value("int64"),
}


@dataclass(frozen=True)
class Counts:
    """Counts of a set: rows, tokens, supervised next-token predictions, and rows over max_length.

    Args:
        unsupervised: rows without a supervised token.
        cut_answers: those of them that were truncated.
    """

    rows: int = 0
    tokens: int = 0
    supervised: int = 0
    unsupervised: int = 0
    cut_answers: int = 0
    truncated: int = 0
    dropped: int = 0
    longest: int = 0


@dataclass(frozen=True)
class TokenizedRows:
    """A tokenized set. `dataset` holds one row more than `counts.rows`: the filler at its end (batch_plan.RowOrder).

    `packing` maps rows to packs, or is None if rows are not packed. If the set is `streamed`, it holds only the first
    rows of the source (examples.STREAM_HEAD). `stop_tokens` are the special tokens that end its answers, the most
    frequent first. `template_date` is the date that the chat template printed into the rows, in ISO format, or None if
    it prints none. `added` holds further values of each row that the task computes, by name, each (rows + 1, ...).
    `processing` turns images into tensors, if a row of the run has some. `vocabulary` has the tokens that rows may
    hold.
    """

    dataset: datasets.Dataset
    counts: Counts
    packing: Packing | None = None
    streamed: bool = False
    stop_tokens: tuple[int, ...] = ()
    template_date: str | None = None
    added: dict[str, np.ndarray] = field(default_factory=dict)
    processing: ImageProcessing | None = None
    vocabulary: Vocabulary | None = None

    def supervised(self) -> np.ndarray:
        """Return the supervised tokens of each row, and of the filler, int64 (rows + 1,)."""
        return np.asarray(column_of(self.dataset, "supervised").to_numpy(), dtype=np.int64)

    def pixels(self) -> np.ndarray:
        """Return the numbers of each row's images, as the model takes them, and of the filler's, int64 (rows + 1,)."""
        return np.asarray(column_of(self.dataset, "pixels").to_numpy())

    def work_of_images(self) -> np.ndarray | None:
        """Return the work of each unit's images in the towers, in tokens, and of the filler's; None without images."""
        if self.processing is None:
            return None
        work = self.processing.work(self.pixels())
        return work if self.packing is None else np.append(self.packing.sums(work), work[-1])

    @property
    def units(self) -> int:
        """Number of units that the batch plan counts: packs, or rows."""
        return self.counts.rows if self.packing is None else len(self.packing)

    @property
    def examples(self) -> ArrowRows | PackedRows:
        """Return the units, followed by the filler."""
        return self.rows if self.packing is None else PackedRows(self.rows, self.packing)

    @property
    def rows(self) -> ArrowRows:
        """Return the rows, followed by the filler."""
        return ArrowRows(self.dataset, self.added)

    def first_tokens(self) -> np.ndarray:
        """Return the token ids of the first rows or packs, int (n,)."""
        return np.concatenate([self.examples[row]["input_ids"] for row in range(min(FIRST_ROWS, self.units))])

    def lengths(self) -> np.ndarray:
        """Return the tokens of each unit and of the filler, int64 (units + 1,); of a padded pair twice the longer."""
        if self.packing is not None:
            trained = self.trained_lengths()
            return np.append(self.packing.sums(trained), trained[-1])
        pairs = "parts" in self.dataset.column_names and "desirable" not in self.dataset.column_names
        return 2 * self._parts().max(axis=1) if pairs else self.trained_lengths()

    def trained_lengths(self) -> np.ndarray:
        """Return the tokens of each row and of the filler without padding and mismatched rows, int64 (rows + 1,)."""
        return self._parts()[:, 0] if "desirable" in self.dataset.column_names else row_lengths(self.dataset)

    def _parts(self) -> np.ndarray:
        return pc.list_flatten(column_of(self.dataset, "parts")).to_numpy().reshape(-1, 2).astype(np.int64)


def tokenize_examples(
    settings: Settings,
    runtime: Runtime,
    folder: Path,
    tokenizer: Any,
    template_date: str | None = None,
    vocabulary: Vocabulary | None = None,
) -> tuple[TokenizedRows, TokenizedRows | None]:
    """Tokenize the training and the evaluation set (None without one) in one process of each node.

    Args:
        template_date: the date (ISO format) that a resumed run began with, for chat templates that print one; a new
            run takes today's date in the main process.
        vocabulary: the tokens that the model has weights for; None where it is not loaded.

    Raises:
        UserError: the chat template cannot render a row, a row has a token beyond the vocabulary, or a set has no
            supervised token.
    """
    day = template_date or runtime.broadcast_from_main(lambda: date.today().isoformat())
    processing = load_processing(settings) if have_images(folder) else None
    if processing:
        use_template_of_processor(tokenizer, processing.processor, settings.chat_template)
    encoder = make_encoder(settings, tokenizer, day, processing, vocabulary)

    @room_for_rows(folder)
    def tokenize() -> None:
        for name in ("train", "eval"):
            if (folder / f"examples_{name}").exists():
                examples = datasets.load_from_disk(folder / f"examples_{name}")
                tokenized = _tokenize(examples, encoder, settings, "training" if name == "train" else "evaluation")
                tokenized.save_to_disk(folder / name)

    runtime.on_main(tokenize, per_node=True)
    evaluation = _tokenized_rows(folder / "eval", processing) if (folder / "eval").exists() else None
    train = _tokenized_rows(folder / "train", processing)
    printed = day if prints_date(tokenizer.chat_template) else None
    train = dataclasses.replace(train, streamed=settings.streaming, template_date=printed, vocabulary=vocabulary)
    return train, evaluation


def longest_row(settings: Settings, *sets: TokenizedRows | None) -> int:
    """Return the tokens of the longest row of these sets, or --max_length if a set is streamed."""
    tokenized_sets = [rows for rows in sets if rows is not None]
    return (
        settings.max_length
        if any(rows.streamed for rows in tokenized_sets)
        else max(rows.counts.longest for rows in tokenized_sets)
    )


def _encode(examples: datasets.Dataset, encoder: Encoder, settings: Settings, purpose: str) -> datasets.Dataset:
    """Return the tokens of the rows, with a report on each; `problem` says why a row cannot be rendered."""
    images = IMAGES if encoder.processing is not None else {}
    task_features = PARTS if settings.task in PAIR_TASKS else DESIRABLE if settings.task == "kto" else images
    features = datasets.Features({**TOKEN_FEATURES, **task_features, **REPORT_FEATURES})

    def encode(row: str, location: str) -> dict[str, Any]:
        try:
            encoded, problem = encode_row(encoder, Example.from_json(row), settings.max_length), ""
        except UserError as error:
            encoded, problem = EncodedRow([], []), f"{location}: {error}"
        supervised = sum(label != IGNORED for label in encoded.labels[1:])
        columns = {**vars(encoded), "supervised": supervised, "problem": problem}
        return {name: columns[name] for name in features}

    def encode_all(batch: dict[str, list[str]]) -> dict[str, list[Any]]:
        encoded = [encode(row, location) for row, location in zip(batch["example"], batch["location"], strict=True)]
        return {name: [row[name] for row in encoded] for name in encoded[0]}

    # No more processes than batches, because starting a process takes longer than tokenizing a batch.
    processes = min(settings.dataset_num_proc or own_processes(len(examples)), -(-len(examples) // ROWS_AT_A_TIME))
    if len(examples) >= ROWS_WITH_PROGRESS_BAR:
        datasets.enable_progress_bars()
    encoded = examples.map(
        encode_all,
        desc=f"Tokenizing {purpose} rows",
        batched=True,
        batch_size=ROWS_AT_A_TIME,
        remove_columns=examples.column_names,
        num_proc=processes if processes > 1 else None,
        features=features,
        # The rows are in a folder of this run. A fingerprint would be that of the tokenizer, and take seconds.
        new_fingerprint=purpose,
        load_from_cache_file=False,
    )
    datasets.disable_progress_bars()
    return encoded


def own_processes(rows: int) -> int:
    """Return how many processes tokenize so many rows where the settings do not say."""
    return max(1, min(rows // ROWS_A_PROCESS, len(os.sched_getaffinity(0)) // 2, MOST_PROCESSES))


def _tokenize(examples: datasets.Dataset, encoder: Encoder, settings: Settings, purpose: str) -> datasets.Dataset:
    tokenized = _encode(examples, encoder, settings, purpose)
    problems = column_of(tokenized, "problem")
    problems = problems.filter(pc.not_equal(problems, ""))
    if len(problems):
        raise UserError(problems[0].as_py())
    for sentence in report(tokenized, column_of(examples, "location"), purpose):
        print(printable(sentence), flush=True)
    stop_tokens = most_frequent(column_of(tokenized, "stop_tokens"))
    cuts_image = column_of(tokenized, "cuts_image").to_numpy()
    left_out = column_of(tokenized, "overlong").to_numpy() if settings.overlong == "drop" else cuts_image
    tokenized = tokenized.remove_columns(list(REPORT_FEATURES))
    dropped = 0
    if left_out.any():
        fitting = np.flatnonzero(~left_out)
        if not len(fitting):
            raise UserError(
                f"Every {purpose} row of the {len(tokenized):,} that were read is longer than max_length "
                f"{settings.max_length}, so none is left; raise "
                f"max_length{' or lower image_max_pixels' if cuts_image.any() else ''}."
            )
        if settings.overlong == "truncate":
            print(
                f"{counted(int(cuts_image.sum()), f'{purpose} row')} left out: max_length {settings.max_length} ends "
                "before the last image does; raise max_length or lower image_max_pixels."
            )
        dropped = len(tokenized) - len(fitting)
        tokenized = tokenized.select(fitting).flatten_indices()
    counts = _count(tokenized, dropped)
    if not counts.supervised:
        limit = f"max_length {settings.max_length}"
        cut = f"{limit} cuts off every answer, so raise it"
        fix = cut if counts.cut_answers == counts.rows else f"check that the rows have assistant turns within {limit}"
        other = "" if settings.trains_preferences else ", or use --loss_on all"
        raise UserError(f"The {purpose} set has no supervised token in {counted(counts.rows, 'row')}; {fix}{other}.")
    features = tokenized.features
    if settings.task == "kto":
        for sentence in _balance(tokenized, settings, purpose):
            print(sentence, flush=True)
        features = datasets.Features({**features, **PARTS})
        tokenized = join_mismatched_rows(tokenized, features, settings.max_length, ROWS_AT_A_TIME)
        counts = dataclasses.replace(counts, longest=_longest(tokenized))
    ids, rows = tokenized[0]["input_ids"][:1], 2 if "parts" in features else 1
    filler = {"input_ids": ids * rows, "labels": [IGNORED] * rows, "overlong": False, "supervised": 0}
    further = {"parts": [1, 1], "desirable": [1], "images": [], "rendered": "", "pixels": 0}
    filler |= {name: value for name, value in further.items() if name in features}
    with_filler = datasets.concatenate_datasets([tokenized, datasets.Dataset.from_list([filler], features=features)])
    description = {"counts": dataclasses.asdict(counts), "stop_tokens": list(stop_tokens)}
    with_filler.info.description = json.dumps(description)
    return with_filler


def _count(tokenized: datasets.Dataset, dropped: int) -> Counts:
    unsupervised = pc.equal(column_of(tokenized, "supervised"), 0)
    return Counts(
        rows=len(tokenized),
        tokens=int(row_lengths(tokenized).sum()),
        supervised=pc.sum(column_of(tokenized, "supervised")).as_py(),
        unsupervised=pc.sum(unsupervised).as_py(),
        cut_answers=pc.sum(pc.and_(unsupervised, column_of(tokenized, "overlong"))).as_py(),
        truncated=pc.sum(column_of(tokenized, "overlong")).as_py(),
        dropped=dropped,
        longest=_longest(tokenized),
    )


def _longest(tokenized: datasets.Dataset) -> int:
    """Return the tokens of the longest row; of a pair, each of its rows counts by itself."""
    pairs = "parts" in tokenized.column_names
    return int(
        pc.max(pc.list_flatten(column_of(tokenized, "parts"))).as_py() if pairs else row_lengths(tokenized).max()
    )


def _balance(tokenized: datasets.Dataset, settings: Settings, purpose: str) -> list[str]:
    """Return sentences on labels that kto learns little from, by equation 8 of https://arxiv.org/abs/2402.01306."""
    if len(tokenized) < 2:
        raise UserError(
            f"The {purpose} set has one row, and --task kto compares each with the answer of another; add rows."
        )
    if purpose != "training":
        return []
    desirable = int(pc.sum(pc.list_flatten(column_of(tokenized, "desirable"))).as_py())
    undesirable = len(tokenized) - desirable
    share = f"{desirable:,} of {counted(len(tokenized), 'training row')} are desirable"
    if not desirable or not undesirable:
        return [f"{share}, and kto learns from answers of both kinds; add the others."]
    if not settings.desirable_weight or not settings.undesirable_weight:
        return [f"{share}, and only one of the two kinds has a weight, so kto learns from it alone."]
    ratio = settings.desirable_weight * desirable / (settings.undesirable_weight * undesirable)
    if 1 <= ratio <= 4 / 3:
        return []
    return [
        f"{share}: the weights of the two kinds are {ratio:.2g} : 1 in sum, and 1 to 1.33 : 1 is usual; give "
        "--desirable_weight or --undesirable_weight."
    ]


def row_lengths(tokenized: datasets.Dataset) -> np.ndarray:
    """Return the tokens of every row, int64 (rows,), from the offsets of the table, without reading the ids."""
    return pc.list_value_length(column_of(tokenized, "input_ids")).to_numpy().astype(np.int64)


def _tokenized_rows(path: Path, processing: ImageProcessing | None) -> TokenizedRows:
    tokenized = datasets.load_from_disk(path)
    description = json.loads(tokenized.info.description)
    rows = tokenized.with_format("numpy", columns=["input_ids", "labels"])
    stop_tokens = tuple(description["stop_tokens"])
    return TokenizedRows(rows, Counts(**description["counts"]), stop_tokens=stop_tokens, processing=processing)


def make_encoder(
    settings: Settings,
    tokenizer: Any,
    template_date: str | None,
    processing: ImageProcessing | None = None,
    vocabulary: Vocabulary | None = None,
) -> Encoder:
    """Return the encoder of a run; `template_date` is the date (ISO format) for templates that print one."""
    return Encoder(
        tokenizer,
        supervise_all=settings.loss_on == "all",
        chat_template=settings.chat_template,
        day=date.fromisoformat(template_date) if template_date else None,
        processing=processing,
        vocabulary=vocabulary,
        reasoning_in_content=settings.reasoning_in_content,
    )


def fill_steps(
    request: BatchRequest, rows: TokenizedRows, decision: PackingDecision
) -> tuple[BatchPlan, TokenizedRows, PackingDecision]:
    """Return the plan of a run, the rows with their packs, and the final packing decision (see packing.plan_step)."""
    plan, packing, decision = plan_step(request, row_lengths(rows.dataset)[: rows.counts.rows], decision)
    return plan, dataclasses.replace(rows, packing=packing), decision
