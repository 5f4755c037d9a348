"""A worker group of threads trains as the reference implementation does, for every rule."""

from contextlib import nullcontext

import keras
import numpy as np
import pytest
import reference
from simulator import World
from worker_threads import even_split, train

from sparkdl import SparkModel
from sparkdl.data.batch_plan import ranks
from sparkdl.errors import ConfigError, DivergedError
from sparkdl.modeling.backends.choice import with_keras_optimizer
from sparkdl.rules import AEASGD, Adasum, DiLoCo, FedOpt
from sparkdl.rules.outer import SGD
from sparkdl.server.aggregation import Hybrid
from sparkdl.worker.loop import Loop

ROWS, BATCH, EPOCHS, WORKERS = 70, 8, 3, 2


def make_model(optimizer=None, rate=0.2):
    keras.utils.set_random_seed(0)
    layers = [keras.Input((4,)), keras.layers.Dense(6, activation="tanh"), keras.layers.Dense(3)]
    model = keras.Sequential(layers)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer or keras.optimizers.SGD(rate), loss)
    return model


def problem(rows=ROWS):
    rng = np.random.default_rng(0)
    return rng.normal(size=(rows, 4)).astype("float32"), rng.integers(0, 3, rows).astype("int32")


def trained(merge, *, workers=WORKERS, window=3, mode="synchronous", epochs=EPOCHS, optimizer=None, **terms):
    """Return the weights trained by a worker group."""
    model, (x, y) = make_model(optimizer), problem()
    rows = even_split(ROWS, workers)
    settings = {"batch_size": BATCH, "epochs": epochs, "merge": merge} | terms
    train(model, x, y, mode=mode, window=window, rows=rows, **settings)
    return model.get_weights()


def simulated(how, *, workers=WORKERS, frequency=3, rate=0.2, **settings):
    """Return the weights of the reference implementation."""
    settings |= {"workers": workers, "batch_size": BATCH, "epochs": EPOCHS, "frequency": frequency}
    start = make_model().get_weights()
    return how(lambda: make_model(rate=rate), start, *problem(), **settings).get_weights()


def paces(*seconds):
    return [lambda s=s: s for s in seconds]


def check_close(expected, actual):
    moved = [e - s for e, s in zip(expected, make_model().get_weights(), strict=True)]

    assert all(np.abs(m).max() > 0.005 for m in moved)
    for e, a in zip(expected, actual, strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-5)


def adasum(deltas, rows):
    """Return Adasum of two workers' deltas, over all variables together."""
    first, second = (np.concatenate([d.ravel() for d in delta]) for delta in deltas)
    common, squares = first @ second, (first @ first, second @ second)
    factors = [1 - common / (2 * square) for square in squares]
    return [factors[0] * a + factors[1] * b for a, b in zip(*deltas, strict=True)]


COMBINE = {
    "diloco": (DiLoCo(0.7, 0.9), reference.Nesterov(0.7, 0.9)),
    "averaging": (DiLoCo(1.0, 0.0), reference.average),
    "half": (FedOpt(SGD(0.5)), lambda deltas, rows: [d / 2 for d in reference.average(deltas, rows)]),
    "adasum": (Adasum(), adasum),
    "sum": ("sum", lambda deltas, rows: [sum(ds) for ds in zip(*deltas, strict=True)]),
}


@pytest.mark.one_case
@pytest.mark.parametrize("name", COMBINE)
def test_rounds_combine_deltas_by_the_rule(name):
    """Rounds combine the deltas of local steps by the rule, which keeps its state between rounds."""
    rule, combine = COMBINE[name]

    check_close(simulated(reference.synchronous, combine=combine), trained(rule))


@pytest.mark.one_case
@pytest.mark.parametrize("frequency", [3, "epoch"])
def test_springs_tie_workers_to_the_center_in_rounds(frequency):
    """In rounds, elastic workers keep their own weights across epochs; the default alpha is 0.9 / K."""
    window = None if frequency == "epoch" else frequency

    check_close(
        simulated(reference.elastic, frequency=frequency, alpha=0.45), trained("aeasgd", window=window)
    )


@pytest.mark.one_case
@pytest.mark.parametrize("mode", ["asynchronous", "hogwild"])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_spring_is_tied_to_the_center_of_the_moment(mode, workers):
    """Without rounds, an elastic worker pulls the current center first."""
    expected = simulated(reference.elastic_in_turn, workers=workers, alpha=0.25)
    settings = {"world": World(), "paces": paces(1.0, 1.01)}

    check_close(expected, trained(AEASGD(0.25), workers=workers, mode=mode, **settings))


@pytest.mark.one_case
@pytest.mark.parametrize(("mode", "window", "rule"), [("asynchronous", 3, "dynsgd"), ("hogwild", 1, "sum")])
def test_workers_in_turn_merge_as_the_answer_key_does(mode, window, rule):
    """With two workers of nearly one speed, every update but the first has a staleness of one."""
    expected = simulated(reference.asynchronous, frequency=window, rule=rule)

    check_close(expected, trained(rule, mode=mode, window=window, world=World(), paces=paces(1.0, 1.01)))


RATES = {
    "number": 0.2,
    "schedule": keras.optimizers.schedules.PiecewiseConstantDecay([9999], [0.2, 0.1]),
}


@pytest.mark.one_case
@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize(("mode", "window"), [("synchronous", 3), ("asynchronous", 3), ("hogwild", 1)])
def test_defaults_are_what_the_docs_say(mode, window, rate):
    """For several batches the default is the rate times the root of K, with momentum or by staleness."""
    if mode == "synchronous":
        combine = reference.Nesterov(1.0, 1 - WORKERS**-0.5)
        expected = simulated(reference.synchronous, rate=0.2 * WORKERS**0.5, combine=combine)
    else:
        rule, scale = ("sum", 1.0) if window == 1 else ("dynsgd", WORKERS**0.5)
        expected = simulated(reference.asynchronous, frequency=window, rate=0.2 * scale, rule=rule)
    settings = {"world": World(), "paces": paces(1.0, 1.01)}
    optimizer = keras.optimizers.SGD(RATES[rate])

    check_close(expected, trained(None, mode=mode, window=window, optimizer=optimizer, **settings))


@pytest.mark.one_case
@pytest.mark.parametrize(("mode", "window"), [("synchronous", 3), ("asynchronous", None), ("hogwild", 3)])
def test_workers_without_rows_change_no_default(mode, window):
    """If one worker has all rows, it trains as a single worker does, at the unscaled rate."""
    rows = 8 * BATCH
    model, alone, (x, y) = make_model(), make_model(), problem(rows)
    alone.fit(x, y, BATCH, EPOCHS, shuffle=False, verbose=0)
    settings = {"mode": mode, "window": window, "batch_size": BATCH, "epochs": EPOCHS}
    train(model, x, y, rows=(0, rows, 0), **settings)

    check_close(alone.get_weights(), model.get_weights())


@pytest.mark.one_case
@pytest.mark.parametrize("make", [lambda: SGD(0.7, 0.9), lambda: keras.optimizers.SGD(0.7, 0.9)])
def test_an_outer_optimizer_may_be_one_of_keras(make):
    """A Keras optimizer as outer optimizer takes the same steps, in both forms of momentum."""
    expected = trained(FedOpt(SGD(0.7, 0.9)))

    check_close(expected, trained(with_keras_optimizer(FedOpt(make()))))


def test_an_outer_optimizer_of_keras_changes_none_of_its_arguments():
    """An outer optimizer of Keras does not change its arguments, so that a run can resume from a state."""
    outer = with_keras_optimizer(FedOpt(keras.optimizers.Adam(0.1))).optimizer
    center, gradient = np.ones(4, np.float32), np.arange(4, dtype=np.float32)
    state = outer.init(center)
    first, after = outer.step(gradient, state, center)
    again, _ = outer.step(gradient, state, center)

    np.testing.assert_array_equal(first, again)
    np.testing.assert_allclose(first, [0, -0.1, -0.1, -0.1], atol=1e-5)
    assert 0 == np.max(np.abs(state[-1])) < np.max(np.abs(after[-1]))
    np.testing.assert_array_equal(np.ones(4), center)


def test_an_outer_optimizer_that_is_none_is_refused():
    """An outer optimizer of a wrong type is refused with its value."""
    with pytest.raises(
        ConfigError, match="should be one of sparkdl.rules.outer or of keras.optimizers; got 'adam'"
    ):
        SparkModel(make_model(), frequency="epoch", merge=FedOpt("adam"))


def test_eamsgd_is_for_workers_with_nesterovs_momentum():
    """EAMSGD is refused for workers without Nesterov momentum, with the remedy."""
    model = make_model(keras.optimizers.SGD(0.1, momentum=0.9))
    with pytest.raises(ConfigError, match='merge="eamsgd" needs SGD with Nesterov'):
        SparkModel(model, mode="asynchronous", merge="eamsgd")
    SparkModel(make_model(keras.optimizers.SGD(0.1, 0.9, nesterov=True)), mode="asynchronous", merge="eamsgd")


def test_a_batch_of_rounds_takes_gradients_only():
    """A rule other than the mean is refused for gradients, which are exchanged at every batch."""
    with pytest.raises(ConfigError, match="averages gradients; got merge='diloco'"):
        SparkModel(make_model(), merge="diloco")


def test_one_long_epoch_is_the_averaging_trainer_of_dist_keras():
    """With one long epoch, workers train separately to the end and the models are averaged once."""
    rows, epochs = 64, 3
    x, y = problem(rows)
    apart = []
    for worker in range(2):
        model, mine = make_model(), ranks((32, 32), worker)
        model.fit(x[mine], y[mine], BATCH, epochs, shuffle=False, verbose=0)
        apart.append(model.get_weights())
    model = make_model()
    settings = {"rows": (32, 32), "batch_size": BATCH, "epochs": 1, "steps_per_epoch": epochs * rows // BATCH}
    train(model, x, y, window=None, merge="average", **settings)

    for first, second, average in zip(*apart, model.get_weights(), strict=True):
        np.testing.assert_allclose(average, (first + second) / 2, rtol=1e-4, atol=1e-5)


# -- workers of given speeds ----------------------------------------------------------------------


@pytest.mark.one_case
@pytest.mark.parametrize(("mode", "window"), [("synchronous", 1), ("synchronous", 3), ("asynchronous", 3)])
def test_a_run_in_virtual_time_repeats_bit_by_bit(mode, window):
    """A run in virtual time repeats bit for bit, also asynchronously: the speeds determine the order."""
    first, again = (
        trained(None, mode=mode, window=window, world=World(), paces=paces(1.0, 1.7)) for _ in range(2)
    )

    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.whole
@pytest.mark.parametrize("window", [1, 3])
def test_speeds_change_nothing_where_everybody_is_waited_for(window):
    """In synchronous modes, threads and virtual time train the same weights at any speeds."""
    slow = trained(None, window=window, world=World(), paces=paces(1.0, 1.7))

    assert all(np.array_equal(a, b) for a, b in zip(trained(None, window=window), slow, strict=True))


class Counting(Loop):
    """A loop that records itself for inspection."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.loops[self.worker] = self


@pytest.mark.one_case
@pytest.mark.parametrize("optimizer", [None, keras.optimizers.Adam(0.01)])
def test_a_late_replica_is_brought_up_to_the_others(optimizer):
    """With a quorum, all replicas end with the same weights and optimizer state."""
    loops = {}
    model, (x, y) = make_model(optimizer), problem()
    train(
        model,
        x,
        y,
        window=1,
        rows=even_split(ROWS, 3),
        batch_size=BATCH,
        epochs=EPOCHS,
        hybrid=Hybrid(2),
        world=World(),
        paces=paces(1.0, 1.1, 4.0),
        loop=type("Kept", (Counting,), {"loops": loops}),
    )
    first, *others = (loops[worker].replica.model for worker in range(3))

    for other in others:
        for a, b in zip(first.variables, other.variables, strict=True):
            if "seed" not in a.path and "metric" not in a.path:
                np.testing.assert_array_equal(a.numpy(), b.numpy(), err_msg=a.path)
    assert not np.array_equal(make_model().get_weights()[0], model.get_weights()[0])


@pytest.mark.whole
def test_a_quorum_trains_without_the_slowest():
    """With a quorum, the deltas of the slowest worker come too late and the others are averaged."""
    expected = simulated(
        reference.synchronous, workers=3, combine=lambda deltas, rows: reference.average(deltas[:2], rows[:2])
    )

    check_close(
        expected, trained("average", workers=3, hybrid=Hybrid(2), world=World(), paces=paces(1.0, 1.0, 50.0))
    )


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("mode", "window", "why"),
    [
        ("synchronous", 1, "the last 10 updates of worker"),
        ("synchronous", 3, "the last 10 updates of worker"),
        ("asynchronous", 1, "the last 10 updates of worker"),
        ("hogwild", None, "every update of epoch 1 contained NaN, Inf or values"),
    ],
)
def test_a_run_that_diverges_ends_by_name(mode, window, why):
    """A regression at a hundred times the stable rate raises DivergedError; NaN is never merged."""
    keras.utils.set_random_seed(0)
    model, (x, y) = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]), problem(700)
    model.compile(keras.optimizers.SGD(100.0), "mse")
    rows = even_split(700, 2)
    with pytest.raises(DivergedError, match=f"Training diverged: {why}"):
        train(model, x, y.astype("float32"), mode=mode, window=window, rows=rows, batch_size=8, epochs=20)


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("seed", "epochs", "ends"), [(0, 6, True), (None, 4, False), (None, 6, True)], ids=str
)
def test_a_center_that_swings_ends_a_run_by_name(seed, epochs, ends):
    """A center that overshoots the minimum a bit more in each round ends the run with DivergedError.

    With shuffled rows a window may start with rows that the workers saw long ago, so detection takes longer:
    until the loss over windows shows it.
    """
    keras.utils.set_random_seed(0)
    model, (x, _) = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]), problem(3000)
    model.compile(keras.optimizers.SGD(0.1), "mse")
    settings = {"merge": FedOpt(SGD(2.2)), "window": None, "batch_size": 8, "epochs": epochs, "seed": seed}
    with (
        pytest.raises(DivergedError, match=r"(merging made|merged updates moved) the center")
        if ends
        else nullcontext()
    ):
        train(model, x, x @ np.ones((4, 1), "float32"), rows=even_split(3000, 3), **settings)
