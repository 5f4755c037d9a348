"""The first row of the user's data: the columns that it determines, and the model's predictions for it.

The driver reads one row. The row gives the shapes and dtypes that a model may leave open, builds the model's
metrics, and shows early whether the model fails on it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from sparkdl.data.schema import Sample, Schema
from sparkdl.driver.epochs import Metrics
from sparkdl.errors import DataError, SparkDLError
from sparkdl.modeling import execution, keras_metrics, keras_settings, losses, signature
from sparkdl.modeling.keras_types import Model
from sparkdl.process.reasons import reason_of, text_of
from sparkdl.sources.base import Source


class FirstRow(NamedTuple):
    """The first row and its predictions.

    If the inputs of the model declare a batch size, the row is repeated to fill one batch.
    """

    x: Any
    y: Any
    weights: Any
    predicted: Any


def settle(model: Model, source: Source, step: str | None = None) -> tuple[Schema, FirstRow]:
    """Return the columns of a source and its first row; build the parts of the model that need it.

    Args:
        model: the model.
        source: the rows.
        step: the step that the rows are for, "train_step" or "test_step"; None: predict.

    Raises:
        ConfigError: a list of columns does not form rows of the shape that the model takes.
        DataError: there are no rows, the row does not fit the model, or the model fails on it.
        ModelError: there are strings, and the backend does not support them.
    """
    source.model_name = model.name
    return settle_sample(model, source.peek(), step, reshape=source.reshaped)


def settle_sample(
    model: Model, sample: Sample, step: str | None = None, *, reshape: bool = False
) -> tuple[Schema, FirstRow]:
    """Return the columns of some rows, and a FirstRow made from one row, as ``settle`` does.

    Args:
        model: the model.
        sample: the row.
        step: the step that the rows are for, "train_step" or "test_step"; None: predict.
        reshape: whether values take the shape of the model's input, as vectors of a DataFrame do.

    Raises:
        ConfigError: as in ``settle``.
        DataError: the row does not fit the model, or the model fails on it.
        ModelError: as in ``settle``.
    """
    schema = signature.fit_features(model, sample.schema(keras_settings.float_type()), reshape=reshape)
    rows = signature.named_batch_size(model) or 1
    first = schema.batch(
        [
            column.first(part).repeat(rows, 0)
            for column, part in zip(schema.columns, sample.values, strict=True)
        ]
    )
    try:
        if step is None:
            return schema, FirstRow(*first, execution.compute(model, first.x))
        return schema, FirstRow(*first, keras_metrics.build_metrics(model, *first, step=step))
    except SparkDLError:
        raise
    except Exception as error:
        message = f"The model failed on the first row: {reason_of(error)}"
        raise DataError(message, traceback=text_of(error)) from error


def metrics_of(
    model: Model,
    row: FirstRow,
    *steps: str,
    builder: Callable[[], Model] | None = None,
    custom_objects: dict[str, Any] | None = None,
) -> Metrics:
    """Return the metrics of a model, under the names by which steps report their results.

    Args:
        model: the model, its metrics built.
        row: a row of the data.
        steps: the steps that will run, "train_step" or "test_step".
        builder: the function that built the model, if there is one.
        custom_objects: the custom objects that the user named.
    """
    logged = losses.logged(model, steps, row[:3], builder, custom_objects)
    return Metrics(model, row.y, row.predicted, logged)
