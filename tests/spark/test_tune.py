"""Searches for hyper-parameters, whose trials are fits on Spark."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import keras
import numpy as np
import optuna
import pytest
from standalone import eventually

from sparkdl import SparkModel, tune
from sparkdl.callbacks import AverageWeights
from sparkdl.errors import ConfigError, SearchError
from sparkdl.tune import searching
from sparkdl.tune.side_by_side import seeded

keras_tuner = pytest.importorskip("keras_tuner")
TESTS = Path(__file__).parent
OPTIONS = {"metric": "val_loss", "validation_split": 0.25, "batch_size": 32, "verbose": 0, "seed": 5}


def build(units, rate):
    """Return a small classifier."""
    model = keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(units, "tanh"), keras.layers.Dense(3, "softmax")]
    )
    model.compile(keras.optimizers.SGD(rate), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


SPACE = {"units": [4, 8], "rate": (1e-3, 0.5, "log")}


def test_the_best_trial_is_found_and_its_model_kept(spark, problem):
    """The result has the best epoch of the best trial, its parameters, and its compiled model."""
    result = tune.search(build, (problem.x, problem.y), SPACE, num_trials=4, epochs=3, **OPTIONS)

    table, best = result.trials, result.best_trial
    assert ["complete"] * 4 == [state.replace("pruned", "complete") for state in table["state"]]
    best_epoch = result.curves()[best.number].min()
    assert table["value"].min() == result.best_value == best_epoch
    assert {"units", "rate"} == result.best_params.keys()
    held = len(problem.x) - int(len(problem.x) * 0.75)
    loss, _ = result.best_model.evaluate(problem.x[-held:], problem.y[-held:], verbose=0)
    assert loss == pytest.approx(result.best_value, rel=1e-5)
    assert "best val_loss" in repr(result)
    assert "<table>" in result._repr_html_()
    for name in ("val_loss", "accuracy"):
        assert list(table["epochs"]) == list(result.curves(name).count())
    assert result.curves("val_auc").empty


@pytest.mark.whole
@pytest.mark.parametrize("swap", [keras.callbacks.SwapEMAWeights, lambda: AverageWeights(0)])
def test_the_best_model_has_the_weights_that_were_evaluated(spark, problem, swap):
    """Callbacks that put other weights in for validation give these to the best model."""

    def averaging(rate):
        model = build(4, 0.1)
        optimizer = keras.optimizers.SGD(rate, use_ema=True, ema_momentum=0.9)
        model.compile(optimizer, "sparse_categorical_crossentropy")
        return model

    options = OPTIONS | {"epochs": 3, "callbacks": [swap()], "num_trials": 1}
    result = tune.search(averaging, (problem.x, problem.y), {"rate": [0.1]}, **options)

    held = len(problem.x) - int(len(problem.x) * 0.75)
    loss, *_ = result.best_model.evaluate(problem.x[-held:], problem.y[-held:], verbose=0)
    assert loss == pytest.approx(result.best_value, rel=1e-5)


@pytest.mark.whole
def test_a_trial_is_a_fit_of_its_model(spark, problem):
    """A trial of one worker trains its model as SparkModel.fit with the same settings does."""
    result = tune.search(
        build, (problem.x, problem.y), {"units": [4], "rate": [0.1]}, num_trials=1, epochs=2, **OPTIONS
    )

    keras.utils.set_random_seed(5)
    alone = build(4, 0.1)
    SparkModel(alone, num_workers=1, frequency="epoch").fit(
        problem.x, problem.y, 32, 2, validation_split=0.25, verbose=0, seed=5
    )
    for mine, its in zip(alone.get_weights(), result.best_model.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, its)


def test_the_pruner_ends_a_trial_after_an_epoch(spark, problem):
    """A pruned trial trains no further epoch."""
    pruner = optuna.pruners.ThresholdPruner(upper=1e-9, n_warmup_steps=2)
    result = tune.search(
        build, (problem.x, problem.y), SPACE, num_trials=2, epochs=50, pruner=pruner, **OPTIONS
    )

    assert [("pruned", 2)] * 2 == list(zip(result.trials["state"], result.trials["epochs"], strict=True))


def test_a_trial_that_reaches_its_last_epoch_is_complete(spark, problem):
    """The pruner ends no trial that has ended by itself; the kept models are those of complete trials."""
    pruner = optuna.pruners.ThresholdPruner(upper=1e-9, n_warmup_steps=1)
    result = tune.search(
        build, (problem.x, problem.y), SPACE, num_trials=1, keep=3, epochs=1, pruner=pruner, **OPTIONS
    )

    assert ["complete"] == list(result.trials["state"])
    assert 1 == len(result.best_models())
    with pytest.raises(ConfigError, match="should have kept 2 models; 1 trial completed"):
        result.best_models(2)


def test_a_grid_is_searched_once(spark, problem):
    """A grid search ends after it has tried each combination once."""
    space = {"units": [2, 4], "rate": [0.1, 0.2]}
    result = tune.search(build, (problem.x, problem.y), space, sampler="grid", pruner="none", **OPTIONS)

    assert 4 == len(result.trials) == len(result.trials[["param_units", "param_rate"]].drop_duplicates())


@pytest.mark.whole
def test_a_function_may_ask_for_its_parameters_and_set_arguments_of_fit(spark, problem):
    """Without a space the function asks for parameters; it may return arguments of fit with the model."""

    def asking(trial):
        size = trial.suggest_categorical("batch_size", [8, 64])
        return build(4, trial.suggest_float("rate", 0.1, 0.2)), {"batch_size": size, "epochs": 2}

    result = tune.search(asking, (problem.x, problem.y), num_trials=2, epochs=9, pruner="none", **OPTIONS)

    assert {"batch_size", "rate"} == result.best_params.keys()
    assert [2, 2] == list(result.trials["epochs"])


class Hyper(keras_tuner.HyperModel):
    """A model of KerasTuner, with its own fit."""

    def build(self, hp):
        return build(hp.Int("units", 4, 8), hp.Float("rate", 0.1, 0.5, sampling="log"))

    def fit(self, hp, model, *args, **kwargs):
        return model.fit(*args, **kwargs | {"batch_size": hp.Choice("batch_size", [8, 64])})


@pytest.mark.one_case
@pytest.mark.parametrize("hyper", [Hyper(), Hyper().build], ids=["a HyperModel", "its build"])
def test_keras_tuner_models_run_unchanged(spark, problem, hyper):
    """A HyperModel of KerasTuner, or its build function, works unchanged."""
    result = tune.search(hyper, (problem.x, problem.y), num_trials=2, **OPTIONS)

    asked = {"units", "rate"} | ({"batch_size"} if isinstance(hyper, Hyper) else set())
    assert asked == result.best_params.keys()


def test_an_objective_is_a_function_that_returns_a_number(spark):
    """A function that returns a number is an objective, and needs no data."""
    result = tune.search(
        lambda x: (x - 3) ** 2, space={"x": (0.0, 10.0)}, metric="loss", num_trials=30, seed=1, verbose=0
    )

    assert abs(result.best_params["x"] - 3) < 1
    with pytest.raises(ConfigError, match=r"should have kept 1 model; that of trial \d+ was not kept"):
        assert result.best_model


@pytest.mark.whole
def test_callbacks_may_refer_to_the_model_of_their_trial(spark, problem):
    """A callback that build returns with the model sees that model, and each trial and each fold its own."""
    seen = []

    class Rate(keras.callbacks.Callback):
        def __init__(self, own):
            super().__init__()
            self.own = own

        def on_epoch_end(self, epoch, logs=None):
            seen.append(self.own is self.model)

    def with_callback(rate):
        model = build(4, rate)
        return model, {"callbacks": [Rate(model)]}

    for function in (with_callback, tune.cross_validated(with_callback, 2)):
        options = {"metric": "loss", "num_trials": 1, "verbose": 0, "batch_size": 32}
        tune.search(function, (problem.x, problem.y), {"rate": [0.1]}, **options)

    assert [True] * 3 == seen


def test_a_grid_without_a_space_is_searched_as_a_whole(spark, capsys):
    """A grid whose size is not known in advance is searched until its combinations have been tried."""
    options = {"sampler": "grid", "metric": "loss", "parallelism": 1, "dashboard": False, "verbose": 2}
    result = tune.search(lambda hp: hp.Int("a", 1, 5) * hp.Int("b", 1, 5), **options)

    assert 25 == len(result.trials)
    assert "(25)" in capsys.readouterr().out


def test_an_objective_runs_with_the_callers_policy_and_seed(spark):
    """An objective has the caller's dtype policy, and with a seed, initial weights that can be reproduced."""
    found = []

    def objective(a):
        layer = keras.layers.Dense(1)
        layer.build((None, 2))
        found.append((layer.compute_dtype, layer.get_weights()[0].tolist()))
        return a

    before, state = keras.config.dtype_policy(), random.getstate()
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        for _ in range(2):
            options = {"space": {"a": [1.0]}, "num_trials": 2, "parallelism": 1, "seed": 3, "verbose": 0}
            tune.search(objective, **options)
    finally:
        keras.config.set_dtype_policy(before)

    assert ["bfloat16"] * 4 == [dtype for dtype, _ in found]
    assert found[:2] == found[2:]
    assert found[0] != found[1]
    assert state == random.getstate()


def test_a_trial_that_fails_is_recorded_and_others_go_on(spark, problem):
    """A failed trial has its reason and its traceback; the other trials are searched."""

    def failing(units, rate):
        if units == 2:
            raise LookupError("no such layer")
        return build(units, rate)

    space = {"units": [2, 4], "rate": [0.1, 0.2]}
    result = tune.search(failing, (problem.x, problem.y), space, num_trials=4, sampler="grid", **OPTIONS)

    failed = result.trials[result.trials["state"] == "failed"]
    assert {2} == set(failed["param_units"])
    assert {"LookupError: no such layer"} == set(failed["reason"])
    assert "no such layer" in result.study.trials[int(failed["number"].iloc[0])].user_attrs["traceback"]


@pytest.mark.parametrize(
    ("returned", "reason"),
    [
        (
            None,
            "build should return a compiled keras.Model, a model with a dict of arguments of fit, or a",
        ),
        (float("nan"), "The value of the trial is NaN."),
        ("a model", "build should return a compiled keras.Model"),
    ],
)
def test_results_that_are_none_end_the_search(spark, returned, reason):
    """If the first trials fail one after the other, the error has the reason of the last one."""
    with pytest.raises(SearchError, match="The first 3 trials failed, the last one with") as caught:
        tune.search(lambda x: returned, space={"x": (0, 9)}, metric="loss", parallelism=1, verbose=0)
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"space": {}}, "space should be a dict"),
        ({"sampler": "best"}, "sampler should be one of 'tpe'"),
        ({"pruner": "best"}, "pruner should be one of 'median'"),
        (
            {"parallelism": 3},
            "3 trials at a time, with 1 worker each, would use 3 slots",
        ),
        (
            {"workers_per_trial": 4},
            "1 trial at a time, with 4 workers each, would use 4 slots",
        ),
        ({"num_trials": 0}, "num_trials should be a whole number of at least 1; got 0."),
        ({"keep": 0}, "keep should be a whole number of at least 1; got 0."),
        ({"metric": "val_mine"}, "Whether a smaller val_mine is better is not known"),
        ({"featuresCol": "x"}, "search takes no argument 'featuresCol'"),
        ({"settings": {"num_workers": 2}}, "settings take no 'num_workers'"),
        ({"storage": "rubbish", "study_name": "a"}, "The storage 'rubbish' cannot be used"),
        ({"seed": -1}, "seed should be a whole number of at least 0; got -1."),
        ({"seed": 2**33}, "seed should be a whole number from 0 to 4294967295; got 8589934592."),
        ({"checkpoint": "runs"}, "search takes no argument 'checkpoint'"),
        ({"storage": optuna.create_study(directions=["minimize"] * 2)}, "has minimize and minimize"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_bad_arguments_are_refused_before_a_trial(spark, problem, arguments, message):
    """Bad arguments raise a ConfigError that names them, and no trial is begun."""
    called = []
    with pytest.raises(ConfigError) as caught:
        tune.search(called.append, (problem.x, problem.y), **{"space": SPACE} | OPTIONS | arguments)
    assert message in str(caught.value)
    assert not called


def test_a_metric_of_validation_needs_validation_rows(spark, problem):
    """A search whose metric is a result of validation ends before the first fit if there are no such rows."""
    begun = []
    watch = keras.callbacks.LambdaCallback(on_train_begin=begun.append)
    with pytest.raises(ConfigError, match="metric='val_loss' needs validation rows"):
        tune.search(build, (problem.x, problem.y), SPACE, num_trials=2, callbacks=[watch], verbose=0)

    assert [] == begun


def test_a_build_that_is_no_function_is_refused(spark, problem):
    """A compiled model is refused in place of a function that builds it."""
    for given in (5, build(4, 0.1)):
        with pytest.raises(ConfigError, match="build should be a function, or a HyperModel of KerasTuner"):
            tune.search(given, (problem.x, problem.y), SPACE, **OPTIONS)


@pytest.mark.whole
def test_a_metric_that_is_no_result_ends_the_search(spark, problem):
    """The error for an unknown metric lists the results of an epoch."""
    with pytest.raises(ConfigError, match=r"metric should be a result of an epoch \(accuracy, loss, val_acc"):
        tune.search(build, (problem.x, problem.y), SPACE, **OPTIONS | {"metric": "val_auc"})


@pytest.mark.whole
def test_the_best_models_are_kept_in_a_folder(spark, problem, tmp_path):
    """The files of the best models are kept, the best model first, also for a later search of the study."""
    storage = f"sqlite:///{tmp_path}/study.db"
    options = OPTIONS | {
        "storage": storage,
        "study_name": "a",
        "directory": str(tmp_path / "best"),
        "keep": 2,
    }
    options |= {"pruner": "none"}
    first = tune.search(build, (problem.x, problem.y), SPACE, num_trials=3, **options)
    before = len(first.trials)
    again = tune.search(build, (problem.x, problem.y), SPACE, num_trials=4, **options)

    best = sorted((trial.value, trial.number) for trial in again.study.trials)
    assert 2 == len(list((tmp_path / "best").rglob("*.keras")))
    assert (3, 4) == (before, len(again.trials))
    for model, (value, _) in zip(again.best_models(2), best[:2], strict=True):
        held = len(problem.x) - int(len(problem.x) * 0.75)
        loss, _ = model.evaluate(problem.x[-held:], problem.y[-held:], verbose=0)
        assert loss == pytest.approx(value, rel=1e-5)
    with pytest.raises(ConfigError, match=r"should have kept 3 models; that of trial \d was not kept"):
        again.best_models(3)


@pytest.mark.whole
def test_trials_of_several_workers(spark, problem):
    """A trial can train with several workers."""
    result = tune.search(
        build, (problem.x, problem.y), SPACE, num_trials=2, workers_per_trial=2, pruner="none", **OPTIONS
    )

    assert ["complete"] * 2 == list(result.trials["state"])


@pytest.mark.whole
def test_a_study_of_the_users_own_is_used(spark, problem):
    """A study of Optuna holds the trials, also after the search."""
    study = optuna.create_study(direction="minimize")
    tune.search(build, (problem.x, problem.y), SPACE, num_trials=2, storage=study, **OPTIONS)

    assert 2 == len(study.trials)


@pytest.mark.whole
def test_a_trial_that_a_dead_driver_left_is_repeated(spark, problem):
    """A trial that was under way when its driver died is tried again with its parameters."""
    study = optuna.create_study()
    left = study.ask({"units": optuna.distributions.CategoricalDistribution([4, 8])})
    result = tune.search(
        build_of_units, (problem.x, problem.y), {"units": [4, 8]}, num_trials=1, storage=study, **OPTIONS
    )

    table = result.trials
    assert ["repeated", "complete"] == list(table["state"])
    assert [left.params["units"]] * 2 == list(table["param_units"])


def build_of_units(units):
    """Return a small classifier with a fixed learning rate."""
    return build(units, 0.1)


def test_figures_of_a_search(spark, problem):
    """Each figure of Optuna is drawn; an unknown one is refused with the known ones."""
    result = tune.search(build, (problem.x, problem.y), SPACE, num_trials=4, pruner="none", **OPTIONS)

    for figure in ("history", "curves", "parallel"):
        assert result.plot(figure).data
    with pytest.raises(ConfigError, match="figure should be one of 'history', 'curves'"):
        result.plot("pie")


@pytest.mark.one_case
@pytest.mark.parametrize(
    "own", [{}, {"epochs": 1}, {"validation_split": 0.5}], ids=["none", "epochs", "rows"]
)
def test_executors_store_the_arrays_of_a_search_once(spark, problem, monkeypatch, own):
    """An executor keeps the arrays for all trials that use the same rows, and deletes them at the end."""
    folder = Path(spark.sparkContext.getConf().get("spark.local.dir"))

    def kept():
        return {path.name for path in folder.rglob("sparkdl-rows-*")}

    def run():
        return tune.search(
            lambda units, rate: (build(units, rate), own),
            (problem.x, problem.y),
            SPACE,
            num_trials=4,
            **OPTIONS,
        )

    before = kept()
    result = run()
    assert before == kept()
    monkeypatch.setattr(searching, "_forget", lambda *arguments: None)
    again = run()

    assert int("validation_split" not in own) == len(kept() - before)
    assert 4 == len(result.trials) == len(again.trials)


def test_an_objective_may_end_its_trial_itself(spark):
    """An objective that reports and raises TrialPruned ends its trial, not the search."""

    def objective(trial):
        value = trial.suggest_float("x", 0.0, 1.0)
        trial.report(value, 1)
        if trial.number % 2:
            raise optuna.TrialPruned
        return value

    result = tune.search(objective, metric="loss", num_trials=4, parallelism=1)

    assert ["complete", "pruned"] * 2 == list(result.trials["state"])


def test_rows_may_have_weights(spark, problem):
    """The third array of the data has the sample weights of the rows."""
    weights = np.zeros(len(problem.x), "float32")
    options = OPTIONS | {"metric": "loss", "validation_split": 0.0}
    result = tune.search(build, (problem.x, problem.y, weights), SPACE, num_trials=1, **options)

    assert 0.0 == result.best_value
    with pytest.raises(ConfigError, match=r"data should be \(x, y\) or \(x, y, sample_weight\); got 4"):
        tune.search(build, (problem.x,) * 4, SPACE, **options)


@pytest.mark.whole
def test_each_trial_has_callbacks_of_its_own(spark, problem):
    """Trials that run side by side do not share the state of callbacks."""
    stopping = keras.callbacks.EarlyStopping("val_loss", patience=0, min_delta=10.0)
    result = tune.search(
        build,
        (problem.x, problem.y),
        SPACE,
        num_trials=4,
        epochs=9,
        pruner="none",
        callbacks=[stopping],
        **OPTIONS,
    )

    assert [2] * 4 == list(result.trials["epochs"])
    assert not hasattr(stopping, "model") or stopping.model is None


@pytest.mark.whole
def test_a_model_may_begin_with_layers_of_another(spark, problem):
    """A function may add layers to a model that was made before the search, with default names."""
    keras.layers.Dense(1)
    base = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4, "tanh")])

    def extended(rate):
        copy = keras.models.clone_model(base)
        outputs = keras.layers.Dense(3, "softmax")(copy.outputs[0])
        model = keras.Model(copy.inputs, outputs)
        model.compile(keras.optimizers.SGD(rate), "sparse_categorical_crossentropy")
        return model

    result = tune.search(extended, (problem.x, problem.y), {"rate": (0.01, 0.1)}, num_trials=2, **OPTIONS)

    assert "failed" not in set(result.trials["state"])


@pytest.mark.whole
def test_studies_in_one_folder_keep_their_models_apart(spark, problem, tmp_path):
    """Two studies with one folder keep their own best models; of equal trials the earlier one is the best."""
    options = OPTIONS | {"directory": str(tmp_path), "num_trials": 2, "pruner": "none", "parallelism": 1}
    space = {"units": [4], "rate": [0.1]}
    results = [
        tune.search(build, (problem.x, problem.y), space, **options | {"seed": seed}) for seed in (1, 2)
    ]

    for result in results:
        held = len(problem.x) - int(len(problem.x) * 0.75)
        loss, _ = result.best_model.evaluate(problem.x[-held:], problem.y[-held:], verbose=0)
        assert loss == pytest.approx(result.best_value, rel=1e-5)
    assert results[0].best_value != results[1].best_value


def test_an_exit_in_an_objective_ends_the_search(spark):
    """SystemExit in a trial's thread is raised by the search."""
    with pytest.raises(SystemExit):
        tune.search(lambda trial: sys.exit(3), metric="loss", num_trials=2, verbose=0)


def lines_of(path):
    return path.read_text().splitlines() if path.exists() else []


@pytest.mark.whole
@pytest.mark.parametrize("ended", [signal.SIGKILL, signal.SIGINT], ids=["killed", "interrupted"])
def test_a_search_whose_driver_ended_goes_on(tmp_path, ended):
    """After the driver is killed or interrupted, the study is resumed; no finished trial runs again."""
    storage, built = f"sqlite:///{tmp_path}/study.db", tmp_path / "built"
    command = [sys.executable, str(TESTS / "searched.py"), storage, str(tmp_path / "best"), str(built)]
    environment = os.environ | {"PYTHONPATH": str(TESTS.parents[1])}
    with open(tmp_path / "log", "w") as log:
        driver = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        assert eventually(lambda: len(lines_of(built)) >= 4, 120), (tmp_path / "log").read_text()
        began = time.monotonic()
        driver.send_signal(ended)
        driver.wait(60)
        if ended is signal.SIGINT:
            assert time.monotonic() - began < 30
            assert "KeyboardInterrupt" in (tmp_path / "log").read_text()
        done = {trial.number for trial in studied(storage) if trial.state.is_finished()}
        subprocess.run(command, env=environment, check=True, stdout=log, stderr=log, timeout=300)

    trials = studied(storage)
    repeated = {trial.user_attrs["repeats"] for trial in trials if "repeats" in trial.user_attrs}
    counted = [trial for trial in trials if trial.number not in repeated]
    assert 8 == len(counted)
    assert {"COMPLETE"} == {trial.state.name for trial in counted}
    assert len(lines_of(built)) == len(trials)
    assert done
    assert 1 == len(list((tmp_path / "best").rglob("*.keras")))


def studied(storage):
    return optuna.load_study(storage=storage, study_name="study").trials


def test_the_table_of_trials_is_a_spark_dataframe(spark, problem):
    """A Spark DataFrame has the rows of the pandas table; parameters of several types are strings."""

    def asked(parameters):
        units = parameters.suggest_categorical("units", [4, 8])
        if units == 8:
            parameters.suggest_categorical("extra", [1, "many", None])
        return build(units, 0.1)

    result = tune.search(asked, (problem.x, problem.y), num_trials=4, sampler="grid", **OPTIONS)
    table, frame = result.trials, result.to_spark()

    assert list(table.columns) == frame.columns
    rows = {row["number"]: row for row in frame.collect()}
    for name in ("state", "value", "param_units"):
        assert list(table[name]) == [rows[number][name] for number in table["number"]]
    assert {"1", "many", None} == {row["param_extra"] for row in rows.values()}


def test_a_hyper_model_may_leave_the_callbacks_out(spark, problem):
    """A fit without the callbacks of the search counts with the History that it returns."""

    class Own(keras_tuner.HyperModel):
        def build(self, hp):
            return build(hp.Choice("units", [4, 8]), 0.1)

        def fit(self, hp, model, x, y, **arguments):
            return model.fit(x, y, epochs=2, validation_split=0.25, verbose=0)

    result = tune.search(Own(), (problem.x, problem.y), num_trials=1, **OPTIONS)

    assert ["complete"] == list(result.trials["state"])
    assert 0 < result.best_value < 5


def test_a_hyper_model_may_have_a_loop_of_its_own(spark, problem):
    """A loop that calls the callbacks itself reports its epochs, and its best weights are kept."""

    class Own(keras_tuner.HyperModel):
        def build(self, hp):
            return build(4, hp.Float("rate", 0.1, 0.2))

        def fit(self, hp, model, x, y, callbacks=None, **arguments):
            for callback in callbacks:
                callback.set_model(model)
            for epoch, loss in enumerate([0.5, 0.25, 0.75]):
                model.model.set_weights([weight * 0 + epoch for weight in model.model.get_weights()])
                for callback in callbacks:
                    callback.on_epoch_end(epoch, {"val_loss": loss})
            return 0.25

    result = tune.search(Own(), (problem.x, problem.y), num_trials=1, **OPTIONS)

    assert [("complete", 0.25, 3, 2)] == [
        tuple(row)
        for row in result.trials[["state", "value", "epochs", "best_epoch"]].itertuples(index=False)
    ]
    assert 1.0 == result.best_model.get_weights()[0].max()


CROSS = {"metric": "val_loss", "batch_size": 32, "verbose": 0, "seed": 5}


@pytest.mark.one_case
@pytest.mark.parametrize("kind", ["arrays", "rdd", "dataframe"])
def test_a_cross_validated_trial_is_the_mean_of_its_folds(spark, problem, frames, kind):
    """The curve of a trial is the mean of as many fits as there are folds, each validated on its own fold."""
    pairs = list(zip(problem.x, problem.y, strict=True))
    rows = {
        "arrays": lambda: (problem.x, problem.y),
        "rdd": lambda: spark.sparkContext.parallelize(pairs, 3),
        "dataframe": lambda: frames["array"],
    }[kind]()
    result = tune.search(
        tune.cross_validated(build, 3), rows, {"units": [4], "rate": [0.1]}, num_trials=1, epochs=2, **CROSS
    )

    curves = result.curves("val_loss")[0]
    assert 2 == len(curves)
    assert curves.min() == result.best_value
    assert [3] == [len(trial.intermediate_values) for trial in result.study.trials]
    with pytest.raises(ConfigError, match="that of trial 0 was not kept"):
        result.best_models(1)
    if kind == "arrays":
        folds = rows_of_folds(problem, 3, 5)
        losses = []
        for held in folds:
            outside = np.setdiff1d(np.arange(len(problem.x)), held)
            with seeded(5):
                model = build(4, 0.1)
            fit = SparkModel(model, num_workers=1, frequency="epoch").fit(
                problem.x[outside],
                problem.y[outside],
                validation_data=(problem.x[held], problem.y[held]),
                epochs=2,
                batch_size=32,
                seed=5,
                verbose=0,
            )
            losses.append(fit.history["val_loss"])
        assert np.mean(losses, axis=0) == pytest.approx(curves.tolist())


def rows_of_folds(problem, count, seed):
    return np.array_split(np.random.default_rng(seed).permutation(len(problem.x)), count)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"folds": 1}, "folds should be a whole number of at least 2; got 1"),
        ({"folds": 10_000}, "folds should be at most the number of rows"),
        ({"build": 5}, "build should be a function"),
        ({"build": keras.Sequential()}, "build should be a function"),
        ({"data": None}, "cross_validated needs rows; got none"),
        ({"data": lambda worker, workers: []}, "cross_validated needs arrays, an RDD or a DataFrame"),
        ({"validation_split": 0.2}, "validation_split should be left out"),
        ({"validation_data": (1, 2)}, "validation_data should be left out"),
    ],
)
def test_rows_without_folds_are_refused(spark, problem, arguments, message):
    """Arguments with which a trial cannot be cross-validated are refused before the first trial."""
    given = {"build": build, "folds": 3, "data": (problem.x, problem.y)} | arguments
    more = {name: given.pop(name) for name in ("validation_split", "validation_data") if name in given}
    with pytest.raises(ConfigError, match=message):
        tune.search(
            tune.cross_validated(given["build"], given["folds"]), given["data"], SPACE, **CROSS | more
        )


def test_the_pruner_ends_a_cross_validated_trial_after_a_fold(spark, problem):
    """A trial that the pruner rejects trains no further fold."""
    fits = []

    class Count(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            fits.append(1)

        def __deepcopy__(self, memo):
            return self

    result = tune.search(
        tune.cross_validated(build, 4),
        (problem.x, problem.y),
        {"units": [4], "rate": [0.1]},
        num_trials=1,
        pruner=optuna.pruners.ThresholdPruner(upper=0.0),
        callbacks=[Count()],
        **CROSS,
    )

    assert ["pruned"] == list(result.trials["state"])
    assert 1 == len(fits)


def test_an_objective_needs_no_metric(spark):
    """A search for the minimum of a function needs neither data nor a metric."""
    result = tune.search(lambda x: (x - 3) ** 2, space={"x": [1, 3, 5]}, sampler="grid", verbose=0)

    assert {"x": 3} == result.best_params


def test_a_function_may_hold_out_rows_itself(spark, problem):
    """The function may return validation_split for the fit of its model."""

    def asked(parameters):
        return build(4, 0.1), {"validation_split": parameters.suggest_categorical("held", [0.25, 0.5])}

    result = tune.search(asked, (problem.x, problem.y), num_trials=1, verbose=0)

    assert 0 < result.best_value
