"""Whole applications on a standalone cluster: a fit as first statement, dynamic allocation, spark-submit."""

import json
import os
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import keras
import pytest
from standalone import Standalone

import sparkdl

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples"
ORDINARY = [
    (mode, frequency) for mode in ("asynchronous", "hogwild") for frequency in ("batch", "3", "epoch")
]
pytestmark = pytest.mark.cluster


def run(*command, **variables):
    """Run a command that must end within five minutes; return its output."""
    paths = [str(Path(sparkdl.__file__).parents[1]), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, paths)), **variables)
    process = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert process.returncode == 0, process.stdout[-3000:] + process.stderr[-6000:]
    return process.stdout


def report_of(script, master, mode, *, variables=(), own=(), **settings):
    """Return the report of a script in this folder."""
    common = {"ui.enabled": "false", "executor.memory": "1g", "driver.host": "127.0.0.1"}
    pairs = [f"spark.{name}={value}" for name, value in {**common, **settings}.items()]
    out = run(sys.executable, HERE / script, master, mode, *own, *pairs, **dict(variables))
    return json.loads(re.search(r"REPORT (.*)", out)[1])


first_statement = partial(report_of, "first_statement.py")


@pytest.mark.whole
def test_a_fit_may_be_the_first_statement(standalone, tmp_path):
    """A fit as first statement waits for executors to register and gives the result of plain Keras.

    They may take longer than Spark waits for them, and one longer than another, as if their images were still
    being fetched.
    """
    java = Path(os.environ["JAVA_HOME"], "bin", "java") if "JAVA_HOME" in os.environ else shutil.which("java")
    slow_java = tmp_path / "bin" / "java"
    slow_java.parent.mkdir()
    script = f'#!/bin/sh\nsleep 4\nmkdir {tmp_path}/first || sleep 6\nexec {java} "$@"\n'
    slow_java.write_text(script)
    slow_java.chmod(0o755)
    slow = {"executorEnv.JAVA_HOME": tmp_path, "scheduler.maxRegisteredResourcesWaitingTime": "1s"}

    report = first_statement(standalone, "synchronous", **{"cores.max": "2"}, **slow)

    assert report["workers"] == 2
    assert report["worker_rows"] == [45, 45]
    assert report["restarts"] == 0
    assert report["away"] < 1e-5


@pytest.mark.whole
@pytest.mark.parametrize("mode", ["synchronous", pytest.param("asynchronous", marks=pytest.mark.whole)])
def test_executors_may_come_and_go(standalone, mode):
    """A worker group forms under dynamic allocation, which allows no barrier stages.

    Until then the fit says what its workers wait for: for executors, which Spark starts on demand, and last
    for the import of Keras.
    """
    settings = {
        "dynamicAllocation.enabled": "true",
        "dynamicAllocation.shuffleTracking.enabled": "true",
        "dynamicAllocation.minExecutors": "0",
        "dynamicAllocation.maxExecutors": "2",
        "executor.cores": "1",
    }

    report = first_statement(standalone, mode, **settings)
    said = r"Still waiting for \d of 2 workers to start after \d+ s: (.+)\."
    reasons = list(dict.fromkeys(re.findall(said, "\n".join(report["messages"]))))

    assert ["executors are starting, or have no free slots", "they are importing Keras"] == reasons[-2:]
    assert report["worker_rows"] == [45, 45]
    assert report["loss"][-1] < report["loss"][0]
    assert report["away"] < 1e-5 or mode == "asynchronous"


@pytest.mark.whole
def test_where_spark_encrypts_so_do_workers():
    """Workers use TLS if Spark encrypts its network, without being asked to."""
    settings = {"authenticate": "true", "authenticate.secret": "known", "network.crypto.enabled": "true"}

    report = first_statement("local-cluster[2,1,1024]", "synchronous", **settings)

    assert "Workers and the endpoint use TLS 1.3." in report["messages"]
    assert report["away"] < 1e-5


@pytest.mark.whole
@pytest.mark.parametrize("setting", ORDINARY, ids="-".join)
def test_updates_count_once_where_spark_starts_a_second_attempt(tmp_path, setting):
    """Speculative copies of slow workers wait, or replace a stopped worker, and each update counts once.

    The replaced worker wakes up, is refused, and its task fails.
    """
    settings = {
        "speculation": "true",
        "speculation.task.duration.threshold": "3s",
        "speculation.interval": "100ms",
        "eventLog.enabled": "true",
        "eventLog.dir": tmp_path.as_uri(),
        "eventLog.rolling.enabled": "false",
        "eventLog.compress": "false",
        "executor.cores": "2",
        "cores.max": "4",
    }
    folder, (mode, frequency) = tmp_path / "cluster", setting
    own = "workers=2", f"frequency={frequency}", f"stopped={folder / 'stopped'}"
    folder.mkdir()
    with Standalone(folder, cores=2) as cluster:
        report = report_of("counting.py", cluster.url, mode, own=own, **settings)

    (log,) = (path for path in tmp_path.iterdir() if path.is_file() and not path.name.startswith("."))
    assert report["steps"] == report["weight"]
    assert report["superseded"] >= 1
    assert report["restarts"] == 0
    events = [json.loads(line) for line in log.read_text().splitlines()]
    began, ended = (
        [event for event in events if event["Event"] == f"SparkListenerTask{what}"]
        for what in ("Start", "End")
    )
    # A copy that is killed may end after the application.
    last = max(event["Stage ID"] for event in began)
    tasks = [event["Task Info"] for event in began if event["Stage ID"] == last]
    assert {0, 1} == {task["Index"] for task in tasks if task["Speculative"]}
    (first,) = (
        event
        for event in ended
        if (event["Stage ID"], event["Task Info"]["Index"], event["Task Info"]["Attempt"]) == (last, 1, 0)
    )
    assert first["Task End Reason"]["Reason"] == "ExceptionFailure"
    assert "superseded attempt" in first["Task End Reason"]["Description"]


@pytest.mark.whole
@pytest.mark.parametrize("mode", ["synchronous", pytest.param("hogwild", marks=pytest.mark.whole)])
def test_a_fit_whose_application_is_stopped_says_so(mode):
    """Stopping the application ends a fit with a ClusterError; no thread is left and the next fit trains."""
    moments = ["in an epoch", "in on_train_begin", "in on_epoch_begin"]
    require_named(report_of("stopped.py", "local[2]", mode, own=moments), moments)


def require_named(report, moments):
    """Require that each call says that Spark was stopped, and that nothing is left."""
    assert moments == list(report["raised"])
    for moment, raised in report["raised"].items():
        assert re.match("ClusterError: .*[Ss]park .*was stopped .*[Ss]tart a new session", raised), moment
    assert ([], 2) == (report["threads"], report["next"])


@pytest.mark.whole
def test_a_fit_on_executors_whose_application_is_stopped_says_so():
    """Workers that are lost because the application is stopped do not restart; nor does a fit wait longer."""
    moments = ["in an epoch", "in a wait for executors"]
    require_named(report_of("stopped.py", "local-cluster[2,1,1024]", "asynchronous", own=moments), moments)


@pytest.mark.whole
def test_any_call_whose_application_is_stopped_says_so():
    """Stopping the application ends every kind of call with a ClusterError."""
    moments = [
        "in evaluate",
        "in predict",
        "in predict of an RDD",
        "in a search",
        "in an ensemble",
        "in a job",
    ]
    moments += ["before a job", "in run"]
    require_named(report_of("stopped.py", "local[2]", "synchronous", own=moments), moments)


@pytest.mark.whole
def test_the_token_is_seen_nowhere(standalone, tmp_path):
    """The token appears in no event log, UI page, command line, environment, log or error."""
    settings = {
        "eventLog.enabled": "true",
        "eventLog.dir": tmp_path.as_uri(),
        "eventLog.rolling.enabled": "false",
        "eventLog.compress": "false",
        "ui.enabled": "true",
        "ui.port": "0",
    }
    report = report_of("token_seen.py", standalone, "asynchronous", **settings)

    (log,) = (path for path in tmp_path.iterdir() if path.is_file() and not path.name.startswith("."))
    assert report["token"] not in log.read_text()
    assert [] == report["seen"]
    assert "RuntimeError: broken" in report["error"]
    for words in ("Spark Executor Command", "spark.app.id", "Details for Stage"):
        assert any(words in page for page in report["pages"].values())


def gpus(folder):
    """Return settings of a cluster whose workers find three GPUs each and assign one to a task."""
    script = folder / "find_gpus.sh"
    script.write_text("""#!/bin/sh\necho '{"name": "gpu", "addresses": ["0", "1", "2"]}'\n""")
    script.chmod(0o755)
    return {
        "worker.resource.gpu.amount": "3",
        "worker.resource.gpu.discoveryScript": str(script),
        "executor.resource.gpu.amount": "1",
        "task.resource.gpu.amount": "1",
    }


VISIBLE = {"CUDA_VISIBLE_DEVICES": "5,6,7"}.items()


@pytest.mark.whole
def test_tasks_take_the_gpus_that_spark_gave_them(tmp_path):
    """GPU addresses from Spark count within CUDA_VISIBLE_DEVICES."""
    settings = {"shareGpus": "true", **gpus(tmp_path)}
    report = first_statement("local-cluster[2,1,1024]", "synchronous", variables=VISIBLE, **settings)

    assert report["gpus"] == [["5"], ["5"]]  # Spark believes that there are two hosts


@pytest.mark.whole
def test_two_workers_on_one_gpu_are_refused(tmp_path):
    """Two workers on one GPU of a host are refused unless share_gpus=True."""
    with pytest.raises(AssertionError, match="Workers 0 and 1 both use GPU 5 of .* pass share_gpus=True"):
        first_statement("local-cluster[2,1,1024]", "synchronous", variables=VISIBLE, **gpus(tmp_path))


@pytest.mark.whole
def test_tasks_take_turns_on_the_gpus_of_a_machine():
    """In local mode, where Spark assigns no GPUs, each task gets one of the visible GPUs."""
    variables = {"CUDA_VISIBLE_DEVICES": "3,1"}.items()

    assert first_statement("local[2]", "asynchronous", variables=variables)["gpus"] == [["3"], ["1"]]


@pytest.mark.whole  # CI submits it to local-cluster, with a packed environment
def test_the_example_is_submitted(standalone, tmp_path):
    """The example trains on both workers of the cluster by spark-submit and saves a model."""
    import pyspark

    submit = Path(pyspark.__file__).parent / "bin" / "spark-submit"
    options = [
        "--master",
        standalone,
        "--conf",
        "spark.executor.memory=1g",
        "--conf",
        "spark.ui.enabled=false",
    ]
    arguments = ["--rows", "2000", "--epochs", "2", "--save", tmp_path / "images.keras"]

    out = run(submit, *options, EXAMPLES / "spark_submit_job.py", *arguments)

    accuracy = float(re.search(r"2 workers, loss [\d.]+, accuracy ([\d.]+)", out)[1])
    assert accuracy > 0.6
    assert keras.saving.load_model(tmp_path / "images.keras").count_params() == 101_770
