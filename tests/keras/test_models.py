"""What is refused of a model, and what comes back of it."""

import keras
import numpy as np
import pytest

from sparkdl import models
from sparkdl.errors import ModelError


def compiled(loss="mse"):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)], name="small")
    model.compile("adam", loss)
    return model


def test_a_model_comes_back_with_its_values_and_its_compile_arguments():
    """Weights, optimizer state, loss and metrics survive the journey."""
    model = compiled()
    model.fit(np.ones((8, 3), np.float32), np.ones((8, 2), np.float32), verbose=0)
    spec, objects = models.freeze(model)
    restored = models.thaw(spec, objects)

    assert type(model.optimizer) is type(restored.optimizer)
    assert "mse" == restored.loss
    for ours, theirs in zip(model.get_weights(), restored.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    for ours, theirs in zip(model.optimizer.variables, restored.optimizer.variables, strict=True):
        np.testing.assert_array_equal(models.read([ours])[0], models.read([theirs])[0])


def test_a_model_that_is_not_compiled_is_refused():
    """There is nothing to train it with."""
    with pytest.raises(ModelError, match="not compiled"):
        models.require_compiled(keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)]))


def test_a_frozen_layers_weights_are_constants():
    """They are neither merged nor averaged; BatchNormalization's statistics are averaged."""
    model = keras.Sequential(
        [
            keras.Input((3,)),
            keras.layers.Dense(4, trainable=False),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(1),
        ]
    )
    model.compile("sgd", "mse")
    layouts = models.Layouts.of(model)

    assert ((4,), (4,), (4, 1), (1,)) == layouts.trainable.shapes
    assert ((4,), (4,)) == layouts.statistics.shapes
    assert 1 == len(layouts.generators.shapes)
