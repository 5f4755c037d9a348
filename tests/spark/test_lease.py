"""Of two drivers with one checkpoint folder one continues; the other takes over once that one is dead."""

import contextlib
import hashlib
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import keras
import numpy as np
import pytest
from clock import Clock

import sparkdl
from sparkdl import SparkModel
from sparkdl.driver import lease
from sparkdl.driver.lease import SILENCE_SECONDS, Lease, Owner, lease_of
from sparkdl.errors import CheckpointError
from sparkdl.spark import files, folders, hadoop

HERE = Path(__file__).parent
PATIENCE = 250  # seconds for a driver to finish
SETTINGS = {"batch_size": 16, "epochs": 5, "seed": 3, "verbose": 0}
EPOCHS = 100  # enough that one driver is alive while the other looks at it


# -- through Hadoop -------------------------------------------------------------------------------


@pytest.fixture
def through_hadoop(monkeypatch):
    """Make local files accessible through Hadoop alone, as on a distributed file system."""
    monkeypatch.setattr(hadoop, "local_folder", lambda *_: None)


def context_of(spark):
    return spark.sparkContext


def test_hadoops_files_are_written_whole_and_once(spark, tmp_path, through_hadoop):
    """Files of a Hadoop folder are created once, rewritten whole, and removed."""
    folder = folders.open_folder(f"file://{tmp_path}/new/folder", context=context_of(spark))
    assert isinstance(folder, folders.HadoopFolder)

    assert [True, False, True] == [folder.create("a", data) for data in (b"one", b"two", b"one")]
    assert (b"one", None) == (folder.read("a"), folder.read("b"))
    before = folder.stamp("a")
    assert before == folder.stamp("a")
    folder.rewrite("a", b"another")
    assert before != folder.stamp("a") is not None
    assert folder.stamp("b") is None
    assert ["a"] == folder.names()
    folder.discard("a")
    folder.discard("a")
    assert [] == folder.names()


@pytest.mark.parametrize("local", [True, False])
def test_a_file_at_a_uri_is_never_replaced(spark, tmp_path, monkeypatch, local):
    """Publishing an equal file again succeeds; another file at that URI raises FileExistsError."""
    if not local:
        monkeypatch.setattr(hadoop, "local_folder", lambda *_: None)
    (tmp_path / "to").mkdir()
    for content in (b"one", b"one", b"two"):
        (mine := tmp_path / "mine").write_bytes(content)
        with pytest.raises(FileExistsError) if content == b"two" else contextlib.nullcontext():
            files.publish(mine, f"file://{tmp_path}/to/file", context=context_of(spark))

    assert (tmp_path / "to" / "file").read_bytes() == b"one"
    assert [] == [path.name for path in (tmp_path / "to").iterdir() if "begun" in path.name]


def test_a_lease_through_hadoop_is_refused_lost_and_released(spark, tmp_path, monkeypatch, through_hadoop):
    """A driver elsewhere keeps the folder while it writes heartbeats, and loses it after a silence.

    The lease can be released even after its SparkContext has stopped; here the folder itself stands in for
    it.
    """

    def acquired(clock):
        folder = folders.open_folder(f"file://{tmp_path}", context=context_of(spark))
        found = Lease("folder", folder, clock=clock, sleep=clock.sleep)
        found.acquire()
        return found

    with monkeypatch.context() as patch:
        patch.setattr(lease, "_machine", lambda: "another")
        owner = acquired(Clock())
    lease._held.discard(owner.me.id)
    with pytest.raises(CheckpointError, match="wrote a heartbeat"):
        acquired(Clock(lambda: None, owner._beat))

    mine = acquired(clock := Clock())

    assert clock.now >= SILENCE_SECONDS
    with pytest.raises(CheckpointError, match="took it over"):
        owner.check()
    owner.release()
    mine.check()
    mine.release()
    assert [] == [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")]


@pytest.mark.parametrize("scheme", ["file", "viewfs"])
def test_a_folder_has_one_lease_whatever_it_is_called(spark, tmp_path, scheme):
    """A path and the URIs of the same folder share one lease."""
    (folder := tmp_path / "shared").mkdir()
    uri = folder.as_uri()
    if scheme == "viewfs":
        mounted = f"fs.viewfs.mounttable.{tmp_path.name}.link./shared"
        context_of(spark)._jsc.hadoopConfiguration().set(mounted, uri)
        uri = f"viewfs://{tmp_path.name}/shared"
    (mine := lease_of(str(folder), None)).acquire()

    with pytest.raises(CheckpointError, match=rf"to {uri}: another fit of this process"):
        lease_of(uri, context_of(spark)).acquire()

    mine.release()


# -- fits -----------------------------------------------------------------------------------------


class Then(keras.callbacks.Callback):
    """A callback that runs a function at the end of the second epoch."""

    def __init__(self, act):
        super().__init__()
        self.act = act

    def on_epoch_end(self, epoch, logs=None):
        if epoch == 1:
            self.act()


def leases(folder):
    """Return the remaining files and threads of a lease."""
    return [path.name for path in folder.glob("*lease*")] + [
        thread.name for thread in threading.enumerate() if thread.name == "sparkdl-lease"
    ]


@pytest.mark.whole
def test_a_second_fit_in_the_folder_is_refused(spark, problem, tmp_path, jobs):
    """A second fit in the folder is refused before any job; a fit that fails releases the folder."""
    folder, refused = tmp_path / "folder", []

    def second():
        before = jobs()
        with pytest.raises(
            CheckpointError, match="another fit of this process. Wait until that run ends"
        ) as error:
            SparkModel(problem.model(), num_workers=2).fit(
                problem.x, problem.y, checkpoint=folder.as_uri(), resume=True, **SETTINGS
            )
        assert before == jobs()
        refused.append(error.value)
        assert len(leases(folder)) == 3
        raise LookupError("the first fit ends")

    with pytest.raises(LookupError, match="the first fit ends"):
        SparkModel(problem.model(), num_workers=2).fit(
            problem.x, problem.y, checkpoint=str(folder), callbacks=[Then(second)], **SETTINGS
        )
    assert leases(folder) == []
    assert len(refused) == 1

    history = SparkModel(problem.model(), num_workers=2).fit(
        problem.x, problem.y, checkpoint=str(folder), resume=True, **SETTINGS
    )
    assert history.epoch == list(range(5))
    assert leases(folder) == []


def test_a_fit_that_loses_the_folder_ends(spark, problem, tmp_path):
    """A fit that loses the folder names the new owner, writes no more and leaves the owner's lease."""
    other = replace(Owner.here(), host="node-7", process=4711)

    with pytest.raises(
        CheckpointError, match=r"lost the checkpoint folder .*: process 4711 on node-7 owns it"
    ):
        SparkModel(problem.model(), num_workers=2).fit(
            problem.x,
            problem.y,
            checkpoint=str(tmp_path),
            **SETTINGS,
            callbacks=[Then(lambda: (tmp_path / "lease").write_bytes(other.record()))],
        )

    assert leases(tmp_path) == ["lease"]
    assert {path.name for path in tmp_path.glob("check*")} <= {"checkpoint-00000001.sparkdl"}


# -- drivers --------------------------------------------------------------------------------------


class Driver:
    """A driver in its own process group.

    Args:
        log: the file for its output.
        folder: the checkpoint folder.
        end: the file for the weights.
        through: "hadoop", or nothing.
    """

    def __init__(self, log, folder, end, *through):
        paths = [str(Path(sparkdl.__file__).parents[1]), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        environment = dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, paths)))
        environment.pop("SPARK_CONNECT_MODE_ENABLED", None)  # of a session that an earlier test left open
        arguments = folder, "synchronous", "1", end, str(EPOCHS), *through
        self.log = log
        with log.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, HERE / "resumed.py", *arguments],
                env=environment,
                start_new_session=True,
                stdout=file,
                stderr=file,
            )

    @property
    def runs(self):
        return self.process.poll() is None

    def said(self, code):
        """Wait until the driver exits with ``code``, and return its output."""
        assert self.process.wait(PATIENCE) == code, self.log.read_text()[-5000:]
        return self.log.read_text()

    def kill(self):
        """SIGKILL the driver, its JVM and its workers."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextlib.contextmanager
def contents(folder):
    """Yield the digests of each checkpoint's contents seen during a ``with`` block, by file name."""
    found, ends = defaultdict(set), threading.Event()

    def look():
        while not ends.wait(0.01):
            for path in folder.glob("checkpoint-*.sparkdl"):
                with contextlib.suppress(FileNotFoundError):
                    found[path.name].add(hashlib.blake2b(path.read_bytes()).digest())

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield found
    finally:
        ends.set()
        thread.join()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The weights and losses of an undisturbed driver, which runs beside the others."""
    folder = tmp_path_factory.mktemp("undisturbed")
    driver = Driver(folder / "log", folder / "checkpoints", folder / "end.npz")

    def outcome():
        driver.said(0)
        return outcome_of(folder)

    yield outcome
    driver.kill()


def outcome_of(folder):
    with np.load(folder / "end.npz") as found:
        return [found[name] for name in found.files[:-1]]  # without the number of resumes


def refused_of(drivers, fate):
    """Wait until one of two drivers is refused; return it and the other one."""
    if fate == "followed":
        refusals = [lambda driver=driver: "CheckpointError" in driver.log.read_text() for driver in drivers]
    else:
        refusals = [lambda driver=driver: not driver.runs for driver in drivers]
    while not any(refused() for refused in refusals):
        time.sleep(0.05)
    if refusals[0]():
        return drivers
    return drivers[::-1]


@pytest.mark.whole
@pytest.mark.spark
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("seed", "through", "fate"),
    [
        (0, "local", "killed"),
        *(
            pytest.param(seed, through, fate, marks=pytest.mark.whole)
            # Renaming through Hadoop replaces local files, unlike on HDFS. A driver that wakes up in a rename
            # would do so, but it is stopped just after one.
            for seed, (through, fate) in enumerate(
                [("local", "stopped"), ("hadoop", "stopped"), ("local", "followed"), ("hadoop", "followed")]
                + [("hadoop", "killed"), ("local", "killed")] * 8,
                1,
            )
        ),
    ],
)
def test_of_two_drivers_one_goes_on_and_the_next_takes_over(tmp_path, undisturbed, seed, through, fate):
    """Of two drivers that start together one is refused; a third takes over once the other is gone.

    The owner is killed at a random moment. If it is "followed", the refused driver tries again and takes over
    itself. Or it is stopped; then it ends with an error when it continues. No checkpoint has two contents.
    Weights and losses are those of an undisturbed driver, bit for bit.
    """
    moments, folder, end = random.Random(seed), tmp_path / "checkpoints", tmp_path / "end.npz"
    place = (folder.as_uri(), end, "hadoop") if through == "hadoop" else (folder, end)
    place += ("again",) * (fate == "followed")
    drivers = []
    with contents(folder) as found, contextlib.ExitStack() as stack:

        def another():
            drivers.append(driver := Driver(tmp_path / f"log-{len(drivers)}", *place))
            stack.callback(driver.kill)
            return driver

        another()
        time.sleep(moments.uniform(0, 1))
        another()
        refused, owner = refused_of(drivers, fate)
        sentence = f"CheckpointError: Another run writes checkpoints to {place[0]}: process"
        assert f"{sentence} {owner.process.pid} on" in refused.log.read_text()
        assert refused.runs or refused.said(1)
        assert owner.runs
        time.sleep(moments.uniform(0, 1 if fate == "stopped" else 4))
        if fate == "stopped":
            while not found and owner.runs:
                time.sleep(0.05)
            os.kill(owner.process.pid, signal.SIGSTOP)
        else:
            owner.kill()
        (refused if fate == "followed" else another()).said(0)
        if fate == "stopped":
            os.kill(owner.process.pid, signal.SIGCONT)
            assert "lost the checkpoint folder" in owner.said(1)

    logging.getLogger(__name__).warning("seed %d: %d checkpoints seen", seed, len(found))
    assert {} == {name: each for name, each in found.items() if len(each) > 1}
    assert [] == [path.name for path in folder.iterdir() if "lease" in path.name]
    for mine, theirs in zip(outcome_of(tmp_path), undisturbed(), strict=True):
        np.testing.assert_array_equal(mine, theirs)
