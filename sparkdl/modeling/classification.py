"""Classes, probabilities and raw predictions from a classifier's outputs, as in Spark's classifiers."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from sparkdl.core.vectors import Array

LEAST = 1e-38  # lower bound of a probability before its logarithm, near the smallest normal float32
Shapes = tuple[int, ...] | dict[str, tuple[int, ...]]  # of a row's prediction; by output if there are several


class OutputKind(NamedTuple):
    """The kind of a model's output.

    Attributes:
        classifies: whether the output predicts classes; otherwise it is returned unchanged.
        logits: whether the output is logits, from which softmax or a sigmoid makes probabilities.
        thresholds: a threshold for each class. The class whose probability divided by its threshold is
            largest is predicted. None: the likeliest class is predicted.
    """

    classifies: bool = False
    logits: bool = False
    thresholds: tuple[float, ...] | None = None


AS_IT_IS = OutputKind()


class ClassPredictions(NamedTuple):
    """The results of a classifier for some rows, all float64.

    Attributes:
        prediction: the index of the likeliest class, after any thresholds; shape (rows,).
        probability: the probabilities; shape (rows, classes).
        raw: logits, up to a constant per row; as in Spark, (-z, z) for outputs of one unit with the
            logit z; shape (rows, classes).
    """

    prediction: Array
    probability: Array
    raw: Array


def classify(
    outputs: Array, *, logits: bool, thresholds: tuple[float, ...] | None = None
) -> ClassPredictions:
    """Return classes, probabilities and raw predictions from a classifier's outputs.

    Args:
        outputs: shape (rows, classes); or (rows, 1) or (rows,), for the second of two classes only.
        logits: whether the outputs are logits instead of probabilities.
        thresholds: as in Spark's classifiers, the class with the largest p / t is predicted, where p is its
            probability and t its threshold. A class with a threshold of 0 is predicted unless its p is 0.
    """
    values = np.asarray(outputs, np.float64)
    values = values.reshape(len(values), 1) if values.ndim == 1 else values
    if values.shape[1] == 1:
        raw = np.concatenate([-_logit(values), _logit(values)] if not logits else [-values, values], axis=1)
        positive = 1 / (1 + np.exp(-values)) if logits else values
        probability = np.concatenate([1 - positive, positive], axis=1)
    elif logits:
        raw = values
        exponents = np.exp(values - values.max(axis=1, keepdims=True))
        probability = exponents / exponents.sum(axis=1, keepdims=True)
    else:
        raw, probability = np.log(np.maximum(values, LEAST)), values
    scores = raw if thresholds is None else _scaled(probability, thresholds)
    return ClassPredictions(scores.argmax(axis=1).astype(np.float64), probability, raw)


def _scaled(probability: Array, thresholds: tuple[float, ...]) -> Array:
    """Return probabilities divided by thresholds. 0 / 0 and NaN become -Inf, which is never the largest."""
    with np.errstate(divide="ignore", invalid="ignore"):
        scaled = probability / np.asarray(thresholds, np.float64)
    return np.where(np.isnan(scaled), -np.inf, scaled)


def _logit(positive: Array) -> Array:
    logit: Array = np.log(np.maximum(positive, LEAST)) - np.log(np.maximum(1 - positive, LEAST))
    return logit
