"""The cost model: laws, a simulation of the network, and the measured times."""

import heapq
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkdl.core.cost_model import CALL_SECONDS, EFFICIENCY, RATE, Cluster, cheap_frequency, estimate

ROOT = Path(__file__).parents[3]
MODES = "synchronous", "asynchronous"
SETTINGS = [("synchronous", "driver"), ("synchronous", "executors"), ("asynchronous", "driver")]

settings = st.sampled_from(SETTINGS)
sizes = st.integers(1_000, 10**9)
seconds = st.floats(1e-4, 10)
clusters = st.builds(
    lambda per_host, hosts, bandwidth, latency: Cluster(per_host * hosts, hosts, bandwidth, latency),
    st.integers(1, 8),
    st.integers(1, 125),
    st.floats(1e8, 1e11),
    st.floats(0, 1e-2),
)


@given(settings, sizes, seconds, clusters, st.integers(1, 512))
def test_more_bytes_and_slower_links_never_save_time(setting, nbytes, compute, cluster, frequency):
    """An estimate does not fall with the bytes or the latency, nor rise with the bandwidth."""
    mode, placement = setting

    def batch(nbytes, cluster):
        return estimate(nbytes, compute, cluster, mode, frequency=frequency, placement=placement).batch

    usual = batch(nbytes, cluster)
    slack = 1 + 1e-12
    assert usual >= compute / cluster.num_workers / slack
    assert batch(2 * nbytes, cluster) >= usual / slack
    assert batch(nbytes, replace(cluster, bandwidth=2 * cluster.bandwidth)) <= usual * slack
    assert batch(nbytes, replace(cluster, latency=cluster.latency + 1e-3)) >= usual / slack


@given(settings, sizes, seconds, clusters)
def test_an_exchange_of_more_workers_takes_no_less_time(setting, nbytes, compute, cluster):
    """Twice the workers on twice the hosts do not make an exchange faster."""
    mode, placement = setting
    more = replace(cluster, num_workers=2 * cluster.num_workers, hosts=2 * cluster.hosts)
    few, many = (estimate(nbytes, compute, each, mode, placement=placement) for each in (cluster, more))
    assert many.exchange >= few.exchange


@given(settings, sizes, seconds, clusters, st.integers(1, 512))
def test_computation_of_the_needed_length_takes_the_promised_share(
    setting, nbytes, compute, cluster, frequency
):
    """With a batch of ``needed`` seconds, workers compute for EFFICIENCY of the time."""
    mode, placement = setting
    needed = estimate(nbytes, compute, cluster, mode, frequency=frequency, placement=placement).needed
    there = estimate(nbytes, needed, cluster, mode, frequency=frequency, placement=placement)
    assert needed / cluster.num_workers / there.batch == pytest.approx(EFFICIENCY)


@given(st.sampled_from(MODES), sizes, seconds, clusters)
def test_the_suggested_frequency_is_the_least_power_of_two(mode, nbytes, compute, cluster):
    """Exchanges are cheap with the suggested number of batches, and not with half of it."""
    frequency = cheap_frequency(nbytes, compute, cluster, mode)
    for n in [frequency] if frequency else [512]:
        assert (estimate(nbytes, compute, cluster, mode, frequency=n).needed <= compute) is bool(frequency)
    if frequency and frequency > 1:
        assert estimate(nbytes, compute, cluster, mode, frequency=frequency // 2).needed > compute


def simulated(nbytes: int, compute: float, cluster: Cluster, frequency: int) -> float:
    """Return the seconds in which asynchronous workers process a batch, by simulating 50 exchanges of each.

    An update crosses the driver's link, is merged while it arrives, and the reply crosses the link in the
    other direction. Both directions and the processor serve one exchange at a time, in order of arrival.
    """
    crossing, merging = nbytes * 8 / cluster.bandwidth, nbytes / RATE + CALL_SECONDS
    window, turns = frequency * compute, 50
    arriving = merged = leaving = 0.0  # the end of the last exchange at each of them
    ready = [(window * (1 + worker / cluster.num_workers), 0) for worker in range(cluster.num_workers)]
    while ready:
        time, turn = heapq.heappop(ready)
        begun = max(time, arriving)
        arriving = begun + crossing
        merged = max(begun, merged) + merging
        leaving = max(arriving, merged, leaving) + crossing
        if turn + 1 < turns:
            heapq.heappush(ready, (leaving + window, turn + 1))
    return leaving / turns / frequency / cluster.num_workers


@pytest.mark.parametrize("workers", [1, 2, 8, 32, 125, 1000])
@pytest.mark.parametrize("nbytes", [4_000, 4_000_000, 100_000_000])
@pytest.mark.parametrize("compute", [0.001, 0.1])
@pytest.mark.parametrize("bandwidth", [1e9, 1e10])
def test_asynchronous_exchanges_take_as_long_as_in_a_simulation(workers, nbytes, compute, bandwidth):
    """Up to 1,000 workers, the estimate is that of queues at the driver's link and processor."""
    cluster = Cluster(workers, workers, bandwidth, 0.0)
    for frequency in (1, 16):
        guess = estimate(nbytes, compute, cluster, "asynchronous", frequency=frequency).batch
        assert guess == pytest.approx(simulated(nbytes, compute, cluster, frequency), rel=0.1)


def measured() -> list[tuple[float, int, int, str, float]]:
    """Return the rows of the table "Limited links": bits/s, hosts, workers on each, placement, seconds."""
    text = (
        (ROOT / "benchmarks/RESULTS.md").read_text("utf-8").split("\n## Limited links\n")[1].split("\n## ")[0]
    )
    row = re.compile(r'^\| (\d+)([gm])bit \| (\d+) \| (\d+) \| "(\w+)" \| ([\d.]+) ', re.M)
    return [
        (int(rate) * {"g": 1e9, "m": 1e6}[unit], int(hosts), int(each), placement, float(milliseconds) / 1e3)
        for rate, unit, hosts, each, placement, milliseconds in row.findall(text)
    ]


@pytest.mark.parametrize(("bandwidth", "hosts", "each", "placement", "seconds"), measured())
def test_the_estimate_is_within_15_percent_of_the_measurement(bandwidth, hosts, each, placement, seconds):
    """Exchanges of 4 MB over limited links took as long as estimated, with both placements."""
    cluster = Cluster(hosts * each, hosts, bandwidth, 0.0)
    guess = estimate(4_000_000, 0.0, cluster, "synchronous", placement=placement).exchange
    assert guess == pytest.approx(seconds, rel=0.15)


def test_the_table_of_measurements_is_found():
    """The measurements that the estimates are compared with have both placements and up to 8 workers."""
    rows = measured()
    assert {row[3] for row in rows} == {"driver", "executors"}
    assert {row[1] * row[2] for row in rows} >= {2, 4, 8}
