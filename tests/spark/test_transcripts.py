"""All that a first fit prints: at a terminal, in a script whose output is a file, and in a notebook.

Nothing but the lines that docs/how-to/watch.md lists may appear.
"""

import contextlib
import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pyte
import pytest

IMPORTS = """
import logging, sys, warnings
import keras
import numpy as np
from sparkdl import SparkModel
"""
SESSION = "from pyspark.sql import SparkSession; SparkSession.builder.master('local[2]').getOrCreate()\n"
FIT = """
class Noisy(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        print("a print")
        handled.warning("a log line")
        warnings.warn("a warning")

handled = logging.getLogger("mine")
handled.addHandler(logging.StreamHandler())
x = np.random.default_rng(0).normal(size=(200_000, 8)).astype("float32")
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)], name="small")
model.compile("sgd", "mse", metrics=["mae"])
spark_model = SparkModel(model, frequency=100, num_workers=2)
history = spark_model.fit(x, x.sum(axis=1), 64, epochs=2, validation_split=0.1, callbacks=[Noisy()])
"""
START = "== fit"
OWN = [  # the lines of sparkdl that docs/how-to/watch.md lists
    r"2 workers \(as requested\) on 180,000 rows, batch_size=64 per worker: 2,814 steps per epoch\.",
    r"Workers train separately between exchanges, at 1\.41 times the learning rate, with merge=\"bmuf\"\. "
    r"If you pass merge= yourself, the learning rate is not scaled\.",
    r"Live page: http://(127\.0\.0\.1|localhost):\d+/\?key=[\w-]{32} \(works once\)",
    r"Epoch [12]/2 - [\d.e-]+ s - [\d,]+ rows/s - loss: [\d.e-]+ - mae: [\d.e-]+ - val_loss: [\d.e-]+ - "
    r"val_mae: [\d.e-]+",
]
OTHERS = [
    "a print",
    "a log line",
    r"/[\w/.-]+/script\.py:\d+: UserWarning: a warning",
    r'warnings\.warn\("a warning"\)',
]
UNSET = "PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON", "TF_CPP_MIN_LOG_LEVEL"
pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]


def environment(**changes):
    """Return the environment of a user, who has set none of the variables that the tests set, and changes."""
    found = {**os.environ, "SPARK_LOCAL_IP": "127.0.0.1", "TERM": "xterm-256color"}
    for name in (*UNSET, "SPARK_CONNECT_MODE_ENABLED", "COLUMNS", "LINES"):
        found.pop(name, None)
    return found | changes


def at_a_terminal(command, columns):
    """Run a command at a terminal; return the lines that it leaves there."""
    output, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 60, columns, 0, 0))
    screen = pyte.Screen(columns, 200)
    stream = pyte.ByteStream(screen)
    ends = {"stdin": terminal, "stdout": terminal, "stderr": terminal}
    with subprocess.Popen(command, env=environment(), **ends) as process:
        os.close(terminal)
        with contextlib.suppress(OSError):  # Linux raises once the terminal has no process left
            while data := os.read(output, 1 << 16):
                stream.feed(data)
        os.close(output)
    assert 0 == process.returncode, screen.display
    return [line.rstrip() for line in screen.display]


def in_a_file(command, path, **changes):
    """Run a command whose output is a file, with changes of its environment; return its lines."""
    with path.open("w") as file:
        subprocess.run(command, env=environment(**changes), stdout=file, stderr=file, timeout=300, check=True)
    return path.read_text().split("\n")


def require_only(lines, allowed):
    """Require each allowed line, and nothing else. A terminal breaks long lines, so spaces do not count."""
    text = re.sub(r"\s", "", "\n".join(lines[lines.index(START) + 1 :]))
    patterns = [re.sub(r" ", "", pattern) for pattern in allowed]

    assert re.fullmatch(f"(?:{'|'.join(patterns)})*", text), "\n".join(lines)
    assert [] == [pattern for pattern in patterns if not re.search(pattern, text)]


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("columns", "session"), [(80, ""), (120, SESSION), (None, "")], ids=["narrow", "own session", "file"]
)
def test_a_script_prints_only_what_is_documented(tmp_path, columns, session):
    """A fit leaves its summary, a line per epoch, and the lines of the program itself; no line is torn."""
    script = tmp_path / "script.py"
    script.write_text(f"{IMPORTS}{session}print({START!r}, flush=True)\n{FIT}")
    command = [sys.executable, str(script)]
    lines = at_a_terminal(command, columns) if columns else in_a_file(command, tmp_path / "output")

    require_only(lines, [*OWN, *OTHERS])


@pytest.mark.whole
@pytest.mark.backend("tensorflow")
@pytest.mark.parametrize(("level", "shown"), [("0", True), ("3", False)])
def test_lines_of_tensorflow_are_shown_to_those_who_ask(tmp_path, level, shown):
    """Lines of TensorFlow in workers reach the terminal if TF_CPP_MIN_LOG_LEVEL asks for them."""
    script = tmp_path / "script.py"
    script.write_text(f"{IMPORTS}print({START!r}, flush=True)\n{FIT}")
    lines = in_a_file([sys.executable, str(script)], tmp_path / "output", TF_CPP_MIN_LOG_LEVEL=level)

    assert shown == ("oneDNN" in "\n".join(lines[lines.index(START) :]))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_a_notebook_keeps_one_small_table(tmp_path, monkeypatch):
    """A fit in a notebook is one output, a table; its History and its SparkModel are tables too."""
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    for name in UNSET:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SPARK_LOCAL_IP", "127.0.0.1")
    quiet = FIT.replace(", callbacks=[Noisy()]", "")
    cells = [IMPORTS, quiet, "history", "spark_model", "history.training"]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [cell.outputs for cell in notebook.cells]

    assert [1] * 4 == list(map(len, outputs[1:])), outputs[1:]
    (fit,), *others = outputs[1:]
    require_only([START, *fit.data["text/plain"].split("\n")], OWN)
    assert 2 == fit.data["text/html"].partition("<tbody>")[2].count("<tr>")
    assert "<progress" not in fit.data["text/html"]
    assert 4_000 > len(fit.data["text/html"])
    assert all("<table" in output.data["text/html"] for (output,) in others)
