"""The reports of a trial: which epochs are reported, the best one, and the mean of folds."""

import math
import threading
from types import SimpleNamespace

import keras
import numpy as np
import optuna
import pytest

from sparkdl.callbacks import AverageWeights
from sparkdl.errors import ConfigError
from sparkdl.tune.report import FoldReport, TrialReport

optuna.logging.set_verbosity(optuna.logging.WARNING)


def report_of(kind=TrialReport, metric="val_loss", *, pruner=None, **options):
    """Return the report of a new trial, for a model with one weight."""
    study = optuna.create_study(pruner=pruner or optuna.pruners.NopPruner())
    options = {"maximize": False, "stopping": threading.Event(), "reported": lambda *given: None} | options
    report = kind(study.ask(), metric, **options)
    report.set_params({"epochs": 6})
    report.set_model(keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)]))
    return report


def run(report, results):
    """Call the report at the end of each epoch, with the weight set to the epoch, counted from 1."""
    for epoch, logs in enumerate(results):
        report.model.set_weights([np.array([[epoch + 1.0]])])
        report.on_epoch_begin(epoch)
        report.on_epoch_end(epoch, logs)


def losses(*values):
    """Return the results of epochs that were validated, or not where the value is None."""
    return [{"loss": 1.0} | ({} if value is None else {"val_loss": value}) for value in values]


def test_epochs_without_the_metric_are_not_reported():
    """With validation in some epochs only, the trial reports these, and its best epoch is one of them."""
    report = report_of()
    run(report, losses(None, 0.5, None, 0.3, None, 0.4))

    assert (0.3, 4) == (report.best, report.best_epoch)
    assert {2: 0.5, 4: 0.3, 6: 0.4} == report.trial.study.trials[0].intermediate_values
    assert [[4.0]] == report.weights[0].tolist()
    np.testing.assert_equal(report.results["val_loss"], [math.nan, 0.5, math.nan, 0.3, math.nan, 0.4])
    assert [1.0] * 6 == report.results["loss"]


@pytest.mark.parametrize("metric", ["val_auc", "auc", "val_mine"])
def test_a_metric_that_no_epoch_has_is_refused(metric):
    """The error for a metric that is not a result comes after the first epoch that should have it."""
    report = report_of(metric=metric)
    with pytest.raises(
        ConfigError, match=r"metric should be a result of an epoch \(.*loss.*\); got"
    ) as raised:
        run(report, losses(None, 0.5))

    assert raised.value is report.refusal


def test_a_metric_of_an_epoch_that_is_never_validated_is_refused():
    """If no epoch was validated, the error comes at the end of the fit."""
    report = report_of()
    run(report, losses(None, None))

    with pytest.raises(ConfigError, match=r"metric should be a result of an epoch \(loss\); got 'val_loss'"):
        report.require_metric()


def test_a_callback_may_add_the_metric_to_some_epochs():
    """A metric that a callback of the user computes need not be a result of the first epochs."""
    report = report_of(metric="val_f1")
    report.may_be_added = True
    run(report, [{"val_loss": 0.1}, {"val_loss": 0.1, "val_f1": 0.2}])
    report.require_metric()

    assert (0.2, 2) == (report.best, report.best_epoch)


def test_the_epochs_of_several_fits_are_counted_together():
    """A HyperModel that fits its model twice reports the epochs of the second fit after the first."""
    report = report_of()
    run(report, losses(0.5, 0.4))
    run(report, losses(0.3, 0.6))

    assert [0.5, 0.4, 0.3, 0.6] == report.results["val_loss"]
    assert (0.3, 3) == (report.best, report.best_epoch)


class Shrink(keras.callbacks.Callback):
    """Changes the weights at the end of each epoch, after their evaluation."""

    def on_epoch_end(self, epoch, logs=None):
        self.model.set_weights([weight / 2 for weight in self.model.get_weights()])


SWAPPING = {
    "swap": lambda: keras.callbacks.SwapEMAWeights(),
    "swap at the end of the epoch": lambda: keras.callbacks.SwapEMAWeights(swap_on_epoch=True),
    "average": lambda: AverageWeights(1),
    "shrink": Shrink,
    "lambda": lambda: keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: None),
    "none": lambda: keras.callbacks.Callback(),
}


@pytest.mark.parametrize("make", SWAPPING.values(), ids=SWAPPING)
def test_the_best_weights_are_those_that_were_evaluated(make):
    """The kept weights give the best result, also if a callback puts other weights in for the evaluation."""
    x = np.random.default_rng(0).normal(size=(48, 1))
    report = report_of()
    report.model.compile(keras.optimizers.SGD(0.05, use_ema=True, ema_momentum=0.5), "mse", run_eagerly=True)
    held = x[32:], 2 * x[32:]
    callbacks = report.callbacks([make()])
    report.model.fit(x[:32], 2 * x[:32], 8, 3, 0, callbacks, validation_data=held)

    report.model.set_weights(report.weights)
    assert pytest.approx(report.best, rel=1e-5) == report.model.evaluate(*held, verbose=0)


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_loop_of_the_users_may_call_the_report(wrapped):
    """A loop that sets the model, and ends epochs, but sets no parameters of callbacks, reports them."""
    model = report_of().model
    study = optuna.create_study(pruner=optuna.pruners.ThresholdPruner(upper=0.35))
    options = {"maximize": False, "stopping": threading.Event(), "reported": lambda *given: None}
    report = TrialReport(study.ask(), "val_loss", **options)
    for callback in report.callbacks([keras.callbacks.SwapEMAWeights()]):
        if not isinstance(callback, keras.callbacks.SwapEMAWeights):
            callback.set_model(SimpleNamespace(model=model) if wrapped else model)
    for epoch, value in enumerate([0.3, 0.2, 0.4]):
        report.on_epoch_end(epoch, {"val_loss": value})

    assert (0.2, 2, True) == (report.best, report.best_epoch, report.pruned)
    assert model.stop_training


def folds_of(*curves, **options):
    """Return the report of a trial whose folds have these curves."""
    report = report_of(FoldReport, **options)
    for number, curve in enumerate(curves):
        run(report, losses(*curve))
        report.end_fold(last=number + 1 == len(curves))
    return report


@pytest.mark.parametrize(
    ("curves", "expected"),
    [
        ([(4, 2), (2, 4)], (3.0, 3.0)),
        ([(4, 2, 1), (6,)], (5.0, 4.0, 3.5)),  # not 5, 2, 1
        ([(6,), (4, 2, 1)], (5.0, 4.0, 3.5)),
        ([(4, math.nan), (2, 1)], (3.0, math.nan)),
        ([(4, math.nan), (2, 1, 1)], (3.0, math.nan, math.nan)),
        ([(None, 2, None, 1), (None, 4)], (math.nan, 3.0, math.nan, 2.5)),
    ],
)
def test_the_mean_of_an_epoch_is_that_of_all_folds(curves, expected):
    """A fold that ended earlier counts with its last result, and one that diverged makes the mean NaN."""
    report = folds_of(*curves)

    np.testing.assert_equal(report.results["val_loss"], list(expected))
    assert np.nanmin(expected) == report.best
    assert np.nanargmin(expected) + 1 == report.best_epoch


def test_a_fold_that_diverges_at_once_leaves_no_value():
    """A trial has no best epoch if one of its folds never had a number, whatever the others have."""
    report = folds_of((0.5, 0.4), (math.nan, math.nan))

    assert (None, 0) == (report.best, report.best_epoch)
    assert math.isnan(report.trial.study.trials[0].intermediate_values[2])


def test_folds_without_the_metric_are_refused():
    """The error for a metric that no epoch of a fold has is that of any other trial."""
    with pytest.raises(ConfigError, match="metric should be a result of an epoch"):
        folds_of((None, None))
