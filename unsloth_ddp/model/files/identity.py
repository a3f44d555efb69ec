"""Identify a model by its files, to refuse a resumed run if they changed, and a run whose nodes have others.

A model from the Hub is identified by its commit (data/sources/revisions.py), a local folder by checksums of its files.
Up to 4 GiB of weights are read completely; of more, a tenth is sampled. Loading the model reads them again, mostly from
the page cache. Modification times are not compared, because they differ between copies on different nodes.

Config, tokenizer and weights are known before the model is loaded. Every other file that decides on what is trained (an
image processor, a generation config, a reference adapter) is found in what loading opened (utils/files/opened.py).
"""

import functools
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import xxhash

from unsloth_ddp.config.options import Settings
from unsloth_ddp.distributed.runtime import Runtime
from unsloth_ddp.model.files.check import ADAPTER_FILE, base_of_reference, check_folder
from unsloth_ddp.model.files.find import TOKENIZER, model_folder, weight_files
from unsloth_ddp.utils.errors import UserError, os_reason
from unsloth_ddp.utils.files.checksums import SAMPLE, STRIDE, checksum, sampled_checksum
from unsloth_ddp.utils.files.opened import MISSING, UNREAD, opened_below, opened_commits
from unsloth_ddp.utils.files.safe import stays_inside
from unsloth_ddp.utils.units import GIB, counted

READ_COMPLETELY = 4 * GIB
# What is compared between nodes, which read at once, perhaps from one network disk: samples, and their bytes.
SAMPLES_OF_NODE, SAMPLE_BYTES = 1000, 1 << 16
# Checkpoints of earlier releases hold these and nothing of what loading opened.
PARTS = {
    "model_config": ("config.json", ADAPTER_FILE, "*.py"),
    "model_tokenizer": TOKENIZER,
}


def model_identity(settings: Settings) -> dict[str, str]:
    """Return descriptions with checksums of a local model's config, tokenizer and weights; empty for a Hub id.

    Raises:
        OSError: a file cannot be read.
    """
    folder = Path(str(settings.model)).expanduser()
    if not folder.is_dir():
        return {}
    descriptions = {
        name: describe_files(folder, [path for pattern in patterns for path in folder.glob(pattern)])
        for name, patterns in PARTS.items()
    }
    weights = weights_identity(folder)
    return {**descriptions, "model_weights": weights} if weights else descriptions


def weights_identity(folder: Path) -> str | None:
    """Return a description with a checksum of a local model's weights; None if it has no weight files.

    Raises:
        OSError: a file cannot be read.
    """
    files = weight_files(folder)
    return describe_files(folder, files) if files else None


def describe_files(folder: Path, paths: Iterable[Path]) -> str:
    """Return number, bytes and checksum of the files among `paths`, such as "2 files, 1,204 bytes, xxh3 8c1f..."."""
    files = sizes_and_checksums(paths)
    digest = xxhash.xxh3_64()
    for path, (size, file_checksum) in files.items():
        digest.update(f"{path.relative_to(folder)}\0{size}\0{file_checksum}\0".encode())
    total = sum(size for size, _ in files.values())
    return f"{counted(len(files), 'file')}, {total:,} bytes, xxh3 {digest.hexdigest()}"


def sizes_and_checksums(
    paths: Iterable[Path], sample: int = SAMPLE, max_samples: int | None = None
) -> dict[Path, tuple[int, str]]:
    """Return size and checksum of each file among `paths`, sorted by path.

    Args:
        sample: bytes of each sample that is read of many bytes.
        max_samples: about how many samples are read; None reads one every 10 MiB.
    """
    # A name in a forged manifest may be too long for a file system, at which Path.is_file raises.
    files = sorted({path for path in paths if os.path.isfile(path)})
    sizes = [path.stat().st_size for path in files]
    stride = STRIDE if max_samples is None else max(STRIDE, sum(sizes) // max_samples)
    sampled = functools.partial(sampled_checksum, sample=sample, stride=stride)
    read = checksum if sum(sizes) <= READ_COMPLETELY else sampled
    with ThreadPoolExecutor(max_workers=4) as pool:
        return dict(zip(files, zip(sizes, pool.map(read, files), strict=True), strict=True))


def check_same_files(settings: Settings, runtime: Runtime) -> None:
    """Refuse files that a node cannot read completely or that differ from those of rank 0; every rank calls this.

    The ranks never compare weights that they only read. The first process of each node reads the files for the rest.

    Raises:
        UserError: on every rank, naming the file and the rank.
    """
    everyones = runtime.gather(runtime.broadcast_from_node_main(lambda: describe_model(settings)))
    for rank, files in enumerate(everyones):
        if difference := first_difference(everyones[0], files):
            raise UserError(
                f"model {settings.model}: {difference} on {runtime.locations[rank]} differs from that on "
                f"{runtime.locations[0]}; each rank reads the files of its node, so copy the same files to every node."
            )


def describe_model(settings: Settings) -> dict[str, str]:
    """Return size and checksum of config.json and of each weight file.

    The result is empty if the files are not on this machine; loading raises the error then.

    Raises:
        UserError: a file is missing or truncated, or lacks a tensor that the index lists.
    """
    folder = model_folder(settings)
    if folder is None:
        return {}
    check_folder(folder, safetensors_only=settings.use_safetensors)
    try:
        files = sizes_and_checksums([folder / "config.json", *weight_files(folder)], SAMPLE_BYTES, SAMPLES_OF_NODE)
    except OSError as error:
        raise UserError(f"model {settings.model} cannot be read: {os_reason(error)}; check {folder}.") from None
    return {path.name: _shown(size, digest) for path, (size, digest) in files.items()}


def _shown(size: int, digest: str) -> str:
    return f"{size:,} bytes, xxh3 {digest}"


# ---- what loading opened ----


def loaded_folders(settings: Settings) -> dict[str, Path]:
    """Return the folders and files of this machine that a run's models are loaded from, by their part in the run."""
    base = base_of_reference(settings)
    sources = {
        "model": settings.model,
        "reference_model": settings.reference_model,
        "reference_base": base.model if base and base.model != settings.reference_model else None,
        # Otherwise the rows are compared, which it made.
        "chat_template": settings.chat_template if settings.streaming else None,
    }
    paths = {part: Path(source).expanduser() for part, source in sources.items() if source}
    return {part: path for part, path in paths.items() if path.exists()}


def opened_files(settings: Settings, runtime: Runtime, earlier: Iterable[str] = ()) -> dict[str, str]:
    """Return size and checksum of each file that loading has opened on any rank; every rank calls this.

    Files are named by their part in the run and their path, as in model/config.json, and Hub repositories, of which the
    commit is returned, as in hub/OWNER/NAME. Of folders the names of their other files are returned as UNREAD.

    Args:
        earlier: names of files that are described too, because an earlier start opened them.

    Raises:
        UserError: on every rank; a node has another file than rank 0.
    """
    folders = loaded_folders(settings)
    names = {name for opened in runtime.gather(opened_names(folders)) for name in opened} | set(earlier)
    everyones = runtime.gather(runtime.broadcast_from_node_main(lambda: describe_opened(folders, names)))
    for rank, files in enumerate(everyones):
        for name in sorted(names & files.keys() & everyones[0].keys()):
            if files[name] != everyones[0][name]:
                raise UserError(
                    f"{name} on {runtime.locations[rank]} ({files[name]}) differs from that on {runtime.locations[0]} "
                    f"({everyones[0][name]}); each node reads its own files, so copy the same to every node."
                )
    return everyones[0]


def opened_names(folders: Mapping[str, Path]) -> list[str]:
    """Return the names of what this process has opened (see opened_files), sorted."""
    names = [f"hub/{repository}" for repository in opened_commits()]
    for part, folder in folders.items():
        opened = opened_below(folder)
        # The model's weights are compared before it is loaded.
        weights = weight_files(folder) if opened and part != "model" else []
        names += [f"{part}/{name}" for name in opened | {path.name for path in weights}]
    return sorted(names)


def describe_opened(folders: Mapping[str, Path], names: Iterable[str]) -> dict[str, str]:
    """Return the sizes and checksums of these files on this machine (see opened_files)."""
    described = {f"hub/{repository}": f"commit {commit}" for repository, commit in opened_commits().items()}
    for part, folder in folders.items():
        below = [name.removeprefix(f"{part}/") for name in names if name.startswith(f"{part}/")]
        paths = {folder / name: f"{part}/{name}" for name in below if not name or stays_inside(name)}
        if paths and folder.is_dir():
            others = {path for path in folder.iterdir() if path.is_file()} - {*weight_files(folder)}
            described |= {f"{part}/{path.name}": UNREAD for path in sorted(others)}
        files = sizes_and_checksums(paths, SAMPLE_BYTES, SAMPLES_OF_NODE)
        described |= {name: _shown(*files[path]) if path in files else MISSING for path, name in paths.items()}
    return described


def first_difference(ours: dict[str, str], theirs: dict[str, str]) -> str | None:
    """Return the name of the first file that differs; None if all are the same."""
    return next((name for name in sorted(ours.keys() | theirs.keys()) if ours.get(name) != theirs.get(name)), None)
