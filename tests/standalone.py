"""A standalone master and its workers, as processes."""

import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

TWO = {"127.0.0.11": (), "127.0.0.12": ()}


def eventually(condition, seconds=30):
    """Return the first true value of a condition, or its last value when the time is up."""
    deadline = time.monotonic() + seconds
    while not (value := condition()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return value


class Standalone:
    """A standalone master and its workers, by default on hosts 127.0.0.11 and 127.0.0.12.

    Args:
        folder: the folder for their output.
        host: the master's address.
        workers: the workers' addresses, each with the prefix of its command.
        cores: the cores of each worker.
    """

    def __init__(self, folder, host="127.0.0.1", workers=TWO, *, cores=1):
        import pyspark

        self.folder, self.home = folder, Path(pyspark.__file__).parent
        self.host, self.workers, self.cores, self.processes = host, workers, str(cores), []
        with socket.create_server((host, 0)) as probe:
            self.url = f"spark://{host}:{probe.getsockname()[1]}"

    def __enter__(self):
        port = self.url.rpartition(":")[2]
        self._start("master", "Master", (), "--host", self.host, "--port", port)
        for host, before in self.workers.items():
            resources = "--cores", self.cores, "--memory", "1g"
            self._start(host, "Worker", before, "--host", host, *resources, self.url)
        log = self.folder / "master.log"
        if not eventually(lambda: log.read_text().count("Registering worker") == len(self.workers), 180):
            self.__exit__()
            pytest.fail(f"The standalone workers did not register: {log.read_text()}")
        return self

    def _start(self, name, role, before, *options):
        environment = dict(
            os.environ,
            SPARK_HOME=str(self.home),
            SPARK_LOCAL_DIRS=str(self.folder / "local"),
            SPARK_WORKER_DIR=str(self.folder / "work"),
            SPARK_LOCAL_IP=options[1],
        )
        spark_class = [self.home / "bin" / "spark-class", f"org.apache.spark.deploy.{role.lower()}.{role}"]
        command = [*before, *spark_class, "--webui-port", "0", *options]
        with (self.folder / f"{name}.log").open("w") as log:
            self.processes.append(
                subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
            )

    def __exit__(self, *exception):
        for process in reversed(self.processes):
            process.terminate()
        for process in self.processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
