"""A batch: rows as Keras takes them."""

from __future__ import annotations

from typing import Any, NamedTuple

from sparkdl.core.tree import leaves


class Batch(NamedTuple):
    """Rows as Keras takes them: arrays of equal length, or structures of such.

    ``y`` is None where there are no labels, ``sample_weight`` where there are no weights.
    """

    x: Any
    y: Any = None
    sample_weight: Any = None

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return len(next(leaves(self.x)))

    def to_data(self) -> Any:
        """Return what Keras's ``train_step`` takes in ``fit``: (x, y) or (x, y, sample_weight).

        Without labels it is x itself, or (x,) where x is a tuple (``keras.utils.pack_x_y_sample_weight``).
        """
        if self.y is None:
            return (self.x,) if isinstance(self.x, tuple) else self.x
        return (self.x, self.y) if self.sample_weight is None else tuple(self)
