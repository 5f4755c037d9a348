"""SparkModel: a compiled Keras model that trains, evaluates and predicts on a Spark cluster."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from typing import Any, Literal, ParamSpec, TypeVar

import keras
from pyspark import RDD

from sparkdl.api import joint_start, saving, tracking
from sparkdl.api.inference import Inference
from sparkdl.api.requirements import require_http, require_trainable, rule_of
from sparkdl.config import (
    CheckpointConfig,
    CompressionName,
    Frequency,
    ModeName,
    PlacementName,
    TrainConfig,
    Verbose,
)
from sparkdl.data.arrays import array_of
from sparkdl.data.schema import Sample
from sparkdl.driver.first_row import FirstRow
from sparkdl.driver.fit import FitRun
from sparkdl.driver.preparation import FitArguments, UserModel, build_request
from sparkdl.driver.request import Request
from sparkdl.driver.training_record import table_of
from sparkdl.errors import ConfigError, short
from sparkdl.modeling import (
    keras_internals,
    keras_variables,
    signature,
    trainability,
)
from sparkdl.modeling.backends.choice import with_keras_optimizer
from sparkdl.process.interrupts import Cleanup
from sparkdl.rules import MergeName, Rule
from sparkdl.server.state import CarriedState
from sparkdl.settings import FaultTolerance, Network, Stragglers, with_deprecated
from sparkdl.sources.base import ArraySource
from sparkdl.sources.dataframe import FrameSource
from sparkdl.sources.resolve import make_source, refuse_columns
from sparkdl.ui import summary
from sparkdl.ui.history import History

P = ParamSpec("P")
R = TypeVar("R")
_in_fits: set[int] = set()  # ids of the models in training
_fits_lock = threading.Lock()


def _alone(fit: Callable[P, R]) -> Callable[P, R]:
    """Refuse a fit of a model that another fit is training: each would overwrite the other's weights."""

    @functools.wraps(fit)
    def alone(*args: P.args, **kwargs: P.kwargs) -> R:
        model: Any = args[0].model  # type: ignore[attr-defined]
        key = id(model)
        with _fits_lock:
            if key in _in_fits:
                raise ConfigError(
                    f'The model "{model.name}" is being trained by another fit. Wait until that fit ends, '
                    "or fit a copy (keras.models.clone_model)."
                )
            _in_fits.add(key)
        try:
            return fit(*args, **kwargs)
        finally:
            _in_fits.discard(key)

    return alone


class SparkModel:
    """A compiled Keras model, with the settings to train it on the executors of a Spark application.

    Args:
        model: a compiled keras.Model, which is trained in place; or a function without arguments that
            returns one, for models that Keras cannot serialize.
        mode: how the workers' updates are merged: "synchronous", "asynchronous" or "hogwild".
        frequency: the batches between exchanges of a worker: "batch" (1), a number, or "epoch" (all). "auto",
            in synchronous mode, begins with "batch" and continues with 16 and ``merge="diloco"``; see
            docs/how-to/which-mode.md.
        num_workers: number of workers; None is one per task slot, or fewer if a batch has fewer rows.
        merge: the rule by which updates change the center: a rule of ``sparkdl.rules``, or its name:
            "average", "sum", "adag", "dynsgd", "aeasgd", "eamsgd", "bmuf", "fedopt", "diloco" or "adasum".
            None is the default for the mode and frequency, which may scale the learning rate; see
            docs/explanation/modes.md.
        custom_objects: classes and functions that the model needs, by name; those that ``model`` itself
            uses are found automatically.
        batch_size_per_worker: rows per step of each worker, instead of ``batch_size``.
        compression: the codec of updates on the network: "bf16" or "fp16" (half of the bytes), or "int8" (a
            quarter). Results then differ from plain Keras (docs/how-to/cluster.md).
        share_gpus: whether two workers may use the same GPU.
        dashboard: whether each fit has a live page, whose link it prints (docs/how-to/watch.md). With
            ``verbose=0`` or ``placement="worker"`` there is none.
        distribution: with Keras on JAX, a function that returns the distribution of a worker's model over
            the devices of its task, such as ``lambda: keras.distribution.ModelParallel(...)``. The
            default for tasks with several GPUs is keras.distribution.DataParallel.
        placement: where updates are merged: "driver" (this process); "worker" (worker 0), for Spark Connect
            if executors cannot reach this process (docs/how-to/connect.md); or "executors" (each worker
            reduces a part of the updates), for large models and many workers, in synchronous mode
            (docs/how-to/cluster.md).
        network: the address, the port and the encryption of the endpoint.
        fault_tolerance: when a worker is considered lost, and what happens then.
        stragglers: how long workers wait for slower ones.
        parameter_server_mode: accepted for code written for Elephas; must be "http".
        deprecated: the fields of ``network``, ``fault_tolerance`` and ``stragglers`` as separate arguments,
            which issue a DeprecationWarning.

    Raises:
        ConfigError: a setting cannot be honoured.
        ModelError: the model is not a compiled Keras model, or uses features that workers do not support.

    Example:
        >>> history = SparkModel(model).fit(rdd, epochs=10, batch_size=64)  # doctest: +SKIP
    """

    _original: keras.Model | None = None  # the model that ``self.model`` is a copy of, if any
    # State that the last fit left; ``_settled`` may come from a later evaluate.
    _carried: tuple[int, bytes, CarriedState | None] | None = None
    _flags: trainability.Trainability | None = None
    _settled: FirstRow | None = None

    @short
    def __init__(  # noqa: PLR0913 - the settings of a run, by keyword
        self,
        model: keras.Model | Callable[[], keras.Model],
        *,
        mode: ModeName = "synchronous",
        frequency: Frequency = "batch",
        num_workers: int | None = None,
        merge: MergeName | Rule | None = None,
        custom_objects: dict[str, Any] | None = None,
        batch_size_per_worker: int | None = None,
        compression: CompressionName | None = None,
        share_gpus: bool = False,
        dashboard: bool = True,
        distribution: Callable[[], Any] | None = None,
        placement: PlacementName = "driver",
        network: Network | None = None,
        fault_tolerance: FaultTolerance | None = None,
        stragglers: Stragglers | None = None,
        parameter_server_mode: str = "http",
        **deprecated: Any,
    ) -> None:
        require_http(parameter_server_mode)
        groups = {"network": network, "fault_tolerance": fault_tolerance, "stragglers": stragglers}
        self.config = TrainConfig(
            mode=mode,  # type: ignore[arg-type]
            frequency=frequency,
            num_workers=num_workers,
            merge=with_keras_optimizer(merge),
            batch_size_per_worker=batch_size_per_worker,
            compression=compression,
            share_gpus=share_gpus,
            dashboard=dashboard,
            placement=placement,  # type: ignore[arg-type]
            **with_deprecated("SparkModel", groups, deprecated),
        )
        rule = rule_of(self.config)
        self._builder = None if isinstance(model, keras.Model) or not callable(model) else model
        self.model: keras.Model = self._builder() if self._builder else model
        require_trainable(self.model, rule, distribution)
        self.distribution = distribution
        self.custom_objects = dict(custom_objects or {})
        self.history: History | None = None
        self.training_histories: list[dict[str, list[Any]]] = []

    def __repr__(self) -> str:
        settings = summary.of_spark_model(self.model, self.config, self.history)
        return f"SparkModel({', '.join(f'{name}: {value}' for name, value in settings.items())})"

    def _repr_html_(self) -> str:
        return table_of(summary.of_spark_model(self.model, self.config, self.history))

    @property
    def master_network(self) -> keras.Model:
        """The model, under its name in Elephas."""
        return self.model

    @short
    @_alone
    def fit(  # noqa: PLR0913 - Keras's own signature
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: Verbose = "auto",
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
        validation_freq: Any = 1,
        *,
        features_col: Any = "features",
        label_col: Any = "label",
        validation_indicator_col: str | None = None,
        seed: int | None = None,
        preserve_partitions: bool = False,
        decode: dict[str, Callable[[Any], Any]] | None = None,
        checkpoint: CheckpointConfig | str | None = None,
        resume: bool = False,
        nan: Literal["error", "warn"] = "error",
        profile: tuple[int, int] | None = None,
    ) -> History:
        """Train the model in place on the cluster.

        Args:
            x: NumPy arrays or pandas, with ``y``; an RDD of (x, y), (x, y, sample_weight) or
                LabeledPoint; a DataFrame; or a function of (worker, num_workers), which is called
                on each worker and returns that worker's rows in a form that ``keras.Model.fit``
                takes: a tuple of arrays, or an iterable of batches. For a model of several inputs,
                pass a tuple or a dict in place of each array. A model that adds its own losses, or
                has its own ``train_step``, may train without labels, on rows of x or (x,).
            y: labels, one per row of arrays; for several outputs a tuple or a dict.
            batch_size: rows per step of the optimizer, as in Keras; 32 by default. In synchronous mode with
                frequency "batch" it counts the rows of all workers together, otherwise those of each worker.
            epochs: number of epochs, including those before ``initial_epoch``.
            verbose: 0 silent, 1 a progress bar, 2 one line per epoch; "auto" is 1 in terminals and
                notebooks, 2 elsewhere.
            callbacks: Keras callbacks. They run on the driver. Batch hooks are called for every batch, but
                only when workers report, about twice a second (docs/explanation/modes.md).
            validation_split: the fraction of rows held out if there is no ``validation_data``: the last rows
                of arrays, or a seeded random choice of the rows of an RDD, a DataFrame or a function. The
                same rows are held out in every epoch.
            validation_data: arrays (x, y) or (x, y, sample_weight), or x or (x,) for a model
                without labels; an RDD; a DataFrame; or a function if x is one. Executors evaluate
                it after the epochs that ``validation_freq`` sets.
            shuffle: whether rows are dealt to workers in a seeded random order and reordered every epoch.
            class_weight: the weight of a training row by the class of its label, an integer or a one-hot
                vector. As in Keras, only for models of one output and without sample weights.
            sample_weight: weights of the rows of arrays, shape (rows,) or one per time step; for several
                outputs a tuple or a dict, or one for all. For a DataFrame the name of the column.
            initial_epoch: the epoch at which training begins, to continue an earlier fit.
            steps_per_epoch: number of steps that one process would take per epoch; the next epoch
                continues with the remaining rows. If workers train separately, each takes its share
                of these steps. Default: all rows. As in Keras, arrays without ``batch_size`` are
                divided into this many batches.
            validation_steps: the number of batches of validation rows to evaluate, always the first ones;
                by default all. As in Keras, arrays without ``batch_size`` are divided into this many batches.
            validation_batch_size: rows per forward pass over validation rows; ``batch_size`` by default.
            validation_freq: number of epochs between evaluations, or a list of the epochs to evaluate after.
            features_col: the features column of a DataFrame; a list of columns that form one array; for
                several inputs a list, or a dict by input name.
            label_col: the label column of a DataFrame, or several in the same way; None: there is none.
            validation_indicator_col: the column of booleans that marks the rows of a DataFrame to hold out.
            seed: the seed of every random order; None draws one.
            preserve_partitions: whether each worker gets whole partitions of an RDD or a DataFrame, without
                a shuffle between workers. Partitions are divided about evenly, and each worker gets at
                least one, so ``num_workers`` is limited to their number. ``shuffle`` still reorders the
                rows of each worker every epoch.
            decode: functions by column name of a DataFrame that convert a value, such as the bytes of an
                image, to an array. Executors call them; for the first row, the driver does too.
            checkpoint: a folder for checkpoints, or a ``sparkdl.CheckpointConfig`` that also sets their
                schedule and retention. Only one run at a time can use a folder.
            resume: whether to resume from the newest checkpoint in that folder, if there is one, even in the
                middle of an epoch. Data and settings must be unchanged; docs/explanation/fault-tolerance.md
                lists the exceptions. If the model was compiled with a different learning rate than in the
                run that wrote the checkpoint, the new rate is used.
            nan: the action for rows with NaN or Inf, or with a label outside the classes of a sparse
                categorical cross-entropy: "error" or "warn". They are found before the first update.
            profile: the first and the last batch to trace on each worker, counted from 1, such as (10, 20);
                ``History.save_trace`` writes the trace.

        Returns:
            A keras.callbacks.History. Its ``training`` is a dict of counts and timings of the run, which
            prints as a summary. ``sparkdl.plot(history)`` draws the history.

        Raises:
            ConfigError: an argument cannot be honoured, or another fit is training the model.
            ModelError: the model cannot be trained on workers, or a copy that is rebuilt as on a worker gives
                different results.
            DataError: rows do not fit the model, or cannot be computed.
            CheckpointError: another run uses the folder, or has taken it over.
            ClusterError: there are too few slots, workers did not start in time, an executor's environment
                does not match, an executor cannot reach the endpoint, or the job was cancelled.
            WorkerError: training failed on an executor; the error has the worker's traceback.
            WorkerLostError: workers died or fell silent more often than ``fault_tolerance`` allows.
            TransportError: a worker lost its connection to the endpoint.
            RuleError: the merge rule failed on an update.
            DivergedError: training diverged.
            ModuleNotFoundError: a callback needs a package that is not installed.
        """
        return self._fit(
            FitArguments(
                x=x,
                y=y,
                batch_size=batch_size,
                epochs=epochs,
                verbose=verbose,
                callbacks=callbacks,
                validation_split=validation_split,
                validation_data=validation_data,
                shuffle=shuffle,
                class_weight=class_weight,
                sample_weight=sample_weight,
                initial_epoch=initial_epoch,
                steps_per_epoch=steps_per_epoch,
                validation_steps=validation_steps,
                validation_batch_size=validation_batch_size,
                validation_freq=validation_freq,
                features_col=features_col,
                label_col=label_col,
                validation_indicator_col=validation_indicator_col,
                seed=seed,
                preserve_partitions=preserve_partitions,
                decode=decode,
                checkpoint=checkpoint,
                resume=resume,
                nan=nan,
                profile=profile,
            )
        )

    def _fit(self, arguments: FitArguments) -> History:
        """Train the model, as ``fit`` does."""
        with Cleanup() as stack:
            request = build_request(self._user_model(), arguments, history := History(), stack)
            self.history, self._settled = history, request.settled
            with tracking.logged(request, arguments):
                run = self._train(request)
            # In a joint run all replicas share the optimizer's state, which is in the model.
            if not run.joint:
                self._carried = request.num_workers, keras_variables.fingerprint(self.model), run.carried
            return history

    def _train(self, request: Request) -> FitRun:
        """Carry out a request, and return its run."""
        with request.flags.applied():
            run = joint_start.first_run(request)
        try:
            run.execute()
            if (epoch := run.next_epoch) is not None:
                run = joint_start.continued(request, run, epoch)
            self._flags = request.flags
        finally:
            self.training_histories.append(getattr(self.history, "history", {}))
        return run

    def _user_model(self) -> UserModel:
        """Return the model, its settings, and the state that earlier fits left."""
        return UserModel(
            model=self.model,
            builder=self._builder,
            custom_objects=self.custom_objects,
            config=self.config,
            distribution=self.distribution,
            original=self._original,
            flags=self._flags,
            carried=self._carried,
        )

    @short
    def evaluate(  # noqa: PLR0913 - Keras's own signature
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        verbose: str | int = 0,
        sample_weight: Any = None,
        *,
        return_dict: bool = False,
        features_col: Any = "features",
        label_col: Any = "label",
        decode: dict[str, Callable[[Any], Any]] | None = None,
    ) -> Any:
        """Return the loss and the metrics over all rows, computed on the executors.

        Args:
            x: as in ``fit``.
            y: as in ``fit``.
            batch_size: rows per forward pass; 32 by default.
            verbose: accepted for compatibility with Keras; nothing is shown.
            sample_weight: as in ``fit``.
            return_dict: whether to return a dict by metric name.
            features_col: as in ``fit``.
            label_col: as in ``fit``.
            decode: as in ``fit``.

        Returns:
            The same as ``keras.Model.evaluate``: a number, a list of the loss and the metrics, or a dict.

        Raises:
            ConfigError: an argument cannot be honoured.
            ModelError: the model cannot be sent to executors, or has stateful layers, which need arrays.
            DataError: rows do not fit the model.
            ClusterError: an executor's environment does not match, an executor cannot reach the endpoint that
                serves arrays, or the job was cancelled.
            WorkerError: evaluation failed on an executor; the error has the worker's traceback.
            WorkerLostError: an executor or its Python process died.
            TransportError: an executor lost its connection to that endpoint.
        """
        source = make_source(
            (x, y, sample_weight),
            (features_col, label_col),
            signature.count_parts(self.model),
            decode=decode,
            takes=signature.takes(self.model, "test_step"),
        )
        logs, self._settled = self._inference(batch_size).evaluate(source)
        return logs if return_dict else keras_internals.metrics_in_order(self.model, logs)

    @short
    def predict(
        self,
        x: Any,
        batch_size: int | None = None,
        verbose: str | int = 0,
        *,
        features_col: Any = "features",
        output_col: str = "prediction",
        decode: dict[str, Callable[[Any], Any]] | None = None,
    ) -> Any:
        """Return the model's predictions, computed on the executors.

        Args:
            x: arrays; an RDD of x or of (x, y); or a DataFrame.
            batch_size: rows per forward pass; 32 by default.
            verbose: accepted for compatibility with Keras; nothing is shown.
            features_col: as in ``fit``.
            output_col: the name of the column that is added to a DataFrame.
            decode: as in ``fit``.

        Returns:
            For arrays, the same as ``keras.Model.predict``. For an RDD, a lazy RDD of one prediction per row,
            in the same order and partitioning. For a DataFrame, the same DataFrame with one more column: a
            float, an array of floats, or for several outputs a struct of these by output name. The rows of
            an RDD or a DataFrame are computed later; errors on executors are then raised by Spark.

        Raises:
            ConfigError: an argument cannot be honoured.
            ModelError: the model cannot be sent to executors, or has stateful layers, which need arrays.
            DataError: rows do not fit the model.
            ClusterError: an executor's environment does not match, an executor cannot reach the endpoint that
                serves arrays, or the job was cancelled.
            WorkerError: prediction failed on an executor; the error has the worker's traceback.
            WorkerLostError: an executor or its Python process died.
            TransportError: an executor lost its connection to that endpoint.
        """
        inference = self._inference(batch_size)
        count = signature.count_parts(self.model)[0]
        if isinstance(x, RDD):
            refuse_columns(decode=decode)
            return inference.predict_rdd(x, count)
        source = make_source(
            (x,), (features_col,), (count,), decode=decode, takes=signature.takes(self.model)
        )
        if isinstance(source, FrameSource):
            return inference.predict_dataframe(source, output_col)
        assert isinstance(source, ArraySource)  # noqa: S101 - nothing else is left
        return inference.predict_arrays(source)

    def _inference(self, batch_size: int | None) -> Inference:
        """Return the evaluation and prediction of the model as it is now."""
        return Inference(self._user_model(), batch_size)

    def output_shapes(self) -> Any:
        """Return the shape of one row's prediction, or a dict of shapes by output.

        Call it after ``fit`` or ``evaluate``; the shapes are not known before.
        """
        return signature.output_shapes(self.model, self._settled and self._settled.predicted)

    @short
    def save(self, path: str | os.PathLike[str], overwrite: bool = False) -> None:
        """Write the model as a plain Keras file, and the settings to a JSON file beside it.

        ``custom_objects`` and ``distribution`` are not saved. Neither are addresses, port, ``tls`` and
        ``placement``, because they depend on the machine.

        Args:
            path: a local path, or a URI of any file system that Spark can reach; ends with ".keras".
            overwrite: whether an existing model file may be replaced. The ".json" file beside it is always
                replaced.

        Raises:
            ConfigError: the path does not end with ".keras", or ``merge`` is a rule of your own or
                has an optimizer of Keras.
            FileExistsError: the model file exists, and ``overwrite`` is False.
        """
        saving.save(self.model, self.config, path, overwrite=overwrite)

    @classmethod
    @short
    def load(
        cls,
        path: str | os.PathLike[str],
        custom_objects: dict[str, Any] | None = None,
        *,
        safe_mode: bool = True,
    ) -> SparkModel:
        """Return a SparkModel that ``save`` wrote.

        Args:
            path: the path or URI of the ".keras" file.
            custom_objects: classes and functions that the model needs, by name.
            safe_mode: whether to refuse models that contain code, such as Lambda layers.

        Raises:
            ConfigError: the path does not end with ".keras", or a setting is invalid.
            FileNotFoundError: there is no such file.
            ModelError: Keras cannot restore a model from the file, or the model is not compiled.
        """
        model, values = saving.load(path, custom_objects, safe_mode=safe_mode)
        return cls(model, custom_objects=custom_objects, **values)


def load_spark_model(
    path: str | os.PathLike[str], custom_objects: dict[str, Any] | None = None, *, safe_mode: bool = True
) -> SparkModel:
    """Return a SparkModel that ``SparkModel.save`` wrote; see ``SparkModel.load``."""
    return SparkModel.load(path, custom_objects, safe_mode=safe_mode)


def to_simple_rdd(context: Any, features: Any, labels: Any) -> Any:
    """Return an RDD of (x, y) pairs from two arrays of equal length.

    Args:
        context: the SparkContext.
        features: one row per example.
        labels: one label per example.

    Raises:
        DataError: the arrays have different lengths.
    """
    arrays = array_of(features), array_of(labels)
    ArraySource(Sample.of(arrays, (1, 1)))  # checks their lengths
    return context.parallelize(list(zip(*arrays, strict=True)))
