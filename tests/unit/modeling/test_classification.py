"""Classes, probabilities and raw predictions are the same from logits and from probabilities."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from sparkdl.modeling.classification import classify

LOGITS = arrays.arrays("float64", (5, 3), elements=st.floats(-30, 30))


def softmax(logits):
    exponents = np.exp(logits)
    return exponents / exponents.sum(axis=1, keepdims=True)


@given(LOGITS)
def test_logits_and_their_softmax_say_the_same(logits):
    """Logits and their softmax give equal probabilities; raw predictions differ by a constant per row."""
    ours, theirs = classify(logits, logits=True), classify(softmax(logits), logits=False)

    np.testing.assert_allclose(softmax(logits), ours.probability, atol=1e-12)
    np.testing.assert_allclose(ours.probability, theirs.probability, atol=1e-12)
    apart = ours.raw - theirs.raw
    np.testing.assert_allclose(apart - apart[:, :1], np.zeros_like(apart), atol=1e-8)


@given(LOGITS)
def test_the_prediction_is_the_likeliest_class(logits):
    """The predicted class has the highest probability and raw prediction, and probabilities add up to 1."""
    found = classify(logits, logits=True)

    np.testing.assert_array_equal(logits.argmax(axis=1), found.prediction)
    np.testing.assert_allclose(found.probability.sum(axis=1), np.ones(5))
    assert {np.dtype("float64")} == {part.dtype for part in found}


@pytest.mark.parametrize("shape", [(4, 1), (4,)])
def test_one_unit_tells_two_classes_apart(shape):
    """A sigmoid gives two probabilities; as in Keras, exactly 0.5 is the first class."""
    positive = np.array([0.0, 0.5, 0.9, 1.0], "float32").reshape(shape)

    found = classify(positive, logits=False)

    assert [0, 0, 1, 1] == found.prediction.tolist()
    np.testing.assert_allclose(positive.reshape(-1), found.probability[:, 1])
    np.testing.assert_allclose(np.log(9), found.raw[2, 1], rtol=1e-6)
    assert np.isfinite(found.raw).all()


@given(arrays.arrays("float64", (5, 1), elements=st.floats(-30, 30)))
def test_one_unit_of_logits_is_a_sigmoid(logits):
    """A logit z gives the raw predictions -z and z, as Spark's logistic regression does."""
    found = classify(logits, logits=True)

    np.testing.assert_allclose(1 / (1 + np.exp(-logits[:, 0])), found.probability[:, 1])
    np.testing.assert_array_equal(np.concatenate([-logits, logits], axis=1), found.raw)


def test_no_rows_have_no_classes():
    """An empty batch of Arrow columns has empty predictions of the right shape."""
    found = classify(np.empty((0, 3), "float32"), logits=False)

    assert [(0,), (0, 3), (0, 3)] == [part.shape for part in found]


def spark_s_class(probability, thresholds):
    """Return the class chosen by Spark's ProbabilisticClassificationModel.probability2prediction."""
    chosen, largest = 0, -np.inf
    for index, (p, t) in enumerate(zip(probability, thresholds, strict=True)):
        scaled = p / t if t else np.inf if p else np.nan
        if scaled > largest:
            chosen, largest = index, scaled
    return chosen


CHANCES = st.lists(st.sampled_from([0.0, 0.1, 0.25, 0.5, 1.0]), min_size=3, max_size=3)


THRESHOLDS = st.lists(st.sampled_from([0.1, 0.5, 1, 2]), min_size=3, max_size=3)


@given(st.lists(CHANCES, min_size=1, max_size=5), THRESHOLDS, st.sampled_from([None, 0, 2]))
def test_thresholds_choose_the_class_that_spark_would(probabilities, thresholds, zero):
    """The largest p / t wins, a threshold of 0 wins unless its class is impossible, ties go to the first."""
    if zero is not None:
        thresholds[zero] = 0.0

    found = classify(np.array(probabilities), logits=False, thresholds=tuple(thresholds))

    assert [spark_s_class(row, thresholds) for row in probabilities] == found.prediction.tolist()
    np.testing.assert_array_equal(probabilities, found.probability)


@pytest.mark.parametrize("logits", [False, True])
def test_thresholds_of_a_sigmoid_are_those_of_two_classes(logits):
    """One sigmoid unit has two classes with a threshold each."""
    chances = np.array([[0.3], [0.5], [0.8]])
    outputs = np.log(chances / (1 - chances)) if logits else chances

    assert [1, 1, 1] == classify(outputs, logits=logits, thresholds=(0.8, 0.2)).prediction.tolist()
    assert [0, 0, 1] == classify(outputs, logits=logits, thresholds=(0.4, 0.6)).prediction.tolist()
