"""Comparison of the rows that workers hold with those that a run began with. All functions are pure."""

from __future__ import annotations

from collections.abc import Sequence

from sparkdl.data.fingerprint import total
from sparkdl.server.state import RowsHeld

REMEDY = (
    "Spark recomputed the rows, and does not guarantee their order after a shuffle. Sort the rows by a key "
    "(df.sortWithinPartitions with preserve_partitions=True), or persist, checkpoint or write them first."
)


def whole(held: Sequence[RowsHeld]) -> tuple[int, int]:
    """Return the number of training rows of a worker group, and the fingerprint of all its rows.

    The fingerprint includes validation rows. It depends neither on the rows' order nor on their workers.
    """
    return sum(each.rows for each in held), total(each.fingerprint for each in held).free


def may_go_on(before: Sequence[RowsHeld], now: Sequence[RowsHeld], *, anywhere: bool) -> bool:
    """Return True if a run may continue with the rows that its workers hold now.

    Args:
        before: rows that each worker held.
        now: rows that each worker holds.
        anywhere: True if rows may have moved to another worker, as in synchronous rounds.
    """
    alike = [each.rows for each in now] == [each.rows for each in before]
    return whole(now) == whole(before) and (alike or anywhere)


def no_rows(validation_rows: int) -> str:
    """Return the error of a run without training rows."""
    return (
        f"There are no rows to train on; the workers have {validation_rows} validation rows only. Hold out "
        "fewer rows."
    )


def other_count(worker: int, rows: int, before: int) -> str:
    """Return the error of a worker that returned with a different number of rows."""
    return (
        f"Worker {worker} restarted with {rows} rows instead of {before}, so its partition differs after it "
        f"was recomputed. {REMEDY}"
    )


def other_order(snapshot: str, *, anywhere: bool, validation: bool) -> str:
    """Return the warning of a run that continues with the same rows in a different order.

    Args:
        snapshot: the snapshot that the run is restored from, in words.
        anywhere: see ``may_go_on``.
        validation: True if rows are held out for validation.
    """
    message = "The workers have the same rows as before, but in a different order; "
    message += (
        f"the run continues from {snapshot}." if anywhere else "each worker continues at its last position."
    )
    if validation:
        message += " With validation_split, different rows may now be held out."
    return f"{message} {REMEDY}"


def other_rows(before: Sequence[RowsHeld], now: Sequence[RowsHeld], owner: str) -> str:
    """Return the error of a run whose workers no longer hold the same rows.

    Args:
        before: rows that each worker held.
        now: rows that each worker holds.
        owner: the owner of these rows: "the checkpoint", "the joint start" or "the previous worker group".
    """
    rows = [tuple(each.rows for each in held) for held in (now, before)]
    says = f"The workers have {rows[0]} training rows; those of {owner} had {rows[1]}"
    if rows[0] == rows[1]:
        says += ", but the values in these rows or in the validation rows differ"
    start = " Resume with the same data, or start a new run with another folder and without resume."
    return f"{says}. {REMEDY}{start if owner == 'the checkpoint' else ''}"


def one_in_other_order(worker: int) -> str:
    """Return the warning of a worker that returned with different rows, or with its rows reordered."""
    return (
        f"Worker {worker} restarted with different rows, or with the same rows in a different order, and "
        f"continues. {REMEDY}"
    )
