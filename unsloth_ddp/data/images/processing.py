"""Turn rendered chats and their images into tokens and tensors with the model's own processor, and collate them.

What a model takes beside tokens is found from what its processor returns: tensors as long as the row belong to its
tokens (token_type_ids), all others to its images (pixel_values, image_grid_thw, image_sizes). Pixels are never stored;
they are read again for each micro-batch.
"""

from __future__ import annotations

import importlib.util
import inspect
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unsloth_ddp.config.options import Settings
from unsloth_ddp.data.chat.labels import IGNORED
from unsloth_ddp.data.chat.template import Span
from unsloth_ddp.data.images.files import open_image, plain_image
from unsloth_ddp.utils.errors import UserError, one_line
from unsloth_ddp.utils.files.opened import recording
from unsloth_ddp.utils.known_errors import without_address

# Pixels on a side of the image of a row that is added for the towers alone.
SMALL = 32
# What the collator makes itself of every row.
OF_TEXT = ("input_ids", "attention_mask", "labels")


@dataclass(frozen=True)
class Expanded:
    """A rendered chat with the tokens of its images in place of the image tokens.

    Args:
        text: after the expansion.
        ids: its tokens.
        offsets: the characters of each token.
        images: the characters of each image, in the text before and after the expansion.
        pixels: numbers in the images' largest tensor of floating point, padding included.
    """

    text: str
    ids: list[int]
    offsets: list[Span]
    images: list[tuple[Span, Span]]
    pixels: int = 0

    def moved(self, span: Span) -> Span:
        """Return where characters of the text before the expansion stand after it."""
        start, end = (self._moved(place) for place in span)
        return start, end

    def _moved(self, place: int) -> int:
        moved_before = [(old, new) for old, new in self.images if old[1] <= place]
        return place + (moved_before[-1][1][1] - moved_before[-1][0][1] if moved_before else 0)


@dataclass(eq=False)
class ImageProcessing:
    """Process the images of rows for one model.

    Args:
        processor: of Transformers.
        most_pixels: larger images are scaled down before.
        always: add a row with one small image and no label to micro-batches without an image, so that the towers run,
            and get gradients, in every micro-batch.
        tokens_a_pixel: work of the towers for each number of an image, in tokens (model/towers.py).
        of_tokens: names and dtypes of the processor's tensors with a value for each token.
        small_row: with one small image and no label.
    """

    processor: Any
    most_pixels: int | None = None
    always: bool = False
    tokens_a_pixel: float = 0.0
    of_tokens: dict[str, torch.dtype] = field(init=False)
    small_row: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        image = plain_image(SMALL, SMALL)
        short, longer = (
            self._process(f"{self.image_token}{text}", [self._open(image)]) for text in ("", " a b c d e f g h")
        )
        self.of_tokens = {
            name: value.dtype
            for name, value in short.items()
            if name not in OF_TEXT
            and all(processed[name].shape == processed["input_ids"].shape for processed in (short, longer))
        }
        self.small_row = self.row_of(image)
        plain = self.processor(text=["Hi"], return_tensors="pt")
        if any(bool(plain[name].any()) for name in self.of_tokens if name in plain):
            raise UserError(
                f"{type(self.processor).__name__} marks text in {', '.join(self.of_tokens)}, which is not supported."
            )

    def row_of(self, image: str) -> dict[str, Any]:
        """Return a row with an image and nothing else, and without a label."""
        ids = self._process(self.image_token, [self._open(image)])["input_ids"][0].numpy()
        of_images = {"images": [image], "rendered": self.image_token, "pixels": 0}
        return {"input_ids": ids, "labels": np.full(len(ids), IGNORED), **of_images}

    def work(self, pixels: np.ndarray) -> np.ndarray:
        """Return the work of rows' images in the towers, in tokens, int64; `pixels` are Expanded.pixels of the rows."""
        return np.rint(pixels * self.tokens_a_pixel).astype(np.int64)

    @property
    def image_token(self) -> str:
        """Return what stands for an image in a text that is not expanded."""
        return str(self.processor.image_token)

    def expand(self, text: str, images: Sequence[str]) -> Expanded:
        """Return a rendered chat as the processor expands it.

        Raises:
            UserError: the processor refuses an image or the text.
        """
        try:
            processed = self.processor(
                text=[text],
                images=[self._open(image) for image in images] or None,
                add_special_tokens=False,
                return_offsets_mapping=True,
                return_text_replacement_offsets=True,
            )
        except UserError:
            raise
        except Exception as error:
            raise _refused(error) from None
        if images and "text_replacement_offsets" not in processed:
            raise UserError(
                f"{type(self.processor).__name__} does not say where images stand in the text, so their tokens cannot "
                "be told from the text's; use a model whose processor is part of Transformers."
            )
        replaced = processed["text_replacement_offsets"][0] if images else []
        expanded, end = "", 0
        for replacement in replaced:
            start, stop = replacement["span"]
            expanded += text[end:start] + replacement["replacement"]
            end = stop
        # Some processors return tensors all the same (Pixtral).
        ids = [int(token) for token in processed["input_ids"][0]]
        offsets = [(int(start), int(stop)) for start, stop in processed["offset_mapping"][0]]
        places = [(tuple(replacement["span"]), tuple(replacement["new_span"])) for replacement in replaced]
        # Some processors return a mask of floating point beside (SmolVLM's).
        pixels = max(_numbers(value) for name, value in processed.items() if name not in OF_TEXT) if images else 0
        return Expanded(expanded + text[end:], ids, offsets, places, pixels)

    def tensors(self, row: dict[str, Any]) -> dict[str, Tensor]:
        """Return what the model takes of a row's images beside tokens; empty without an image.

        Args:
            row: `input_ids`, `rendered` (the text), `images` (paths or data URIs).

        Raises:
            UserError: an image has changed since the row was read.
        """
        if not len(row["images"]):
            return {}
        processed = self._process(row["rendered"], [self._open(image) for image in row["images"]])
        ids = torch.tensor(row["input_ids"], dtype=torch.int64)
        # The kit may have added the EOS token; what is cut holds no image.
        shared = min(len(ids), processed["input_ids"].shape[1])
        if not torch.equal(processed["input_ids"][0, :shared], ids[:shared]):
            raise UserError(
                f"the images of a row ({', '.join(row['images'])[:200]}) have changed since it was read; start the run "
                "again."
            )
        return processed

    def _process(self, text: str, images: list[Any]) -> dict[str, Tensor]:
        try:
            processed = self.processor(text=[text], images=images, add_special_tokens=False, return_tensors="pt")
        except Exception as error:
            raise _refused(error) from None
        return {name: value for name, value in processed.items() if isinstance(value, Tensor)}

    def _open(self, image: str) -> Any:
        return open_image(image, self.most_pixels)

    def collate(self, rows: Sequence[dict[str, Any]], length: int, *, pad_left: bool = False) -> dict[str, Tensor]:
        """Return what a micro-batch takes beside tokens; for rows that are padded to `length` tokens.

        Args:
            rows: see tensors.
            left: whether the padding stands before the rows.
        """
        of_rows = [self.tensors(row) for row in rows]
        batch = {name: torch.zeros(len(rows), length, dtype=kind) for name, kind in self.of_tokens.items()}
        for number, (row, of_row) in enumerate(zip(rows, of_rows, strict=True)):
            tokens = len(row["input_ids"])
            for name in self.of_tokens if of_row else ():
                values = of_row[name][0][:tokens]
                start = length - tokens if pad_left else 0
                batch[name][number, start : start + len(values)] = values
        shown = [of_row for of_row in of_rows if of_row]
        names = [name for name in (shown[0] if shown else ()) if name not in (*OF_TEXT, *self.of_tokens)]
        return batch | {name: join_padded([of_row[name] for of_row in shown]) for name in names}


def _refused(error: Exception) -> UserError:
    cause = one_line(error, 300).rstrip(".")
    return UserError(f"the model's processor refuses the row: {cause}; change its images or text, or remove it.")


def _numbers(value: Any) -> int:
    """Return how many numbers of floating point a processor's value holds: a tensor, an array, or lists of them."""
    if isinstance(value, (list, tuple)):
        return sum(_numbers(item) for item in value)
    floating = isinstance(value, Tensor) and value.is_floating_point()
    floating = floating or (isinstance(value, np.ndarray) and np.issubdtype(value.dtype, np.floating))
    return math.prod(value.shape) if floating else 0


def join_padded(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors along their first dimension, padded with zeros at the end of the others to the largest."""
    shape = [max(sizes) for sizes in zip(*(tensor.shape[1:] for tensor in tensors), strict=True)]
    if all(list(tensor.shape[1:]) == shape for tensor in tensors):
        return torch.cat(list(tensors))
    joined = tensors[0].new_zeros(sum(len(tensor) for tensor in tensors), *shape)
    start = 0
    for tensor in tensors:
        joined[(slice(start, start + len(tensor)), *(slice(0, size) for size in tensor.shape[1:]))] = tensor
        start += len(tensor)
    return joined


@recording()
def load_processing(settings: Settings) -> ImageProcessing:
    """Return the image processing of a run's model.

    Raises:
        UserError: the model takes no images, or its processor cannot be loaded.
    """
    import transformers

    try:
        processor = transformers.AutoProcessor.from_pretrained(
            settings.model, revision=settings.model_revision, trust_remote_code=settings.trust_remote_code
        )
    except ImportError as error:
        raise UserError(f"the processor of model {settings.model} needs a package: {one_line(error, 300)}") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"there are images, and no processor of model {settings.model} can be loaded: "
            f"{without_address(error)[:300].rstrip('.')}; use an image-text model with its processor files, or remove "
            "the images."
        ) from None
    if not hasattr(processor, "image_processor") or getattr(processor, "image_token", None) is None:
        raise UserError(
            f"there are images, and model {settings.model} takes text only ({type(processor).__name__}); use an "
            "image-text model, or remove the images."
        )
    return ImageProcessing(_as_published(processor), settings.image_max_pixels)


def _as_published(processor: Any) -> Any:
    """Return the processor with the functions of its own module, which is read once more if its call was replaced.

    Unsloth replaces the call of Gemma 3's processor by one that does not say where images stand in the text.
    """
    kind = type(processor)
    if kind.__call__.__module__ in {base.__module__ for base in kind.__mro__}:
        return processor
    package, _, module = kind.__module__.rpartition(".")
    name = f"{module}_as_published"
    if not hasattr(sys.modules[package], name):
        spec: Any = importlib.util.spec_from_file_location(f"{package}.{name}", inspect.getfile(kind))
        # Where an import would put it, so that processes that tokenize rows find the class.
        sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[spec.name])
        setattr(sys.modules[package], name, sys.modules[spec.name])
    processor.__class__ = getattr(getattr(sys.modules[package], name), kind.__name__)
    return processor
