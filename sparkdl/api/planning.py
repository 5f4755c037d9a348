"""``plan``: estimate the time of exchanges on a cluster before it is used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from math import prod
from numbers import Integral
from typing import TYPE_CHECKING

from sparkdl.api.spark_model import SparkModel
from sparkdl.core.cost_model import EFFICIENCY, Cluster, Estimate, cheap_frequency, estimate
from sparkdl.core.validation import positive_number, whole_number
from sparkdl.errors import ConfigError, ModelError
from sparkdl.modeling import keras_variables
from sparkdl.modeling.backends.choice import averages_embeddings

if TYPE_CHECKING:
    import keras

PLACES = ("synchronous", "driver"), ("synchronous", "executors"), ("asynchronous", "driver")
USUAL = 16  # batches per exchange in the table if the time of a batch is not known


@dataclass(frozen=True)
class Plan:
    """The result of ``plan``. Printed, it is a table with a recommendation.

    Attributes:
        title: the model and the cluster, in one line.
        rows: an estimate for each number of workers and setting. Of its attributes, ``exchange``, ``batch``
            and ``needed`` are seconds, ``traffic`` is in bytes; a ``frequency`` of 1 is ``"batch"``.
        compute: the seconds in which one process computes a batch; None if they were not given.
        advice: a recommendation for each number of workers, a line each.
    """

    title: str
    rows: list[Estimate]
    compute: float | None
    advice: list[str]

    def __str__(self) -> str:
        cells = [list(_columns(self.compute)), *map(self._cells, self.rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]
        return "\n".join([self.title, "", *lines, "", *self.advice])

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{escape(name)}</th>" for name in _columns(self.compute))
        rows = "".join(
            f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in self._cells(row))}</tr>"
            for row in self.rows
        )
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
        return f"<div><p>{escape(self.title)}</p>{table}<p>{'<br>'.join(map(escape, self.advice))}</p></div>"

    def _cells(self, row: Estimate) -> list[str]:
        return [cell(row, self.compute or 0.0) for cell in _columns(self.compute).values()]


def _columns(compute: float | None) -> dict[str, Callable[[Estimate, float], str]]:
    """Return the columns of the table by title, each as a function that returns the text of a cell.

    The function takes a row, and the seconds of computation or, if they are not known, 0.
    """
    known: dict[str, Callable[[Estimate, float], str]] = {
        "batch": lambda row, _: seconds_text(row.batch),
        "speed-up": _speedup,
        "mostly": lambda row, _: row.limit,
    }
    unknown: dict[str, Callable[[Estimate, float], str]] = {
        "cheap for batches from": lambda row, _: seconds_text(row.needed)
    }
    return {
        "workers": lambda row, _: f"{row.num_workers:,}",
        "mode": lambda row, _: row.mode,
        "frequency": lambda row, _: '"batch"' if row.frequency == 1 else str(row.frequency),
        "placement": lambda row, _: f'"{row.placement}"',
        "exchange": lambda row, _: seconds_text(row.exchange),
        "MB per batch": lambda row, _: f"{row.traffic / 1e6:.3g}",
        **(unknown if compute is None else known),
    }


def seconds_text(seconds: float) -> str:
    """Return a time with its unit."""
    return (
        f"{1e3 * seconds:.3g} ms"
        if seconds < 1
        else f"{seconds:,.3g} s"
        if seconds < 1e3
        else f"{seconds:,.0f} s"
    )


def plan(
    model: keras.Model | SparkModel,
    *,
    num_workers: int | Sequence[int],
    hosts: int | None = None,
    bandwidth: float = 10e9,
    latency: float = 1e-4,
    batch_seconds: float | None = None,
) -> Plan:
    """Estimate the time of exchanges on a cluster by mode, frequency and placement; recommend a setting.

    Nothing is run. The page "Performance" of the documentation has the formulas and compares them with
    measurements. The driver counts as a host of its own. Gradients of embeddings count as dense, and
    ``compression=`` is left out. Settings that ``fit`` would refuse because of embeddings are left out too.

    Args:
        model: a built model, or a SparkModel.
        num_workers: the number of workers, or several numbers to compare.
        hosts: the number of hosts over which the workers are spread evenly, at most their number; None is one
            for each worker.
        bandwidth: bits per second of a host's network link, in each direction. The default is 10 Gbit/s.
        latency: seconds that a message travels from host to host.
        batch_seconds: seconds in which one process computes a batch, on the hardware of a worker. In
            synchronous mode with ``frequency="batch"`` each worker computes its share of a batch, in its
            share of the time. Without ``batch_seconds`` the plan shows from which time on exchanges are
            cheap, but recommends no frequency.

    Returns:
        The plan. ``print`` shows it as a table.

    Raises:
        ConfigError: an argument is invalid.
        ModelError: ``model`` is not a Keras model, or is not built, so that the sizes of its weights are not
            known.

    Example:
        >>> print(plan(model, num_workers=8, bandwidth=1e9, batch_seconds=0.05))  # doctest: +SKIP
    """
    built = model.model if isinstance(model, SparkModel) else model
    if not hasattr(built, "trainable_variables"):
        raise ModelError(f"plan needs a keras.Model or a SparkModel; got {model!r}.")
    if not built.built:
        raise ModelError(
            f'plan needs a built model; the model "{built.name}" is not built. Give it an Input layer, or '
            "call it once."
        )
    numbers = _numbers(num_workers)
    if hosts is not None and whole_number("hosts", hosts) > min(numbers):
        raise ConfigError(f"hosts should be at most num_workers ({min(numbers)}); got {hosts}.")
    positive_number("bandwidth", bandwidth, unit="bits per second")
    if latency != 0:
        positive_number("latency", latency, unit="seconds, or 0")
    if batch_seconds is not None:
        positive_number("batch_seconds", batch_seconds, unit="seconds")
    exchanged = *keras_variables.trainable(built), *keras_variables.statistics(built)
    elements = sum(prod(variable.shape) for variable in exchanged)
    averages = averages_embeddings(built)
    rows, advice = [], []
    for number in numbers:
        cluster = Cluster(number, hosts or number, bandwidth, latency)
        estimates = _estimates(4 * elements, batch_seconds, cluster)
        rows += [row for row in estimates if averages or not row.averages_gradients]
        mine = [row for row in rows if row.num_workers == number]
        advice.append(_advice(mine, batch_seconds))
    title = [
        f"{elements:,} weights, {4 * elements / 1e6:.3g} MB per exchange",
        f"links of {bandwidth / 1e9:.3g} Gbit/s",
        *([] if batch_seconds is None else [f"{seconds_text(batch_seconds)} of computation per batch"]),
    ]
    return Plan("; ".join(title), rows, batch_seconds, advice)


def _numbers(num_workers: object) -> list[int]:
    """Return the numbers of workers."""
    if isinstance(num_workers, Integral):
        return [whole_number("num_workers", num_workers)]
    if not isinstance(num_workers, Sequence) or isinstance(num_workers, str) or not num_workers:
        raise ConfigError(
            f"num_workers should be a whole number of at least 1, or several; got {num_workers!r}."
        )
    return [whole_number("num_workers", number) for number in num_workers]


def _estimates(nbytes: int, compute: float | None, cluster: Cluster) -> list[Estimate]:
    """Return the estimates for a number of workers: an exchange per batch, and a cheaper frequency."""
    known = compute or 0.0
    rows = [estimate(nbytes, known, cluster, mode, placement=placement) for mode, placement in PLACES]
    for mode, placement in PLACES:
        cheap = cheap_frequency(nbytes, known, cluster, mode, placement=placement)
        frequency = USUAL if compute is None else cheap
        if frequency and frequency > 1:
            rows.append(estimate(nbytes, known, cluster, mode, frequency=frequency, placement=placement))
    return rows


def _advice(rows: list[Estimate], compute: float | None) -> str:
    """Return the recommendation for one number of workers, from its estimates."""
    start = f"{rows[0].num_workers:,} worker{'s' if rows[0].num_workers > 1 else ''}: "
    joint = [row for row in rows if row.mode == "synchronous" and row.frequency == 1]
    if compute is None:
        least = " or ".join(f'{seconds_text(row.needed)} with placement="{row.placement}"' for row in joint)
        return (
            f"{start}exchanges per batch take at most {1 - EFFICIENCY:.0%} of the time if a batch takes at "
            f"least {least}."
        )
    cheap = next((row for row in joint if row.needed <= compute), None)
    best = cheap or min(joint, key=lambda row: row.batch)
    text = (
        f'{start}mode="synchronous", frequency="batch", placement="{best.placement}" is '
        f"{_speedup(best, compute)} times as fast as one process, with the same accuracy."
    )
    if cheap:
        return text
    larger = f"Faster: larger batches ({seconds_text(best.needed)} of computation or more)"
    rounds = [row for row in rows if row.mode == "synchronous" and row.frequency > 1]
    if not rounds:
        return f"{text} {larger}."
    apart = min(rounds, key=lambda row: row.frequency)
    return (
        f'{text} {larger}, or frequency={apart.frequency} with placement="{apart.placement}" '
        f"({_speedup(apart, compute)} times as fast), with which some models lose accuracy."
    )


def _speedup(row: Estimate, compute: float) -> str:
    """Return the rows per second of all workers, divided by those of one process without exchanges."""
    times = compute / row.batch
    return f"{times:,.0f}" if times >= 10 else f"{times:.2g}"
