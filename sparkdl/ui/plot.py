"""Pictures of a fit. Matplotlib is optional, and loaded only here, by the first plot."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sparkdl.errors import DataError
from sparkdl.transport.messages import ACTIVITIES
from sparkdl.ui.history import scalars

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HEIGHT, WIDTH = 2.6, 6.4  # of one plot, in inches
WORKER_HEIGHT, MOST_HEIGHT = 0.3, 7.8  # of a worker's bar, and the maximum of all bars


def plot(history: Any) -> Figure:
    """Plot a fit: the loss and each metric by epoch, the rows per second, and the time of the workers.

    Training and validation share a plot. The time of each worker is one bar, divided by activity: reading
    data, computing, exchanging updates, waiting for other workers, and merging at the endpoint. If no
    worker reported its times, the plot of the times is left out.

    The figure belongs to no window, and pyplot does not know it: save it with ``figure.savefig("fit.png")``.
    A notebook shows it if it is the last value of a cell.

    Args:
        history: the History that ``SparkModel.fit`` returns, or Keras's own.

    Returns:
        A matplotlib.figure.Figure with the plots one below the other.

    Raises:
        DataError: the argument is not a History with at least one epoch.
        ModuleNotFoundError: Matplotlib is not installed.
    """
    curves = scalars(history) if hasattr(history, "history") and hasattr(history, "epoch") else {}
    if not curves:
        raise DataError(f"plot needs the History of a fit with at least one epoch; got {history!r}.")
    timed = history.training.timings(history.epoch) if hasattr(history, "training") else []
    workers = _times(getattr(history, "run", {}))
    names = [name for name in curves if name[:4] != "val_" or name[4:] not in curves]
    names.sort(key=lambda name: name != "loss")
    count = len(names) + bool(timed)
    heights = [HEIGHT] * count
    if workers:
        heights.append(min(MOST_HEIGHT, max(HEIGHT, 1.0 + WORKER_HEIGHT * len(workers))))
    figure = _figure((WIDTH, sum(heights)))
    axes = figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
    if workers:
        _draw_times(axes[-1], workers)
    axes = _aligned(axes[:count])
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
    return figure


def _times(run: Mapping[str, Any]) -> dict[int, list[float]]:
    """Return the seconds of each activity, by worker, for the workers of a run that reported them."""
    return {each["worker"]: each["times"] for each in run.get("workers", []) if each.get("times")}


def _aligned(axes: Any) -> Any:
    """Let plots share their axis of epochs, which the last one shows; return them."""
    for axis in axes[:-1]:
        axis.sharex(axes[-1])
        axis.tick_params(labelbottom=False)
    axes[-1].set_xlabel("epoch")
    axes[-1].xaxis.get_major_locator().set_params(integer=True)
    return axes


def _draw_times(axis: Axes, workers: Mapping[int, Sequence[float]]) -> None:
    """Draw a bar for each worker, divided by activity, with the first worker at the top."""
    ends = [0.0] * len(workers)
    for activity, seconds in zip(ACTIVITIES, zip(*workers.values(), strict=True), strict=True):
        axis.barh(list(workers), seconds, left=ends, label=activity)
        ends = [end + length for end, length in zip(ends, seconds, strict=True)]
    axis.set_xlabel("seconds")
    axis.set_ylabel("worker")
    axis.locator_params("y", integer=True)
    axis.invert_yaxis()
    axis.legend(ncols=len(ACTIVITIES), loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)


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
