"""Answer held-out questions before and after training, greedily, and compare them letter by letter."""

import gc
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from unsloth_ddp.data.chat.prompt import inputs_of, rendered
from unsloth_ddp.data.images.processing import ImageProcessing
from unsloth_ddp.data.sources.formats import Example, Message
from unsloth_ddp.distributed.runtime import Runtime
from unsloth_ddp.utils.errors import one_line
from unsloth_ddp.utils.known_errors import is_out_of_memory
from unsloth_ddp.utils.redaction import printable_lines
from unsloth_ddp.utils.units import counted

logger = logging.getLogger("unsloth_ddp")
SAMPLES = 3
# Tokens that are generated for an answer: enough for the longest expected one and a few around it, such as an empty
# reasoning block, within these bounds.
LEAST_NEW_TOKENS, MOST_NEW_TOKENS = 32, 256
AROUND = 8
# Rows that are answered at once, and tokens of their prompts and answers with padding, which bound the memory of the
# cache of keys and values.
BATCH, BATCH_TOKENS = 64, 16_384
ANY_ANSWER = "@answer@"


@dataclass(frozen=True)
class Question:
    """A question (all turns before the last, and the tools), and the expected answer (the last turn)."""

    turns: list[Message]
    answer: str
    tools: list[Any] | None = None
    parts: dict[str, list[str | None]] = field(default_factory=dict)
    images: list[str] = field(default_factory=list)
    template_values: dict[str, Any] = field(default_factory=dict)

    def with_answer(self, answer: str | None) -> Example:
        """Return the chat up to the answer, and with it unless it is None."""
        last = [] if answer is None else [{"role": "assistant", "content": answer}]
        chat, values = [*self.turns, *last], self.template_values
        return Example(chat, self.tools, parts=self.parts, images=self.images, template_values=values)

    @property
    def shown(self) -> str:
        """Return the last turn with the names of its images; images from bytes and downloads have none."""
        names = ", ".join(
            path.name[:24] if (path := Path(image)).suffix else "an image of the row" for image in self.images
        )
        return f"{self.turns[-1]['content']}{f' ({names})' if names else ''}"


def questions(examples: list[Example]) -> list[Question]:
    """Return the chats that end with a user's question or a tool's result and a text of the assistant, as questions."""
    answerable = [
        Question(
            e.messages[:-1],
            e.messages[-1]["content"],
            e.tools,
            e.parts if e.images else {},
            e.images,
            e.template_values,
        )
        for e in examples
        if _is_question(e.messages) and None not in e.parts.get(str(len(e.messages) - 1), [])
    ]
    if left_out := len(examples) - len(answerable):
        print(
            f"Not compared: {left_out} of {counted(len(examples), 'evaluation row')}, without a question and an answer."
        )
    return answerable


def _is_question(chat: list[Message]) -> bool:
    if len(chat) < 2 or chat[-2]["role"] not in ("user", "tool") or chat[-1]["role"] != "assistant":
        return False
    return bool(chat[-1]["content"].strip()) and not chat[-1].get("tool_calls")


def answer(
    model: Any, tokenizer: Any, questions: list[Question], runtime: Runtime, processing: ImageProcessing | None = None
) -> list[str] | None:
    """Return the model's answers in the order of the questions; each rank generates its share, every rank gets all.

    None if generation failed on a rank, for lack of memory or in the model's own code, which a run should not end for.

    Args:
        processing: of images, if questions have some.
    """
    if not questions:
        return []
    mine = questions[runtime.ranks.rank :: runtime.ranks.world_size]
    was_training = model.training
    if runtime.backend == "unsloth":
        from unsloth import FastLanguageModel

        FastLanguageModel.for_inference(model=model)
    model.eval()
    length, answers = min(max(LEAST_NEW_TOKENS, *_lengths(tokenizer, questions)), MOST_NEW_TOKENS), []
    failed = None
    try:
        for batch in batches(tokenizer, mine, length, processing):
            answers += _generate_in_halves(model, tokenizer, batch, length, processing)
    except Exception as error:
        logger.warning("generation failed", exc_info=True)
        failed = f"{type(error).__name__}: {one_line(error, 200)}"
    if runtime.backend == "unsloth":
        FastLanguageModel.for_training(model=model)
    model.train(mode=was_training)
    shares, failures = runtime.gather(answers), runtime.gather(failed)
    if failure := next(filter(None, failures), None):
        print(f"The answers are not compared, because the model failed to generate ({failure}).", flush=True)
        return None
    return [shares[i % len(shares)][i // len(shares)] for i in range(len(questions))]


def batches(
    tokenizer: Any, questions: list[Question], length: int, processing: ImageProcessing | None = None
) -> Iterator[list[Question]]:
    """Yield the questions in order, as many at once as BATCH and BATCH_TOKENS allow, and at least one."""
    batch: list[Question] = []
    longest = 0
    for question in questions:
        prompt = len(inputs_of(tokenizer, [question.with_answer(None)], processing)[0]["input_ids"])
        tokens = (len(batch) + 1) * (max(longest, prompt) + length)
        if batch and (len(batch) == BATCH or tokens > BATCH_TOKENS):
            yield batch
            batch, longest = [], 0
        batch.append(question)
        longest = max(longest, prompt)
    if batch:
        yield batch


def say_too_long(tokenizer: Any, questions: list[Question]) -> None:
    """Print how many questions expect a longer answer than is generated."""
    if longer := sum(length > MOST_NEW_TOKENS for length in _lengths(tokenizer, questions)):
        print(
            f"The expected answers of {longer} of {counted(len(questions), 'held-out question')} may be longer than "
            f"the {MOST_NEW_TOKENS} tokens that are generated, so they count as not answered exactly."
        )


def _lengths(tokenizer: Any, questions: list[Question]) -> list[int]:
    return [
        len(tokenizer(text=question.answer, add_special_tokens=False)["input_ids"]) + AROUND for question in questions
    ]


def _generate_in_halves(
    model: Any, tokenizer: Any, questions: list[Question], length: int, processing: ImageProcessing | None = None
) -> list[str]:
    """Return the answers; where memory runs out, those of each half of the questions by themselves."""
    try:
        return _generate(model, tokenizer, questions, length, processing)
    except RuntimeError as error:
        if len(questions) == 1 or not is_out_of_memory(error):
            raise
        logger.warning("fewer questions are answered at once: %s", error)
    # Outside the except block, because the exception keeps the cache of keys and values alive.
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    middle = len(questions) // 2
    halves = (questions[:middle], questions[middle:])
    return [text for half in halves for text in _generate_in_halves(model, tokenizer, half, length, processing)]


def _generate(
    model: Any, tokenizer: Any, questions: list[Question], length: int, processing: ImageProcessing | None = None
) -> list[str]:
    prompts = inputs_of(tokenizer, [question.with_answer(None) for question in questions], processing)
    inputs = padded_left(prompts, tokenizer.pad_token_id, processing, model)
    with torch.no_grad():
        generated = model.generate(
            **inputs, max_new_tokens=length, do_sample=False, use_cache=True, pad_token_id=tokenizer.pad_token_id
        )
    new = generated[:, inputs["input_ids"].shape[1] :]
    end = end_of_turn(tokenizer, questions[0])
    return [_until(text, end) for text in tokenizer.batch_decode(sequences=new, skip_special_tokens=True)]


def end_of_turn(tokenizer: Any, question: Question) -> str:
    """Return what the chat template writes after an answer; it may be plain text, as <|im_end|> in many base models."""
    # Not the expected answer, which may be a part of what ends it: "e" is one of <|im_end|>.
    return rendered(tokenizer, question.with_answer(ANY_ANSWER)).rpartition(ANY_ANSWER)[2].strip()


def padded_left(
    prompts: list[dict[str, Any]], pad: int, processing: ImageProcessing | None, model: Any
) -> dict[str, Any]:
    """Return the inputs of generation for prompts of inputs_of, padded on the left, on the model's device."""
    length = max(len(prompt["input_ids"]) for prompt in prompts)
    missing = [length - len(prompt["input_ids"]) for prompt in prompts]
    rows = list(zip(missing, prompts, strict=True))
    inputs = {
        "input_ids": torch.tensor([[pad] * n + list(prompt["input_ids"]) for n, prompt in rows]),
        "attention_mask": torch.tensor([[0] * n + [1] * len(prompt["input_ids"]) for n, prompt in rows]),
    }
    if processing:
        inputs |= processing.collate(prompts, length, pad_left=True)
        # Positions of the images of an earlier batch (M-RoPE), which a batch of texts would take for its own.
        for module in model.modules():
            if getattr(module, "rope_deltas", None) is not None:
                module.rope_deltas = None
    return {
        name: value.to(model.device, model.dtype) if value.is_floating_point() else value.to(model.device)
        for name, value in inputs.items()
    }


def _until(text: str, end: str) -> str:
    return (text.partition(end)[0] if end else text).strip()


def is_exact(question: Question, answer: str) -> bool:
    """Return whether an answer is the expected one, apart from reasoning and from spaces around it."""
    final, expected = (text.rpartition("</think>")[2].strip() for text in (answer, question.answer))
    return final == expected


def report(questions: list[Question], old_answers: list[str], new_answers: list[str]) -> dict[str, float]:
    """Print both accuracies and the first few answers; return what the summary keeps."""
    accuracies = [sum(map(is_exact, questions, answers)) / len(questions) for answers in (old_answers, new_answers)]
    print(
        f"Held-out questions answered exactly: {accuracies[0]:.1%} before, {accuracies[1]:.1%} after "
        f"({len(questions)})."
    )
    for question, old, new in list(zip(questions, old_answers, new_answers, strict=True))[:SAMPLES]:
        shown = f"  {question.shown}\n    before: {old or '(nothing)'}\n    after:  {new or '(nothing)'}"
        print(printable_lines(shown))
    return {"demo_accuracy_before": accuracies[0], "demo_accuracy_after": accuracies[1]}
