"""Put the shards of a checkpoint together to a whole model, layer by layer."""

from __future__ import annotations

import shutil
from pathlib import Path

from unsloth_ddp.checkpoints import manifest
from unsloth_ddp.checkpoints.shards import WEIGHTS, MissingTensor, Shards
from unsloth_ddp.config.options import Settings
from unsloth_ddp.utils.errors import UserError

# What a checkpoint holds for its run only; the rest of its top folder belongs to the model.
OF_THE_RUN = ("trainer_state.json", "training_args.bin", manifest.FILE_NAME, *manifest.READ_ON_RESUME)


def assemble(settings: Settings, checkpoint: Path, target: Path) -> None:
    """Write the model whose weights `checkpoint` holds in shards to `target`, which exists or is made.

    Args:
        settings: of the run.

    Raises:
        UserError: the shards do not hold every weight of the model.
    """
    from unsloth_ddp.checkpoints.sharded_state import named_tensors
    from unsloth_ddp.model.stored_weights import empty_model, keep_what_is_not_modelled
    from unsloth_ddp.model.whole_weights import saved_tensors, write_model

    model = empty_model(checkpoint, settings)
    tensors = named_tensors(model)
    known: dict[int, str] = {}
    try:
        shards = Shards(checkpoint / WEIGHTS)
        for name in shards.names:
            if name in tensors:
                known[id(tensors[name])] = name
        names = list(saved_tensors(model, tensors))
        if missing := [name for name in names if id(tensors[name]) not in known]:
            raise MissingTensor(f"{shards.folder} holds no {missing[0]}")
        target.mkdir(parents=True, exist_ok=True)
        write_model(model, names, lambda name: shards.whole(known[id(tensors[name])]), target, lambda write: write())
    except MissingTensor as error:
        raise UserError(f"{checkpoint} does not hold the whole model: {error}; export another checkpoint.") from None
    for path in sorted(checkpoint.iterdir()):
        if path.is_file() and not any(path.match(pattern) for pattern in OF_THE_RUN):
            shutil.copyfile(path, target / path.name)
    keep_what_is_not_modelled(settings, model, target)
