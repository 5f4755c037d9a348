"""The task of a model's output follows from its loss, or from the task argument."""

import keras
import pytest

from sparkdl.errors import ConfigError
from sparkdl.modeling.losses import head_of, labels_are_classes


def compiled(loss):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3, name="out")])
    model.compile("sgd", loss)
    return model


def of_my_own(y, predicted):
    return keras.ops.mean(keras.ops.abs(y - predicted))


LOGITS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


@pytest.mark.parametrize(
    ("loss", "shape", "classifies", "logits"),
    [
        ("sparse_categorical_crossentropy", (3,), True, False),
        (keras.losses.categorical_crossentropy, (3,), True, False),
        (keras.losses.CategoricalFocalCrossentropy(), (3,), True, False),
        ({"out": "sparse_categorical_crossentropy"}, (3,), True, False),
        (LOGITS, (3,), True, True),
        ("binary_crossentropy", (1,), True, False),
        (keras.losses.BinaryCrossentropy(from_logits=True), (1,), True, True),
        ("binary_crossentropy", (3,), False, False),  # three independent labels per row
        ("sparse_categorical_crossentropy", (5, 3), False, False),  # a class for each step of a sequence
        ("sparse_categorical_crossentropy", {"a": (3,), "b": (1,)}, False, False),
        ("crossentropy", (3,), True, False),
        ("ce", (1,), True, False),
        ("mse", (1,), False, False),
        (of_my_own, (1,), False, False),
    ],
)
def test_a_loss_tells_what_the_output_is(loss, shape, classifies, logits):
    """Only a cross-entropy of one vector of classes makes the task classification."""
    head = head_of(compiled(loss), "auto", shape)

    assert classifies == head.classifies
    assert not classifies or logits == head.logits


class OfMyOwn(keras.losses.Loss):
    def call(self, y, predicted):
        return of_my_own(y, predicted)


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        ("binary_crossentropy", True),
        ("ce", True),
        (LOGITS, True),
        (keras.losses.CategoricalHinge(), True),
        ("hinge", True),
        ("mse", False),
        (keras.losses.KLDivergence(), False),
        (keras.losses.poisson, False),
        (of_my_own, None),
        (OfMyOwn(), None),
    ],
)
def test_a_loss_tells_whether_labels_are_classes(loss, expected):
    """Labels are classes for a cross-entropy or a hinge loss; of a loss that is not Keras's it is unknown."""
    assert expected is labels_are_classes(compiled(loss))


def test_what_was_said_counts():
    """The task argument takes precedence over the loss."""
    assert head_of(compiled(of_my_own), "classification", (3,)).classifies
    assert not head_of(compiled("sparse_categorical_crossentropy"), "regression", (3,)).classifies
    with pytest.raises(ConfigError, match=r"one output of shape \(classes,\).*got \(5, 3\)"):
        head_of(compiled(of_my_own), "classification", (5, 3))


def test_thresholds_are_for_as_many_classes():
    """There is one threshold per class, two for a sigmoid, and none for a model that does not classify."""
    classes = compiled("sparse_categorical_crossentropy")

    assert (0.5, 0.2, 0.3) == head_of(classes, "auto", (3,), [0.5, 0.2, 0.3]).thresholds
    assert (0.5, 0.2) == head_of(compiled("binary_crossentropy"), "auto", (1,), [0.5, 0.2]).thresholds
    with pytest.raises(ConfigError, match="a number for each class; got 2 for 3 classes"):
        head_of(classes, "auto", (3,), [0.5, 0.5])
    with pytest.raises(ConfigError, match="a number for each class; got 1 for 2 classes"):
        head_of(compiled("binary_crossentropy"), "auto", (1,), [0.5])
    for task, loss in (("auto", "mse"), ("regression", "sparse_categorical_crossentropy")):
        with pytest.raises(ConfigError, match="thresholds need a model that classifies"):
            head_of(compiled(loss), task, (3,), [0.5, 0.2, 0.3])
