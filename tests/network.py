"""Hosts in network namespaces of this machine, with links that can be cut, slowed down and made lossy.

Each worker's host has its own link to the driver's. ``ip`` and ``tc`` of iproute2 make them, which requires
root. Packets are lost by a filter of four instructions on incoming packets, because not every kernel has
``netem``: it draws a random number and drops the packet if the number is small.
"""

import contextlib
import ctypes
import json
import os
import shutil
import subprocess
from functools import cache
from pathlib import Path

NEW_NETWORK = 0x40000000  # CLONE_NEWNET
FILES = Path("/run/netns")
RANDOM = 2**32 - 4096 + 56  # SKF_AD_OFF + SKF_AD_RANDOM, where a filter finds a random number
LOSS = f"4,32 0 0 {RANDOM},53 0 1 {{}},6 0 0 0,6 0 0 2"  # load it; not below this? pass (0), else drop (2)
ADDRESS = "198.18.0.1"  # the driver's, of a range reserved for tests of networks


@cache
def missing():
    """Return the reason why this user cannot make networks on this machine; empty if there is none."""
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"there is no {tool} (iproute2)"
    try:
        with Network(1) as network:
            network.slow(0, "100mbit")
    except subprocess.CalledProcessError as error:
        return f"{' '.join(error.cmd)} says {error.stderr.strip()}"
    return ""


class Network:
    """A driver's host and those of some workers, each with a link to the driver.

    In a ``with`` block the thread, and the processes it starts, are on the driver's host.

    Args:
        workers: the number of workers.
    """

    def __init__(self, workers):
        self.driver = f"sparkdl-{os.getpid()}"
        self.workers = [f"{self.driver}-{worker}" for worker in range(workers)]

    def __enter__(self):
        with contextlib.ExitStack() as stack:
            for host in (self.driver, *self.workers):
                call("ip", "netns", "add", host)
                stack.callback(call, "ip", "netns", "delete", host)
                call("ip", "-n", host, "link", "set", "lo", "up")
            call("ip", "-n", self.driver, "address", "add", f"{ADDRESS}/32", "dev", "lo")
            forward = "echo 1 > /proc/sys/net/ipv4/ip_forward"  # workers reach each other through the driver
            call("ip", "netns", "exec", self.driver, "sh", "-c", forward)
            for worker in range(len(self.workers)):
                self._link(worker)
            stack.enter_context(on(self.driver))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception):
        self._stack.close()

    def _link(self, worker):
        host, name = self.workers[worker], f"link{worker}"
        pair = ["type", "veth", "peer", "name", name, "netns", host]
        call("ip", "-n", self.driver, "link", "add", name, *pair)
        for each, address in ((self.driver, self.gateway(worker)), (host, self.address(worker))):
            call("ip", "-n", each, "address", "add", f"{address}/24", "dev", name)
            self.mend(worker, each)

    def gateway(self, worker):
        """Return the driver's address on a worker's link."""
        return f"198.18.{worker + 1}.1"

    def address(self, worker):
        """Return a worker's address."""
        return f"198.18.{worker + 1}.2"

    def command(self, worker, *command):
        """Return a command that runs ``command`` on a worker's host."""
        return ["ip", "netns", "exec", self.workers[worker], *command]

    def cut(self, worker, host):
        """Take a link down on one host; the other host is not notified and its packets are lost."""
        call("ip", "-n", host, "link", "set", f"link{worker}", "down")

    def mend(self, worker, host):
        """Restore a link."""
        call("ip", "-n", host, "link", "set", f"link{worker}", "up")
        if host != self.driver:
            call("ip", "-n", host, "route", "replace", "default", "via", self.gateway(worker))

    def received(self, worker):
        """Return the number of bytes received from a worker's host."""
        file = f"/sys/class/net/link{worker}/statistics/rx_bytes"
        return int(call("ip", "netns", "exec", self.driver, "cat", file))

    def slow(self, worker, rate):
        """Limit the rate of a link, each way."""
        for host in (self.driver, self.workers[worker]):
            limit = ["root", "tbf", "rate", rate, "burst", "5kb", "latency", "50ms"]
            call("tc", "-n", host, "qdisc", "replace", "dev", f"link{worker}", *limit)

    def lose(self, worker, share):
        """Drop a share of a link's packets, each way."""
        program = LOSS.format(int(share * 2**32))
        for host in (self.driver, self.workers[worker]):
            call("tc", "-n", host, "qdisc", "add", "dev", f"link{worker}", "clsact")
            direct = ["ingress", "bpf", "direct-action", "bytecode", program]
            call("tc", "-n", host, "filter", "add", "dev", f"link{worker}", *direct)

    def lost(self, worker):
        """Return the number of packets of a lossy link that did not reach the driver's host."""
        shown = json.loads(call("tc", "-n", self.driver, "-s", "-j", "qdisc", "show", "dev", f"link{worker}"))
        return next(each["drops"] for each in shown if each["kind"] == "clsact")


@contextlib.contextmanager
def on(host):
    """Put this thread on a host during a ``with`` block."""
    with open("/proc/thread-self/ns/net") as home, (FILES / host).open() as there:
        enter(there)
        try:
            yield
        finally:
            enter(home)


def enter(namespace):
    """Enter the network namespace of an open file, with this thread; Python has setns from 3.12 on."""
    if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), NEW_NETWORK):
        raise OSError(ctypes.get_errno(), "setns")


def call(*command):
    """Run a command that must succeed; return its output."""
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
