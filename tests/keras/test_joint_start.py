"""frequency="auto": the division of a fit, and the settings that it refuses."""

from types import SimpleNamespace

import keras
import pytest

from sparkdl import SparkModel
from sparkdl.api.joint_start import joint_epochs, note_cheap_exchanges, window_batch_size, windows_of
from sparkdl.config import FitConfig, TrainConfig
from sparkdl.errors import ConfigError
from sparkdl.ml.params import TrainingParams


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"mode": "asynchronous"}, 'frequency="auto" needs mode="synchronous".*got mode="asynchronous"'),
        ({"mode": "hogwild"}, 'frequency="auto" needs mode="synchronous".*got mode="hogwild"'),
        ({"merge": "none"}, "merge"),
        ({"batch_size_per_worker": 8}, 'frequency="auto" needs batch_size.*got batch_size_per_worker=8'),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings, said):
    """Settings that do not go with frequency="auto" are refused when the SparkModel is created."""
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(ConfigError, match=said):
        SparkModel(model, frequency="auto", **settings)


@pytest.mark.parametrize(
    ("epochs", "num_workers", "expected"),
    [
        (1, 2, 1),
        (11, 2, 1),
        (12, 7, 1),
        (24, 2, 2),
        (1, 8, 1),
        (15, 8, 2),
        (16, 16, 2),
        (17, 16, 3),
        (5, 1, 5),
    ],
)
def test_the_start_is_a_share_of_the_epochs(epochs, num_workers, expected):
    """A twelfth of the epochs is joint, from eight workers on an eighth; one worker has no windows."""
    assert expected == joint_epochs(epochs, num_workers)


@pytest.mark.parametrize(
    ("batch_size", "num_workers", "expected"),
    [(64, 7, 64), (64, 8, 32), (64, 12, 21), (64, 16, 16), (64, 100, 16), (1, 8, 1), (3, 16, 1)],
)
def test_many_workers_take_smaller_batches_after_the_start(batch_size, num_workers, expected):
    """From eight workers on a batch of a window is smaller, but has at least a quarter of the rows."""
    assert expected == window_batch_size(batch_size, num_workers)


@pytest.mark.parametrize(
    ("frequency", "epochs", "num_workers", "merge"),
    [("auto", 12, 2, "diloco"), ("auto", 1, 2, None), ("auto", 12, 1, None), ("epoch", 12, 2, None)],
)
def test_windows_follow_if_there_are_epochs_for_them(frequency, epochs, num_workers, merge):
    """A fit of one epoch or one worker has no windows, so no rule is logged as that of the fit."""
    request = SimpleNamespace(
        config=TrainConfig(frequency=frequency), fit=FitConfig(epochs=epochs), num_workers=num_workers
    )
    windows = windows_of(request)

    assert merge == (windows and windows.merge)


def test_it_is_a_value_of_the_param():
    """A stage of a pipeline takes frequency="auto" too."""
    assert "auto" == TrainingParams(frequency="auto").getOrDefault("frequency")


def test_a_spark_model_shows_both_rules():
    """The settings that a SparkModel shows name the rule of each part."""
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")

    assert "merge: mean of gradients, then average" in repr(
        SparkModel(model, frequency="auto", merge="average")
    )


@pytest.mark.parametrize(
    ("times", "noted"),
    [
        ([[1.0, 18.0, 0.5, 0.5, 0.0], [], [2.0, 17.0, 0.5, 0.0, 0.4]], True),
        ([[0.0, 5.0, 1.0, 3.0, 1.0]], False),
        ([[0.0, 0.0, 1.0, 0.0, 0.0], [0.0, 9.5, 0.0, 0.0, 0.0]], True),
        ([[], []], False),
        ([], False),
    ],
)
def test_a_fit_whose_exchanges_are_cheap_names_the_alternative(caplog, times, noted):
    """At the switch a fit says if exchanges took less than a tenth of the workers' time."""
    caplog.set_level("INFO", "sparkdl")
    note_cheap_exchanges(times)

    assert noted == ('With frequency="batch" the fit would take hardly longer' in caplog.text)
