"""Coordinators of small runs, without Keras, and workers in threads that wait for each other."""

import contextlib
import mmap
import threading
from collections import deque
from dataclasses import asdict
from functools import partial
from unittest import mock

import numpy as np
import pytest

from sparkdl.data.batch_plan import BatchPlan
from sparkdl.driver.checkpoints import Description, Saved
from sparkdl.errors import RefusedError
from sparkdl.rules import choose
from sparkdl.server.aggregation import AggregationSpec, limits, make_aggregation
from sparkdl.server.coordinator import Coordinator
from sparkdl.server.state import RowsHeld, RunSpec
from sparkdl.transport.messages import Kind, Update, copy_of, lengths_of

RUN, LAYOUT = b"r" * 16, b"l" * 16
EMPTY = np.zeros(0, np.float32)
NEVER = float("nan")  # a learning rate that is left alone
KINDS = {True: Kind.GRADIENT, False: Kind.DELTA}


def vector(*values):
    return np.array(values, np.float32)


def coordinator_of(
    mode="synchronous",
    *,
    workers=3,
    size=5,
    joint=None,
    merge=None,
    statistics=0,
    staleness=None,
    hybrid=None,
    center=None,
    decays=None,
    tables=(),
    kind=Coordinator,
    **shape,
):
    """Return the coordinator of a run that no worker has joined: batches of 4 rows, an exchange per batch."""
    joint = mode == "synchronous" if joint is None else joint
    plan = BatchPlan((), 0, 4, 1, joint, False, 0)
    run = RunSpec(
        **{"run": RUN, "layout": LAYOUT, "num_workers": workers, "plan": plan, "epochs": 2, **shape}
    )
    rule = choose(merge, mode=mode, window=None).rule
    parameters = np.zeros(size, np.float32) if center is None else vector(*center)
    terms = AggregationSpec(mode, joint, workers, rule, staleness, hybrid, tables)
    return kind(run, make_aggregation(terms, parameters, np.zeros(statistics, np.float32), decays))


def begun(coordinator, rows=10, attempt=1):
    """Let every worker join and be ready with ``rows`` rows; return the coordinator."""
    outcomes_of(coordinator, [RowsHeld(rows)] * coordinator.shape.num_workers, attempt)
    return coordinator


def outcomes_of(coordinator, held, attempt=1):
    """Let every worker join and report its rows; return the outcome of each."""
    coordinator.release(coordinator.snapshot.epoch, NEVER)
    for worker in range(len(held)):
        coordinator.join(worker, coordinator.generation, attempt, "host", 1)

    def ready(worker):
        rows, fingerprint = held[worker]
        return coordinator.ready(worker, coordinator.generation, attempt, rows, 0, {}, fingerprint)

    return together(*(lambda k=k: ready(k) for k in range(len(held))))


def update_of(coordinator, worker=0, parameters=EMPTY, *, kind=None, rows=None, **fields):
    """Return an update stamped as by a worker of the current generation."""
    parameters = np.asarray(parameters, np.float32)
    values = {
        "kind": KINDS[coordinator.shape.plan.joint] if kind is None else kind,
        "worker": worker,
        "rows": (4 if len(parameters) else 0) if rows is None else rows,
        "loss": 1.0,
        "steps": 1,
        "parameters": parameters,
        "generation": coordinator.generation,
        "attempt": 1,
        "run": RUN,
        "layout": LAYOUT,
    }
    return Update(**values | fields)


def report_of(coordinator, worker, epoch=0, **fields):
    """Return a worker's report at the end of an epoch."""
    return update_of(coordinator, worker, kind=Kind.REPORT, epoch=epoch, **{"rows": 10, **fields})


def give(coordinator, update):
    """Pass an update to a coordinator as its server does; return the reply."""
    coordinator.admit(update, lengths_of(update))
    return coordinator.exchange(update, partial(copy_of, update))


def push(coordinator, worker, parameters=EMPTY, **fields):
    """Pass a new update to a coordinator; return the reply."""
    return give(coordinator, update_of(coordinator, worker, parameters, **fields))


def status_of(call):
    """Return the status with which a call is refused."""
    with pytest.raises(RefusedError) as error:
        call()
    return error.value.status


def together(*calls):
    """Make calls that wait for each other, each in a thread; return their results or exceptions."""
    results = [None] * len(calls)

    def run(index):
        try:
            results[index] = calls[index]()
        except Exception as error:  # noqa: BLE001 - an outcome like any other
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


@contextlib.contextmanager
def impatient():
    """Let no request wait in a coordinator; its answer is to repeat the request."""
    with mock.patch.object(limits, "PATIENCE", 0.0):
        yield


def moved(coordinator):
    """Give a coordinator a clock at 0, with every worker just heard; return a function that sets it."""
    now = [0.0]
    coordinator.state.clock = lambda: now[0]
    for member in coordinator.members.values():
        member.heard = 0.0
    return lambda seconds: now.__setitem__(0, float(seconds))


def state_of(coordinator):
    """Return the state of a coordinator that a refused request must not change."""
    parameters, statistics, version = coordinator.aggregation.snapshot()
    members = {k: (m.attempt, m.held, m.epoch, m.seen_rows) for k, m in coordinator.members.items()}
    sequences = [coordinator.aggregation.next_sequence(k) for k in range(coordinator.shape.num_workers)]
    return (
        parameters.tolist(),
        statistics.tolist(),
        version,
        coordinator.generation,
        coordinator.progress,
        members,
        sequences,
        sorted(coordinator.epochs.reports),
        coordinator.snapshot.epoch,
        coordinator.failure,
        list(coordinator.aggregation.losses),
    )


# A refused request still counts and updates the time its worker was last heard; one cut off after its header
# has also begun to send.
UNSEEN = {"counters", "heard", "looked", "clock", "here", "deadline"}


def all_of(value, seen=None):
    """Return the state of a coordinator, or of a part of it, in a comparable form, each object once."""
    seen = {} if seen is None else seen  # the parts refer to each other
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, mmap.mmap):
        return bytes(value)
    if isinstance(value, dict):
        return [(key, all_of(part, seen)) for key, part in value.items() if key not in UNSEEN]
    if isinstance(value, list | tuple | set | deque):
        return [all_of(part, seen) for part in value]
    if isinstance(value, Exception):
        return repr(value)
    if type(value).__module__.startswith("sparkdl."):
        if id(value) in seen:
            return seen[id(value)]
        seen[id(value)] = len(seen)
        return all_of(vars(value) if hasattr(value, "__dict__") else asdict(value), seen)
    return value


def saved_of(coordinator):
    """Return the newest snapshot of a coordinator as a checkpoint of a run without settings."""
    return Saved(
        settings={},
        first=(0, 0.0),
        snapshot=coordinator.newest_snapshot,
        held=coordinator.held,
        learning_rate=0.1,
        history={},
        epochs=[],
        training={},
        counters=coordinator.counters,
        stopped=False,
        description=Description({}, 0.1, [], ""),
    )
