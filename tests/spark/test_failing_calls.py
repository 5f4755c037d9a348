"""A fit in which any one call fails continues exactly or ends with a named error, and leaves nothing behind.

One call fails in each fit: on the driver, in the coordinator, the endpoint, checkpoints, lease and launch, or
in a worker, in its rows, its client and its training.
"""

import _thread
import errno
import faulthandler
import functools
import gc
import logging
import os
import re
import signal
import sys
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import failing
import keras
import numpy as np
import pytest
from failing import REMOVES, Failing, failures_at
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from leaks import in_the_workers, on_the_driver
from pyspark import TaskContext

from sparkdl import Network, SparkModel
from sparkdl.errors import SparkDLError

WORKERS, ROWS, BATCH, EPOCHS = 2, 64, 8, 2
SECONDS = 60  # a longer fit counts as hung
SETTINGS = {
    "synchronous-batch": {},
    "synchronous-3": {"frequency": 3, "merge": "average"},
    "asynchronous-3": {"mode": "asynchronous", "frequency": 3, "merge": "sum"},
    "hogwild-batch": {"mode": "hogwild", "merge": "sum"},
    "tls": {"network": Network(tls=True)},
    "executors": {"placement": "executors"},
}
WORDS = {  # expected in the error that ends a fit
    "ENOSPC": [os.strerror(errno.ENOSPC)],
    "EIO": [os.strerror(errno.EIO)],
    "ETIMEDOUT": [os.strerror(errno.ETIMEDOUT)],
    "EMFILE": [os.strerror(errno.EMFILE)],
    "ECONNRESET": [os.strerror(errno.ECONNRESET)],
    "MemoryError": ["memory"],
}
# What counts, merges, sends and writes. No setting above reaches data/shared_rows, whose
# calls fail in tests/unit/data/test_shared_rows.py, and worker/hosted_server and driver/remote_server, which
# need Spark Connect.
CORE = re.compile(
    r"cheroot/|sparkdl/(core/(buffer_pool|packing|sparse_gradients|vectors)|data/(array_blocks|spill)|"
    r"driver/(checkpoint|lease|serving)|rules/|server/|spark/(files|folders)|transport/|"
    r"worker/(shards|task_rows))"
)
UNRAISABLE = "pytest.PytestUnraisableExceptionWarning"
logger = logging.getLogger(__name__)
pytestmark = [pytest.mark.classic, pytest.mark.timeout(3600)]


@pytest.fixture(autouse=True)
def python_handles_interrupts():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def warm(spark):
    """Run a first fit in each setting, so that its lasting resources exist before all tests."""
    for setting in SETTINGS.values():
        fit(spark, setting)
    gc.collect()
    return on_the_driver(spark)


def loss(y_true, y_pred):
    """Return a loss whose gradient is minus the mean of the inputs, whatever the weights are."""
    return -keras.ops.mean(y_pred)


def armed(log, site=None, kind=None, number=0):
    """Return a partition function that makes one call fail, once, in the process of worker 0."""
    folder, log = str(Path(failing.__file__).parent), str(log)

    def watch(rows):
        sys.path.insert(0, folder)
        import failing

        failing.watch_task(TaskContext.get(), site, kind, number, log)
        return rows

    return watch


def fit(spark, setting, *, folder=None, watch=None):
    """Train on rows that sum exactly in binary; return the weight and its expected value."""
    model = keras.Sequential(
        [keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")]
    )
    model.compile(keras.optimizers.SGD(2.0**-6), loss)
    x = np.arange(1, ROWS + 1, dtype=np.float32)[:, None]
    data, options = (x, x), {} if "mode" in setting else {"validation_data": (x, x)}
    if watch is not None:
        rdd = spark.sparkContext.parallelize(list(zip(x, x, strict=True)), WORKERS)
        data, options = (rdd.mapPartitions(watch),), {"preserve_partitions": True}
    spark_model = SparkModel(model, num_workers=WORKERS, custom_objects={"loss": loss}, **setting)
    try:
        spark_model.fit(
            *data,
            batch_size=BATCH,
            epochs=EPOCHS,
            shuffle=False,
            verbose=0,
            checkpoint=None if folder is None else str(folder),
            **options,
        )
    finally:
        weight = float(model.get_weights()[0][0, 0])
    share = WORKERS if setting.get("merge") == "average" else 1
    return weight, EPOCHS * float(x.sum()) / BATCH / share * 2.0**-6


class Watchdog:
    """A ``with`` block that interrupts a hung body and dumps the stacks of all threads."""

    def __enter__(self):
        self.barked = False
        self._timer = threading.Timer(SECONDS, self._bark)
        self._timer.start()
        return self

    def __exit__(self, *exception):
        self._timer.cancel()
        self._timer.join()

    def _bark(self):
        self.barked = True
        faulthandler.dump_traceback(all_threads=True)
        _thread.interrupt_main()


def left_of(spark, before, eventually):
    def left():
        gc.collect()
        now = on_the_driver(spark)
        new = {name: sorted(map(str, set(now[name]) - set(before[name]))) for name in now}
        new["threads"] = [name for name in new["threads"] if not name.startswith("Dummy-")]  # TensorFlow's
        return {name: values for name, values in new.items() if values}

    eventually(lambda: not left(), 5)
    found, workers = left(), in_the_workers(spark)
    return found | {"workers": workers} if workers else found


class Case(NamedTuple):
    """One fit in which a call fails: on the "driver" or in a "worker"."""

    place: str
    setting: str
    site: str
    kind: str
    number: int = 0


def faults_of(case, spark, before, folder, eventually):
    """Return the broken promises of a fit in which a call fails."""
    log, error, weight, expected = folder / "sites", None, None, None
    watch, on_driver = None, Failing(case.site, case.kind, case.number)
    if case.place == "worker":
        watch, on_driver = armed(log, case.site, case.kind, case.number), nullcontext()
    with Watchdog() as watchdog:
        try:
            with on_driver:
                weight, expected = fit(
                    spark, SETTINGS[case.setting], folder=folder / "checkpoints", watch=watch
                )
        except BaseException as raised:  # noqa: BLE001 - which is judged below
            error = raised
    failed = Path(f"{log}.failed").exists() if watch else on_driver.failed
    Path(f"{log}.failed").touch()  # disarms the worker processes that Spark reuses
    says = f"raised {type(error).__name__}: {str(error).splitlines()[:1]}" if error else "goes on"
    logger.info("%s: %s, %s", case, "failed" if failed else "not met", says)
    if watchdog.barked:
        return ["it hangs"]
    faults = wrong_end(case.kind, error) if error else []
    if error and not failed:
        faults.append(f"nothing failed, and it {says}")
    if error is None and weight != expected:
        faults.append(f"the weight is {weight} instead of {expected}")
    if error is None and failed and case.kind == "SIGINT":
        faults.append("the interrupt is lost")
    left = left_of(spark, before, eventually)
    if left and not (
        set(left) <= {"temporary files", "broadcasts and files"} and case.site.endswith(REMOVES)
    ):
        faults.append(f"it left {left}")
    return faults


def wrong_end(kind, error):
    """Return the faults of an error, an empty list if there are none."""
    if kind == "SIGINT":
        return [] if isinstance(error, KeyboardInterrupt) else [f"an interrupt is {error!r}"]
    if not isinstance(error, SparkDLError | OSError | MemoryError):
        return [f"it raised {error!r}"]
    named = any(word in str(error) for word in WORDS[kind])
    return [] if named else [f"the error does not name the reason: {error}"]


def sites_of(spark, folder, place, setting):
    """Return the number of times that each site is reached when nothing fails."""
    if place == "worker":
        fit(spark, SETTINGS[setting], watch=armed(folder / "sites"))
        (folder / "sites.failed").touch()
        return dict.fromkeys(sorted((folder / "sites").read_text().splitlines()), 3)
    with Failing() as watched:
        fit(spark, SETTINGS[setting], folder=folder / "checkpoints")
    return dict(sorted(watched.sites.items()))


@pytest.fixture(scope="module")
def sites(spark, warm, tmp_path_factory):
    """Return a function that returns how many times each site of a setting is reached."""

    @functools.cache
    def of(place, setting):
        return sites_of(spark, tmp_path_factory.mktemp("sites"), place, setting)

    return of


@pytest.fixture
def try_one(spark, warm, eventually, tmp_path_factory):
    """Return a function that makes one call fail and returns the faults found."""

    def one(case):  # what an earlier case may leave, such as a file that could not be removed, is not its own
        return faults_of(case, spark, on_the_driver(spark), tmp_path_factory.mktemp("case"), eventually)

    return one


def kinds_of(place, site):
    """Return the failures of a site; Spark keeps interrupts from workers."""
    return [kind for kind in failures_at(site) if kind != "SIGINT" or place == "driver"]


@pytest.mark.one_case
@pytest.mark.parametrize("place", ["driver", "worker"])
def test_some_calls_fail(sites, try_one, place, request):
    """A fit survives a random failure at a random site after a random number of successful calls."""
    examples = 8 if request.config.getoption("--all") else 2

    @settings(max_examples=examples, deadline=None, derandomize=True, database=None, phases=[Phase.generate])
    @given(st.data())
    def check(data):
        setting = data.draw(st.sampled_from(sorted(SETTINGS)))
        known = {site: count for site, count in sites(place, setting).items() if kinds_of(place, site)}
        site = data.draw(st.sampled_from(list(known)))
        kind = data.draw(st.sampled_from(kinds_of(place, site)))
        case = Case(place, setting, site, kind, data.draw(st.integers(0, min(3, known[site] - 1))))
        assert [] == try_one(case), case

    check()


# Where the call that fails is within cheroot's accept or bind, Python closes the new socket.
@pytest.mark.filterwarnings("ignore:.*unclosed <(socket|sparkdl.transport.tls.Socket):ResourceWarning")
@pytest.mark.filterwarnings(f"ignore:Exception ignored in. <.*ocket fd:{UNRAISABLE}")
@pytest.mark.whole
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("place", ["driver", "worker"])
def test_every_call_of_what_books_and_writes_fails(sites, try_one, place, setting, record_property):
    """A fit survives the first call of each site in the core modules failing in every possible way.

    ``pytest -rP`` shows how many failures were tried, and ``--junit-xml`` records it.
    """
    faults, tried = {}, 0
    for site in sites(place, setting):
        for kind in kinds_of(place, site) if CORE.match(site) else ():
            tried += 1
            if found := try_one(case := Case(place, setting, site, kind)):
                faults[case] = found
                logger.error("%s: %s", case, found)
    record_property("failures tried", tried)
    print(f"{place}, {setting}: {tried} failures were tried.")  # noqa: T201 - for -rP
    assert {} == faults
