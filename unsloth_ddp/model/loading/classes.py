"""Choose the class of a model: the one that `architectures` in its config.json names, as on the Hub.

A checkpoint is loaded, merged, written and planned for in this class, so that its weights keep their names and none is lost.
Transformers maps some configs to several classes: Qwen3.5's to a text model and to an image-text model.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch

from unsloth_ddp.config.options import Settings
from unsloth_ddp.utils.errors import UserError, one_line

# Classes that are trained: auto class of Transformers -> its table of class names.
TRAINED = {
    "AutoModelForCausalLM": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "AutoModelForImageTextToText": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
}
# Tokens of the row with which a loaded model is checked, and the largest change of an earlier token's logits, relative to
# the change at the last token, that rounding explains.
CHECKED_TOKENS = 8
ROUNDING = {torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 5e-2}


def read_config(settings: Settings) -> Any:
    """Return Transformers' config of the model.

    Raises:
        OSError, ValueError: it cannot be read, or its model_type is not known.
    """
    import transformers

    return transformers.AutoConfig.from_pretrained(
        str(settings.model), revision=settings.model_revision, trust_remote_code=settings.trust_remote_code
    )


def model_class(config: Any, name: str, *, trust_remote_code: bool = False) -> Any:
    """Return the auto class of Transformers whose from_pretrained and from_config make the class that the config names.

    Raises:
        UserError: the model is not a causal language model, with or without images.
    """
    import transformers

    own_code = (getattr(config, "auto_map", None) or {}) if trust_remote_code else {}
    for auto in reversed(TRAINED):
        if auto in own_code:
            return getattr(transformers, auto)
    named = list(getattr(config, "architectures", None) or [])
    _refuse_other_kinds(config, name, named)
    mapped = dict(_mapped_classes(config))
    for auto, classes in mapped.items():
        if set(classes) & set(named):
            return _checked(getattr(transformers, auto), config, name)
    # Names that Transformers does not know, or none: the class for this config, rather than one for a part of it.
    for auto, classes in mapped.items():
        if any(
            getattr(transformers, one).config_class is type(config) for one in classes if hasattr(transformers, one)
        ):
            return _checked(getattr(transformers, auto), config, name)
    raise UserError(
        f"model {name} is a {' or '.join(named) or config.model_type}, and this kit trains causal language models and image-text "
        "models; give another model"
        + ("." if trust_remote_code else ", or --trust_remote_code if its own code defines one.")
    )


def class_name(config: Any, name: str, *, trust_remote_code: bool = False) -> str:
    """Return the name of the class that model_class makes."""
    auto = model_class(config, name, trust_remote_code=trust_remote_code).__name__
    named = list(getattr(config, "architectures", None) or [])
    classes = dict(_mapped_classes(config)).get(auto, ())
    return next((one for one in named if one in classes), classes[0] if classes else "".join(named[:1]))


def _mapped_classes(config: Any) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield each auto class that knows the config, with the names of its classes."""
    from transformers.models.auto import modeling_auto

    for auto, table in TRAINED.items():
        found = getattr(modeling_auto, table).get(config.model_type)
        if found:
            yield auto, (found,) if isinstance(found, str) else tuple(found)


def _refuse_other_kinds(config: Any, name: str, named: list[str]) -> None:
    text = config.get_text_config()
    if getattr(config, "is_encoder_decoder", False) or getattr(text, "is_encoder_decoder", False):
        raise UserError(
            f"model {name} is an encoder-decoder ({''.join(named[:1]) or config.model_type}), and this kit trains causal language "
            "models, which have a decoder only; give one of those."
        )
    tasks = {one: _tasks(one) for one in named}
    trained = set(TRAINED.values())
    if named and all(tasks.values()) and not any(trained & found for found in tasks.values()):
        described = _describe_task(sorted(tasks[named[0]])[0])
        raise UserError(
            f"model {name} is {described} ({named[0]}), and this kit trains causal language models and image-text models; give one "
            "of those."
        )
    if not getattr(config, "is_decoder", True) and _is_bidirectional_family(config):
        raise UserError(
            f"model {name} is of a family that attends to both sides ({config.model_type}, without is_decoder in its config.json), "
            "and this kit trains causal language models, which attend to earlier tokens only; give one of those."
        )


def _tasks(class_name: str) -> set[str]:
    """Return the tables of Transformers that hold a class."""
    from transformers.models.auto import modeling_auto

    tables = {name: table for name, table in vars(modeling_auto).items() if name.endswith("_MAPPING_NAMES")}
    return {
        name
        for name, table in tables.items()
        if any(class_name == one or (isinstance(one, (tuple, list)) and class_name in one) for one in table.values())
        and name not in ("MODEL_FOR_PRETRAINING_MAPPING_NAMES", "CONFIG_MAPPING_NAMES")
    }


def _describe_task(table: str) -> str:
    """Return the words for a table's task: MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES is sequence classification."""
    task = table.removeprefix("MODEL_").removesuffix("MAPPING_NAMES").removeprefix("FOR_").strip("_")
    return f"a model for {task.replace('_', ' ').lower()}" if task else "a model without an output head"


def _is_bidirectional_family(config: Any) -> bool:
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    return config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES


def _checked(auto: Any, config: Any, name: str) -> Any:
    """Return the auto class, after a look at the arguments of the class's forward."""
    import transformers

    made = next(getattr(transformers, one, None) for one in dict(_mapped_classes(config))[auto.__name__])
    if made is None:
        return auto
    arguments = list(inspect.signature(made.forward).parameters.values())[1:]
    needed = [one.name for one in arguments if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD]
    if wanted := [one for one in needed if one != "input_ids"]:
        raise UserError(
            f"model {name} is a {made.__name__}, which needs {' and '.join(wanted)} with every row, and the rows have text only; "
            "give a causal language model."
        )
    if any(one.name == "decoder_input_ids" for one in arguments):
        raise UserError(
            f"model {name} is a {made.__name__}, which reads one sequence and writes another (decoder_input_ids), and this kit trains "
            "causal language models; give one of those."
        )
    return auto


def check_attends_backwards(settings: Settings, model: Any) -> None:
    """Refuse a loaded model whose logits depend on later tokens, or that cannot be called with text alone.

    Two rows that differ in the last token are compared, in evaluation mode and without gradients.
    """
    ids = torch.arange(CHECKED_TOKENS, device=model.device)[None] + 1
    ids = ids % model.get_input_embeddings().num_embeddings
    other = ids.clone()
    other[0, -1] = 0
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            calls = (
                {"input_ids": one, "attention_mask": torch.ones_like(one), "use_cache": False} for one in (ids, other)
            )
            first, second = (model(**call).logits for call in calls)
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(
            f"model {settings.model} ({type(model).__name__}) cannot be called with text alone: {one_line(error)}; give a causal "
            "language model."
        ) from error
    finally:
        model.train(training)
    change = (first - second).float().abs()[0].amax(dim=-1)
    if bool(change[:-1].max() > ROUNDING.get(first.dtype, 1e-3) * change[-1]):
        raise UserError(
            f"model {settings.model} ({type(model).__name__}) attends to later tokens, so a loss on the next token would be wrong; "
            "give a causal language model."
        )
