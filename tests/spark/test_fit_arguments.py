"""Arguments of `fit` that set how much is trained and evaluated have their Keras meaning."""

import warnings

import keras
import numpy as np
import pytest

from sparkdl import SparkModel
from sparkdl.errors import ConfigError

pytestmark = pytest.mark.usefixtures("spark")
OPTIONS = {"shuffle": False, "verbose": 0}


def both(problem, data=None, *, callbacks=list, **arguments):
    """Return our History and that of plain Keras, without its warnings about steps without rows."""
    ours, theirs = callbacks(), callbacks()
    history = SparkModel(problem.model(), num_workers=2).fit(
        *(data or (problem.x, problem.y)), callbacks=ours, **OPTIONS | arguments
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = problem.model().fit(problem.x, problem.y, callbacks=theirs, **OPTIONS | arguments)
    return history, expected


def same(expected, history):
    assert set(expected.history) == set(history.history)
    for name, values in expected.history.items():
        assert values == pytest.approx(history.history[name], rel=1e-4), name


@pytest.mark.parametrize(
    "arguments",
    [{"epochs": 0}, {"epochs": 2, "initial_epoch": 2}, {"initial_epoch": 5, "validation_split": 0.5}],
)
def test_a_fit_of_no_epochs_has_an_empty_history(problem, jobs, arguments):
    """A fit of no epochs calls only the train hooks, trains nothing and runs no job."""
    calls, model, before = [], problem.model(), jobs()
    begun = model.get_weights()
    callback = keras.callbacks.LambdaCallback(
        on_train_begin=lambda logs: calls.append("begin"),
        on_train_end=lambda logs: calls.append("end"),
        on_epoch_begin=lambda epoch, logs: calls.append(epoch),
    )

    history = SparkModel(model, num_workers=2).fit(
        problem.x, problem.y, callbacks=[callback], **OPTIONS | arguments
    )
    expected = problem.model().fit(problem.x, problem.y, **OPTIONS | arguments)

    assert (expected.history, expected.epoch) == (history.history, history.epoch) == ({}, [])
    assert ["begin", "end"] == calls
    assert all(map(np.array_equal, begun, model.get_weights()))
    assert before == jobs()


HELD = slice(100, 203)
VALIDATIONS = [
    {"validation_steps": 2, "batch_size": 32},
    {"validation_steps": 1, "batch_size": 32, "validation_batch_size": 7, "epochs": 2},
    pytest.param({"validation_steps": 100, "batch_size": 32}, marks=pytest.mark.whole),
    {"validation_steps": 3},
    {"validation_steps": 3, "steps_per_epoch": 5},
    pytest.param(
        {"validation_steps": 3, "validation_batch_size": 20, "steps_per_epoch": 2}, marks=pytest.mark.whole
    ),
]


@pytest.mark.one_case
@pytest.mark.parametrize("arguments", VALIDATIONS)
@pytest.mark.parametrize("split", [False, True])
def test_validation_steps_evaluate_the_first_batches(problem, arguments, split):
    """Each epoch is validated on the first rows, as in Keras; steps give arrays a batch size."""
    if split:
        arguments = arguments | {"validation_split": 0.4}
    else:
        arguments = arguments | {"validation_data": (problem.x[HELD], problem.y[HELD])}

    history, expected = both(problem, **arguments)

    same(expected, history)


@pytest.mark.whole
def test_validation_steps_of_a_dataframe_evaluate_the_same_rows_in_each_epoch(problem, frames):
    """With learning rate 0 every epoch has the same val_loss, different from that of all rows."""

    def held(**arguments):
        spark_model = SparkModel(problem.model(keras.optimizers.SGD(0.0)), num_workers=2)
        return spark_model.fit(
            frames["array"], epochs=2, validation_split=0.5, seed=3, verbose=0, **arguments
        ).history["val_loss"]

    some, whole = held(validation_steps=1, validation_batch_size=20), held()

    assert some == pytest.approx([some[0]] * 2, rel=1e-6)
    assert some[0] != pytest.approx(whole[0], rel=1e-4)


def test_rows_of_their_own_are_validated_instead_of_a_split(problem):
    """validation_data turns validation_split off, as in Keras: all rows are trained on."""
    held = problem.x[:50], problem.y[:50]

    history, expected = both(problem, batch_size=32, validation_split=0.5, validation_data=held)

    same(expected, history)
    assert history.training["rows"] == 203


def test_weights_of_classes_beside_those_of_rows_are_refused_as_keras_does(problem):
    """Passing both class_weight and sample_weight raises ValueError, as in Keras 3."""
    arguments = {"class_weight": {0: 2.0}, "sample_weight": np.ones(203)}

    for model in (SparkModel(problem.model()), problem.model()):
        with pytest.raises(ValueError, match="class_weight.*sample|sample.*class_weight"):
            model.fit(problem.x, problem.y, **arguments)


def test_a_second_fit_of_a_model_is_refused_while_one_trains_it(problem):
    """A second fit of a model that is training is refused, by any SparkModel; later it trains again."""
    model, said = problem.model(), []

    def fit_again(epoch, logs):
        with pytest.raises(ConfigError) as caught:
            SparkModel(model, num_workers=1).fit(problem.x, problem.y, verbose=0)
        said.append(str(caught.value))

    ours = SparkModel(model, num_workers=2)
    again = keras.callbacks.LambdaCallback(on_epoch_end=fit_again)
    ours.fit(problem.x, problem.y, callbacks=[again], verbose=0)
    ours.fit(problem.x, problem.y, verbose=0)

    assert 1 == len(said)
    assert said[0].startswith('The model "network" is being trained by another fit.')
