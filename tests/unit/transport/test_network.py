"""Workers on other hosts than the driver's survive network faults, and updates count once.

Hosts are network namespaces with worker processes. A link is taken down and up again, at the driver's end
(the worker's packets vanish) or at the worker's (its kernel has no route). Links are slow, or lose packets; a
relay delays and resets the connections through it.
"""

import json
import re
import subprocess
import time
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest
from coordinators import KINDS, NEVER, coordinator_of, together
from counted import SIZE, Job, started, total, work
from network import ADDRESS, Network, on
from relay import Relay

from sparkdl import FaultTolerance
from sparkdl.server import http_server
from sparkdl.server.http_app import Traffic, make_app
from sparkdl.server.http_server import serve
from sparkdl.transport import client
from sparkdl.transport.messages import Kind

pytestmark = pytest.mark.network

WORKERS, UPDATES = 2, 100
SETTINGS = {"gradients": {"joint": True}, "asynchronous": {"mode": "asynchronous", "merge": "sum"}}
CUTS = [3, pytest.param(20, marks=pytest.mark.whole)]  # seconds
STALL = FaultTolerance.stall_timeout


@pytest.fixture
def network():
    with Network(WORKERS) as network:
        yield network


class Run:
    """A run whose workers are processes on separate hosts.

    Args:
        setting: the name of its aggregation settings.
        network: the hosts.
        stack: the stack that closes it.
        updates: the number of updates of each worker.
        size: the number of parameters of an update.
        relay: the arguments of a Relay for its requests.
    """

    def __init__(self, setting, network, stack, *, updates=UPDATES, size=SIZE, **relay):
        self.updates = updates
        self.coordinator = coordinator_of(
            workers=WORKERS, size=size, epochs=1, stall=STALL, **SETTINGS[setting]
        )
        self.coordinator.release(1, NEVER)
        app = make_app(self.coordinator, "secret", Traffic())
        port = stack.enter_context(serve(app, ADDRESS, 0, WORKERS))
        stack.callback(self.coordinator.close)
        self.relay = stack.enter_context(Relay(port, 0, host=ADDRESS, **relay)) if relay else None
        port = self.relay.port if relay else port
        job = Job(ADDRESS, port, 0, KINDS[self.coordinator.shape.plan.joint], updates, 0.01, size)
        self.processes = [
            stack.enter_context(started(replace(job, worker=worker), network.command(worker)))
            for worker in range(WORKERS)
        ]

    def drive(self, until):
        """Drive the run until a condition holds or the run has failed; return the condition."""
        while not (reached := until()) and self.coordinator.failure is None:
            self.coordinator.wait_epoch(0, 0.02)
        return reached

    def counted(self, worker):
        """Return the number of merged updates of a worker."""
        return self.coordinator.aggregation.next_sequence(worker)

    def end(self):
        """Wait for the workers to finish; assert that each update counted once."""
        self.drive(lambda: all(process.poll() is not None for process in self.processes))
        assert self.coordinator.failure is None
        outputs = [process.communicate(timeout=30) for process in self.processes]
        assert [0] * WORKERS == [process.returncode for process in self.processes], outputs
        assert [self.updates] * WORKERS == [self.counted(worker) for worker in range(WORKERS)]
        sums = [self.coordinator.aggregation.snapshot()[0]]
        if self.coordinator.shape.plan.joint:
            sums = [WORKERS * np.sum(json.loads(out), axis=0) for out, _ in outputs]
        assert {float(total(WORKERS, self.updates))} == set(np.concatenate(sums).tolist())


@pytest.fixture
def begin(network):
    """A function that starts a run."""
    with ExitStack() as stack:
        yield lambda setting, **options: Run(setting, network, stack, **options)


@pytest.mark.whole
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("end", ["driver", "worker"])
@pytest.mark.parametrize("seconds", CUTS)
def test_a_worker_that_is_cut_off_goes_on(begin, network, setting, end, seconds):
    """A worker that is cut off for a while is not lost, and its pending update counts once."""
    run = begin(setting)
    host = network.driver if end == "driver" else network.workers[0]
    assert run.drive(lambda: run.counted(0) > UPDATES // 4)
    network.cut(0, host)
    run.drive(after(seconds))
    assert run.counted(0) < UPDATES
    network.mend(0, host)
    run.end()


def after(seconds):
    """Return a condition that holds after ``seconds``."""
    end = time.monotonic() + seconds
    return lambda: time.monotonic() > end


def test_a_worker_that_finds_no_way_to_the_driver_waits_for_one(network, monkeypatch):
    """A worker without a route to the driver keeps trying until there is one."""
    monkeypatch.setattr(client.random, "uniform", lambda low, high: low / 100)  # pauses between tries
    coordinator = coordinator_of("asynchronous", workers=1, size=SIZE, merge="sum")
    coordinator.release(0, NEVER)
    away = network.workers[0]

    def worker(job):
        with on(away):
            return work(job)

    def rescuer():
        time.sleep(1)
        assert {} == coordinator.members
        network.mend(0, away)

    with serve(make_app(coordinator, "secret", Traffic()), ADDRESS, 0, 1) as port:
        job = Job(ADDRESS, port, 0, Kind.DELTA, 5)
        network.cut(0, away)
        replies, rescued = together(lambda: worker(job), rescuer)
        network.cut(0, away)
        monkeypatch.setattr(client, "OUTAGE_SECONDS", 0.1)
        (error,) = together(lambda: worker(job))
        coordinator.close()

    assert rescued is None
    assert [total(1, 5)] * SIZE == replies[-1]
    assert re.search(r"after \d+ attempts \(\[Errno \d+\] Network is unreachable\)", str(error))


@pytest.mark.one_case
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_slow_link_is_only_slow(begin, network, setting):
    """A run over a slow link succeeds."""
    for worker in range(WORKERS):
        network.slow(worker, "100kbit")
    begin(setting).end()


@pytest.mark.whole
@pytest.mark.parametrize("setting", SETTINGS)
def test_where_packets_are_lost_every_update_counts_once(begin, network, setting):
    """With one packet in twenty lost each way, every update counts once."""
    try:
        for worker in range(WORKERS):
            network.lose(worker, 0.05)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"this kernel has no filters that lose packets: {error.stderr.strip()}")
    begin(setting).end()
    assert sum(map(network.lost, range(WORKERS))) > 0


@pytest.mark.whole
@pytest.mark.parametrize("setting", SETTINGS)
def test_an_update_may_take_longer_than_a_connection_may_be_silent(begin, network, monkeypatch, setting):
    """An update may take longer than the idle timeout while its bytes keep arriving."""
    monkeypatch.setattr(http_server, "IDLE_SECONDS", 1)
    for worker in range(WORKERS):
        network.slow(worker, "500kbit")
    begin(setting, updates=1, size=40_000).end()  # 160 KB, 2.6 s each way


@pytest.mark.whole
@pytest.mark.parametrize("setting", SETTINGS)
def test_an_update_that_is_cut_off_in_its_middle_is_sent_again(begin, network, monkeypatch, setting):
    """An update that is cut off halfway is sent again when the link is back."""
    monkeypatch.setattr(http_server, "IDLE_SECONDS", 1)
    for worker in range(WORKERS):
        network.slow(worker, "500kbit")
    run = begin(setting, updates=1, size=40_000)
    assert run.drive(lambda: network.received(0) > 40_000)  # of 160 KB
    network.cut(0, network.driver)
    run.drive(after(2))
    network.mend(0, network.driver)
    run.end()


@pytest.mark.whole
@pytest.mark.parametrize("setting", SETTINGS)
def test_what_comes_late_or_on_a_connection_that_was_reset_counts_once(begin, setting):
    """Updates through a relay that delays requests and resets connections count once."""
    run = begin(setting, share=0.02, delay=0.02)
    run.end()
    assert run.relay.done["requests"] > 0
    assert run.relay.done["answers"] > 0
