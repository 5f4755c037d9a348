"""Shared parts of the benchmarks: separate processes, interleaved rounds, medians, Markdown.

A benchmark is a list of ``Spec``. ``contestants.py`` runs each one in its own process, so that no contestant
inherits another's warm caches, threads or leaks, and prints one JSON line. A ``Journal`` keeps those lines in
a file: a long comparison may be stopped and resumed, and its tables are made from the file. Rounds are
interleaved, each starting one contestant later than the one before, so that a slow spell of the machine
affects all contestants. Where a few per cent matter, contestants live side by side and take turns.

This file uses only the standard library: it is also imported in Elephas's environment.
"""

import contextlib
import json
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent
CONTESTANTS = HERE / "contestants.py"

ELEPHAS_REQUIREMENTS = (
    "elephas==7.3.0",
    "tensorflow-cpu==2.19.1",
    "keras==3.15.1",
    "pyspark==4.0.0",
    "numpy==1.26.4",
    "pandas<2.3",
)

# The 0.975 quantile of Student's t, by degrees of freedom from 1 on.
T_QUANTILE = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


@dataclass(frozen=True)
class Spec:
    """One contestant under one setting, with everything that its process needs to know."""

    name: str  # plain, ceiling, elephas, sparkdl, fed, reference or moving: a function of contestants.py
    mode: str = ""
    frequency: str | int = ""
    merge: str | None = None  # the rule; None is the contestant's own default
    optimizer: str = "sgd"
    rate: float = 1.0  # the factor of its learning rate
    model: str = "mlp"  # or cnn, with BatchNormalization, or convnet
    backend: str = "tensorflow"  # Keras's
    workers: int = 2
    batch_size: int = 64
    epochs: int = 3
    rows: int = 0  # the first rows of the training set; 0 is all of them
    share: tuple[int, int] = (0, 1)  # (k, K): train on every K-th of those rows, from the k-th
    seed: int = 0
    shuffled: bool = False  # give the rows in an order drawn by the seed, not the file's
    by_label: bool = False  # give them sorted by their label
    data: str = ""  # a folder of IDX files, or "generated"; empty asks keras.datasets
    cores: int = 2  # the number of cores that the whole contestant may use
    pin: int = -1  # the core for computation, with one thread; the rest runs on the other cores
    warm_epochs: int = 0  # epochs of a measure without worker start and compilation
    turns: int = 1  # the number of such measures
    gated: bool = False  # say "ready" and wait for a line on stdin before each measured fit

    @property
    def title(self) -> str:
        """The contestant's name in tables."""
        setting = f" {self.mode}/{self.frequency}" if self.mode else ""
        rule, order = f" ({self.merge})" * bool(self.merge), ", sorted by label" * self.by_label
        rate = f", {self.rate:.2f} times the rate" * (self.rate != 1)
        return f"{self.name}{setting}{rule}{rate}{order}"


# --- running ------------------------------------------------------------------------------------


class Contestant:
    """A contestant in its own process, whose answer is the JSON object that it prints.

    Args:
        spec: the contestant.
        python: the Python that runs it.
        timeout: seconds that it may take, or from one gate to the next.
    """

    def __init__(self, spec: Spec, python: str = sys.executable, timeout: float = 1200):
        self.timeout, self.answer, self.hung = timeout, {}, False
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed on exit
        self.process = subprocess.Popen(
            [python, str(CONTESTANTS), json.dumps(asdict(spec))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            env=environment(spec, python),
            text=True,
            start_new_session=True,
        )

    def __enter__(self) -> "Contestant":
        return self

    def __exit__(self, *exception: object) -> None:
        self._kill()
        for file in (self.process.stdout, self.process.stdin, self.errors):
            with contextlib.suppress(BrokenPipeError):
                file.close()

    def ready(self) -> bool:
        """Wait until it stands at a gate; return False if it answered, failed, or hung and was killed."""
        with self._watched():
            for line in self.process.stdout:
                if line.startswith("ready"):
                    return True
                if line.startswith("{"):
                    self.answer = json.loads(line)
                    break  # child processes may hold the pipe open
        return False

    def go(self) -> None:
        """Open the gate, if the contestant still waits there."""
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write("go\n")
            self.process.stdin.flush()

    def end(self) -> dict:
        """Return its answer, or one with an ``error``; kill its remaining child processes."""
        while not self.answer and self.ready():
            self.go()
        with self._watched():
            code = self.process.wait()
        self._kill()
        if code == 0 and self.answer:
            return self.answer
        self.errors.seek(0)
        why = f"not done within {self.timeout:.0f} s" if self.hung else f"exit status {code}"
        return {"error": f"{why}: {self.errors.read()[-2000:].strip()}"}

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        alarm = threading.Timer(self.timeout, self._give_up)
        alarm.start()
        try:
            yield
        finally:
            alarm.cancel()

    def _give_up(self) -> None:
        self.hung = True
        self._kill()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def run(spec: Spec, *, python: str = sys.executable, timeout: float = 1200) -> dict:
    """Run a contestant and return its answer, or an ``error`` if it fails or hangs."""
    with Contestant(spec, python, timeout) as contestant:
        return contestant.end()


def in_turns(specs: list[Spec], *, python: str = sys.executable, timeout: float = 1200) -> list[dict]:
    """Return the answers of contestants that live side by side, of which one trains at a time.

    After its first fit each waits for the others; then they take turns. So the measures of one turn lie
    seconds apart, and a slow spell of the machine affects all contestants. ``stolen`` in an answer is the
    share of the processors' time that the host of a virtual machine took in each of its turns.
    """
    with contextlib.ExitStack() as stack:
        running, losses = {}, {spec: [] for spec in specs}
        for spec in specs:
            gated = Contestant(replace(spec, gated=True), python, timeout)
            running[spec] = stack.enter_context(gated)
            if gated.ready():
                gated.go()
                gated.ready()
        for turn, spec in interleave(specs, max(spec.turns for spec in specs)):
            before = ticks()
            running[spec].go()
            running[spec].ready()
            stolen, passed = (now - then for now, then in zip(ticks(), before, strict=True))
            losses[spec].append(stolen / max(1, passed))
            print(f"# turn {turn}: {spec.title}, {losses[spec][-1]:.0%} stolen", flush=True)
        return [running[spec].end() | {"stolen": losses[spec]} for spec in specs]


def ticks() -> tuple[int, int]:
    """Return this machine's clock ticks taken by the host, and the total."""
    counts = [int(count) for count in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return counts[7], sum(counts)


def environment(spec: Spec, python: str) -> dict:
    environment = {
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "CUDA_VISIBLE_DEVICES": "-1",
        "KERAS_BACKEND": spec.backend,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYSPARK_PYTHON": python,
        "PYSPARK_DRIVER_PYTHON": python,
    }
    if spec.name in ("sparkdl", "fed"):
        environment["PYTHONPATH"] = str(REPOSITORY)
    if spec.pin >= 0:
        threads = ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "OMP_NUM_THREADS")
        environment.update(dict.fromkeys(threads, "1"))
    return {**os.environ, **environment}


class Journal:
    """The answers so far, one JSON line each; a stored case is not run again.

    The folder of the data is not stored: a journal can be resumed on another machine.

    Args:
        path: the file; None keeps nothing.
        pythons: the Python of a contestant, by its name or by its backend; this one if there is none.
    """

    def __init__(self, path: str | None, pythons: dict[str, str] | None = None):
        self.path = Path(path) if path else None
        self.pythons = pythons or {}
        self.answers: dict[str, dict] = {}
        if self.path and self.path.exists():
            for line in self.path.read_text().splitlines():
                record = json.loads(line)
                spec = Spec(**record["spec"])
                self.answers[_key(spec, record["round"])] = record["answer"]

    def run(self, spec: Spec, round_: int, timeout: float = 1200) -> dict:
        """Return the contestant's answer of this round, from the file or by running it."""
        key = _key(spec, round_)
        if key not in self.answers:
            load = os.getloadavg()[0]
            python = self.pythons.get(spec.name) or self.pythons.get(spec.backend, sys.executable)
            answer = run(spec, python=python, timeout=timeout)
            answer["load_before"] = round(load, 2)
            self.answers[key] = answer
            self._keep({"spec": asdict(replace(spec, data="")), "round": round_, "answer": answer})
            print(f"# round {round_} {spec.optimizer} {spec.title}: {brief(answer)}", flush=True)
        return self.answers[key]

    def _keep(self, record: dict) -> None:
        if self.path and "error" not in record["answer"]:
            with self.path.open("a") as lines:
                lines.write(json.dumps(record) + "\n")


def _key(spec: Spec, round_: int) -> str:
    return json.dumps([asdict(replace(spec, data="")), round_], sort_keys=True)


def brief(answer: dict) -> str:
    """Return an answer as one line of progress output."""
    if "error" in answer:
        return f"FAILED, {answer['error']}"
    shown = {k: v for k, v in answer.items() if isinstance(v, int | float)}
    return ", ".join(f"{k} {v:,.4g}" for k, v in shown.items())


def interleave(specs: list[Spec], rounds: int) -> Iterator[tuple[int, Spec]]:
    """Yield (round, spec): every contestant once a round, each round starting one later."""
    for round_ in range(rounds):
        start = round_ % len(specs)
        for spec in specs[start:] + specs[:start]:
            yield round_, spec


# --- Elephas's environment ----------------------------------------------------------------------


def elephas_python(venv: str, base: str = sys.executable) -> str:
    """Return the Python of Elephas's environment, which is made if it does not exist.

    Elephas 7.3.0 needs a Python before 3.13, NumPy 1 and Spark 4.0 or older.
    """
    python = Path(venv).resolve() / "bin" / "python"
    if not python.exists():
        subprocess.run([base, "-m", "venv", venv], check=True)
    found = subprocess.run([python, "-c", "import elephas"], capture_output=True)
    if found.returncode:
        pip = [str(python), "-m", "pip", "install", "--quiet", *ELEPHAS_REQUIREMENTS]
        subprocess.run(pip, check=True)
    return str(python)


# --- arithmetic and words -----------------------------------------------------------------------


def paired_interval(differences: list[float]) -> tuple[float, float]:
    """Return the mean of paired differences and the half width of its 95 % interval."""
    degrees = len(differences) - 1
    mean = statistics.fmean(differences)
    if degrees < 1:
        return mean, float("nan")
    beyond = 1.96 + 2.372 / degrees + 2.823 / degrees**2  # Cornish and Fisher's expansion
    quantile = T_QUANTILE[degrees - 1] if degrees <= len(T_QUANTILE) else beyond
    return mean, quantile * statistics.stdev(differences) / len(differences) ** 0.5


def spread(values: Iterable[float], form: str = ",.0f") -> str:
    """Return "median [min..max]", or a dash if there are no values."""
    values = list(values)
    if not values:
        return "–"
    return f"{statistics.median(values):{form}} [{min(values):{form}}..{max(values):{form}}]"


def ratios(numerators: dict[int, float], denominators: dict[int, float]) -> list[float]:
    """Return the ratios of measures of the same round."""
    return [a / denominators[round_] for round_, a in numerators.items() if round_ in denominators]


def counters(answer: dict) -> list[str]:
    """Return the endpoint's counters of sparkdl's first fit: exchanges, bytes in, bytes out."""
    training = answer.get("training", [{}])[0]
    keys = ("exchanges", "bytes_received", "bytes_sent")
    return [f"{training[key]:,}" if key in training else "–" for key in keys]


def table(header: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def verdict(bar: str, met: bool) -> str:
    """Return a bar, and True if it is met."""
    return f"{bar} {'met' if met else '**missed**'}"


def machine(pythons: dict[str, str]) -> str:
    """Return one paragraph about this machine and the versions each contestant ran with."""
    about = [
        f"{len(os.sched_getaffinity(0))} cores ({_processor()})",
        f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB",
        f"{platform.system()} {platform.release()}",
    ]
    lines = ["Machine: " + ", ".join(about) + "."]
    lines += [f"{name}: {_versions(python)}." for name, python in pythons.items()]
    return " ".join(lines)


def _processor() -> str:
    found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    return found.group(1) if found else platform.machine()


def _versions(python: str) -> str:
    code = """
import importlib.metadata as m, platform
found = ["Python " + platform.python_version()]
for name in ("keras", "tensorflow", "tensorflow-cpu", "jax", "torch", "numpy", "pyspark", "elephas"):
    try:
        found.append(name + " " + m.version(name))
    except m.PackageNotFoundError:
        pass
print(", ".join(found))
"""
    return subprocess.check_output([python, "-c", code], text=True).strip()


def write_section(path: str, title: str, body: str) -> None:
    """Write a section into a Markdown file, replacing the one with the same title."""
    file = Path(path)
    text = file.read_text() if file.exists() else "# Results\n\nWritten by the scripts here.\n"
    section = f"## {title}\n\n{body.strip()}\n"
    pattern = re.compile(rf"^## {re.escape(title)}\n.*?(?=^## |\Z)", re.MULTILINE | re.DOTALL)
    if pattern.search(text):
        text = pattern.sub(lambda _: section + "\n", text)
    else:
        text = f"{text.rstrip()}\n\n{section}"
    file.write_text(text.rstrip() + "\n")


def report(title: str, body: str, results: str | None) -> None:
    """Print a section, and write it to the results file if there is one."""
    print(f"\n## {title}\n\n{body}")
    if results:
        write_section(results, title, body)


# --- the options that every benchmark has -------------------------------------------------------


def add_common_options(parser, *, epochs: int, rounds: int) -> None:
    """Add the common options of the benchmarks to an argument parser."""
    parser.add_argument("--data", default="", help="folder of MNIST's four IDX .gz files")
    parser.add_argument("--rows", type=int, default=0, help="train on the first rows only")
    parser.add_argument("--epochs", type=int, default=epochs)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--backend", default="tensorflow", help="Keras's backend")
    parser.add_argument(
        "--only", nargs="*", default=[], help="run only contestants whose title has one of these words"
    )
    parser.add_argument("--results", help="Markdown file to write the section into")


def add_warm_option(parser) -> None:
    """Add the option of benchmarks that measure warm rates to an argument parser."""
    parser.add_argument(
        "--warm-epochs", type=int, default=6, help="epochs of the warm measurement; few epochs give noise"
    )


def add_elephas_options(parser) -> None:
    """Add the options of the long benchmarks with Elephas to an argument parser."""
    parser.add_argument(
        "--journal", help="file that keeps each answer; a run continues with the missing ones"
    )
    parser.add_argument("--elephas-venv", help="Elephas's environment; created there if it does not exist")
    parser.add_argument(
        "--elephas-python", default=sys.executable, help="the Python that creates it, older than 3.13"
    )


def pythons(options, specs: list[Spec]) -> dict[str, str]:
    """Return the Python of each contestant; Elephas's environment is made if it takes part."""
    found = {"sparkdl": sys.executable}
    if any(spec.name == "elephas" for spec in specs):
        if not options.elephas_venv:
            raise SystemExit(
                "This comparison includes Elephas. Pass its environment with --elephas-venv PATH."
            )
        found["elephas"] = elephas_python(options.elephas_venv, options.elephas_python)
    return found


def chosen(specs: list[Spec], options) -> list[Spec]:
    """Return the contestants selected by ``--only``, with the common options filled in."""
    return [
        replace(spec, data=options.data, rows=options.rows, epochs=options.epochs, backend=options.backend)
        for spec in specs
        if not options.only or any(word in spec.title for word in options.only)
    ]
