"""Keras models in Spark pipelines: an Estimator, its Model, and a Transformer for trained models."""

from sparkdl.ml.estimator import KerasEstimator, KerasEstimatorModel, TrainingSummary
from sparkdl.ml.transformer import KerasTransformer

__all__ = ["KerasEstimator", "KerasEstimatorModel", "KerasTransformer", "TrainingSummary"]

for _public in (KerasEstimator, KerasEstimatorModel, KerasTransformer):
    _public.__module__ = __name__  # the module name in saved pipelines, by which Spark finds the class
