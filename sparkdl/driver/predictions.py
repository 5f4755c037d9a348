"""Predictions by Spark: the stages that compute them, and functions of columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sparkdl.config import FitConfig
from sparkdl.data.decoding import Decode
from sparkdl.data.schema import Sample, Schema
from sparkdl.errors import ModelError, short
from sparkdl.modeling import checks, execution, keras_settings, serialization, signature
from sparkdl.modeling.classification import AS_IT_IS, OutputKind
from sparkdl.modeling.keras_types import Model
from sparkdl.sources.base import NoRowsError
from sparkdl.sources.dataframe import FrameSource, column_of_predictions
from sparkdl.spark import preflight
from sparkdl.spark.application import SparkApplication, application_of, ship
from sparkdl.spark.failures import explained_if_stopped
from sparkdl.spark.jobs import StageFactory
from sparkdl.worker.inference import InferenceJob
from sparkdl.worker.user_code import Code


def inference_stages(
    cluster: SparkApplication,
    model: Model,
    schema: Schema,
    batch_size: int | None,
    *,
    custom_objects: dict[str, Any] | None = None,
    builder: Callable[[], Model] | None = None,
    streams: bool = False,
) -> StageFactory:
    """Return the factory of the Spark stages that predict or evaluate with a model.

    Args:
        cluster: the Spark application.
        model: the model, whose present weights are used.
        schema: the columns of every row.
        batch_size: rows per forward pass; None: the number that the model requires, or 32.
        custom_objects: the custom objects that the user named.
        builder: the function that built the model, if there is one.
        streams: whether the rows come from a stream.

    Raises:
        ConfigError: ``batch_size`` is not a whole number above 0, or not the number that the model requires.
        ModelError: the model cannot be restored on executors.
    """
    size = FitConfig(batch_size=32 if batch_size is None else batch_size).batch_size
    size = signature.fixed_batch_size(model, batch_size=batch_size) or size
    spec, objects = serialization.freeze(model, builder, custom_objects, trains=False)
    shared = cluster.share(InferenceJob(spec, size, schema), streams=streams)
    return StageFactory(
        expected=preflight.expectations(spec.backend, local=cluster.local),
        shared=shared,
        code=Code(objects, builder),
    )


def column_function(
    model: Model,
    schema: Schema,
    batch_size: int | None,
    *,
    head: OutputKind = AS_IT_IS,
    predicted: Any = None,
    decode: Mapping[int, Decode] | None = None,
    session: Any = None,
    **code: Any,
) -> Any:
    """Return a function of Spark SQL that predicts from columns.

    Args:
        model: the model, whose present weights are used.
        schema: the columns of every row.
        batch_size: rows per forward pass, as ``inference_stages`` takes it.
        head: the kind of output.
        predicted: the model's predictions for one or more rows; None: they are computed for a row of zeros.
        decode: functions that convert values of some columns to arrays, by column index.
        session: the Spark session of the columns; None: the active session.
        code: ``custom_objects``, ``builder`` and ``streams``, as ``inference_stages`` takes them.
    """
    refuse_stateful(model)
    cluster = application_of(session)
    with explained_if_stopped(cluster):
        cluster.require_python(keras_settings.backend())
        predicted = execution.probe(model, schema) if predicted is None else predicted  # builds the model
        checks.require_numbers(model, predicted)
        stages = inference_stages(cluster, model, schema, batch_size, **code)
        ship(cluster)
    shapes = signature.output_shapes(model, predicted)
    return column_of_predictions(stages, shapes, head, decode)


def refuse_stateful(model: Model) -> None:
    """Refuse a model with layers that keep state between batches, because partitions have no order.

    Raises:
        ModelError: the model has stateful layers.
    """
    if signature.is_stateful(model):
        raise ModelError(
            f'The model "{model.name}" has stateful layers, which carry a state from one batch to the next, '
            "and rows in partitions have no order for that. Pass arrays, or use model.predict."
        )


def frame_features(model: Model, source: FrameSource) -> Schema:
    """Return the schema of a DataFrame's features.

    It comes from the model if the model defines its inputs, else from the first row.

    Raises:
        ConfigError: a column holds strings where the model takes numbers, or numbers where it takes strings.
            Or a list of columns does not form rows of the shape that the model takes.
        DataError: the features do not match the inputs of the model, or the first row cannot be used.
        ModelError: the model does not define its inputs, and the DataFrame is a stream or has no rows. Or the
            model takes strings, and the backend does not support them.
    """
    known = signature.known_features(model, source.sample)
    if known is not None:
        source.require_kinds(known)
        return known
    if source.frame.isStreaming:
        raise unknown_inputs(model)
    source.model_name = model.name
    try:
        first = source.peek()
    except NoRowsError:
        raise unknown_inputs(model) from None
    return signature.fit_features(model, first.schema(keras_settings.float_type()), reshape=True)


def unknown_inputs(model: Model) -> ModelError:
    """Return the error for a model that does not define its inputs."""
    return ModelError(
        f'The input shapes of the model "{model.name}" are not known. Build it from keras.Input with all '
        "dimensions set."
    )


@short
def predict_udf(
    model: Model, batch_size: int | None = None, custom_objects: dict[str, Any] | None = None
) -> Any:
    """Return a function of Spark SQL that predicts with a Keras model.

    The function takes the model's inputs, in the order of ``model.inputs`` (for a dict of inputs, sorted by
    name): columns of numbers, arrays (nested or flat), vectors or
    strings. If the model has one input, several columns are combined into one array. The function returns a
    float, or an array of floats nested as deeply as the output. For a model with several outputs,
    it returns a struct with one such field per output, named after the output. It predicts with the weights
    that the model has when ``predict_udf`` is called. The model need not be compiled.

    Args:
        model: a keras.Model whose inputs have known shapes.
        batch_size: rows per forward pass; by default the number that the model requires, or 32.
        custom_objects: classes and functions that the model needs, by name. Those in the model's
            configuration are found automatically.

    Raises:
        ConfigError: ``batch_size`` is not a whole number above 0, or not the number that the model requires.
        DataError: the model fails on a row of zeros.
        ModelError: ``model`` is not a Keras model, the shapes of its inputs are not known, it has stateful
            layers, it returns strings, it takes strings that the backend does not support, or it cannot be
            restored on executors.
        PreflightError: on a local master, the Python version or the packages of the workers differ from
            the driver's.

    Example:
        >>> spark.udf.register("score", predict_udf(model))  # doctest: +SKIP
        >>> spark.sql("SELECT id, score(features) FROM visits")  # doctest: +SKIP
    """
    checks.require_model(model)
    names = tuple(tensor.name for tensor in getattr(model, "inputs", None) or ())
    if not names:
        raise unknown_inputs(model)
    schema = signature.known_features(model, Sample((signature.input_places(model),), names, ()))
    if schema is None:
        raise unknown_inputs(model)
    return column_function(model, schema, batch_size, custom_objects=custom_objects)
