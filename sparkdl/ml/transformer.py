"""A pipeline stage that adds the predictions of a trained Keras model to a DataFrame."""

from __future__ import annotations

from collections.abc import Callable

from pyspark.ml import Transformer
from pyspark.ml.functions import array_to_vector
from pyspark.sql import DataFrame, functions

from sparkdl.driver.predictions import column_function, frame_features
from sparkdl.errors import ModelError, short
from sparkdl.ml.params import ModelParams, PredictionParams, arguments, by_name
from sparkdl.ml.persistence import Stored
from sparkdl.modeling import checks, execution, losses, signature
from sparkdl.modeling.keras_types import Model
from sparkdl.sources.dataframe import frame_source, require_free


class Predicts(PredictionParams, Stored):
    """Base class of the stages that add a model's predictions to a DataFrame."""

    @short
    def _transform(self, dataset: DataFrame) -> DataFrame:
        model = self.held()
        if model is None:
            raise ModelError(f"{type(self).__name__} has no model. Set model to a keras.Model.")
        checks.require_model(model)
        checks.require_backend_of_strings(model)
        names = by_name(self.getOrDefault("featuresCol"), signature.input_names(model), "input")
        decode = self.getOrDefault("decode") if self.isDefined("decode") else None
        count, texts = signature.count_parts(model)[0], signature.takes_strings(model)
        source = frame_source(dataset, (names,), (count,), decode=decode, texts=texts, unread=self.unread())
        schema = frame_features(model, source)
        predicted = execution.probe(model, schema)
        shape = signature.output_shapes(model, predicted)
        head = losses.head_of(model, self.getOrDefault("task"), shape, self.given_thresholds())
        size = self.getOrDefault("inferenceBatchSize")
        given = {"inferenceBatchSize": size} if self.isSet("inferenceBatchSize") else {}
        predict = column_function(
            model,
            schema,
            signature.fixed_batch_size(model, **given) or size,
            head=head,
            predicted=predicted,
            session=dataset.sparkSession,
            builder=self.builder(),
            decode=source.decode,
            streams=dataset.isStreaming,
            **arguments(self, ("customObjects",)),
        )
        column = functions.col(made := f"{self.uid}_made")
        if head.classifies:
            parts = {
                "rawPredictionCol": array_to_vector(column["raw"]),
                "probabilityCol": array_to_vector(column["probability"]),
                "predictionCol": column["prediction"],
            }
        else:
            parts = {"predictionCol": column.cast("double") if shape in ((), (1,)) else column}
        found = [(self.getOrDefault(name), part) for name, part in parts.items() if self.getOrDefault(name)]
        require_free(dataset, *(name for name, _ in found))
        frame = dataset.withColumn(made, predict(*source.features()))
        return frame.select("*", *(part.alias(name) for name, part in found)).drop(made)

    def unread(self) -> list[str]:
        """Return the columns for which ``decode`` may have a function although no prediction needs them."""
        return []

    def given_thresholds(self) -> list[float] | None:
        """Return the threshold of each class; None if none are set."""
        return self.getOrDefault("thresholds") if self.isDefined("thresholds") else None

    def builder(self) -> Callable[[], Model] | None:
        """Return the function that built the model; None if there is none."""
        return None


class KerasTransformer(ModelParams, Predicts, Transformer):
    """A trained Keras model as a stage of a pipeline.

    Args:
        params: the Params of the stage, by keyword; ``model`` is the keras.Model, which need not be compiled.
            For a model that is not compiled, ``task="classification"`` declares its output to be class
            probabilities.

    Example:
        >>> KerasTransformer(model=model, featuresCol="pixels").transform(frame)  # doctest: +SKIP
    """
