"""Hours of an endpoint in minutes: many workers and constant faults, without growth or loss.

Workers are processes without Keras, and every update of a worker adds 1 to its own number in the center.
Between them and the endpoint is a relay, also a process, that loses requests and answers and repeats
requests. Workers are killed and started again as another attempt, as Spark would do. This process is the
driver: it runs the coordinator, the endpoint and the epochs' ends, and checks its own memory, threads and
descriptors every second. It fails if one of these grew from the first quarter to the last, or if a number
does not match its worker's updates.

    python benchmarks/soak.py --minutes 30 --workers 16 --results benchmarks/RESULTS.md
"""

import argparse
import gc
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections import Counter
from contextlib import ExitStack, contextmanager
from pathlib import Path

import harness
import numpy as np
from contestants import held
from harness import table, verdict

sys.path.insert(0, str(harness.REPOSITORY))

from sparkdl.data.batch_plan import BatchPlan
from sparkdl.rules import choose
from sparkdl.server.aggregation import AggregationSpec, make_aggregation
from sparkdl.server.coordinator import Coordinator
from sparkdl.server.http_app import Traffic, make_app
from sparkdl.server.http_server import serve
from sparkdl.server.state import RunSpec
from sparkdl.transport.exchange import Endpoint
from sparkdl.transport.messages import Flag, Kind, Update
from sparkdl.worker.session import Attempt, membership

SIZE = 10_000  # parameters of the center
UPDATES = 100  # of a worker per epoch
ROWS = 4  # of an update
RUN, LAYOUT, TOKEN = b"r" * 16, b"l" * 16, "secret"
SHARE = 0.01  # of requests, and of answers, that the relay loses
SILENCE, STALL = 3.0, 60.0  # the defaults of SparkModel
WARM_UP, WARM_SECONDS = 0.2, 60  # share of the time, and at least these seconds, ignored for growth
BARS = {"MB of memory": 2.0, "threads": 0.0, "descriptors": 8.0}  # smaller increases do not count as growth


# --- the worker ---------------------------------------------------------------------------------


def work(port: int, worker: int, attempt: int, pause: float) -> None:
    """Run a worker until the driver stops it; print the total number of updates sent."""
    task = Attempt(worker, attempt, 1, 1, Endpoint("127.0.0.1", port, TOKEN, RUN))
    amount = np.zeros(SIZE, np.float32)
    amount[worker] = 1
    with membership(task, LAYOUT) as (exchange, _):
        begin = exchange.ready(ROWS * UPDATES, 0, {})
        sequence, epoch, version, stopped = begin["sequence"], begin["epoch"], 0, begin["stop"]
        while not stopped:
            ends = sequence == UPDATES * (epoch + 1)
            if ends:
                update = Update(kind=Kind.REPORT, epoch=epoch, rows=ROWS * UPDATES, base_version=version)
            else:
                update = Update(
                    Kind.DELTA,
                    sequence=sequence,
                    epoch=epoch,
                    rows=ROWS,
                    loss=1.0,
                    steps=1,
                    base_version=version,
                    parameters=amount,
                )
            reply = exchange(update)
            sequence, epoch = sequence + (not ends), epoch + ends
            version, stopped = reply.version, bool(reply.flags & Flag.STOP)
            time.sleep(random.uniform(0, 2 * pause))
    print(sequence)


# --- the relay ----------------------------------------------------------------------------------


def relay(port: int, share: float) -> None:
    """Run the relay until stdin ends; print its port, and its counters at the end."""
    sys.path.insert(0, str(harness.REPOSITORY / "tests"))
    from relay import Relay

    with Relay(port, seed=0, share=share) as between:
        print(between.port, flush=True)
        sys.stdin.read()
    print(json.dumps(between.done))


@contextmanager
def relayed(port: int, faults: Counter, share: float):
    """Yield the port of a relay; add its counters to ``faults``."""
    with started("--relay", port, "--share", share) as process:
        yield int(process.stdout.readline())
        faults.update(json.loads(process.communicate()[0]))


def started(*arguments) -> subprocess.Popen:
    """Return a process of this script."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return subprocess.Popen([sys.executable, __file__, *map(str, arguments)], text=True, **pipes)


# --- the driver ---------------------------------------------------------------------------------


class WorkerGroup:
    """Worker processes, one of which is killed and restarted now and then.

    Args:
        port: the port they connect to.
        workers: the number of workers.
        pause: seconds between two updates of a worker, on average.
        kill: seconds between two kills, on average.
        faults: the counter of kills.
    """

    def __init__(self, port: int, workers: int, *, pause: float, kill: float, faults: Counter):
        self.port, self.pause, self.kill, self.faults = port, pause, kill, faults
        self.random = random.Random(0)
        self.attempts = [0] * workers
        self.processes = [self._start(worker) for worker in range(workers)]
        self.next = time.monotonic() + kill

    def __enter__(self) -> "WorkerGroup":
        return self

    def __exit__(self, *exception: object) -> None:
        for process in self.processes:
            self._end(process)

    def _start(self, worker: int) -> subprocess.Popen:
        self.attempts[worker] += 1
        return started("--worker", self.port, worker, self.attempts[worker], self.pause)

    @staticmethod
    def _end(process: subprocess.Popen) -> None:
        process.kill()
        process.communicate()

    def disturb(self) -> None:
        """Kill a worker and restart it, if it is time to."""
        if time.monotonic() < self.next:
            return
        self.next += self.random.uniform(0.5, 1.5) * self.kill
        worker = self.random.randrange(len(self.processes))
        self._end(self.processes[worker])
        self.processes[worker] = self._start(worker)
        self.faults["killed"] += 1

    def end(self) -> list[str]:
        """Return the number of updates that each worker reports as sent."""
        return [process.communicate(timeout=120)[0].strip() for process in self.processes]


def sample() -> tuple[float, ...]:
    """Return this process's resources, in the order of the bars."""
    gc.collect()  # some thousand objects of requests are garbage
    threads, descriptors = (len(os.listdir(f"/proc/self/{kind}")) for kind in ("task", "fd"))
    return held(Path("/proc/self"))[0] / 1e6, threads, descriptors


def coordinator_of(workers: int) -> Coordinator:
    """Return the coordinator of a run without end."""
    plan = BatchPlan((), 0, ROWS, 1, False, False, 0)
    shape = RunSpec(
        run=RUN, layout=LAYOUT, num_workers=workers, plan=plan, epochs=1 << 31, silence=SILENCE, stall=STALL
    )
    rule = choose("sum", mode="asynchronous", window=1).rule
    terms = AggregationSpec("asynchronous", False, workers, rule, None, None)
    center, statistics = np.zeros(SIZE, np.float32), np.zeros(0, np.float32)
    return Coordinator(shape, make_aggregation(terms, center, statistics, None))


def drive(coordinator: Coordinator, group: WorkerGroup, seconds: float) -> dict[str, np.ndarray]:
    """Drive a run for ``seconds``; return this process's resources, once a second."""
    samples = np.ones((int(seconds) + 1, len(BARS)))  # takes no more memory as time passes
    begun, epoch, count = time.monotonic(), 0, 0
    coordinator.release(0, float("nan"))
    while (passed := time.monotonic() - begun) < seconds and coordinator.failure is None:
        result = coordinator.wait_epoch(epoch, 0.2)
        if result is not None:
            coordinator.release(epoch + 1, float("nan"))
            coordinator.commit(result.snapshot)
            epoch += 1
        coordinator.take_log()
        group.disturb()
        if passed > count:
            samples[count], count = sample(), count + 1
    coordinator.stop()
    return dict(zip(BARS, samples[:count].T, strict=True))


def soak(workers: int, minutes: float, *, share: float = SHARE, **options: float) -> dict:
    """Return the resources, counters and faults of a run; the options are those of its workers."""
    coordinator, faults = coordinator_of(workers), Counter()
    with ExitStack() as stack:
        app = make_app(coordinator, TOKEN, Traffic())
        port = stack.enter_context(serve(app, "127.0.0.1", 0, workers))
        stack.callback(coordinator.close)
        between = stack.enter_context(relayed(port, faults, share))
        group = stack.enter_context(WorkerGroup(between, workers, faults=faults, **options))
        samples = drive(coordinator, group, 60 * minutes)
        said = group.end()
    if coordinator.failure is not None:
        raise SystemExit(f"The run failed: {coordinator.failure}")
    center = coordinator.aggregation.snapshot()[0]
    return {
        "samples": samples,
        "said": said,
        "center": center[:workers].astype(int).tolist(),
        "rest": float(np.abs(center[workers:]).sum()),
        "version": coordinator.aggregation.version,
        "counters": coordinator.counters,
        "faults": dict(faults),
        "epochs": coordinator.snapshot.epoch,
    }


# --- the verdict --------------------------------------------------------------------------------


def warm(samples: dict[str, np.ndarray], name: str) -> np.ndarray:
    """Return the samples of a resource after the warm-up; at least the last one."""
    values = samples[name]
    return values[min(len(values) - 1, max(int(WARM_UP * len(values)), WARM_SECONDS)) :]


def quarters(samples: dict[str, np.ndarray], name: str) -> tuple[float, float]:
    """Return the medians of the first and the last quarter after the warm-up."""
    values = warm(samples, name)
    length = max(1, len(values) // 4)
    return statistics.median(values[:length]), statistics.median(values[-length:])


def slope(samples: dict[str, np.ndarray], name: str) -> float:
    """Return a resource's growth per hour by least squares, after the warm-up."""
    values = warm(samples, name)
    return float(3600 * np.polyfit(np.arange(len(values)), values, 1)[0]) if len(values) > 1 else 0.0


def grown(samples: dict[str, np.ndarray]) -> list[str]:
    """Return the resources that grew by more than their bars."""
    return [name for name, bar in BARS.items() if -np.subtract(*quarters(samples, name)) > bar]


def adds_up(outcome: dict) -> bool:
    """Return True if each worker's number equals the number it sent, and their sum matches the counters."""
    center, total = outcome["center"], sum(outcome["center"])
    each = [str(count) for count in center] == outcome["said"] and not outcome["rest"]
    return bool(each and total == outcome["version"] == outcome["counters"]["exchanges"])


def words_of(outcome: dict, options) -> str:
    """Return the section of an outcome."""
    samples, counters, faults = outcome["samples"], outcome["counters"], outcome["faults"]
    lines = []
    for name, bar in BARS.items():
        first, last = quarters(samples, name)
        met = verdict(f"≤ {bar:g} more", name not in grown(samples))
        lines.append([name, f"{first:.1f}", f"{last:.1f}", f"{slope(samples, name):+.2f}", met])
    header = ["endpoint's process", "first quarter", "last quarter", "change per hour", "bar"]
    counts = {
        "updates merged": outcome["version"],
        "sum of the center": sum(outcome["center"]),
        "epochs": outcome["epochs"],
        "duplicates": counters["duplicates"],
        "refused": counters["refused"],
        "attempts that took a worker's place": counters["superseded"],
        "workers killed": faults.get("killed", 0),
        "requests lost": faults.get("requests", 0),
        "answers lost": faults.get("answers", 0),
        "requests repeated": faults.get("repeated", 0),
    }
    count_table = table(["counted", ""], [[name, f"{count:,}"] for name, count in counts.items()])
    words = (
        f"{options.workers} worker processes for {options.minutes:g} minutes, asynchronous, {SIZE:,} "
        f"parameters; medians of samples once a second after the first {WARM_UP:.0%} of the time, "
        f"and {WARM_SECONDS} s at least. "
        f"{harness.machine({'sparkdl': sys.executable})}"
    )
    exact = verdict("Each worker's updates in the center, exactly once:", adds_up(outcome))
    return f"{words}\n\n{table(header, lines)}\n\n{count_table}\n\n{exact}."


def main() -> None:
    """Run the soak; fail if a resource grew or the numbers do not add up."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--pause", type=float, default=0.05, help="seconds between two updates of a worker")
    parser.add_argument("--kill", type=float, default=10, help="seconds between two kills of a worker")
    parser.add_argument("--share", type=float, default=SHARE, help="share of requests, and of answers, lost")
    parser.add_argument("--results", help="Markdown file to write the section into")
    parser.add_argument("--worker", nargs=4, type=float, help=argparse.SUPPRESS)
    parser.add_argument("--relay", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(*map(int, options.worker[:3]), options.worker[3])
    elif options.relay:
        relay(options.relay, options.share)
    else:
        faults = {"share": options.share, "pause": options.pause, "kill": options.kill}
        outcome = soak(options.workers, options.minutes, **faults)
        harness.report("Soak", words_of(outcome, options), options.results)
        if grown(outcome["samples"]) or not adds_up(outcome):
            raise SystemExit(
                f"Resources that grew: {grown(outcome['samples'])}; exact counts: {adds_up(outcome)}."
            )


if __name__ == "__main__":
    main()
