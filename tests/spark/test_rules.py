"""Rules, bounds, quorums and warm-ups of a fit on Spark."""

import keras
import numpy as np
import pytest

from sparkdl import FaultTolerance, SparkModel, Stragglers, load_spark_model
from sparkdl.callbacks import LearningRateScaling, LearningRateWarmup
from sparkdl.driver import known_shortfalls
from sparkdl.errors import ConfigError, DivergedError
from sparkdl.rules import BMUF, DiLoCo, FedOpt, Rule


def moved(problem, model):
    """Return the largest change of any weight."""
    start = problem.model().get_weights()
    return max(np.abs(a - b).max() for a, b in zip(model.get_weights(), start, strict=True))


class Clipped(Rule):
    """A custom rule: average, but move no weight by more than a limit."""

    name = "clipped"

    def __init__(self, limit):
        self.limit = limit

    def update(self, delta, state, merge):
        return delta.clip(-self.limit, self.limit), state


@pytest.mark.whole
def test_a_rule_may_be_the_users_own(spark, problem):
    """A custom rule may be a small class in a module that executors cannot import."""
    model = problem.model()
    history = SparkModel(model, frequency=4, num_workers=2, merge=Clipped(1e-4)).fit(
        problem.x, problem.y, 16, 2, verbose=0
    )
    rounds = history.training["version"]

    assert "clipped" == history.training["merge"]
    assert rounds > 2
    assert 0.9e-4 < moved(problem, model) <= 1.01e-4 * rounds


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("mode", "frequency", "merge"),
    [
        ("synchronous", 4, DiLoCo(0.7, 0.5)),
        ("synchronous", "epoch", "adasum"),
        ("synchronous", 2, "aeasgd"),
        ("synchronous", 4, FedOpt(keras.optimizers.Adam(0.01))),
        ("asynchronous", 4, "aeasgd"),
        ("hogwild", 2, "adag"),
    ],
)
def test_a_rule_trains(spark, problem, mode, frequency, merge):
    """A rule given by name or as an object lowers the loss."""
    model = problem.model()
    model = SparkModel(model, mode=mode, frequency=frequency, num_workers=2, merge=merge)
    history = model.fit(problem.x, problem.y, 16, 3, verbose=0, seed=0)

    assert history.history["loss"][-1] < history.history["loss"][0]
    assert (
        model.evaluate(problem.x, problem.y)[0] < problem.model().evaluate(problem.x, problem.y, verbose=0)[0]
    )


def test_a_rules_state_goes_on_in_the_next_fit(spark, problem):
    """Two fits of one epoch equal one fit of two: the outer momentum is kept."""
    together, apart = problem.model(), problem.model()
    for model, epochs in (together, [(0, 2)]), (apart, [(0, 1), (1, 2)]):
        wrapped = SparkModel(model, frequency=4, num_workers=2, merge="diloco")
        for first, last in epochs:
            wrapped.fit(problem.x, problem.y, 16, last, initial_epoch=first, shuffle=False, verbose=0, seed=0)

    for a, b in zip(together.get_weights(), apart.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("settings", "rounds"),
    [
        ({"mode": "asynchronous", "frequency": 2, "stragglers": Stragglers(staleness=0)}, None),
        ({"mode": "hogwild", "frequency": "batch", "stragglers": Stragglers(staleness=3)}, None),
        ({"frequency": "batch", "stragglers": Stragglers(quorum=1)}, 26),
        (
            {
                "frequency": 2,
                "stragglers": Stragglers(quorum=0.5, straggler_timeout=0.2, late_updates="merge"),
            },
            8,
        ),
    ],
)
def test_bounds_and_quorums_train_to_the_end(spark, problem, settings, rounds):
    """Bounds and quorums change who waits, not the number of rounds or exchanges; the model learns."""
    model = problem.model()
    history = SparkModel(model, num_workers=2, **settings).fit(problem.x, problem.y, 16, 2, verbose=0)
    training = history.training

    assert (rounds or training["exchanges"]) == training["version"]
    late = training["late_merged"] + sum(worker["dropped"] for worker in history.run["workers"])
    assert bool(late) == any(event["text"].startswith("Late updates of") for event in history.run["events"])
    assert moved(problem, model) > 1e-3


SCALED = {
    "default": (None, [], 2**0.5),
    "named": (BMUF(power=0.5), [LearningRateScaling("sqrt")], 1.0),
    "instead": (None, [LearningRateScaling("sqrt")], 1.0),
    "unscaled": (BMUF(power=0.5), [], 1.0),
}


@pytest.mark.whole
def test_the_default_steps_at_the_root_of_k_times_the_rate(spark, problem, caplog):
    """The default rule scales the learning rate by the square root of K and logs it.

    A rule given by name takes the rate as it is, and a callback that scales it takes its place.
    """
    caplog.set_level("INFO", "sparkdl")
    trained = {}
    for name, (merge, callbacks, scale) in SCALED.items():
        model = problem.model()
        rate = float(model.optimizer.learning_rate)
        history = SparkModel(model, frequency=4, num_workers=2, merge=merge).fit(
            problem.x, problem.y, 16, 2, verbose=0, seed=0, callbacks=callbacks
        )
        trained[name] = np.concatenate([weight.ravel() for weight in model.get_weights()])

        assert ("bmuf", scale) == (history.training["merge"], history.training["learning_rate_scale"])
        assert rate == float(model.optimizer.learning_rate)
    for name in ("named", "instead"):
        np.testing.assert_allclose(trained["default"], trained[name], rtol=1e-5, atol=1e-6)
    assert np.abs(trained["default"] - trained["unscaled"]).max() > 1e-3
    assert 1 == "\n".join(caplog.messages).count("at 1.41 times the learning rate")


def rate():
    return 0.05


def test_a_learning_rate_that_is_a_function_is_taken_as_it_is(spark, problem):
    """A learning-rate function is used unscaled: Keras calls it at every step and cannot set it."""
    model = problem.model(keras.optimizers.SGD(rate))
    training = SparkModel(model, frequency=4, num_workers=2).fit(problem.x, problem.y, 16, verbose=0).training

    assert ("bmuf", 1.0) == (training["merge"], training["learning_rate_scale"])
    assert moved(problem, model) > 1e-3


@pytest.mark.parametrize(("frequency", "warned"), [("batch", False), (4, True)])
def test_more_workers_than_were_studied_are_named(spark, problem, caplog, monkeypatch, frequency, warned):
    """A warning names a number of workers that was not studied, if they train separately."""
    monkeypatch.setattr("sparkdl.driver.start_report.STUDIED", 1)
    SparkModel(problem.model(), frequency=frequency, num_workers=2).fit(problem.x, problem.y, 16, verbose=0)

    assert warned == ("this run has 2." in "\n".join(caplog.messages))


@pytest.mark.parametrize(
    ("frequency", "merge", "warned"), [("epoch", "sum", True), ("epoch", None, False), ("batch", None, False)]
)
def test_what_the_study_saw_fall_short_is_named(
    spark, problem, caplog, monkeypatch, frequency, merge, warned
):
    """A setting that fell short in the study is reported with its outcome and a better one."""
    known = known_shortfalls.known()
    sums = [one._replace(workers=2) for one in known if (one.rule, one.workers) == ("sum", 8)]
    monkeypatch.setattr(known_shortfalls, "known", lambda: tuple(sums))
    spark_model = SparkModel(problem.model(), frequency=frequency, num_workers=2, merge=merge)
    spark_model.fit(problem.x, problem.y, 16, 1, verbose=0)

    assert warned == ('merge="sum", SGD and 2 workers diverged' in "\n".join(caplog.messages))
    assert warned == ("matches plain Keras for any number of workers" in "\n".join(caplog.messages))


def test_a_warm_up_is_that_of_plain_keras(spark, problem):
    """A warm-up gives the weights of plain Keras, update by update, and the model keeps its own rate."""
    model, reference = problem.model(), problem.model()
    rate = float(model.optimizer.learning_rate)
    reference.fit(
        problem.x, problem.y, 16, 2, shuffle=False, verbose=0, callbacks=[LearningRateWarmup(1.5, 0.1)]
    )
    SparkModel(model, num_workers=2).fit(
        problem.x, problem.y, 16, 2, shuffle=False, verbose=0, callbacks=[LearningRateWarmup(1.5, 0.1)]
    )

    assert problem.distance(model, reference, problem.model().get_weights()) < 10
    assert pytest.approx(rate) == float(model.optimizer.learning_rate)


@pytest.mark.parametrize("callback", [LearningRateWarmup, LearningRateScaling])
def test_a_function_as_rate_is_not_multiplied(spark, problem, jobs, callback):
    """A factor for a learning rate that a function gives is refused before any job."""
    model, before = problem.model(), jobs()
    model.compile(keras.optimizers.SGD(lambda: 0.1), model.loss)
    with pytest.raises(ConfigError, match="learning rate is a number; got a function"):
        SparkModel(model, num_workers=2).fit(problem.x, problem.y, 16, 1, verbose=0, callbacks=[callback()])

    assert jobs() == before


@pytest.mark.parametrize("settings", [{}, {"mode": "asynchronous", "frequency": "epoch"}])
def test_a_function_as_rate_is_called_in_the_workers(spark, problem, settings):
    """Workers call their own copy of the function, so a later change on the driver changes nothing."""
    trained = []
    for changed in (0.1, 0.9):
        model, rates = problem.model(), {"rate": 0.1}
        model.compile(keras.optimizers.SGD(lambda rates=rates: rates["rate"]), model.loss)
        change = keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs, rates=rates, changed=changed: rates.update(rate=changed)
        )
        SparkModel(model, num_workers=1, **settings).fit(
            problem.x, problem.y, 16, 2, shuffle=False, verbose=0, callbacks=[change]
        )
        trained.append(model)
    reference = problem.model()
    reference.compile(keras.optimizers.SGD(0.1), reference.loss)
    reference.fit(problem.x, problem.y, 16, 2, shuffle=False, verbose=0)

    for model in trained:
        assert problem.distance(model, reference, problem.model().get_weights()) < 10


def test_a_warm_up_that_can_only_change_between_epochs_is_named(spark, problem, caplog):
    """With one exchange per epoch a warm-up is constant within an epoch, which a warning says."""
    model = SparkModel(problem.model(), frequency="epoch", num_workers=2)
    model.fit(problem.x, problem.y, 16, 1, verbose=0, callbacks=[LearningRateWarmup(2, 0.5)])

    assert "a warm-up raises the learning rate only once per epoch" in "\n".join(caplog.messages)


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("mode", "frequency", "epochs"),
    [("synchronous", 2, 20), ("asynchronous", 2, 20), ("synchronous", "epoch", 1)],
)
def test_a_fit_that_diverges_ends_by_name_and_leaves_finite_weights(spark, mode, frequency, epochs):
    """A diverging fit raises DivergedError and leaves finite weights, in the last epoch too."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(100.0), "mse")
    x = np.random.default_rng(0).normal(size=(600, 3)).astype("float32")
    with pytest.raises(DivergedError, match="Training diverged"):
        SparkModel(model, mode=mode, frequency=frequency, num_workers=2).fit(
            x, x[:, :1], 8, epochs, verbose=0
        )

    assert all(np.isfinite(weight).all() for weight in model.get_weights())


def test_a_rule_is_saved_with_the_model(spark, problem, tmp_path):
    """A rule is saved with its settings; a custom rule is refused before a file is written."""
    path = str(tmp_path / "model.keras")
    SparkModel(problem.model(), frequency=4, merge=DiLoCo(0.5)).save(path)

    assert DiLoCo(0.5) == load_spark_model(path).config.merge
    own = SparkModel(problem.model(), frequency=4, merge=Clipped(1.0))
    with pytest.raises(
        ConfigError, match="merge should be a rule of sparkdl.rules if the settings are saved"
    ):
        own.save(str(tmp_path / "own.keras"))
    assert not (tmp_path / "own.keras").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"stragglers": Stragglers(quorum=3), "num_workers": 2}, "from 1 to 2, or a share"),
        (
            {"stragglers": Stragglers(quorum=1), "mode": "asynchronous"},
            "quorum and straggler_timeout need mode=",
        ),
        ({"stragglers": Stragglers(quorum=1), "frequency": "epoch"}, "need rounds within an epoch"),
        (
            {"stragglers": Stragglers(late_updates="merge")},
            "Set one of these, or leave late_updates out.",
        ),
        (
            {"merge": "aeasgd", "frequency": 2, "stragglers": Stragglers(quorum=1)},
            "a late update would move only one of them",
        ),
        (
            {"fault_tolerance": FaultTolerance(recovery_every=2), "frequency": "epoch"},
            'recovery_every needs mode="synchronous", a frequency',
        ),
        (
            {"fault_tolerance": FaultTolerance(recovery_every=2), "mode": "hogwild"},
            'recovery_every needs mode="synchronous", a frequency',
        ),
        (
            {"fault_tolerance": FaultTolerance(recovery_every=2), "placement": "worker"},
            'a frequency other than "epoch" and placement="driver" or "executors", since',
        ),
        (
            {"fault_tolerance": FaultTolerance(on_worker_loss="continue"), "placement": "worker"},
            'on_worker_loss="continue" needs placement="driver", .* Leave one of them out.',
        ),
        (
            {"fault_tolerance": FaultTolerance(on_worker_loss="continue"), "num_workers": 1},
            'on_worker_loss="continue" needs at least two workers, .*; got num_workers=1.',
        ),
        (
            {"stragglers": Stragglers(staleness=2)},
            "staleness needs a mode without rounds",
        ),
        ({"merge": "diloco", "mode": "asynchronous"}, "its optimizer steps once per round"),
        ({"merge": "mean"}, "merge should be one of 'average', 'sum'"),
    ],
)
def test_settings_that_mean_nothing_are_refused(problem, settings, message):
    """Invalid or contradictory settings are refused by name before anything starts."""
    with pytest.raises(ConfigError, match=message):
        SparkModel(problem.model(), **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"stragglers": Stragglers(quorum=9)}, "from 1 to 2, or a share"),
        (
            {"placement": "worker"},
            'needs a Spark Connect session .* this is a classic session. Set placement="driver"',
        ),
    ],
)
def test_what_this_cluster_has_not_is_refused(spark, problem, settings, message):
    """A setting that this cluster cannot serve is refused before any job."""
    with pytest.raises(ConfigError, match=message):
        SparkModel(problem.model(), **settings).fit(problem.x, problem.y, verbose=0)
