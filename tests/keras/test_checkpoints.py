"""The last checkpoint of a run."""

from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import keras
import numpy as np
import pytest

from sparkdl.config import CheckpointConfig, FitConfig, TrainConfig
from sparkdl.driver.checkpoint_policy import FolderPolicy, checkpoint_policy
from sparkdl.errors import ConfigError
from sparkdl.server.coordinator import Coordinator
from sparkdl.server.state import Snapshot


def test_the_thread_ends_when_the_last_checkpoint_cannot_be_made():
    """If the last checkpoint fails, the error of the fit is raised and the checkpoint thread ends."""
    policy = mock.Mock(request=SimpleNamespace(model=mock.Mock(weights=[], stop_training=True)))
    policy._save.side_effect = MemoryError
    with mock.patch("sparkdl.driver.checkpoint_policy.replace"), pytest.raises(MemoryError):
        FolderPolicy.keep_last(policy, mock.Mock(spec=Coordinator, snapshot=None), {}, [])

    policy.checkpoints.close.assert_called_once_with()


def in_snapshot(snapshot):
    return snapshot


def at_the_epochs_start(snapshot):
    return replace(snapshot, rule={"momentum": 1.0}, before=snapshot)


@pytest.mark.parametrize("place", [in_snapshot, at_the_epochs_start])
@pytest.mark.parametrize(
    ("state", "expected"), [({"momentum": 0.0}, "a dict with 'momentum'"), ({}, "a dict with no keys")]
)
def test_a_rules_state_of_another_structure_is_named(place, state, expected):
    """A run whose rule has changed ends with an error, and the coordinator keeps its own state."""
    saved = Snapshot(0, np.zeros(2, "f"), np.zeros(0, "f"), 1, 1.0, rule={"velocity": 1.0})
    policy = mock.Mock(resumed=SimpleNamespace(snapshot=place(saved), counters={}))
    policy.rule.name = "mine"
    coordinator = mock.Mock(spec=Coordinator, aggregation=SimpleNamespace(state=state))
    message = (
        f"'mine' should have the same structure in .* this run: Expected {expected}. Use the rule's code"
    )
    with pytest.raises(ConfigError, match=message):
        FolderPolicy.restore(policy, coordinator)

    coordinator.resume.assert_not_called()


def test_a_checkpoint_needs_an_endpoint_on_the_driver(tmp_path):
    """An endpoint in worker 0 is refused, and the error names the placements that write checkpoints."""
    fit, config = FitConfig(checkpoint=CheckpointConfig(str(tmp_path))), TrainConfig(placement="worker")
    with pytest.raises(ConfigError, match='placement="driver" or "executors", since .* placement="worker"'):
        checkpoint_policy(SimpleNamespace(fit=fit, config=config), None, None, {})


@pytest.mark.parametrize("value", [0, 1, np.True_, "yes"])
def test_a_run_may_be_stopped_by_any_true_value(value):
    """A checkpoint says True or False for whatever a callback sets ``stop_training`` to."""
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.stop_training = value
    history = SimpleNamespace(history={}, epoch=[])
    policy = mock.Mock(request=SimpleNamespace(model=model, history=history))
    FolderPolicy._save(policy, mock.Mock(spec=Coordinator, held=(), counters={}), None, None)

    saved, _ = policy.checkpoints.save.call_args.args
    assert saved.stopped is bool(value)
