"""The direction in which a metric gets better, from its name."""

from __future__ import annotations

import re

# Words in the names of metrics of which a smaller or a larger value is better.
SMALLER = {"loss", "error", "mse", "mae", "rmse", "mape", "msle", "perplexity", "divergence", "crossentropy"}
LARGER = {"acc", "accuracy", "auc", "precision", "recall", "f1", "fbeta", "iou", "r2", "score", "similarity"}


def is_better_larger(metric: str) -> bool | None:
    """Return True if a larger value of a metric is better, False if a smaller one is, None if unknown.

    Args:
        metric: the name of the metric, as in the results of an epoch, such as "val_accuracy".
    """
    words = set(re.split(r"_|\d+$", metric)) | {metric.removeprefix("val_")}
    if words & SMALLER:
        return False
    return True if words & LARGER else None
