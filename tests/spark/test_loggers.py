"""The callbacks of wandb, MLflow, tqdm, TensorBoard, Optuna and KerasTuner work as in plain Keras."""

import io

import keras
import numpy as np
import pytest

from sparkdl import SparkModel
from sparkdl.callbacks import WorkerScalars
from sparkdl.transport.messages import ACTIVITIES

pytestmark = [pytest.mark.usefixtures("spark"), pytest.mark.backend("tensorflow")]
LONG = 100_000  # rows of an epoch that takes a second or more
SETTINGS = {"batch_size": 32, "epochs": 2, "shuffle": False, "validation_split": 0.2, "verbose": 0}
STEPS = 6  # of 162 rows


def whole(value):
    return pytest.param(value, marks=pytest.mark.whole)


def fit(problem, *callbacks):
    return SparkModel(problem.model(), num_workers=2).fit(
        problem.x, problem.y, callbacks=list(callbacks), **SETTINGS
    )


@pytest.fixture
def wandb_run(tmp_path, monkeypatch):
    """An offline run of wandb that records its calls of `log`."""
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    run = wandb.init(mode="offline", dir=tmp_path, project="sparkdl")
    yield wandb
    run.finish()


@pytest.mark.parametrize("log_freq", ["epoch", whole("batch"), 3])
def test_wandb_has_each_epoch_and_batch(problem, wandb_run, monkeypatch, log_freq):
    """WandbMetricsLogger logs the values of History, and every batch that it counts."""
    from wandb.integration.keras import WandbMetricsLogger

    logged = []
    log = wandb_run.run.log
    monkeypatch.setattr(wandb_run, "log", lambda data, **more: logged.append(data) or log(data, **more))
    history = fit(problem, WandbMetricsLogger(log_freq=log_freq))

    epochs = [data for data in logged if "epoch/epoch" in data]
    batches = [data["batch/batch_step"] for data in logged if "batch/batch_step" in data]
    assert history.history["val_loss"] == [data["epoch/val_loss"] for data in epochs]
    assert [0, 1] == [data["epoch/epoch"] for data in epochs]
    assert {"epoch": [], "batch": list(range(2 * STEPS)), 3: [0, 3, 6, 9]}[log_freq] == batches
    assert history.history["loss"][1] == pytest.approx(wandb_run.run.summary["epoch/loss"])


@pytest.mark.whole
@pytest.mark.parametrize("flavor", ["keras", whole("tensorflow")])
def test_mlflow_has_each_epoch(problem, tmp_path, monkeypatch, flavor):
    """MlflowCallback logs metrics per epoch or every few batches, and the optimizer's settings."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # a database needs more than mlflow-skinny
    mlflow = pytest.importorskip("mlflow")
    callback = pytest.importorskip(f"mlflow.{flavor}").MlflowCallback
    mlflow.set_tracking_uri((tmp_path / "runs").as_uri())
    client = mlflow.MlflowClient()

    with mlflow.start_run() as run:
        history = fit(problem, callback())
    with mlflow.start_run() as other:
        fit(problem, callback(log_every_epoch=False, log_every_n_steps=4))

    for name in ("loss", "val_loss"):
        values = [(entry.step, entry.value) for entry in client.get_metric_history(run.info.run_id, name)]
        assert list(enumerate(history.history[name])) == pytest.approx(sorted(values))
    steps = [entry.step for entry in client.get_metric_history(other.info.run_id, "loss")]
    assert [4, 8, 12] == sorted(steps)
    assert "0.3" in str(client.get_run(run.info.run_id).data.params)


@pytest.mark.one_case
@pytest.mark.parametrize("verbose", [whole(0), 1, 2])
def test_tqdm_counts_each_batch_and_epoch(problem, verbose):
    """TqdmCallback's bars reach their ends and know the number of batches in an epoch."""
    tqdm = pytest.importorskip("tqdm.keras")
    callback = tqdm.TqdmCallback(verbose=verbose, file=io.StringIO())
    seen = []
    watch = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: seen.append((callback.batch_bar.n, callback.batch_bar.total))
    )

    fit(problem, callback, *[watch] * (verbose > 0))

    assert (2, 2) == (callback.epoch_bar.n, callback.epoch_bar.total)
    assert [(STEPS, STEPS)] * (2 * (verbose > 0)) == seen


@pytest.mark.one_case
@pytest.mark.parametrize("update_freq", ["epoch", whole("batch"), 4])
def test_tensorboard_has_what_it_has_in_keras(problem, tmp_path, update_freq):
    """TensorBoard's own reader finds the same epochs and batches; results of epochs are History's."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    tensorflow = pytest.importorskip("tensorflow")
    history = fit(problem, keras.callbacks.TensorBoard(tmp_path / "ours", update_freq=update_freq))
    plain = keras.callbacks.TensorBoard(tmp_path / "theirs", update_freq=update_freq)
    problem.model().fit(problem.x, problem.y, callbacks=[plain], **SETTINGS)

    def written(folder, part):
        events = reader.EventAccumulator(str(tmp_path / folder / part), {"tensors": 0}).Reload()
        names = [name for name in events.Tags()["tensors"] if name.startswith(("batch_", "epoch_"))]
        return {
            (name, event.step): float(tensorflow.make_ndarray(event.tensor_proto))
            for name in names
            for event in events.Tensors(name)
        }

    for part, prefix in [("train", ""), ("validation", "val_")]:
        ours, theirs = written("ours", part), written("theirs", part)
        assert theirs.keys() == ours.keys()
        for (name, epoch), value in ours.items():
            if name == "epoch_loss":
                assert history.history[f"{prefix}loss"][epoch] == pytest.approx(value)
    assert ("epoch_loss", 1) in written("ours", "train")


def test_tensorboard_has_the_graph_and_the_merged_weights(problem, tmp_path):
    """The histograms of an epoch are those of the merged weights, and the graph is that of the model."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    tensorflow = pytest.importorskip("tensorflow")
    means = []
    model = problem.model()
    watch = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: means.append(float(np.mean(model.layers[0].kernel)))
    )
    SparkModel(model, num_workers=2).fit(
        problem.x,
        problem.y,
        callbacks=[watch, keras.callbacks.TensorBoard(tmp_path, histogram_freq=1, write_graph=True)],
        **SETTINGS,
    )

    events = reader.EventAccumulator(str(tmp_path / "train"), {"tensors": 0}).Reload()
    (name,) = [name for name in events.Tags()["tensors"] if name.endswith("hidden/kernel/histogram")]
    drawn = {each.step: tensorflow.make_ndarray(each.tensor_proto) for each in events.Tensors(name)}
    for epoch, buckets in drawn.items():  # left and right edge, and number of values
        center = np.average(buckets[:, :2].mean(1), weights=buckets[:, 2])
        assert means[epoch] == pytest.approx(center, abs=float(np.max(buckets[:, 1] - buckets[:, 0])))
    assert [0, 1] == list(drawn)
    assert "keras" in events.Tags()["tensors"]


@pytest.mark.whole
@pytest.mark.parametrize("settings", [{}, {"mode": "asynchronous"}], ids=["synchronous", "asynchronous"])
def test_worker_scalars_are_beside_those_of_tensorboard(problem, tmp_path, settings):
    """Each worker has a run of its own, whose results add up to those of the fit."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    tensorflow = pytest.importorskip("tensorflow")
    board = keras.callbacks.TensorBoard(tmp_path, update_freq=4)
    # An epoch that takes longer than a heartbeat, which sends the times.
    x, y = (np.repeat(part, LONG // len(part), axis=0) for part in (problem.x, problem.y))
    model = problem.model()
    model.optimizer.learning_rate = 0.001
    history = SparkModel(model, num_workers=2, **settings).fit(
        x, y, callbacks=[board, WorkerScalars(tmp_path)], **SETTINGS
    )

    assert {"train", "validation", "worker-0", "worker-1"} == {each.name for each in tmp_path.iterdir()}
    losses = []
    for worker in history.run["workers"]:
        folder = str(tmp_path / f"worker-{worker['worker']}")
        events = reader.EventAccumulator(folder, {"tensors": 0}).Reload()
        values = {
            tag: {
                each.step: float(tensorflow.make_ndarray(each.tensor_proto)) for each in events.Tensors(tag)
            }
            for tag in events.Tags()["tensors"]
        }
        seconds = [sum(values.get(f"worker/seconds_{activity}", {}).values()) for activity in ACTIVITIES]
        # The record also has what the workers sent after the last epoch.
        assert sum(seconds) > 0
        assert all(0 <= part <= 1.00001 * whole for part, whole in zip(seconds, worker["times"], strict=True))
        assert (worker["staleness"] is not None) == ("worker/staleness" in values)
        losses.append(values["epoch_loss"])
    rows = history.training["worker_rows"]
    for epoch, loss in enumerate(history.history["loss"]):
        assert loss == pytest.approx(np.average([each[epoch] for each in losses], weights=rows), rel=1e-4)


def test_optuna_prunes_by_the_results_of_epochs(problem):
    """KerasPruningCallback reports each epoch to its trial, and a pruned trial ends the fit."""
    optuna = pytest.importorskip("optuna")
    callback = pytest.importorskip("optuna_integration").KerasPruningCallback
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(pruner=optuna.pruners.ThresholdPruner(upper=10.0, n_warmup_steps=0))

    def objective(trial):
        model = problem.model(keras.optimizers.SGD(trial.suggest_categorical("rate", [0.3, 1e9])))
        history = SparkModel(model, num_workers=2).fit(
            problem.x, problem.y, callbacks=[callback(trial, "val_loss")], **SETTINGS
        )
        return history.history["val_loss"][-1]

    for rate in (0.3, 1e9):
        study.enqueue_trial({"rate": rate})
    study.optimize(objective, n_trials=2)

    good, bad = study.trials
    assert (2, good.intermediate_values[1]) == (len(good.intermediate_values), good.value)
    assert ("PRUNED", 1) == (bad.state.name, len(bad.intermediate_values))


@pytest.mark.whole
@pytest.mark.filterwarnings("ignore:(currentThread|getName):DeprecationWarning")  # of keras-tuner 1.4
def test_keras_tuner_finds_the_better_model(problem, tmp_path):
    """A HyperModel whose fit is that of SparkModel is searched, and the best model is kept."""
    tuner_package = pytest.importorskip("keras_tuner")
    scores = {}

    class Tuned(tuner_package.HyperModel):
        def build(self, hp):
            return problem.model(keras.optimizers.SGD(hp.Choice("rate", [1e-6, 0.3])))

        def fit(self, hp, model, *args, **kwargs):
            history = SparkModel(model, num_workers=2).fit(*args, **kwargs)
            scores[hp.get("rate")] = min(history.history["val_loss"])
            return history

    tuner = tuner_package.GridSearch(Tuned(), "val_loss", directory=tmp_path)
    tuner.search(problem.x, problem.y, **SETTINGS)

    (best,) = tuner.get_best_models()
    rows = problem.x[-41:], problem.y[-41:]  # the validation rows
    assert 0.3 == tuner.get_best_hyperparameters()[0].get("rate")
    assert scores[0.3] == pytest.approx(tuner.oracle.get_best_trials()[0].score)
    assert scores[0.3] == pytest.approx(best.evaluate(*rows, verbose=0)[0], rel=1e-5)


def test_the_progress_bar_of_keras_takes_the_place_of_ours(problem, capsys):
    """With ProgbarLogger among the callbacks, each epoch's steps and results are drawn once."""
    SparkModel(problem.model(), num_workers=2).fit(
        problem.x, problem.y, callbacks=[keras.callbacks.ProgbarLogger()], **SETTINGS | {"verbose": 2}
    )

    out = capsys.readouterr().out
    assert 2 == out.count(f"{STEPS}/{STEPS} - ")
    assert "val_loss" in out
    assert "rows/s" not in out
