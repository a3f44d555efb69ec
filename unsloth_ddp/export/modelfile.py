"""Write an Ollama Modelfile, with the chat template in Ollama's own language where that can say it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from unsloth_ddp.data.messages import Message

# Texts that no chat template contains; the template is read off from where they come out.
SYSTEM, QUESTION, ANSWER, FURTHER = "@system@", "@question@", "@answer@", "@further@"


def render_modelfile(tokenizer: Any, file: str, stop_tokens: list[int], *, plain: bool) -> tuple[str, str | None]:
    """Return the Modelfile, and a sentence if it lacks the chat template.

    Args:
        file: name of the GGUF file beside it.
        stop_tokens: at which generation stops.
        plain: the run trained on text without a chat template.
    """

    def render(messages: list[Message], prompt: bool) -> str:
        text = str(tokenizer.apply_chat_template(messages, add_generation_prompt=prompt, tokenize=False))
        # llama.cpp puts BOS in front by itself.
        return text.removeprefix(tokenizer.bos_token or "")

    template = "{{ .Prompt }}" if plain else ollama_template(render)
    missing = None
    lines = [f"FROM ./{file}"]
    if template is None:
        missing = (
            "The Modelfile has no TEMPLATE, because Ollama's language cannot be derived from this chat template; Ollama uses "
            "its own if it recognizes the model (ollama show --template), otherwise write one."
        )
    else:
        lines.append(f'TEMPLATE """{template}"""')
    stops = dict.fromkeys(tokenizer.convert_ids_to_tokens(token) for token in [*stop_tokens, tokenizer.eos_token_id])
    lines += [f'PARAMETER stop "{text}"' for text in stops if '"' not in text]
    return "\n".join(lines) + "\n", missing


def ollama_template(render: Callable[[list[Message], bool], str]) -> str | None:
    """Return a chat template in Ollama's language; None if it is not made of one part for each message.

    Args:
        render: renders messages without BOS; if its second argument is set, with what begins an answer.
    """
    system, user = {"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}
    assistant, further = {"role": "assistant", "content": ANSWER}, {"role": "user", "content": FURTHER}
    try:
        asked, question = render([user], True), render([user], False)
        with_system, answered = render([system, user], True), render([user, assistant], False)
        whole = render([system, user, assistant, further], True)
    except Exception:  # templates raise exceptions of their own, as for a system message
        return None
    if not (asked.startswith(question) and with_system.endswith(asked) and answered.startswith(asked + ANSWER)):
        return None
    begin, end = asked[len(question) :], answered[len(asked) + len(ANSWER) :]
    instruction = with_system[: len(with_system) - len(asked)]
    if instruction.count(SYSTEM) != 1 or question.count(QUESTION) != 1:
        return None
    # The parts, put together again, have to make a longer chat too.
    if whole != instruction + question + begin + ANSWER + end + question.replace(QUESTION, FURTHER) + begin:
        return None
    if any(mark in whole for mark in ("{{", "}}", '"""')):
        return None
    return (
        f"{{{{ if .System }}}}{instruction.replace(SYSTEM, '{{ .System }}')}{{{{ end }}}}"
        f"{{{{ if .Prompt }}}}{question.replace(QUESTION, '{{ .Prompt }}')}{{{{ end }}}}{begin}{{{{ .Response }}}}{end}"
    )
