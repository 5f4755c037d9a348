"""The time of an exchange, compared with a raw socket that moves the same bytes and adds the same vectors.

Each contestant has an endpoint in a process of its own, and clients in up to eight other processes, all on
this machine and without Spark. All clients exchange at the same time, with sparkdl and with the raw socket in
turn, on connections that stay open. A time is that of one exchange of all clients. ``--other`` adds the
sparkdl of another environment, for example that of an earlier commit.

    python benchmarks/exchange.py --results benchmarks/RESULTS.md
"""

import argparse
import json
import os
import re
import resource
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import harness
import numpy as np
from harness import ratios, spread, table, verdict

SIZES = {"1 kB": 1000, "475 kB": 475_000, "4 MB": 4_000_000, "100 MB": 100 << 20}
EACH = {"1 kB": 200, "475 kB": 40, "4 MB": 10, "100 MB": 1}  # exchanges of a client in a turn
BARS = {"1 kB": (6, 6), "475 kB": (1.8, 2.2), "4 MB": (1.25, 1.25), "100 MB": (1.2, 1.5)}  # K <= 2, more
CLIENTS = 1, 2, 8, 32
PROCESSES = 8  # maximum number of processes for the clients
HOST, TOKEN = "127.0.0.1", "token"
RUN, LAYOUT = b"r" * 16, b"l" * 16


# -- a contestant's endpoint ----------------------------------------------------------------------


def serve(contestant: str, mode: str, size: int, clients: int) -> None:
    """Serve until the standard input ends; print the port, and at the end the peak of memory in bytes."""
    if contestant != "raw":
        import sparkdl.server.coordinator
        import sparkdl.server.http_app  # noqa: F401 - does not count as memory of the run
    before = peak()
    {"raw": serve_raw}.get(contestant, serve_sparkdl)(mode, size // 4, clients)
    print(peak() - before, flush=True)
    os._exit(0)


def peak() -> int:
    """Return the largest resident memory of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def serve_sparkdl(mode: str, count: int, clients: int) -> None:
    """Serve the endpoint of a run that does not end by itself."""
    from sparkdl.data.batch_plan import BatchPlan
    from sparkdl.rules import Sum
    from sparkdl.server.aggregation import AggregationSpec, make_aggregation
    from sparkdl.server.coordinator import Coordinator
    from sparkdl.server.http_app import Traffic, make_app
    from sparkdl.server.http_server import serve
    from sparkdl.server.state import RunSpec

    joint = mode == "synchronous"
    plan = BatchPlan((), 0, clients, 1, joint, False, 0)
    shape = RunSpec(run=RUN, layout=LAYOUT, num_workers=clients, plan=plan, epochs=1)
    start = np.zeros(count, np.float32), np.zeros(0, np.float32)
    coordinator = Coordinator(shape, make_aggregation(AggregationSpec(mode, joint, clients, Sum()), *start))
    coordinator.release(0, float("nan"))
    with serve(make_app(coordinator, TOKEN, Traffic()), HOST, 0, clients) as port:
        print(port, flush=True)
        sys.stdin.read()
        coordinator.close()


def serve_raw(mode: str, count: int, clients: int) -> None:
    """Add the vectors of all clients to one vector, and send it back to each of them."""
    center = np.zeros(count, np.float32)
    lock, barrier = threading.Lock(), threading.Barrier(clients)

    def answer(connection: socket.socket) -> None:
        body = np.empty(count, np.float32)
        while received(connection, memoryview(body).cast("B")):
            with lock:
                np.add(center, body, out=center)
            if mode == "synchronous":
                barrier.wait()
            connection.sendall(memoryview(center).cast("B"))

    with socket.create_server((HOST, 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        for _ in range(clients):
            connection, _ = listener.accept()
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=answer, args=(connection,), daemon=True).start()
        sys.stdin.read()


def received(connection: socket.socket, body: memoryview) -> bool:
    """Fill a buffer from a socket; return False if the other side has closed it."""
    while body:
        count = connection.recv_into(body)
        if not count:
            return False
        body = body[count:]
    return True


# -- a contestant's clients -----------------------------------------------------------------------


def exchange(contestant: str, mode: str, size: int, clients: list[int], port: int, each: int) -> None:
    """For each line of the standard input, let clients exchange; print the seconds of each one."""
    make = {"raw": raw_client}.get(contestant, sparkdl_client)
    steps = [make(mode, size // 4, worker, port) for worker in clients]
    seconds = [0.0 for _ in clients]

    def run(index: int) -> None:
        began = time.perf_counter()
        for _ in range(each):
            steps[index]()
        seconds[index] = time.perf_counter() - began

    print("ready", flush=True)
    for _ in sys.stdin:
        threads = [threading.Thread(target=run, args=(index,)) for index in range(len(steps))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        print(json.dumps(seconds), flush=True)
    os._exit(0)


def sparkdl_client(mode: str, count: int, worker: int, port: int) -> Callable[[], None]:
    """Return the function that exchanges once, as worker ``worker``."""
    from sparkdl.transport.client import HttpExchange
    from sparkdl.transport.exchange import Endpoint
    from sparkdl.transport.messages import Kind, Update

    connection = HttpExchange(Endpoint(HOST, port, TOKEN, RUN), worker, 1, 1, LAYOUT)
    connection.join("host", 1)
    values, state = np.ones(count, np.float32), {"sequence": -1, "version": 0, "ready": False}
    kind = Kind.GRADIENT if mode == "synchronous" else Kind.DELTA

    def step() -> None:
        if not state["ready"]:  # waits for the other workers
            state["ready"] = bool(connection.ready(1_000_000, 0, {}))
        state["sequence"] += 1
        update = Update(kind, sequence=state["sequence"], rows=1, steps=1, loss=1.0, parameters=values)
        update.base_version = state["version"]
        state["version"] = connection(update).version

    return step


def raw_client(mode: str, count: int, worker: int, port: int) -> Callable[[], None]:
    """Return the function that exchanges once over a raw socket."""
    connection = socket.create_connection((HOST, port))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    values, body = np.ones(count, np.float32), np.empty(count, np.float32)

    def step() -> None:
        connection.sendall(memoryview(values).cast("B"))
        received(connection, memoryview(body).cast("B"))

    return step


# -- the comparison -------------------------------------------------------------------------------


class Contestant:
    """The endpoint and the clients of one contestant for one size.

    Args:
        name: "raw", or a name for sparkdl.
        python: the Python to run it with.
        mode: the mode of the run.
        size: the label of the size.
        clients: the number of clients.

    Attributes:
        seconds: in each turn, the time of one exchange of all clients.
        unfair: in each turn, the longest time of a client divided by the median.
    """

    def __init__(self, name: str, python: str, mode: str, size: str, clients: int) -> None:
        self.each, self.seconds, self.unfair = EACH[size], [], []
        shared = [python, __file__, "--contestant", name, "--modes", mode, "--sizes", size]
        self.server = _started([*shared, "--serve", "--clients", str(clients)])
        port = self.server.stdout.readline().strip()
        groups = np.array_split(np.arange(clients), min(clients, PROCESSES))
        self.clients = [
            _started([*shared, "--port", port, "--clients", *map(str, group)]) for group in groups
        ]
        for client in self.clients:
            client.stdout.readline()

    def turn(self, *, counts: bool) -> None:
        """Let all clients exchange."""
        for client in self.clients:
            client.stdin.write("\n")
            client.stdin.flush()
        seconds = [each for client in self.clients for each in json.loads(client.stdout.readline())]
        if counts:
            self.seconds.append(max(seconds) / self.each)
            self.unfair.append(max(seconds) / statistics.median(seconds))

    def end(self) -> int:
        """End the processes; return the endpoint's peak of memory in bytes."""
        for client in self.clients:
            client.communicate()
        return int(self.server.communicate()[0])


def _started(command: list[str]) -> subprocess.Popen:
    root = str(Path(command[0]).absolute().parents[2])  # that of the environment's checkout
    environment = {**os.environ, "PYTHONPATH": root, "OPENBLAS_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    return subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def measure(mode: str, size: str, clients: int, options: argparse.Namespace) -> list[list[str]]:
    """Return the rows of the table for one size and number of clients."""
    pythons = {"sparkdl": sys.executable, "raw": sys.executable}
    if options.other:
        pythons["other"] = options.other
    found = {name: Contestant(name, python, mode, size, clients) for name, python in pythons.items()}
    for turn in range(options.rounds + 1):
        order = list(found) if turn % 2 else list(reversed(found))
        for name in order:
            found[name].turn(counts=turn > 0)  # the first one warms up
    peaks = {name: contestant.end() / SIZES[size] for name, contestant in found.items()}
    rows = []
    raw = found.pop("raw")
    bar = BARS[size][clients > 2]
    for name, contestant in found.items():
        compared = ratios(dict(enumerate(contestant.seconds)), dict(enumerate(raw.seconds)))
        rows.append(
            [
                mode,
                size,
                str(clients),
                *([name] if options.other else []),
                spread((1e3 * each for each in contestant.seconds), ".3g"),
                spread((1e3 * each for each in raw.seconds), ".3g"),
                spread(compared, ".2f"),
                verdict(f"≤ {bar}", statistics.median(compared) <= bar),
                f"{statistics.median(contestant.unfair):.2f}",
                f"{peaks[name]:.1f}" if SIZES[size] > 1 << 20 else "–",
            ]
        )
        print("#", *rows[-1], flush=True)
    return rows


def main() -> None:
    """Run the comparison, or one process of it."""
    parser = argparse.ArgumentParser(description=re.sub(r"\s+", " ", __doc__.split("\n\n")[0]))
    parser.add_argument("--modes", nargs="+", default=["synchronous", "asynchronous"])
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=SIZES)
    parser.add_argument("--clients", nargs="+", type=int, default=CLIENTS)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--other", help="Python of another environment, whose sparkdl takes part")
    parser.add_argument("--results", help="Markdown file to write the section into")
    for hidden in ("--contestant", "--port"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contestant:
        mode, size = options.modes[0], options.sizes[0]
        if options.serve:
            serve(options.contestant, mode, SIZES[size], options.clients[0])
        exchange(options.contestant, mode, SIZES[size], options.clients, int(options.port), EACH[size])
    rows = [
        row
        for mode in options.modes
        for size in options.sizes
        for clients in options.clients
        for row in measure(mode, size, clients, options)
    ]
    words = (
        f"{options.rounds} turns, medians [min..max]. Unfair: the slowest client's time divided by the "
        "median. Peak: the endpoint's memory in copies of the vector. "
        + harness.machine({"sparkdl": sys.executable})
    )
    header = ["mode", "size", "clients", *(["environment"] if options.other else [])]
    header += ["sparkdl, ms", "raw socket, ms", "ratio", "bar", "unfair", "peak"]
    harness.report("An exchange", f"{words}\n\n{table(header, rows)}", options.results)


if __name__ == "__main__":
    main()
