"""Names in the documentation must exist in the package."""

import importlib.util
import re
from pathlib import Path

import sparkdl

ROOT = Path(__file__).parents[2]
NAME = r"(?<![\w./-])sparkdl\.([A-Za-z_]\w*)"
LOGGERS = {"workers"}  # without a module of that name


def test_the_docs_name_only_what_sparkdl_has():
    """Every `sparkdl.NAME` in the documentation is a public name, a module or a logger."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    text = "\n".join(page.read_text() for page in pages)
    names = {name for quoted in re.findall(r"`([^`\n]+)`", text) for name in re.findall(NAME, quoted)}

    missing = {name for name in names - {*sparkdl.__all__, *LOGGERS} if not _is_module(name)}
    assert names
    assert set() == missing


def _is_module(name: str) -> bool:
    return importlib.util.find_spec(f"sparkdl.{name}") is not None
