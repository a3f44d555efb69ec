"""Check that rows of a pack do not influence each other, in this model, in this precision and with this kernel."""

import contextlib
import dataclasses
import itertools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from accelerate.utils import send_to_device
from torch import Tensor

from unsloth_ddp.data.arrow_rows import join_rows
from unsloth_ddp.data.chat.labels import IGNORED
from unsloth_ddp.data.images.files import plain_image
from unsloth_ddp.data.images.processing import ImageProcessing
from unsloth_ddp.data.order.collate import Flatten, PadRight
from unsloth_ddp.model.forward.compile_options import uncompiled
from unsloth_ddp.model.modules import (
    DTYPES,
    base_model,
    embedding_ids,
    kept_gradients,
    kept_random_numbers,
    replaced,
    text_decoder,
    training_mode,
    without_dropout,
)
from unsloth_ddp.utils.errors import one_line

logger = logging.getLogger("unsloth_ddp")

# Tokens of the two rows: a state or a convolution that crosses the border changes much of a short second row.
TOKENS_AHEAD, ROW = 24, 16
# Width, height and grey of the images of two rows; their patches have positions of their own, in more than one line.
IMAGES = ((64, 96, 60), (128, 64, 200))
# The loss of a row has no gradient at all with respect to another row, in any precision; a share of this size is none.
NO_GRADIENT = 1e-6
# Allowed relative differences of a row alone from the row in a pack, in its loss and in gradients: other shapes are
# rounded in other places.
ALONE = {"fp32": (1e-4, 1e-3), "bf16": (2e-2, 0.15), "fp16": (2e-2, 0.15)}
# A model's own noise is measured once, by one other padding: in 16 bit a near tie of a router sends a token to another
# expert.
TIMES_NOISE = 2
# Field of configs that adds a loss of the routers.
ROUTER_LOSS = "output_router_logits"
# Tensors whose gradients are compared: those of the first layers, behind which lies the longest backward pass.
COMPARED = 8


@dataclass
class Pass:
    """The mean loss of a row, its gradients by embedded tokens (tokens, hidden size) and by weights; float32.

    `places` are the positions that the text decoder was called with, if any.
    """

    loss: Tensor
    to_tokens: Tensor
    to_weights: list[Tensor]
    places: Tensor | None


def rows_mix(
    model: Any,
    flatten: Callable[[list[Any]], dict[str, Any]],
    token_ids: np.ndarray,
    precision: str,
    processing: ImageProcessing | None = None,
) -> str | None:
    """Return in a few words how a row changes with the rows before it in a pack; None if it does not.

    Computes loss and gradients of a short row behind other rows in a pack, and alone as a padded row. With images: of a
    row without one, and of a row with one, behind rows with and without.

    Args:
        model: on its device, with whole weights; it is left as it was.
        flatten: packs -> batch, with the keys of this run (see Flatten).
        token_ids: int (n,), tokens of rows, from which the short rows are drawn.
        precision: bf16, fp16 or fp32.
        processing: of images, if rows have some.
    """
    random = np.random.default_rng(0)
    if processing is None:
        packs = [[{"input_ids": random.choice(token_ids, size)} for size in (TOKENS_AHEAD, ROW)]]
    else:
        first, last = (processing.row_of(plain_image(*size)) for size in IMAGES)
        # Tokens of images have no place elsewhere.
        token_ids = token_ids[~np.isin(token_ids, last["input_ids"])]
        texts = [random.choice(token_ids, size) for size in (TOKENS_AHEAD, ROW, ROW)]
        text = last | {"input_ids": texts[1], "images": [], "rendered": ""}
        first, last = (
            row | {"input_ids": np.append(row["input_ids"], more)}
            for row, more in ((first, texts[0]), (last, texts[2]))
        )
        packs = [[first, text], [first, text, last]]
    changes = (_last_row_mixes(model, flatten, rows, precision, processing) for rows in packs)
    return next((change for change in changes if change), None)


def _last_row_mixes(
    model: Any,
    flatten: Callable[[list[Any]], dict[str, Any]],
    rows: list[dict[str, Any]],
    precision: str,
    processing: ImageProcessing | None,
) -> str | None:
    """Return how the last row of a pack changes with the others; None if it does not."""
    # Only the text of the last row is supervised, but for its first token.
    rows = [row | {"labels": np.full(len(row["input_ids"]), IGNORED)} for row in rows]
    rows[-1]["labels"][1 - ROW :] = rows[-1]["input_ids"][1 - ROW :]
    tokens_ahead = sum(len(row["input_ids"]) for row in rows[:-1])
    tried = _try(model, (flatten([join_rows(rows)]), _padded(rows[-1], processing)), precision)
    if isinstance(tried, str):
        return tried
    packed, alone = tried
    share = float(packed.to_tokens[:tokens_ahead].norm() / packed.to_tokens[tokens_ahead:].norm())
    losses = float((packed.loss - alone.loss).abs() / alone.loss.abs().clamp(min=1e-6))
    gradients = _difference(packed.to_weights, alone.to_weights)
    logger.info("packed rows: %.1e of a row's gradient is another row's; alone %.1e, %.1e", share, losses, gradients)
    if not share <= NO_GRADIENT:
        return "the loss of a row depends on the row before it"
    if not _same_places(packed.places, alone.places, tokens_ahead):
        return "a row in a pack has other positions than the row alone"
    loss_off, gradients_off = ALONE[precision]
    if losses <= loss_off and gradients <= gradients_off:
        return None
    noise = _own_noise(model, rows[-1], precision, processing)
    logger.info("the same row with other padding differs by %.1e, %.1e", *noise)
    if losses <= max(loss_off, TIMES_NOISE * noise[0]) and gradients <= max(gradients_off, TIMES_NOISE * noise[1]):
        return None
    return f"a row alone differs from the row in a pack (its loss by {losses:.1e}, its gradients by {gradients:.1e})"


def _own_noise(
    model: Any, row: dict[str, Any], precision: str, processing: ImageProcessing | None
) -> tuple[float, float]:
    """Return how a row alone differs from itself with more padding, in its loss and in its gradients; 0 in fp32."""
    if precision == "fp32":
        return 0.0, 0.0
    tried = _try(model, (_padded(row, processing), _padded(row, processing, ROW + 1)), precision)
    if isinstance(tried, str):
        return 0.0, 0.0
    short, long = tried
    loss = float((short.loss - long.loss).abs() / long.loss.abs().clamp(min=1e-6))
    return loss, _difference(short.to_weights, long.to_weights)


def _same_places(packed: Tensor | None, alone: Tensor | None, tokens_ahead: int) -> bool:
    """Return whether a row in a pack has the M-RoPE positions (several dimensions) that it has alone.

    In 16 bit losses may differ by more than some wrong positions would change them.
    """
    if alone is None or alone.ndim < 3:
        return True
    row = None if packed is None or packed.ndim < 3 else packed[-len(alone) :, :, tokens_ahead:]
    return row is not None and torch.equal(row, alone[..., : row.shape[-1]])


def prompts_differ(model: Any, flatten: Flatten, token_ids: np.ndarray, precision: str) -> str | None:
    """Return in a few words how a pair changes if its prompt is computed once for both answers; None if it does not.

    Compares the loss of the second answer and its gradients, those of the prompt among them, with the pack of two whole
    rows.

    Args:
        model, token_ids, precision: as those of rows_mix.
        flatten: as in rows_mix, without `prompts_once`.
    """
    random = np.random.default_rng(0)
    prompt, *answers = (random.choice(token_ids, size) for size in (TOKENS_AHEAD, ROW, ROW))
    rows = [np.concatenate([prompt, answer]) for answer in answers]
    pack = join_rows([{"input_ids": row, "labels": np.full(len(row), IGNORED)} for row in rows])
    whole_row = TOKENS_AHEAD + ROW
    # Only the second answer is trained on.
    pack["labels"][whole_row:] = np.where(np.arange(whole_row) < TOKENS_AHEAD, IGNORED, pack["input_ids"][whole_row:])
    tried = _try(model, [way([pack]) for way in (flatten, dataclasses.replace(flatten, prompts_once=True))], precision)
    if isinstance(tried, str):
        return tried
    apart, once = tried
    loss = float((apart.loss - once.loss).abs() / apart.loss.abs().clamp(min=1e-6))
    # The prompt's last token is that of the second row.
    of_prompt = slice(whole_row, whole_row + TOKENS_AHEAD - 1)
    tokens = _difference([apart.to_tokens[of_prompt]], [once.to_tokens[: TOKENS_AHEAD - 1]])
    weights = _difference(apart.to_weights, once.to_weights)
    logger.info("prompts computed once differ by %.1e, %.1e in the prompt and %.1e", loss, tokens, weights)
    loss_off, gradients_off = ALONE[precision]
    if not (loss <= loss_off and max(tokens, weights) <= gradients_off):
        return f"the loss would differ by {loss:.1e}, and gradients by {max(tokens, weights):.1e}"
    return None


def _padded(row: dict[str, Any], processing: ImageProcessing | None, padding: int = 1) -> dict[str, Tensor]:
    """Return the row as a batch with padding, so that its attention needs a mask and takes no packed kernel."""
    filler = int(row["input_ids"][-1])
    batch = PadRight(filler, processing)([row])
    fillers = {"input_ids": filler, "labels": IGNORED, "attention_mask": 0}
    fillers |= dict.fromkeys(processing.of_tokens if processing else (), 0)
    return batch | {n: torch.nn.functional.pad(batch[n], (0, padding), value=value) for n, value in fillers.items()}


def _try(model: Any, batches: Sequence[dict[str, Any]], precision: str) -> list[Pass] | str:
    """Return loss and gradients of each batch, or why they cannot be computed."""
    device = model.get_input_embeddings().weight.device
    try:
        with _prepared(model, device):
            return [_compute(model, send_to_device(batch, device), DTYPES[precision]) for batch in batches]
    except Exception as error:
        logger.warning("the check of packed rows failed", exc_info=True)
        return f"a trial of packed rows failed ({one_line(error, 120)})"


@contextlib.contextmanager
def _prepared(model: Any, device: torch.device) -> Iterator[None]:
    """Compute as training does, without dropout and compilation; restore modes, random numbers and gradients.

    A balancing loss of routers, which is of the whole pack and which training does not add, is left out.
    """
    config = base_model(model).config.get_text_config()
    with (
        kept_gradients(p for p in model.parameters() if p.requires_grad),
        replaced(config, ROUTER_LOSS, False),
        training_mode(model),
        without_dropout(model),
        kept_random_numbers(device),
        # Both tiny passes would be compiled, for shapes that training does not have.
        uncompiled(),
    ):
        yield


def _compute(model: Any, batch: dict[str, Any], dtype: torch.dtype) -> Pass:
    """Return loss and gradients of a batch."""
    embedded: list[Tensor] = []
    places: list[Tensor | None] = []

    def keep(_: Any, __: Any, output: Tensor) -> Tensor:
        embedded.append(output.detach().requires_grad_())
        # A copy, since some models scale it in place.
        return embedded[-1].clone()

    def see(_: Any, __: Any, kwargs: dict[str, Any]) -> None:
        places.append(kwargs.get("position_ids"))

    for parameter in model.parameters():
        parameter.grad = None
    with (
        model.get_input_embeddings().register_forward_hook(keep),
        text_decoder(model).register_forward_pre_hook(see, with_kwargs=True),
    ):
        with torch.autocast(batch["input_ids"].device.type, dtype, enabled=dtype is not torch.float32):
            loss = model(**batch, use_cache=False).loss
        loss.backward()
    to_tokens = embedded[0].grad
    assert to_tokens is not None, "the loss does not depend on the embedded tokens"
    embeddings = embedding_ids(model)
    trained = (p.grad for p in text_decoder(model).parameters() if p.grad is not None and id(p) not in embeddings)
    # PEFT's second matrix is 0 at first, and so is the gradient of the first one.
    compared = [gradient.float().clone() for gradient in itertools.islice((g for g in trained if g.any()), COMPARED)]
    return Pass(loss.detach().float(), to_tokens.float().flatten(0, -2), compared, places[0])


def _difference(some: list[Tensor], others: list[Tensor]) -> float:
    """Return the norm of the difference of all tensors over the norm of the first ones."""
    whole = sum(float(tensor.square().sum()) for tensor in some)
    far = sum(float((tensor - other).square().sum()) for tensor, other in zip(some, others, strict=True))
    return math.sqrt(far / max(whole, 1e-30))
