"""The time of a synchronous exchange between hosts whose links are limited, by placement.

Each host is a network namespace of this machine, with a link of a given rate in each direction to a common
bridge; the driver has one, too. No Spark is involved. ``ideal`` is the least time for the bytes: with
``placement="driver"`` all updates and replies pass through the driver's link, 2·X·K/B; with
``placement="executors"`` each host sends and receives the parts of other hosts' gradients,
2·X·(H-1)/(H·B) for one worker per host (ring all-reduce needs as long). X is the size of the gradient, K the
number of workers, H of hosts, B the rate of a link. ``sparkdl.plan`` is its estimate for these links.

On Linux's default congestion control (cubic) a link is used fully; with BBR exchanges take longer. The
program needs root, for ``ip netns`` and ``tc`` (iproute2).

    sudo python benchmarks/links.py --results benchmarks/RESULTS.md
"""

import argparse
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import harness
import numpy as np
from harness import spread, table, verdict

SIZE = 4_000_000  # bytes of a gradient
EACH = 4  # exchanges of a turn
BAR = 1.2  # of the ideal time, with placement="executors"
HOSTS = ((2, 1), (4, 1), (8, 1), (4, 2))  # hosts, and workers on each of them
RATES = "1gbit", "100mbit"
PLACEMENTS = "driver", "executors"
BRIDGE, NAME, NET = "sdl-bridge", "sdl-host", "10.77.0"
CONGESTION = Path("/proc/sys/net/ipv4/tcp_congestion_control")
TOKEN, RUN, LAYOUT = "token", b"r" * 16, b"l" * 16


# -- the driver's endpoint and the workers, each in a process of its own --------------------------


def serve(placement: str, host: str, workers: int) -> None:
    """Serve the endpoint of a run whose epoch does not end, until the standard input ends."""
    from sparkdl.data.batch_plan import BatchPlan
    from sparkdl.rules import Average
    from sparkdl.server.aggregation import AggregationSpec, make_aggregation
    from sparkdl.server.coordinator import Coordinator
    from sparkdl.server.http_app import Traffic, make_app
    from sparkdl.server.http_server import serve
    from sparkdl.server.state import RunSpec

    plan = BatchPlan((), 0, workers, 1, True, False, 0)
    shape = RunSpec(run=RUN, layout=LAYOUT, num_workers=workers, plan=plan, epochs=1)
    terms = AggregationSpec("synchronous", True, workers, Average(), sharded=placement == "executors")
    start = np.zeros(SIZE // 4, np.float32), np.zeros(0, np.float32)
    coordinator = Coordinator(shape, make_aggregation(terms, *start))
    coordinator.release(0, float("nan"))
    with serve(make_app(coordinator, TOKEN, Traffic()), host, 0, workers) as port:
        print(port, flush=True)
        sys.stdin.read()
        coordinator.close()


def work(placement: str, host: str, port: int, worker: int, workers: int) -> None:
    """Exchange EACH gradients for each line of the standard input; print the seconds of one exchange."""
    from sparkdl.transport.client import HttpExchange
    from sparkdl.transport.exchange import Endpoint
    from sparkdl.transport.messages import Kind, Update
    from sparkdl.worker.shards import sharded

    driver = HttpExchange(Endpoint(host, port, TOKEN, RUN), worker, 1, 1, LAYOUT)
    driver.join("host", 1)
    values = np.full(SIZE // 4, worker + 1, np.float32)

    def run(exchange) -> None:
        exchange.ready(1_000_000, 0, {})
        print("ready", flush=True)
        sequence = 0
        for _ in sys.stdin:
            began = time.perf_counter()
            for _ in range(EACH):
                update = Update(Kind.GRADIENT, sequence=sequence, rows=1, loss=1.0, parameters=values)
                update.base_version = sequence
                mean = exchange(update).parameters
                sequence += 1
            print((time.perf_counter() - began) / EACH, flush=True)
            if not np.allclose(mean, (workers + 1) / 2):
                raise SystemExit("The mean is wrong.")

    if placement == "driver":
        run(driver)
        return
    with sharded(driver, len(values), workers, scaled=False) as exchange:
        run(exchange)


# -- the hosts ------------------------------------------------------------------------------------


def command(line: str, *, check: bool = True) -> None:
    """Run a command."""
    subprocess.run(line.split(), check=check, capture_output=True)


@contextmanager
def network(hosts: int, rate: str) -> Iterator[None]:
    """Connect network namespaces to a bridge in a ``with`` block, each by a link of this rate."""
    try:
        command(f"ip link add {BRIDGE} type bridge")
        command(f"ip link set {BRIDGE} up")
        for host in range(hosts):
            inside, outside = f"{NAME}{host}", f"{NAME}-v{host}"
            command(f"ip netns add {inside}")
            command(f"ip link add {outside} type veth peer name eth0 netns {inside}")
            command(f"ip link set {outside} master {BRIDGE} up")
            command(f"ip -n {inside} addr add {address_of(host)}/24 dev eth0")
            command(f"ip -n {inside} link set lo up")
            command(f"ip -n {inside} link set eth0 up")
            limit = f"root tbf rate {rate} burst 256kb latency 50ms"
            command(f"tc qdisc add dev {outside} {limit}")
            command(f"tc -n {inside} qdisc add dev eth0 {limit}")
        yield
    finally:
        for host in range(hosts):
            command(f"ip netns del {NAME}{host}", check=False)
        command(f"ip link del {BRIDGE}", check=False)


def address_of(host: int) -> str:
    """Return the address of a host; host 0 is the driver's."""
    return f"{NET}.{host + 1}"


class Group:
    """The processes of one placement.

    Args:
        placement: "driver" or "executors".
        hosts: the number of hosts of workers.
        slots: the number of workers on each of them.
    """

    def __init__(self, placement: str, hosts: int, slots: int) -> None:
        self.seconds: list[float] = []
        workers, driver = hosts * slots, address_of(0)
        shared = ["--placement", placement, "--workers", str(workers), "--host", driver]
        self.server = started(0, [*shared, "--serve"])
        port = self.server.stdout.readline().strip()
        self.workers = [
            started(1 + worker // slots, [*shared, "--port", port, "--worker", str(worker)])
            for worker in range(workers)
        ]
        for worker in self.workers:
            worker.stdout.readline()

    def turn(self, *, counts: bool) -> None:
        """Let all workers exchange."""
        for worker in self.workers:
            worker.stdin.write("\n")
            worker.stdin.flush()
        slowest = max(float(worker.stdout.readline()) for worker in self.workers)
        if counts:
            self.seconds.append(slowest)

    def end(self) -> None:
        """End the processes."""
        for process in [*self.workers, self.server]:
            process.communicate()


def started(host: int, options: list[str]) -> subprocess.Popen:
    """Start a process of this program on a host."""
    root = str(Path(__file__).parents[1])
    line = (
        f"ip netns exec {NAME}{host} env PYTHONPATH={root} OPENBLAS_NUM_THREADS=1 {sys.executable} {__file__}"
    )
    return subprocess.Popen(
        [*line.split(), *options], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def estimated(workers: int, hosts: int, bits: float, placement: str) -> float:
    """Return the seconds that ``sparkdl.plan`` estimates for an exchange."""
    from sparkdl.core.cost_model import Cluster, estimate

    cluster = Cluster(workers, hosts, bits, 0.0)
    return estimate(SIZE, 0.0, cluster, "synchronous", placement=placement).exchange


def measure(hosts: int, slots: int, rate: str, rounds: int) -> list[list[str]]:
    """Return the table's rows for a number of hosts."""
    bits = {"gbit": 1e9, "mbit": 1e6}[re.sub(r"\d", "", rate)] * int(re.sub(r"\D", "", rate))
    alone = 8 * SIZE / bits  # seconds for a gradient over one link
    workers = hosts * slots
    ideal = {"driver": 2 * alone * workers, "executors": 2 * alone * slots * (hosts - 1) / hosts}
    with network(hosts + 1, rate):
        groups = {placement: Group(placement, hosts, slots) for placement in PLACEMENTS}
        for turn in range(rounds + 1):
            for placement in PLACEMENTS if turn % 2 else reversed(PLACEMENTS):
                groups[placement].turn(counts=turn > 0)  # the first one warms up
        for group in groups.values():
            group.end()
    rows = []
    for placement, group in groups.items():
        share = [seconds / ideal[placement] for seconds in group.seconds]
        bar = verdict(f"≤ {BAR}", statistics.median(share) <= BAR) if placement == "executors" else "–"
        rows.append(
            [
                rate,
                str(hosts),
                str(slots),
                f'"{placement}"',
                spread((1e3 * each for each in group.seconds), ".4g"),
                f"{1e3 * ideal[placement]:.4g}",
                spread(share, ".2f"),
                f"{1e3 * estimated(workers, hosts, bits, placement):.4g}",
                bar,
            ]
        )
        print("#", *rows[-1], flush=True)
    return rows


def main() -> None:
    """Run the comparison, or one process of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rates", nargs="+", default=RATES)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--hosts", nargs="+", type=int, help="only these numbers of hosts")
    parser.add_argument("--results", help="Markdown file to write the section into")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    for hidden in ("--placement", "--host"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    for hidden in ("--port", "--worker", "--workers"):
        parser.add_argument(hidden, type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.placement, options.host, options.workers)
        return
    if options.worker is not None:
        work(options.placement, options.host, options.port, options.worker, options.workers)
        return
    rows = [
        row
        for rate in options.rates
        for hosts, slots in HOSTS
        if not options.hosts or hosts in options.hosts
        for row in measure(hosts, slots, rate, options.rounds)
    ]
    words = (
        f"A gradient of {SIZE / 1e6:.0f} MB, {EACH} exchanges per turn, {options.rounds} turns, medians "
        "[min..max]. Each host is a network namespace of this machine whose link has this rate in each "
        f"direction; TCP uses {CONGESTION.read_text().strip()}. "
        f"{harness.machine({'sparkdl': sys.executable})}"
    )
    header = ["link", "hosts", "workers on each", "placement", "exchange, ms", "ideal, ms", "ratio"]
    header += ["sparkdl.plan, ms", "bar"]
    harness.report("Limited links", f"{words}\n\n{table(header, rows)}", options.results)


if __name__ == "__main__":
    main()
