"""Checks of an update's header before any of its sections are read. No function changes any state."""

from __future__ import annotations

from math import isfinite

from sparkdl.errors import RefusedError
from sparkdl.server.aggregation import Aggregation
from sparkdl.server.state import RunSpec
from sparkdl.transport.messages import Flag, Kind, Sections, Update

MERGED = Kind.GRADIENT, Kind.DELTA
# The sections that an update of each kind may have.
SECTIONS = {
    Kind.GRADIENT: ("parameters", "statistics"),
    Kind.DELTA: ("parameters", "statistics"),
    Kind.REPORT: ("parameters", "statistics", "metrics", "state"),
    Kind.STATE: ("parameters", "statistics", "metrics", "state"),
    Kind.VALIDATION: ("metrics",),
    Kind.GIVE: ("state",),
}
# Size limit, in bytes, of the rows that a worker gives to another worker in one message.
ROWS_BYTES = 1 << 30


def check_run(update: Update, run: bytes) -> None:
    """Refuse an update of another run.

    Raises:
        RefusedError: the update names another run.
    """
    if update.run != run:
        raise RefusedError(409, "The update belongs to another run.")


def check_model(update: Update, lengths: Sections, shape: RunSpec, aggregation: Aggregation) -> None:
    """Refuse an update that does not fit the model, or a report on an epoch after the run's last one.

    Raises:
        RefusedError: the layout, the offset, a section or the epoch does not match the run.
    """
    if update.layout != shape.layout or update.offset:
        raise RefusedError(422, "The layout of the variables in the update does not match this model.")
    _check_sections(update, lengths, shape, aggregation)
    if update.kind is Kind.REPORT and update.epoch >= shape.epochs:
        raise RefusedError(400, f"Unknown epoch {update.epoch + 1}: the run has {shape.epochs}.")


def _check_sections(update: Update, lengths: Sections, shape: RunSpec, aggregation: Aggregation) -> None:
    """Refuse an update with a section that its kind does not allow or that has a wrong length."""
    if update.kind is Kind.GIVE and lengths.state <= ROWS_BYTES:
        lengths = lengths._replace(state=0)
    if (
        lengths.parameters
        and shape.whole_state <= lengths.state <= shape.whole_state + aggregation.rule_bytes()
    ):
        lengths = lengths._replace(state=shape.whole_state)  # the state of the rule follows
    expected = () if Flag.AWAIT in update.flags else SECTIONS.get(update.kind, ())
    for name, length in zip(Sections._fields, lengths, strict=True):
        if length and not (name in expected and _fits(name, length, update, shape, aggregation)):
            raise RefusedError(413, f"A {update.kind.name} of this model cannot have {length} {name}.")


def _fits(name: str, length: int, update: Update, shape: RunSpec, aggregation: Aggregation) -> bool:
    """Return True if a section of an update has a length that the model permits."""
    if name == "parameters":
        sliced = update.kind is Kind.GRADIENT and Flag.SLICES in update.flags
        return sliced or length == aggregation.num_words(update)
    if name == "statistics":
        return length == len(aggregation.statistics)
    if name == "metrics":
        return length == shape.metrics
    return length in (shape.generators, shape.whole_state)


def check_mergeable(update: Update, lengths: Sections, shape: RunSpec, aggregation: Aggregation) -> None:
    """Refuse an update that cannot be merged, before its sequence number is counted.

    Raises:
        RefusedError: the update cannot be merged.
    """
    if (update.kind is Kind.GRADIENT) is not shape.plan.joint:
        raise RefusedError(400, f"A {update.kind.name} is not accepted in this run.")
    if Flag.AWAIT in update.flags:
        if not aggregation.counted(update.worker, update.sequence):
            raise RefusedError(409, f"Update {update.sequence} of worker {update.worker} did not arrive.")
        return
    if not (update.rows or aggregation.has_rounds) or update.base_version > aggregation.version:
        raise RefusedError(
            400,
            f"An update of {update.rows} rows, based on version {update.base_version} of the "
            f"center, cannot be merged: it has no rows, or the center is at version "
            f"{aggregation.version}.",
        )
    if not (isfinite(update.normalizer) and update.normalizer >= 0):
        raise RefusedError(400, f"An update cannot have the weight {update.normalizer}.")
    fits = not (lengths.parameters or lengths.statistics)
    if update.rows:
        sliced = Flag.SLICES in update.flags and shape.plan.joint
        words = lengths.parameters
        if words and words == aggregation.num_words(update):
            words = len(aggregation.parameters)
        fits = aggregation.takes(words, sliced=sliced)
        fits = fits and lengths.statistics == len(aggregation.statistics)
    if not fits:
        raise RefusedError(413, f"An update with {update.rows} rows cannot have these sections.")
