"""Names and links in the documentation lead somewhere."""

import configparser
import importlib.util
import re
import subprocess
from pathlib import Path

import pages
import pytest

import sparkdl

ROOT = Path(__file__).parents[2]
NAME = r"(?<![\w./-])sparkdl\.([A-Za-z_]\w*)"
LOGGERS = {"workers"}  # without a module of that name
LINK = re.compile(r"(?<!`)\]\(([^)\s]+)\)")
NOT_RUN = 7  # blocks that need another library
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "benchmarks" / "README.md"]


def test_the_docs_name_only_what_sparkdl_has():
    """Every `sparkdl.NAME` in the documentation is a public name, a module or a logger."""
    text = "\n".join(page.read_text() for page in PAGES)
    names = {name for quoted in re.findall(r"`([^`\n]+)`", text) for name in re.findall(NAME, quoted)}

    missing = {name for name in names - {*sparkdl.__all__, *LOGGERS} if not _is_module(name)}
    assert names
    assert set() == missing


def _is_module(name: str) -> bool:
    return importlib.util.find_spec(f"sparkdl.{name}") is not None


def test_each_output_follows_its_block():
    """Each block of output on a page is compared with the output of the block above it."""
    for name in pages.names():
        shown = (ROOT / name).read_text().count("\n```output\n")
        compared = sum(block["output"] is not None for block in pages.blocks(name))

        assert (name, shown) == (name, compared)


def test_links_resolve():
    """Every relative link of a page leads to a file of the repository, and to a heading in it."""
    links = [(page, link) for page in PAGES for link in LINK.findall(_prose(page))]
    local = [(page, link) for page, link in links if not link.startswith(("http:", "https:"))]

    broken = [f"{page.relative_to(ROOT)}: {link}" for page, link in local if not _resolves(page, link)]
    assert len(local) > 100
    assert [] == broken


def test_docstrings_and_errors_name_pages_that_exist():
    """Every page of the documentation that the code and its tests name exists."""
    files = [file for folder in ("sparkdl", "tests", "examples") for file in (ROOT / folder).rglob("*.py")]
    found = {page for file in files for page in re.findall(r"docs/[\w/-]+\.md", file.read_text())}

    assert found
    assert [] == [page for page in found if not (ROOT / page).exists()]


def test_few_blocks_of_code_are_not_run():
    """Every Python block of a page runs, except the few that need another library."""
    left_out = [block for name in pages.names() for block in pages.blocks(name) if block["skip"]]

    assert NOT_RUN == len(left_out)


def test_every_command_parses():
    """Bash parses each of its blocks on a page."""
    blocks = _blocks("bash|sh")
    wrong = [
        (name, done.stderr)
        for name, code in blocks
        if (done := subprocess.run(["bash", "-n"], input=code, capture_output=True, text=True)).returncode
    ]

    assert len(blocks) > 10
    assert [] == wrong


def test_every_block_of_yaml_loads():
    """Each block of YAML on a page is one document with values."""
    yaml = pytest.importorskip("yaml")
    blocks = _blocks("yaml")

    assert blocks
    assert all(yaml.safe_load(code) for _, code in blocks)


def test_every_extra_has_a_row():
    """The page on installing has a row for each extra that the distribution has, and for no other."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    page = (ROOT / "docs" / "how-to" / "install.md").read_text()
    tables = page.partition("## All extras")[2]
    rows = re.findall(r"^\| (`.+?) \|", tables, re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`([\w-]+)`", row)}

    assert {*setup["options.extras_require"]} == named


def _blocks(languages: str) -> list[tuple[str, str]]:
    """Return the page and the code of each block in some languages, separated by "|"."""
    block = re.compile(rf"^```(?:{languages})\n(.*?)^```$", re.DOTALL | re.MULTILINE)
    return [(page.name, code) for page in PAGES for code in block.findall(page.read_text())]


def _prose(page: Path) -> str:
    """Return the text of a page without its blocks of code."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def _resolves(page: Path, link: str) -> bool:
    path, _, anchor = link.partition("#")
    target = page.parent / path if path else page
    return target.exists() and (not anchor or anchor in _anchors(target))


def _anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub and MyST give the headings of a page."""
    titles = re.findall(r"^#+ (.+)$", _prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
