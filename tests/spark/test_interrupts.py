"""Ctrl-C once and many times, at every moment of a call: in a script, at a terminal and in a notebook."""

import contextlib
import fcntl
import json
import logging
import os
import pty
import queue
import random
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path

import pyte
import pytest
from standalone import eventually

logger = logging.getLogger(__name__)
SCRIPT = Path(__file__).with_name("interrupted.py")
SECONDS = 3.0  # that a call may take to end
GAP = 0.05  # seconds between repeated presses
LINE = "Interrupted: stopping the call and cancelling its Spark job."
MOMENTS = [
    "before the job",
    "while workers start",
    "in the feed",
    "in an epoch",
    "at an epoch's end",
    "in validation",
    "in a callback",
    "in a job of a callback",
    "while the run finishes",
    "while a checkpoint is written",
    "in evaluate",
    "in predict",
    "in transform",
    "in run",
    "in an epoch, asynchronous",
    "in validation, asynchronous",
    "in an epoch, in rounds of 3",
    "at an epoch's end, in rounds of 3",
]
SOME = [
    ("in an epoch", 2),
    ("in an epoch, asynchronous", 1),
    ("in a callback", 20),
    ("in an epoch, in rounds of 3", 2),
    ("in a job of a callback", 1),
    ("before the job", 20),
    ("while a checkpoint is written", 2),
]
BAR = "while a bar is drawn"
COLUMNS = 80
EARLIER = (  # the lines of a fit above its bar; a terminal breaks long lines, so spaces do not count
    r"Livepage:http://\S+\(worksonce\)2workers\S+stepsperepoch\."
    r"(Epoch\d/100000-[\d.]+s-[\d,]+rows/s-loss:[\d.e-]+)+"
)
pytestmark = [pytest.mark.spark, pytest.mark.timeout(1800)]


class Script:
    """The script in its own process, at a terminal or with its output in a pipe."""

    def __init__(self, folder, moments, *, terminal):
        (folder / "tmp").mkdir()
        environment = environment_of(folder)
        command = [sys.executable, str(SCRIPT), str(folder), *moments]
        self.terminal, self._printed = terminal, b""
        if terminal:
            self.pid, self._output = pty.fork()
            if self.pid == 0:
                os.execve(command[0], command, environment)
            fcntl.ioctl(self._output, termios.TIOCSWINSZ, struct.pack("HHHH", 60, COLUMNS, 0, 0))
            _keep_output(self._output)
        else:
            self._output, end = os.pipe()
            self._process = subprocess.Popen(
                command, stdout=end, stderr=end, env=environment, start_new_session=True
            )
            os.close(end)
            self.pid = self._process.pid
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self):
        with contextlib.suppress(OSError):  # Linux raises once the terminal has no process left
            while data := os.read(self._output, 1 << 16):
                self._printed += data

    @property
    def text(self):
        """The output so far."""
        return self._printed.decode(errors="replace").replace("\r\n", "\n")

    def press(self):
        if self.terminal:
            os.write(self._output, b"\x03")
        else:
            os.kill(self.pid, signal.SIGINT)

    def shown(self, case):
        """Return the output since Ctrl-C was pressed."""
        assert eventually(lambda: f"== {case}\n" in self.text)
        return self.text[self.pressed_at :].split(f"== {case}\n")[0].replace("^C", "")

    def screen(self, case):
        """Return the lines of a case that a terminal shows at its end, from the first line of its fit on."""
        screen = pyte.Screen(COLUMNS, 400)
        pyte.ByteStream(screen).feed(self._printed)
        lines = [line.replace("^C", "").rstrip() for line in screen.display]
        end = lines.index(f"== {case}")
        start = max(index for index in range(end) if lines[index].startswith("Live page"))
        return [line for line in lines[start:end] if line]

    def close(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        if self.terminal:
            os.waitpid(self.pid, 0)
        else:
            self._process.wait()
        self._reader.join(10)
        os.close(self._output)


def _keep_output(terminal):
    """Let a terminal keep the unread output when Ctrl-C is pressed; by default it is lost."""
    settings = termios.tcgetattr(terminal)
    settings[3] |= termios.NOFLSH
    termios.tcsetattr(terminal, termios.TCSANOW, settings)


def environment_of(folder):
    return os.environ | {
        "PYTHONPATH": f"{SCRIPT.parent}{os.pathsep}{SCRIPT.parent.parent}",
        "PYTHONWARNINGS": "ignore",
        "TMPDIR": str(folder / "tmp"),
        "CUDA_VISIBLE_DEVICES": "",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "TERM": "xterm-256color",
    }


def interrupted(folder, cases, *, terminal):
    """Yield each case's moment, its report and its output.

    A case is a moment, the number of presses of Ctrl-C, and optionally a delay in seconds.
    """
    script = Script(folder, [moment for moment, *_ in cases], terminal=terminal)
    try:
        for case, (moment, presses, *delay) in enumerate(cases):
            assert eventually((folder / f"{case}.now").exists, 120), script.text
            time.sleep(sum(delay))
            begun, script.pressed_at = time.time(), len(script.text)
            for _ in range(presses):
                script.press()
                time.sleep(GAP)
                if (folder / f"{case}.over").exists():
                    break
            assert eventually((folder / f"{case}.json").exists, 120), script.text
            report = json.loads((folder / f"{case}.json").read_text())
            report["took"] = report.pop("came") - begun
            shown = script.shown(case)
            if moment == BAR:
                assert "━" in script.text[: script.pressed_at]
                shown = without_earlier_lines(script.screen(case))
            yield moment, report, shown
    finally:
        script.close()


def without_earlier_lines(lines):
    """Return the text on a screen without the lines of a fit above its bar, if these are whole."""
    first = lines.index(LINE) if LINE in lines else 0
    earlier = re.sub(r"\s", "", "".join(lines[:first]))
    return "\n".join([*lines[first if re.fullmatch(EARLIER, earlier) else 0 :], ""])


def faults_of(moment, report, shown):
    """Return the faults found after an interrupt."""
    line, _, trace = shown.partition("Traceback (most recent call last):\n")
    return [
        fault
        for fault, there in {
            f"raised {report['raised']}": report["raised"] != "KeyboardInterrupt",
            f"took {report['took']:.1f} s": report["took"] > SECONDS,
            f"left {report['left']}": report["left"],
            f"weights are wrong by {report['wrong']}": report["wrong"] > 1e-4,
            f"{report['lacking']} steps of epochs that have ended are missing": report["lacking"],
            f"said {line}": line.strip() != LINE,
            f"showed {trace}": "Traceback" in trace or not trace.endswith("KeyboardInterrupt\n"),
        }.items()
        if there
    ]


def require_clean(folder, cases, *, terminal):
    """Check every case; return the seconds that each took."""
    faults, seconds = {}, []
    for (moment, presses, *delay), (_, report, shown) in zip(
        cases, interrupted(folder, cases, terminal=terminal), strict=True
    ):
        seconds.append(report["took"])
        if found := faults_of(moment, report, shown):
            faults[moment, presses, *delay] = found
    assert {} == faults
    return seconds


def random_cases():
    """Return fifty cases at random moments of the first seconds of a fit, in any mode."""
    dice = random.Random(38)
    kinds = ["at random", "at random, asynchronous", "at random, in rounds of 3"]
    return [(dice.choice(kinds), dice.choice([1, 2, 20]), dice.uniform(0, 4)) for _ in range(50)]


@pytest.mark.one_case
@pytest.mark.parametrize("terminal", [True, False], ids=["terminal", "script"])
def test_a_call_ends_once_and_leaves_nothing(tmp_path, terminal):
    """KeyboardInterrupt comes soon, with one whole line on the terminal; the model holds the last merge."""
    require_clean(tmp_path, [*SOME[:3], (BAR, 1)] if terminal else SOME[3:], terminal=terminal)


@pytest.mark.whole
@pytest.mark.parametrize("terminal", [True, False], ids=["terminal", "script"])
@pytest.mark.parametrize("presses", [1, 2, 20])
def test_every_moment(tmp_path, terminal, presses):
    """Every kind of call is interrupted in the same way, whatever it is doing."""
    require_clean(tmp_path, [(moment, presses) for moment in MOMENTS], terminal=terminal)


@pytest.mark.whole
@pytest.mark.parametrize("terminal", [True, False], ids=["terminal", "script"])
def test_random_moments(tmp_path, terminal):
    """A fit can be interrupted at any of fifty random moments of its first seconds."""
    seconds = sorted(require_clean(tmp_path, random_cases(), terminal=terminal))

    logger.info("Median %.2f s, longest %.2f s.", seconds[len(seconds) // 2], seconds[-1])


class Notebook:
    """A notebook kernel and the output of its cells."""

    def __init__(self, folder):
        from jupyter_client import KernelManager

        (folder / "tmp").mkdir()
        self.manager = KernelManager()
        self.manager.start_kernel(env=environment_of(folder), cwd=str(folder))
        self.client = self.manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(60)

    def run(self, code):
        """Run a cell; return its output and the name of the exception that ended it."""
        return self.end(self.client.execute(code))

    def drain(self):
        """Drop the output so far."""
        with contextlib.suppress(queue.Empty):
            while True:
                self.client.get_iopub_msg(timeout=0.1)

    def end(self, request):
        """Wait for a running cell; return its output and the name of the exception that ended it."""
        printed, raised = "", None
        while True:
            message = self.client.get_iopub_msg(timeout=120)
            if message["parent_header"].get("msg_id") != request:
                continue
            content = message["content"]
            if message["msg_type"] == "stream":
                printed += content["text"]
            elif message["msg_type"] == "error":
                raised = content["ename"]
            elif message["msg_type"] == "status" and content["execution_state"] == "idle":
                return printed, raised

    def close(self):
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)
        self.manager.cleanup_resources()


EVERY = [(moment, presses) for presses in (1, 2, 20) for moment in MOMENTS]


@pytest.mark.whole
@pytest.mark.parametrize(
    "cases",
    [[("in an epoch", 20), ("in evaluate", 1), ("at random, asynchronous", 2, 1.5)], EVERY, random_cases()],
    ids=["some", "every", "random"],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_a_cell_of_a_notebook(tmp_path, cases):
    """An interrupted cell ends with KeyboardInterrupt, and the next cell's fit works."""
    pytest.importorskip("ipykernel")
    notebook, faults = Notebook(tmp_path), {}
    try:
        assert notebook.run(f"import interrupted; cases = interrupted.Cases({str(tmp_path)!r})")[1] is None
        for case, (moment, presses, *delay) in enumerate(cases):
            request = notebook.client.execute(f"cases.begin({case}, {moment!r})")
            assert eventually((tmp_path / f"{case}.now").exists, 120)
            time.sleep(sum(delay))
            notebook.drain()
            begun = time.time()
            for _ in range(presses):
                notebook.manager.interrupt_kernel()
                time.sleep(GAP)
                if (tmp_path / f"{case}.over").exists():
                    break
            printed, raised = notebook.end(request)
            took = time.time() - begun
            assert notebook.run(f"cases.report({case})")[1] is None, moment
            report = json.loads((tmp_path / f"{case}.json").read_text()) | {"raised": raised, "took": took}
            # The kernel sends the traceback by itself.
            shown = f"{printed.strip()}\nTraceback (most recent call last):\n{raised}\n"
            if found := faults_of(moment, report, shown):
                faults[case, moment, presses, *delay] = found
    finally:
        notebook.close()
    assert {} == faults
