"""The parts of a search that need no Spark: parameters, ranges, directions, studies."""

import importlib.util
import threading
from decimal import Decimal
from fractions import Fraction

import keras
import numpy as np
import optuna
import pytest
from hypothesis import given
from hypothesis import strategies as st
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from sparkdl.errors import ConfigError
from sparkdl.tune import Parameters
from sparkdl.tune.parameters import size_of, space_of
from sparkdl.tune.searching import AT_ONCE, _parallelism
from sparkdl.tune.side_by_side import own_callbacks
from sparkdl.tune.study import PRUNERS, SAMPLERS, direction_of, make_study, number_of_trials
from sparkdl.tune.trials import TrialRunner

keras_tuner = pytest.importorskip("keras_tuner")
OPTIONS = {"sampler": "random", "pruner": "none", "seed": 1, "epochs": 3}


def runner_of(build, **options):
    """Return a runner of trials without data."""
    given = {"spread": False, "data": (), "shared": (), "fit_arguments": {}, "settings": {}}
    return TrialRunner(build=build, metric="loss", maximize=False, **given | {"seed": None} | options)


@pytest.fixture
def ask():
    """A function that returns the parameters of a new trial."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=1))
    return lambda: Parameters(study.ask())


def model_of(hp):
    """Ask for parameters of every kind, as functions written for KerasTuner do; return the answers."""
    kind = hp.Choice("kind", ["dense", "conv"])
    with hp.conditional_scope("kind", ["conv"]):
        width = hp.Int("width", 3, 7, step=2)
    with hp.name_scope("head"):
        units = hp.Int("units", 8, 64, step=2, sampling="log")
        again = hp.get("units")
    return {
        "kind": kind,
        "width": width,
        "units": units,
        "again": again,
        "rate": hp.Float("rate", 1e-4, 1e-1, sampling="log"),
        "drop": hp.Float("drop", 0.0, 0.5, step=0.25),
        "decay": hp.Float("decay", 0.9, 0.999, sampling="reverse_log"),
        "bias": hp.Boolean("bias"),
        "depth": hp.Int("depth", 1, 3, parent_name="kind", parent_values=["dense"]),
        "fixed": hp.Fixed("fixed", 5),
        "known": ["kind" in hp, "nothing" in hp],
    }


def test_functions_for_keras_tuner_get_values_within_their_ranges(ask):
    """Each method of KerasTuner's HyperParameters returns values of its range, and None if inactive."""
    asked = [model_of(ask()) for _ in range(50)]

    assert {"dense", "conv"} == {each["kind"] for each in asked}
    for each in asked:
        assert (each["width"] is None) == (each["kind"] == "dense")
        assert (each["depth"] is None) == (each["kind"] == "conv")
        assert each["units"] == each["again"]
        assert 1e-4 <= each["rate"] <= 1e-1
        assert 0.9 <= each["decay"] <= 0.999
        assert (5, [True, False]) == (each["fixed"], each["known"])
    assert {3, 5, 7, None} == {each["width"] for each in asked}
    assert {8, 16, 32, 64} == {each["units"] for each in asked}
    assert {0.0, 0.25, 0.5} == {each["drop"] for each in asked}
    assert {True, False} == {each["bias"] for each in asked}


def test_keras_tuner_itself_knows_the_same_values():
    """The function above also runs with KerasTuner's own object, which takes the same arguments."""
    hp = keras_tuner.HyperParameters()

    assert model_of(hp).keys() == model_of(Parameters(optuna.create_study().ask())).keys()


def conditional(hp):
    """Ask for a parameter whose values depend on another one, as functions written for KerasTuner do."""
    kind = hp.Choice("kind", ["dense", "conv"])
    with hp.conditional_scope("kind", ["dense"]):
        dense = hp.Choice("size", ["small", "large"])
    with hp.conditional_scope("kind", ["conv"]):
        conv = hp.Choice("size", [3, 5])
        step = hp.Float("step", 0.1, 0.2)
    return {"kind": kind, "dense": dense, "conv": conv, "size": hp.get("size"), "again": "size" in hp} | {
        "depth": hp.Int("step", 1, 2, parent_name="kind", parent_values="dense"),
        "step": step,
    }


@pytest.mark.parametrize("storage", [False, True])
@pytest.mark.parametrize("sampler", ["random", "tpe"])
def test_a_name_may_have_other_values_under_another_condition(tmp_path, sampler, storage):
    """The same name in two conditional scopes has the values of the scope that is active."""
    where = f"sqlite:///{tmp_path}/study.db" if storage else None
    study = make_study(where, "a", "minimize", **OPTIONS | {"sampler": sampler})
    found = []
    for _ in range(15):
        trial = study.ask()
        found.append(conditional(Parameters(trial)))
        study.tell(trial, 1.0)

    assert {("small", None), ("large", None), (None, 3), (None, 5)} == {
        (each["dense"], each["conv"]) for each in found
    }
    for each in found:
        assert each["again"]
        assert (each["dense"] or each["conv"]) == each["size"]
        assert (each["kind"] == "dense") == (each["depth"] in (1, 2)) == (each["step"] is None)
    names = {name for trial in study.trials for name in trial.params if name.startswith("size")}
    assert names in ({"size", "size (kind = conv)"}, {"size", "size (kind = dense)"})


def test_the_recorded_values_are_those_that_were_used(ask):
    """The parameters of a trial are the values that its function got, whatever the scale."""
    parameters = ask()
    used = {
        "decay": parameters.Float("decay", 0.9, 0.999, sampling="reverse_log"),
        "units": parameters.Int("units", 1, 64, sampling="reverse_log"),
        "width": parameters.Int("width", 8, 64, step=2, sampling="reverse_log"),
    }

    assert used == parameters.trial.params == parameters.values
    assert used["decay"] == parameters["decay"]
    with (
        pytest.raises(ValueError, match="There is no parameter 'nothing' yet"),
        parameters.conditional_scope("nothing", [1]),
    ):
        pass


def test_values_that_a_study_cannot_hold_are_refused(ask):
    """NumPy numbers become Python numbers; the error for other objects names the remedy."""
    assert 3 == ask().Choice("a", [np.int64(3)])
    assert IntDistribution(1, 8) == space_of({"a": (np.int64(1), np.int64(8))})["a"]
    with pytest.raises(ConfigError, match="The values of a should be numbers, strings, bools or None"):
        space_of({"a": [object()]})


def test_functions_for_optuna_use_the_methods_of_a_trial(ask):
    """The attributes and methods of Optuna's Trial are available."""
    parameters = ask()
    rate = parameters.suggest_float("rate", 0.1, 0.2)

    assert (0, rate) == (parameters.number, parameters.get("rate"))
    with pytest.raises(KeyError):
        parameters.get("nothing")


def test_ranges_are_written_as_lists_and_tuples():
    """A range is a list of values, a tuple of two limits, with "log" or without, or a distribution."""
    given_ranges = {
        "units": (16, 256),
        "rate": (1e-4, 1e-1, "log"),
        "layers": [1, 2, 3],
        "momentum": (0, 0.9),
        "own": FloatDistribution(0, 1, step=0.5),
    }

    assert space_of(given_ranges) == {
        "units": IntDistribution(16, 256),
        "rate": FloatDistribution(1e-4, 1e-1, log=True),
        "layers": CategoricalDistribution((1, 2, 3)),
        "momentum": FloatDistribution(0, 0.9),
        "own": FloatDistribution(0, 1, step=0.5),
    }


@pytest.mark.parametrize(
    ("space", "message"),
    [
        ({}, "space should be a dict with the range of each parameter"),
        ([("units", 1)], "space should be a dict"),
        ({1: (0, 1)}, "The names in space should be strings; got 1."),
        ({"a": 5}, 'space["a"] should be a list of values, a tuple (low, high)'),
        ({"a": []}, 'space["a"] should be a list of values'),
        ({"a": (1, 2, "linear")}, 'space["a"] should be a list of values'),
        ({"a": (2, 1)}, "The range of a in space is invalid"),
        ({"a": (0.0, 1.0, "log")}, "The range of a in space is invalid"),
        ({"a": ("x", "y")}, "The range of a in space is invalid"),
        ({"a": (False, True)}, "not numbers; for a choice, pass a list: [False, True]."),
        ({"a": (np.False_, 2)}, "not numbers; for a choice, pass a list: [False, 2]."),
    ],
)
def test_a_space_that_is_none_is_refused(space, message):
    """An error names the parameter and the expected form."""
    with pytest.raises(ConfigError) as caught:
        space_of(space)
    assert message in str(caught.value)


@given(st.sampled_from(["loss", "val_loss", "val_mae", "mean_squared_error", "root_mean_squared_error"]))
def test_errors_are_minimized(metric):
    """The direction of losses and errors follows from their names."""
    assert "minimize" == direction_of(metric, None)


@given(st.sampled_from(["val_accuracy", "sparse_categorical_accuracy", "val_auc_1", "acc", "val_f1_score"]))
def test_scores_are_maximized(metric):
    """The direction of accuracies and scores follows from their names."""
    assert "maximize" == direction_of(metric, None)


def test_an_unknown_metric_needs_a_direction():
    """A direction is required if the name of the metric does not determine it."""
    with pytest.raises(ConfigError, match='is not known. Set direction="minimize" or "maximize"'):
        direction_of("val_mine", None)
    with pytest.raises(ConfigError, match="direction should be one of 'minimize', 'maximize'; got 'up'"):
        direction_of("val_loss", "up")
    assert "maximize" == direction_of("val_loss", "maximize")


def test_the_direction_of_a_given_study_is_the_default():
    """A study of Optuna keeps its direction, whatever the name of the metric, unless the user names one."""
    study = optuna.create_study(direction="maximize")

    assert "maximize" == direction_of("val_loss", None, study) == direction_of("mine", None, study)
    assert "minimize" == direction_of("val_loss", "minimize", study)
    assert "minimize" == direction_of("val_loss", None, optuna.create_study(directions=["maximize"] * 2))
    assert study is make_study(study, None, "maximize", **OPTIONS)


@pytest.mark.parametrize(("name", "choices"), [("sampler", SAMPLERS), ("pruner", PRUNERS)])
def test_an_unknown_name_is_refused_with_the_known_ones(name, choices):
    """The error for an unknown sampler or pruner lists the known ones."""
    with pytest.raises(
        ConfigError, match=f"{name} should be one of {', '.join(map(repr, choices))}; got 'no'"
    ):
        make_study(None, None, "minimize", **OPTIONS | {name: "no"})


@pytest.mark.parametrize(("sampler", "package"), [("cmaes", "cmaes"), ("gp", "torch")])
def test_the_packages_of_a_sampler_are_named(sampler, package):
    """Samplers whose packages are not installed are refused with the command that installs them."""
    if importlib.util.find_spec(package):
        pytest.skip(f"{package} is installed")
    with pytest.raises(ConfigError, match=rf'sampler="{sampler}" needs .* pip install .*{package}'):
        make_study(None, None, "minimize", **OPTIONS | {"sampler": sampler})


@pytest.mark.parametrize("name", ["tpe", "random", "grid"])
@pytest.mark.parametrize("pruner", PRUNERS)
def test_each_sampler_goes_with_each_pruner(name, pruner):
    """Every sampler and every pruner can be chosen by name."""
    study = make_study(None, None, "minimize", **OPTIONS | {"sampler": name, "pruner": pruner})
    trial = study.ask({"a": CategoricalDistribution((1, 2))})
    trial.report(1.0, 1)

    assert trial.should_prune() in (True, False)


@pytest.mark.parametrize(
    "storage", ["rubbish", "sqlite:////nowhere/at/all.db", "postgresql://nowhere/db"], ids=lambda url: url[:9]
)
def test_a_storage_that_cannot_be_used_is_refused(storage):
    """The error states the storage, the reason, and the form of a URL."""
    with pytest.raises(ConfigError, match=r'cannot be used: .* such as "sqlite:///study.db"'):
        make_study(storage, "name", "minimize", **OPTIONS)


def test_a_locked_storage_is_refused(tmp_path):
    """The error for a SQLite file that another process has locked states this reason."""
    import sqlite3

    with sqlite3.connect(tmp_path / "study.db") as held:
        held.execute("begin exclusive")
        with pytest.raises(ConfigError, match="database is locked"):
            make_study(f"sqlite:///{tmp_path}/study.db?timeout=0.1", "name", "minimize", **OPTIONS)


def test_a_storage_needs_a_name(tmp_path):
    """A study in a storage needs a name, by which it is found again."""
    with pytest.raises(ConfigError, match="A storage needs study_name"):
        make_study(f"sqlite:///{tmp_path}/study.db", None, "minimize", **OPTIONS)


def test_a_study_keeps_its_direction(tmp_path):
    """A study that minimizes is not continued by a search that maximizes."""
    storage = f"sqlite:///{tmp_path}/study.db"
    make_study(storage, "name", "minimize", **OPTIONS)

    with pytest.raises(ConfigError, match='direction="maximize" should be that of the study "name"'):
        make_study(storage, "name", "maximize", **OPTIONS)


@pytest.mark.parametrize("sampler", ["tpe", "random"])
@pytest.mark.parametrize("own", [True, False], ids=["own study", "storage"])
def test_a_resumed_study_tries_other_values(tmp_path, sampler, own):
    """A study that is resumed with the same seed continues with values that it has not tried yet."""
    storage = optuna.create_study() if own else f"sqlite:///{tmp_path}/study.db"
    options = OPTIONS | {"sampler": sampler, "seed": 0}

    def values():
        study = make_study(storage, "name", "minimize", **options)
        for _ in range(3):
            study.tell(study.ask({"a": FloatDistribution(0, 1)}), 1.0)
        return [trial.params["a"] for trial in study.trials]

    first, again = values(), values()
    assert first == again[:3]
    assert 6 == len(set(again))


def test_the_combinations_of_a_grid_are_counted():
    """The size of a finite space is the product of the numbers of values; a range of numbers has no size."""
    finite = {"a": [1, 2, 3], "b": (4, 7), "c": FloatDistribution(0, 1, step=0.25)}

    assert 3 * 4 * 5 == size_of(space_of(finite))
    with pytest.raises(
        ConfigError, match='sampler="grid" needs a finite space; rate has any number in a range'
    ):
        size_of(space_of({"rate": (0.0, 1.0)}))


@pytest.mark.parametrize(
    ("wanted", "sampler", "space", "expected"),
    [
        (None, "tpe", {"a": (0.0, 1.0)}, 20),
        (5, "random", {"a": [1, 2]}, 5),
        (None, "grid", {"a": (1, 8), "b": (1, 5)}, 40),
        (100, "grid", {"a": (1, 8), "b": (1, 5)}, 40),
        (3, "grid", {"a": (1, 8), "b": (1, 5)}, 3),
        (None, "grid", None, None),
        (3, "grid", None, 3),
    ],
)
def test_a_grid_is_searched_as_a_whole_by_default(wanted, sampler, space, expected):
    """The default number of trials is that of all combinations of a grid, and 20 for other samplers."""
    study = make_study(None, None, "minimize", **OPTIONS | {"sampler": sampler})

    assert expected == number_of_trials(wanted, study.sampler, space and space_of(space))


class Application:
    """A Spark application with a number of slots, and under dynamic allocation with a limit."""

    def __init__(self, slots, *, dynamic, limit=0):
        self.slots, self.dynamic, self.limit, self.stopped = slots, dynamic, limit, False

    def num_workers(self, wanted, most, timeout):
        return self.slots, "one per slot"

    def most_slots(self):
        return self.limit


@pytest.mark.parametrize(
    ("application", "wanted", "workers", "expected"),
    [
        (Application(4, dynamic=False), None, 1, 4),
        (Application(4, dynamic=False), 3, 1, 3),
        (Application(4, dynamic=False), None, 2, 2),
        (Application(1, dynamic=True, limit=8), None, 1, 8),
        (Application(1, dynamic=True, limit=8), None, 3, 2),
        (Application(1, dynamic=True, limit=8), None, 9, 1),
        (Application(1, dynamic=True, limit=8), 2, 1, 2),
        (Application(1, dynamic=True), None, 1, AT_ONCE),
        (Application(40, dynamic=True), None, 1, 40),
    ],
)
def test_trials_use_the_slots_that_the_application_may_get(application, wanted, workers, expected):
    """Under dynamic allocation, as many trials run at a time as the limit of executors allows."""
    assert expected == _parallelism(application, wanted, workers)


def compiled():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


class OfModel(keras.callbacks.Callback):
    """A callback with a model and its optimizer."""

    def __init__(self, own):
        super().__init__()
        self.own, self.optimizer = own, getattr(own, "optimizer", None)


def test_callbacks_that_a_function_makes_are_used_as_they_are():
    """A callback that the function made for a trial refers to the trial's model; shared ones are copied."""
    runner, model = runner_of(None), compiled()
    made = OfModel(model)

    assert [made] == runner._own(made, model)
    made.begun = True
    (shared,) = runner._own([made], compiled())
    assert shared is not made
    assert not hasattr(shared, "begun")
    open_file = OfModel(threading.Lock())
    assert [open_file] == runner._own([open_file], model)
    with pytest.raises(ConfigError, match="callbacks should be copyable"):
        runner._own([open_file], model)
    (of_fold,) = own_callbacks(made, {id(model): (other := compiled()), id(model.optimizer): other.optimizer})
    assert (other, other.optimizer) == (of_fold.own, of_fold.optimizer)
    with pytest.raises(ConfigError, match="callbacks should be keras.callbacks.Callback objects; got int"):
        runner._own([3], model)


NUMBERS = {
    "bool": np.bool_(True),
    "int": np.int64(1),
    "decimal": Decimal(1),
    "fraction": Fraction(1, 1),
    "array": np.array(1.0),
    "tensor": keras.ops.convert_to_tensor(1.0),
    "variable": keras.Variable(1.0),
}


@pytest.mark.parametrize("value", NUMBERS.values(), ids=NUMBERS)
def test_an_objective_may_return_any_kind_of_number(ask, value):
    """An objective returns its value as a number of any type that float() takes."""
    assert 1.0 == runner_of(lambda trial: value).run(ask().trial).value


@pytest.mark.parametrize("value", ["1.0", None, np.ones(1), [1.0], keras.Sequential(), 1j, {}])
def test_an_objective_that_returns_something_else_fails(ask, value):
    """A result that is neither a number nor a model is the reason of the trial's failure."""
    outcome = runner_of(lambda trial: value).run(ask().trial)

    assert outcome.value is None
    assert "build " in outcome.reason
