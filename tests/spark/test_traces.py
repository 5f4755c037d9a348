"""The report and the trace of a fit: their data, and settings and paths that are refused."""

import json

import jsonschema
import numpy as np
import pytest

from sparkdl import History, SparkModel
from sparkdl.errors import ConfigError
from sparkdl.transport.messages import ACTIVITIES

pytestmark = pytest.mark.spark


NUMBER = {"type": "number", "minimum": 0}
COUNT = {"type": "integer", "minimum": 0}
SPAN = {"ph": {"const": "X"}, "cat": {"type": "string"}, "name": {"enum": list(ACTIVITIES)}}
SPAN |= {"pid": COUNT, "tid": COUNT, "ts": NUMBER, "dur": NUMBER}
NAME = {"ph": {"const": "M"}, "name": {"const": "process_name"}, "pid": COUNT}
NAME |= {"args": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}}
SCHEMA = {  # the parts of Chrome's Trace Event Format that a trace has
    "type": "object",
    "properties": {
        "traceEvents": {
            "type": "array",
            "items": {
                "oneOf": [
                    {"properties": each, "required": list(each), "additionalProperties": False}
                    for each in (SPAN, NAME)
                ]
            },
        },
        "displayTimeUnit": {"enum": ["ms", "ns"]},
    },
    "required": ["traceEvents"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module", params=["asynchronous", "synchronous"])
def traced(request, spark, problem):
    """The History of a fit of two workers whose batches are all traced."""
    x, y = np.tile(problem.x, (20, 1)), np.tile(problem.y, 20)
    return SparkModel(problem.model(), mode=request.param, num_workers=2).fit(
        x, y, batch_size=16, epochs=3, verbose=0, validation_split=0.1, profile=(1, 1000)
    )


def test_a_report_has_the_last_state_of_each_worker(traced):
    """A run that is shorter than a heartbeat has all rows and the times of each worker, as of its end."""
    workers = traced.run["workers"]

    assert [3, 3] == [worker["epoch"] for worker in workers]
    assert list(traced.training["worker_rows"]) == [worker["seen"] for worker in workers]
    assert all(worker["speed"] > 0 and sum(worker["times"]) > 0 for worker in workers)


def test_a_trace_accounts_for_the_time(traced, tmp_path):
    """The spans of a worker are in order, do not overlap, and are together the seconds of its epochs."""
    traced.save_trace(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    names = [event["args"]["name"] for event in trace["traceEvents"] if event["ph"] == "M"]
    seconds = sum(traced.training["epoch_seconds"])
    waits = {"wait"} if traced.run["about"]["mode"] == "synchronous" else set()

    jsonschema.validate(trace, SCHEMA)
    assert [True, True] == [name.startswith(f"worker {worker} on ") for worker, name in enumerate(names)]
    for worker in (0, 1):
        mine = [event for event in spans if event["pid"] == worker]
        ends = [event["ts"] + event["dur"] for event in mine]

        assert {"data", "compute", "exchange", "merge"} | waits <= {event["name"] for event in mine}
        assert all(after["ts"] >= end - 1 for end, after in zip(ends, mine[1:], strict=False))
        # The driver checks every 0.1 s whether one of the three epochs has ended.
        assert seconds == pytest.approx(sum(event["dur"] for event in mine) / 1e6, rel=0.05, abs=0.3)


@pytest.mark.parametrize("profile", [(0, 5), (5, 4), (1, 2000), "10", (1.0, 2), (1,), (True, 2)])
def test_a_profile_that_is_no_range_is_refused(problem, profile):
    """A profile that is not a range of batches raises ConfigError before a job starts."""
    with pytest.raises(ConfigError, match="profile should be the first and the last batch"):
        SparkModel(problem.model(), num_workers=2).fit(problem.x, problem.y, profile=profile)


def test_a_profile_needs_an_endpoint_on_the_driver(problem):
    """A profile with an endpoint in worker 0, whose trace does not reach the driver, is refused."""
    with pytest.raises(ConfigError, match='profile needs placement="driver" or "executors"'):
        SparkModel(problem.model(), placement="worker").fit(problem.x, problem.y, profile=(1, 2))


def test_a_profile_after_the_last_batch_is_refused(spark, problem):
    """A profile that begins after the last batch raises ConfigError, and the weights stay as they were."""
    spark_model = SparkModel(problem.model(), num_workers=2)
    before = spark_model.model.get_weights()
    with pytest.raises(ConfigError, match="begins after the last batch"):
        spark_model.fit(problem.x, problem.y, profile=(100_000, 100_010), verbose=0)

    assert all(np.array_equal(a, b) for a, b in zip(before, spark_model.model.get_weights(), strict=True))


def test_files_that_cannot_be_written_are_errors(traced, tmp_path):
    """A path that cannot be written raises the error of Python, and a History without a fit has no report."""
    for save in (traced.report, traced.save_trace):
        with pytest.raises(FileNotFoundError):
            save(tmp_path / "missing" / "file")
    for save in (History().report, History().save_trace):
        with pytest.raises(ConfigError):
            save(tmp_path / "file")
