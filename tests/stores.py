"""Coordinators of small runs, without Keras, and workers in threads that wait for each other."""

import contextlib
import mmap
import threading
from collections import deque
from dataclasses import asdict
from unittest import mock

import numpy as np
import pytest

from sparkdl.data.batch_plan import Plan
from sparkdl.driver.checkpoints import Description, Saved
from sparkdl.errors import RefusedError
from sparkdl.rules import choose
from sparkdl.server.aggregation import AggregationSpec, limits, make_aggregation
from sparkdl.server.coordinator import Coordinator
from sparkdl.server.state import RowsHeld, RunSpec
from sparkdl.transport.messages import Kind, Update, lengths_of

RUN, LAYOUT = b"r" * 16, b"l" * 16
EMPTY = np.zeros(0, np.float32)
NEVER = float("nan")  # a learning rate that is left alone
KINDS = {True: Kind.GRADIENT, False: Kind.DELTA}


def vector(*values):
    return np.array(values, np.float32)


def store_of(
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
    plan = Plan((), 0, 4, 1, joint, False, 0)
    run = RunSpec(
        **{"run": RUN, "layout": LAYOUT, "num_workers": workers, "plan": plan, "epochs": 2, **shape}
    )
    rule = choose(merge, mode=mode, window=None).rule
    parameters = np.zeros(size, np.float32) if center is None else vector(*center)
    terms = AggregationSpec(mode, joint, workers, rule, staleness, hybrid, tables)
    return kind(run, make_aggregation(terms, parameters, np.zeros(statistics, np.float32), decays))


def begun(store, rows=10, attempt=1):
    """Let every worker join and be ready with ``rows`` rows; return the coordinator."""
    outcomes_of(store, [RowsHeld(rows)] * store.shape.num_workers, attempt)
    return store


def outcomes_of(store, held, attempt=1):
    """Let every worker join and report its rows; return the outcome of each."""
    store.release(store.snapshot.epoch, NEVER)
    for worker in range(len(held)):
        store.join(worker, store.generation, attempt, "host", 1)

    def ready(worker):
        rows, fingerprint = held[worker]
        return store.ready(worker, store.generation, attempt, rows, 0, {}, fingerprint)

    return together(*(lambda k=k: ready(k) for k in range(len(held))))


def update_of(store, worker=0, parameters=EMPTY, *, kind=None, rows=None, **fields):
    """Return an update stamped as by a worker of the current generation."""
    parameters = np.asarray(parameters, np.float32)
    values = {
        "kind": KINDS[store.shape.plan.joint] if kind is None else kind,
        "worker": worker,
        "rows": (4 if len(parameters) else 0) if rows is None else rows,
        "loss": 1.0,
        "steps": 1,
        "parameters": parameters,
        "generation": store.generation,
        "attempt": 1,
        "run": RUN,
        "layout": LAYOUT,
    }
    return Update(**values | fields)


def report_of(store, worker, epoch=0, **fields):
    """Return a worker's report at the end of an epoch."""
    return update_of(store, worker, kind=Kind.REPORT, epoch=epoch, **{"rows": 10, **fields})


def give(store, update):
    """Pass an update to a coordinator as its server does; return the reply."""
    store.admit(update, lengths_of(update))
    return store.exchange(update, lambda: update)


def push(store, worker, parameters=EMPTY, **fields):
    """Pass a new update to a coordinator; return the reply."""
    return give(store, update_of(store, worker, parameters, **fields))


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


def moved(store):
    """Give a coordinator a clock at 0, with every worker just heard; return a function that sets it."""
    now = [0.0]
    store.state.clock = lambda: now[0]
    for member in store.members.values():
        member.heard = 0.0
    return lambda seconds: now.__setitem__(0, float(seconds))


def state_of(store):
    """Return the state of a coordinator that a refused request must not change."""
    parameters, statistics, version = store.aggregation.snapshot()
    members = {k: (m.attempt, m.held, m.epoch, m.seen_rows) for k, m in store.members.items()}
    sequences = [store.aggregation.next_sequence(k) for k in range(store.shape.num_workers)]
    return (
        parameters.tolist(),
        statistics.tolist(),
        version,
        store.generation,
        store.progress,
        members,
        sequences,
        sorted(store.epochs.reports),
        store.snapshot.epoch,
        store.failure,
        list(store.aggregation.losses),
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


def saved_of(store):
    """Return the newest snapshot of a coordinator as a checkpoint of a run without settings."""
    return Saved(
        settings={},
        first=(0, 0.0),
        snapshot=store.newest_snapshot,
        held=store.held,
        learning_rate=0.1,
        history={},
        epochs=[],
        training={},
        counters=store.counters,
        stopped=False,
        description=Description({}, 0.1, [], ""),
    )
