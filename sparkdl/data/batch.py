"""A batch: rows in the form that Keras takes."""

from __future__ import annotations

from typing import Any, NamedTuple

from sparkdl.core.tree import leaves


class Batch(NamedTuple):
    """Rows in the form that Keras takes: arrays of equal length, or structures of such arrays.

    ``y`` is None without labels, and ``sample_weight`` is None without weights.
    """

    x: Any
    y: Any = None
    sample_weight: Any = None

    @property
    def rows(self) -> int:
        """The number of rows."""
        return len(leaves(self.x)[0])

    def to_data(self) -> Any:
        """Return the data for Keras's ``train_step``, as ``keras.utils.pack_x_y_sample_weight`` packs it.

        That is (x, y) or (x, y, sample_weight). Without labels it is x, or (x,) if x is a tuple.
        """
        if self.y is None:
            return (self.x,) if isinstance(self.x, tuple) else self.x
        return (self.x, self.y) if self.sample_weight is None else tuple(self)
