"""Files appear under their names complete, and only once."""

import errno
import os
import shutil
import signal
import time
from pathlib import Path
from unittest import mock

import pytest
from py4j.protocol import Py4JError

from sparkdl.process import interrupts
from sparkdl.spark import files, hadoop


@pytest.mark.parametrize("links", [True, False])
def test_a_file_is_never_replaced(tmp_path, monkeypatch, links):
    """Publishing a file never replaces one with other content, also without hard links."""
    if not links:
        monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(PermissionError(1, "no links")))
    target = tmp_path / "target"
    for content in (b"one", b"one"):
        (tmp_path / "local").write_bytes(content)
        files.publish(tmp_path / "local", str(target), context=None)
        assert [path.name for path in tmp_path.iterdir()] == ["target"]
    (tmp_path / "local").write_bytes(b"two")

    with pytest.raises(FileExistsError, match="target already exists, with different content"):
        files.publish(tmp_path / "local", str(target), context=None)

    assert target.read_bytes() == b"one"


def test_a_file_of_hadoop_that_has_its_name_is_published(tmp_path, monkeypatch, caplog):
    """A Hadoop file that has its name is published, even if removing the temporary name fails."""
    (tmp_path / "local").write_bytes(b"one")
    system = mock.Mock(**{"exists.return_value": False, "rename.return_value": True})
    system.delete.side_effect = Py4JError("the network is down")
    monkeypatch.setattr(
        hadoop, "path_of", lambda name, _: mock.Mock(**{"getFileSystem.return_value": system})
    )

    files.publish(tmp_path / "local", "hdfs://host/folder/target", context=mock.Mock())

    assert [] == list(tmp_path.iterdir())
    assert "could not be removed" in caplog.text
    (tmp_path / "local").write_bytes(b"two")
    system.rename.side_effect = Py4JError("the disk is full")
    with pytest.raises(OSError, match="the disk is full"):
        files.publish(tmp_path / "local", "hdfs://host/folder/target", context=mock.Mock())


def put(folder, content):
    (folder / "local").write_bytes(content)
    try:
        files.put(folder / "local", str(folder / "there" / "target"), overwrite=True, context=None)
    finally:
        (folder / "local").unlink()


def test_a_full_disk_leaves_the_file_that_was_there(tmp_path):
    """A full disk leaves the old file complete and nothing of the new one."""
    put(tmp_path, b"old")

    def full(source, target):
        Path(target).write_bytes(b"ne")
        raise OSError(errno.ENOSPC, "No space left on device")

    with mock.patch.object(shutil, "copyfile", full), pytest.raises(OSError, match="No space left"):
        put(tmp_path, b"new")
    assert {"target": b"old"} == {path.name: path.read_bytes() for path in (tmp_path / "there").iterdir()}

    put(tmp_path, b"new")
    assert {"target": b"new"} == {path.name: path.read_bytes() for path in (tmp_path / "there").iterdir()}


def test_a_file_that_is_replaced_keeps_its_mode_and_its_link(tmp_path):
    """Replacing a file keeps its mode, and writes through a link."""
    put(tmp_path, b"old")
    (tmp_path / "there" / "target").rename(tmp_path / "real")
    (tmp_path / "real").chmod(0o600)
    (tmp_path / "there" / "target").symlink_to(tmp_path / "real")

    put(tmp_path, b"new")

    assert (tmp_path / "there" / "target").is_symlink()
    assert (tmp_path / "real").read_bytes() == b"new"
    assert (tmp_path / "real").stat().st_mode & 0o777 == 0o600


@pytest.fixture
def moves(monkeypatch):
    """The calls of ``files.move`` by number, on local files instead of Hadoop's."""
    made = []

    def move(source, target, *, context):
        made.append((source, target))
        os.rename(source, target)

    monkeypatch.setattr(files, "move", move)
    monkeypatch.setattr(files, "exists", lambda path, **_: os.path.exists(path))
    monkeypatch.setattr(files, "remove", lambda path, **_: shutil.rmtree(path, ignore_errors=True))
    return made


def folder_of(path, content):
    path.mkdir()
    (path / "file").write_text(content)


def contents(folder):
    return {path.name: (path / "file").read_text() for path in folder.iterdir()}


def test_a_folder_takes_the_place_of_another(tmp_path, moves):
    """Replacing a folder leaves the new folder under the name, and nothing of the old one."""
    folder_of(tmp_path / "made", "new")
    files.replace_folder(str(tmp_path / "made"), str(tmp_path / "path"), context=None)
    assert contents(tmp_path) == {"path": "new"}

    folder_of(tmp_path / "made", "newer")
    files.replace_folder(str(tmp_path / "made"), str(tmp_path / "path"), context=None)
    assert contents(tmp_path) == {"path": "newer"}


@pytest.mark.parametrize("error", [OSError("no rename"), KeyboardInterrupt()])
@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize(
    ("failing", "left"),
    [
        ({1}, {"path": "old"}),
        ({2}, {"path": "old"}),
        ({2, 3}, {"made.old": "old", "made": "new"}),
    ],
)
def test_a_folder_that_cannot_be_moved_costs_no_data(
    tmp_path, moves, monkeypatch, failing, left, moved, error
):
    """The old folder is back after a failed move; if it cannot come back, both folders are kept.

    A move may also report a failure after it has happened.
    """
    folder_of(tmp_path / "path", "old")
    folder_of(tmp_path / "made", "new")
    move = files.move

    def fails(source, target, *, context):
        fail = len(moves) + 1 in failing
        if not fail or moved:
            move(source, target, context=context)
        else:
            moves.append((source, target))
        if fail:
            raise error

    monkeypatch.setattr(files, "move", fails)

    with pytest.raises((OSError, KeyboardInterrupt)):
        files.replace_folder(str(tmp_path / "made"), str(tmp_path / "path"), context=None)

    found = contents(tmp_path)
    if not moved:
        assert left == found
    else:
        assert found["path"] in ("old", "new")
        assert "old" in found.values()


def test_an_old_folder_that_cannot_be_removed_is_named(tmp_path, moves, monkeypatch, caplog):
    """An old folder that cannot be removed is logged; the call succeeds."""
    folder_of(tmp_path / "path", "old")
    folder_of(tmp_path / "made", "new")

    def fails(path, *, context):
        raise OSError("the network is down")

    monkeypatch.setattr(files, "remove", fails)

    files.replace_folder(str(tmp_path / "made"), str(tmp_path / "path"), context=None)

    assert contents(tmp_path) == {"path": "new", "made.old": "old"}
    assert caplog.messages == [f"{tmp_path}/made.old could not be removed: the network is down"]


def test_an_interrupt_does_not_break_a_replacement(tmp_path, moves, monkeypatch):
    """Ctrl-C while a folder is being replaced is raised once the new one has the name."""
    folder_of(tmp_path / "path", "old")
    folder_of(tmp_path / "made", "new")
    move = files.move

    def slow(source, target, *, context):
        if not moves:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(2 * interrupts.SOON)
        move(source, target, context=context)

    monkeypatch.setattr(files, "move", slow)

    with pytest.raises(KeyboardInterrupt):
        interrupts.call(files.replace_folder, str(tmp_path / "made"), str(tmp_path / "path"), context=None)

    assert contents(tmp_path) == {"path": "new"}
