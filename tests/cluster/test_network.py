"""A standalone cluster whose workers are on other hosts than the master and the driver."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from network import ADDRESS, Network
from standalone import Standalone

HERE = Path(__file__).parent
pytestmark = [pytest.mark.cluster, pytest.mark.network]


@pytest.mark.whole
@pytest.mark.parametrize("mode", ["asynchronous", pytest.param("synchronous", marks=pytest.mark.whole)])
@pytest.mark.parametrize("seconds", [3, pytest.param(20, marks=pytest.mark.whole)])
def test_a_fit_outlasts_a_cut_link(tmp_path, mode, seconds):
    """A fit survives a cut of one of two links: every update counts once, and nothing is restarted."""
    with (
        Network(2) as network,
        Standalone(tmp_path, ADDRESS, {network.address(k): network.command(k) for k in (0, 1)}) as cluster,
        fit(cluster.url, mode) as process,
    ):
        assert "EPOCH" in process.stdout.readline()
        network.cut(0, network.driver)
        time.sleep(seconds)
        network.mend(0, network.driver)
        out = process.communicate(timeout=300)[0]

    report = json.loads(out.partition("REPORT ")[2])
    assert report["steps"] == report["weight"] == report["version"]
    assert report["superseded"] == report["restarts"] == 0


def fit(url, mode):
    """Start a fit; return its process."""
    settings = {
        "spark.driver.host": ADDRESS,
        "spark.driver.bindAddress": ADDRESS,
        "spark.executor.memory": "1g",
        "spark.ui.enabled": "false",
        "workers": "2",
    }
    pairs = [f"{name}={value}" for name, value in settings.items()]
    command = [sys.executable, HERE / "counting.py", url, mode, *pairs]
    environment = dict(os.environ, SPARK_LOCAL_IP=ADDRESS)
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
