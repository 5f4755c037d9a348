"""The kinds of tasks that the driver sends to executors, without Spark."""

import dataclasses
import types

import cloudpickle
import numpy as np
import pytest

from sparkdl.data.batch_plan import BatchPlan
from sparkdl.data.blocks import TRAINING, VALIDATION, Block
from sparkdl.data.column import Column
from sparkdl.data.schema import Schema
from sparkdl.worker import task_rows, tasks
from sparkdl.worker.user_code import Code

SCHEMA = Schema((Column("x", (2,), "float32"), Column("y", (), "int64")), (0, 1))
ROWS = [
    task_rows.RddRows(schema=SCHEMA),
    task_rows.DealtRows(held_out=True),
    task_rows.ServedRows((2, 3), task_rows.DealtRows()),
    task_rows.ArrowRows(schema=SCHEMA, seed=3),
    task_rows.FunctionRows(schema=SCHEMA, function=max, workers=2),
]
CONTEXT = types.SimpleNamespace(partitionId=lambda: 1, taskAttemptId=lambda: 7, cpus=lambda: 0)


def kinds(base):
    """Return all subclasses of a class that are defined in the package."""
    found = [kind for kind in base.__subclasses__() if kind.__module__.startswith("sparkdl.")]
    return found + [each for kind in found for each in kinds(kind)]


@pytest.mark.parametrize(
    "kind", kinds(tasks.Task) + kinds(task_rows.TaskRows), ids=lambda kind: kind.__name__
)
def test_every_kind_of_task_is_a_frozen_dataclass(kind):
    """A task does not change after it was made, so that every executor gets the same."""
    assert dataclasses.is_dataclass(kind)
    assert kind.__dataclass_params__.frozen


@pytest.mark.parametrize("rows", ROWS, ids=lambda rows: type(rows).__name__)
def test_a_task_is_the_same_after_it_was_sent(rows):
    """Pickling keeps all values of a task."""
    task = tasks.TrainTask(Code(), rows, checked=frozenset((TRAINING,)))

    assert task == cloudpickle.loads(cloudpickle.dumps(task))


def test_the_rows_of_an_rdd_are_split_by_a_seed():
    """The same rows are held out whenever a partition is computed again."""
    rows = task_rows.RddRows(schema=SCHEMA, split=0.3, split_seed=5)
    given = [(np.ones(2), 1)] * 100

    first, again = ([(block.part, block.keys.tolist()) for block in rows.blocks(given, 4)] for _ in range(2))

    assert first == again
    assert {TRAINING, VALIDATION} == {part for part, _ in first}
    assert 100 == sum(len(keys) for _, keys in first)


@pytest.mark.parametrize(
    ("rows", "seeds", "origin"),
    [
        (task_rows.RddRows(schema=SCHEMA), (None, None), "row 5 of partition 2"),
        (task_rows.RddRows(schema=SCHEMA, place="worker"), (None, None), "row 5 of worker 2"),
        (task_rows.DealtRows(), (9, None), "row 5 of partition 2"),
        (task_rows.DealtRows(held_out=True), (9, 9), "row 5 of partition 2"),
        (task_rows.FunctionRows(schema=SCHEMA, function=max, workers=3), (None, None), "row 5 of worker 2"),
    ],
)
def test_keys_say_where_a_row_comes_from(rows, seeds, origin):
    """A row is named by its place and its position there; scrambled keys are known by their seeds."""
    keys = rows.keys(BatchPlan(rows=(), worker=0, batch_size=8, window=1, joint=True, shuffle=True, seed=9))

    assert seeds == keys.seeds
    assert origin == keys.origin((2 << 40) + 5)


def test_keys_of_a_dataframe_are_ids_of_spark():
    """Spark's monotonically increasing ids have the position of a row in their low 33 bits."""
    keys = task_rows.ArrowRows(schema=SCHEMA, seed=3).keys(None)

    assert (3, 3) == keys.seeds
    assert "row 5 of partition 2" == keys.origin((2 << 33) + 5)


def test_dealt_blocks_are_deals_of_all_rows():
    """A task that deals rows yields each of them once, with a worker."""
    task = tasks.DealTask(task_rows.RddRows(schema=SCHEMA), 3, seed=1)
    given = [(np.full(2, index), index) for index in range(50)]

    dealt = list(tasks.run(task, iter(given), tasks.TaskCall(CONTEXT)))

    assert {0, 1, 2} == {worker for worker, _ in dealt}
    assert list(range(50)) == sorted(label for _, block in dealt for label in block.columns[1].tolist())
    assert all(isinstance(block, Block) for _, block in dealt)


def test_a_call_without_an_endpoint_is_an_attempt_too():
    """The attempt has the task's numbers and at least one thread; worker 0 may serve its endpoint later."""
    attempt = tasks.TaskCall(CONTEXT, generation=2).attempt()

    assert (1, 7, 1, 2) == (attempt.worker, attempt.id, attempt.threads, attempt.generation)
    assert "" == attempt.endpoint.host


@pytest.mark.parametrize(("hosted", "worker"), [(None, 2), (0, 2), (1, 1)])
def test_an_error_names_the_worker_not_the_task(hosted, worker):
    """If an extra task precedes the workers of a hosted run, an error still has its worker's index."""
    job = types.SimpleNamespace(hosted=None if hosted is None else types.SimpleNamespace(ahead=hosted))
    context = types.SimpleNamespace(partitionId=lambda: 2)
    call = tasks.TaskCall(context, shared=types.SimpleNamespace(value=job))

    assert worker == tasks.TrainTask(Code(), ROWS[0]).worker(call)
