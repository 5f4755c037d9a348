"""Files on any file system: local paths through the standard library, URIs through Hadoop.

Failures of both raise OSError. A URI raises ConfigError if there is no SparkContext.
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
from urllib.parse import urlparse

from sparkdl.process import interrupts
from sparkdl.spark import hadoop
from sparkdl.spark.hadoop import Context

logger = logging.getLogger(__name__)
# Errors of os.link on file systems that have no hard links, such as FAT and some FUSE file systems.
# EMLINK: the file system allows no more links to the file.
NO_LINKS = {errno.EPERM, errno.EACCES, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EMLINK}


def is_uri(path: str) -> bool:
    """Return True if a path is a URI, which names its file system."""
    return len(urlparse(path).scheme) > 1


def put(local: Path, target: str, *, overwrite: bool, context: Context, of_spark: bool = False) -> None:
    """Copy a local file to a path or URI. A failure leaves an existing file at a local path unchanged.

    Args:
        local: the file.
        target: the path or URI to copy to; missing folders are created.
        overwrite: whether an existing file may be replaced.
        context: the SparkContext, which URIs need.
        of_spark: whether a plain path is a path of Spark's default file system.

    Raises:
        FileExistsError: the target exists and ``overwrite`` is False.
    """
    if exists(target, context=context, of_spark=of_spark) and not overwrite:
        raise FileExistsError(f"{target} exists; pass overwrite=True to replace it.")
    if not (of_spark or is_uri(target)):
        _put_local(local, Path(os.path.realpath(target)))
        return
    with hadoop.file_system(target, context) as (system, path):
        system.copyFromLocalFile(False, True, hadoop.local_path(local, context), path)


def _put_local(local: Path, target: Path) -> None:
    """Copy a local file to another path, all or nothing; a file that is replaced keeps its mode."""
    target.parent.mkdir(parents=True, exist_ok=True)
    begun = target.with_name(f".sparkdl-{secrets.token_hex(8)}")
    try:
        shutil.copyfile(local, begun)
        if target.exists():
            shutil.copymode(target, begun)
        begun.replace(target)
    finally:
        remove_temporary(begun)


def get(source: str, local: Path, *, context: Context, of_spark: bool = False) -> None:
    """Copy the file at a path or URI to a local file; ``of_spark`` as in ``put``.

    Raises:
        FileNotFoundError: there is no such file.
    """
    if not exists(source, context=context, of_spark=of_spark):
        raise FileNotFoundError(f"There is no file at {source}.")
    if not (of_spark or is_uri(source)):
        shutil.copyfile(source, local)
        return
    with hadoop.file_system(source, context) as (system, path):
        system.copyToLocalFile(False, path, hadoop.local_path(local, context), True)


def exists(target: str, *, context: Context, of_spark: bool = False) -> bool:
    """Return True if there is a file or folder at a path or URI; ``of_spark`` as in ``put``."""
    if not (of_spark or is_uri(target)):
        return Path(target).exists()
    with hadoop.file_system(target, context) as (system, path):
        return bool(system.exists(path))


def names(folder: str, *, context: Context) -> list[str]:
    """Return the names of the entries of a folder at a path or URI; empty if there is no such folder."""
    if not is_uri(folder):
        return sorted(path.name for path in Path(folder).iterdir()) if Path(folder).is_dir() else []
    with hadoop.file_system(folder, context) as (system, path):
        found = system.listStatus(path) if system.exists(path) else ()
        return sorted(each.getPath().getName() for each in found)


def publish(local: Path, target: str, *, context: Context, check: Callable[[], None] = lambda: None) -> None:
    """Move a local file to a path or URI, all or nothing; never replace a file.

    If the target already has the same content, the local file is only removed. Once the target is
    complete, a failure, for example to remove a temporary file, is only logged as a warning.

    Args:
        local: the file; in the same file system as ``target`` if that is a path.
        target: the path or URI to move to.
        context: the SparkContext, which URIs need.
        check: called when the file is complete, just before it gets its name; may raise to prevent that.

    Raises:
        FileExistsError: the target exists with different content.
    """
    if not is_uri(target):
        publish_local(local, Path(target), check)
        return
    begun = f"{target}.{secrets.token_hex(8)}.begun"  # two drivers never write the same unfinished file
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
    """Rename a local file within its file system; failures after the rename are only logged.

    Raises:
        FileExistsError: the target exists with different content.
    """
    with local.open("rb") as file:
        os.fsync(file.fileno())
    check()
    try:
        _link(local, target)
    except FileExistsError as error:
        if not filecmp.cmp(local, target, shallow=False):
            raise FileExistsError(f"{target} already exists, with different content.") from error
    remove_temporary(local)
    with _only_logged(f"The folder of {target} could not be synchronized with the disk"):
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # otherwise a power failure could lose the new name
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
        # Reserve the name, then replace the empty file atomically. A crash in between leaves it
        # empty.
        target.open("xb").close()
        local.replace(target)


def _require_equal(local: Path, target: str, context: Context) -> None:
    """Require the same content in the file at a URI as in a local file.

    Raises:
        FileExistsError: the content differs.
        OSError: there is no file at the URI, so the write failed for another reason.
    """
    if not exists(target, context=context):
        raise OSError(f"{target} cannot be written.")
    with tempfile.TemporaryDirectory() as folder:
        get(target, copy := Path(folder, "copy"), context=context)
        if not filecmp.cmp(local, copy, shallow=False):
            raise FileExistsError(f"{target} already exists, with different content.")


def qualified(path: str, *, context: Context) -> str:
    """Return the full URI of a path of Spark's default file system, or of a URI."""
    with hadoop.file_system(path, context) as (system, found):
        uri = str(system.makeQualified(found).toUri())
    return uri.replace("file:/", "file:///", 1) if not uri.startswith("file:///") else uri


def make_folder(path: str, *, context: Context) -> None:
    """Create a folder in Spark's file system, with its parents."""
    with hadoop.file_system(path, context) as (system, found):
        system.mkdirs(found)


def move(source: str, target: str, *, context: Context) -> None:
    """Move a file or folder within Spark's file system; missing parent folders are created.

    Raises:
        OSError: the file cannot be moved.
    """
    with hadoop.file_system(source, context) as (system, path):
        system.mkdirs(hadoop.path_of(target, context).getParent())
        if not system.rename(path, hadoop.path_of(target, context)):
            raise OSError(f"{source} cannot be moved to {target}.")


def replace_folder(source: str, target: str, *, context: Context) -> None:
    """Move a folder within Spark's file system to a path, and remove the folder that was there.

    If the new folder cannot be moved, the old one is restored and the new one removed. If the old one cannot
    be moved back, both are kept under the names in the error message. A failure to remove the old folder
    afterwards is only logged as a warning.

    Args:
        source: the new folder.
        target: the path to move it to.
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


def _move_back(source: str, target: str, old: str, error: BaseException, context: Context) -> None:
    """Undo the steps that ``replace_folder`` took before an error.

    Raises:
        OSError: the old folder cannot be moved back.
    """
    if exists(old, context=context, of_spark=True):
        try:
            if exists(target, context=context, of_spark=True):  # perhaps a part of the new folder
                raise OSError(f"{target} exists.")
            move(old, target, context=context)
        except OSError as problem:
            raise OSError(
                f"{target} could not be replaced ({error}), and its old content could not be moved back "
                f"({problem}). The old content is in {old}, the new content in {source} or {target}."
            ) from error
    remove(source, context=context)


def discard(target: str, *, context: Context) -> None:
    """Remove a file at a path or URI, if it is there."""
    if not is_uri(target):
        Path(target).unlink(missing_ok=True)
        return
    remove(target, context=context)


def remove_temporary(path: Path) -> None:
    """Remove a local file, if it is there; a failure is logged as a warning."""
    with _only_logged(f"{path} could not be removed"):
        path.unlink(missing_ok=True)


def remove(path: str, *, context: Context) -> None:
    """Remove a file, or a folder with its content, of Spark's file system, if it is there."""
    with hadoop.file_system(path, context) as (system, found):
        system.delete(found, True)


@contextmanager
def _only_logged(what: str) -> Iterator[None]:
    """Log an OSError of a ``with`` block as a warning."""
    try:
        yield
    except OSError as error:
        logger.warning("%s: %s", what, error)
