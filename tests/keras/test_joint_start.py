"""frequency="auto": the division of a fit, and the settings that it refuses."""

import keras
import pytest

from sparkdl import SparkModel
from sparkdl.api.joint_start import joint_epochs
from sparkdl.errors import ConfigError
from sparkdl.ml.params import TrainingParams


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"mode": "asynchronous"}, 'frequency="auto" needs mode="synchronous".*got mode="asynchronous"'),
        ({"mode": "hogwild"}, 'frequency="auto" needs mode="synchronous".*got mode="hogwild"'),
        ({"merge": "none"}, "merge"),
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
    [(1, 2, 1), (11, 2, 1), (12, 7, 1), (24, 2, 2), (1, 8, 1), (15, 8, 4), (16, 16, 4), (5, 1, 5)],
)
def test_the_start_is_a_share_of_the_epochs(epochs, num_workers, expected):
    """A twelfth of the epochs is joint, from eight workers on a quarter; one worker has no windows."""
    assert expected == joint_epochs(epochs, num_workers)


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
