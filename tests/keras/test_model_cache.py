"""The cache of models that a process keeps for later tasks."""

import gc
import weakref

import keras
import numpy as np
import pytest

from sparkdl.data.batch import Batch
from sparkdl.modeling import serialization
from sparkdl.modeling.backends.base import RoundMeans
from sparkdl.worker import model_cache


def spec_of(units, number=0.0):
    """Return the spec of a model with ``units`` outputs and every weight equal to ``value``."""
    model = keras.Sequential(
        [keras.Input((3,), name="in"), keras.layers.Dense(units, name="out")], name="one"
    )
    model.compile("sgd", "mse")
    model.set_weights([np.full_like(weight, number) for weight in model.get_weights()])
    return serialization.freeze(model)[0]


@pytest.mark.parametrize(("most", "others", "kept"), [(1 << 20, 3, True), (1 << 20, 4, False), (0, 1, False)])
def test_a_process_keeps_its_newest_models_compiled(monkeypatch, most, others, kept):
    """A process keeps a few small models compiled, as for cross-validation, but only one large model."""
    monkeypatch.setattr(model_cache, "_kept", {})
    monkeypatch.setattr(model_cache, "KEPT_BYTES", most)
    first = model_cache.take_replica(spec_of(1, 1.0), {}, None, joint=True)
    for units in range(2, 2 + others):
        model_cache.take_replica(spec_of(units), {}, None, joint=True)
    again = model_cache.take_replica(spec_of(1, 2.0), {}, None, joint=True)

    assert kept == (again is first)
    assert again is model_cache.take_replica(spec_of(1, 2.0), {}, None, joint=True)
    assert 2.0 == again.model.get_weights()[0][0, 0]


def test_a_process_holds_no_replica_that_it_does_not_keep(monkeypatch):
    """After many fits of different models, only the replicas that the process keeps are in memory."""
    monkeypatch.setattr(model_cache, "_kept", {})
    rows, made = Batch(np.ones((2, 3)), np.ones((2, 1))), []
    for units in range(1, 9):
        replica = model_cache.take_replica(spec_of(units), {}, None, joint=False)
        replica.step(Batch(rows.x, np.ones((2, units))))
        made += [weakref.ref(replica), weakref.ref(replica.model)]
        del replica
    gc.collect()

    assert 2 * model_cache.KEPT == sum(one() is not None for one in made)


def rated(optimizer, rate):
    """Return the spec of a model with this optimizer and learning rate."""
    model = keras.Sequential([keras.Input((3,), name="in"), keras.layers.Dense(1, name="out")], name="one")
    model.compile(optimizer(rate), "mse")
    return serialization.freeze(model)[0]


@pytest.mark.parametrize("joint", [True, False])
def test_a_compiled_model_serves_every_learning_rate(monkeypatch, joint):
    """Models that differ in the learning rate share compiled functions, and each trains with its own rate."""
    monkeypatch.setattr(model_cache, "_kept", {})
    rows, moved = Batch(np.ones((2, 3)), np.ones((2, 1))), []
    for rate in (0.5, 0.25):
        spec = rated(keras.optimizers.SGD, rate)
        replica = model_cache.take_replica(spec, {}, None, joint=joint)
        before = replica.model.get_weights()
        if joint:
            reading = replica.gradient(rows)
            replica.apply(RoundMeans(reading.vector, reading.statistics))
        else:
            replica.step(rows)
        alone = serialization.thaw(spec, {})
        alone.train_on_batch(rows.x, rows.y)
        moved.append(replica)
        np.testing.assert_allclose(replica.model.get_weights()[0], alone.get_weights()[0], rtol=1e-5)
        assert not np.array_equal(before[0], alone.get_weights()[0])

    assert moved[0] is moved[1]


class Fixed(keras.optimizers.SGD):
    """A custom optimizer, which may use its learning rate as a constant."""


def test_optimizers_of_the_users_own_are_compiled_for_each_rate():
    """Custom optimizers and schedules do not share compiled functions if their rates differ."""
    schedules = [keras.optimizers.schedules.ExponentialDecay(rate, 9, 0.5) for rate in (0.5, 0.25)]

    assert rated(Fixed, 0.5).key != rated(Fixed, 0.25).key
    assert rated(keras.optimizers.SGD, schedules[0]).key != rated(keras.optimizers.SGD, schedules[1]).key
    assert rated(keras.optimizers.SGD, 0.5).key == rated(keras.optimizers.SGD, 0.25).key


@keras.saving.register_keras_serializable("test_model_cache")
class Scaled(keras.layers.Layer):
    """A layer with a setting of the same name as an optimizer's."""

    def __init__(self, learning_rate, **options):
        super().__init__(**options)
        self.rate = learning_rate

    def call(self, inputs):
        return inputs * self.rate

    def get_config(self):
        return super().get_config() | {"learning_rate": self.rate}


def test_only_the_rates_of_optimizers_are_left_out():
    """Models do not share compiled functions if layers differ in a setting named learning_rate."""

    def key(rate):
        layers = [
            keras.Input((3,), name="in"),
            Scaled(rate, name="scaled"),
            keras.layers.Dense(1, name="out"),
        ]
        model = keras.Sequential(layers, name="one")
        model.compile(keras.optimizers.SGD(rate), "mse")
        return serialization.freeze(model)[0].key

    assert key(0.5) != key(0.25)


def test_who_predicts_takes_a_model_that_was_trained(monkeypatch):
    """Prediction reuses the compiled model of training, with the values of each spec."""
    monkeypatch.setattr(model_cache, "_kept", {})
    replica = model_cache.take_replica(spec_of(1, 1.0), {}, None, joint=False)

    assert replica.model is model_cache.take_model(spec_of(1, 3.0), {}, None)
    assert 3.0 == replica.model.get_weights()[0][0, 0]
    assert model_cache.take_model(spec_of(2, 4.0), {}, None) is model_cache.take_model(
        spec_of(2, 4.0), {}, None
    )


@pytest.mark.one_case
@pytest.mark.parametrize("joint", [True, False])
def test_a_large_model_is_freed_before_the_next_is_made(monkeypatch, joint):
    """A large model is freed before the next is made, without waiting for garbage collection."""
    monkeypatch.setattr(model_cache, "_kept", {})
    monkeypatch.setattr(model_cache, "KEPT_BYTES", 0)
    monkeypatch.setattr(model_cache, "LARGE", 0)
    rows, made, alive = Batch(np.ones((2, 3)), np.ones((2, 1))), [], []
    specs = [spec_of(1, 1.0), spec_of(2, 1.0)]
    make_replica = model_cache.make_replica

    def making(*arguments, **options):
        alive.extend(one() is not None for one in made)
        return make_replica(*arguments, **options)

    monkeypatch.setattr(model_cache, "make_replica", making)
    gc.disable()
    try:
        replica = model_cache.take_replica(specs[0], {}, None, joint=joint)
        (replica.gradient if joint else replica.step)(rows)
        made += [weakref.ref(replica), weakref.ref(replica.model)]
        del replica
        model_cache.take_replica(specs[1], {}, None, joint=joint)
    finally:
        gc.enable()

    assert [False, False] == alive
