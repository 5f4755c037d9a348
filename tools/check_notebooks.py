"""Check the outputs of notebooks: complete, small, and without anything of the machine that made them.

The site shows the outputs that are in the repository, so a warning or an address in them is published.

    python tools/check_notebooks.py notebooks build/notebooks
"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SIZE = 250_000  # bytes of a notebook with its outputs
UNWANTED = {
    "an absolute path": re.compile(r"(?<![\w<:/.])/[A-Za-z][\w.-]*/[\w.-]+|\b[A-Z]:\\\w"),
    "an address": re.compile(r"\b\d{1,3}(\.\d{1,3}){3}\b|\blocalhost\b|[?&]key="),
    "a warning": re.compile(r"\bWARN(ING)?\b|\w+Warning\b"),
    "a traceback": re.compile(r"Traceback \(most recent call last\)"),
}


def problems(path: Path) -> Iterator[str]:
    """Yield each problem of a notebook, in words."""
    notebook = json.loads(path.read_text())
    if (size := path.stat().st_size) > SIZE:
        yield f"{path}: {size} bytes; a notebook has at most {SIZE}"
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    counts = [cell["execution_count"] for cell in cells]
    if counts != list(range(1, len(cells) + 1)):
        yield f"{path}: not executed from top to bottom in a new kernel, but in the order {counts}"
    if "widgets" in notebook["metadata"]:
        yield f"{path}: the state of widgets"
    for cell in cells:
        for output in cell["outputs"]:
            yield from (f"{path}: cell {cell['id']}: {problem}" for problem in _unclean(output))


def _unclean(output: dict[str, Any]) -> Iterator[str]:
    if output["output_type"] == "error":
        yield f"the error {output['ename']}"
    if output.get("name") == "stderr":
        yield "output on stderr"
    data = {"text/plain": output.get("text", ""), **output.get("data", {})}
    for kind, value in data.items():
        if "widget" in kind:
            yield "a widget"
        if kind.startswith("text/"):
            text = "".join(value)
            found = {name: pattern.search(text) for name, pattern in UNWANTED.items()}
            yield from (f"{name}: {match[0]}" for name, match in found.items() if match)


def main(folders: list[str]) -> int:
    """Print the problems of all notebooks in folders, and return their number."""
    notebooks = [path for folder in folders for path in sorted(Path(folder).glob("*.ipynb"))]
    found = [problem for path in notebooks for problem in problems(path)]
    print("\n".join(found) or f"The outputs of {len(notebooks)} notebooks are clean.")
    return len(found)


if __name__ == "__main__":
    sys.exit(bool(main(sys.argv[1:])))
