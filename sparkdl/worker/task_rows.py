"""The rows of a task: the forms in which they reach an executor, and their conversion to blocks.

Each form is a frozen dataclass, which is sent to the executors as a part of the task.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from sparkdl.data import array_blocks
from sparkdl.data.batch_plan import BatchPlan
from sparkdl.data.blocks import (
    TRAINING,
    VALIDATION,
    Block,
    blocks_of_parts,
    blocks_of_rows,
    hold_out,
    parts_of,
)
from sparkdl.data.schema import Schema
from sparkdl.errors import DataError, SparkDLError
from sparkdl.process.reasons import own_lines, reason_of, text_of
from sparkdl.transport import client
from sparkdl.transport.exchange import Endpoint

if TYPE_CHECKING:
    from sparkdl.data.decoding import Decode

T = TypeVar("T")
# A user's function of a worker's index and the number of workers, which returns arguments of Keras's fit.
RowFunction = Callable[[int, int], Any]


class RowKeys(NamedTuple):
    """The meaning of the keys of a task's rows.

    Attributes:
        seeds: the seeds with which keys of training and validation rows were scrambled; None: they were not.
        place: the unit whose index is in the high bits of a key: "partition" or "worker".
        bits: number of low bits of a key. They hold the row's position within that partition or worker.
    """

    seeds: tuple[int | None, int | None] = (None, None)
    place: str = "partition"
    bits: int = 40  # as in data.blocks

    def origin(self, key: int) -> str:
        """Return a description of the row with a key that is not scrambled."""
        return f"row {key & (1 << self.bits) - 1} of {self.place} {key >> self.bits}"


class TaskRows(ABC):
    """The form in which rows reach a task."""

    @abstractmethod
    def blocks(
        self, given: Iterable[object], partition: int, endpoint: Endpoint | None = None
    ) -> Iterator[Block]:
        """Return the blocks of a task's rows.

        Args:
            given: the values that Spark gives the task.
            partition: the index of the task's partition.
            endpoint: the endpoint of the job, if there is one.
        """

    @abstractmethod
    def keys(self, plan: BatchPlan) -> RowKeys:
        """Return the meaning of the rows' keys in a run with this plan."""


@dataclass(frozen=True, kw_only=True)
class RddRows(TaskRows):
    """Rows of an RDD.

    Attributes:
        schema: the schema that every row has to match.
        part: the part that the rows belong to.
        place: the unit that a task's index counts: "partition", or "worker" if a worker has several
            partitions.
        split: the fraction of the rows that is moved to the validation part.
        split_seed: the seed of the random choice of these rows.
    """

    schema: Schema
    part: int = TRAINING
    place: str = "partition"
    split: float = 0.0
    split_seed: int = 0

    def blocks(
        self, given: Iterable[object], partition: int, endpoint: Endpoint | None = None
    ) -> Iterator[Block]:
        """Return the blocks of a task's rows."""
        blocks = blocks_of_rows(given, self.schema, partition, self.part, place=self.place)
        return hold_out(blocks, self.split, self.split_seed) if self.split else blocks

    def keys(self, plan: BatchPlan) -> RowKeys:
        """Return the meaning of the rows' keys."""
        return RowKeys(place=self.place)


@dataclass(frozen=True)
class DealtRows(TaskRows):
    """Pairs of a worker and a block that was dealt to it.

    Attributes:
        held_out: whether the validation rows were drawn from training rows, whose keys are scrambled.
    """

    held_out: bool = False

    def blocks(
        self, given: Iterable[Any], partition: int, endpoint: Endpoint | None = None
    ) -> Iterator[Block]:
        """Return the blocks."""
        return (block for _, block in given)

    def keys(self, plan: BatchPlan) -> RowKeys:
        """Return the meaning of the rows' keys."""
        seed = plan.seed if plan.shuffle else None
        return RowKeys((seed, seed if self.held_out else None))


@dataclass(frozen=True)
class ServedRows(TaskRows):
    """Blocks of arrays that the endpoint serves, and rows that were dealt to the worker, if there are any.

    Attributes:
        counts: the number of served blocks of each task.
        dealt: the form of the values that Spark gives the task; None: they hold no rows.
    """

    counts: tuple[int, ...]
    dealt: DealtRows | None = None

    def blocks(
        self, given: Iterable[object], partition: int, endpoint: Endpoint | None = None
    ) -> Iterator[Block]:
        """Yield the blocks that Spark gives the task, then those that the endpoint serves.

        Raises:
            TransportError: the endpoint does not answer.
        """
        assert endpoint is not None  # noqa: S101 - the driver makes it together with the blocks
        if self.dealt is not None:
            yield from self.dealt.blocks(given, partition)
        connection = client.Connection(endpoint, client.RETRIES, outage=client.OUTAGE_SECONDS)
        try:
            for index in range(self.counts[partition]):
                yield array_blocks.decode(connection.get(f"/v1/rows/{partition}/{index}"))
        finally:
            connection.close()

    def keys(self, plan: BatchPlan) -> RowKeys:
        """Return the meaning of the rows' keys."""
        return RowKeys() if self.dealt is None else self.dealt.keys(plan)


@dataclass(frozen=True, kw_only=True)
class ArrowRows(TaskRows):
    """Arrow batches of a DataFrame.

    Attributes:
        schema: the schema that every row has to match.
        seed: the seed that scrambles the rows' keys; None leaves them unchanged.
        decode: by column index, the function that converts the column's values to arrays.
    """

    schema: Schema
    seed: int | None = None
    decode: Mapping[int, Decode] = field(default_factory=dict)

    def blocks(
        self, given: Iterable[object], partition: int, endpoint: Endpoint | None = None
    ) -> Iterator[Block]:
        """Return the blocks of a task's rows."""
        from sparkdl.data import arrow

        columns = {TRAINING: self.schema.columns, VALIDATION: self.schema.held_out.columns}
        return arrow.blocks_of_batches(given, columns, self.seed, self.decode)

    def keys(self, plan: BatchPlan) -> RowKeys:
        """Return the meaning of the rows' keys, which are Spark's monotonically increasing IDs."""
        return RowKeys((self.seed, self.seed), bits=33)


@dataclass(frozen=True, kw_only=True)
class FunctionRows(TaskRows):
    """Rows that a user's function returns in the task.

    Attributes:
        schema: the schema that every row has to match.
        function: the function.
        workers: the number of workers, which is an argument of the function.
        held: the function and the schema of validation rows, if there are any.
        split: the fraction of the rows that is moved to the validation part.
        split_seed: the seed of the random choice of these rows.
    """

    schema: Schema
    function: RowFunction
    workers: int
    held: tuple[RowFunction, Schema] | None = None
    split: float = 0.0
    split_seed: int = 0

    def blocks(
        self, given: Iterable[object], partition: int, endpoint: Endpoint | None = None
    ) -> Iterator[Block]:
        """Return the blocks of the rows that the function returns; the given values are not read."""
        blocks = self._blocks(partition)
        return hold_out(blocks, self.split, self.split_seed) if self.split else blocks

    def _blocks(self, worker: int) -> Iterator[Block]:
        yield from blocks_of_parts(self._parts(self.function, worker, self.schema), self.schema, worker)
        if self.held is not None:
            function, schema = self.held
            yield from blocks_of_parts(self._parts(function, worker, schema), schema, worker, VALIDATION)

    def _parts(self, function: RowFunction, worker: int, schema: Schema) -> Iterator[tuple[Any, ...]]:
        return parts_made(function, worker, self.workers, labels=schema.labelled)

    def keys(self, plan: BatchPlan) -> RowKeys:
        """Return the meaning of the rows' keys."""
        return RowKeys(place="worker")


def parts_made(
    function: RowFunction, worker: int, workers: int, *, labels: bool
) -> Iterator[tuple[Any, ...]]:
    """Return the parts of the rows that a user's function returns.

    Args:
        function: the function.
        worker: the index of the worker.
        workers: the number of workers.
        labels: whether rows must have labels.

    Raises:
        DataError: the function raised an exception, or its result has none of the forms of ``parts_of``.
    """

    def parts() -> Iterator[tuple[Any, ...]]:
        yield from parts_of(function(worker, workers), labels=labels)

    return computed(parts(), f"worker {worker}")


def computed(rows: Iterable[T], place: str) -> Iterator[T]:
    """Yield rows; turn an exception of the user's function that computes them into a DataError.

    Args:
        rows: the rows.
        place: the place of the rows, for the error.

    Raises:
        DataError: the function raised an exception.
    """
    try:
        yield from rows
    except SparkDLError:
        raise
    except Exception as error:
        if not own_lines(text_of(error), others=False):
            raise  # an error of Spark, which the job reports
        reason = f"The rows of {place} could not be computed: {reason_of(error)}"
        raise DataError(reason, traceback=text_of(error)) from error
