"""Compare the tokens of a tokenizer with the rows of a model's embedding and output head."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from unsloth_ddp.config.options import Settings
from unsloth_ddp.data.vocabulary import Vocabulary
from unsloth_ddp.distributed.runtime import Runtime
from unsloth_ddp.model.adapter.experts import full_shape
from unsloth_ddp.model.files.whole_weights import gathered
from unsloth_ddp.model.loading.reference_model import rows_of_reference
from unsloth_ddp.model.modules import base_model

# Distance up to which two rows count as one, relative to the median distance of a row from the mean of all rows.
# Trained rows are further apart; the noise that Transformers adds to the mean, which it writes for new tokens, is
# smaller.
SAME = 1e-2
# Relative rounding error of a row in bf16.
ROUNDING = 2**-8
# Rows that stand for all where distances are measured, and rows without a token.
SAMPLED = 4096


def vocabulary_of(settings: Settings, runtime: Runtime, model: Any, tokenizer: Any) -> Vocabulary:
    """Return the tokens that a model has weights for; every rank calls this.

    Of weights that ZeRO-3 distributes, untrained rows are not found.
    """
    base = base_model(model)
    ends = [end for end in (base.get_input_embeddings(), base.get_output_embeddings()) if end is not None]
    rows = min(full_shape(end.weight)[0] for end in ends)
    added = sorted(token for token in tokenizer.added_tokens_decoder if token < rows)
    untrained: set[int] = set()
    for end in ends:
        if not added or end.weight.numel() == 0 or _is_trained(end):
            continue
        with torch.no_grad():
            weight = gathered(end.weight)
            unused = torch.arange(min(len(tokenizer), rows), rows)[:SAMPLED]
            same = _untrained(weight, torch.tensor(added, device=weight.device), unused.to(weight.device))
        adapter = getattr(end, "token_adapter", None)
        indices = adapter.token_indices.values() if adapter else ()
        untrained |= {added[place] for place in same} - {token for tokens in indices for token in tokens}
    trained = frozenset(settings.lora_trainable_tokens)
    vocabulary = Vocabulary(f"model {settings.model}", rows, frozenset(untrained), trained)
    if settings.reference_model:
        theirs = runtime.broadcast_from_main(lambda: rows_of_reference(settings))
        if theirs < rows:
            vocabulary = replace(vocabulary, model=f"reference_model {settings.reference_model}", rows=theirs)
    return vocabulary


def _is_trained(end: Any) -> bool:
    """Return whether all rows of the embedding or head are trained, or changed by an adapter."""
    return any(p.requires_grad for name, p in end.named_parameters() if "trainable_tokens" not in name)


def _untrained(weight: Tensor, added: Tensor, unused: Tensor) -> list[int]:
    """Return the places in `added` whose rows are zero, the mean of all rows, or equal to another added or unused row.

    Args:
        weight: (rows, hidden size).
        added, unused: (n,) int64.
    """
    mean = weight.mean(0, dtype=torch.float32)
    sample = weight[:: max(1, len(weight) // SAMPLED)].float()
    limit = max(SAME * (sample - mean).norm(dim=1).median().item(), ROUNDING * mean.norm().item())
    rows = weight[added].float()
    others = torch.cat([rows, weight[unused].float()])
    distances = torch.cdist(rows, others)
    distances.fill_diagonal_(torch.inf)
    nearest = torch.stack([rows.norm(dim=1), (rows - mean).norm(dim=1), distances.min(1).values])
    return (nearest.min(0).values <= limit).nonzero().flatten().tolist()
