"""Evaluation and prediction with the model of a SparkModel, on executors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pyspark import RDD
from pyspark.sql import DataFrame

from sparkdl.data.schema import Schema
from sparkdl.driver.first_row import FirstRow, settle, settle_sample
from sparkdl.driver.predictions import column_function, frame_features, inference_stages, refuse_stateful
from sparkdl.driver.preparation import UserModel
from sparkdl.driver.serving import serving_rows
from sparkdl.modeling import execution, keras_settings, signature
from sparkdl.process.interrupts import Cleanup
from sparkdl.sources.base import ArraySource, NoRowsError, Source, first_row, sample_of
from sparkdl.sources.dataframe import FrameSource, require_free
from sparkdl.sources.resolve import require_sendable
from sparkdl.spark.application import SparkApplication, application_of, ship
from sparkdl.spark.failures import explained_if_stopped
from sparkdl.spark.jobs import StageFactory
from sparkdl.worker.inference import features_of
from sparkdl.worker.tasks import PredictRowsTask

BATCH_SIZE = 32  # rows per forward pass by default, as in Keras


@dataclass(frozen=True)
class Inference:
    """A model that evaluates and predicts on executors; errors are those of ``SparkModel``'s methods.

    Attributes:
        user: the model and its settings.
        batch_size: rows per forward pass; None: the number that the model requires, or 32.
    """

    user: UserModel
    batch_size: int | None

    def evaluate(self, source: Source) -> tuple[dict[str, Any], FirstRow]:
        """Return the loss and the metrics by name, and the properties that the first row showed."""
        model = self.user.model
        cluster = application_of(source.session)
        require_sendable(source, cluster)
        source.whole = signature.fixed_batch_size(model, batch_size=self.batch_size) is not None
        if not source.ordered:
            refuse_stateful(model)
        with Cleanup() as stack:
            stack.enter_context(explained_if_stopped(cluster))
            cluster.require_python(keras_settings.backend())
            source.workers = cluster.slots()
            source.schema, settled = settle(model, source, "test_step")
            stages = self._stages(cluster, source.schema)
            stack.callback(cluster.forget, stages.shared)
            source.held_batch = BATCH_SIZE if self.batch_size is None else self.batch_size
            network = self.user.config.network
            with serving_rows(source, cluster, network, stages, source.held_batch) as stages:
                results = source.evaluation(cluster, stages)
        states, rows = [bytes(states) for states, _ in results], [count for _, count in results]
        metrics = self.user.metrics(settled, "test_step")
        return metrics.merge_tests(states, rows, source.held_batch), settled

    def predict_arrays(self, source: ArraySource) -> Any:
        """Return the predictions of arrays, in their order."""
        model = self.user.model
        size = signature.fixed_batch_size(model, batch_size=self.batch_size) or self.batch_size or BATCH_SIZE
        cluster = application_of()
        require_sendable(source, cluster)
        if not source.count():
            return execution.of_no_rows(model, source.like_a_row())
        with Cleanup() as stack:
            stack.enter_context(explained_if_stopped(cluster))
            cluster.require_python(keras_settings.backend())
            source.schema, _ = settle(model, source)
            source.whole = signature.is_stateful(model)
            stages = self._stages(cluster, source.schema)
            stack.callback(cluster.forget, stages.shared)
            with serving_rows(source, cluster, self.user.config.network, stages, size) as stages:
                return execution.concatenate(source.predictions(cluster, stages))

    def predict_rdd(self, x: RDD[Any], count: int | None) -> RDD[Any]:
        """Return a lazy RDD of predictions; ``count`` is the model's number of inputs."""
        model, cluster = self.user.model, application_of()
        with explained_if_stopped(cluster):
            cluster.rebind(x)
            cluster.require_python(keras_settings.backend())
            signature.fixed_batch_size(model, batch_size=self.batch_size)
            refuse_stateful(model)
            try:
                schema = self._features_of(x, count)
            except NoRowsError:
                return x  # an RDD without rows is its own prediction
            stages = self._stages(cluster, schema)
            ship(cluster)
            return x.mapPartitions(stages.make(PredictRowsTask(stages.code)).function)

    def predict_dataframe(self, source: FrameSource, output_col: str) -> DataFrame:
        """Return the DataFrame with a column of predictions, lazily; only unknown input shapes need a job."""
        signature.fixed_batch_size(self.user.model, batch_size=self.batch_size)
        require_free(source.frame, output_col)
        predict = column_function(
            self.user.model,
            frame_features(self.user.model, source),
            self.batch_size,
            decode=source.decode,
            session=source.session,
            custom_objects=self.user.custom_objects,
            builder=self.user.builder,
            streams=source.frame.isStreaming,
        )
        return source.frame.withColumn(output_col, predict(*source.features()))

    def _features_of(self, rdd: RDD[Any], count: int | None) -> Schema:
        """Return the columns of x in an RDD; look at its first row if the model does not define them."""
        known = signature.known_features(self.user.model)
        if known is not None:
            return known
        row = first_row(rdd, self.user.model.name)
        return settle_sample(self.user.model, sample_of((features_of(row, count),), (count,)))[0]

    def _stages(self, cluster: SparkApplication, schema: Schema) -> StageFactory:
        """Return the factory of inference stages."""
        user = self.user
        return inference_stages(
            cluster,
            user.model,
            schema,
            self.batch_size,
            custom_objects=user.custom_objects,
            builder=user.builder,
        )
