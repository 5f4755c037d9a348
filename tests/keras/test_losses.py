"""Losses whose parts do not make the whole are named on the driver; a user's own are honoured."""

import keras
import numpy as np
import pytest
from gang import even_split, train
from keras import layers

from sparkdl import losses, models
from sparkdl.errors import ModelError

X = np.random.default_rng(0).normal(size=(60, 4)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


def compiled(*loss, kind=keras.Model, outputs=1, masked=False):
    keras.utils.set_random_seed(2)
    inputs = keras.Input((4,))
    rows = layers.Reshape((4, 1))(inputs)
    rows = layers.Masking()(rows) if masked else rows
    parts = [layers.Dense(1)(rows), layers.Dense(1)(layers.Dense(3, "tanh")(inputs))]
    model = kind(inputs, parts if outputs == 2 else parts[1] if not masked else parts[0])
    model.compile(keras.optimizers.SGD(0.05), list(loss) if outputs == 2 else loss[0])
    return model


def warnings_of(model, caplog):
    caplog.clear()
    y = [X[:2, :, None], Y[:2]] if len(model.outputs) == 2 else Y[:2]
    y = X[:2, :, None] if len(model.outputs[0].shape) == 3 and len(model.outputs) == 1 else y
    losses.check(model, X[:2], y, None, models.build_metrics(model, X[:2], y))
    return " ".join(caplog.messages)


class Centred(keras.losses.Loss):
    """A loss that couples rows: errors count from their mean over the batch."""

    def call(self, y_true, y_pred):
        error = y_true - y_pred
        return keras.ops.square(error - keras.ops.mean(error))


def mean_of_squares(y_true, y_pred):
    """A loss that is one number for all rows."""
    return keras.ops.mean(keras.ops.square(y_true - y_pred))


def sum_of_squares(y_true, y_pred):
    return keras.ops.sum(keras.ops.square(y_true - y_pred))


@keras.saving.register_keras_serializable("tests")
class Doubled(keras.Model):
    """A model that says itself what its loss is."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return 2 * keras.ops.mean(keras.ops.square(y - y_pred)) + keras.ops.mean(keras.ops.abs(y_pred))


def test_what_workers_compute_as_one_process_does_needs_no_word(caplog):
    """Means over rows, one mask, sums, and functions that average are silent."""
    for loss in ("mse", keras.losses.Huber(reduction="sum"), mean_of_squares):
        assert warnings_of(compiled(loss), caplog) == ""
    assert warnings_of(compiled("mse", masked=True), caplog) == ""


def test_what_they_do_not_is_named(caplog):
    """Losses that couple rows or add them up unsaid, denominators that differ, and a model's own loss."""
    assert "Centred: the loss of two rows" in warnings_of(compiled(Centred(name="Centred")), caplog)
    assert "sum_of_squares: the loss of two rows" in warnings_of(compiled(sum_of_squares), caplog)
    assert "Doubled has its own compute_loss" in warnings_of(compiled("mse", kind=Doubled), caplog)
    both = compiled("mse", keras.losses.MeanAbsoluteError(name="mae"), outputs=2, masked=True)
    assert "mse: these losses are divided by" in warnings_of(both, caplog)


def test_a_loss_that_is_not_reduced_is_refused(caplog):
    """There is no gradient to average."""
    with pytest.raises(ModelError, match="The loss 'huber' is not reduced"):
        warnings_of(compiled(keras.losses.Huber(reduction="none", name="huber")), caplog)


@pytest.mark.parametrize("window", [1, None])
def test_a_model_s_own_loss_is_honoured(window):
    """Gradients are those of the user's compute_loss, which here is a mean over rows."""
    model, reference = compiled("mse", kind=Doubled), compiled("mse", kind=Doubled)
    rows = even_split(60, 2 if window == 1 else 1)
    reference.fit(X, Y, 10, 2, shuffle=False, verbose=0)
    train(model, X, Y, rows=rows, batch_size=10, epochs=2, window=window)

    for ours, theirs in zip(model.get_weights(), reference.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)
