"""Small files of one folder that several drivers read and write, on any file system."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from py4j.protocol import Py4JError

from sparkdl.spark import hadoop, spark_internals
from sparkdl.spark.files import is_uri, publish_local, remove_temporary
from sparkdl.spark.hadoop import Context

ATOMIC = {"hdfs", "webhdfs", "swebhdfs"}  # schemes whose rename never replaces a file, even in a race
SETTLE_SECONDS = 1.0  # time for the writes of several drivers to take effect on other file systems


class Folder(Protocol):
    """Small files of one folder, on any file system.

    Attributes:
        settle_seconds: seconds after ``create`` in which another driver may still replace the file; 0 where
            files are never replaced.
    """

    settle_seconds: float

    def names(self) -> list[str]:
        """Return the names of the files."""

    def read(self, name: str) -> bytes | None:
        """Return the content of a file; None if there is no such file."""

    def create(self, name: str, data: bytes) -> bool:
        """Write a new file, all or nothing.

        Return False if a file with other content exists, or if another driver removed the unfinished file,
        whose name is a dot, ``name``, a hyphen and hexadecimal digits.
        """

    def rewrite(self, name: str, data: bytes) -> None:
        """Write a file, or overwrite it with the same number of bytes; readers may see a partial write."""

    def stamp(self, name: str) -> object:
        """Return a value that changes with each ``rewrite``; None if there is no such file."""

    def discard(self, name: str) -> None:
        """Remove a file, if it is there."""


def open_folder(uri: str, *, context: Context) -> Folder:
    """Return the folder at a path or URI; create it if it does not exist.

    The URI of a folder that the driver's machine has mounted, such as ``file:///data``, gives a
    ``LocalFolder``.

    Raises:
        ConfigError: ``uri`` is a URI, and there is no SparkContext.
    """
    if not is_uri(uri):
        Path(uri).mkdir(parents=True, exist_ok=True)
        return LocalFolder(Path(uri))
    with hadoop.file_system(uri, context) as (system, path):
        system.mkdirs(path)
        local = hadoop.local_folder(system, path)
        if local is not None:
            return LocalFolder(local)
        return HadoopFolder(system, path, spark_internals.jvm(context))


class LocalFolder:
    """A folder of a file system that the driver's machine has mounted.

    Args:
        path: the folder.
    """

    settle_seconds = 0.0

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()

    def names(self) -> list[str]:
        """Return the names of the files; opening the folder makes NFS refresh its listing."""
        return os.listdir(self.path)

    def read(self, name: str) -> bytes | None:
        """Return the content of a file; None if there is no such file."""
        try:
            return (self.path / name).read_bytes()
        except FileNotFoundError:
            return None

    def create(self, name: str, data: bytes) -> bool:
        """Write a new file, all or nothing; return False if another driver prevents it."""
        begun = self.path / f".{name}-{secrets.token_hex(8)}"
        try:
            begun.write_bytes(data)
            publish_local(begun, self.path / name)
        except FileExistsError:
            return False
        except FileNotFoundError:
            if not self.path.exists() or begun.exists():
                raise
            return False
        finally:
            remove_temporary(begun)
        return True

    def rewrite(self, name: str, data: bytes) -> None:
        """Overwrite a file in place, which works on a full disk; if the write fails, update its mtime."""
        path = self.path / name
        file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
        try:
            os.pwrite(file, data, 0)
        except OSError:
            os.utime(path)
        finally:
            os.close(file)

    def stamp(self, name: str) -> object:
        """Return the modification time and the content of a file; None if there is no such file."""
        try:
            with (self.path / name).open("rb") as file:
                return os.fstat(file.fileno()).st_mtime_ns, file.read()
        except FileNotFoundError:
            return None

    def discard(self, name: str) -> None:
        """Remove a file, if it is there."""
        (self.path / name).unlink(missing_ok=True)


class HadoopFolder:
    """A folder of a Hadoop file system. It stays usable after the SparkContext is stopped.

    Args:
        system: the Hadoop file system.
        path: the folder, as a Hadoop Path.
        jvm: the driver's JVM.
    """

    def __init__(self, system: Any, path: Any, jvm: Any) -> None:
        self._system, self._path, self._jvm = system, path, jvm
        scheme = system.resolvePath(path).toUri().getScheme()
        self.settle_seconds = 0.0 if scheme in ATOMIC else SETTLE_SECONDS

    def names(self) -> list[str]:
        """Return the names of the files."""
        with hadoop.as_os_errors(str(self._path)):
            return [status.getPath().getName() for status in self._system.listStatus(self._path)]

    def read(self, name: str) -> bytes | None:
        """Return the content of a file; None if there is no such file."""
        with self._at(name) as path:
            if not self._system.exists(path):
                return None
            stream = self._system.open(path)
            try:
                return bytes(stream.readAllBytes())
            finally:
                stream.close()

    def create(self, name: str, data: bytes) -> bool:
        """Write a new file, all or nothing; return False if another driver prevents it."""
        with self._at(f".{name}-{secrets.token_hex(8)}") as begun, self._at(name) as path:
            try:
                self._write(begun, data)
                made = not self._system.exists(path) and self._system.rename(begun, path)
                removed = not made and not self._system.exists(begun)
            finally:
                with suppress(Py4JError):
                    self._system.delete(begun, False)
        if not made and (found := self.read(name)) != data:
            if found is None and not removed:
                raise OSError(f"{path} cannot be written.")
            return False
        return True

    def rewrite(self, name: str, data: bytes) -> None:
        """Write a file, or overwrite it."""
        with self._at(name) as path:
            self._write(path, data)

    def stamp(self, name: str) -> object:
        """Return the modification time and the length of a file; None if there is no such file."""
        with self._at(name) as path:
            if not self._system.exists(path):
                return None
            status = self._system.getFileStatus(path)
            return int(status.getModificationTime()), int(status.getLen())

    def discard(self, name: str) -> None:
        """Remove a file, if it is there."""
        with self._at(name) as path:
            self._system.delete(path, False)

    def _write(self, path: Any, data: bytes) -> None:
        stream = self._system.create(path, True)
        try:
            stream.write(bytearray(data))
        finally:
            stream.close()

    @contextmanager
    def _at(self, name: str) -> Iterator[Any]:
        with hadoop.as_os_errors(f"{self._path}/{name}"):
            yield self._jvm.org.apache.hadoop.fs.Path(self._path, name)
