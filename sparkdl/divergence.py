"""When a run has diverged: by numbers that are none, or by deltas whose merging throws the center away."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite, nan
from statistics import fmean

from sparkdl.errors import DivergedError
from sparkdl.weights import Vector, norm
from sparkdl.wire import Update

STRIKES = 10  # updates with NaN or Inf in a row of one worker before the run ends
FIRST = 32  # so many losses say what the loss was at the start
RISE = 10.0  # by how many times itself the loss has to rise before a run has diverged,
WIDER = 1.5  # and to how many times itself the norm of the center,
GROWTH = 50.0  # and both to this product


class Watch:
    """What a run's updates say about whether it diverges. Its owner's lock guards it.

    Args:
        center: the center at the start.
        merged: whether deltas of several workers are merged. Only then is growth judged: one worker, and
            workers that make each update together, do what plain Keras does.

    Attributes:
        grown: whether the run has diverged by growth, so that the center is of no use.
    """

    def __init__(self, center: Vector, *, merged: bool) -> None:
        self.merged, self.grown = merged, False
        self._loss, self._norm = nan, norm(center)
        self._refused: dict[int, int] = {}  # the last update of a worker that had NaN or Inf in it
        self._strikes: dict[int, int] = {}  # how many of them in a row
        self._kinds: dict[int, set[bool]] = {}  # by epoch, whether its updates were sound

    def has_refused(self, update: Update) -> bool:
        """Return whether an update was the last one of its worker that was not merged."""
        return self._refused.get(update.worker) == update.sequence

    def take(self, update: Update, *, sound: bool) -> int:
        """Note an update, and whether it is to be merged; return the strikes of its worker in a row.

        Raises:
            DivergedError: they are too many.
        """
        self._kinds.setdefault(update.epoch, set()).add(sound)
        if sound:
            self._strikes.pop(update.worker, None)
            return 0
        self._refused[update.worker] = update.sequence
        self._strikes[update.worker] = strikes = self._strikes.get(update.worker, 0) + 1
        if strikes >= STRIKES:
            raise diverged(
                f"the last {strikes} updates of worker {update.worker} had NaN or Inf in them, up to epoch "
                f"{update.epoch + 1}, and were not merged"
            )
        return strikes

    def end_epoch(self, epoch: int, center: Vector, losses: Sequence[float]) -> None:
        """Look back on an epoch.

        Args:
            epoch: its number, of which 0 is the first.
            center: the center at its end.
            losses: those of its updates.

        Raises:
            DivergedError: none of its updates could be merged, or loss and center have grown together.
        """
        if self._kinds.pop(epoch, None) == {False}:
            raise diverged(f"every update of epoch {epoch + 1} had NaN or Inf in it, and was not merged")
        known = [loss for loss in losses if isfinite(loss)]
        if not self.merged or not known:
            return
        loss, reached = fmean(known), norm(center)
        if not isfinite(self._loss):
            self._loss = fmean(known[:FIRST])
        self._norm = self._norm or reached  # a center that begins with 0 says nothing yet
        rise, wider = loss - self._loss, reached / self._norm if self._norm else 0.0
        rise = rise / abs(self._loss) if self._loss else 0.0
        if rise > RISE and wider > WIDER and rise * wider > GROWTH:
            self.grown = True
            raise diverged(
                f"the mean loss of epoch {epoch + 1} is {loss:.3g} and was {self._loss:.3g} at the start; "
                f"the norm of the trainable variables is {reached:.3g} and was {self._norm:.3g}"
            )

    def restart(self, *, rolled_back: bool) -> None:
        """Forget what updates that come again have said, or that come from workers which begin anew."""
        self._refused.clear()
        self._strikes.clear()
        if rolled_back:
            self._kinds.clear()


def diverged(why: str) -> DivergedError:
    """Return the error that ends a run."""
    return DivergedError(
        f"Training diverged: {why}. Take a smaller learning rate, clip gradients (clipnorm=), take another "
        "rule (merge=), or exchange more often (frequency=)."
    )
