"""The reason is extracted from real errors of Keras and its backends."""

import keras
import numpy as np
import pytest

from sparkdl.process.reasons import reason_of


class Odd(keras.layers.Layer):
    """A layer that refuses an input of three columns."""

    def call(self, inputs):
        if inputs.shape[-1] == 3:
            raise LookupError("no such picture")
        return inputs


def fit(loss="mse", layer=None, labels=0, columns=2, **options):
    layers = [keras.layers.Dense(3, activation="softmax"), *([layer] if layer else [])]
    model = keras.Sequential([keras.Input((2,)), *layers])
    model.compile("sgd", loss, **options)
    model.fit(np.ones((4, columns)), np.full(4, labels), verbose=0)


def refuse(y_true, y_pred):
    raise LookupError("no such picture")


def table(values):
    return {}[float(values[0, 0])]


def through_numpy(y_true, y_pred):
    import tensorflow as tf

    made = tf.numpy_function(table, [y_pred], tf.float32)
    made.set_shape(())
    return made + tf.reduce_mean(y_pred)


CROSS = "sparse_categorical_crossentropy"
OF_TENSORFLOW = pytest.mark.backend("tensorflow")
FAILURES = {
    "a loss": (lambda: fit(refuse), "LookupError: no such picture", ()),
    "a layer": (lambda: fit(layer=Odd()), "no such picture", ()),
    "a shape": (lambda: fit(columns=5), "incompatible with the layer", ()),
    "a label in a graph": (lambda: fit(CROSS, labels=4), "Received a label value of 4 which", OF_TENSORFLOW),
    "a label without a graph": (
        lambda: fit(CROSS, labels=4, run_eagerly=True),
        "Received a label value of 4 which",
        OF_TENSORFLOW,
    ),
    "Python in a graph": (lambda: fit(through_numpy), "KeyError", OF_TENSORFLOW),
}


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=FAILURES[kind][2]) for kind in FAILURES])
def test_the_reason_is_in_the_line(kind):
    """The reason is one line that begins with the exception's name and has no traceback or graph."""
    run, words, _ = FAILURES[kind]

    with pytest.raises(Exception) as caught:  # noqa: PT011 - each backend has its own
        run()

    reason = reason_of(caught.value)
    assert reason.startswith(f"{type(caught.value).__name__}: ")
    assert words in reason
    assert not any(word in reason for word in ("Traceback", "\n", "Graph execution", "{{", "\x1b"))
