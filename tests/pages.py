"""Run the Python blocks of pages: each page is one program, from top to bottom.

A comment ``<!-- run first: CODE -->`` defines the names that a page takes for granted. A block under a
comment ``<!-- not run: REASON -->`` is left out. A block ``output`` is what the block above it prints,
without the links to live pages.

    python tests/pages.py README.md docs/tutorials/stream.md
"""

import contextlib
import io
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(
    r"<!-- run first:\n(?P<first>.*?)-->|"
    r"(?P<skip><!-- not run: [^\n]+ -->\n+)?^```python\n(?P<code>.*?)^```$"
    r"(?:\n+```output\n(?P<output>.*?)^```$)?",
    re.DOTALL | re.MULTILINE,
)


def names():
    """Return the pages that have Python blocks, as paths from the root of the repository."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [page.relative_to(ROOT).as_posix() for page in pages if any(blocks(page))]


def blocks(page):
    """Return the matches of a page's blocks, in order."""
    return list(BLOCK.finditer(Path(ROOT, page).read_text()))


def run(page):
    """Run a page's blocks, and require the output that it shows."""
    text, variables = Path(ROOT, page).read_text(), {"__name__": "__main__"}
    for block in blocks(page):
        if block["skip"]:
            continue
        part = "first" if block["first"] else "code"
        line = text[: block.start(part)].count("\n")
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            try:
                exec(compile("\n" * line + block[part], page, "exec"), variables)
            except SystemExit as end:  # the block ends its program
                if end.code:
                    raise ValueError(
                        f"{page}:{line}: exit status {end.code}:\n{printed.getvalue()}"
                    ) from None
        found = re.sub("^Live page: .*\n", "", printed.getvalue(), flags=re.MULTILINE)
        if block["output"] not in (None, found):
            raise ValueError(f"{page}:{line}: expected {block['output']!r}; got {found!r}.")


if __name__ == "__main__":
    for each in sys.argv[1:]:
        sys.stderr.write(f"Running {each}\n")
        run(each)
