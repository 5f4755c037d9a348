"""Contestants other than sparkdl: tf.distribute, torch DDP, TorchDistributor and Keras on JAX.

Each trains the model of ``contestants.py`` on the same rows, in ``spec.workers`` processes of one thread each
that start when the clock does. Rank 0 reports the ends of its epochs. Where a framework has no ``fit`` that
runs, the loop is that of its own guide.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import contestants
import harness
import numpy as np
from harness import Spec

ONE_THREAD = dict.fromkeys(
    ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"), "1"
)


def answer_of(rows: int, started: float, ends: list[float], accuracy: float) -> dict:
    """Return the seconds until the first epoch has ended, and the rate of the others."""
    warm = rows * (len(ends) - 1) / (ends[-1] - ends[0])
    return {"rows_per_second_warm": warm, "seconds_first": ends[0] - started, "accuracy": accuracy}


def in_processes(spec: Spec) -> dict:
    """Run this contestant again in one process per worker, and return the answer of rank 0."""
    started = time.perf_counter()
    settings = ONE_THREAD | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(contestants.free_port())}
    settings |= {"WORLD_SIZE": str(spec.workers), "SECOND_PORT": str(contestants.free_port())}
    command = [sys.executable, str(harness.CONTESTANTS), json.dumps(spec.__dict__)]
    processes = [
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | settings | {"RANK": str(rank), "STARTED": str(started)},
        )
        for rank in range(spec.workers)
    ]
    outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit(f"Processes failed: {[process.returncode for process in processes]}")
    return json.loads(outputs[0].splitlines()[-1])


def rank() -> int | None:
    """Return the rank of this process, or None if it starts the others."""
    return int(os.environ["RANK"]) if "RANK" in os.environ else None


def score(outputs: np.ndarray, labels: np.ndarray) -> float:
    """Return the accuracy of a model's outputs."""
    return float((np.asarray(outputs).argmax(axis=1) == labels).mean())


# --- tf.distribute ------------------------------------------------------------------------------


def strategy_of(spec: Spec):
    """Return TensorFlow's strategy for several processes."""
    ports = os.environ["MASTER_PORT"], os.environ["SECOND_PORT"]
    cluster = {"worker": [f"127.0.0.1:{port}" for port in ports[: spec.workers]]}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": rank()}})
    import tensorflow as tf

    return tf.distribute.MultiWorkerMirroredStrategy()


def mirrored(spec: Spec) -> dict:
    """Run ``fit`` of Keras 2 under MultiWorkerMirroredStrategy; Keras 3 does not support it."""
    if rank() is None:
        return in_processes(spec)
    strategy = strategy_of(spec)
    import tensorflow as tf
    import tf_keras

    (x, y), test = contestants.load(spec)
    with strategy.scope():
        model = contestants.make_model(spec, tf_keras)
    ends: list[float] = []
    clock = tf_keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: ends.append(time.perf_counter()))
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    batches = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x)).batch(spec.batch_size)
    epochs = 1 + spec.warm_epochs
    model.fit(batches.with_options(options), epochs=epochs, verbose=0, callbacks=[clock])
    accuracy = score(model(test[0], training=False), test[1])
    return answer_of(len(x), float(os.environ["STARTED"]), ends, accuracy)


def mirrored_loop(spec: Spec) -> dict:
    """Run the custom loop of TensorFlow's guide under MultiWorkerMirroredStrategy."""
    if rank() is None:
        return in_processes(spec)
    strategy = strategy_of(spec)
    import tensorflow as tf
    import tf_keras

    (x, y), test = contestants.load(spec)
    with strategy.scope():
        model = contestants.make_model(spec, tf_keras)
    share = slice(rank(), None, spec.workers)
    batches = tf.data.Dataset.from_tensor_slices((x[share], y[share])).shuffle(len(x))
    batches = batches.batch(spec.batch_size // spec.workers).prefetch(4)

    def step(images, labels):
        with tf.GradientTape() as tape:
            losses = tf_keras.losses.sparse_categorical_crossentropy(labels, model(images, training=True))
            loss = tf.reduce_sum(losses) / spec.batch_size
        gradients = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    run = tf.function(lambda images, labels: strategy.run(step, args=(images, labels)))
    ends = []
    for _ in range(1 + spec.warm_epochs):
        for images, labels in batches:
            run(images, labels)
        ends.append(time.perf_counter())
    accuracy = score(model(test[0], training=False), test[1])
    return answer_of(len(x), float(os.environ["STARTED"]), ends, accuracy)


# --- torch --------------------------------------------------------------------------------------


def torch_model(spec: Spec):
    """Return the model as a module of torch that returns logits."""
    from torch import nn

    if spec.model == "mlp":
        return nn.Sequential(
            *(nn.Linear(784, 128), nn.ReLU(), nn.Dropout(0.2)),
            *(nn.Linear(128, 128), nn.ReLU(), nn.Dropout(0.2)),
            nn.Linear(128, 10),
        )
    return nn.Sequential(
        *(nn.Unflatten(1, (1, 28, 28)), nn.Conv2d(1, 16, 3, 2), nn.ReLU(), nn.Conv2d(16, 32, 3, 2)),
        *(nn.ReLU(), nn.Flatten(), nn.Linear(32 * 36, 10)),
    )


def train_torch(spec: Spec, started: float) -> dict:
    """Train a torch module under DistributedDataParallel; batches are slices of a permutation."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    (x, y), test = contestants.load(spec)
    x, y = torch.from_numpy(x), torch.from_numpy(y).long()
    torch.manual_seed(spec.seed)
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch_model(spec))
    optimizer, loss_of = torch.optim.SGD(model.parameters(), 0.1), torch.nn.CrossEntropyLoss()
    share, ends = spec.batch_size // dist.get_world_size(), []
    for epoch in range(1 + spec.warm_epochs):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))
        for rows in order[dist.get_rank() :: dist.get_world_size()].split(share):
            optimizer.zero_grad()
            loss_of(model(x[rows]), y[rows]).backward()
            optimizer.step()
        ends.append(time.perf_counter())
    model.eval()
    with torch.no_grad():
        accuracy = score(model(torch.from_numpy(test[0])), test[1])
    dist.destroy_process_group()
    return answer_of(len(x), started, ends, accuracy)


def torch_ddp(spec: Spec) -> dict:
    """Run torch's DistributedDataParallel."""
    return in_processes(spec) if rank() is None else train_torch(spec, float(os.environ["STARTED"]))


def torch_distributor(spec: Spec) -> dict:
    """Run the same on Spark by ``TorchDistributor``."""
    os.environ.update(ONE_THREAD, PYTHONPATH=str(Path(__file__).parent))
    contestants.start_spark(spec)
    from pyspark.ml.torch.distributor import TorchDistributor

    distributor = TorchDistributor(num_processes=spec.workers, local_mode=False, use_gpu=False)
    return distributor.run(train_torch, spec, time.perf_counter())


def keras_ddp(spec: Spec) -> dict:
    """Run the loop of Keras's guide to distributed training with PyTorch."""
    if rank() is None:
        return in_processes(spec)
    import keras
    import torch
    import torch.distributed as dist

    (x, y), test = contestants.load(spec)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = contestants.make_model(spec, keras)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = torch.utils.data.TensorDataset(torch.from_numpy(x), torch.from_numpy(y).long())
    sampler = torch.utils.data.distributed.DistributedSampler(rows)
    loader = torch.utils.data.DataLoader(rows, sampler=sampler, batch_size=spec.batch_size // spec.workers)
    parallel, loss_of = torch.nn.parallel.DistributedDataParallel(model), torch.nn.NLLLoss()
    ends = []
    for epoch in range(1 + spec.warm_epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            loss_of(torch.log(parallel(images, training=True) + 1e-7), labels).backward()
            optimizer.step()
        ends.append(time.perf_counter())
    with torch.no_grad():
        accuracy = score(model(torch.from_numpy(test[0]), training=False), test[1])
    dist.destroy_process_group()
    return answer_of(len(x), float(os.environ["STARTED"]), ends, accuracy)


# --- JAX ----------------------------------------------------------------------------------------


def data_parallel(spec: Spec) -> dict:
    """Run ``fit`` of Keras on JAX under ``DataParallel``, one device of the CPU per worker."""
    flags = f"--xla_force_host_platform_device_count={spec.workers}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}"
    os.environ["JAX_CPU_ENABLE_ASYNC_DISPATCH"] = "false"  # else the devices starve each other
    import keras

    devices = keras.distribution.list_devices()
    keras.distribution.set_distribution(keras.distribution.DataParallel(devices=devices))
    return contestants.plain(spec)
