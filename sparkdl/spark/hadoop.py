"""Hadoop's file systems, through the JVM of the driver. Failures raise OSError."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from py4j.protocol import Py4JError
from pyspark import SparkContext
from pyspark.errors import PySparkException

from sparkdl.errors import ConfigError
from sparkdl.spark import spark_internals

Context = SparkContext | None  # None if there is none: only URIs need one


@contextmanager
def file_system(uri: str, context: Context) -> Iterator[tuple[Any, Any]]:
    """Yield the Hadoop file system of a URI and its path; Java exceptions in the block become OSErrors.

    Raises:
        ConfigError: there is no SparkContext.
    """
    if context is None:
        raise ConfigError(
            f"{uri} needs a SparkContext, but there is none. Start a SparkSession first. A client of Spark "
            "Connect never has a SparkContext; use a path on the client's machine there, for example on a "
            "mounted file system."
        )
    with as_os_errors(uri):
        path = path_of(uri, context)
        yield path.getFileSystem(spark_internals.hadoop_configuration(context)), path


@contextmanager
def as_os_errors(uri: str) -> Iterator[None]:
    """Convert Java exceptions in a ``with`` block to OSErrors."""
    try:
        yield
    except (Py4JError, PySparkException) as error:
        says, _, _ = str(getattr(error, "java_exception", error)).partition("\n")  # without Java's stack
        raise OSError(f"{uri}: {says}") from error


def path_of(name: str, context: Context) -> Any:
    """Return the Hadoop Path of a path or URI."""
    return spark_internals.jvm(context).org.apache.hadoop.fs.Path(name)


def local_path(path: Path, context: Context) -> Any:
    """Return the Hadoop Path of a file on this machine."""
    return path_of(path.as_uri(), context)


def local_folder(system: Any, path: Any) -> Path | None:
    """Return the local folder of a Hadoop Path, with ViewFs mounts resolved; None if it is not local."""
    uri = system.resolvePath(path).toUri()
    return Path(uri.getPath()) if uri.getScheme() == "file" else None
