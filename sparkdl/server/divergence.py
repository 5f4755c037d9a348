"""Divergence detection: NaN, Inf or huge values in updates, or merged deltas that blow up the center."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from math import isfinite, nan
from statistics import fmean, median

from sparkdl.core.vectors import Vector, norm
from sparkdl.errors import DivergedError
from sparkdl.transport.messages import Update

STRIKES = 10  # consecutive updates of one worker with NaN, Inf or huge values that end the run
FARTHEST = 1e15  # deltas with elements this large are rejected: merging or squaring them could overflow
# The initial loss is the mean over the first 32 batches of the run, or over the first windows of all workers
# if these have more batches.
FIRST = 32
RISE = 10.0  # relative rise of the loss; a run has diverged if RISE, WIDER and GROWTH are all exceeded
WIDER = 1.5  # ratio of the center's norm to its initial norm; below it, losses alone never end a run
GROWTH = 50.0  # the relative rise times the ratio of norms
# A run has diverged after this many consecutive epochs in which merging made the center worse, and local
# training improved it again.
THROWS = 3
ENDLESS = 1e300  # losses this large count as Inf: their mean could overflow
# A relative rise that counts as large: of the mean loss over windows, or over the first batches of windows.
AWAY = 1.0
LOST = (
    5  # after a large rise, the run is lost if the median loss of so many last epochs exceeds the initial one
)


class DivergenceDetector:
    """Detector of divergence in the updates of a run. Its owner's lock guards it.

    Args:
        center: center at the start.
        merged: True if deltas of several workers are merged. Otherwise the run trains as plain Keras does,
            and its losses are not judged.
        first: number of losses that define the initial loss.

    Attributes:
        useless: True if the run has diverged and the center cannot be used. Refused updates never set it:
            they are not merged, so the center stays usable.
    """

    def __init__(self, center: Vector, *, merged: bool, first: int = FIRST) -> None:
        self.merged, self.first, self.useless = merged, first, False
        self._loss, self._norm = nan, norm(center)
        self._begun, self._gain = nan, nan
        self._thrown = 0  # consecutive epochs in which workers repaired the center
        self._away = False  # True once the loss has had a large rise
        self._latest: deque[float] = deque(maxlen=LOST)  # losses of the last epochs
        self._refused: dict[int, int] = {}  # sequence of each worker's last refused update
        self._strikes: dict[int, int] = {}  # number of consecutive refused updates, by worker
        self._kinds: dict[int, set[bool]] = {}  # whether updates were sound (see take), by epoch

    def has_refused(self, update: Update) -> bool:
        """Return True if this is the worker's most recently refused update."""
        return self._refused.get(update.worker) == update.sequence

    def take(self, update: Update, *, sound: bool) -> int:
        """Record an update; return the worker's number of consecutive refused updates.

        Args:
            update: the update.
            sound: True if the update may be merged. An update with NaN, Inf or huge values is refused,
                unless the run scales its loss (see ``Screening.screen``).

        Raises:
            DivergedError: the number has reached ``STRIKES``.
        """
        self._kinds.setdefault(update.epoch, set()).add(sound)
        if sound:
            self._strikes.pop(update.worker, None)
            return 0
        self._refused[update.worker] = update.sequence
        self._strikes[update.worker] = strikes = self._strikes.get(update.worker, 0) + 1
        if strikes >= STRIKES:
            raise diverged(
                f"the last {strikes} updates of worker {update.worker} (the latest in epoch "
                f"{update.epoch + 1}) contained NaN, Inf or values that are too large, and were not merged"
            )
        return strikes

    def end_epoch(
        self, epoch: int, center: Vector, losses: Sequence[float], first_losses: Iterable[float] = ()
    ) -> None:
        """Judge an epoch that has ended.

        Args:
            epoch: index of the epoch, from 0.
            center: center at its end.
            losses: losses of its updates or rounds.
            first_losses: each worker's mean loss on the first batches of its windows, which shows the quality
                of the centers they began with. nan if its windows are single batches, or if its rows are not
                shuffled.

        Raises:
            DivergedError: no update of the epoch could be merged; the loss and the norm of the center have
                both grown; merging made the center worse in several epochs in a row; or it did so once and
                the loss did not recover.
        """
        if self._kinds.pop(epoch, None) == {False}:
            raise diverged(
                f"every update of epoch {epoch + 1} contained NaN, Inf or values that are too large, and was "
                "not merged"
            )
        known = _finite(losses)
        if not self.merged or not known:
            return
        loss, reached = fmean(known), norm(center)
        if not isfinite(self._loss):
            self._loss = fmean(known[: self.first])
        self._norm = self._norm or reached  # an all-zero center gives no ratio: use a later norm
        wider = reached / self._norm if self._norm else 0.0
        first = _finite(first_losses)
        rise = self._rise(loss)
        self._latest.append(loss)
        self._away = self._away or max(rise, self._rise(fmean(first)) if first else 0.0) >= AWAY
        risen = f"the mean loss of epoch {epoch + 1} is {loss:.3g}, compared to {self._loss:.3g} at the start"
        what = ""
        if rise > RISE and wider > WIDER and rise * wider > GROWTH:
            what = risen
        elif self._is_lost(loss, wider):
            what = (
                f"{risen}; merged updates moved the center (the merged weights) far from a solution, and in "
                f"most of the last {LOST} epochs the loss was higher than at the start"
            )
        elif first and self._was_thrown(fmean(first), loss, wider):
            what = (
                f"in {THROWS} epochs in a row, merging made the center (the merged weights) worse than it "
                "was at the start, and workers then improved it again: the mean loss on the first batch "
                f"after each exchange is {fmean(first):.3g} in epoch {epoch + 1}, compared to "
                f"{self._begun:.3g} in the first epoch"
            )
        if what:
            self.useless = True
            raise diverged(
                f"{what}; the norm of the trainable variables is {reached:.3g}, compared to "
                f"{self._norm:.3g} at the start"
            )

    def _rise(self, loss: float) -> float:
        """Return the relative rise of this loss over the initial one."""
        return (loss - self._loss) / abs(self._loss) if self._loss else 0.0

    def _is_lost(self, loss: float, wider: float) -> bool:
        """Return True if the loss had a large rise and exceeds the initial one in most of the last epochs.

        An example is dead units after a bad merge, which nothing repairs.
        """
        if not self._away or wider <= WIDER or len(self._latest) < LOST:
            return False
        return min(loss, median(self._latest)) > self._loss

    def _was_thrown(self, first: float, loss: float, wider: float) -> bool:
        """Return True if workers, epoch after epoch, repair a center that merging made worse.

        The mean loss over windows then does not rise, but the loss on their first batches does. In such an
        epoch the first-batch loss exceeds by more than a threshold

        - the first-batch loss of the first epoch, and
        - the epoch's own mean loss.

        The threshold is the larger of ``abs(first)`` and ``abs(first - loss)`` in the first epoch.
        """
        if not isfinite(self._begun):
            self._begun, self._gain = first, max(abs(first), abs(first - loss))
        thrown = wider > WIDER and first - self._begun > self._gain and first - loss > self._gain
        self._thrown = self._thrown + 1 if thrown else 0
        return self._thrown >= THROWS

    def restart(self, *, rolled_back: bool) -> None:
        """Forget refused updates when the workers restart.

        Args:
            rolled_back: True if the epoch under way is repeated. Then its updates are forgotten too.
        """
        self._refused.clear()
        self._strikes.clear()
        if rolled_back:
            self._kinds.clear()


def _finite(losses: Iterable[float]) -> list[float]:
    return [loss for loss in losses if abs(loss) < ENDLESS]


def diverged(why: str) -> DivergedError:
    """Return the error that ends a diverged run."""
    return DivergedError(
        f"Training diverged: {why}. Use a smaller learning rate, clip gradients (clipnorm=), use another "
        "rule (merge=), or exchange more often (frequency=)."
    )
