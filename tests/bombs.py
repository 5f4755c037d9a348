"""Faults of workers in the middle of an epoch: they die or hang.

Code for executors is defined here and pickled by value: executors cannot import the tests.
"""

import os
import signal
import time
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from pyspark import TaskContext


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def hang():
    os.kill(os.getpid(), signal.SIGSTOP)


def kill_executor():
    """Kill the JVM above this Python worker, as the kernel does when memory runs out, then the worker.

    Otherwise the worker would train on until its daemon notices, and might finish.
    """
    daemon = Path(f"/proc/{os.getppid()}/stat").read_text()
    os.kill(int(daemon.rsplit(")", 1)[1].split()[1]), signal.SIGKILL)
    kill()


class Bomb:
    """A fault of a worker at its n-th batch, once per marker file.

    Args:
        marker: the file that records that the fault has happened.
        batch: the batch.
        act: the function that causes the fault.
        worker: the index of the worker.
        pause: seconds that each later batch of the other workers takes.
    """

    def __init__(self, marker, batch, act, *, worker=1, pause=0.0):
        self.marker, self.batch, self.act, self.seen = str(marker), batch, act, 0
        self.worker, self.pause = worker, pause

    def __call__(self):
        context = TaskContext.get()
        if context is not None and context.partitionId() == self.worker:
            self.seen += 1
            if self.seen == self.batch and not os.path.exists(self.marker):
                Path(self.marker).touch()
                self.act()
        if self.pause and context is not None and os.path.exists(self.marker):
            time.sleep(self.pause)
        return np.float32(0)

    def model(self, problem):
        """Return the problem's model with a loss that carries the bomb, and its custom objects."""
        bomb = self

        def loss_of_a_bomb(y_true, y_pred):
            plain = keras.losses.sparse_categorical_crossentropy(y_true, y_pred)
            return plain + tf.ensure_shape(tf.numpy_function(bomb, [], tf.float32), [])

        return problem.model(loss=loss_of_a_bomb), {"loss_of_a_bomb": loss_of_a_bomb}
