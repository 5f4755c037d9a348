"""Two workers on one GPU are refused if both compute on it."""

import pytest

from sparkdl.driver.start_report import gpus_of
from sparkdl.errors import ConfigError
from sparkdl.server.state import Member


def members_of(*workers):
    """Return workers that reported this: host, GPUs, and True if they compute on them."""
    return {
        index: Member(0, host=host, pid=0, heard=0.0, notes={"gpus": gpus, "on_gpu": on_gpu})
        for index, (host, gpus, on_gpu) in enumerate(workers)
    }


ONE = ("a", ["0"], True)


def test_two_workers_on_one_gpu_are_refused_unless_they_may_share_it():
    """The error names both workers, the GPU, the host and the remedy, unless share_gpus is set."""
    twice = members_of(ONE, ("a", ["1"], True), ONE)

    with pytest.raises(ConfigError, match=r"Workers 0 and 2 both use GPU 0 of a\. .* share_gpus=True"):
        gpus_of(twice, shared=False)
    assert [["0"], ["1"], ["0"]] == gpus_of(twice, shared=True)


@pytest.mark.parametrize("other", [("b", ["0"], True), ("a", ["1"], True), ("a", [], False)])
def test_workers_on_other_gpus_and_hosts_are_not(other):
    """Workers on different GPUs, or on different hosts, are accepted."""
    assert [["0"], other[1]] == gpus_of(members_of(ONE, other), shared=False)


def test_a_backend_that_computes_on_no_gpu_shares_none():
    """A backend without GPU support shares no GPU, even on a machine that has one."""
    idle = ("a", ["0"], False)

    assert [["0"], ["0"]] == gpus_of(members_of(idle, idle), shared=False)
