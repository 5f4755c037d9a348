"""The last checkpoint of a run."""

from types import SimpleNamespace
from unittest import mock

import keras
import numpy as np
import pytest

from sparkdl.driver.checkpoint_policy import FolderPolicy
from sparkdl.server.coordinator import Coordinator


def test_the_thread_ends_when_the_last_checkpoint_cannot_be_made():
    """If the last checkpoint fails, the error of the fit is raised and the checkpoint thread ends."""
    policy = mock.Mock(request=SimpleNamespace(model=mock.Mock(weights=[], stop_training=True)))
    policy._save.side_effect = MemoryError
    with mock.patch("sparkdl.driver.checkpoint_policy.replace"), pytest.raises(MemoryError):
        FolderPolicy.keep_last(policy, mock.Mock(spec=Coordinator, snapshot=None), {}, [])

    policy.checkpoints.close.assert_called_once_with()


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
