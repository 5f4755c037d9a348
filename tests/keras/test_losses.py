"""Warnings for losses that are not a mean over rows, and training with a custom compute_loss."""

import keras
import numpy as np
import pytest
from keras import layers
from worker_threads import even_split, train

from sparkdl.core.tree import leaves
from sparkdl.errors import ModelError
from sparkdl.modeling import keras_metrics, keras_variables, losses

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
    losses.check(model, X[:2], y, None, keras_metrics.build_metrics(model, X[:2], y))
    return " ".join(caplog.messages)


class Centred(keras.losses.Loss):
    """A loss that couples rows: errors are relative to their mean over the batch."""

    def call(self, y_true, y_pred):
        error = y_true - y_pred
        return keras.ops.square(error - keras.ops.mean(error))


def mean_of_squares(y_true, y_pred):
    """Return one loss for all rows."""
    return keras.ops.mean(keras.ops.square(y_true - y_pred))


def sum_of_squares(y_true, y_pred):
    return keras.ops.sum(keras.ops.square(y_true - y_pred))


@keras.saving.register_keras_serializable("tests")
class Doubled(keras.Model):
    """A model with a custom compute_loss."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return 2 * keras.ops.mean(keras.ops.square(y - y_pred)) + keras.ops.mean(keras.ops.abs(y_pred))


def test_what_workers_compute_as_one_process_does_needs_no_word(caplog):
    """Means over rows, a single mask, sums, and functions that average cause no warning."""
    for loss in ("mse", keras.losses.Huber(reduction="sum"), mean_of_squares):
        assert warnings_of(compiled(loss), caplog) == ""
    assert warnings_of(compiled("mse", masked=True), caplog) == ""


def test_what_they_do_not_is_named(caplog):
    """Coupled or summed rows, different divisors and a custom compute_loss each cause a warning."""
    assert "Centred: the loss of a batch" in warnings_of(compiled(Centred(name="Centred")), caplog)
    assert "sum_of_squares: the loss of a batch" in warnings_of(compiled(sum_of_squares), caplog)
    assert "Doubled has its own compute_loss" in warnings_of(compiled("mse", kind=Doubled), caplog)
    both = compiled("mse", keras.losses.MeanAbsoluteError(name="mae"), outputs=2, masked=True)
    assert "mse: these losses are divided by" in warnings_of(both, caplog)


ALONE = [keras.losses.Dice(), keras.losses.Tversky(), "dice"]


@pytest.mark.parametrize("loss", ALONE, ids=lambda loss: getattr(loss, "name", loss))
def test_losses_of_keras_that_couple_rows_are_named(loss, caplog):
    """Keras's losses that are ratios of sums over the batch cause a warning."""
    assert "the loss of a batch is not the mean of the losses of its rows" in warnings_of(
        compiled(loss), caplog
    )


@pytest.mark.skipif(not hasattr(keras.losses, "Circle"), reason="this Keras has no Circle loss")
@pytest.mark.parametrize("label", [0, 3])
def test_a_loss_that_compares_rows_is_named(label, caplog):
    """Keras's Circle, which compares rows of several classes, causes a warning."""
    model = keras.Sequential([keras.Input((4,)), layers.Dense(3)])
    model.compile("sgd", keras.losses.Circle())

    assert "circle: the loss of a batch is not" in judged(model, X, np.array([label]), caplog)


@pytest.mark.parametrize("label", [0, 1, 2])
@pytest.mark.parametrize("dtype", ["int64", "float64"])
def test_a_loss_of_classes_is_checked_with_classes_that_it_has(label, dtype, caplog):
    """The check of a loss passes no label outside the classes, also if labels are Spark's doubles."""
    seen = []

    class Seeing(keras.losses.SparseCategoricalCrossentropy):
        def __call__(self, y_true, y_pred, sample_weight=None):
            seen.append(keras.ops.convert_to_numpy(y_true))
            return super().__call__(y_true, y_pred, sample_weight)

    model = keras.Sequential([keras.Input((4,)), layers.Dense(3, activation="softmax")])
    model.compile("sgd", Seeing())

    assert "" == judged(model, X, np.array([label], dtype), caplog)
    assert set(np.concatenate([each.ravel() for each in seen]).tolist()) <= {0, 1, 2}


BY_ROWS = [
    "mae",
    "mape",
    "msle",
    "log_cosh",
    "huber",
    "poisson",
    "binary_crossentropy",
    "hinge",
    keras.losses.CosineSimilarity(),
    keras.losses.BinaryFocalCrossentropy(),
    keras.losses.KLDivergence(),
]


def test_losses_of_keras_by_row_need_no_word(caplog):
    """Keras's losses by row cause no warning, whatever labels and predictions the check tries."""
    assert {str(loss): "" for loss in BY_ROWS} == {
        str(loss): warnings_of(compiled(loss), caplog) for loss in BY_ROWS
    }


def judged(model, x, y, caplog):
    """Return the warnings of a model over its first row."""
    caplog.clear()
    losses.check(model, x[:1], y, None, keras_metrics.build_metrics(model, x[:1], y))
    return " ".join(caplog.messages)


@pytest.mark.parametrize("loss", ["poisson", "squared_hinge", mean_of_squares])
def test_labels_may_lack_the_last_dimension(loss, caplog):
    """Labels without a last dimension cause no warning: Keras adds it before it computes a loss."""
    assert judged(compiled(loss), X, Y[:1, 0], caplog) == ""


def test_entries_that_do_not_count_are_no_coupling(caplog):
    """Masks and ignored classes do not count as coupling: workers weigh by the remaining entries."""
    tokens = np.array([[3, 2, 0, 0]], "int32")
    parts = [
        keras.Input((4,), dtype="int32"),
        layers.Embedding(5, 3, mask_zero=True),
        layers.SimpleRNN(3, return_sequences=True),
    ]
    masked = keras.Sequential([*parts, layers.Dense(5, "softmax")])
    masked.compile("sgd", keras.losses.SparseCategoricalCrossentropy())
    ignoring = keras.Sequential([keras.Input((4,)), layers.Dense(5, "softmax")])
    ignoring.compile("sgd", keras.losses.SparseCategoricalCrossentropy(ignore_class=0))

    assert judged(masked, tokens, tokens, caplog) == ""
    assert judged(ignoring, X, np.array([3]), caplog) == ""


def test_labels_go_with_the_outputs_of_their_names(caplog):
    """A dict of labels in another order than a list of outputs is matched by name."""
    inputs = keras.Input((4,))
    outputs = [layers.Dense(3, "softmax", name="z")(inputs), layers.Dense(1, name="a")(inputs)]
    model = keras.Model(inputs, outputs)
    model.compile("sgd", {"a": "mse", "z": "categorical_crossentropy"})
    y = {"a": Y[:1], "z": np.eye(3, dtype="float32")[:1]}
    try:
        model.compute_loss(x=X[:1], y=y, y_pred=model(X[:1]))
    except (SyntaxWarning, ValueError):
        if tuple(map(int, keras.__version__.split(".")[:2])) >= (3, 15):
            raise
        pytest.skip("plain Keras before 3.15 refuses this model, or swaps the labels of its outputs")

    assert judged(model, X, y, caplog) == ""
    assert [("mean_squared_error", (1, 1)), ("categorical_crossentropy", (1, 3))] == sorted(
        ((name, samples[0][0].shape) for name, _, samples in losses._losses(model, y, model(X[:1]))),
        reverse=True,
    )


@pytest.mark.parametrize("mean", [True, False])
def test_what_layers_add_to_the_loss_is_a_mean_or_named(mean, caplog):
    """A layer that adds a sum over rows to the loss causes a warning; a mean does not."""

    class Added(layers.Layer):
        def call(self, inputs):
            over_rows = keras.ops.mean if mean else keras.ops.sum
            self.add_loss(over_rows(keras.ops.square(inputs)))
            if not mean:
                self.add_loss(keras.ops.sum(keras.ops.square(inputs), axis=-1))  # one for each row
            return inputs

    inputs = keras.Input((4,))
    model = keras.Model(inputs, layers.Dense(1, kernel_regularizer="l2")(Added(name="added")(inputs)))
    model.compile("sgd", "mse")

    assert ("added: these layers add a term to the loss" in warnings_of(model, caplog)) is not mean


def test_an_activity_regularizer_that_compares_rows_is_named(caplog):
    """An activity regularizer that compares rows is checked on two rows and causes a warning."""
    inputs = keras.Input((4,))
    hidden = layers.Dense(3, activity_regularizer=keras.regularizers.OrthogonalRegularizer(), name="hidden")
    model = keras.Model(inputs, layers.Dense(1)(hidden(inputs)))
    model.compile("sgd", "mse")

    assert "hidden: these layers add a term to the loss" in judged(model, X, Y[:1], caplog)


def test_a_loss_that_is_not_reduced_is_refused(caplog):
    """A loss without a reduction is refused: there is no gradient to average."""
    with pytest.raises(ModelError, match="The loss 'huber' has no reduction"):
        warnings_of(compiled(keras.losses.Huber(reduction="none", name="huber")), caplog)


@pytest.mark.parametrize("window", [1, None])
def test_a_model_s_own_loss_is_honoured(window):
    """Workers compute gradients of the user's compute_loss, here a mean over rows."""
    model, reference = compiled("mse", kind=Doubled), compiled("mse", kind=Doubled)
    rows = even_split(60, 2 if window == 1 else 1)
    reference.fit(X, Y, 10, 2, shuffle=False, verbose=0)
    train(model, X, Y, rows=rows, batch_size=10, epochs=2, window=window)

    for ours, theirs in zip(model.get_weights(), reference.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)


SUM = keras.losses.MeanSquaredError(reduction="sum")


@pytest.mark.parametrize(
    "given", [{"b": "mae", "a": SUM}, ["mae", SUM], {"b": SUM, "a": "mae"}, ["mse", "mae"]]
)
def test_losses_of_several_outputs_are_found(given):
    """The losses of several outputs are found in any structure, also if TensorFlow wraps it."""
    inputs = keras.Input((4,))
    outputs = {name: layers.Dense(1, name=name)(inputs) for name in ("a", "b")}
    model = keras.Model(inputs, outputs if isinstance(given, dict) else list(outputs.values()))
    model.compile("sgd", given)

    expected = [given["a"], given["b"]] if isinstance(given, dict) else given
    assert expected == leaves(model.loss)


class Teacher(keras.Model):
    """A model whose step moves a second layer towards the first, as mean teachers do."""

    def __init__(self):
        super().__init__()
        self.student, self.teacher = keras.layers.Dense(1), keras.layers.Dense(1)

    def call(self, x):
        return self.student(x) + 0.0 * self.teacher(x)

    def train_step(self, data):
        logs = super().train_step(data)
        for theirs, ours in zip(self.teacher.weights, self.student.weights, strict=True):
            theirs.assign(0.5 * theirs + 0.5 * ours)
        return logs


@pytest.mark.backend("tensorflow")
@pytest.mark.parametrize("frozen", [True, False])
def test_a_step_must_not_change_weights_of_frozen_layers(frozen):
    """Weights of frozen layers never leave a worker; weights that are not trained are merged."""
    model = Teacher()
    x, y = np.ones((2, 3), "float32"), np.ones((2, 1), "float32")
    model(x)
    if frozen:
        model.teacher.trainable = False
    for variable in () if frozen else model.teacher.variables:
        variable.trainable = False
    model.compile("sgd", "mse")
    model.compute_metrics(x, y, y)
    if frozen:
        with pytest.raises(ModelError, match=r"train_step .* should not change weights of frozen layers"):
            losses.logged(model, ["train_step"], (x, y, None), lambda: model)
    else:
        assert {} == losses.logged(model, ["train_step"], (x, y, None), lambda: model)
        assert 2 == len(keras_variables.statistics(model))
