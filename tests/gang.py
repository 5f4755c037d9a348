"""A run without Spark: the workers are threads, their store is in the same process."""

import threading
from functools import partial

import keras
import numpy as np

from sparkdl import models
from sparkdl.backends import distributed, make_replica
from sparkdl.batches import Plan, even_split, ranks
from sparkdl.exchange import LocalExchange
from sparkdl.feed import Rows
from sparkdl.merging import GradientRounds, make_merging
from sparkdl.rules import choose_rule
from sparkdl.schema import Sample
from sparkdl.store import ParameterStore, RunShape
from sparkdl.worker import Loop, TrainSettings


def train(
    model, x, y, sample_weight=None, *, mode="synchronous", window=1, rows, batch_size, epochs, loop=Loop,
    merging=None, steps_per_epoch=None, distribution=None,
):  # fmt: skip
    """Train a model in place with one thread per entry of ``rows``, in the order of model.fit.

    Returns:
        The loss of each update, or round.
    """
    joint = mode == "synchronous" and window == 1
    parts = (x, y) if sample_weight is None else (x, y, sample_weight)
    sample = Sample.of(parts, models.count_parts(model))
    schema = sample._replace(values=tuple(array[0] for array in sample.values)).schema("float32")
    models.build_metrics(model, *schema.batch([array[:2] for array in sample.values]))
    spec, objects = models.freeze(model)
    layouts = models.Layouts.of(model)
    plan = Plan((), 0, batch_size, window, joint, shuffle=False, seed=0, steps_per_epoch=steps_per_epoch)
    rule = choose_rule(None, synchronous=mode == "synchronous", window=window)
    shape = RunShape(
        run=b"r" * 16, layout=layouts.trainable.digest, num_workers=len(rows), plan=plan, epochs=epochs,
        metrics=models.layout_of(models.metric_variables(model)).nbytes,
        optimizer=layouts.optimizer.nbytes, generators=layouts.generators.nbytes,
        first_step=float(models.batches_seen(model)),
    )  # fmt: skip
    center = layouts.trainable.pack(models.read(models.trainable(model)))
    held = layouts.statistics.pack(models.read(models.statistics(model)))
    make = merging or partial(make_merging, decays=models.decays(model))
    store = ParameterStore(shape, make(joint, mode, center, held, len(rows), rule))
    settings = TrainSettings(plan, epochs, mode == "synchronous", rule, batch_size)
    errors = []

    def rows_of(places):
        columns = tuple(read_only(array[places]) for array in sample.values)
        return Rows(columns, np.arange(len(places), dtype=np.uint64), schema)

    def work(worker):
        try:
            mine, none = rows_of(ranks(rows, worker)), rows_of(np.zeros(0, np.int64))
            with distributed(distribution, 0):
                replica = make_replica(models.thaw(spec, objects), joint=joint)
                loop(settings, worker, replica, mine, none, LocalExchange(store, worker)).run({})
        except Exception as error:  # noqa: BLE001 - raised below, in the thread of the test
            errors.append(error)
            store.close()

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(len(rows))]
    for thread in threads:
        thread.start()
    losses, cut = [], store.cut
    for epoch in range(epochs):
        store.release(epoch, models.learning_rate(model))
        result = None
        while result is None and not errors:
            result = store.wait_epoch(epoch, 0.1)
        if errors:
            break
        losses += result.losses
        cut = result.cut
        store.commit(cut)
    store.stop()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    models.write(models.trainable(model), layouts.trainable.unpack(cut.parameters))
    models.write(models.statistics(model), layouts.statistics.unpack(cut.statistics))
    models.batches_seen(model).assign(round(cut.progress))
    return losses


def read_only(array):
    """Return an array that is read-only, as a spool's are: Keras on torch multiplies weights in place."""
    array.flags.writeable = False
    return array


def take(data, places):
    """Return some rows of an array, or of each array of a structure."""
    return keras.tree.map_structure(lambda array: array[places], data)


class OneDropped(GradientRounds):
    """A mutant: the last worker's gradients are lost."""

    def _add(self, update):
        if update.worker < self.num_workers - 1:
            super()._add(update)


def merging_of(kind):
    """Return the argument of ``train`` that merges gradients in this way."""
    return {"merging": lambda joint, mode, center, held, workers, rule: kind(center, held, workers)}


__all__ = ["OneDropped", "even_split", "merging_of", "take", "train"]
