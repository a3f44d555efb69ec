"""Export a run as a GGUF file for llama.cpp, and with a Modelfile (the template in Ollama's language) for Ollama."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from unsloth_ddp.data.sources.messages import Message
from unsloth_ddp.export.folder import whole_or_absent
from unsloth_ddp.export.llama_cpp import CONVERTED, LlamaCpp, ask_gguf, run_converter, run_quantizer
from unsloth_ddp.export.merged import ANSWER_LENGTH, write_merged
from unsloth_ddp.model.loading.trained import load_trained_tokenizer, stop_tokens
from unsloth_ddp.run.result import RunResult


def export_gguf(
    result: RunResult, target: Path, tools: LlamaCpp, weight_type: str, question: str, *, plain: bool, modelfile: bool
) -> tuple[str | None, str | None]:
    """Write a folder with the GGUF file, and a Modelfile if asked, whole or not at all.

    Returns:
        The answer to the question, None if no program here can ask it; and what is missing in the Modelfile, if
        anything.

    Raises:
        UserError: the run cannot be merged, converted or quantized, or llama.cpp does not load what was made.
    """
    missing = None
    with whole_or_absent(target) as aside:
        whole = aside / "whole"
        tokenizer = write_for_conversion(result, whole)
        file = aside / f"{result.run.name}-{weight_type}.gguf"
        if weight_type in CONVERTED:
            run_converter(tools, whole, file, weight_type)
        else:
            sixteen_bit = aside / "bf16.gguf"
            run_converter(tools, whole, sixteen_bit, "bf16")
            run_quantizer(tools, sixteen_bit, file, weight_type)
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
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(ids=ends[0])
        for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"):
            (folder / name).unlink(missing_ok=True)
        tokenizer.save_pretrained(save_directory=folder)
    return tokenizer


# Texts that no chat template contains; the template is read off from where they come out.
SYSTEM, QUESTION, ANSWER, FURTHER = "@system@", "@question@", "@answer@", "@further@"


def render_modelfile(tokenizer: Any, file: str, stop_tokens: list[int], *, plain: bool) -> tuple[str, str | None]:
    """Return the Modelfile for the GGUF file of that name beside it, and a sentence if it lacks the chat template."""

    bos = tokenizer.bos_token if tokenizer.bos_token_id in tokenizer(text="a")["input_ids"] else ""

    def render(messages: list[Message], prompt: bool) -> str:
        text = str(tokenizer.apply_chat_template(conversation=messages, add_generation_prompt=prompt, tokenize=False))
        # llama.cpp puts BOS in front by itself, where the tokenizer does.
        return text.removeprefix(bos)

    derived = ("{{ .Prompt }}", None) if plain else ollama_template(render)
    missing = None
    lines = [f"FROM ./{file}"]
    if derived is None:
        missing = (
            "The Modelfile has no TEMPLATE, because Ollama's language cannot be derived from this chat template; "
            "Ollama uses its own if it recognizes the model (ollama show --template), otherwise write one."
        )
    else:
        template, system = derived
        lines.append(f'TEMPLATE """{template}"""')
        lines += [f'SYSTEM """{system}"""'] if system else []
    stops = dict.fromkeys(
        tokenizer.convert_ids_to_tokens(ids=token) for token in [*stop_tokens, tokenizer.eos_token_id]
    )
    lines += [f'PARAMETER stop "{text}"' for text in stops if '"' not in text]
    return "\n".join(lines) + "\n", missing


def ollama_template(render: Callable[[list[Message], bool], str]) -> tuple[str, str | None] | None:
    """Return a chat template in Ollama's language, and the system prompt that it adds to a chat without one.

    Args:
        render: renders messages without a BOS that llama.cpp adds; with what begins an answer if its second argument is
            set.

    Returns:
        None if the template is not made of one part for each message.
    """
    system, user = {"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}
    assistant, further = {"role": "assistant", "content": ANSWER}, {"role": "user", "content": FURTHER}
    try:
        prompt, question = render([user], True), render([user], False)
        with_system, answered = render([system, user], True), render([user, assistant], False)
        whole = render([system, user, assistant, further], True)
    except Exception:  # templates raise exceptions of their own, as for a system message
        return None
    if not (prompt.startswith(question) and answered.startswith(prompt + ANSWER)):
        return None
    begin, end = prompt[len(question) :], answered[len(prompt) + len(ANSWER) :]
    # A template may add a system prompt of its own in front of the first question, but not of a further one.
    question = whole.partition(ANSWER + end)[2].removesuffix(begin).replace(FURTHER, QUESTION)
    added, instruction = prompt.removesuffix(question + begin), with_system.removesuffix(question + begin)
    if instruction.count(SYSTEM) != 1 or question.count(QUESTION) != 1:
        return None
    opening, closing = instruction.split(SYSTEM)
    default = added[len(opening) : len(added) - len(closing)] or None
    # Without a system prompt in it, Ollama cannot be told to add the part.
    if added != (opening + default + closing if default else ""):
        return None
    # The parts, put together again, have to make a longer chat too.
    if whole != instruction + question + begin + ANSWER + end + question.replace(QUESTION, FURTHER) + begin:
        return None
    if any(mark in whole + added for mark in ("{{", "}}", '"""')):
        return None
    return (
        f"{{{{ if .System }}}}{instruction.replace(SYSTEM, '{{ .System }}')}{{{{ end }}}}"
        f"{{{{ if .Prompt }}}}{question.replace(QUESTION, '{{ .Prompt }}')}{{{{ end }}}}{begin}{{{{ .Response }}}}{end}"
    ), default
