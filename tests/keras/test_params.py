"""Params are checked where they are set, by Spark's rules, without a JVM."""

import inspect
import re
from datetime import timedelta

import numpy as np
import pytest
from pyspark.ml.param import Param

from sparkdl import CheckpointConfig, SparkModel
from sparkdl.errors import ConfigError
from sparkdl.ml.params import FIT, SETTINGS, TrainingParams, arguments, by_name
from sparkdl.settings import GROUP_OF, GROUPS


def test_each_param_has_an_owner_words_and_accessors():
    """Each Param belongs to its instance and has a doc, a getter and a setter, as Spark's own."""
    params = TrainingParams()

    assert len(params.params) == len(inspect.signature(TrainingParams).parameters)
    for param in params.params:
        assert isinstance(param, Param)
        assert param.parent == params.uid
        assert param.doc
        assert all(hasattr(params, verb + param.name[0].upper() + param.name[1:]) for verb in ("get", "set"))


def test_a_setter_returns_its_owner():
    """Setters can be chained, and NumPy values become Python's."""
    params = TrainingParams().setEpochs(np.int64(3)).setFrequency(np.int32(16)).setSeed(7)

    assert (3, 16, 7) == (params.getEpochs(), params.getFrequency(), params.getSeed())
    assert [int, int] == [type(params.getEpochs()), type(params.getFrequency())]


def test_none_is_what_was_never_set():
    """Setting None restores the default, in the constructor, in `setParams` and in a setter."""
    params = TrainingParams(mode=None, weightCol=None, epochs=3).setEpochs(None)

    assert ("synchronous", 1) == (params.getMode(), params.getEpochs())
    assert not params.isDefined("weightCol")
    assert "synchronous" == inspect.signature(TrainingParams).parameters["mode"].default


def test_a_copy_has_values_of_its_own():
    """`copy` with other values leaves the original unchanged and keeps its uid."""
    params = TrainingParams(epochs=2, batchSize=64)
    copy = params.copy({params.epochs: 5})

    assert (2, 5, 64) == (params.getEpochs(), copy.getEpochs(), copy.getBatchSize())
    assert params.uid == copy.uid
    assert copy.epochs in params.copy({params.epochs: 5})._paramMap


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        ({"numWorkers": 0}, ConfigError, "numWorkers should be a whole number of at least 1; got 0"),
        ({"epochs": 1.5}, TypeError, "epochs"),
        ({"mode": "sync"}, ConfigError, "mode should be one of 'synchronous', .* got 'sync'"),
        ({"frequency": 0}, ConfigError, "frequency should be .* got 0"),
        ({"task": "ranking"}, ConfigError, "task should be one of 'auto', 'classification', 'regression'"),
        ({"thresholds": [0.5, -0.1]}, ConfigError, "thresholds should be a list of numbers of at least 0"),
        ({"thresholds": [0, 0.0, 1]}, ConfigError, "with at most one 0; got .0, 0.0, 1."),
        ({"thresholds": []}, ConfigError, "one for each class"),
        ({"thresholds": [float("nan"), 1]}, ConfigError, "numbers of at least 0"),
        ({"thresholds": 0.5}, TypeError, "thresholds"),
        ({"merge": "mean"}, ConfigError, "merge should be one of 'average'"),
        ({"quorum": 1.5}, ConfigError, "quorum should be"),
        ({"onWorkerLoss": "wait"}, ConfigError, "onWorkerLoss should be one of 'fail', 'continue'"),
        ({"checkpoint": 3}, ConfigError, "uri should be a path or a URI; got 3"),
        ({"featuresCol": 3}, TypeError, "name of a column"),
        ({"classWeight": [1.0]}, TypeError, "dict of numbers by class"),
        ({"shuffle": "yes"}, TypeError, "shuffle"),
        ({"nan": "drop"}, ConfigError, 'nan should be "error" or "warn"; got .drop'),
        ({"verbose": 3}, ConfigError, 'verbose should be "auto", 0, 1 or 2; got 3'),
        (
            {"validationSplit": 1.5},
            ConfigError,
            "validationSplit should be a number of at least 0 and below 1",
        ),
        ({"num_workers": 2}, TypeError, "no Param 'num_workers'. Use numWorkers."),
        ({"epoch": 2}, TypeError, "TrainingParams has no Param 'epoch'.$"),
    ],
)
def test_what_a_param_does_not_take_is_refused_at_once(value, error, message):
    """The constructor and `setParams` refuse an invalid value with the name of the Param."""
    with pytest.raises(error, match=message):
        TrainingParams(**value)
    with pytest.raises(error, match=message):
        TrainingParams().setParams(**value)


def test_params_become_the_arguments_of_a_fit():
    """Params are passed by their Python names; unset ones are left to SparkModel."""
    params = TrainingParams(batchSizePerWorker=8, validationIndicatorCol="held", classWeight={"1": 2})

    assert {"mode": "synchronous", "frequency": "batch", "batch_size_per_worker": 8} == arguments(
        params, SETTINGS
    )
    fit = arguments(params, FIT)
    assert ("held", {1: 2.0}) == (fit["validation_indicator_col"], fit["class_weight"])


OTHERWISE = {  # set by other Params, or of no use in Spark ML
    "x",
    "y",
    "sample_weight",
    "features_col",
    "validation_data",
    "parameter_server_mode",
    "deprecated",
    "profile",  # of a History
    *GROUPS,
}


def test_there_is_a_param_for_whatever_a_spark_model_takes():
    """There is a Param for every setting of SparkModel and argument of fit, in Spark's spelling.

    The settings of a group have a Param each.
    """
    taken = {
        *inspect.signature(SparkModel).parameters,
        *inspect.signature(SparkModel.fit).parameters,
        *GROUP_OF,
    }
    named = {re.sub(r"_(\w)", lambda found: found[1].upper(), each) for each in taken - OTHERWISE}

    assert named - {"self", "model"} == {*SETTINGS, *FIT}
    assert {*SETTINGS, *FIT} < {param.name for param in TrainingParams().params}


def test_checkpoints_are_a_folder_or_a_configuration():
    """A folder as checkpoint equals a CheckpointConfig with only that folder."""
    config = CheckpointConfig("hdfs:///kept", every=timedelta(minutes=1.5), keep=3)

    assert config == TrainingParams(checkpoint=config).getCheckpoint()
    assert CheckpointConfig("hdfs:///kept") == TrainingParams(checkpoint="hdfs:///kept").getCheckpoint()


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ("features", "features"),
        (["a", "b"], ["a", "b"]),
        ({"points": "p", "words": "w"}, {"points": "p", "words": "w"}),
        ({"p": "points", "w": "words"}, {"points": "p", "words": "w"}),
        ({"points": ["a", "b"], "words": "w"}, {"points": ["a", "b"], "words": "w"}),
        ({"points": "points", "words": "words"}, {"points": "points", "words": "words"}),
        ({"anything": "b", "b": "c"}, {"anything": "b", "b": "c"}),
    ],
)
def test_several_inputs_are_mapped_either_way(columns, expected):
    """Several inputs map columns by input, as in SparkModel, or inputs by column, as in other pipelines."""
    inputs = () if "anything" in columns else ("points", "words")  # a subclassed model has no input names

    assert expected == by_name(columns, inputs, "input")


def test_a_mapping_that_may_be_read_either_way_is_refused():
    """A mapping that may be read either way is refused."""
    with pytest.raises(ConfigError, match="is ambiguous: its keys and its values can both be the outputs"):
        by_name({"a": "b", "b": "c", "c": "a"}, ("a", "b", "c"), "output")
