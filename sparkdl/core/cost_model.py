"""The time of an exchange, estimated from bytes, links, processors and the number of workers.

The estimate has three parts:

* *Links.* Each host has one link of B bytes per second in each direction. So has the driver, on a host of
  its own. In a round through the driver, K updates of X bytes arrive over its link, then K replies leave:
  2·K·X/B. If workers average among themselves, each of H hosts with k workers exchanges parts with the other
  hosts: 2·k·X·(H-1)/(H·B), the least possible time for k = 1 (Patarasuk and Yuan, 2009).
* *Processors.* An endpoint receives, adds and returns RATE bytes per second. Each exchange also takes it
  CALL_SECONDS.
* *Latency.* An update and its reply travel once each.

Links and processors work at the same time, so only the slower one counts. Asynchronous workers exchange one
by one. The driver's link and processor set an upper limit on their exchanges per second.

The constants were fitted to the tables "An exchange" and "Limited links" in ``benchmarks/RESULTS.md``.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

CALL_SECONDS = 0.2e-3
RATE = 2.4e9
# Each worker sends its parts to the other hosts in a different order, but parts still meet at a host. This
# share of the time is added for each host beyond the first. More than CONTENDED hosts were not measured.
CONTENTION, CONTENDED = 0.05, 8
EFFICIENCY = 0.8  # the share of a worker's time in computation from which on exchanges count as cheap
LONGEST = 512  # the largest number of batches per exchange that is suggested


@dataclass(frozen=True)
class Cluster:
    """The workers and their network.

    Attributes:
        num_workers: number of workers.
        hosts: number of hosts, over which the workers are spread evenly.
        bandwidth: bits per second of a host's link, in each direction.
        latency: seconds that a message travels.
    """

    num_workers: int
    hosts: int
    bandwidth: float
    latency: float


class Estimate(NamedTuple):
    """The estimated time and traffic of a setting.

    A batch has ``batch_size`` rows. In synchronous mode with frequency 1 all workers share one batch; else
    each worker computes batches of its own.

    Attributes:
        num_workers: number of workers.
        mode: "synchronous" or "asynchronous". Hogwild takes as long as asynchronous.
        frequency: batches per exchange; 1 is ``frequency="batch"``.
        placement: "driver" or "executors".
        exchange: seconds of an exchange; if asynchronous, of one that no other worker slows down.
        batch: seconds in which all workers together process a batch, on average, exchanges included.
        traffic: bytes that each worker sends and receives in that time.
        needed: seconds of computation of a batch in one process from which on computation takes EFFICIENCY of
            the workers' time.
        limit: what takes the largest part of the time.
    """

    num_workers: int
    mode: str
    frequency: int
    placement: str
    exchange: float
    batch: float
    traffic: float
    needed: float
    limit: str

    @property
    def averages_gradients(self) -> bool:
        """True if workers average gradients among themselves, in every batch."""
        return (self.mode, self.frequency, self.placement) == ("synchronous", 1, "executors")


def estimate(
    nbytes: int, compute: float, cluster: Cluster, mode: str, *, frequency: int = 1, placement: str = "driver"
) -> Estimate:
    """Return the estimate of a setting.

    Args:
        nbytes: bytes of an update: a gradient, or the change of all weights.
        compute: seconds in which one process computes a batch.
        cluster: the workers and their network.
        mode: "synchronous" or "asynchronous".
        frequency: batches per exchange.
        placement: "driver" or "executors".
    """
    together = mode == "synchronous"
    single = Cluster(1, 1, cluster.bandwidth, cluster.latency)
    parts = _parts(nbytes, placement, cluster if together else single)
    exchange, busy = _exchange(parts), dict.fromkeys(parts, 0.0)
    if not together:
        # Updates arrive while replies leave: each direction of the link is busy for half of an exchange.
        shared = _parts(nbytes, placement, cluster)
        busy = shared | {LINK[placement]: shared[LINK[placement]] / 2, LATENCY: 0.0}
    # Batches between the exchanges of a worker: those that it computes, and those of all workers.
    own = 1 / cluster.num_workers if together and frequency == 1 else frequency
    all_workers = own * cluster.num_workers
    window, least = own * compute, max(busy.values())
    limits = {"computation": window, **parts} if window + exchange >= least else busy
    away = 1 - 1 / cluster.hosts if placement == "executors" else 1.0
    return Estimate(
        cluster.num_workers,
        mode,
        frequency,
        placement,
        exchange=exchange,
        batch=max(window + exchange, least) / all_workers,
        traffic=2 * nbytes * away / all_workers,
        needed=max(exchange * EFFICIENCY / (1 - EFFICIENCY), EFFICIENCY * least) / own,
        limit=max(limits, key=limits.__getitem__),
    )


LINK = {"driver": "the driver's link", "executors": "the workers' links"}
PROCESSOR = {"driver": "the driver's processor", "executors": "the workers' processors"}
CALLS, LATENCY = "the number of workers", "the latency"


def _parts(nbytes: int, placement: str, cluster: Cluster) -> dict[str, float]:
    """Return the seconds of each part of an exchange of all workers, by its limiting factor."""
    per_host = ceil(cluster.num_workers / cluster.hosts)
    if placement == "driver":
        served, sent = cluster.num_workers, 2.0 * cluster.num_workers
    else:
        crowd = 1 + CONTENTION * (min(cluster.hosts, CONTENDED) - 1)
        served, sent = per_host, 2 * per_host * (1 - 1 / cluster.hosts) * crowd
    return {
        LINK[placement]: sent * nbytes * 8 / cluster.bandwidth,
        PROCESSOR[placement]: served * nbytes / RATE,
        CALLS: cluster.num_workers * CALL_SECONDS,
        LATENCY: 2 * cluster.latency,
    }


def _exchange(parts: dict[str, float]) -> float:
    """Return the seconds of an exchange with these parts."""
    bytes_moved = max(seconds for name, seconds in parts.items() if name not in (CALLS, LATENCY))
    return bytes_moved + parts[CALLS] + parts[LATENCY]


def cheap_frequency(
    nbytes: int, compute: float, cluster: Cluster, mode: str, *, placement: str = "driver"
) -> int | None:
    """Return the least number of batches per exchange, a power of two, with which exchanges are cheap.

    Computation then takes at least EFFICIENCY of the time. None: no number up to LONGEST is large enough.
    """
    powers = (1 << exponent for exponent in range(LONGEST.bit_length()))
    needed = (estimate(nbytes, compute, cluster, mode, frequency=n, placement=placement) for n in powers)
    return next((each.frequency for each in needed if each.needed <= compute), None)
