"""The direction of a metric follows from the end of its name, or is unknown."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkdl.core.directions import LARGER, SMALLER, is_better_larger

SMALL = [
    "loss",
    "mae",
    "mean_squared_error",
    "root_mean_squared_error",
    "binary_crossentropy",
    "kl_divergence",
]
SMALL += ["brier_score", "squared_hinge", "false_negatives", "logcosh", "neg_log_likelihood", "error_rate"]
SMALL += ["log_loss", "cosine_distance", "accuracy_loss", "f1_loss", "word_error_rate"]
LARGE = [
    "accuracy",
    "acc",
    "f1_score",
    "r2_score",
    "auc",
    "pr_auc",
    "PR-AUC",
    "mean_io_u",
    "cosine_similarity",
]
LARGE += ["top_k_categorical_accuracy", "recall_at_precision", "recall_at_5", "sensitivity_at_specificity"]
LARGE += ["log_likelihood", "true_positives", "roc_auc_score", "loss_accuracy", "auc2", "f1", "fbeta_score"]
UNKNOWN = ["mine", "score", "energy_score", "neg_mean_squared_error", "neg_accuracy", "one_minus_accuracy"]
UNKNOWN += [
    "accuracy_gap",
    "loss_reduction",
    "error_score",
    "entropy",
    "dice",
    "inaccuracy",
    "lossy",
    "",
    "_",
]
UNKNOWN += ["1", "at", "at_5", "score_1", "val"]


@pytest.mark.parametrize(
    ("name", "larger"),
    [
        *((each, False) for each in SMALL),
        *((each, True) for each in LARGE),
        *((each, None) for each in UNKNOWN),
    ],
)
@pytest.mark.parametrize("prefix", ["", "val_"])
def test_the_direction_follows_from_the_known_part_of_a_name(prefix, name, larger):
    """Names that end with a known metric have its direction, and all others have none."""
    assert larger is is_better_larger(prefix + name)


@given(
    st.sampled_from(["loss", "accuracy", "mae", "score", "error", "head", "f1", "r2_1", "main"]),
    st.sampled_from(sorted(SMALLER | LARGER)),
    st.sampled_from(["", "_1", "_12"]),
)
def test_the_name_of_an_output_does_not_count(output, metric, number):
    """The words of an output's name, and the number of a metric, do not change the direction of a metric."""
    assert (metric in LARGER) is is_better_larger(metric)
    assert is_better_larger(metric) is is_better_larger(f"val_{output}_{metric}{number}")


@given(st.text(alphabet="abcneg_019 at", max_size=20))
def test_any_name_has_a_direction_or_none(name):
    """No name makes the guess fail."""
    assert is_better_larger(name) in (True, False, None)
