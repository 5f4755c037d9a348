"""The last checkpoint of a run."""

from types import SimpleNamespace
from unittest import mock

import pytest

from sparkdl.driver.checkpoint_policy import FolderPolicy
from sparkdl.server.coordinator import Coordinator


def test_the_thread_ends_when_the_last_checkpoint_cannot_be_made():
    """If the last checkpoint fails, the error of the fit is raised and the checkpoint thread ends."""
    policy = mock.Mock(request=SimpleNamespace(model=mock.Mock(weights=[], stop_training=True)))
    policy._save.side_effect = MemoryError
    with mock.patch("sparkdl.driver.checkpoint_policy.replace"), pytest.raises(MemoryError):
        FolderPolicy.keep_last(policy, mock.Mock(spec=Coordinator, cut=None), {}, [])

    policy.checkpoints.close.assert_called_once_with()
