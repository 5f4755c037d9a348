"""Check the size of classes, functions, files and folders, the arguments of calls, docstrings, private names.

Ruff counts statements and parameters, but neither lines nor the arguments of a call. A docstring's first
line names a thing or gives an order, and has no clause of "what" or "whether". Docstrings and comments use
the words of the field, and each test has a docstring. Private attributes of other packages are named in a few
files only, so that a new version of such a package is checked against these.

    python tools/check_style.py sparkdl --docstrings tests tools
"""

import argparse
import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

CLASS, FUNCTION, FILE, POSITIONAL, MODULES = 400, 60, 500, 5, 20
FACADE = "api/spark_model.py"  # its docstrings are the reference of the public API, and are not counted
HEADLESS = re.compile(r"(\w+ )?(what|whether|who|how|where|which|those)\b", re.IGNORECASE)
CLAUSE = re.compile(r"\b(what|whether)\b", re.IGNORECASE)
WORDS = {  # words that docstrings and comments do not use, and the field's words for them
    "gang": "worker group",
    "strangers": "pending connections",
    "spool": "spill",
    "absent": "lost",
    "mute": "silent",
    "said": "reported",
    "told": "informed",
}
# The files that may use private attributes of Keras, Spark, MLflow and cheroot.
INTERNALS = (
    "modeling/keras_internals.py",
    "spark/spark_internals.py",
    "api/mlflow_internals.py",
    "server/http_server.py",
    "transport/connections.py",
)
PRIVATE = re.compile(r"_[a-zA-Z]\w*")
OF_TUPLES = "_replace", "_fields", "_asdict", "_make"  # public methods of named tuples
EXEMPT = "pack", "info", "warning", "error"  # struct's and logging's calls name their arguments by a format


def lines_of(node: ast.ClassDef | ast.FunctionDef, *, docstrings: bool) -> int:
    """Return the number of lines of a class or function without its docstring, or without all in it."""
    within = [node] if docstrings else ast.walk(node)
    return (node.end_lineno or 0) - node.lineno + 1 - sum(map(_docstring, within))


def _docstring(node: ast.AST) -> int:
    if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return 0
    if ast.get_docstring(node) is None:
        return 0
    return (node.body[0].end_lineno or 0) - node.body[0].lineno + 1


def problems(path: Path) -> Iterator[str]:
    """Yield each thing in a file that is over its limit, in words."""
    text = path.read_text()
    tree = ast.parse(text)
    facade = path.as_posix().endswith(FACADE)
    lines = text.count("\n") - (sum(map(_docstring, ast.walk(tree))) if facade else 0)
    if lines > FILE:
        yield f"{path}: {lines} lines; a file has at most {FILE}"
    for node in ast.walk(tree):
        where = f"{path}:{getattr(node, 'lineno', 1)}"
        if isinstance(node, ast.ClassDef) and (lines := lines_of(node, docstrings=not facade)) > CLASS:
            yield f"{where}: class {node.name} has {lines} lines; a class has at most {CLASS}"
        if isinstance(node, ast.FunctionDef) and (lines := lines_of(node, docstrings=True)) > FUNCTION:
            yield f"{where}: {node.name} has {lines} lines; a function has at most {FUNCTION}"
        if isinstance(node, ast.Call) and len(node.args) > POSITIONAL:
            called = ast.unparse(node.func)
            if called.rpartition(".")[2] not in EXEMPT:
                yield f"{where}: {called} is called with {len(node.args)} positional arguments; name them"


def crowded(folder: Path) -> Iterator[str]:
    """Yield each folder in a package, and the package itself, that has too many modules, in words."""
    for inner in [folder, *(path for path in folder.rglob("*") if path.is_dir())]:
        modules = [path for path in inner.glob("*.py") if path.name != "__init__.py"]
        if len(modules) > MODULES:
            yield f"{inner}: {len(modules)} modules; a folder has at most {MODULES}"


def prose(path: Path) -> Iterator[str]:
    """Yield each fault of the docstrings and comments of a file, in words."""
    text = path.read_text()
    tree = ast.parse(text)
    for line, sentences in [*docstrings(tree), *comments(text)]:
        for word, better in WORDS.items():
            if re.search(rf"\b{word}\b", sentences, re.IGNORECASE):
                yield f'{path}:{line}: write "{better}" or the like instead of "{word}"'
    for line, sentences in docstrings(tree):
        first = sentences.splitlines()[0]
        if HEADLESS.match(first) or CLAUSE.search(first):
            yield f"{path}:{line}: name the thing, or give an order: {first}"
    for node in tree.body if path.name.startswith("test_") else ():
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and not _docstring(node):
            yield f"{path}:{node.lineno}: {node.name} has no docstring; write a sentence"


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each docstring."""
    for node in ast.walk(tree):
        if _docstring(node):
            yield getattr(node, "lineno", 1), ast.get_docstring(node)


def comments(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each comment."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def private_uses(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of each private attribute of an object other than ``self`` and ``cls``."""
    for node in ast.walk(tree):
        name: object = None
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) not in ("self", "cls", "super()"):
            name = node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr"):
            name = node.args[1].value if isinstance(node.args[1], ast.Constant) else None
        if isinstance(name, str) and PRIVATE.fullmatch(name) and name not in OF_TUPLES:
            yield node.lineno, name


def private_definitions(tree: ast.AST) -> Iterator[str]:
    """Yield the private names that a file gives to attributes, methods, functions and variables."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and ast.unparse(node.value) in ("self", "cls")
        ):
            yield node.attr


def foreign(paths: list[Path]) -> Iterator[str]:
    """Yield each use of a private part of another package outside INTERNALS, in words."""
    trees = {path: ast.parse(path.read_text()) for path in paths}
    inside = {path: tree for path, tree in trees.items() if path.as_posix().endswith(INTERNALS)}
    outside = {path: tree for path, tree in trees.items() if path not in inside}
    own = {name for tree in outside.values() for name in private_definitions(tree)}
    own -= {name for tree in inside.values() for _, name in private_uses(tree)}
    for path, tree in outside.items():
        for line, name in private_uses(tree):
            if name not in own:
                yield f"{path}:{line}: {name} is private to another package; use it in *_internals.py only"
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom | ast.Import) and "keras.src" in ast.unparse(node):
                yield f"{path}:{node.lineno}: keras.src is private; import it in keras_internals.py only"


def main() -> int:
    """Print each problem; return 1 if there are any."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="*", help="folders of the package")
    parser.add_argument("--docstrings", nargs="*", default=[], help="folders of which only prose counts")
    options = parser.parse_args()
    paths = files_in(options.folders)
    others = files_in(options.docstrings)
    found = [problem for path in paths for problem in problems(path)] + list(foreign(paths))
    found += [problem for folder in options.folders for problem in crowded(Path(folder))]
    found += [problem for path in [*paths, *others] for problem in prose(path)]
    print("\n".join(found) or f"{len(paths) + len(others)} files keep the rules.")
    return int(bool(found))


def files_in(folders: list[str]) -> list[Path]:
    """Return the Python files in some folders."""
    return sorted(path for folder in folders for path in Path(folder).rglob("*.py"))


if __name__ == "__main__":
    sys.exit(main())
