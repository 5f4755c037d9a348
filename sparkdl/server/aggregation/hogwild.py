"""Hogwild: updates are merged concurrently, without a lock over the whole center."""

from __future__ import annotations

import threading

from sparkdl.core.vectors import EMPTY, Vector
from sparkdl.rules import Merge, Rule, apply
from sparkdl.server.aggregation import limits
from sparkdl.server.aggregation.asynchronous import Asynchronous, no_vector
from sparkdl.server.aggregation.base import Control, Read, check_current
from sparkdl.transport.messages import Reply, Update


class Hogwild(Asynchronous):
    """Hogwild (Recht et al., 2011): concurrent merging, stripe by stripe.

    There is no lock over the whole center. An addition takes a short lock per stripe of the center,
    because NumPy's ``+=`` from two threads loses additions. A reader may see only some stripes of
    an update.
    """

    def __init__(
        self,
        parameters: Vector,
        statistics: Vector,
        num_workers: int,
        rule: Rule,
        decays: Vector,
        bound: int | None = None,
    ) -> None:
        super().__init__(parameters, statistics, num_workers, rule, decays, bound=bound)
        self.stripes = [threading.Lock() for _ in range(0, max(1, len(parameters)), limits.STRIPE)]
        self.adding = 0  # updates that are counted but not yet in the center
        self.settling = 0  # waiting calls of settle(), during which no addition begins

    def push(self, update: Update, read: Read, control: Control) -> Reply:
        """Merge an update stripe by stripe and return the resulting center."""
        update = read()
        with self.changed:
            self.changed.wait_for(lambda: not self.settling)
            check_current(self, update)
            merge, flags = self._meant(update)
            with self._booking():
                if not flags:
                    self._record_merge(update, merge)
            self.adding += merge is not None
        if merge is not None:
            try:
                with self._booking():
                    self._add(update, merge)
            finally:
                self._added()
        update.parameters = update.statistics = EMPTY  # frees the body before the worker waits
        return self._reply(update, control, flags, counts=merge is not None)

    def settle(self) -> None:
        """Wait until all additions have ended. No addition begins while the caller holds the lock."""
        with self.changed:
            self.settling += 1
            self.changed.wait_for(lambda: not self.adding)
            self.settling -= 1
            self.changed.notify_all()

    def _added(self) -> None:
        with self.changed:
            self.adding -= 1
            self.given = no_vector
            if self.settling:
                self.changed.notify_all()

    def _add(self, update: Update, merge: Merge) -> None:
        for index, lock in enumerate(self.stripes):
            part = slice(index * limits.STRIPE, (index + 1) * limits.STRIPE)
            step, _ = apply(self.rule, update.parameters[part], None, merge)
            with lock:
                self.parameters[part] += step

    def replace(self, parameters: Vector, statistics: Vector) -> None:
        """Replace the center in place, stripe by stripe.

        Of an addition under way, only the stripes still to come are added to the new center.
        """
        with self.changed:
            for index, lock in enumerate(self.stripes):
                part = slice(index * limits.STRIPE, (index + 1) * limits.STRIPE)
                with lock:
                    self.parameters[part] = parameters[part]
            self.given = no_vector
            self.statistics = statistics
            self.version += 1
            self.renewed = self.version
