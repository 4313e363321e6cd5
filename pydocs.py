"""
The documentation inside every Python, as documents: a corpus without a download.
"""

import ast
import importlib
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

# tests are no documentation; the others are not CPython's own, or are absent from some builds
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "_bundled"}


def pydocs_documents() -> Iterator[str]:
    """The language reference's topics, then for each file of the standard library its docstrings."""
    try:
        topics = importlib.import_module("pydoc_data.topics").topics  # a module of data: nothing else runs
    except ImportError as error:
        raise ValueError(f"{sys.executable} ships without pydoc_data.topics: use another Python") from error
    for name in sorted(topics):
        yield topics[name]
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).parts):
        if SKIPPED_FOLDERS.isdisjoint(path.relative_to(root).parts) and (texts := docstrings(path)):
            yield "\n\n".join(texts)


def docstrings(path: Path) -> list[str]:
    """Docstrings of the file's module, classes and functions, in the order of the lines. Nothing is imported."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # old escapes such as "\d" warn when parsed
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):  # a file that is broken on purpose
            return []
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(tree) if isinstance(node, kinds)]
    nodes.sort(key=lambda node: getattr(node, "lineno", 0))
    return [text for node in nodes if (text := ast.get_docstring(node))]
