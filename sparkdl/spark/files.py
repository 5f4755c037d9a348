"""Files on any file system: local paths by the standard library, URIs through Hadoop's.

What goes wrong is an OSError, whichever of them says so.
"""

from __future__ import annotations

import errno
import filecmp
import logging
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from sparkdl.process import interrupts
from sparkdl.spark import hadoop

logger = logging.getLogger(__name__)
# What os.link raises on file systems without hard links, such as FAT and some that run in user space.
NO_LINKS = {errno.EPERM, errno.EACCES, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EMLINK}


def is_uri(path: str) -> bool:
    """Return whether a path names a file system; a plain path is local to the driver."""
    return len(urlparse(path).scheme) > 1


def put(local: Path, target: str, *, overwrite: bool, context: Any, of_spark: bool = False) -> None:
    """Copy a local file to a path or URI. A failure leaves what is at a local path as it was.

    Args:
        local: the file.
        target: where it goes; missing folders are made.
        overwrite: whether a file that is there may be replaced.
        context: the SparkContext, which URIs need.
        of_spark: whether a plain path is one of Spark's default file system.

    Raises:
        FileExistsError: there is a file and ``overwrite`` is False.
    """
    if exists(target, context=context, of_spark=of_spark) and not overwrite:
        raise FileExistsError(f"{target} exists; pass overwrite=True to replace it.")
    if not (of_spark or is_uri(target)):
        _put_local(local, Path(os.path.realpath(target)))
        return
    with hadoop.file_system(target, context) as (system, path):
        system.copyFromLocalFile(False, True, hadoop.local_path(local, context), path)


def _put_local(local: Path, target: Path) -> None:
    """Copy a local file to another one, whole or not at all; what is there keeps its mode."""
    target.parent.mkdir(parents=True, exist_ok=True)
    begun = target.with_name(f".sparkdl-{secrets.token_hex(8)}")
    try:
        shutil.copyfile(local, begun)
        if target.exists():
            shutil.copymode(target, begun)
        begun.replace(target)
    finally:
        remove_temporary(begun)


def get(source: str, local: Path, *, context: Any, of_spark: bool = False) -> None:
    """Copy a file at a path or URI, as ``put`` takes it, to a local file.

    Raises:
        FileNotFoundError: there is none.
    """
    if not exists(source, context=context, of_spark=of_spark):
        raise FileNotFoundError(f"There is no file at {source}.")
    if not (of_spark or is_uri(source)):
        shutil.copyfile(source, local)
        return
    with hadoop.file_system(source, context) as (system, path):
        system.copyToLocalFile(False, path, hadoop.local_path(local, context), True)


def exists(target: str, *, context: Any, of_spark: bool = False) -> bool:
    """Return whether there is a file at a path or URI, as ``put`` takes it."""
    if not (of_spark or is_uri(target)):
        return Path(target).exists()
    with hadoop.file_system(target, context) as (system, path):
        return bool(system.exists(path))


def names(folder: str, *, context: Any) -> list[str]:
    """Return the names of what is in a folder at a path or URI; none if there is no such folder."""
    if not is_uri(folder):
        return sorted(path.name for path in Path(folder).iterdir()) if Path(folder).is_dir() else []
    with hadoop.file_system(folder, context) as (system, path):
        found = system.listStatus(path) if system.exists(path) else ()
        return sorted(each.getPath().getName() for each in found)


def publish(local: Path, target: str, *, context: Any, check: Callable[[], None] = lambda: None) -> None:
    """Move a local file to a path or URI, whole or not at all, and never replace a file.

    Nothing happens where a file of the same content is there already. A failure after the file has its name,
    as in the removal of temporary files, is logged as a warning.

    Args:
        local: the file; where ``target`` is a path it has to be in the same file system.
        target: where it goes.
        context: the SparkContext, which URIs need.
        check: called when the file is complete, just before it gets its name; may raise instead.

    Raises:
        FileExistsError: there is a file of other content.
    """
    if not is_uri(target):
        publish_local(local, Path(target), check)
        return
    begun = f"{target}.{secrets.token_hex(8)}.begun"  # two drivers never write one unfinished file
    with hadoop.file_system(target, context) as (system, path):
        if (folder := hadoop.local_folder(system, path.getParent())) is not None:
            mine = folder / Path(begun).name
            try:
                shutil.copyfile(local, mine)
                publish_local(mine, folder / path.getName(), check)
            finally:
                remove_temporary(mine)
            remove_temporary(local)
            return
        temporary = hadoop.path_of(begun, context)
        try:
            system.copyFromLocalFile(False, True, hadoop.local_path(local, context), temporary)
            there = system.exists(path)
            check()
            if there or not system.rename(temporary, path):
                _require_equal(local, target, context)
        finally:
            with _only_logged(f"{begun} could not be removed"), hadoop.as_os_errors(begun):
                system.delete(temporary, False)
    remove_temporary(local)


def publish_local(local: Path, target: Path, check: Callable[[], None] = lambda: None) -> None:
    """Give a local file another name in its file system; what fails after that is only logged.

    Raises:
        FileExistsError: a file of other content has that name.
    """
    with local.open("rb") as file:
        os.fsync(file.fileno())
    check()
    try:
        _link(local, target)
    except FileExistsError as error:
        if not filecmp.cmp(local, target, shallow=False):
            raise FileExistsError(f"{target} exists already, with other content.") from error
    remove_temporary(local)
    with _only_logged(f"The name of {target} could not be synchronized with the disk"):
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # or the new name could be lost with the machine's power
        finally:
            os.close(folder)


def _link(local: Path, target: Path) -> None:
    try:
        os.link(local, target)
    except FileExistsError:
        raise
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        target.open("xb").close()  # reserves the name; the file that replaces it is whole
        local.replace(target)


def _require_equal(local: Path, target: str, context: Any) -> None:
    """Check that the file at a URI has the content of a local one.

    Raises:
        FileExistsError: its content differs.
        OSError: there is no such file, so that something else kept it from being written.
    """
    if not exists(target, context=context):
        raise OSError(f"{target} cannot be written.")
    with tempfile.TemporaryDirectory() as folder:
        get(target, copy := Path(folder, "copy"), context=context)
        if not filecmp.cmp(local, copy, shallow=False):
            raise FileExistsError(f"{target} exists already, with other content.")


def qualified(path: str, *, context: Any) -> str:
    """Return the URI of a path of Spark's default file system, or of a URI, with its file system in it."""
    with hadoop.file_system(path, context) as (system, found):
        uri = str(system.makeQualified(found).toUri())
    return uri.replace("file:/", "file:///", 1) if not uri.startswith("file:///") else uri


def make_folder(path: str, *, context: Any) -> None:
    """Make a folder of Spark's, and those it is in."""
    with hadoop.file_system(path, context) as (system, found):
        system.mkdirs(found)


def move(source: str, target: str, *, context: Any) -> None:
    """Move a file of Spark's within its file system; missing folders are made.

    Raises:
        OSError: it cannot be moved.
    """
    with hadoop.file_system(source, context) as (system, path):
        system.mkdirs(hadoop.path_of(target, context).getParent())
        if not system.rename(path, hadoop.path_of(target, context)):
            raise OSError(f"{source} cannot be moved to {target}.")


def replace_folder(source: str, target: str, *, context: Any) -> None:
    """Move a folder of Spark's to a path, and remove the folder that was there.

    After a failure the old folder is back and the new one is removed. If the old one cannot be moved back,
    both are kept under the names that the error gives.

    Args:
        source: the new folder.
        target: the path.
        context: the SparkContext.

    Raises:
        OSError: a folder cannot be moved.
    """
    old = f"{source}.old"
    with interrupts.held():
        try:
            if exists(target, context=context, of_spark=True):
                move(target, old, context=context)
            move(source, target, context=context)
        except BaseException as error:
            _move_back(source, target, old, error, context)
            raise
        with _only_logged(f"{old} could not be removed"):
            remove(old, context=context)


def _move_back(source: str, target: str, old: str, error: BaseException, context: Any) -> None:
    """Undo what ``replace_folder`` has done before an error.

    Raises:
        OSError: the old folder cannot be moved back.
    """
    if exists(old, context=context, of_spark=True):
        try:
            if exists(target, context=context, of_spark=True):  # perhaps a part of the new one
                raise OSError(f"{target} exists.")
            move(old, target, context=context)
        except OSError as problem:
            raise OSError(
                f"{target} could not be replaced ({error}), and its old content could not be moved back "
                f"({problem}). The old content is in {old}, the new content in {source} or {target}."
            ) from error
    remove(source, context=context)


def discard(target: str, *, context: Any) -> None:
    """Remove a file at a path or URI, if it is there."""
    if not is_uri(target):
        Path(target).unlink(missing_ok=True)
        return
    remove(target, context=context)


def remove_temporary(path: Path) -> None:
    """Remove a local file, if it is there; a failure is logged as a warning."""
    with _only_logged(f"{path} could not be removed"):
        path.unlink(missing_ok=True)


def remove(path: str, *, context: Any) -> None:
    """Remove a file of Spark's, or a folder and all in it, if it is there."""
    with hadoop.file_system(path, context) as (system, found):
        system.delete(found, True)


@contextmanager
def _only_logged(what: str) -> Iterator[None]:
    """Log an OSError of a ``with`` block as a warning."""
    try:
        yield
    except OSError as error:
        logger.warning("%s: %s", what, error)
