"""Pictures of a fit. Matplotlib is optional, and loaded only here, by the first plot."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from sparkdl.errors import DataError
from sparkdl.ui.history import scalars

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HEIGHT, WIDTH = 2.6, 6.4  # of one plot, in inches


def plot(history: Any) -> Figure:
    """Plot a fit: the loss and each metric by epoch, training beside validation, and the rows per second.

    The figure belongs to no window, and pyplot does not know it: save it with ``figure.savefig("fit.png")``.
    A notebook shows it as the last value of a cell.

    Args:
        history: what ``SparkModel.fit`` returns, or Keras's own History.

    Returns:
        A matplotlib.figure.Figure with one plot below the other.

    Raises:
        DataError: the argument is not a History with at least one epoch.
        ModuleNotFoundError: Matplotlib is not installed.
    """
    curves = scalars(history) if hasattr(history, "history") and hasattr(history, "epoch") else {}
    if not curves:
        raise DataError(f"plot needs the History of a fit with at least one epoch; got {history!r}.")
    timed = history.training.timings(history.epoch) if hasattr(history, "training") else []
    names = [name for name in curves if name[:4] != "val_" or name[4:] not in curves]
    names.sort(key=lambda name: name != "loss")
    count = len(names) + bool(timed)
    figure = _figure((WIDTH, HEIGHT * count))
    axes = figure.subplots(count, 1, sharex=True, squeeze=False)[:, 0]
    for axis, name in zip(axes, names, strict=False):
        for label, shown in ((name, "training"), (f"val_{name}", "validation")):
            if label in curves:
                epochs, values = zip(*curves[label], strict=True)
                axis.plot([epoch + 1 for epoch in epochs], values, marker=".", label=shown)
        axis.set_ylabel(name)
        axis.legend()
    if timed:
        axes[-1].bar([epoch + 1 for epoch, _, _ in timed], [speed for _, _, speed in timed], color="tab:gray")
        axes[-1].set_ylabel("rows/s")
    axes[-1].set_xlabel("epoch")
    axes[-1].xaxis.get_major_locator().set_params(integer=True)
    return figure


def _figure(size: tuple[float, float]) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "sparkdl.plot needs matplotlib. Install it: pip install 'sparkdl-keras[plot]'.", name="matplotlib"
        ) from error

    class ShownFigure(Figure):
        """A figure that a notebook can show without pyplot."""

        def _repr_png_(self) -> bytes:
            written = io.BytesIO()
            self.savefig(written, format="png")
            return written.getvalue()

    return ShownFigure(figsize=size, layout="constrained")
