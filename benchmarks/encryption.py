"""Milliseconds of an exchange with TLS and without.

A worker process sends updates of a given size to an endpoint in this process and gets the center back,
alternately over a connection with TLS and one without. Both run on this machine, so the times are the work of
the two processes, without a network.

    python benchmarks/encryption.py --results benchmarks/RESULTS.md
"""

import argparse
import multiprocessing
import statistics
import sys
import time
from contextlib import ExitStack

import harness
import numpy as np
from harness import spread, table

from sparkdl.data.batch_plan import BatchPlan
from sparkdl.rules import Sum
from sparkdl.server.aggregation import AggregationSpec, make_aggregation
from sparkdl.server.coordinator import Coordinator
from sparkdl.server.http_app import Traffic, make_app
from sparkdl.server.http_server import serve
from sparkdl.server.state import RunSpec
from sparkdl.transport import tls
from sparkdl.transport.client import HttpExchange
from sparkdl.transport.exchange import Endpoint
from sparkdl.transport.messages import Kind, Update

RUN, LAYOUT, TOKEN = b"r" * 16, b"l" * 16, "token"
SIZES = {"0.4 MB": 100_000, "4 MB": 1_000_000, "40 MB": 10_000_000}


def coordinator_of(size: int) -> Coordinator:
    """Return a coordinator with this number of parameters for one asynchronous worker."""
    shape = RunSpec(
        run=RUN, layout=LAYOUT, num_workers=1, plan=BatchPlan((), 0, 1, 1, False, False, 0), epochs=1
    )
    start = np.zeros(size, np.float32), np.zeros(0, np.float32)
    coordinator = Coordinator(
        shape, make_aggregation(AggregationSpec("asynchronous", False, 1, Sum()), *start)
    )
    coordinator.release(0, float("nan"))
    return coordinator


def work(endpoints: list[Endpoint], size: int, turns: int, each: int, answer) -> None:
    """Exchange over every endpoint in turn; report the milliseconds of each."""
    exchanges = [HttpExchange(endpoint, 0, 1, 1, LAYOUT) for endpoint in endpoints]
    for exchange in exchanges:
        exchange.join("host", 1)
        exchange.ready(turns * each + each, 0, {})
    found = [[] for _ in exchanges]
    values = np.ones(size, np.float32)
    for turn in range(turns + 1):  # the first warms up
        for exchange, milliseconds in zip(exchanges, found, strict=True):
            began = time.perf_counter()
            for number in range(each):
                update = Update(Kind.DELTA, sequence=turn * each + number, rows=1, parameters=values)
                exchange(update)
            if turn:
                milliseconds.append(1000 * (time.perf_counter() - began) / each)
    for exchange in exchanges:
        exchange.close()
    answer.put(found)


def measure(size: int, turns: int, each: int) -> list[list[float]]:
    """Return the milliseconds of an exchange in each turn, without TLS and with it."""
    spawn = multiprocessing.get_context("spawn")
    answer = spawn.Queue()
    with ExitStack() as stack:
        endpoints = []
        for context, certificate in ((None, b""), tls.server_context()):
            coordinator = coordinator_of(size)
            app = make_app(coordinator, TOKEN, Traffic())
            port = stack.enter_context(serve(app, "127.0.0.1", 0, 1, context))
            stack.callback(coordinator.close)
            endpoints.append(Endpoint("127.0.0.1", port, TOKEN, RUN, certificate))
        process = spawn.Process(target=work, args=(endpoints, size, turns, each, answer))
        process.start()
        found = answer.get(timeout=600)
        process.join()
    return found


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--results", help="Markdown file to write the section into")
    options = parser.parse_args()
    lines = []
    for title, size in SIZES.items():
        plain, encrypted = measure(size, options.turns, max(1, 1_000_000 // size))
        ratio = statistics.median(ours / bare for ours, bare in zip(encrypted, plain, strict=True))
        lines.append([title, spread(plain, ".2f"), spread(encrypted, ".2f"), f"×{ratio:.2f}"])
    header = ["an update, and its reply", "without TLS, ms", "with TLS, ms", "ratio"]
    words = (
        f"One worker process, one endpoint, the loopback interface; medians of {options.turns} turns (lowest "
        f"to highest). {harness.machine({'sparkdl': sys.executable})}"
    )
    harness.report("Encryption: an exchange with TLS", f"{words}\n\n{table(header, lines)}", options.results)


if __name__ == "__main__":
    main()
