"""The worker group of a run, on the driver."""

from unittest import mock

import pytest
from stores import store_of

from sparkdl.driver.worker_group import WorkerGroup
from sparkdl.errors import WorkerLostError


@pytest.mark.parametrize(
    ("mode", "point"),
    [
        ("synchronous", "from the snapshot at the beginning of epoch 1"),
        ("asynchronous", "after each worker's last counted update"),
        ("hogwild", "after each worker's last counted update"),
    ],
)
def test_a_restart_is_logged_with_the_point_that_workers_continue_from(caplog, mode, point):
    """In rounds workers continue from the snapshot, and without rounds after their own last updates."""
    store = store_of(mode)
    group = WorkerGroup(
        cluster=mock.Mock(),
        store=store,
        submit=lambda generation, barrier: mock.Mock(),
        barrier=False,
        restarts=3,
        start_timeout=60,
    )
    store.fail(1, WorkerLostError("Worker 0 died."))

    group.check()

    text = f"A worker was lost; the workers restart (1 of 3) and continue {point}: Worker 0 died."
    assert [text] == caplog.messages
    assert 2 == store.generation
