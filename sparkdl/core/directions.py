"""The direction in which a metric gets better, from its name.

A wrong guess would make a search keep the worst model, without an error. So only names whose end is a known
metric have a direction.
"""

from __future__ import annotations

import re

# The last words of the names of metrics of which a smaller or a larger value is better.
SMALLER = {
    *("loss", "error", "mse", "mae", "rmse", "mape", "smape", "msle", "rmsle", "error_rate", "deviance"),
    *("crossentropy", "cross_entropy", "logloss", "nll", "log_cosh", "logcosh", "hinge", "poisson"),
    *("negative_log_likelihood", "neg_log_likelihood", "perplexity", "ppl", "divergence", "distance"),
    *("brier", "brier_score", "ece", "wer", "cer", "fid"),
    *("false_positives", "false_negatives", "false_positive_rate", "false_negative_rate", "fpr", "fnr"),
}
LARGER = {
    *("acc", "accuracy", "auc", "precision", "recall", "sensitivity", "specificity", "f1", "fbeta", "iou"),
    *("io_u", "jaccard", "dice_coef", "dice_coefficient", "dice_score", "r2", "similarity", "correlation"),
    *("kappa", "mcc", "ndcg", "mrr", "bleu", "rouge", "psnr", "ssim", "likelihood", "elbo"),
    *("true_positives", "true_negatives", "true_positive_rate", "true_negative_rate", "tpr", "tnr"),
}
NEGATIONS = {"neg", "negative", "negated", "minus", "inv", "inverse", "inverted"}


def is_better_larger(metric: str) -> bool | None:
    """Return True if a larger value of a metric is better, False if a smaller one is, None if unknown.

    The words before the metric, such as the name of an output, do not count, except for a negation: whether
    ``neg_accuracy`` is the negative accuracy or the accuracy of the output ``neg`` is unknown.

    Args:
        metric: the name of the metric, as in the results of an epoch, such as "val_accuracy".
    """
    words = [word for word in re.split(r"[^a-z0-9]+", metric.lower().removeprefix("val_")) if word]
    while words and words[-1].isdigit():  # "auc_1" is the second metric of this kind
        words.pop()
    if "at" in words[1:]:  # "recall_at_precision"
        words = words[: len(words) - 1 - words[::-1].index("at")]
    for count in range(len(words), 0, -1):
        name = "_".join(words[-count:])
        if name in SMALLER | LARGER:
            return None if NEGATIONS.intersection(words[:-count]) else name in LARGER
    if words[-1:] == ["score"]:  # "f1_score"; of other metrics it does not tell the direction
        return is_better_larger("_".join(words[:-1])) or None
    shorter = words[-1].rstrip("0123456789") if words else ""
    return is_better_larger("_".join([*words[:-1], shorter])) if words and shorter != words[-1] else None
