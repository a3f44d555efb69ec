"""Choose the class of a model: the one that `architectures` in its config.json names, as on the Hub.

A checkpoint is loaded, merged, written and planned for in this class, so that its weights keep their names and none is
lost. Transformers maps some configs to several classes: Qwen3.5's to a text model and to an image-text model.
"""

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from unsloth_ddp.config.options import Settings
from unsloth_ddp.model.files.check import check_no_hub_kernel, read_model_file
from unsloth_ddp.model.modules import evaluation_mode
from unsloth_ddp.utils.errors import UserError, one_line
from unsloth_ddp.utils.files.opened import recording

# Classes that are trained: auto class of Transformers -> its table of class names.
TRAINED = {
    "AutoModelForCausalLM": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "AutoModelForImageTextToText": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
}
# Tokens of the row with which a loaded model is checked, and the largest change of an earlier token's logits, relative
# to the change at the last token, that rounding explains.
CHECKED_TOKENS = 8
ROUNDING = {torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 5e-2}


@recording()
def read_config(settings: Settings) -> Any:
    """Return Transformers' config of the model.

    Raises:
        OSError, ValueError: it cannot be read, or its model_type is not known.
        UserError: it names a kernel on the Hub.
    """
    import transformers

    if not settings.trust_remote_code:
        model = str(settings.model)
        check_no_hub_kernel(model, read_model_file(model, "config.json", settings.model_revision))
    return transformers.AutoConfig.from_pretrained(
        str(settings.model), revision=settings.model_revision, trust_remote_code=settings.trust_remote_code
    )


def model_class(config: Any, settings: Settings) -> Any:
    """Return the auto class of Transformers whose from_pretrained and from_config make the class that the config names.

    Raises:
        UserError: the model is not a causal language model, with or without images.
    """
    import transformers

    own_code = (getattr(config, "auto_map", None) or {}) if settings.trust_remote_code else {}
    for auto in reversed(TRAINED):
        if auto in own_code:
            return getattr(transformers, auto)
    named = list(getattr(config, "architectures", None) or [])
    mapped = dict(_mapped_classes(config))
    chosen = next((auto for auto, classes in mapped.items() if set(classes) & set(named)), None)
    if chosen is None and (not named or not all(map(_does_something_else, named))):
        # Names that Transformers does not know, or none: the class for this config, rather than one for a part of it.
        for_config = (auto for auto, classes in mapped.items() if any(_is_for(name, config) for name in classes))
        chosen = next(for_config, None)
    if chosen is None or _reads_other_tokens(config, mapped[chosen][0]):
        raise UserError(
            f"model {settings.model} is a {' or '.join(named) or config.model_type}, and this kit trains causal "
            "language models and image-text models, which have one sequence and attend to its earlier tokens only; "
            "give one of those"
            + ("." if settings.trust_remote_code else ", or --trust_remote_code if its own code defines one.")
        )
    return getattr(transformers, chosen)


def class_name(config: Any, settings: Settings) -> str:
    """Return the name of the class that model_class makes."""
    auto = model_class(config, settings).__name__
    named = list(getattr(config, "architectures", None) or [])
    classes = dict(_mapped_classes(config)).get(auto, ())
    return next((name for name in named if name in classes), classes[0] if classes else "".join(named[:1]))


def _mapped_classes(config: Any) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield each auto class that knows the config, with the names of its classes."""
    from transformers.models.auto import modeling_auto

    for auto, table in TRAINED.items():
        entry = getattr(modeling_auto, table).get(config.model_type)
        if entry:
            yield auto, _names(entry)


def _names(entry: str | Sequence[str]) -> tuple[str, ...]:
    """Return the class names of an entry of a table."""
    return (entry,) if isinstance(entry, str) else tuple(entry)


def _does_something_else(class_name: str) -> bool:
    """Return whether Transformers has a class, and trains it, or the one that it is an older name of, on no text."""
    import transformers
    from transformers.models.auto import modeling_auto

    kinds = {ancestor.__name__ for ancestor in getattr(getattr(transformers, class_name, None), "__mro__", ())}
    trained = (
        name for table in TRAINED.values() for entry in getattr(modeling_auto, table).values() for name in _names(entry)
    )
    return bool(kinds) and kinds.isdisjoint(trained)


def _is_for(class_name: str, config: Any) -> bool:
    import transformers

    return getattr(getattr(transformers, class_name, None), "config_class", None) is type(config)


def _reads_other_tokens(config: Any, class_name: str) -> bool:
    """Return whether a class attends to later tokens, or to those of a second sequence."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    candidate = getattr(transformers, class_name, None)
    second = candidate is not None and "decoder_input_ids" in inspect.signature(candidate.forward).parameters
    return second or (
        not getattr(config, "is_decoder", True) and config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES
    )


def check_attends_backwards(settings: Settings, model: Any) -> None:
    """Refuse a loaded model whose logits depend on later tokens, or that cannot be called with text alone.

    Two rows that differ in the last token are compared, in evaluation mode and without gradients, and in 16 bit with
    autocast, as in training: some layers stay in fp32.
    """
    half = model.dtype in (torch.bfloat16, torch.float16)
    ids = torch.arange(CHECKED_TOKENS, device=model.device)[None] + 1
    ids = ids % model.get_input_embeddings().num_embeddings
    other = ids.clone()
    other[0, -1] = 0
    try:
        with evaluation_mode(model), torch.no_grad(), torch.autocast(model.device.type, model.dtype, enabled=half):
            calls = (
                {"input_ids": row, "attention_mask": torch.ones_like(row), "use_cache": False} for row in (ids, other)
            )
            first, second = (model(**call).logits for call in calls)
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(
            f"model {settings.model} ({type(model).__name__}) cannot be called with text alone: {one_line(error)}; "
            "give a causal language model."
        ) from error
    change = (first - second).float().abs()[0].amax(dim=-1)
    if bool(change[:-1].max() > ROUNDING.get(first.dtype, 1e-3) * change[-1]):
        raise UserError(
            f"model {settings.model} ({type(model).__name__}) attends to later tokens, so a loss on the next token "
            "would be wrong; give a causal language model."
        )
