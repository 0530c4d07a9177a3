"""Imports of the files beside a task's file, early and late, with no byte code written there."""

import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["importable"]


@contextmanager
def importable(folder: Path) -> Iterator[None]:
    """Makes a folder's modules importable, as ``python file.py`` does, unless the block raises.

    They stay importable after the block. Like the first entry of ``sys.path`` they come before the
    standard library and installed packages.
    """
    finder = NeighbourFinder(str(folder))
    importlib.invalidate_caches()
    sys.meta_path[:] = [other for other in sys.meta_path if other != finder]
    # Built-in and frozen modules stay first.
    before = sys.meta_path.index(PathFinder) if PathFinder in sys.meta_path else 0
    sys.meta_path.insert(before, finder)
    try:
        yield
    except BaseException:
        sys.meta_path.remove(finder)
        raise


class NeighbourFinder(MetaPathFinder):
    """Finds the modules of one folder, and the modules of its packages.

    Args:
        folder: The folder.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.found: set[str] = set()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NeighbourFinder) and other.folder == self.folder

    def __hash__(self) -> int:
        return hash(self.folder)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Finds a module for Python's import system; None: not of this folder."""
        if path is None:
            spec = self._find_top(fullname)
        elif fullname.partition(".")[0] in self.found:
            spec = PathFinder.find_spec(fullname, path)
        else:
            return None
        if spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = UncachedLoader(spec.loader.name, spec.loader.path)
        return spec

    def _find_top(self, name: str) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, [self.folder])
        if spec is not None and spec.loader is None:
            # A folder without __init__.py comes after every real package of its name.
            spec = PathFinder.find_spec(name, [self.folder, *sys.path])
            if spec is not None and spec.loader is not None:
                return None
        if spec is not None:
            self.found.add(name)
        return spec


class UncachedLoader(SourceFileLoader):
    """Loads a source file and writes no byte code."""

    def set_data(self, path: str, data: Any, *, _mode: int = 0o666) -> None:
        """Writes nothing."""
