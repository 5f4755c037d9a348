"""The stages of a job, as they run in a Spark task once its preflight is over.

Each takes the task's iterator and always drains it: Spark ends a Python worker that leaves rows unread,
and with it every compiled function.
"""

from __future__ import annotations

import socket
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from sparkdl import client, feed, frames
from sparkdl.errors import DataError
from sparkdl.exchange import Endpoint
from sparkdl.feed import Block


def run(
    stage: str, iterator: Iterator[Any], context: Any, endpoint: tuple[Any, ...] | None,
    generation: int, shared: Any, objects: Any, builder: Any, options: dict[str, Any],
) -> Iterator[Any]:  # fmt: skip
    """Run a stage by its name.

    Args:
        stage: "deal", "train", "predict" or "evaluate".
        iterator: the task's rows.
        context: Spark's TaskContext.
        endpoint: the parts of the run's endpoint, where there is one.
        generation: which start of the gang the task belongs to.
        shared: the broadcast variable of the job.
        objects: the custom objects of the model.
        builder: the function that builds the model, where there is one.
        options: what else the stage takes.
    """
    where = Endpoint(*endpoint) if endpoint else None
    try:
        if stage == "deal":
            yield from _deal(iterator, context, options)
        elif stage == "train":
            assert where is not None  # noqa: S101 - training has an endpoint
            yield from _train(iterator, context, where, generation, shared, objects, builder, options)
        else:
            from sparkdl import inference

            stages: dict[str, Callable[..., Iterator[Any]]] = {
                "predict": inference.predict_stage, "evaluate": inference.evaluate_stage,
            }  # fmt: skip
            yield from stages[stage](iterator, shared.value, objects, builder, options, context)
    except DataError as error:
        if where is not None and stage == "deal":
            client.report_failure(
                where, kind="data", generation=generation, worker=context.partitionId(),
                host=socket.gethostname(), message=str(error), traceback=traceback.format_exc(),
            )  # fmt: skip
        raise


def blocks_of(iterator: Iterable[Any], encoding: str, partition: int, options: dict[str, Any]) -> Iterator[Block]:
    """Return the blocks of a task's rows.

    Args:
        iterator: tuples of an RDD ("rows"), dealt blocks ("dealt"), or Arrow batches ("arrow").
        encoding: which of these they are.
        partition: the index of the partition.
        options: "columns", and what the encoding takes besides.
    """
    if encoding == "dealt":
        return (block for _, block in iterator)
    columns = options["columns"]
    if encoding == "arrow":
        return frames.blocks_of_batches(iterator, columns, partition, options["seed"])
    blocks = feed.blocks_of_rows(iterator, columns, partition, options.get("part", feed.TRAINING))
    if options.get("split"):
        blocks = feed.hold_out(blocks, options["split"], options["split_seed"])
    return blocks


def _deal(iterator: Iterator[Any], context: Any, options: dict[str, Any]) -> Iterator[tuple[int, Block]]:
    blocks = blocks_of(iterator, "rows", context.partitionId(), options)
    return feed.deal(blocks, options["num_workers"], options["seed"])


def _train(
    iterator: Iterator[Any], context: Any, endpoint: Endpoint, generation: int, shared: Any,
    objects: Any, builder: Any, options: dict[str, Any],
) -> Iterator[Any]:  # fmt: skip
    from sparkdl import worker

    task = worker.Task(
        context.partitionId(), context.taskAttemptId(), max(1, context.cpus()), generation, endpoint
    )
    blocks = blocks_of(iterator, options["encoding"], task.worker, options)
    worker.train_task(shared.value, task, blocks, objects, builder)
    for _ in iterator:
        pass
    return iter(())
