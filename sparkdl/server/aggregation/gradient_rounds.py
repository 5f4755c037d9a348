"""Rounds of gradients: each worker applies the mean with its own optimizer."""

from __future__ import annotations

from dataclasses import replace

from sparkdl.core.reduction import Reduction
from sparkdl.core.sparse_gradients import SliceMean, Tables, compressed, decode, decompressed, most_words
from sparkdl.core.vectors import Vector
from sparkdl.server.aggregation import limits
from sparkdl.server.aggregation.rounds import Hybrid, SynchronousRounds
from sparkdl.transport.messages import Answer, Flag, Reply, Update


class GradientRounds(SynchronousRounds):
    """Rounds in which every worker gets the mean gradient and applies it with its own optimizer.

    A late worker applies the means of the rounds that it missed, one after the other, so that replicas stay
    identical. The last means are kept for this purpose. A round waits if closing it would discard a mean that
    some worker still needs.

    Args:
        parameters: trainable variables of the center.
        statistics: moving statistics.
        num_workers: number of workers that send updates.
        hybrid: conditions under which a round closes without some of its workers; None: it waits for all that
            are not lost.
        tables: the shapes of the trainable variables as tables of rows, if workers send only the rows of an
            Embedding's gradient that a batch used (its slices); otherwise empty.
    """

    has_replicas = True
    salt = 0  # distinguishes the random bits of a shard's codec from those of other shards

    def __init__(
        self,
        parameters: Vector,
        statistics: Vector,
        num_workers: int,
        hybrid: Hybrid | None = None,
        tables: Tables = (),
    ) -> None:
        self.tables = tables
        self.words = 0  # length of the longest gradient with slices so far
        super().__init__(parameters, statistics, num_workers, hybrid)
        self.most = most_words(len(parameters), num_workers) if tables else 0
        if hybrid is not None:
            self.depth = self._depth(len(parameters))

    def _depth(self, words: int) -> int:
        """Return the number of mean gradients of this length to keep."""
        return max(limits.LEAST_KEPT, limits.KEPT_BYTES // (4 * (words + len(self.statistics)) or 1))

    def body_bytes(self) -> int:
        """Return the size of an update's body in bytes; with slices, that of the largest so far."""
        return 4 * (self.words + len(self.statistics)) if self.words else super().body_bytes()

    def takes(self, words: int, *, sliced: bool) -> bool:
        """Return True if a gradient may have this number of words."""
        return 0 < words <= self.most if sliced else super().takes(words, sliced=False)

    def numbers(self, update: Update) -> list[Vector]:
        """Return all numbers of a gradient except the row indices of its slices."""
        if Flag.SLICES in update.flags:
            return decode(update.parameters, self.tables).parts
        return super().numbers(update)

    def decoded(self, update: Update) -> Update:
        """Return an update with its parameters as float32, and the row indices of slices.

        Raises:
            WireError: the parameters are not those of an update of this model.
        """
        both = Flag.SLICES | Flag.ENCODED
        if self.codec is None or both not in update.flags or not len(update.parameters):
            return super().decoded(update)
        parameters = decompressed(update.parameters, self.codec, self.most)
        return replace(update, flags=update.flags & ~Flag.ENCODED, parameters=parameters)

    def _reduction(self) -> Reduction:
        return SliceMean(self.tables) if self.tables else super()._reduction()

    def _reduce(self, update: Update) -> None:
        reduction = self.reductions[0]
        if not (isinstance(reduction, SliceMean) and Flag.SLICES in update.flags):
            super()._reduce(update)
            return
        self.words = max(self.words, len(update.parameters))
        weight = update.normalizer or update.rows
        self.slices += reduction.add_encoded(update.parameters, weight)

    def reach(self, parameters: Vector) -> None:
        """Store the weights that all replicas have at a snapshot as the center."""
        self.parameters = parameters

    def _conclude(self, parameters: Vector, statistics: Vector, reply: Reply) -> Reply:
        if len(statistics):
            self.statistics = statistics
        sliced = getattr(self.reductions[0], "sliced", False)
        if sliced:
            reply.flags |= Flag.SLICES
        if self.codec is not None and len(parameters):
            place = self.round << 32 | self.salt, 0
            if sliced:
                parameters = compressed(parameters, self.codec, place)
            else:
                parameters = self.codec.encode(parameters, place)
            reply.flags |= Flag.ENCODED
        if self.hybrid is not None:
            self.depth = min(self.depth, self._depth(len(parameters)))
        reply.kind, reply.version = Answer.MEAN, self.version
        reply.parameters, reply.statistics = parameters, self.statistics
        return reply
