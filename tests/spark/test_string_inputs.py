"""Models with string inputs are refused by name wherever they are given, before any data is read."""

import keras
import pytest

from sparkdl import SparkModel, predict_udf
from sparkdl.errors import ModelError
from sparkdl.ml import KerasEstimator, KerasTransformer

DOORS = {
    "fit": lambda model, frame: SparkModel(model).fit(frame, features_col="words"),
    "evaluate": lambda model, frame: SparkModel(model).evaluate(frame, features_col="words"),
    "predict": lambda model, frame: SparkModel(model).predict(frame, features_col="words"),
    "predict_udf": lambda model, frame: predict_udf(model),
    "KerasEstimator": lambda model, frame: KerasEstimator(model=model, featuresCol="words").fit(frame),
    "KerasTransformer": lambda model, frame: KerasTransformer(model=model, featuresCol="words").transform(
        frame
    ),
}


@pytest.fixture(scope="module")
def reviews():
    """A compiled model of the words of a text."""
    words = keras.Input((1,), dtype="string", name="words")
    tokens = keras.layers.TextVectorization(vocabulary=["good", "bad"], output_sequence_length=4)(words)
    pooled = keras.layers.GlobalAveragePooling1D()(keras.layers.Embedding(8, 4)(tokens))
    model = keras.Model(words, keras.layers.Dense(1, "sigmoid")(pooled))
    model.compile("sgd", "binary_crossentropy")
    return model


@pytest.mark.parametrize("door", DOORS)
def test_a_string_input_is_refused_by_name(spark, reviews, jobs, door):
    """Each door raises the same ModelError and runs no job."""
    frame = spark.createDataFrame([("good film", 1.0)], "words string, label double")
    before = jobs()

    with pytest.raises(ModelError, match='The input "words" of the model .* takes strings'):
        DOORS[door](reviews, frame)

    assert jobs() == before
