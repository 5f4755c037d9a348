"""Selection of checkpoints to keep and to use, without Spark or Keras."""

import errno
import logging
import os
import re
import signal
import stat
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from sparkdl import driver
from sparkdl.config import CheckpointConfig, FitConfig
from sparkdl.core import packing
from sparkdl.data.fingerprint import Fingerprint
from sparkdl.driver.checkpoints import Checkpoints, Description, Saved, write_to
from sparkdl.driver.lease import lease_of
from sparkdl.errors import CheckpointError, ConfigError
from sparkdl.process import interrupts
from sparkdl.process.interrupts import Cleanup
from sparkdl.server.state import EpochReports, RowsHeld, Snapshot
from sparkdl.spark import files

VECTOR = np.arange(5, dtype=np.float32)
DESCRIPTION = Description(
    {
        "optimizer": {"momentum": "0.9"},
        "layer 1 (Dense)": {"activation": "'relu'"},
        "metrics": {"mae": "MAE"},
    },
    0.1,
    [np.array([[0.25, 0.75]], np.float32)],
    "constants",
)


def snapshot_at(version, epoch=0):
    return Snapshot(epoch, VECTOR + version, VECTOR, version, 1.5, states={0: b"state"}, metrics={1: b"m"})


def saved(snapshot, run="this"):
    return Saved(
        settings={"run": run, "seed": 3},
        first=(0, 1.0),
        snapshot=snapshot,
        held=(RowsHeld(2, Fingerprint(1, 1 << 63)), RowsHeld(3)),
        learning_rate=0.1,
        history={"loss": [0.5]},
        epochs=[0],
        training={},
        counters={},
        stopped=False,
        description=DESCRIPTION,
    )


def open_(folder, *, fresh=False, **settings):
    return Checkpoints(CheckpointConfig(str(folder), **settings), None, fresh=fresh)


def save(checkpoints, *versions, values=(), run="this"):
    for version, value in zip(versions, values or [None] * len(versions), strict=True):
        checkpoints.save(saved(snapshot_at(version), run), value, wait=True)
    checkpoints.close()


def newest(folder, run="this"):
    """Return the newest checkpoint that a run without a seed can resume from."""
    return open_(folder).newest({"run": run, "seed": None}, DESCRIPTION)


def versions_in(folder):
    return [version_of(path) for path in sorted(folder.iterdir())]


def version_of(path):
    alone = path.parent.parent / f"alone-{path.name}"
    alone.mkdir(exist_ok=True)
    (alone / path.name).write_bytes(path.read_bytes())
    return newest(alone).snapshot.version


def test_a_checkpoint_is_what_was_saved(tmp_path):
    """A checkpoint holds the snapshot with states, metrics, ledger, reports, and the rule's state."""
    reports = {2: EpochReports(metrics={0: b"m"}, states={0: b"s"}, rows=3, first_losses={0: 0.5})}
    snapshot = Snapshot(
        2, VECTOR, VECTOR[:2], 7, 2.5, {1: b"x"}, [VECTOR, 2], 3, {0: b"m"}, [0.1], {0: 4}, reports
    )
    checkpoints = open_(tmp_path / "new" / "folder", fresh=True)
    checkpoints.save(saved(snapshot), wait=True)
    checkpoints.close()

    whole = newest(tmp_path / "new" / "folder")
    found = whole.snapshot

    assert replace(saved(snapshot), snapshot=None) == replace(whole, snapshot=None, first=tuple(whole.first))
    np.testing.assert_array_equal(VECTOR, found.rule[0], strict=True)
    for name in ("parameters", "statistics"):
        np.testing.assert_array_equal(getattr(snapshot, name), getattr(found, name), strict=True)
    for name in ("epoch", "version", "progress", "states", "place", "metrics", "losses", "ledger", "reports"):
        assert getattr(snapshot, name) == getattr(found, name)


def test_a_checkpoint_with_the_names_of_an_earlier_version_is_read():
    """The values of a checkpoint may have the names that versions before 0.1.0 gave to them."""
    reports = {2: EpochReports(metrics={0: b"m"}, states={0: b"s"}, rows=3, first_losses={0: 0.5})}
    whole = saved(replace(snapshot_at(7, epoch=2), reports=reports))
    values = packing.unpack(packing.pack(whole.values()))
    older = {"cut": values.pop("snapshot"), **values}
    older["cut"] = {"books": older["cut"].pop("reports"), **older["cut"]}
    found = Saved.of(older)

    assert (7, reports) == (found.snapshot.version, found.snapshot.reports)
    assert whole.held == found.held


def test_the_newest_and_the_best_are_kept(tmp_path):
    """The newest and the best checkpoints are kept, also those of an earlier process."""
    settings = {"keep": 2, "keep_best": 1, "best": "max", "monitor": "accuracy"}
    save(open_(tmp_path / "a", **settings), 1, 2, 3, 4, values=[0.5, 0.9, 1e-7, float("nan")])
    assert [2, 3, 4] == versions_in(tmp_path / "a")
    save(open_(tmp_path / "a", **settings), 5, 6, values=[0.8, None])
    assert [2, 5, 6] == versions_in(tmp_path / "a")

    save(open_(tmp_path / "b"), 1, 2, 3, values=[0.1, 0.2, 0.3])
    assert [2, 3] == versions_in(tmp_path / "b")


def spoil(path, how):
    data = bytearray(path.read_bytes())
    if how == "torn":
        data = data[: len(data) // 2]
    elif how == "empty":
        data = b""
    elif how == "changed":
        data[-1] ^= 1
    else:
        data = b"something else" * 9
    path.write_bytes(data)


@pytest.mark.parametrize("how", ["torn", "empty", "changed", "other"])
def test_what_is_torn_is_named_and_the_one_before_it_used(tmp_path, caplog, how):
    """A truncated checkpoint is logged and the one before it is used; without one, an error is raised."""
    save(open_(tmp_path), 1, 2)
    first, second = sorted(tmp_path.iterdir())
    spoil(second, how)

    assert newest(tmp_path).snapshot.version == 1
    assert any(second.name in line and "damaged or not a checkpoint" in line for line in caplog.messages)
    spoil(first, how)
    with pytest.raises(ConfigError, match=r"None of the checkpoints in .* can be used\. checkpoint-00000002"):
        newest(tmp_path)


@pytest.mark.parametrize("value", [None, 3, "text", [1], {"a": 1}])
def test_a_checkpoint_with_a_value_of_another_kind_is_used_or_refused_by_name(tmp_path, value):
    """A checkpoint with a value of another type, from another writer, is used or raises ConfigError."""
    whole = saved(snapshot_at(1)).values()
    changed = [whole | {name: value} for name in whole]
    changed += [
        whole | {part: whole[part] | {name: value}}
        for part in ("snapshot", "description")
        for name in whole[part]
    ]
    changed += [{name: whole[name] for name in whole if name != gone} for gone in whole]
    for number, values in enumerate(changed):
        folder = tmp_path / str(number)
        folder.mkdir()
        with open(folder / "checkpoint-00000001.sparkdl", "wb") as file:
            write_to(file, packing.parts(values))
        with suppress(ConfigError):
            assert isinstance(newest(folder), Saved)


def test_what_is_of_another_run_is_named_and_the_one_before_it_used(tmp_path, caplog):
    """A checkpoint of another run is logged and the one before it is used."""
    save(open_(tmp_path), 1)
    save(open_(tmp_path), 2, run="that")

    assert newest(tmp_path).snapshot.version == 1
    assert any("it belongs to a run with run='that' instead of 'this'" in line for line in caplog.messages)


@pytest.mark.parametrize(
    ("changes", "mid_epoch", "words"),
    [
        ({"constants": "others"}, False, "weights that are not trained.* have changed"),
        ({"outputs": [np.array([[0.3, 0.7]], np.float32)]}, False, "the model computes different outputs"),
        ({"outputs": [np.zeros((1, 3), np.float32)]}, False, "the model computes different outputs"),
        (
            {"words": DESCRIPTION.words | {"metrics": {}}},
            True,
            "within an epoch.*metrics of the model have changed",
        ),
        ({"words": DESCRIPTION.words | {"metrics": {}}}, False, None),
        ({"words": DESCRIPTION.words | {"optimizer": {"momentum": "0.1"}}}, True, None),
        ({"outputs": [np.array([[0.2500001, 0.75]], np.float32)]}, False, None),
        ({"outputs": []}, False, None),
        ({"learning_rate": 7.0}, True, None),
    ],
)
def test_a_program_that_changes_the_meaning_of_saved_state_is_refused(changes, mid_epoch, words):
    """A change of outputs, constants or metrics makes a checkpoint unusable and is refused."""
    refusal = DESCRIPTION.refusal(replace(DESCRIPTION, **changes), mid_epoch=mid_epoch)

    assert refusal is None if words is None else re.search(words, refusal)


def test_a_changed_setting_is_logged_by_name_and_value(tmp_path, caplog):
    """A resumed run with another momentum and a new clipnorm logs both with their old values."""
    save(open_(tmp_path), 1)
    changed = replace(
        DESCRIPTION, words=DESCRIPTION.words | {"optimizer": {"momentum": "0.1", "clipnorm": "1"}}
    )

    assert open_(tmp_path).newest({"run": "this", "seed": None}, changed).snapshot.version == 1
    assert caplog.messages[-1] == (
        "The resumed run differs from the original run: clipnorm of optimizer is 1 instead of not set; "
        "momentum of optimizer is 0.1 instead of 0.9."
    )


def test_a_run_that_begins_anew_has_a_folder_of_its_own(tmp_path):
    """A new run requires a folder without checkpoints; partial files of a dead driver are removed."""
    (tmp_path / ".checkpoint-half").touch()
    (tmp_path / "checkpoint-00000002.sparkdl.0f.begun").touch()
    others = ["checkpoint-00000001_copy.sparkdl", "notes.txt"]
    for name in others:
        (tmp_path / name).touch()
    save(open_(tmp_path, fresh=True), 1)
    assert ["checkpoint-00000001.sparkdl", *others] == sorted(path.name for path in tmp_path.iterdir())

    with pytest.raises(ConfigError, match=r"has checkpoints of an earlier run.*resume=True"):
        open_(tmp_path, fresh=True)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="Checkpoints cannot be kept in"):
        open_(tmp_path / "file", fresh=True)
    assert newest(tmp_path / "empty") is None


def test_a_uri_needs_a_spark_context():
    """The error for a URI without a SparkContext also names the remedy for Spark Connect clients."""
    says = r"^s3a://bucket/run needs .* Start a SparkSession first. A client of Spark Connect never has"
    with pytest.raises(ConfigError, match=says):
        open_("s3a://bucket/run", fresh=True)


def test_a_checkpoint_that_cannot_be_written_ends_no_training(tmp_path, caplog):
    """The failure is logged and the partial file is removed."""
    checkpoints = open_(tmp_path / "folder")
    Path(tmp_path / "folder").rmdir()

    save(checkpoints, 1)

    assert checkpoints.failed == 1
    assert ["could not be written" in line for line in caplog.messages] == [True]
    assert {record.levelno for record in caplog.records} == {logging.WARNING}


@pytest.mark.parametrize("kind", ["complex", "circular", "deep"])
def test_results_that_no_checkpoint_holds_end_no_training(tmp_path, caplog, kind):
    """Unsupported values in the results are logged and do not end training; a callback may add any."""
    value = [0.5]
    if kind == "circular":
        value.append(value)
    for _ in range(10_000 * (kind == "deep")):
        value = [value]
    checkpoints = open_(tmp_path)

    checkpoints.save(
        replace(saved(snapshot_at(1)), history={"loss": 1j if kind == "complex" else value}), wait=True
    )
    checkpoints.close()

    assert checkpoints.failed == 1
    assert "could not be written" in caplog.text
    assert [] == list(tmp_path.iterdir())


def test_a_checkpoint_for_a_uri_is_written_where_spark_cleans_up(tmp_path, monkeypatch):
    """A checkpoint for a URI is written in Spark's temporary folder, which Spark removes if a driver dies."""
    folders = []
    monkeypatch.setattr(files, "make_folder", lambda *_, **__: None)
    monkeypatch.setattr(files, "names", lambda *_, **__: [])
    monkeypatch.setattr(files, "publish", lambda local, *_, **__: folders.append(local.parent))
    context = mock.Mock(_temp_dir=str(tmp_path))

    save(Checkpoints(CheckpointConfig("hdfs://host/run"), context, fresh=True), 1)

    assert folders == [tmp_path]


def test_a_checkpoint_of_another_run_is_not_replaced(tmp_path):
    """A run that finds its next checkpoint written by another run raises an error and writes no more."""
    checkpoints = open_(tmp_path, fresh=True)
    (tmp_path / "checkpoint-00000001.sparkdl").write_bytes(b"another run's")

    save(checkpoints, 1)

    with pytest.raises(
        CheckpointError, match="has a checkpoint checkpoint-00000001.sparkdl that this run did not"
    ):
        checkpoints.require_owned()
    save(checkpoints, 2)
    assert ["checkpoint-00000001.sparkdl"] == [path.name for path in tmp_path.iterdir()]
    assert (tmp_path / "checkpoint-00000001.sparkdl").read_bytes() == b"another run's"


def fails_unlink(path, *_, unlink=os.unlink, **__):
    if Path(path).name.startswith(".checkpoint-"):
        raise OSError(errno.EIO, "I/O error")
    unlink(path)


def fails_fsync(file, fsync=os.fsync):
    if stat.S_ISDIR(os.fstat(file).st_mode):
        raise OSError(errno.EIO, "I/O error")
    fsync(file)


def fails_open(path, *args, open_=os.open, **kwargs):
    if os.path.isdir(path):
        raise OSError(errno.EMFILE, "Too many open files")
    return open_(path, *args, **kwargs)


@pytest.mark.parametrize(
    ("name", "fails"), [("unlink", fails_unlink), ("fsync", fails_fsync), ("open", fails_open)]
)
def test_what_fails_after_a_checkpoint_is_published_is_a_warning(tmp_path, monkeypatch, caplog, name, fails):
    """A failure after a checkpoint is published is logged; the checkpoint counts."""
    checkpoints = open_(tmp_path, fresh=True, keep=1)
    with monkeypatch.context() as patch:
        patch.setattr(os, name, fails)
        save(checkpoints, 1)
    save(checkpoints, 2)

    checkpoints.require_owned()
    assert checkpoints.failed == 0
    assert caplog.records
    assert {record.levelno for record in caplog.records} == {logging.WARNING}
    assert ["checkpoint-00000002.sparkdl"] == [path.name for path in tmp_path.glob("checkpoint-*")]
    assert newest(tmp_path).snapshot.version == 2


def test_no_number_is_used_twice(tmp_path):
    """No number is used twice: a file system may report a failure after the file has its name."""
    checkpoints = open_(tmp_path, fresh=True)
    publish = files.publish

    def fails(*args, **kwargs):
        publish(*args, **kwargs)
        raise OSError("the connection was lost")

    with mock.patch.object(files, "publish", fails):
        save(checkpoints, 1)
    save(checkpoints, 2)

    checkpoints.require_owned()
    assert checkpoints.failed == 1
    assert ["checkpoint-00000001.sparkdl", "checkpoint-00000002.sparkdl"] == sorted(
        path.name for path in tmp_path.iterdir()
    )


def test_an_old_checkpoint_that_cannot_be_removed_is_removed_later(tmp_path, caplog):
    """An old checkpoint that cannot be removed is logged and removed later; the new one counts."""
    checkpoints = open_(tmp_path, fresh=True, keep=1)
    save(checkpoints, 1)
    with mock.patch.object(files, "discard", side_effect=OSError("the network is down")):
        save(checkpoints, 2)
    assert checkpoints.failed == 0
    assert caplog.messages == [
        f"An old checkpoint could not be removed: {tmp_path}/checkpoint-00000001.sparkdl: the network is down"
    ]

    save(checkpoints, 3)

    assert ["checkpoint-00000003.sparkdl"] == [path.name for path in tmp_path.iterdir()]


def test_a_run_without_its_lease_writes_no_checkpoint(tmp_path, caplog):
    """A run that lost its lease neither adds nor removes checkpoints; an unreadable folder is only logged."""
    lease = lease_of(str(tmp_path), None)
    lease.acquire()
    checkpoints = Checkpoints(CheckpointConfig(str(tmp_path)), None, fresh=True, lease=lease)
    save(checkpoints, 1, 2)
    before = sorted(tmp_path.glob("checkpoint-*"))
    checkpoints.require_owned()

    with mock.patch.object(lease.folder, "names", side_effect=OSError("the network is down")):
        save(checkpoints, 3)
    checkpoints.require_owned()
    assert (1, "the network is down") == (checkpoints.failed, caplog.messages[-1].rpartition(": ")[2])

    (tmp_path / "lease").unlink()
    save(checkpoints, 3)
    with pytest.raises(CheckpointError, match="lost the checkpoint folder"):
        checkpoints.require_owned()
    assert before == sorted(tmp_path.glob("checkpoint-*"))
    lease.release()


@pytest.fixture
def python_handles_interrupts():
    """Handle interrupts even if pytest runs in the background of a shell, which ignores them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def stalls(monkeypatch):
    """A file system that does not respond until the event that is returned is set."""
    responds, fsync = threading.Event(), os.fsync

    def stalled(file):
        responds.wait(60)
        fsync(file)

    monkeypatch.setattr(os, "fsync", stalled)
    yield responds
    responds.set()


class SlowFile:
    """A file that takes 20 s to write a checkpoint of 20 MB."""

    def __init__(self, file):
        self.file = file

    def __getattr__(self, name):
        return getattr(self.file, name)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.file.close()

    def write(self, data):
        time.sleep(len(data) / 1e6)
        self.file.write(data)


def seconds_of_interrupted(close, before=lambda: None):
    """Return the seconds that a cleanup takes in a call that is interrupted after ``before``."""

    def work():
        with Cleanup() as stack:
            stack.callback(close)
            before()
            os.kill(os.getpid(), signal.SIGINT)
            interrupts.check()

    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        interrupts.call(work)
    return time.monotonic() - begun


@pytest.mark.usefixtures("python_handles_interrupts")
@pytest.mark.parametrize("number", [1, 2])
def test_an_interrupt_ends_a_slow_checkpoint(tmp_path, monkeypatch, number):
    """An interrupt does not wait for slow checkpoints, and leaves no file."""
    slow = tempfile.NamedTemporaryFile
    monkeypatch.setattr(tempfile, "NamedTemporaryFile", lambda **options: SlowFile(slow(**options)))
    monkeypatch.setattr(driver.checkpoints, "PIECE", 1 << 16)
    checkpoints = open_(tmp_path, fresh=True)
    large = replace(snapshot_at(1), states={0: bytes(20_000_000)})

    def save_all():
        for _ in range(number):
            checkpoints.save(saved(large), wait=True)

    took = seconds_of_interrupted(checkpoints.close, save_all)

    assert took < 3
    assert [] == list(tmp_path.iterdir())
    assert checkpoints.failed == 0


@pytest.mark.usefixtures("python_handles_interrupts")
def test_an_interrupt_waits_for_no_file_system_that_stalls(tmp_path, stalls, eventually, caplog):
    """A checkpoint on a file system that stalls is removed at once, and is not published later."""
    checkpoints = open_(tmp_path, fresh=True)

    took = seconds_of_interrupted(
        checkpoints.close, lambda: checkpoints.save(saved(snapshot_at(1)), wait=True)
    )

    assert took < 3
    assert [] == list(tmp_path.iterdir())
    stalls.set()
    assert eventually(lambda: "sparkdl-checkpoints" not in {each.name for each in threading.enumerate()})
    assert [] == list(tmp_path.iterdir())
    assert ["Interrupted: stopping the call and cancelling its Spark job."] == caplog.messages


@pytest.mark.usefixtures("python_handles_interrupts")
def test_an_interrupt_while_the_last_checkpoint_is_awaited_ends_the_wait(tmp_path, stalls):
    """An interrupt that comes during the wait for the last checkpoint ends the wait, too."""
    checkpoints = open_(tmp_path, fresh=True)
    checkpoints.save(saved(snapshot_at(1)), wait=True)
    pressed = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    pressed.start()

    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        interrupts.call(checkpoints.close)

    assert time.monotonic() - begun < 3.5
    assert [] == list(tmp_path.iterdir())


@pytest.mark.usefixtures("python_handles_interrupts")
def test_without_an_interrupt_a_checkpoint_is_awaited(tmp_path, stalls, monkeypatch):
    """Without an interrupt, the wait for a checkpoint has no limit."""
    monkeypatch.setattr(interrupts, "CLEANED", 0.1)
    checkpoints = open_(tmp_path, fresh=True)
    threading.Timer(1, stalls.set).start()

    interrupts.call(save, checkpoints, 1)

    assert [1] == versions_in(tmp_path)


def test_when_checkpoints_are_due(tmp_path):
    """Checkpoints are due at epochs' ends, after a number of updates, or after a time."""
    ends, counted = open_(tmp_path), open_(tmp_path, every=10)
    timed = open_(tmp_path, every=timedelta(microseconds=1))
    slow = open_(tmp_path, every=timedelta(hours=1))
    for checkpoints in (ends, counted, timed, slow):
        checkpoints.start_from(start := snapshot_at(3))
        assert not checkpoints.is_due(start, ends=True)

    snapshot = snapshot_at(12)
    assert [True, False] == [ends.is_due(snapshot, ends=end) for end in (True, False)]
    assert [False, True] == [counted.is_due(each, ends=False) for each in (snapshot, snapshot_at(13))]
    assert [True, False] == [timed.asks(), timed.asks()]
    assert timed.is_due(snapshot, ends=False)
    assert not slow.asks()
    assert not slow.is_due(snapshot, ends=True)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"every": 0}, 'every should be "epoch", a whole number of updates'),
        ({"every": True}, 'every should be "epoch", a whole number of updates'),
        ({"every": timedelta(0)}, 'every should be "epoch", a whole number of updates'),
        ({"every": "batch"}, 'every should be "epoch", a whole number of updates'),
        ({"keep": 0}, "keep should be a whole number of at least 1"),
        ({"keep_best": -1}, "keep_best should be a whole number of at least 0"),
        ({"best": "least"}, 'best should be "min" or "max"'),
        ({"uri": ""}, "uri should be a path or a URI"),
    ],
)
def test_what_a_checkpoint_cannot_be_told(settings, words):
    """CheckpointConfig rejects invalid settings by name."""
    with pytest.raises(ConfigError, match=words):
        CheckpointConfig(**{"uri": "folder", **settings})


def test_what_a_fit_cannot_be_told_of_checkpoints():
    """A fit accepts a path as a checkpoint folder; resume=True requires one."""
    assert FitConfig(checkpoint="folder").checkpoint == CheckpointConfig("folder")
    with pytest.raises(ConfigError, match="resume=True needs a folder of checkpoints; got checkpoint=None"):
        FitConfig(resume=True)
    with pytest.raises(ConfigError, match="checkpoint should be a folder or a CheckpointConfig; got 7"):
        FitConfig(checkpoint=7)
