"""Hadoop's file systems, through the JVM of the driver. What goes wrong is an OSError."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException

from sparkdl.errors import ConfigError


@contextmanager
def file_system(uri: str, context: Any) -> Iterator[tuple[Any, Any]]:
    """Yield Hadoop's file system of a URI, and its path; what Java raises meanwhile is an OSError."""
    if context is None:
        raise ConfigError(
            f"{uri} is read and written through a SparkContext, and there is none. Start a SparkSession "
            "first; a client of Spark Connect never has one: name a path of its own machine there, which may "
            "be of a mounted file system."
        )
    with as_os_errors(uri):
        path = path_of(uri, context)
        yield path.getFileSystem(context._jsc.hadoopConfiguration()), path


@contextmanager
def as_os_errors(uri: str) -> Iterator[None]:
    """Raise what Java raises in a ``with`` block as an OSError."""
    try:
        yield
    except (Py4JError, PySparkException) as error:
        says, _, _ = str(getattr(error, "java_exception", error)).partition("\n")  # without Java's stack
        raise OSError(f"{uri}: {says}") from error


def path_of(name: str, context: Any) -> Any:
    """Return Hadoop's path of a path or URI."""
    return context._jvm.org.apache.hadoop.fs.Path(name)


def local_path(path: Path, context: Any) -> Any:
    """Return Hadoop's path of a file of this machine."""
    return path_of(path.as_uri(), context)


def local_folder(system: Any, path: Any) -> Path | None:
    """Return the local folder that a path of Hadoop's leads to, perhaps through a view; None elsewhere."""
    uri = system.resolvePath(path).toUri()
    return Path(uri.getPath()) if uri.getScheme() == "file" else None
