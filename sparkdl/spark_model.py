"""SparkModel: a compiled Keras model that trains, evaluates and predicts on a Spark cluster."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
from pyspark import RDD

from sparkdl import files, launch, models, preflight
from sparkdl.backends import require_supported
from sparkdl.config import FitConfig, Mode, TrainConfig, refuse_unsupported
from sparkdl.epochs import Metrics, check_callbacks
from sparkdl.errors import ConfigError, DataError, ModelError
from sparkdl.feed import Column
from sparkdl.inference import InferenceJob
from sparkdl.launch import Cluster, Stage
from sparkdl.rules import choose_rule
from sparkdl.sources import (
    ArraySource,
    FrameSource,
    RddSource,
    Row,
    Source,
    columns_like,
    make_source,
    require_partner,
    with_predictions,
)
from sparkdl.training import Request, Run

NOT_YET = {
    "class_weight": None, "sample_weight": None, "initial_epoch": 0, "steps_per_epoch": None,
    "validation_steps": None, "validation_batch_size": None, "validation_freq": 1,
}  # fmt: skip


class SparkModel:
    """A compiled Keras model, and how it is trained on the executors of a Spark application.

    Args:
        model: a compiled keras.Model, which is trained in place, or a function without arguments that
            returns one, for models that Keras cannot serialize.
        mode: "synchronous", "asynchronous" or "hogwild".
        frequency: "batch", a number of batches, or "epoch": how often a worker exchanges.
        num_workers: how many workers; None takes the slots that there are.
        merge: "average", "sum" or "dynsgd"; None is the mode's default: average in synchronous mode,
            DynSGD elsewhere.
        custom_objects: classes and functions that the model needs, by name; those that the live model
            uses are found without.
        batch_size_per_worker: rows per update of each worker, instead of ``batch_size``.
        bind_address: the address that the endpoint listens on; default ``spark.driver.bindAddress``.
        advertised_host: the host that executors connect to; default ``spark.driver.host``.
        port: the endpoint's port, a range of ports to try, or 0 for any. Each of these three is also a
            Spark setting: ``spark.sparkdl.bindAddress``, ``.advertisedHost`` and ``.port``.
        start_timeout: seconds that a gang which has begun to form may take.
        max_restarts: how often in a row a run that lost a worker is taken up again.
        parameter_server_mode: for code written for Elephas; only "http" is known.

    Raises:
        ConfigError: a setting that cannot be honoured.
        ModelError: the model is not a compiled Keras model.

    Example:
        >>> history = SparkModel(model).fit(rdd, epochs=10, batch_size=64)  # doctest: +SKIP
    """

    def __init__(  # noqa: PLR0913 - the settings of a run, by keyword
        self,
        model: keras.Model | Callable[[], keras.Model],
        *,
        mode: str = "synchronous",
        frequency: str | int = "batch",
        num_workers: int | None = None,
        merge: str | None = None,
        custom_objects: dict[str, Any] | None = None,
        batch_size_per_worker: int | None = None,
        bind_address: str | None = None,
        advertised_host: str | None = None,
        port: int | range | str = 0,
        start_timeout: float = 300,
        max_restarts: int = 3,
        parameter_server_mode: str = "http",
    ) -> None:
        if parameter_server_mode != "http":
            raise ConfigError(
                f'parameter_server_mode should be "http", which it always is; got {parameter_server_mode!r}. '
                "Leave it out."
            )
        self.config = TrainConfig(
            mode=mode, frequency=frequency, num_workers=num_workers, merge=merge,  # type: ignore[arg-type]
            batch_size_per_worker=batch_size_per_worker, bind_address=bind_address,
            advertised_host=advertised_host, port=port, start_timeout=start_timeout,  # type: ignore[arg-type]
            max_restarts=max_restarts,
        )  # fmt: skip
        choose_rule(merge, synchronous=self.config.mode is Mode.SYNCHRONOUS)
        if self.config.joint and merge not in (None, "average"):
            raise ConfigError(
                'merge is for weights that workers trained apart; mode="synchronous" with frequency="batch" '
                f'averages gradients. Leave merge={merge!r} out, or set frequency to "epoch" or a number.'
            )
        self._builder = None if isinstance(model, keras.Model) or not callable(model) else model
        self.model: keras.Model = self._builder() if self._builder else model
        models.require_compiled(self.model)
        if self.config.joint and num_workers != 1:
            models.require_mean_loss(self.model)
        require_supported(keras.backend.backend())
        self.custom_objects = dict(custom_objects or {})
        self.history: Any = None
        self._sample: tuple[Any, Any] = None, None  # labels and predictions of the last first row
        self.training_histories: list[dict[str, list[Any]]] = []

    @property
    def master_network(self) -> keras.Model:
        """The model, by the name that Elephas gives it."""
        return self.model

    def fit(  # noqa: PLR0913 - Keras's own signature
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: str | int = "auto",
        callbacks: Any = None,
        validation_split: float = 0.0,
        validation_data: Any = None,
        shuffle: bool = True,
        class_weight: Any = None,
        sample_weight: Any = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_batch_size: int | None = None,
        validation_freq: int = 1,
        *,
        features_col: str = "features",
        label_col: str = "label",
        seed: int | None = None,
    ) -> Any:
        """Train the model in place on the cluster.

        Args:
            x: NumPy arrays or pandas, with ``y``; an RDD of (x, y); or a DataFrame.
            y: labels, one per row of arrays.
            batch_size: rows per optimizer update, as in Keras; 32 by default. In synchronous mode with
                frequency "batch" all workers together take so many rows per update, elsewhere each one.
            epochs: how many epochs.
            verbose: 0 silent, 1 a bar, 2 a line per epoch, "auto" a bar where one can be drawn.
            callbacks: Keras callbacks; they run on the driver, at epochs.
            validation_split: the fraction of rows held out: the last rows of arrays, a seeded choice of
                the rows of RDDs and DataFrames, the same in every epoch.
            validation_data: (x, y) arrays, an RDD or a DataFrame, evaluated on the executors each epoch.
            shuffle: deal rows in a seeded random order, and reorder them every epoch.
            class_weight: not supported yet.
            sample_weight: not supported yet.
            initial_epoch: not supported yet.
            steps_per_epoch: not supported yet.
            validation_steps: not supported yet.
            validation_batch_size: not supported yet.
            validation_freq: not supported yet.
            features_col: the features column of a DataFrame.
            label_col: the label column of a DataFrame.
            seed: what every random order is drawn from.

        Returns:
            A keras.callbacks.History; its ``training`` has counts and timings of the run.

        Raises:
            ConfigError: an argument that cannot be honoured.
            DataError: rows that do not fit the model; names partition and row.
            ClusterError: too few slots, or an executor whose environment does not match.
            WorkerError: training failed on an executor; carries the worker's traceback.
        """
        refuse_unsupported(
            {
                "class_weight": class_weight, "sample_weight": sample_weight,
                "initial_epoch": initial_epoch, "steps_per_epoch": steps_per_epoch,
                "validation_steps": validation_steps, "validation_batch_size": validation_batch_size,
                "validation_freq": validation_freq,
            },
            NOT_YET,
        )  # fmt: skip
        fit = FitConfig(
            batch_size=32 if batch_size is None else batch_size, epochs=epochs, verbose=verbose,
            shuffle=shuffle, seed=seed, validation_split=validation_split,
        )  # fmt: skip
        kept = check_callbacks(callbacks)
        names = features_col, label_col
        source = make_source(x, y, names)
        validation = self._validation(validation_data, names)
        if validation is not None and validation_split:
            raise ConfigError("validation_split should be left out where validation_data is given.")
        if validation is not None:
            require_partner(source, validation)
        cluster = Cluster()
        columns = self._columns(source, source.peek())
        if validation is not None:
            self._check_same_columns(columns, self._columns(validation, validation.peek()))
        most = min(fit.batch_size, source.count() or fit.batch_size)
        num_workers, why = cluster.num_workers(
            self.config.num_workers, most if self.config.joint else None, self.config.start_timeout
        )
        launch.logger.info("%d workers: %s.", num_workers, why)
        self.history = keras.callbacks.History()
        request = Request(
            self.model, self._builder, self.custom_objects, self.config, fit, source, validation, columns,
            kept, self.history, Metrics(self.model, *self._sample),
        )  # fmt: skip
        try:
            Run(request, cluster, num_workers).execute()
        finally:
            self.training_histories.append(getattr(self.history, "history", {}))
        return self.history

    def _validation(self, data: Any, names: tuple[str, str]) -> Source | None:
        if data is None:
            return None
        if isinstance(data, tuple | list):
            if len(data) != 2:
                raise ConfigError(
                    f"validation_data should be (x, y), an RDD or a DataFrame; got {len(data)} parts. Sample "
                    "weights are not supported yet."
                )
            return make_source(data[0], data[1], names, what="validation_data")
        return make_source(data, None, names, what="validation_data")

    def _columns(self, source: Source, row: Row) -> tuple[Column, ...]:
        """Return what every row has to be, and build what the model leaves open until it sees one."""
        first, *rest = columns_like(row, keras.config.floatx(), source.names)
        columns = (
            models.fit_features(self.model, first, reshape=isinstance(source, FrameSource)), *rest
        )  # fmt: skip
        batch = [
            column.cast(np.reshape(part, (1, *column.shape)), "the data")
            for column, part in zip(columns, row, strict=True)
        ]
        try:
            if len(batch) > 1:
                self._sample = batch[1], models.build_metrics(self.model, *batch)
            else:
                self.model(batch[0], training=False)
        except (ValueError, TypeError, ArithmeticError) as error:
            raise DataError(f"The model cannot be computed on the first row: {error}") from error
        return columns

    @staticmethod
    def _check_same_columns(training: tuple[Column, ...], held: tuple[Column, ...]) -> None:
        for ours, theirs in zip(training, held, strict=True):
            if ours.shape != theirs.shape:
                raise DataError(
                    f"validation_data should have rows like x: {ours.name} of shape {ours.shape}; got "
                    f"{theirs.shape}."
                )

    def _stage(self, cluster: Cluster, columns: tuple[Column, ...], batch_size: int) -> tuple[Any, Any]:
        """Return what makes inference stages, and the broadcast behind them."""
        spec, objects = models.freeze(self.model, self._builder, self.custom_objects)
        shared = cluster.context.broadcast(InferenceJob(spec, batch_size, columns))
        stage = functools.partial(
            Stage, expected=preflight.expectations(spec.backend), shared=shared, objects=objects,
            builder=self._builder,
        )  # fmt: skip
        return stage, shared

    def evaluate(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        verbose: str | int = 0,
        *,
        return_dict: bool = False,
        features_col: str = "features",
        label_col: str = "label",
    ) -> Any:
        """Return the loss and the metrics over all rows, computed on the executors.

        Args:
            x: as in ``fit``.
            y: as in ``fit``.
            batch_size: rows per forward pass; 32 by default.
            verbose: taken for Keras's sake; nothing is shown.
            return_dict: whether to return a dict by metric name.
            features_col: the features column of a DataFrame.
            label_col: the label column of a DataFrame.

        Returns:
            What ``keras.Model.evaluate`` returns: a number, a list of the loss and the metrics, or a dict.

        Raises:
            ConfigError: an argument that cannot be honoured.
            DataError: rows that do not fit the model.
        """
        fit = FitConfig(batch_size=32 if batch_size is None else batch_size)
        source = make_source(x, y, (features_col, label_col))
        cluster = Cluster()
        columns = self._columns(source, source.peek())
        stage, shared = self._stage(cluster, columns, fit.batch_size)
        try:
            results = source.evaluation(cluster, columns, stage)
        finally:
            shared.destroy()
        logs = Metrics(self.model, *self._sample).merge([bytes(states) for states, _ in results])
        if return_dict:
            return logs
        values = list(logs.values())
        return values[0] if len(values) == 1 else values

    def predict(
        self,
        x: Any,
        batch_size: int | None = None,
        verbose: str | int = 0,
        *,
        features_col: str = "features",
        output_col: str = "prediction",
    ) -> Any:
        """Return the model's predictions, computed on the executors.

        Args:
            x: arrays; an RDD of x or of (x, y); or a DataFrame.
            batch_size: rows per forward pass; 32 by default.
            verbose: taken for Keras's sake; nothing is shown.
            features_col: the features column of a DataFrame.
            output_col: the name of the column that a DataFrame gets.

        Returns:
            For arrays an array; for an RDD a lazy RDD in the same order and partitioning; for a
            DataFrame the same DataFrame with a column more: a float, or an array of floats.

        Raises:
            ConfigError: an argument that cannot be honoured.
            DataError: rows that do not fit the model.
        """
        fit = FitConfig(batch_size=32 if batch_size is None else batch_size)
        cluster = Cluster()
        if isinstance(x, RDD):
            column = models.known_features(self.model)
            column = column or self._columns(RddSource(x.map(_features), ("x",)), _first(x))[0]
            self._ship(cluster)
            stage, _ = self._stage(cluster, (column,), fit.batch_size)
            return x.mapPartitions(stage("predict", encoding="rows").function)
        source = make_source(x, None, (features_col,))
        columns = self._columns(source, source.peek())
        stage, shared = self._stage(cluster, columns, fit.batch_size)
        output = tuple(self.model.compute_output_shape((1, *columns[0].shape))[1:])
        if isinstance(source, FrameSource):
            self._ship(cluster)
            return with_predictions(source, stage, output, output_col)
        assert isinstance(source, ArraySource)  # noqa: S101 - nothing else is left
        try:
            parts = source.predictions(cluster, columns, stage)
        finally:
            shared.destroy()
        return np.stack(parts)

    @staticmethod
    def _ship(cluster: Cluster) -> None:
        """Send sparkdl along with a job that is not ours to start again."""
        if not cluster.local:
            cluster.ship_package()

    def save(self, path: str, overwrite: bool = False) -> None:
        """Write the model as a plain Keras file, and the settings as JSON beside it.

        Args:
            path: a local path, or a URI of any file system that Spark can reach; ends with ".keras".
            overwrite: whether files that are there may be replaced.

        Raises:
            ConfigError: the path does not end with ".keras".
            FileExistsError: there is a file already.
        """
        _require_keras_file(path)
        context = launch.active_context()
        if files.exists(path, context=context) and not overwrite:
            raise FileExistsError(f"{path} exists; pass overwrite=True to replace it.")
        with tempfile.TemporaryDirectory() as folder:
            local, settings = Path(folder, "model.keras"), Path(folder, "model.json")
            models.optimizer_variables(self.model)  # makes them, without which Keras warns when it loads
            self.model.save(local)
            settings.write_text(json.dumps(self.config.to_dict(), indent=2))
            files.put(local, path, overwrite=overwrite, context=context)
            files.put(settings, _settings_path(path), overwrite=True, context=context)

    @classmethod
    def load(
        cls, path: str, custom_objects: dict[str, Any] | None = None, *, safe_mode: bool = True
    ) -> SparkModel:
        """Return what ``save`` wrote.

        Args:
            path: the path or URI of the ".keras" file.
            custom_objects: classes and functions that the model needs, by name.
            safe_mode: whether to refuse models that carry code, such as Lambda layers.

        Raises:
            FileNotFoundError: there is no such file.
            ModelError: the file is not a compiled Keras model.
        """
        _require_keras_file(path)
        context = launch.active_context()
        with tempfile.TemporaryDirectory() as folder:
            local, settings = Path(folder, "model.keras"), Path(folder, "model.json")
            files.get(path, local, context=context)
            try:
                model = keras.saving.load_model(local, custom_objects, safe_mode=safe_mode)
            except (ValueError, TypeError, OSError) as error:
                raise ModelError(f"{path} cannot be loaded: {error}") from error
            values: dict[str, Any] = {}
            if files.exists(_settings_path(path), context=context):
                files.get(_settings_path(path), settings, context=context)
                values = json.loads(settings.read_text())
        return cls(model, custom_objects=custom_objects, **values)


def _require_keras_file(path: str) -> None:
    if not str(path).endswith(".keras"):
        raise ConfigError(f'path should end with ".keras", Keras\'s own format; got {path!r}.')


def _settings_path(path: str) -> str:
    return path[: -len(".keras")] + ".json"


def _features(row: Any) -> tuple[Any]:
    return (row[0] if isinstance(row, tuple) else row,)


def _first(rdd: RDD[Any]) -> Row:
    rows = launch.run(lambda: rdd.take(1), Cluster())
    if not rows:
        raise DataError("There are no rows to predict: the RDD is empty.")
    return tuple(np.asarray(part) for part in _features(rows[0]))


def load_spark_model(
    path: str, custom_objects: dict[str, Any] | None = None, *, safe_mode: bool = True
) -> SparkModel:
    """Return what ``SparkModel.save`` wrote; see ``SparkModel.load``."""
    return SparkModel.load(path, custom_objects, safe_mode=safe_mode)


def to_simple_rdd(context: Any, features: Any, labels: Any) -> Any:
    """Return an RDD of (x, y) pairs from two arrays of equal length.

    Args:
        context: the SparkContext.
        features: one row per example.
        labels: one label per example.

    Raises:
        DataError: they have different lengths.
    """
    source = ArraySource((features, labels))
    return context.parallelize(list(zip(*source.arrays, strict=True)))
