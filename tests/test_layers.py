"""The house has floors: a module imports only from floors below its own.

DESIGN's plan, top floor first. Packages that share a floor are neighbours and do not know of
each other. Imports inside functions count too.
"""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from steadygrad._studies import STUDIES

SOURCE = Path(__file__).parent.parent / "src" / "steadygrad"

FLOORS = [
    {"__init__", "__main__"},
    {"cli"},
    {"integrations"},
    {"trace"},
    {"studies"},
    {"tasks"},
    {"noise", "balance", "scale", "optim", "watch"},
    {"shards"},
    {"distributed"},
    {"averages"},
    {"_nests"},
    {"_names"},
    {"_checks", "_files", "_studies", "numerics"},
]
FLOOR_OF = {room: height for height, rooms in enumerate(reversed(FLOORS)) for room in rooms}


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).with_suffix("").parts[0]


def imported_rooms(path: Path) -> set[str]:
    """Rooms that a file imports, and names of the root as if they were one; not the version."""
    package = ["steadygrad", *path.relative_to(SOURCE).parts[:-1]]
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            found |= {stem} | {f"{stem}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Constant) and re.fullmatch(
            r"steadygrad(\.\w+)+", str(node.value)
        ):
            found.add(node.value)  # what `import_module` is given
    parts = [name.split(".") for name in found if name.startswith("steadygrad.")]
    return {name[1] for name in parts} - {"__version__"}


FILES = sorted(SOURCE.rglob("*.py"))


# Lines of a room with its docstrings, at most: who needs more takes as much away elsewhere. They
# come down as rooms are drawn anew; a study's folder is a room of its own, and so are modules of
# the root that belong together.
CEILINGS = {
    "cli": 794,
    "integrations": 971,
    "studies": 3075,
    "studies/advise": 1554,
    "studies/compare": 1074,
    "studies/inspect": 1081,
    "studies/ab": 946,
    "tasks": 1574,
    "trace": 1767,
    "noise": 2549,
    "balance": 1206,
    "scale": 1351,
    "watch": 1117,
    "optim": 3800,
    "distributed.py, shards.py": 783,
    "optim/loops": 1040,
    "optim/kernels": 760,
}
# A study that needs more than this is given a row of its own.
CEILINGS = {**{f"studies/{name}": 250 for name in STUDIES}, **CEILINGS}


@pytest.mark.parametrize("room", CEILINGS)
def test_a_room_stays_below_its_ceiling(room: str):
    paths = [SOURCE / name for name in room.split(", ")]
    files = [file for path in paths for file in (path.glob("*.py") if path.is_dir() else [path])]
    assert sum(len(file.read_text().splitlines()) for file in files) <= CEILINGS[room]


def test_every_room_has_a_ceiling_a_floor_and_a_place_on_the_map():
    """A new one, but a study's, is put into CEILINGS and FLOORS, and into the plan of the house."""
    folders = {path.parent.relative_to(SOURCE).as_posix() for path in FILES} - {"."}
    assert folders == {room for room in CEILINGS if not room.endswith(".py")}
    assert {room_of(path) for path in FILES} == set(FLOOR_OF)
    text = (SOURCE.parents[1] / "CONTRIBUTING.md").read_text()
    rooms = [
        [name.strip("/").removesuffix(".py") for name in re.findall(r"\w+(?:/|\.py)", line)]
        for line in re.findall(r"^(?:\w+(?:/|\.py) +)+", text, re.M)
    ]
    known = [name for names in rooms for name in names]
    assert sorted(known) == sorted({*FLOOR_OF} - {"__init__", "__main__"})
    heights = [FLOOR_OF[name] for name in known]
    assert heights == sorted(heights, reverse=True)


def test_imports_only_downwards():
    inner = [path for path in FILES if room_of(path) not in {"__init__", "__main__"}]
    imports = [(path, room) for path in inner for room in imported_rooms(path) - {room_of(path)}]
    assert len(imports) > 100
    top = len(FLOORS)
    wrong = [(p, room) for p, room in imports if FLOOR_OF.get(room, top) >= FLOOR_OF[room_of(p)]]
    assert wrong == []


def test_torch_distributed_has_two_users():
    imports = re.compile(r"^.*import.*torch\.distributed|torch\.distributed.*import", re.M)
    users = {room_of(path) for path in FILES if imports.search(path.read_text())}
    assert users == {"distributed", "shards"}


@pytest.mark.parametrize(
    ("extra", "code", "before"),
    [
        ("msgspec", "import steadygrad.studies.folder", "steadygrad._checks.InputError: "),
        ("rich", "import steadygrad; steadygrad.advise()", "steadygrad._checks.InputError: "),
        ("msgspec", "from steadygrad.cli import main; main(['compare', '--help'])", "steadygrad: "),
        ("rich", "from steadygrad.cli import main; main(['report', 'x'])", "steadygrad: "),
    ],
)
def test_a_missing_extra_is_named_with_its_remedy(extra: str, code: str, before: str):
    script = f"import sys; sys.modules['{extra}'] = None; {code}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    line = done.stderr.splitlines()[-1]
    assert line.startswith(before)
    assert f'no {extra}. Remedy: pip install -e ".[cli]" in the clone.' in line


def test_an_extra_is_installed_from_the_clone():
    """No package index has the name: in the program one function writes the command."""
    root, typed = SOURCE.parents[1], re.compile(r"pip install[^\n`]*\bsteadygrad\b")
    pages = [root / "README.md", *(root / "docs").rglob("*.md"), *(root / "examples").rglob("*.py")]
    assert [path for path in [*FILES, *pages] if typed.search(path.read_text())] == []
    writers = [path.name for path in FILES if "pip install -e" in path.read_text()]
    assert writers == ["_checks.py"]


# What reads a run and draws its page.
DRAWING = [
    ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted((SOURCE / "studies").rglob("*.py"))
    if path.stem in {"folder", "page", "schema", "text"}
    or path.stem in {"analysis", "findings", "plan", "search", "words"}
]


def test_what_draws_pages_loads_no_torch():
    script = f"import sys, {', '.join(DRAWING)}; print(*sys.modules)"
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "torch" not in out.stdout.split()
    assert len(DRAWING) > 20
