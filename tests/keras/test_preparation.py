"""Arguments of a fit are passed on to its request."""

import inspect
from dataclasses import fields
from types import SimpleNamespace

import keras
import numpy as np
import pytest

from sparkdl import SparkModel
from sparkdl.config import FitConfig, TrainConfig
from sparkdl.data.schema import Sample
from sparkdl.driver.preparation import FitArguments, UserModel, _look_at_rows
from sparkdl.driver.server_setup import spare_slot
from sparkdl.errors import ConfigError
from sparkdl.modeling import keras_variables
from sparkdl.server.state import CarriedState
from sparkdl.sources.base import ArraySource, Source
from sparkdl.sources.resolve import require_partitions, require_partner, require_sendable

DEFAULTS = {
    name: parameter.default
    for name, parameter in inspect.signature(SparkModel.fit).parameters.items()
    if name != "self"
}


def compiled():
    """Return a small compiled model."""
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def test_every_argument_of_fit_goes_into_the_request():
    """``FitArguments`` has the arguments of ``SparkModel.fit``, and every setting of a fit is one of them."""
    arguments = [each.name for each in fields(FitArguments)]

    assert list(DEFAULTS) == arguments
    assert {each.name for each in fields(FitConfig)} <= set(arguments)
    assert FitConfig() == FitArguments(**DEFAULTS).settings(None)


@pytest.mark.parametrize(("batch_size", "rows"), [(None, 32), (5, 5)])
def test_settings_are_those_of_the_arguments(batch_size, rows):
    """An unknown batch size becomes Keras's default."""
    arguments = FitArguments(**DEFAULTS | {"epochs": 3, "seed": 1, "batch_size": 7})

    assert FitConfig(batch_size=rows, epochs=3, seed=1) == arguments.settings(batch_size)


@pytest.mark.parametrize("kind", [tuple, list])
def test_validation_data_of_four_parts_is_refused(kind):
    """Validation data is x, y and sample weights at most."""
    arguments = FitArguments(**DEFAULTS | {"validation_data": kind(([[1.0, 2.0]], [1.0], [1.0], [1.0]))})
    received = f"got a {kind.__name__} of length 4"

    with pytest.raises(ConfigError, match=rf"validation_data should be \(x, y\).*{received}"):
        arguments.validation_rows(compiled())
    assert FitArguments(**DEFAULTS).validation_rows(compiled()) is None


def test_state_is_carried_on_only_to_the_same_model_and_number_of_workers():
    """State is carried over to the next fit only for the unchanged model and the same number of workers."""
    model, state = compiled(), CarriedState({}, None)
    user = UserModel(
        model=model,
        builder=None,
        custom_objects={},
        config=TrainConfig(),
        carried=(2, keras_variables.fingerprint(model), state),
    )

    assert state is user.carried_state(2)
    assert user.carried_state(3) is None
    model.layers[0].set_weights([weight + 1 for weight in model.layers[0].get_weights()])
    assert user.carried_state(2) is None


class Table(Source):
    """Rows of a kind that no other module of the package knows."""

    kind = partners = "a table"

    def peek(self):
        """Return the first row."""
        return Sample.of((np.ones(2), np.ones(1)), (1, 1))

    def training(self, cluster, num_workers, *, seed, validation, split):
        """Return nothing: no test trains on the rows."""

    def evaluation(self, cluster, stages):
        """Return nothing: no test evaluates the rows."""


def test_a_new_kind_of_rows_needs_no_other_module():
    """The checks before a fit take a subclass of Source that they do not know, and name it in errors."""
    table, model = Table(), compiled()
    arrays = ArraySource(Sample.of((np.ones((4, 2)), np.ones((4, 1))), (1, 1)))
    user = UserModel(model=model, builder=None, custom_objects={}, config=TrainConfig())

    with pytest.raises(ConfigError, match=r"be a table if the training rows are a table; got arrays\."):
        require_partner(table, arrays)
    with pytest.raises(ConfigError, match=r"needs an RDD or a DataFrame; got a table\."):
        require_partitions(table, None)
    with pytest.raises(ConfigError, match=r"rows should be a DataFrame; got a table\."):
        require_sendable(table, SimpleNamespace(remote=True))
    assert table.rows_to_serve(None, 32) is None
    columns = _look_at_rows(user, FitConfig(), table, table, 1).schema.columns
    assert [(2,), (1,)] == [column.shape for column in columns]


@pytest.mark.parametrize(
    ("slots", "places_rows", "remedy"),
    [
        (3, True, "Set num_workers=2,"),
        (1, True, "Give the application more slots,"),
        (3, False, "Use a newer Spark,"),
    ],
)
def test_callbacks_need_a_slot_beside_a_coordinator_in_worker_0(slots, places_rows, remedy):
    """The remedy for a missing slot is one that the application allows."""
    cluster = SimpleNamespace(
        remote=True,
        dynamic=False,
        places_rows=places_rows,
        slots=lambda: slots,
        session=SimpleNamespace(version="4.3.0"),
    )
    with pytest.raises(ConfigError, match=f"got .*{slots} slot.* {remedy} or leave"):
        spare_slot(TrainConfig(placement="worker"), cluster, slots, [keras.callbacks.Callback()])
