"""MLflow's autologging logs a fit as it logs one of plain Keras; read back from its file store."""

from types import SimpleNamespace

import keras
import numpy as np
import pytest
from pyspark.ml.evaluation import MulticlassClassificationEvaluator
from pyspark.ml.tuning import CrossValidator, ParamGridBuilder

import sparkdl.mlflow
from sparkdl import SparkModel
from sparkdl.api import tracking
from sparkdl.errors import ConfigError
from sparkdl.ml import KerasEstimator

pytestmark = [pytest.mark.usefixtures("spark"), pytest.mark.backend("tensorflow")]
SETTINGS = {"batch_size": 32, "epochs": 2, "shuffle": False, "validation_split": 0.2, "verbose": 0}
LIGHT = {"log_models": False, "log_datasets": False}


@pytest.fixture
def mlflow(tmp_path, monkeypatch):
    """MLflow with a file store of its own; afterwards autologging is off and no run is active."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # a database needs more than mlflow-skinny
    mlflow = pytest.importorskip("mlflow")
    for flavor in ("keras", "pyspark.ml"):
        pytest.importorskip(f"mlflow.{flavor}")
    mlflow.set_tracking_uri((tmp_path / "runs").as_uri())
    yield mlflow
    sparkdl.mlflow.autolog(disable=True)
    mlflow.autolog(disable=True)
    mlflow.keras.autolog(disable=True)
    mlflow.pyspark.ml.autolog(disable=True)
    # Otherwise mlflow.autolog() would respect this choice.
    mlflow.utils.autologging_utils.AUTOLOGGING_INTEGRATIONS["keras"].clear()
    while mlflow.active_run():
        mlflow.end_run()


@pytest.fixture
def runs(mlflow):
    """A function that returns all runs, the oldest first."""
    return lambda: mlflow.MlflowClient().search_runs(["0"], order_by=["attributes.start_time"])


def fit(problem, model=None, **more):
    model = problem.model() if model is None else model
    return SparkModel(model, num_workers=2).fit(problem.x, problem.y, **SETTINGS | more)


def steps_of(mlflow, run, name):
    return sorted(
        (each.step, each.value) for each in mlflow.MlflowClient().get_metric_history(run.info.run_id, name)
    )


def test_a_fit_is_logged_as_that_of_keras(problem, mlflow, runs):
    """A run has the parameters, metrics, data and files that MLflow logs of plain Keras, and ours."""
    mlflow.keras.autolog(log_models=False, extra_tags={"team": "blue"})
    problem.model(keras.optimizers.SGD(0.3, name="sgd")).fit(problem.x, problem.y, callbacks=[], **SETTINGS)
    history = fit(problem, problem.model(keras.optimizers.SGD(0.3, name="sgd")))

    plain, ours = runs()
    assert {} == dict(plain.data.params.items() - ours.data.params.items())
    assert {
        "mode": "synchronous",
        "frequency": "batch",
        "num_workers": "2",
    }.items() <= ours.data.params.items()
    assert plain.data.metrics.keys() == ours.data.metrics.keys()
    for name, values in history.history.items():
        assert list(enumerate(values)) == pytest.approx(steps_of(mlflow, ours, name))
    assert [each.dataset.digest for each in plain.inputs.dataset_inputs] == [
        each.dataset.digest for each in ours.inputs.dataset_inputs
    ]
    files = mlflow.MlflowClient().list_artifacts
    assert [each.path for each in files(plain.info.run_id)] == [each.path for each in files(ours.info.run_id)]
    assert ("FINISHED", "keras", "blue") == (
        ours.info.status,
        ours.data.tags["mlflow.autologging"],
        ours.data.tags["team"],
    )


@pytest.mark.filterwarnings("ignore:.*Any type hint:UserWarning")  # of MLflow, about types of its own
def test_the_trained_model_is_logged(problem, mlflow, runs, caplog):
    """The model that `mlflow.autolog()` logs has a signature, and predicts as the trained one does."""
    mlflow.autolog(log_datasets=False, silent=True)
    model = problem.model()
    fit(problem, model, epochs=1)

    (run,) = runs()
    logged = f"runs:/{run.info.run_id}/model"
    assert [] == [each.message for each in caplog.records if each.name.startswith("sparkdl.api")]
    loaded = mlflow.keras.load_model(logged)
    np.testing.assert_array_equal(model.predict(problem.x, verbose=0), loaded.predict(problem.x, verbose=0))
    assert (-1, 6) == mlflow.models.get_model_info(logged).signature.inputs.inputs[0].shape


def test_a_run_of_the_user_is_continued(problem, mlflow, runs):
    """Fits in an active run are logged to it and leave it open; it keeps its first parameters."""
    mlflow.keras.autolog(**LIGHT)
    with mlflow.start_run() as run:
        fit(problem, epochs=1)
        fit(problem, epochs=2)

        assert run.info.run_id == mlflow.active_run().info.run_id
    assert ["1"] == [each.data.params["epochs"] for each in runs()]
    assert 3 == len(steps_of(mlflow, run, "loss"))


def test_autologging_can_leave_runs_and_fits_alone(problem, mlflow, runs):
    """With `exclusive`, `disable`, or a callback of MLflow, nothing is logged or nothing twice."""
    mlflow.keras.autolog(exclusive=True, **LIGHT)
    with mlflow.start_run():
        fit(problem, epochs=1)
    mlflow.keras.autolog(disable=True)
    fit(problem, epochs=1)
    mlflow.keras.autolog(**LIGHT)
    with mlflow.start_run():
        fit(problem, epochs=1, callbacks=[mlflow.keras.MlflowCallback()])

    first, second = runs()
    assert {} == first.data.metrics | first.data.params
    assert 1 == len(steps_of(mlflow, second, "loss"))


@pytest.mark.whole
def test_our_own_switch_leaves_keras_alone(problem, mlflow, runs):
    """`sparkdl.mlflow.autolog()` logs fits of SparkModel only, until it is turned off."""
    sparkdl.mlflow.autolog(log_every_epoch=False, log_every_n_steps=4, **LIGHT)
    problem.model().fit(problem.x, problem.y, **SETTINGS)
    fit(problem)
    sparkdl.mlflow.autolog(disable=True)
    fit(problem)

    (run,) = runs()
    assert [4, 8, 12] == [step for step, _ in steps_of(mlflow, run, "loss")]


@pytest.mark.parametrize(
    "name", ["colour", "log_input_examples", "silent", "disable_for_unsupported_versions"]
)
def test_an_argument_without_effect_is_refused(mlflow, name):
    """The error names the argument, and those that have an effect."""
    message = f"these arguments of mlflow.keras.autolog: log_every_epoch, .*; got {name}. Leave them out."
    with pytest.raises(ConfigError, match=message):
        sparkdl.mlflow.autolog(**{name: True})


def test_a_failed_fit_ends_its_run_as_failed(problem, mlflow, runs):
    """An error of training is raised as it is, and the run says that it failed."""

    def explode(epoch, logs):
        raise RuntimeError("enough")

    sparkdl.mlflow.autolog(**LIGHT)
    with pytest.raises(RuntimeError, match="enough"):
        fit(problem, callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=explode)])

    assert ["FAILED"] == [run.info.status for run in runs()]
    assert mlflow.active_run() is None


def test_an_error_of_mlflow_does_not_end_a_fit(problem, mlflow, tmp_path, caplog):
    """If the store cannot be written, one warning names the reason, and training goes on."""
    (tmp_path / "taken").write_text("a file")
    mlflow.set_tracking_uri((tmp_path / "taken").as_uri())
    sparkdl.mlflow.autolog()
    history = fit(problem)

    assert 2 == len(history.history["loss"])
    warnings = [each.message for each in caplog.records if each.name == "sparkdl.api.tracking"]
    assert ["MLflow could not start a run, and the fit goes on without it"] == [
        each.split(":")[0] for each in warnings
    ]


@pytest.mark.parametrize("name", ["active_run", "utils.autologging_utils.autologging_is_disabled"])
def test_an_error_before_a_run_does_not_end_a_fit(mlflow, monkeypatch, caplog, name):
    """If MLflow's state cannot be read, one warning names the reason, and the fit is not logged."""
    mlflow.keras.autolog()
    request = SimpleNamespace(callbacks=[])

    def fail(*arguments):
        raise mlflow.MlflowException("broken store")

    with monkeypatch.context() as patch:
        patch.setattr(f"mlflow.{name}", fail)
        with tracking.logged(request, None):
            pass

    warning = "MLflow could not say whether it logs the fit, and the fit goes on without it: "
    assert [] == request.callbacks
    assert [warning] == [each.message.split("Mlflow")[0] for each in caplog.records if "goes" in each.message]


@pytest.fixture
def estimator(problem, mlflow):
    """An estimator, while MLflow logs Spark ML and Keras."""
    mlflow.pyspark.ml.autolog(**LIGHT)
    mlflow.keras.autolog(**LIGHT)
    return KerasEstimator(model=problem.model(keras.optimizers.Adam(0.02)), numWorkers=2, epochs=1, seed=1)


def test_an_estimator_is_logged_once(estimator, frames, mlflow, runs):
    """The run of MLflow for a Spark ML estimator gets the epochs, and there is no other run."""
    estimator.fit(frames["vector"])

    (run,) = runs()
    assert "pyspark.ml" == run.data.tags["mlflow.autologging"]
    assert "2" == run.data.params["num_workers"]
    assert 1 == len(steps_of(mlflow, run, "loss"))


@pytest.mark.whole
@pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <function Pool.__del__:pytest.PytestUnraisableExceptionWarning"
)
def test_model_selection_is_logged_by_mlflow_alone(estimator, frames, runs):
    """The fits of a CrossValidator have no runs beside those that MLflow makes for its settings."""
    grid = ParamGridBuilder().addGrid(estimator.epochs, [1, 2]).build()
    evaluator = MulticlassClassificationEvaluator()
    CrossValidator(estimator=estimator, estimatorParamMaps=grid, evaluator=evaluator, numFolds=2).fit(
        frames["vector"]
    )

    assert 3 == len(runs())
    assert {"pyspark.ml"} == {each.data.tags["mlflow.autologging"] for each in runs()}


@pytest.mark.whole
def test_the_trials_of_a_search_are_child_runs(problem, mlflow, runs):
    """A search is a run with the best trial; its trials are child runs with their parameters and results."""
    pytest.importorskip("optuna")
    from sparkdl import tune

    mlflow.keras.autolog(log_datasets=False)

    def build(rate):
        return problem.model(keras.optimizers.SGD(rate))

    options = {"sampler": "grid", "pruner": "none", "epochs": 2, "validation_split": 0.2, "verbose": 0}
    result = tune.search(build, (problem.x, problem.y), {"rate": [0.01, 0.3]}, seed=1, **options)

    parent, *children = sorted(runs(), key=lambda run: "mlflow.parentRunId" in run.data.tags)
    assert {parent.info.run_id} == {run.data.tags["mlflow.parentRunId"] for run in children}
    assert {"trial 0", "trial 1"} == {run.info.run_name for run in children}
    assert {"0.01", "0.3"} == {run.data.params["rate"] for run in children}
    assert {"FINISHED"} == {run.info.status for run in (parent, *children)}
    best = next(run for run in children if run.info.run_name == f"trial {result.best_trial.number}")
    curve = result.curves()[result.best_trial.number]
    assert list(enumerate(curve)) == pytest.approx(steps_of(mlflow, best, "val_loss"))
    assert parent.data.metrics["val_loss"] == pytest.approx(result.best_value)
    assert parent.data.params["best_rate"] == str(result.best_params["rate"])
    assert {"sampler": "BruteForceSampler", "num_trials": "2"}.items() <= parent.data.params.items()
    loaded = mlflow.keras.load_model(mlflow.search_logged_models(output_format="list")[0].model_uri)
    same = loaded.predict(problem.x[:5], verbose=0), result.best_model.predict(problem.x[:5], verbose=0)
    np.testing.assert_allclose(*same, rtol=1e-6)
