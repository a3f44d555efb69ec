"""Identify the training data of a run, so that a resumed run and every node can be checked against it."""

from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from unsloth_ddp.config.options import Settings
from unsloth_ddp.data.dataset import TokenizedRows
from unsloth_ddp.data.images.values import DATA
from unsloth_ddp.data.order.batch_plan import BatchPlan
from unsloth_ddp.data.sources.rows import is_file
from unsloth_ddp.distributed.runtime import Runtime
from unsloth_ddp.utils.errors import UserError
from unsloth_ddp.utils.files.sources import Source, read_source


def data_identity(settings: Settings, runtime: Runtime, plan: BatchPlan, rows: TokenizedRows) -> dict[str, Any]:
    """Return values that identify the rows of a run and its steps, for manifest.compare.

    Streamed rows are identified by their sources and by the checksum of the first rows.
    """
    identity: dict[str, Any] = {
        "packing": "off" if rows.packing is None else f"packs of up to {rows.packing.capacity} tokens",
        "rows": "streamed" if rows.streamed else rows.counts.rows,
        "steps": plan.steps(rows.units, settings.num_train_epochs, settings.max_steps),
        "data": same_everywhere(rows, runtime, "training"),
        "dataset_revision": settings.dataset_revision,
    }
    if rows.template_date:
        identity["chat_template_date"] = rows.template_date
    if rows.streamed:
        hub = " ".join(word for word in (settings.dataset_split, settings.dataset_config) if word)
        names = (_identity_of_source(source, hub) for source in map(read_source, settings.dataset))
        identity |= {
            "sources": ", ".join(names),
            "sources_revision": settings.dataset_revision,
            "shuffle_buffer": settings.shuffle_buffer,
        }
    return identity


def _identity_of_source(source: Source, hub: str) -> str:
    if is_file(source.name):
        return str(Path(source.name).expanduser().resolve()) + source.suffix
    return f"{source} {hub}"


def same_everywhere(rows: TokenizedRows, runtime: Runtime, purpose: str) -> str:
    """Return a checksum of every token id and label of the set, in order; every rank calls this.

    Raises:
        UserError: the nodes read different rows from their own disks.
    """
    checksums = runtime.gather(runtime.broadcast_from_node_main(lambda: checksum_of_rows(rows)))
    for rank, checksum in enumerate(checksums):
        if checksum != checksums[0]:
            raise UserError(
                f"Node {rank // runtime.ranks.local_world_size} holds other {purpose} rows than node 0 (checksum "
                f"{checksum[:8]} instead of {checksums[0][:8]}); copy the same files to every node."
            )
    return checksums[0]


def _checksum_of_images(rows: TokenizedRows) -> str:
    """Return a checksum of the content of every image of the set, in order."""
    digest, checksums = xxhash.xxh3_128(), dict[str, str]()
    for chunk in rows.dataset.data.column("images").chunks:
        for image in chunk.flatten().to_pylist():
            if image not in checksums:
                content = image if image.startswith(DATA) else Path(image).read_bytes()
                checksums[image] = xxhash.xxh3_128(content).hexdigest()
            digest.update(checksums[image].encode())
        digest.update(np.diff(chunk.offsets.to_numpy()).astype("<i8").data)
    return str(digest.hexdigest())


def checksum_of_rows(rows: TokenizedRows) -> str:
    """Return a checksum of every token id and label of the set, and of borders in pairs and labels of answers."""
    digests = []
    for name in ("input_ids", "labels", "parts", "desirable"):
        if name not in rows.dataset.column_names:
            continue
        values, lengths = xxhash.xxh3_128(), xxhash.xxh3_128()
        for chunk in rows.dataset.data.column(name).chunks:
            values.update(chunk.flatten().to_numpy(zero_copy_only=False).astype("<i4", copy=False).data)
            lengths.update(np.diff(chunk.offsets.to_numpy()).astype("<i8").data)
        digests += [values.hexdigest(), lengths.hexdigest()]
    if rows.processing is not None:
        digests.append(_checksum_of_images(rows))
    return str(xxhash.xxh3_128("".join(digests).encode()).hexdigest())
