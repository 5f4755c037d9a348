"""A fit with TLS gives the result of a fit without it."""

import logging
import socket
import ssl

import keras
import numpy as np
import pytest

import sparkdl
from sparkdl import Network, SparkModel

MASTERS = ("local-cluster", "standalone")


class Peek(keras.callbacks.Callback):
    """A callback that keeps the certificates that the endpoint presents."""

    def __init__(self, port):
        super().__init__()
        self.port, self.seen = port, []

    def on_epoch_end(self, epoch, logs=None):
        self.seen.append(ssl.get_server_certificate(("127.0.0.1", self.port), timeout=20))


@pytest.fixture
def port():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


@pytest.mark.whole
@pytest.mark.parametrize("frequency", ["batch", pytest.param("epoch", marks=pytest.mark.whole)])
def test_a_fit_gives_the_same_answer(spark, problem, port, frequency):
    """Weights and history with TLS are identical bit for bit; one certificate serves the whole fit."""
    settings = {"epochs": 2, "batch_size": 16, "shuffle": False, "verbose": 0}
    encrypted, plain = problem.model(), problem.model()
    peek = Peek(port)
    ours = SparkModel(encrypted, num_workers=2, frequency=frequency, network=Network(port=port, tls=True))
    theirs = SparkModel(plain, num_workers=2, frequency=frequency)

    history = ours.fit(problem.x, problem.y, callbacks=[peek], **settings)

    assert history.history == theirs.fit(problem.x, problem.y, **settings).history
    for mine, other in zip(encrypted.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_array_equal(other, mine)
    assert 2 == len(peek.seen)
    assert 1 == len(set(peek.seen))


@pytest.mark.whole
def test_asynchronous_workers_learn(spark, problem, caplog):
    """Asynchronous workers learn with encrypted updates and heartbeats, which the driver logs."""
    spark_model = SparkModel(problem.model(), mode="asynchronous", num_workers=2, network=Network(tls=True))

    with caplog.at_level(logging.INFO, "sparkdl"):
        history = spark_model.fit(problem.x, problem.y, epochs=3, verbose=0)

    assert history.history["loss"][-1] < history.history["loss"][0]
    assert 1 == "\n".join(caplog.messages).count("Workers and the endpoint use TLS 1.3.")


def test_a_function_of_the_users_own_runs(spark):
    """A function run with TLS all-reduces the same sums."""
    assert [1.0, 1.0] == sparkdl.run(
        lambda worker: worker.all_reduce(worker.rank, "sum"), 2, network=Network(tls=True)
    )
