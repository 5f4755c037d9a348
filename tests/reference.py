"""The reference answers: each training rule computed one worker after the other.

The module imports nothing of sparkdl or Spark and uses no socket or thread. Replicas of one Keras model take
turns in this process. In synchronous modes all train, then all merge. In asynchronous modes each trains,
merges and pulls before the next one's turn, so that soon every update is K - 1 versions stale; hogwild has
the same arithmetic.

Letters and signs are those of the design notes: c is the center, delta = after - before, n_k are the rows
that worker k used, staleness is the number of versions merged since its last pull, K is the number of
workers. Trainable weights follow the rule. Statistics (BatchNorm's moving mean and variance) are the moving
averages of all batches in the order of merging; batches of one round have equal weights. Each replica keeps
its optimizer for the whole run. A learning-rate schedule follows the replica's own iterations here, so
compare runs with a constant rate.

Every function takes a ``make_model`` that returns a compiled model, the initial ``weights`` (as of
``get_weights``) and the arrays, and returns a compiled model that holds the final weights. Row i belongs to
worker i % K. ``seed=None`` keeps the rows in their order; a number reshuffles each worker's rows every epoch.
"""

from itertools import chain, zip_longest

import numpy as np
import tensorflow as tf

RULES = {
    "sum": lambda delta, staleness, workers: delta,
    "average": lambda delta, staleness, workers: delta / workers,
    "dynsgd": lambda delta, staleness, workers: delta / (staleness + 1),
}


class Replica:
    """A simulated worker: a model with its own optimizer, and its share of the rows."""

    def __init__(self, model, x, y, *, batch_size, seed, even=False):
        self.model, self.x, self.y = model, x, y
        self.batch_size, self.seed, self.even = batch_size, seed, even

    def pull(self, center, version=0):
        """Start the next window from the center."""
        self.model.set_weights(center)
        self.before, self.version = center, version

    def batches(self, epoch):
        """Return the row numbers of each batch; the last is shorter, or all are nearly equal if ``even``."""
        rows = np.arange(len(self.x))
        if self.seed is not None:
            np.random.default_rng([*self.seed, epoch]).shuffle(rows)
        if self.even and len(rows):
            return np.array_split(rows, -(-len(rows) // self.batch_size))
        return [rows[i : i + self.batch_size] for i in range(0, len(rows), self.batch_size)]

    def windows(self, epoch, frequency):
        """Train window by window; yield the delta and the rows of each."""
        batches = self.batches(epoch)
        size = {"batch": 1, "epoch": len(batches)}.get(frequency, frequency)
        for start in range(0, len(batches), max(size, 1)):
            window = batches[start : start + size]
            for rows in window:
                self.model.train_on_batch(self.x[rows], self.y[rows])
            after = self.model.get_weights()
            yield [a - b for a, b in zip(after, self.before, strict=True)], sum(map(len, window))

    def run(self, epochs, frequency):
        """Train all epochs; yield the delta and the rows of each window."""
        for epoch in range(epochs):
            yield from self.windows(epoch, frequency)


def deal(make_model, weights, x, y, *, workers, batch_size, seed):
    """Return K replicas with the same weights, row i dealt to worker i % K."""
    replicas = []
    for k in range(workers):
        worker_seed = None if seed is None else (seed, k)
        model, share = make_model(), slice(k, None, workers)
        settings = {"batch_size": batch_size, "seed": worker_seed, "even": workers > 1}
        replicas.append(Replica(model, x[share], y[share], **settings))
        replicas[k].pull(weights)
    return replicas


def synchronous_batch(make_model, weights, x, y, *, workers, batch_size, epochs, seed=None):
    """Train on large batches split over K workers, with their gradients averaged by rows."""
    model = make_model()
    model.set_weights(weights)
    whole = Replica(model, x, y, batch_size=batch_size, seed=None if seed is None else (seed,))

    @tf.function(reduce_retracing=True)
    def gradient(features, labels):
        with tf.GradientTape() as tape:
            loss = model.compute_loss(features, labels, model(features, training=True))
        return tape.gradient(loss, model.trainable_weights)

    for batch in chain.from_iterable(whole.batches(epoch) for epoch in range(epochs)):
        shares = [batch[k::workers] for k in range(workers) if len(batch[k::workers])]
        gradients = [gradient(x[rows], y[rows]) for rows in shares]
        scaled = [
            [g * (len(rows) / len(batch)) for g in grads]
            for grads, rows in zip(gradients, shares, strict=True)
        ]
        mean = [tf.add_n(parts) for parts in zip(*scaled, strict=True)]
        model.optimizer.apply(mean, model.trainable_weights)
    return model


def average(deltas, rows):
    """Return sum(n_k delta_k) / sum(n_k), variable by variable."""
    return [
        sum(d * (n / sum(rows)) for d, n in zip(ds, rows, strict=True)) for ds in zip(*deltas, strict=True)
    ]


class Nesterov:
    """An outer optimizer: v = momentum v + mean, c += rate (mean + momentum v)."""

    def __init__(self, rate, momentum):
        self.rate, self.momentum, self.velocity = rate, momentum, None

    def __call__(self, deltas, rows):
        mean = average(deltas, rows)
        before = self.velocity or [0 * m for m in mean]
        self.velocity = [self.momentum * v + m for v, m in zip(before, mean, strict=True)]
        return [self.rate * (m + self.momentum * v) for m, v in zip(mean, self.velocity, strict=True)]


def synchronous(
    make_model, weights, x, y, *, workers, batch_size, epochs, frequency, seed=None, combine=average
):
    """Train local steps from a common center; c += the combined deltas of each round."""
    replicas = deal(make_model, weights, x, y, workers=workers, batch_size=batch_size, seed=seed)
    momenta = momenta_of(replicas[0].model)
    center = weights

    def moved(deltas, rows, momentum):
        """Return the mean of the moving averages of the windows, extended to the steps of all."""
        steps = [-(-n // batch_size) for n in rows]
        seen = [d / (1 - momentum**n) for d, n in zip(deltas, steps, strict=True)]
        return (1 - momentum ** sum(steps)) * np.average(seen, axis=0, weights=rows)

    for epoch in range(epochs):
        for updates in zip_longest(*(r.windows(epoch, frequency) for r in replicas)):
            deltas, rows = zip(*(update for update in updates if update is not None), strict=True)
            step = combine(deltas, rows)
            step = [
                s if momentum is None else moved(ds, rows, momentum)
                for s, ds, momentum in zip(step, zip(*deltas, strict=True), momenta, strict=True)
            ]
            center = [c + s for c, s in zip(center, step, strict=True)]
            for replica in replicas:
                replica.pull(center)
    return replicas[0].model


def elastic(make_model, weights, x, y, *, workers, batch_size, epochs, frequency, alpha, seed=None):
    """Train workers that keep their own weights: e = alpha (w - c), w -= e, and c += the sum of all e."""
    replicas = deal(make_model, weights, x, y, workers=workers, batch_size=batch_size, seed=seed)
    center = weights
    for replica in replicas:
        replica.before = [0 * w for w in weights]  # so that a window yields the weights themselves
    for epoch in range(epochs):
        for windows in zip_longest(*(r.windows(epoch, frequency) for r in replicas)):
            present = [(r, w[0]) for r, w in zip(replicas, windows, strict=True) if w is not None]
            pulls = [[alpha * (w - c) for w, c in zip(own, center, strict=True)] for _, own in present]
            for (replica, own), pull in zip(present, pulls, strict=True):
                replica.model.set_weights([w - e for w, e in zip(own, pull, strict=True)])
            center = [c + sum(es) for c, *es in zip(center, *pulls, strict=True)]
    replicas[0].model.set_weights(center)
    return replicas[0].model


def elastic_in_turn(make_model, weights, x, y, *, workers, batch_size, epochs, frequency, alpha, seed=None):
    """Train elastic workers without rounds: each pulls toward the current center, then moves it."""
    replicas = deal(make_model, weights, x, y, workers=workers, batch_size=batch_size, seed=seed)
    center = weights
    for replica in replicas:
        replica.before = [0 * w for w in weights]
    working = [(replica, replica.run(epochs, frequency)) for replica in replicas]
    while working:
        for replica, turn in list(working):
            own, _ = next(turn, (None, 0))
            if own is None:
                working.remove((replica, turn))
                continue
            pull = [alpha * (w - c) for w, c in zip(own, center, strict=True)]
            replica.model.set_weights([w - e for w, e in zip(own, pull, strict=True)])
            center = [c + e for c, e in zip(center, pull, strict=True)]
    replicas[0].model.set_weights(center)
    return replicas[0].model


def asynchronous(make_model, weights, x, y, *, workers, batch_size, epochs, frequency, rule, seed=None):
    """Train workers in turn: train a window from the last pull, merge its delta, pull."""
    replicas = deal(make_model, weights, x, y, workers=workers, batch_size=batch_size, seed=seed)
    momenta = momenta_of(replicas[0].model)
    center, version = weights, 0

    def merged(replica, delta, rows):
        staleness, steps = version - replica.version, -(-rows // batch_size)
        for c, d, before, momentum in zip(center, delta, replica.before, momenta, strict=True):
            if momentum is None:
                yield c + RULES[rule](d, staleness, workers)
            else:
                yield momentum**steps * (c - before) + before + d

    working = [(replica, replica.run(epochs, frequency)) for replica in replicas]
    while working:
        for replica, turn in list(working):
            update = next(turn, None)
            if update is None:
                working.remove((replica, turn))
                continue
            center, version = list(merged(replica, *update)), version + 1
            replica.pull(center, version)
    replicas[0].pull(center)
    return replicas[0].model


def momenta_of(model):
    """Return for each weight the momentum of its moving average, or None if it is not one."""
    known = {
        id(variable): layer.momentum
        for layer in model.layers
        for variable in layer.non_trainable_variables
        if hasattr(layer, "momentum")
    }
    return [known.get(id(variable)) for variable in model.weights]
