"""Rows that the processes of an executor share, so that a search stores them once and not for each trial."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterable

from sparkdl.data import spill
from sparkdl.data.schema import Schema
from sparkdl.data.spill import SpillFile

PREFIX = "sparkdl-rows-"


def shared(name: str, schema: Schema, seed: int | None, add: Callable[[SpillFile], object]) -> SpillFile:
    """Return the rows with a name; the first process of the executor that asks for them stores them.

    The others wait for it, and map the same files. The files lie in a local directory of Spark, which deletes
    them at the latest when the executor ends.

    Args:
        name: the name of the rows. Rows with one name are the same.
        schema: the schema of the rows.
        seed: the seed of the buckets, as in SpillFile.
        add: adds the rows to a SpillFile.
    """
    directory = spill.local_directory()
    folder = os.path.join(directory, PREFIX + name)
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "lock"), "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released if the process dies
        rows = SpillFile(schema, directory, seed, folder=folder)
        try:
            if not rows.load():
                add(rows)
                rows.save()
        except BaseException:
            rows.close()
            raise
    return rows


def forget_in_task(search: str, given: Iterable[object]) -> None:
    """Delete the rows whose names begin with that of a search, if this executor has some.

    Args:
        search: the beginning of the names.
        given: the values that Spark gives the task.
    """
    for _ in given:
        pass
    directory = spill.local_directory()
    for name in os.listdir(directory):
        if name.startswith(PREFIX + search):
            shutil.rmtree(os.path.join(directory, name), ignore_errors=True)
