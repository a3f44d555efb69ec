"""Read and tokenize the rows of a run with the run's own code, in one process."""

from __future__ import annotations

from unsloth_ddp.config.options import Settings
from unsloth_ddp.sizing.rows import RowLengths


def tokenize_rows(settings: Settings) -> RowLengths:
    """Tokenize the training rows with the model's tokenizer, with the checks of train_ddp.py.

    Raises:
        UserError: as in a run, for a bad row, a missing tokenizer or data without supervised tokens.
    """
    from unsloth_ddp.data.dataset import tokenize_examples
    from unsloth_ddp.data.node_folder import node_folder
    from unsloth_ddp.data.sources.examples import read_examples
    from unsloth_ddp.distributed.ranks import Ranks
    from unsloth_ddp.distributed.runtime import Runtime
    from unsloth_ddp.model.loading.load import load_tokenizer

    runtime = Runtime(Ranks(), backend="transformers", device_type="cpu", precision="fp32", device_name="CPU")
    with node_folder(runtime) as folder:
        read_examples(settings, runtime, folder)
        rows, _ = tokenize_examples(settings, runtime, folder, load_tokenizer(settings))
        # The row after these only fills up the last step; see batch_plan.RowOrder. A pair counts with both its rows.
        lengths = rows.lengths()[:-1]
    return RowLengths(lengths, rows.counts.supervised, streamed=rows.streamed, images=rows.processing is not None)
