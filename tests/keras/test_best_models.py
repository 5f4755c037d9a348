"""The best models of a search, which are kept in memory or in a folder."""

import keras
import numpy as np
import optuna
import pytest

from sparkdl.errors import ModelError
from sparkdl.tune.best_models import BestModels

X = np.random.default_rng(0).normal(size=(8, 3)).astype("float32")
FACTOR = 3.0


class Scale(keras.layers.Layer):
    """A layer that is not registered with Keras, with a setting that its configuration lacks."""

    def __init__(self, **options):
        super().__init__(**options)
        self.factor = 1.0

    def call(self, x):
        return self.factor * x


def squared(y, predicted):
    return keras.ops.mean(keras.ops.square(y - predicted), axis=-1)


def scaled():
    layer = Scale()
    layer.factor = 5.0
    return [layer]


KINDS = {
    "plain": list,
    "custom layer": scaled,
    "lambda": lambda: [keras.layers.Lambda(lambda x: FACTOR * x)],
    "normalization": lambda: [keras.layers.Normalization(mean=1.0, variance=4.0)],
    "dropout": lambda: [keras.layers.Dropout(0.5)],
}


def trained(more):
    model = keras.Sequential([keras.Input((3,)), *more(), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.1), squared, metrics=["mae"])
    model.fit(X, X[:, :1], epochs=1, verbose=0)
    return model


def models_of(study, directory, **options):
    return BestModels(1, directory, study, **options)


def kept(model, study, directory):
    """Return the object that keeps the model of a trial of the study."""
    best, trial = models_of(study, directory), study.ask()
    best.add(trial, 1.0, model)
    study.tell(trial, 1.0)
    return best


@pytest.mark.parametrize("more", KINDS.values(), ids=KINDS)
def test_a_model_in_a_folder_is_that_of_the_trial(tmp_path, more):
    """The best model works the same with a folder as without, whatever code it needs, and trains the same."""
    model = trained(more)
    (found,) = kept(model, optuna.create_study(), str(tmp_path)).get(1)

    assert found is not model
    np.testing.assert_array_equal(model(X), found(X))
    assert model.evaluate(X, X[:, :1], verbose=0) == found.evaluate(X, X[:, :1], verbose=0)
    for mine, its in zip(model.optimizer.variables, found.optimizer.variables, strict=True):
        np.testing.assert_array_equal(mine, its)


def test_a_model_of_an_earlier_process_may_need_its_code(tmp_path):
    """A later search that lacks the code of a model says so, and loads it with custom_objects."""
    study = optuna.create_study(study_name="a")
    (found,) = kept(trained(scaled), study, str(tmp_path)).get(1)
    with pytest.raises(ModelError, match=r'The model may need code. Search with settings={"custom_objects"'):
        models_of(study, str(tmp_path)).get(1)

    objects = {"Scale": Scale, "squared": squared}
    (again,) = models_of(study, str(tmp_path), custom_objects=objects).get(1)
    np.testing.assert_array_equal(found.get_weights()[0], again.get_weights()[0])
