"""Detection of a run that has diverged: by NaN and Inf, or by deltas whose merging throws the center away."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from math import isfinite, nan
from statistics import fmean, median

from sparkdl.core.vectors import Vector, norm
from sparkdl.errors import DivergedError
from sparkdl.transport.messages import Update

STRIKES = 10  # updates with NaN or Inf in a row of one worker before the run ends
FARTHEST = 1e15  # a delta that goes as far is none: merging, or squaring it, could come to Inf
FIRST = 32  # batches that say what the loss was at the start, or the first window where that has more
RISE = 10.0  # by how many times itself the loss has to rise before a run has diverged,
WIDER = 1.5  # and to how many times itself the norm of the center,
GROWTH = 50.0  # and both to this product
THROWS = 3  # epochs in a row after which a center that workers have to mend in each has diverged too
ENDLESS = 1e300  # a loss that far is taken for Inf: the mean of some could come to it
AWAY = 1.0  # by how many times itself the loss, over windows or at their start, has to rise in an epoch,
LOST = 5  # and over how many epochs its median to be above that of the start, for a run to be lost


class DivergenceDetector:
    """Judges by the updates of a run whether it has diverged. Its owner's lock guards it.

    Args:
        center: the center at the start.
        merged: whether deltas of several workers are merged. Only then are losses judged: one worker, and
            workers that make each update together, do what plain Keras does.
        first: how many losses say what the loss was at the start.

    Attributes:
        useless: whether the run has diverged without NaN, so that the center is of no use.
    """

    def __init__(self, center: Vector, *, merged: bool, first: int = FIRST) -> None:
        self.merged, self.first, self.useless = merged, first, False
        self._loss, self._norm = nan, norm(center)
        self._begun, self._gain = nan, nan
        self._thrown = 0  # epochs in a row
        self._away = False  # whether the loss ever rose far
        self._latest: deque[float] = deque(maxlen=LOST)  # the losses of the last epochs
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

    def end_epoch(
        self, epoch: int, center: Vector, losses: Sequence[float], first_losses: Iterable[float] = ()
    ) -> None:
        """Look back on an epoch.

        Args:
            epoch: its number, of which 0 is the first.
            center: the center at its end.
            losses: those of its updates.
            first_losses: each worker's mean loss on the first batches of its windows, so of the centers that
                they began with; nan of one whose windows are single batches, or whose rows are not shuffled.

        Raises:
            DivergedError: none of its updates could be merged, loss and center have grown together, merging
                has thrown the center away again and again, or once, and the loss did not come back.
        """
        if self._kinds.pop(epoch, None) == {False}:
            raise diverged(f"every update of epoch {epoch + 1} had NaN or Inf in it, and was not merged")
        known = _finite(losses)
        if not self.merged or not known:
            return
        loss, reached = fmean(known), norm(center)
        if not isfinite(self._loss):
            self._loss = fmean(known[: self.first])
        self._norm = self._norm or reached  # a center that begins with 0 says nothing yet
        wider = reached / self._norm if self._norm else 0.0
        first = _finite(first_losses)
        rise = self._rise(loss)
        self._latest.append(loss)
        self._away = self._away or max(rise, self._rise(fmean(first)) if first else 0.0) >= AWAY
        risen = f"the mean loss of epoch {epoch + 1} is {loss:.3g} and was {self._loss:.3g} at the start"
        what = ""
        if rise > RISE and wider > WIDER and rise * wider > GROWTH:
            what = risen
        elif self._is_lost(loss, wider):
            what = (
                f"{risen}; merging threw the center away, and in most of the last {LOST} epochs the loss was "
                "above that of the start"
            )
        elif first and self._was_thrown(fmean(first), loss, wider):
            what = (
                f"in {THROWS} epochs in a row, merging made the center worse than it was at the start, and "
                f"workers mended it: windows of epoch {epoch + 1} begin with a mean loss of "
                f"{fmean(first):.3g}, those of the first epoch began with {self._begun:.3g}"
            )
        if what:
            self.useless = True
            raise diverged(
                f"{what}; the norm of the trainable variables is {reached:.3g} and was {self._norm:.3g}"
            )

    def _rise(self, loss: float) -> float:
        """Return by how many times itself the loss of the start has risen to this one."""
        return (loss - self._loss) / abs(self._loss) if self._loss else 0.0

    def _is_lost(self, loss: float, wider: float) -> bool:
        """Return whether the loss rose far once, and was above that of the start in most of the last epochs.

        As of units that died when the center was thrown away: nothing mends them.
        """
        if not self._away or wider <= WIDER or len(self._latest) < LOST:
            return False
        return min(loss, median(self._latest)) > self._loss

    def _was_thrown(self, first: float, loss: float, wider: float) -> bool:
        """Return whether workers mend again and again in their windows what merging did to the center.

        Then the loss over a window does not rise, while that of its first batch is as far above that of the
        start as the start's is above 0, or above what workers made of it.
        """
        if not isfinite(self._begun):
            self._begun, self._gain = first, max(abs(first), abs(first - loss))
        thrown = wider > WIDER and first - self._begun > self._gain and first - loss > self._gain
        self._thrown = self._thrown + 1 if thrown else 0
        return self._thrown >= THROWS

    def restart(self, *, rolled_back: bool) -> None:
        """Forget what updates that come again have said, or that come from workers which begin anew."""
        self._refused.clear()
        self._strikes.clear()
        if rolled_back:
            self._kinds.clear()
            self._thrown, self._away = 0, False
            self._latest.clear()


def _finite(losses: Iterable[float]) -> list[float]:
    return [loss for loss in losses if abs(loss) < ENDLESS]


def diverged(why: str) -> DivergedError:
    """Return the error that ends a run."""
    return DivergedError(
        f"Training diverged: {why}. Take a smaller learning rate, clip gradients (clipnorm=), take another "
        "rule (merge=), or exchange more often (frequency=)."
    )
