"""A checkpoint folder has one writing run at a time."""

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from clock import Clock
from hypothesis import given
from hypothesis import strategies as st

from sparkdl.driver import checkpoints, lease
from sparkdl.driver.lease import BEAT_SECONDS, SILENCE_SECONDS, Lease, Owner, lease_of
from sparkdl.errors import CheckpointError, ConfigError
from sparkdl.process import interrupts
from sparkdl.process.interrupts import Cleanup
from sparkdl.spark import folders

# -- on a disk ------------------------------------------------------------------------------------


def new(folder, clock=None):
    clock = clock or Clock()
    return Lease(str(folder), folders.open_folder(str(folder), context=None), clock=clock, sleep=clock.sleep)


def acquired(folder, clock=None):
    found = new(folder, clock)
    found.acquire()
    return found


@pytest.fixture
def elsewhere(monkeypatch):
    """A function that acquires a folder as a driver on another machine, and returns its lease."""

    def elsewhere(folder):
        with monkeypatch.context() as patch:
            patch.setattr(lease, "_machine", lambda: "another")
            found = acquired(folder)
        lease._held.discard(found.me.id)
        return found

    return elsewhere


@pytest.fixture(autouse=True)
def nothing_held():
    """Fail a test that leaves a lease, unless it stands for another process."""
    yield
    assert lease._held == set()


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_lease_leaves_nothing_behind(tmp_path):
    """The folder is made if needed, and has a record and a heartbeat until the lease is released."""
    mine = acquired(tmp_path / "new" / "folder")
    mine.check()
    assert names(tmp_path / "new" / "folder") == ["lease", f"lease-{mine.me.id}.beat"]

    mine.release()
    mine.release()

    assert names(tmp_path / "new" / "folder") == []


@pytest.mark.parametrize("spelling", [".", "link", "uri"])
def test_a_second_fit_of_this_process_is_refused_at_once(tmp_path, spelling):
    """A second fit of this process is refused at once, also by a path with dots or a symbolic link."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    mine = acquired(tmp_path / "folder")
    other = {".": f"{tmp_path}/link/../folder/.", "link": tmp_path / "link"}.get(
        spelling, f"{tmp_path}/folder/"
    )

    with pytest.raises(CheckpointError, match="another fit of this process. Wait until"):
        acquired(other)

    mine.check()
    mine.release()
    acquired(other).release()


def test_a_run_whose_heart_beats_keeps_the_folder(tmp_path, elsewhere):
    """While the owner writes heartbeats, another driver gets an error with host, process and remedy."""
    owner = elsewhere(tmp_path)

    with pytest.raises(
        CheckpointError,
        match=rf"to {tmp_path}: process {os.getpid()} on \S+, which wrote a heartbeat less than 3 s ago\. "
        "Wait until that run ends, stop it, or use another folder",
    ):
        acquired(tmp_path, Clock(lambda: None, owner._beat))
    owner.check()


def test_a_silent_run_loses_the_folder(tmp_path, elsewhere, caplog):
    """The next run waits for the silence; the silent one then detects the loss and writes no more."""
    owner, clock = elsewhere(tmp_path), Clock()

    mine = acquired(tmp_path, clock)

    assert SILENCE_SECONDS <= clock.now <= SILENCE_SECONDS + BEAT_SECONDS
    assert "has been silent for 20 s" in caplog.text
    mine.check()
    for check in (owner.check, owner.require, owner._beat):
        with pytest.raises(CheckpointError, match=r"lost the checkpoint folder .* took it over after"):
            check()
    owner.release()
    mine.check()
    mine.release()
    assert names(tmp_path) == []


def test_silence_is_what_a_run_has_watched(tmp_path, elsewhere):
    """Only time that a driver has watched counts as silence: one stopped for an hour has not watched."""
    owner = elsewhere(tmp_path)
    clock = Clock(lambda: None, lambda: setattr(clock, "now", clock.now + 3600), owner._beat)

    with pytest.raises(CheckpointError, match="wrote a heartbeat"):
        acquired(tmp_path, clock)


@pytest.mark.parametrize("how", ["ended", "other", "zombie"])
def test_a_run_whose_process_has_ended_here_loses_the_folder_at_once(tmp_path, caplog, how):
    """A dead process on this machine loses the folder at once, even if its id is reused or it is a zombie."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        started = lease._started(process.pid)
        if how != "other":
            process.kill()
        if how == "ended":
            process.wait()
        elif how == "zombie":
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        owner = replace(Owner.here(), process=process.pid, started="1" if how == "other" else started)
        (tmp_path / "lease").write_bytes(owner.record())
        clock = Clock()

        acquired(tmp_path, clock).release()

        assert clock.now == 0
        assert "from process" in caplog.text
        assert "whose run has ended" in caplog.text
    finally:
        process.kill()
        process.wait()


def test_a_living_process_here_has_to_be_silent_as_well(tmp_path):
    """A stopped process on this machine loses the folder only after the silence."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        owner = replace(Owner.here(), process=process.pid, started=lease._started(process.pid))
        (tmp_path / "lease").write_bytes(owner.record())
        clock = Clock()

        acquired(tmp_path, clock).release()

        assert clock.now >= SILENCE_SECONDS
    finally:
        process.kill()
        process.wait()


def test_of_several_that_find_a_run_silent_one_takes_over(tmp_path, elsewhere):
    """Of several drivers that find a run silent one takes over; a late one watches the winner."""
    elsewhere(tmp_path)
    winners = []
    last = round(SILENCE_SECONDS / lease.POLL_SECONDS)

    def wins():
        winners.append(elsewhere(tmp_path))

    late = Clock(*[lambda: None] * last, wins, lambda: None, lambda: winners[0]._beat())
    with pytest.raises(CheckpointError, match="wrote a heartbeat"):
        acquired(tmp_path, late)
    winners[0].check()


def test_a_run_that_ends_while_it_is_watched_leaves_the_folder(tmp_path, elsewhere):
    """A heartbeat file that disappears is not a sign of life: the folder is free."""
    owner = elsewhere(tmp_path)

    acquired(tmp_path, clock := Clock(lambda: None, owner._remove)).release()

    assert clock.now < BEAT_SECONDS


def test_a_run_that_ends_at_the_end_of_its_silence_leaves_the_folder(tmp_path, elsewhere):
    """A takeover from a run that has just removed its lease is void, and the folder is free."""
    owner = elsewhere(tmp_path)
    last = round(SILENCE_SECONDS / lease.POLL_SECONDS)

    mine = acquired(tmp_path, Clock(*[lambda: None] * last, owner._remove))

    mine.check()
    assert names(tmp_path) == ["lease", f"lease-{mine.me.id}.beat"]
    mine.release()


def test_a_lease_that_somebody_removed_is_lost(tmp_path):
    """A lease whose file was removed is lost: another run may have had the folder since."""
    mine = acquired(tmp_path)
    (tmp_path / "lease").unlink()
    with pytest.raises(CheckpointError, match='its file "lease" was removed'):
        mine.check()
    mine.release()

    mine = acquired(tmp_path)
    (tmp_path / "lease").write_bytes(replace(Owner.here(), host="node-7").record())
    with pytest.raises(CheckpointError, match="process .* on node-7 owns it now"):
        mine.check()
    mine.release()
    assert names(tmp_path) == ["lease"]


def test_a_file_that_is_no_lease_is_named(tmp_path):
    """The error for a file that is not a lease says when to remove it."""
    (tmp_path / "lease").write_text("[]")
    with pytest.raises(ConfigError, match="its file lease is not a lease of sparkdl; remove it if no other"):
        acquired(tmp_path)
    (tmp_path / "lease").write_text("")
    with pytest.raises(ConfigError, match="its file lease is not a lease"):
        acquired(tmp_path)


@pytest.mark.parametrize(
    "fields",
    [
        {"id": "a/../../x"},
        {"id": "ab" * 15},
        {"id": "AB" * 16},
        {"id": "ab" * 16 + "\n"},
        {"id": 7},
        {"host": None},
        {"host": ["node"]},
        {"process": "7"},
        {"process": None},
        {"process": True},
        {"process": 0},
        {"process": -1},
        {"process": 1 << 64},
        {"started": 3},
        {"machine": {}},
    ],
)
def test_a_record_with_other_values_is_no_lease(tmp_path, fields):
    """A record with an invalid id is refused: ids are parts of file names and could escape the folder."""
    folder = tmp_path / "folder"
    (folder / ".lease-a").mkdir(parents=True)
    record = json.dumps(asdict(Owner.here()) | fields)
    (folder / "lease").write_text(record)

    with pytest.raises(ConfigError, match="its file lease is not a lease of sparkdl; remove it"):
        acquired(folder)

    assert names(tmp_path) == ["folder"]
    assert names(folder) == [".lease-a", "lease"]
    assert (folder / "lease").read_text() == record


@pytest.mark.parametrize(
    "text", ["[" * 100_000, "{}", "7", "\udcff"], ids=["deep", "dict", "number", "bytes"]
)
def test_a_text_that_is_no_record_is_no_lease(tmp_path, text):
    """Any text that is not a record raises the same error."""
    (tmp_path / "lease").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match="its file lease is not a lease of sparkdl; remove it"):
        acquired(tmp_path)


def test_a_chain_that_leads_to_its_beginning_is_no_lease(tmp_path):
    """A chain of leases that contains a cycle is refused; the error names the file."""
    first, second = Owner.here(), Owner.here()
    (tmp_path / "lease").write_bytes(first.record())
    (tmp_path / f"lease-{first.id}.next").write_bytes(second.record())
    (tmp_path / f"lease-{second.id}.next").write_bytes(first.record())

    with pytest.raises(ConfigError, match=f"its file lease-{second.id}.next is not a lease of sparkdl"):
        acquired(tmp_path)


def test_a_folder_that_cannot_be_used_is_named(tmp_path):
    """A file in place of the folder, or a heartbeat that stays unreadable, is an error."""
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="Checkpoints cannot be kept in"):
        lease_of(str(tmp_path / "file"), None)

    acquired(tmp_path).release()
    (tmp_path / "lease").write_bytes(owner := replace(Owner.here(), machine="another").record())
    (tmp_path / f"lease-{Owner.of(owner).id}.beat").mkdir()
    with pytest.raises(ConfigError, match="cannot be kept in .*Expected a folder that this"):
        acquired(tmp_path)


def test_a_folder_that_is_gone_is_no_lost_lease(tmp_path):
    """A run whose folder is gone has not lost its lease: training continues without checkpoints."""
    mine = acquired(tmp_path / "folder")
    for path in (tmp_path / "folder").iterdir():
        path.unlink()
    (tmp_path / "folder").rmdir()

    with pytest.raises(FileNotFoundError):
        mine.check()
    mine.require()
    mine.release()


def test_a_full_disk_stops_no_heart(tmp_path, elsewhere, monkeypatch):
    """If the disk is full, a heartbeat still changes the file's time, which counts as a sign of life."""
    owner = elsewhere(tmp_path)
    full = OSError(28, "No space left on device")
    monkeypatch.setattr(os, "pwrite", lambda *_: (_ for _ in ()).throw(full))

    with pytest.raises(CheckpointError, match="wrote a heartbeat"):
        acquired(tmp_path, Clock(lambda: None, owner._beat))


def test_the_thread_warns_once_and_ends(tmp_path, monkeypatch, caplog):
    """A failing heartbeat warns once and does not end the run; the loss of the lease ends the thread."""
    monkeypatch.setattr(lease, "BEAT_SECONDS", 0.001)
    mine, beats = acquired(tmp_path), threading.Semaphore(0)

    def failing(*_):
        beats.release()
        raise OSError("the disk is gone")

    monkeypatch.setattr(mine.folder, "rewrite", failing)
    mine.start()
    for _ in range(5):
        assert beats.acquire(timeout=60)
    mine.require()
    assert caplog.text.count("the disk is gone") == 1
    (tmp_path / "lease").unlink()
    mine._thread.join(60)
    assert not mine._thread.is_alive()
    with pytest.raises(CheckpointError, match="was removed"):
        mine.require()
    mine.release()


def test_an_interrupt_waits_for_no_file_system_that_stalls(tmp_path, monkeypatch, eventually, caplog):
    """After an interrupt, a lease is released as soon as its file system responds, and the call ends."""
    mine, responds, discard = acquired(tmp_path), threading.Event(), folders.LocalFolder.discard

    def stalled(*arguments):
        responds.wait(60)
        discard(*arguments)

    def work():
        with Cleanup() as stack:
            stack.callback(mine.release)
            os.kill(os.getpid(), signal.SIGINT)
            interrupts.check()

    monkeypatch.setattr(folders.LocalFolder, "discard", stalled)
    before, begun = signal.signal(signal.SIGINT, signal.default_int_handler), time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        interrupts.call(work)
    signal.signal(signal.SIGINT, before)

    assert time.monotonic() - begun < 3
    assert caplog.messages[-1].endswith(
        "could not be removed; the next run may have to wait 20 s: the file system does not respond"
    )
    with pytest.raises(CheckpointError, match="another fit of this process"):
        acquired(tmp_path)
    responds.set()
    assert eventually(lambda: not lease._held)
    assert [] == names(tmp_path)


def test_a_fork_has_no_lease(tmp_path):
    """A forked child neither writes checkpoints nor releases the folder."""
    mine = acquired(tmp_path)
    child = os.fork()
    if not child:
        code = 1
        try:
            mine.release()
            mine.check()
        except CheckpointError as error:
            code = 0 if "and this process is a fork of it" in str(error) else 2
        finally:
            os._exit(code)

    assert os.waitpid(child, 0)[1] == 0
    mine.check()
    mine.release()


@pytest.mark.whole
def test_a_driver_that_is_killed_leaves_a_lease_that_ends_with_it(tmp_path):
    """SIGKILL of a driver ends its heartbeat, and the next run sees it at once."""
    code = (
        "import sys, time; from sparkdl.driver.lease import lease_of; mine = lease_of(sys.argv[1], None);"
        "mine.acquire(); mine.start(); print('has it', flush=True); time.sleep(600)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout.readline() == "has it\n"
        with pytest.raises(CheckpointError, match=rf"process {process.pid} on .* wrote a heartbeat"):
            lease_of(str(tmp_path), None).acquire()
        process.send_signal(signal.SIGKILL)
    acquired(tmp_path, clock := Clock()).release()
    assert clock.now == 0
    assert names(tmp_path) == []


def killed_in(action):
    """Run a function in a child process that is killed in its call of ``publish_local``."""
    child = os.fork()
    if not child:
        folders.publish_local = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        try:
            action()
        finally:
            os._exit(1)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL


def test_what_killed_drivers_leave_is_removed(tmp_path, elsewhere):
    """The next run removes the files of drivers that were killed while they took or released the folder."""
    killed_in(lambda: acquired(tmp_path))
    (unfinished,) = names(tmp_path)
    assert unfinished.startswith(".lease-")
    silent = elsewhere(tmp_path)
    killed_in(lambda: acquired(tmp_path))
    assert any(name.startswith(f".lease-{silent.me.id}.next-") for name in names(tmp_path))
    (tmp_path / f"lease-{'0' * 32}.next").write_bytes(Owner.here().record())
    (tmp_path / "checkpoint-00000001.sparkdl").touch()

    mine = acquired(tmp_path)
    mine.check()
    left = ["lease", f"lease-{mine.me.id}.beat", f"lease-{silent.me.id}.next"]
    assert names(tmp_path) == sorted([*left, "checkpoint-00000001.sparkdl"])
    mine.release()

    assert names(tmp_path) == ["checkpoint-00000001.sparkdl"]


def test_a_driver_whose_unfinished_file_the_owner_removes_tries_again(tmp_path, monkeypatch):
    """A driver that loses its unfinished file to the owner's cleanup looks at the folder again."""
    publish, lost = folders.publish_local, []

    def once_lost(begun, *arguments):
        if not lost:
            lost.append(begun)
            begun.unlink()
        publish(begun, *arguments)

    monkeypatch.setattr(folders, "publish_local", once_lost)
    mine = acquired(tmp_path)

    assert lost
    mine.release()


# -- processes ------------------------------------------------------------------------------------


def contents_of(folder, seen):
    """Record the contents of each checkpoint by its name."""
    for path in folder.glob("checkpoint-*.sparkdl"):
        seen.setdefault(path.name, set()).add(hashlib.blake2b(path.read_bytes()).digest())


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.whole) for seed in range(1, 21))])
def test_drivers_that_are_killed_and_stopped_count_every_checkpoint_once(tmp_path, seed):
    """Three drivers compete for a folder while they are killed or stopped at random moments.

    A driver resumes from the newest checkpoint and adds one for each number, so that the name of a checkpoint
    equals its number only if there was never a second writer. None has two contents.
    """
    moments, folder, last, beat = random.Random(seed), tmp_path / "folder", 200, 0.3
    log, drivers, codes, seen, stopped = (tmp_path / "log").open("w"), [], [], {}, []
    try:
        while 0 not in codes:
            for driver in [driver for driver in drivers if driver.poll() is not None]:
                drivers.remove(driver)
                codes.append(driver.returncode)
            while len(drivers) < 3:
                drivers.append(
                    subprocess.Popen(
                        [
                            sys.executable,
                            Path(__file__).with_name("contending.py"),
                            folder,
                            str(last),
                            str(beat),
                        ],
                        stdout=log,
                        stderr=log,
                    )
                )
            time.sleep(moments.uniform(0, 1))
            victim, fate = moments.choice(drivers), moments.random()
            if stopped and fate < 0.5:
                stopped.pop(0).send_signal(signal.SIGCONT)
            elif fate < 0.6:
                victim.kill()
            elif fate < 0.7 and victim not in stopped:
                victim.send_signal(signal.SIGSTOP)
                stopped.append(victim)
            contents_of(folder, seen)
    finally:
        for driver in drivers:
            driver.kill()
            driver.wait()
        log.close()
    contents_of(folder, seen)
    said = (tmp_path / "log").read_text()

    assert set(codes) <= {0, 3, 4, -signal.SIGKILL}, said
    assert "Traceback" not in said
    assert {} == {name: each for name, each in seen.items() if len(each) > 1}
    found = sorted(folder.glob("checkpoint-*.sparkdl"))
    assert [f"checkpoint-{number:08d}.sparkdl" for number in range(1, last + 1)] == [
        path.name for path in found
    ]
    versions = [checkpoints._read(str(path), None).snapshot.version for path in found]
    assert list(range(1, last + 1)) == versions


# -- whatever happens -----------------------------------------------------------------------------


class Anyone(set):
    """The leases of one process in which each thread stands for a driver and sees only its own."""

    def __contains__(self, name):
        return super().__contains__((name, threading.get_ident()))

    def add(self, name):
        super().add((name, threading.get_ident()))

    def discard(self, name):
        super().discard((name, threading.get_ident()))


class Killed(BaseException):
    """An exception that ends a driver without its cleanup."""


class World:
    """Simulated drivers on separate machines, which take one step at a time, and one folder.

    Args:
        fates: when each driver starts, what happens to it, and at which of its steps.
        choices: the order of the drivers that are ready to take the next step.
    """

    def __init__(self, fates, choices):
        self.now, self.files, self.published = 0.0, {}, {}
        self.choices = [*choices[::-1]]
        self.drivers = [Driver(self, *fate) for fate in fates]

    def owner(self):
        """Return the id of the folder's owner."""
        name, owner = "lease", None
        while data := self.files.get(name):
            owner = Owner.of(data).id
            name = f"lease-{owner}.next"
        return owner

    def run(self):
        """Run the drivers to their ends, in turns once ``choices`` are used up."""
        for turn in range(5000):
            running = [driver for driver in self.drivers if driver.thread.is_alive()]
            if not running:
                return
            ready = [driver for driver in running if driver.wakes <= self.now]
            if not ready:
                self.now = min(driver.wakes for driver in running)
                continue
            choice = self.choices.pop() if self.choices and len(ready) > 1 else turn
            ready[choice % len(ready)].step()
        raise AssertionError("the drivers do not end")

    def __enter__(self):
        for driver in self.drivers:
            driver.thread.start()
        return self

    def __exit__(self, *exception):
        for driver in self.drivers:
            driver.fate, driver.moment = "killed", 0
            while driver.thread.is_alive():
                driver.go.release()
                driver.thread.join(0.01)


class Driver:
    """A driver that acquires the folder, beats, publishes three files and ends.

    It is killed, or stopped for a time, before one of its steps.
    """

    def __init__(self, world, starts, fate, moment):
        self.world, self.fate, self.moment = world, fate, moment
        self.wakes = starts
        self.steps, self.was_stopped = 0, False
        self.go, self.done = threading.Semaphore(0), threading.Semaphore(0)
        self.outcome, self.error, self.owners = None, None, set()
        self.thread = threading.Thread(target=self.main, daemon=True)
        self.lease = Lease("folder", View(self), clock=lambda: world.now, sleep=self.sleep)

    def step(self):
        """Let the driver take one step."""
        self.steps += 1
        if self.fate == "stopped" and self.steps == self.moment:
            self.wakes, self.was_stopped = self.world.now + 100, True
            return
        self.go.release()
        self.done.acquire()

    def turn(self):
        """Wait for this driver's turn."""
        self.done.release()
        self.go.acquire()
        if self.fate == "killed" and self.steps >= self.moment:
            raise Killed

    def sleep(self, seconds):
        self.wakes = self.world.now + seconds
        self.turn()

    def main(self):
        self.go.acquire()
        try:
            self.outcome = self.work()
        except Killed:
            self.outcome = "killed"
        except CheckpointError:
            self.outcome = "refused"
        except BaseException as error:  # noqa: BLE001 - for the test's own thread
            self.error = error
        finally:
            self.done.release()

    def work(self):
        self.lease.acquire()
        self.has = self.lease.me.id
        try:
            for _ in range(3):
                for _ in range(2):
                    self.sleep(BEAT_SECONDS)
                    self.lease._beat()
                self.owners = {self.world.owner()}
                self.lease.check()
                assert self.has in self.owners, "it did not own the folder at any time during its check"
                self.publish()
        except CheckpointError:
            assert self.was_stopped, "it lost the folder although it wrote heartbeats in time"
            self.lease.release()
            return "lost"
        self.lease.release()
        return "ended"

    def publish(self):
        number = 1 + max((name for name in self.world.files if isinstance(name, int)), default=0)
        self.turn()
        if self.world.files.setdefault(number, self.has) != self.has:
            assert any(driver.was_stopped for driver in self.world.drivers), "a file was there already"
        before = self.world.published.setdefault(number, self.world.files[number])
        assert before == self.world.files[number], "a file has had two contents"


class View:
    """The folder as a driver sees it: each operation takes a turn."""

    settle_seconds = 0.0

    def __init__(self, driver):
        self.driver, self.world = driver, driver.world

    def turn(self):
        if self.driver.outcome is not None:
            return
        self.driver.turn()
        for driver in self.world.drivers:
            driver.owners.add(self.world.owner())

    def names(self):
        self.turn()
        return [name for name in self.world.files if isinstance(name, str)]

    def read(self, name):
        self.turn()
        return self.world.files.get(name)

    def create(self, name, data):
        self.turn()
        return self.world.files.setdefault(name, data) == data

    def rewrite(self, name, data):
        self.turn()
        self.world.files[name] = data

    stamp = read

    def discard(self, name):
        self.turn()
        self.world.files.pop(name, None)


FATES = st.tuples(
    st.sampled_from([0, 1, 30, 60]),
    st.sampled_from(["lives", "killed", "stopped"]),
    st.integers(1, 70),
)


@given(st.lists(FATES, min_size=2, max_size=3), st.lists(st.integers(0, 2), max_size=150))
def test_whatever_drivers_do_one_owns_the_folder(fates, choices):
    """However drivers are killed or stopped, none takes a folder whose owner is alive.

    A driver that passes a check was the owner during it; one that beats in time keeps the folder; no file has
    two contents. If all live, one finishes and leaves nothing. A later driver removes what others have left.
    """
    with pytest.MonkeyPatch.context() as patch, World(fates, choices) as world:
        patch.setattr(lease, "_machine", lambda: str(threading.get_ident()))
        patch.setattr(lease, "_held", Anyone())
        world.run()

    for driver in world.drivers:
        if driver.error is not None:
            raise driver.error
    outcomes = [driver.outcome for driver in world.drivers]
    assert set(outcomes) <= {"ended", "refused", "lost", "killed"}
    if "killed" not in outcomes and not any(driver.was_stopped for driver in world.drivers):
        assert "ended" in outcomes
        assert not [name for name in world.files if isinstance(name, str)]
    with pytest.MonkeyPatch.context() as patch, World([(world.now + 1000, "lives", 0)], []) as later:
        patch.setattr(lease, "_machine", lambda: "another")
        patch.setattr(lease, "_held", Anyone())
        later.files, later.now = world.files, world.now + 1000
        later.run()
    assert "ended" == later.drivers[0].outcome
    assert not [name for name in world.files if isinstance(name, str)]
