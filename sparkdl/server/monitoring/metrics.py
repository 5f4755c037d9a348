"""Metrics of a run in Prometheus's text format, which the endpoint serves at ``/metrics``.

A scrape reads the coordinator's own counts, through a registry that only this scrape uses. Nothing is
registered in prometheus_client's global registry, so nothing of a fit outlives it. The package is optional
and is imported here only.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from sparkdl.errors import ConfigError, RefusedError
from sparkdl.process.reasons import reason_of
from sparkdl.server.coordinator import Coordinator
from sparkdl.server.group_coordinator import GroupCoordinator

if TYPE_CHECKING:
    from prometheus_client import Metric

TOKEN_SETTING = "spark.sparkdl.metricsTokenFile"
TOKEN_LENGTH = 16  # the minimum number of characters
# The counts of a run, by name: the metric without its suffix _total, and its help.
COUNTERS = {
    "exchanges": ("exchanges", "Updates of workers that were counted."),
    "retries": ("retries", "Requests that workers sent again."),
    "duplicates": ("duplicate_updates", "Updates that arrived again and were not counted again."),
    "refused": ("refused_updates", "Updates that were refused."),
    "not_finite": ("not_finite_updates", "Updates with NaN, Inf or huge values, which were not merged."),
    "superseded": ("superseded_attempts", "Attempts of workers that newer attempts replaced."),
    "lost": ("lost_workers", "Workers that were lost while the run went on."),
    "returned": ("returned_workers", "Lost workers that came back."),
    "late_merged": ("late_merged_updates", "Updates that missed their round and were merged later."),
    "late_dropped": ("late_dropped_updates", "Updates that missed their round and were not merged."),
    "restarts": ("restarts", "Restarts of all workers after one was lost."),
    "bytes_received": ("received_bytes", "Bytes of updates."),
    "bytes_sent": ("sent_bytes", "Bytes of replies to updates."),
    "refused_requests": (
        "refused_requests",
        "Requests that were refused or failed, except those of the live page.",
    ),
}


def metrics_token(path: str) -> str:
    """Return the token in a file, with which Prometheus may read the metrics; "" without a path.

    Raises:
        ConfigError: the file cannot be read, or does not hold a token.
    """
    if not path:
        return ""
    try:
        token = Path(path).read_text("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{TOKEN_SETTING} should be the path of a file on the driver that holds a token; got {path!r}: "
            f"{reason_of(error)}."
        ) from error
    if len(token) < TOKEN_LENGTH or not token.isprintable() or " " in token:
        raise ConfigError(
            f"{TOKEN_SETTING} should be a file with a token of at least {TOKEN_LENGTH} characters without "
            f"spaces; {path!r} has {len(token)} characters. Make one with: openssl rand -hex 32."
        )
    return token


def exposition(coordinator: GroupCoordinator, traffic: dict[str, int]) -> tuple[bytes, dict[str, str]]:
    """Return the metrics of a run as text, and the header with their content type.

    Args:
        coordinator: the coordinator of the run.
        traffic: the counts of its requests.

    Raises:
        RefusedError: prometheus_client is not installed.
    """
    try:
        from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
    except ImportError:
        raise RefusedError(
            501, 'Metrics need prometheus_client: run pip install "sparkdl-keras[metrics]" on this machine.'
        ) from None
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(coordinator, traffic))
    return generate_latest(registry), {"Content-Type": CONTENT_TYPE_LATEST}


class _Collector:
    """The collector of one scrape.

    Args:
        coordinator: the coordinator of the run.
        traffic: the counts of its requests.
    """

    def __init__(self, coordinator: GroupCoordinator, traffic: dict[str, int]) -> None:
        self.coordinator, self.traffic = coordinator, traffic

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics."""
        with self.coordinator.changed:
            metrics = [*_counters(self.coordinator, self.traffic), *_workers(self.coordinator)]
            if isinstance(self.coordinator, Coordinator):
                metrics += _progress(self.coordinator)
        yield from metrics


def _counters(coordinator: GroupCoordinator, traffic: dict[str, int]) -> Iterator[Metric]:
    from prometheus_client.core import CounterMetricFamily

    counts = {
        **coordinator.summary(),
        **traffic,
        # Without the late updates of the open round, which will be merged: a counter never falls.
        "late_dropped": coordinator.aggregation.dropped.total(),
        "restarts": coordinator.restarts,
    }
    for name, (metric, text) in COUNTERS.items():
        yield CounterMetricFamily(f"sparkdl_{metric}", text, counts[name])


def _workers(coordinator: GroupCoordinator) -> Iterator[Metric]:
    """Yield the number of workers by state, and the position and silence of each."""
    from prometheus_client.core import GaugeMetricFamily

    states = GaugeMetricFamily("sparkdl_workers", "Workers by state.", labels=["state"])
    there = coordinator.members.keys() - coordinator.lost
    missing = coordinator.shape.num_workers - len(there | coordinator.lost)
    for state, number in ("joined", len(there)), ("lost", len(coordinator.lost)), ("missing", missing):
        states.add_metric([state], number)
    yield states
    labels = ["worker"]
    epochs = GaugeMetricFamily(
        "sparkdl_worker_epoch", "The epoch that a worker trains, from 0.", labels=labels
    )
    rows = GaugeMetricFamily(
        "sparkdl_worker_epoch_rows", "Rows of that epoch that a worker has trained on.", labels=labels
    )
    silences = GaugeMetricFamily(
        "sparkdl_worker_silence_seconds", "Time since a worker's last message.", labels=labels
    )
    for worker, member in sorted(coordinator.members.items()):
        epochs.add_metric([str(worker)], member.epoch)
        rows.add_metric([str(worker)], member.seen_rows)
        silences.add_metric([str(worker)], coordinator.state.clock() - member.heard)
    yield from (epochs, rows, silences)


def _progress(coordinator: Coordinator) -> Iterator[Metric]:
    """Yield the progress of a training run and its last loss."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    epoch = max(
        coordinator.snapshot.epoch, min((member.epoch for member in coordinator.members.values()), default=0)
    )
    yield GaugeMetricFamily("sparkdl_epoch", "The epoch under way, from 0.", epoch)
    yield GaugeMetricFamily("sparkdl_epochs", "The number of epochs of the run.", coordinator.shape.epochs)
    rows = sum(plan.epoch_rows for plan in coordinator.plans)
    yield GaugeMetricFamily("sparkdl_epoch_rows", "Training rows of an epoch; 0 until they are known.", rows)
    yield CounterMetricFamily(
        "sparkdl_merges", "Rounds or updates that were merged.", coordinator.aggregation.merges
    )
    for loss in coordinator.aggregation.losses[-1:] or coordinator.epochs.last_losses:
        yield GaugeMetricFamily("sparkdl_loss", "Mean training loss of the last round or update.", loss)
