"""Workers that die, or stand still, in the middle of an epoch.

All that goes to executors is in here: they have no tests, and get what they need of this module whole.
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
    """Kill the JVM above this Python worker, as the kernel does where memory runs out, and then the worker.

    Left alone the worker would train on until its daemon finds out, and might well finish.
    """
    daemon = Path(f"/proc/{os.getppid()}/stat").read_text()
    os.kill(int(daemon.rsplit(")", 1)[1].split()[1]), signal.SIGKILL)
    kill()


class Bomb:
    """What a worker does to itself at its n-th batch, once in all: a file says that it was done.

    Args:
        marker: the file.
        batch: the batch.
        act: what is done.
        worker: which worker it is.
        pause: how many seconds each batch of the others takes once it was done.
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
        """Return the problem's model with a loss that carries the bomb, and the custom objects it needs."""
        bomb = self

        def loss_of_a_bomb(y_true, y_pred):
            plain = keras.losses.sparse_categorical_crossentropy(y_true, y_pred)
            return plain + tf.ensure_shape(tf.numpy_function(bomb, [], tf.float32), [])

        return problem.model(loss=loss_of_a_bomb), {"loss_of_a_bomb": loss_of_a_bomb}
