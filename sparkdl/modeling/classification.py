"""What a classifier's outputs say: probabilities, raw predictions and classes, as Spark's classifiers do."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from sparkdl.core.vectors import Array

LEAST = 1e-38  # below which float32 has no probability whose logarithm is a number


class OutputKind(NamedTuple):
    """What an output is.

    Attributes:
        classifies: whether it tells classes apart; else it is taken as it is.
        logits: whether it is logits, which softmax or a sigmoid makes probabilities of.
        thresholds: a number for each class, by which its probability is divided before the class is chosen.
    """

    classifies: bool = False
    logits: bool = False
    thresholds: tuple[float, ...] | None = None


AS_IT_IS = OutputKind()


class Classes(NamedTuple):
    """What a classifier says of some rows, all of it float64.

    Attributes:
        prediction: the index of the likeliest class, by the thresholds if there are any, shape (rows,).
        probability: shape (rows, classes).
        raw: logits, up to a number per row, shape (rows, classes).
    """

    prediction: Array
    probability: Array
    raw: Array


def classify(outputs: Array, *, logits: bool, thresholds: tuple[float, ...] | None = None) -> Classes:
    """Return what a classifier's outputs say.

    Args:
        outputs: shape (rows, classes), or (rows, 1) or (rows,) for the second of two classes alone.
        logits: whether these are logits, not probabilities.
        thresholds: as in Spark's classifiers, the class with the largest p / t is predicted, where p is its
            probability and t its threshold; with a threshold of 0, it is predicted unless p is 0.
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
    return Classes(scores.argmax(axis=1).astype(np.float64), probability, raw)


def _scaled(probability: Array, thresholds: tuple[float, ...]) -> Array:
    """Return probabilities divided by thresholds; 0 / 0, and what is not a number, is never the largest."""
    with np.errstate(divide="ignore", invalid="ignore"):
        scaled = probability / np.asarray(thresholds, np.float64)
    return np.where(np.isnan(scaled), -np.inf, scaled)


def _logit(positive: Array) -> Array:
    logit: Array = np.log(np.maximum(positive, LEAST)) - np.log(np.maximum(1 - positive, LEAST))
    return logit
