"""Open and write files in folders where somebody else may have put links, and tell whose a folder is."""

import contextlib
import errno
import os
import tempfile
from pathlib import Path, PurePosixPath


def stays_inside(name: str) -> bool:
    """Return whether a name that a file from elsewhere lists stays below the folder that it is relative to."""
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and "\0" not in name


def open_without_following_links(path: Path, flags: int) -> int:
    """Return a descriptor of a file (see os.open), but not of what a symbolic link at `path` points to.

    Raises:
        OSError: with errno ELOOP where `path` is a link.
    """
    try:
        return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a symbolic link", str(path)) from None
        raise


def read_regular(path: Path, max_bytes: int) -> bytes:
    """Return the content of a regular file of at most so many bytes; a pipe or device could keep its reader forever.

    Raises:
        OSError: it is no regular file, is larger, or cannot be read.
    """
    # Opening some devices acts on them, and opening a pipe waits for its writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK) if path.is_file() else None
    if descriptor is None:
        path.stat()
        raise OSError(errno.EINVAL, "it is not a file", str(path))
    with open(descriptor, "rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"it has over {max_bytes:,} bytes", str(path))
    return content


def write_new_file(path: Path, text: str) -> None:
    """Write a new file, in place of a file or link of that name; what a link points to stays as it is."""
    path.unlink(missing_ok=True)
    descriptor = open_without_following_links(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write(text)


def write_whole(path: Path, text: str) -> None:
    """Write a file of which readers see the old text or all of the new one; a failed write leaves nothing behind.

    Raises:
        OSError: it cannot be written.
    """
    if path.exists() and not path.is_file():
        # A rename would replace a pipe or device, such as /dev/stdout.
        path.write_text(text, encoding="utf-8")
        return
    aside = path.with_name(f"{path.name}.partial")
    try:
        write_new_file(aside, text)
        aside.replace(path)
    except OSError:
        # On a full disk, part of the file was written.
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
        raise


def foreign_owner(folder: Path) -> int | None:
    """Return the user id that a folder, or the link to it, belongs to if that is not this process's user; else None.

    Some file systems (NFS with squashed users, mounted Windows disks) give every new file one owner of their own; a
    folder of that owner counts as this user's.
    """
    for owner in {folder.lstat().st_uid, folder.stat().st_uid} - {os.geteuid()}:
        try:
            with tempfile.NamedTemporaryFile(prefix=".unsloth_ddp-", dir=folder) as file:
                if os.fstat(file.fileno()).st_uid == owner:
                    continue
        except OSError:
            pass
        return owner
    return None
