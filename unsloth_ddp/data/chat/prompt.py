"""Render a chat with the tokenizer's template for generation, in the form in which rows are rendered for training."""

from collections.abc import Sequence
from typing import Any

from unsloth_ddp.data.chat.variants import variants
from unsloth_ddp.data.images.processing import ImageProcessing
from unsloth_ddp.data.images.values import JoinedText
from unsloth_ddp.data.sources.formats import Example
from unsloth_ddp.data.sources.messages import Message


def example_of(messages: Sequence[Message], template_values: dict[str, Any] | None = None) -> Example:
    """Return messages as an example; contents may be JoinedText, with the values of their images."""
    joined = {str(i): m["content"] for i, m in enumerate(messages) if getattr(m["content"], "images", None)}
    parts = {index: text.parts for index, text in joined.items() if isinstance(text, JoinedText)}
    images = [image for text in joined.values() for image in text.images]
    return Example(list(messages), parts=parts, images=images, template_values=template_values or {})


def rendered(tokenizer: Any, chat: Example, image_token: str | None = None, *, prompt: bool = False) -> str:
    """Return the text of a chat in the first form in which the template shows its last message and its images.

    Args:
        image_token: what stands for an image in a text, if the model takes images.
        prompt: add the generation prompt.

    Raises:
        Exception: as raised by the template.
    """
    texts: list[str] = []
    errors: list[Exception] = []
    for form in variants(chat, lambda: False, image_token):
        try:
            text = tokenizer.apply_chat_template(
                conversation=form.messages,
                tools=form.tools,
                tokenize=False,
                add_generation_prompt=prompt,
                **form.template_values,
            )
        except Exception as error:
            errors.append(error)
            continue
        shown = not image_token or text.count(image_token) == len(chat.images)
        if shown and str(chat.messages[-1]["content"] or "").strip() in text:
            return str(text)
        texts += [text] if shown else []
    if texts:
        return texts[0]
    raise errors[0] if errors else ValueError("the chat template does not render the images")


def inputs_of(tokenizer: Any, chats: Sequence[Example], processing: ImageProcessing | None) -> list[dict[str, Any]]:
    """Return the prompt of each chat as `input_ids`, `rendered` and `images`."""
    token, prompts = processing.image_token if processing else None, []
    for chat in chats:
        text = rendered(tokenizer, chat, token, prompt=True)
        if processing and chat.images:
            ids = processing.expand(text, chat.images).ids
        else:
            ids = tokenizer(text=text, add_special_tokens=False)["input_ids"]
        prompts.append({"input_ids": ids, "rendered": text, "images": chat.images})
    return prompts
