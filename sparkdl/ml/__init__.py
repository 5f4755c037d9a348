"""Keras models in Spark's pipelines: an Estimator, its Model, and a Transformer for trained ones."""

from sparkdl.ml.estimator import KerasEstimator, KerasEstimatorModel, TrainingSummary
from sparkdl.ml.transformer import KerasTransformer

__all__ = ["KerasEstimator", "KerasEstimatorModel", "KerasTransformer", "TrainingSummary"]

for _public in (KerasEstimator, KerasEstimatorModel, KerasTransformer):
    _public.__module__ = __name__  # the name under which what was saved is found again
