"""The groups of settings, and the older flat names of their fields, without a JVM."""

import dataclasses
import inspect
import pickle
import re
from pathlib import Path
from typing import get_args

import keras
import numpy as np
import pytest

import sparkdl
from sparkdl import FaultTolerance, Network, SparkModel, Stragglers, load_spark_model
from sparkdl.config import FitConfig, Mode, ModeName, Placement, PlacementName, TrainConfig
from sparkdl.errors import ConfigError
from sparkdl.ml import KerasEstimator
from sparkdl.ml.params import OF_SETTINGS, SETTINGS, arguments
from sparkdl.settings import GROUP_OF, GROUPS, grouped

# The flat names of the settings, which are deprecated, with a value that is not the default.
VALUES = {
    "bind_address": "127.0.0.2",
    "advertised_host": "127.0.0.3",
    "port": "7100:7120",
    "tls": False,
    "start_timeout": 5,
    "stall_timeout": 7.5,
    "max_restarts": 0,
    "on_worker_loss": "continue",
    "recovery_every": 3,
    "staleness": 2,
    "quorum": 0.5,
    "straggler_timeout": 1.5,
    "late_updates": "merge",
}
BESIDE = {
    "staleness": {"mode": "asynchronous"},
    "late_updates": {"quorum": 1},
}  # without which one is refused
GIVEN = [
    Network(bind_address="127.0.0.2", advertised_host="127.0.0.3", port="7100:7120", tls=True),
    FaultTolerance(5, 7.5, max_restarts=0, on_worker_loss="continue", recovery_every=3),
    Stragglers(staleness=0, quorum=0.5, straggler_timeout=1.5, late_updates="merge"),
]


def make_model():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def test_each_field_has_one_flat_name():
    """The flat names are those that SparkModel took before there were groups."""
    assert VALUES.keys() == GROUP_OF.keys()
    assert [*GROUP_OF] == [each.name for kind in GROUPS.values() for each in dataclasses.fields(kind)]


@pytest.mark.parametrize("name", VALUES)
def test_a_flat_name_warns_and_equals_its_field(name):
    """A flat argument sets the field of its group; the warning names the new spelling and the user's line."""
    given = {name: VALUES[name], **BESIDE.get(name, {})}
    group = GROUP_OF[name]
    old = ", ".join(f"{each}=..." for each in given if each in GROUP_OF)
    words = f"SparkModel({old}) is deprecated; use {group}=sparkdl.{GROUPS[group].__name__}({old})."

    with pytest.warns(DeprecationWarning, match=re.escape(words)) as caught:
        config = SparkModel(make_model(), **given).config

    assert [__file__] == [each.filename for each in caught]
    assert config == SparkModel(make_model(), **grouped(given)).config
    assert getattr(config, group) != GROUPS[group]()
    assert getattr(getattr(config, group), name) in (VALUES[name], range(7100, 7121))


def test_each_group_has_a_warning_of_its_own():
    """Flat arguments of several groups warn once for each group, with the spelling of that group."""
    with pytest.warns(DeprecationWarning, match="is deprecated; use") as caught:
        model = SparkModel(make_model(), quorum=1, port=0, straggler_timeout=2)

    assert (Network(port=0), Stragglers(quorum=1, straggler_timeout=2)) == (
        model.config.network,
        model.config.stragglers,
    )
    assert [
        "SparkModel(port=...) is deprecated; use network=sparkdl.Network(port=...).",
        "SparkModel(quorum=..., straggler_timeout=...) is deprecated; "
        "use stragglers=sparkdl.Stragglers(quorum=..., straggler_timeout=...).",
    ] == [str(each.message) for each in caught]


def test_the_warning_of_run_names_the_users_line():
    """`sparkdl.run` takes the flat names of the network, with a warning at the user's line."""
    words = re.escape("sparkdl.run(tls=...) is deprecated; use network=sparkdl.Network(tls=...).")
    with (
        pytest.warns(DeprecationWarning, match=words) as caught,
        pytest.raises(ConfigError, match="function should take one argument"),
    ):
        sparkdl.run(lambda: None, 2, tls=False)

    assert [__file__] == [each.filename for each in caught]


def test_a_flat_name_beside_its_group_is_refused():
    """A flat argument that is given together with its group is refused, not merged."""
    words = re.escape(
        "SparkModel(port=...) cannot be combined with network=; use network=sparkdl.Network(port"
    )
    with pytest.raises(ConfigError, match=words):
        SparkModel(make_model(), port=7100, network=Network())
    with pytest.raises(ConfigError, match=re.escape("sparkdl.run(tls=...) cannot be combined with network=")):
        sparkdl.run(lambda worker: None, network=Network(), tls=True)


@pytest.mark.parametrize("name", ["colour", "round_timeout"])
def test_an_unknown_argument_is_refused(name):
    """An argument that never was one raises TypeError, as in any call."""
    with pytest.raises(TypeError, match=rf"SparkModel\(\) got an unexpected keyword argument '{name}'"):
        SparkModel(make_model(), **{name: 1})


def test_run_takes_no_settings_of_training():
    """`sparkdl.run` refuses the flat names of groups that it does not take."""
    with pytest.raises(TypeError, match=r"sparkdl.run\(\) got an unexpected keyword argument 'staleness'"):
        sparkdl.run(lambda worker: None, staleness=1)


@pytest.mark.parametrize(
    ("kind", "name", "value", "message"),
    [
        (Network, "bind_address", 5, "a string; got 5."),
        (Network, "advertised_host", b"host", "a string; got b'host'."),
        (
            Network,
            "port",
            "http",
            "a number from 0 to 65535, a range or a string \"first:last\"; got 'http'.",
        ),
        (Network, "port", "²", "a number from 0 to 65535"),
        (Network, "port", 70000, "a number from 0 to 65535"),
        (Network, "port", range(65535, 65537), "a number from 0 to 65535"),
        (Network, "port", True, "a number from 0 to 65535"),
        (Network, "port", None, "a number from 0 to 65535"),
        (Network, "tls", "yes", "True or False; got 'yes'."),
        (FaultTolerance, "start_timeout", 0, "a positive number of seconds; got 0."),
        (FaultTolerance, "start_timeout", None, "a positive number of seconds; got None."),
        (FaultTolerance, "stall_timeout", float("nan"), "a positive number of seconds; got nan."),
        (FaultTolerance, "stall_timeout", "60", "a positive number of seconds; got '60'."),
        (FaultTolerance, "max_restarts", -1, "a whole number of at least 0; got -1."),
        (FaultTolerance, "max_restarts", 1.5, "a whole number of at least 0; got 1.5."),
        (FaultTolerance, "on_worker_loss", "go on", "one of 'fail', 'continue'; got 'go on'."),
        (FaultTolerance, "recovery_every", 0, "a whole number of at least 1; got 0."),
        (Stragglers, "staleness", -1, "a whole number of at least 0; got -1."),
        (Stragglers, "quorum", 0, "a whole number of workers from 1 to num_workers, or a share of all"),
        (Stragglers, "quorum", 1.5, "a whole number of workers from 1 to num_workers, or a share of all"),
        (Stragglers, "straggler_timeout", 0, "a positive number of seconds; got 0."),
        (Stragglers, "late_updates", "keep", "one of 'drop', 'merge'; got 'keep'."),
    ],
)
def test_an_invalid_value_is_refused_by_name(kind, name, value, message):
    """A group refuses an invalid value when it is made, and so does the Param of the field."""
    with pytest.raises(ConfigError, match=f"^{name} should be {re.escape(message)}"):
        kind(**{name: value})
    param = re.sub(r"_(\w)", lambda found: found[1].upper(), name)
    if value is not None:  # None clears a Param
        with pytest.raises((ConfigError, TypeError), match=param):
            KerasEstimator(**{param: value})


def test_a_port_of_an_empty_range_is_refused():
    """A range without a port is refused."""
    with pytest.raises(ConfigError, match="^port should be a range of at least one port"):
        Network(port="7120:7100")


@pytest.mark.parametrize("group", GROUPS)
def test_another_object_is_no_group(group):
    """A dict, or another group, in place of a group is refused by name."""
    words = f"{group} should be a sparkdl.{GROUPS[group].__name__}; got "
    for value in ({"port": 1}, TrainConfig()):
        with pytest.raises(ConfigError, match=words):
            SparkModel(make_model(), **{group: value})


def test_params_are_exactly_the_leaf_fields():
    """There is a Param for each field of a group and each other setting, under the name of saved stages."""
    own = {each.name for each in dataclasses.fields(TrainConfig)} - GROUPS.keys()
    named = {re.sub(r"_(\w)", lambda found: found[1].upper(), each) for each in own | GROUP_OF.keys()}

    assert OF_SETTINGS.keys() == named
    assert set(SETTINGS) == named | {"customObjects", "distribution"}
    assert {"stragglerTimeout", "bindAddress", "maxRestarts", "batchSizePerWorker"} < named


def test_params_become_groups():
    """The Params of a stage are the settings of its SparkModel, without a warning."""
    of_params = arguments(
        KerasEstimator(port="7100:7120", maxRestarts=1, stragglerTimeout=2, quorum=1), SETTINGS
    )
    model = SparkModel(make_model(), **grouped(of_params))

    assert model.config == TrainConfig(
        network=Network(port=range(7100, 7121)),
        fault_tolerance=FaultTolerance(max_restarts=1),
        stragglers=Stragglers(quorum=1, straggler_timeout=2),
    )


def test_each_param_is_described_by_its_field():
    """The description of a Param is that of the field, with names in Spark's spelling."""
    params = {param.name: param.doc for param in KerasEstimator().params}

    assert params["bindAddress"].startswith(
        "the address that the endpoint listens on. None means spark.sparkdl."
    )
    assert "up to maxRestarts times" in params["onWorkerLoss"]
    assert params["batchSizePerWorker"] == "rows per step of each worker, instead of batchSize."


@pytest.mark.parametrize("group", [*GIVEN, Network(), FaultTolerance(), Stragglers()], ids=repr)
def test_a_group_is_a_value(group):
    """A group equals its repr's value and its pickled copy, can be a key, and cannot be changed."""
    assert group == eval(repr(group), {kind.__name__: kind for kind in GROUPS.values()})
    assert group == pickle.loads(pickle.dumps(group))
    assert {group: 1}[dataclasses.replace(group)] == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(group, dataclasses.fields(group)[0].name, None)


def test_the_signature_has_the_defaults_and_choices_of_the_settings():
    """SparkModel has the flat settings of TrainConfig with the same defaults, and the same choices."""
    found = inspect.signature(SparkModel).parameters
    for each in dataclasses.fields(TrainConfig):
        assert found[each.name].default == (None if each.name in GROUPS else each.default)

    assert set(get_args(ModeName)) == set(Mode)
    assert set(get_args(PlacementName)) == set(Placement)


def test_every_field_is_documented():
    """The docstring of each group describes its fields, in their order."""
    for kind in GROUPS.values():
        described = re.findall(r"^    (\w+): ", inspect.cleandoc(kind.__doc__), re.MULTILINE)
        assert described[:-1] == [each.name for each in dataclasses.fields(kind)]
        assert described[-1] == "ConfigError"


OLD = """{"mode": "synchronous", "frequency": 3, "num_workers": 4, "merge": "average",
"batch_size_per_worker": null, "start_timeout": 300, "max_restarts": 5, "stall_timeout": 9,
"on_worker_loss": "continue", "recovery_every": null, "share_gpus": false, "staleness": null, "quorum": 0.5,
"straggler_timeout": 2.5, "late_updates": "merge"}"""


def test_settings_saved_before_there_were_groups_are_loaded(tmp_path):
    """Settings are saved flat, as before there were groups, and loaded without a warning."""
    path = str(tmp_path / "model.keras")
    model = SparkModel(
        make_model(),
        frequency=3,
        num_workers=4,
        merge="average",
        network=Network(port=7100),
        fault_tolerance=FaultTolerance(max_restarts=5, stall_timeout=9, on_worker_loss="continue"),
        stragglers=Stragglers(quorum=0.5, straggler_timeout=2.5, late_updates="merge"),
    )
    here = dataclasses.replace(model.config, network=Network())  # the network is of the place of a run
    model.save(path)
    assert here == load_spark_model(path).config

    (tmp_path / "model.json").write_text(OLD)
    assert here == load_spark_model(path).config


def test_numbers_of_numpy_and_paths_are_taken():
    """Numbers and flags of NumPy are converted to Python's, and a folder may be a Path, as in Keras."""
    fit = FitConfig(
        batch_size=np.int64(32),
        epochs=np.int32(3),
        validation_split=np.float32(0.25),
        shuffle=np.bool_(True),
        profile=(np.int64(1), np.int64(2)),
        checkpoint=Path("folder"),
    )
    config = TrainConfig(
        frequency=np.int64(4), num_workers=np.int16(2), stragglers=Stragglers(quorum=np.float64(0.5))
    )

    assert (32, 3, 0.25, True, "folder") == (
        fit.batch_size,
        fit.epochs,
        fit.validation_split,
        fit.shuffle,
        fit.checkpoint.uri,
    )
    assert (4, 2) == (config.frequency, config.num_workers)
    assert {int} == {
        type(each) for each in (fit.batch_size, fit.epochs, config.frequency, config.num_workers)
    }
    for wrong in (np.bool_(True), np.float64(3.0), np.int64(0)):
        with pytest.raises(ConfigError, match="batch_size should be a whole number of at least 1"):
            FitConfig(batch_size=wrong)


def test_a_spark_model_is_saved_and_loaded_by_a_path(tmp_path):
    """SparkModel.save and load take a pathlib.Path."""
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    SparkModel(model, num_workers=3).save(tmp_path / "model.keras")

    assert 3 == SparkModel.load(tmp_path / "model.keras").config.num_workers
