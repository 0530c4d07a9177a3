"""Every private interface of torch that the library uses is in the table of docs/install.md."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "steadygrad"
PAGE = ROOT / "docs" / "install.md"
# Named tuples have these, and Python's own modules the rest.
PYTHON = {
    "_asdict", "_fields", "_make", "_replace", "_exit", "_getframe", "_max_workers", "_processes",
}  # fmt: skip


def private_names(trees):
    """Names with a leading underscore that syntax trees use and do not define."""
    methods, attributes, of_others, of_self = set(), set(), set(), set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                methods.add(name)
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                attributes.add(name)
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name):
                of_self.add(name)
            case ast.Attribute(attr=name):
                of_others.add(name)
            case ast.Call(
                func=ast.Name(id="getattr" | "hasattr"), args=[_, ast.Constant(value=name), *_]
            ):
                of_others.add(name)
            case ast.ImportFrom(module=str(module), names=names):
                if not module.startswith("steadygrad"):
                    of_others.update(module.split("."), (alias.name for alias in names))
            case ast.Import(names=names):
                of_others.update(part for alias in names for part in alias.name.split("."))
    # An attribute of ours may be called as one of torch's: `dist.distributed_c10d._world`.
    found = (of_others - methods) | (of_self - methods - attributes)
    return {name for name in found if re.match("_[^_]", name)} - PYTHON


def tabled(page):
    """Names in the table's column of interfaces; one with a star stands for all that begin so."""
    table = page.partition("## Private interfaces of torch")[2].partition("\n## ")[0]
    cells = [row.split("|")[2] for row in table.splitlines() if row.startswith("|")]
    return {name for cell in cells for name in re.findall(r"\b_\w+\*?", cell)}


def test_the_table_names_every_private_interface():
    # `integrations` follow trainers, at the releases that they were read at.
    paths = [p for p in SOURCE.rglob("*.py") if "integrations" not in p.parts]
    names = private_names([ast.parse(path.read_text()) for path in paths])
    assert len(names) > 20
    known = tabled(PAGE.read_text())
    starts = tuple(name[:-1] for name in known if name.endswith("*"))
    assert sorted(name for name in names - known if not name.startswith(starts)) == []
