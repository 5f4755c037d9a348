"""A run without Spark: the workers are threads, with the coordinator in the same process."""

import threading
from functools import partial

import keras
import numpy as np

from sparkdl.data.batch_plan import BatchPlan, even_split, ranks
from sparkdl.data.schema import Sample
from sparkdl.data.spill import Rows
from sparkdl.driver.epochs import DriverModel, Metrics
from sparkdl.modeling import (
    keras_metrics,
    keras_variables,
    losses,
    optimizers,
    proof,
    serialization,
    signature,
)
from sparkdl.modeling.backends.choice import distributed, make_replica, sliced_tables
from sparkdl.modeling.keras_variables import Layouts
from sparkdl.rules import choose
from sparkdl.server.aggregation import AggregationSpec, GradientRounds, make_aggregation
from sparkdl.server.coordinator import Coordinator
from sparkdl.server.local_exchange import LocalExchange
from sparkdl.server.state import RowsHeld, RunSpec
from sparkdl.worker.loop import Loop
from sparkdl.worker.strategies import TrainSettings


def train(
    model,
    x,
    y,
    sample_weight=None,
    *,
    mode="synchronous",
    window=1,
    rows,
    batch_size,
    epochs,
    loop=Loop,
    aggregation=None,
    steps_per_epoch=None,
    local_batch_size=None,
    distribution=None,
    merge=None,
    staleness=None,
    hybrid=None,
    world=None,
    paces=None,
    factor=None,
    seed=None,
    exchange=LocalExchange,
    seen=None,
    recovery=None,
    snapshot=None,
    coordinators=None,
    reports=None,
    goes_on=False,
    slices=1 << 20,
):
    """Train a model in place with one thread per entry of ``rows``, in the order of model.fit.

    With a ``seed`` each epoch has its own order. In a ``world`` time is virtual, and a batch of worker k
    takes ``paces[k]()`` seconds. ``seen`` is called with the snapshot of each epoch. The run resumes from
    ``snapshot`` if it is given. Its coordinator is appended to ``coordinators``, the workers' metrics at the
    end of each epoch to ``reports``. ``goes_on``: True if the run continues after the loss of a worker.

    Returns:
        The loss of each update, or round.
    """
    joint = mode == "synchronous" and window == 1
    parts = (x, y) if sample_weight is None else (x, y, sample_weight)
    sample = Sample.of(parts, signature.count_parts(model))
    schema = sample._replace(values=tuple(array[0] for array in sample.values)).schema("float32")
    keras_metrics.build_metrics(model, *schema.batch([array[:2] for array in sample.values]))
    spec, objects = serialization.freeze(model)
    layouts = Layouts.of(model)
    plan = BatchPlan(
        (),
        0,
        batch_size,
        window,
        joint,
        seed is not None,
        seed or 0,
        steps_per_epoch=steps_per_epoch,
        local_batch_size=local_batch_size,
    )
    rule, power = choose(merge, mode=mode, window=window)
    shape = RunSpec(
        run=b"r" * 16,
        layout=layouts.trainable.digest,
        num_workers=len(rows),
        plan=plan,
        epochs=epochs,
        metrics=keras_variables.layout_of(keras_variables.metric_variables(model)).nbytes,
        optimizer=layouts.optimizer.nbytes,
        generators=layouts.generators.nbytes,
        first_step=float(optimizers.batches_seen(model)),
        own=4 * layouts.trainable.size * rule.elastic,
        factor=factor,
        scaled=joint and optimizers.scales_loss(model),
        snapshot_intervals=(recovery,) if recovery else (),
        goes_on=goes_on,
    )
    center = layouts.trainable.pack(keras_variables.read(keras_variables.trainable(model)))
    held = layouts.statistics.pack(keras_variables.read(keras_variables.statistics(model)))
    make = aggregation or partial(make_aggregation, decays=keras_variables.decays(model))
    tables = sliced_tables(layouts.trainable, joint=joint)
    terms = AggregationSpec(mode, joint, len(rows), rule, staleness, hybrid, tables)
    coordinator = Coordinator(shape, make(terms, center, held))
    if snapshot is not None:
        coordinator.resume(snapshot, tuple(map(RowsHeld, rows)))
    if coordinators is not None:
        coordinators.append(coordinator)
    settings = TrainSettings(
        plan=plan,
        epochs=epochs,
        rounds=mode == "synchronous",
        validation_batch_size=batch_size,
        rule=rule,
        power=power,
        slices=slices,
    )
    errors = []

    def rows_of(places):
        columns = tuple(read_only(array[places]) for array in sample.values)
        return Rows(columns, schema)

    def work(worker):
        try:
            mine, none = rows_of(ranks(rows, worker)), rows_of(np.zeros(0, np.int64))
            with distributed(distribution, 0):
                replica = make_replica(serialization.thaw(spec, objects), joint=joint)
                keras_variables.set_generators(replica.model, spec.generators, worker)
                if paces is not None:
                    slow(replica, lambda: world.sleep(paces[worker]()))
                options = {"replica": replica, "rows": mine, "validation": none}
                loop(settings, worker, exchange=exchange(coordinator, worker), **options).run({})
        except Exception as error:  # noqa: BLE001 - raised below, in the thread of the test
            errors.append(error)
            coordinator.close()

    world = world or Threads()
    world.live_in(coordinator)
    for worker in range(len(rows)):
        world.spawn(work, worker)
    losses = []
    world.spawn(
        drive, coordinator, epochs, optimizers.learning_rate(model), losses, world.patience, seen, reports
    )
    world.run()
    if errors or coordinator.failure is not None:
        raise coordinator.failure or errors[0]
    snapshot = coordinator.snapshot
    keras_variables.write(keras_variables.trainable(model), layouts.trainable.unpack(snapshot.parameters))
    keras_variables.write(keras_variables.statistics(model), layouts.statistics.unpack(snapshot.statistics))
    optimizers.batches_seen(model).assign(round(snapshot.progress))
    return losses


def fit(model, x, y, sample_weight=None, *, mode="synchronous", window=1, rows, batch_size, epochs):
    """Train a model in place with the driver's part of ``SparkModel.fit``; return the history."""
    first = take((x, y) if sample_weight is None else (x, y, sample_weight), slice(1))
    whole = first if len(first) == 3 else (*first, None)
    predicted = keras_metrics.build_metrics(model, *whole)
    divides = losses.check(model, *whole, predicted)
    metrics = Metrics(model, first[1], predicted, losses.logged(model, ["train_step"], first))
    serialization.freeze(model, check=lambda again: proof.require_same(model, again, whole))
    driver = DriverModel(model, joint=mode == "synchronous" and window == 1)
    reports, snapshots = [], []
    found = train(
        model,
        x,
        y,
        sample_weight,
        mode=mode,
        window=window,
        rows=rows,
        batch_size=batch_size,
        epochs=epochs,
        reports=reports,
        seen=snapshots.append,
    )
    driver.load(snapshots[-1], rows)
    optimizers.finalize(model, driver.variables.trainable)
    shared = [(), ()] * epochs
    if divides and len(rows) > 1:
        plan = BatchPlan(rows, 0, batch_size, window, True, False, 0)
        parts = np.split(np.array(found), epochs)
        shared = [(part, plan.batch_rows(epoch)) for epoch, part in enumerate(parts)]
    merged = [metrics.merge(states, *of) for states, of in zip(reports, shared, strict=False)]
    return {name: [each[name] for each in merged] for name in merged[0]}


def drive(coordinator, epochs, learning_rate, losses, patience, seen, reports):
    """Drive a run; append the losses of its updates to ``losses``."""
    for epoch in range(coordinator.snapshot.epoch, epochs):
        coordinator.release(epoch, learning_rate)
        result = None
        while result is None:
            if coordinator.closed or coordinator.failure is not None:
                coordinator.close()
                return
            result = coordinator.wait_epoch(epoch, patience)
        losses += result.losses
        if reports is not None:
            reports.append(result.metrics)
        if seen is not None:
            seen(result.snapshot)
        coordinator.commit(result.snapshot)
    coordinator.stop()


class Threads:
    """A world in real time."""

    patience = 0.1

    def __init__(self):
        self.threads = []

    def live_in(self, coordinator):
        """Do nothing: a coordinator waits in real time by itself."""

    def spawn(self, function, *arguments):
        """Start a thread."""
        self.threads.append(threading.Thread(target=function, args=arguments))
        self.threads[-1].start()

    def run(self):
        """Wait for all threads to end."""
        for thread in self.threads:
            thread.join()


def slow(replica, pause):
    """Make a replica pause after every batch."""
    for name in ("step", "gradient"):
        method = getattr(replica, name)

        def slowed(*arguments, method=method):
            outcome = method(*arguments)
            pause()
            return outcome

        setattr(replica, name, slowed)


def read_only(array):
    """Return an array made read-only, as those of a spill are: Keras on torch multiplies weights in place."""
    array.flags.writeable = False
    return array


def take(data, places):
    """Return rows of an array, or of each array of a structure."""
    return keras.tree.map_structure(lambda array: array[places], data)


class OneDropped(GradientRounds):
    """A mutant that drops the last worker's gradients."""

    def _add(self, update):
        if update.worker < self.num_workers - 1:
            super()._add(update)


def merging_of(kind):
    """Return the argument of ``train`` for an aggregation of this kind."""
    return {
        "aggregation": lambda terms, center, held: kind(center, held, terms.num_workers, tables=terms.tables)
    }


__all__ = ["OneDropped", "even_split", "fit", "merging_of", "take", "train"]
