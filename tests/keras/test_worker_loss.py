"""Training without a lost worker uses the remaining rows, and replicas stay equal."""

import keras
import numpy as np
import pytest
from worker_threads import train

from sparkdl.server.local_exchange import LocalExchange
from sparkdl.worker.loop import Loop

BATCH, EPOCHS, ROUNDS = 16, 3, 13


class GoneError(BaseException):
    """An error that ends a loop as the kernel ends a process."""


class Mortal(Loop):
    """The loop of a worker that dies before one of its exchanges, and may restart."""

    deaths, returns, ended = {}, False, {}

    def run(self, notes):
        try:
            super().run(notes)
        except GoneError:
            if not self.returns:
                return
            self.exchange = LocalExchange(self.exchange.coordinator, self.worker, attempt=1)
            self.replica.model.set_weights([0 * weight for weight in self.replica.model.get_weights()])
            self.speaks = self.worker == 0
            super().run(notes)
        self.ended[self.worker] = self.replica.read().vector

    def _exchange(self, sequence):
        if self.deaths.get(self.worker) == sequence and not self.exchange.attempt:
            self.die()
        return super()._exchange(sequence)

    def die(self):
        coordinator = self.exchange.coordinator
        with coordinator.changed:
            coordinator.lose(self.worker, f"Worker {self.worker} died.")
        raise GoneError


def mortal(**fields):
    return type("Mortal", (Mortal,), {"ended": {}, **fields})


@pytest.mark.one_case
@pytest.mark.parametrize("worker", [0, 1])
def test_a_step_without_a_worker_is_that_of_the_other_rows(problem, worker):
    """In synchronous/batch the model is that of plain Keras on the rows of the remaining workers."""
    model, reference = problem.model(keras.optimizers.Adam(0.01)), problem.model(keras.optimizers.Adam(0.01))
    start, coordinators, death = model.get_weights(), [], ROUNDS + 5
    train(
        model,
        problem.x,
        problem.y,
        rows=(102, 101),
        batch_size=BATCH,
        epochs=EPOCHS,
        goes_on=True,
        loop=mortal(deaths={worker: death}),
        coordinators=coordinators,
    )
    for step in range(EPOCHS * ROUNDS):
        rows = np.arange(len(problem.x))[step % ROUNDS * BATCH :][:BATCH]
        if step >= death:
            rows = rows[rows % 2 != worker]
        reference.train_on_batch(problem.x[rows], problem.y[rows])

    assert problem.distance(model, reference, start) <= 20  # Adam
    assert {worker} == coordinators[0].lost
    assert 1 - worker == coordinators[0].snapshot.speaker


def test_a_worker_that_dies_before_its_report_is_spoken_for(problem):
    """If a worker dies before its report, another worker that has reported sends the shared state."""
    model, reference = problem.model(), problem.model()
    start = model.get_weights()

    class Late(mortal()):
        def _finish(self, flags):
            if self.worker == 0 and self.epoch == 1:
                coordinator = self.exchange.coordinator
                with coordinator.changed:
                    assert coordinator.changed.wait_for(lambda: coordinator.epochs.reports.get(1), 10)
                self.die()
            super()._finish(flags)

    train(model, problem.x, problem.y, rows=(102, 101), batch_size=BATCH, epochs=2, goes_on=True, loop=Late)
    reference.fit(problem.x, problem.y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)

    assert problem.distance(model, reference, start) <= 1


@pytest.mark.parametrize("worker", [0, 1])
def test_a_replica_that_comes_back_is_the_others(problem, worker):
    """A replica that returns equals the others bit for bit: it gets the snapshot and every later mean."""
    coordinators = []
    loop = mortal(deaths={worker: ROUNDS + 5}, returns=True)
    train(
        problem.model(keras.optimizers.Adam(0.01)),
        problem.x,
        problem.y,
        rows=(102, 101),
        batch_size=BATCH,
        epochs=EPOCHS,
        goes_on=True,
        loop=loop,
        coordinators=coordinators,
    )

    assert 1 == coordinators[0].counters["returned"]
    np.testing.assert_array_equal(loop.ended[0], loop.ended[1])


@pytest.mark.one_case
@pytest.mark.parametrize(("mode", "window"), [("synchronous", 2), ("asynchronous", 1), ("hogwild", None)])
def test_a_worker_that_comes_back_trains_on(problem, mode, window):
    """A worker that returns trains on, also in modes where workers train separately."""
    model, coordinators = problem.model(), []
    losses = train(
        model,
        problem.x,
        problem.y,
        mode=mode,
        window=window,
        rows=(102, 101),
        batch_size=BATCH,
        epochs=6,
        goes_on=True,
        loop=mortal(deaths={0: 1}, returns=True),
        coordinators=coordinators,
    )

    assert 1 == coordinators[0].counters["lost"]
    assert losses[-1] < losses[0]
