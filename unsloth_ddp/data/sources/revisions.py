"""Pin the model and the datasets of a run to commits of the Hub, so that every rank and every resume reads the same.

The main process queries the Hub for the commit of each branch or tag once. The commits replace the given revisions in
the settings, so settings.yaml and the manifest of every checkpoint contain them.
"""

import dataclasses
import re
from pathlib import Path
from typing import Literal

from unsloth_ddp.config.options import Settings
from unsloth_ddp.data.sources.rows import is_file
from unsloth_ddp.distributed.runtime import Runtime
from unsloth_ddp.utils.errors import UserError
from unsloth_ddp.utils.files.sources import read_source

COMMIT = re.compile(r"[0-9a-f]{40}")
# Seconds that the Hub may take to answer.
ANSWER_TIME = 20


def dataset_revisions(settings: Settings) -> dict[str, str]:
    """Return the revision of each Hub dataset for which one is given.

    Raises:
        UserError: the number of revisions differs from the number of Hub datasets.
    """
    revisions, names = settings.dataset_revision, _hub_datasets(settings)
    if revisions and len(revisions) != len(names):
        raise UserError(
            f"dataset_revision has {len(revisions)} values ({', '.join(revisions)[:200]}), "
            f"but --dataset and --eval_dataset "
            f"name {len(names)} Hub datasets{' (' + ', '.join(names)[:200] + ')' if names else ''}; give one for each, "
            "or none."
        )
    return dict(zip(names, revisions, strict=False))


def _hub_datasets(settings: Settings) -> list[str]:
    """Return each dataset on the Hub once, in the order of the options."""
    names = [read_source(text).name for text in [*settings.dataset, *settings.eval_dataset]]
    return [name for name in dict.fromkeys(names) if not is_file(name)]


def ignored_hub_options(settings: Settings) -> list[str]:
    """Return a sentence for each option that selects from the Hub although the model or dataset is local."""
    standard = Settings()
    trained, evaluated = (
        [source for source in map(read_source, texts) if not is_file(source.name)]
        for texts in (settings.dataset, settings.eval_dataset)
    )
    local = {
        "model_revision": ("the model", is_file(str(settings.model))),
        "reference_model_revision": ("the reference model", is_file(str(settings.reference_model))),
        "dataset_split": ("the dataset", not trained),
        "eval_dataset_split": ("the evaluation dataset", bool(settings.eval_dataset) and not evaluated),
        "dataset_config": ("the dataset", not trained and not evaluated),
    }
    return [
        f"{name} {getattr(settings, name)} is ignored: {what} is on this machine, and the option selects from the Hub."
        for name, (what, ignored) in local.items()
        if ignored and getattr(settings, name) != getattr(standard, name)
    ]


def pin_revisions(settings: Settings, runtime: Runtime) -> Settings:
    """Return the settings with commits as the revisions of models and datasets; every rank calls this.

    A revision that the Hub does not resolve (no network, no such name, no access) stays as given; reading raises the
    error.

    Raises:
        UserError: the number of dataset revisions differs from the number of Hub datasets.
    """
    reference = settings.of_reference
    model, of_reference, datasets = runtime.broadcast_from_main(
        lambda: (
            _model_commit(settings, runtime),
            _model_commit(reference, runtime) if reference else None,
            _dataset_commits(settings),
        )
    )
    return dataclasses.replace(
        settings, model_revision=model, reference_model_revision=of_reference, dataset_revision=datasets
    )


def _model_commit(settings: Settings, runtime: Runtime) -> str | None:
    name, revision = str(settings.model), settings.model_revision
    if is_file(name):
        return revision
    if revision is None and settings.method == "qlora" and runtime.backend == "unsloth":
        # Unsloth may load a pre-quantized model from another repository, which does not have this commit. With QLoRA
        # the backend does not depend on rows, which are not read yet.
        return None
    return find_commit(name, "model", revision) or revision


def _dataset_commits(settings: Settings) -> list[str]:
    revisions, names = dataset_revisions(settings), _hub_datasets(settings)
    commits = [find_commit(name, "dataset", revisions.get(name)) or revisions.get(name) for name in names]
    # Pin all datasets or keep what was given, because the option has one value per dataset.
    return settings.dataset_revision if None in commits else [str(commit) for commit in commits]


def find_commit(name: str, kind: Literal["model", "dataset"], revision: str | None = None) -> str | None:
    """Return the commit of a branch, tag or abbreviated commit of a Hub repository; None if it cannot be resolved.

    Without a network a model's commit is read from the Hub's cache. Datasets are not looked up there, because
    `datasets` reads prepared tables from its own cache, without revisions.
    """
    if revision and COMMIT.fullmatch(revision):
        return revision
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError

    try:
        return HfApi().repo_info(name, repo_type=kind, revision=revision, timeout=ANSWER_TIME).sha
    except HFValidationError:
        return None
    except Exception:  # the Hub's own errors, those of its HTTP client, and OfflineModeIsEnabled have no common class
        return find_cached_commit(name, kind, revision) if kind == "model" else None


def find_cached_commit(name: str, kind: str, revision: str | None = None) -> str | None:
    """Return the commit of a branch or tag of a Hub repository in this machine's cache; None if it is not there."""
    if revision and COMMIT.fullmatch(revision):
        return revision
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.file_download import repo_folder_name

    reference = Path(HF_HUB_CACHE) / repo_folder_name(repo_id=name, repo_type=kind) / "refs" / (revision or "main")
    try:
        commit = reference.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return None
    return commit if COMMIT.fullmatch(commit) else None
