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

SOURCE = Path(__file__).parent.parent / "src" / "steadygrad"

FLOORS = [
    {"__init__", "__main__"},
    {"cli"},
    {"integrations"},
    {"studies"},
    {"tasks"},
    {"noise", "balance", "scale", "optim", "watch"},
    {"shards"},
    {"distributed"},
    {"averages"},
    {"_nests"},
    {"_names"},
    {"_checks", "_studies", "numerics"},
]
FLOOR_OF = {room: height for height, rooms in enumerate(reversed(FLOORS)) for room in rooms}


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).with_suffix("").parts[0]


def imported_modules(path: Path) -> set[str]:
    """Absolute names of the steadygrad modules that a file imports."""
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
    return {name for name in found if name.split(".")[0] == "steadygrad"}


def imported_rooms(path: Path) -> set[str]:
    """Rooms, and what is imported from the root as if it were one: only the version is."""
    parts = [name.split(".") for name in imported_modules(path)]
    return {name[1] for name in parts if len(name) > 1 and name[1] != "__version__"}


FILES = sorted(SOURCE.rglob("*.py"))


# Lines of a room with its docstrings, at most: who needs more takes as much away elsewhere. They
# come down as rooms are drawn anew; a study's folder is a room of its own, and so are modules of
# the root that belong together.
CEILINGS = {
    "cli": 871,
    "integrations": 950,
    "studies": 3620,
    "studies/advise": 2287,
    "studies/compare": 2125,
    "studies/inspect": 1356,
    "studies/ab": 721,
    "tasks": 1639,
    "noise": 2700,
    "balance": 1207,
    "scale": 1346,
    "watch": 1231,
    "optim": 3910,
    "distributed.py, shards.py": 763,
    "optim/loops": 1223,
    "optim/kernels": 540,
}


@pytest.mark.parametrize("room", CEILINGS)
def test_a_room_stays_below_its_ceiling(room: str):
    paths = [SOURCE / name for name in room.split(", ")]
    files = [file for path in paths for file in (path.glob("*.py") if path.is_dir() else [path])]
    assert sum(len(file.read_text().splitlines()) for file in files) <= CEILINGS[room]


def test_every_folder_has_a_ceiling():
    folders = {path.parent.relative_to(SOURCE).as_posix() for path in FILES} - {"."}
    assert folders == {room for room in CEILINGS if not room.endswith(".py")}


def test_every_room_has_a_floor():
    """A new one is put into FLOORS, and into the plan of the house."""
    assert {room_of(path) for path in FILES} == set(FLOOR_OF)


def test_the_map_of_folders_has_every_room():
    """In the order of the floors."""
    text = (SOURCE.parents[1] / "CONTRIBUTING.md").read_text()
    rooms = [
        [name.strip("/").removesuffix(".py") for name in re.findall(r"\w+(?:/|\.py)", line)]
        for line in re.findall(r"^(?:\w+(?:/|\.py) +)+", text, re.M)
    ]
    known = [name for names in rooms for name in names]
    assert sorted(known) == sorted({*FLOOR_OF} - {"__init__", "__main__"})
    heights = [FLOOR_OF[name] for name in known]
    assert heights == sorted(heights, reverse=True)


def imports_upwards(path: Path) -> set[str]:
    room, top = room_of(path), len(FLOORS)
    return {r for r in imported_rooms(path) - {room} if FLOOR_OF.get(r, top) >= FLOOR_OF[room]}


def test_imports_only_downwards():
    inner = [path for path in FILES if room_of(path) not in {"__init__", "__main__"}]
    assert len(inner) > 100
    wrong = {str(path.relative_to(SOURCE)): imports_upwards(path) for path in inner}
    assert {name: rooms for name, rooms in wrong.items() if rooms} == {}


def imports_distributed(path: Path) -> bool:
    lines = [line for line in path.read_text().splitlines() if "import" in line]
    return any("torch.distributed" in line for line in lines)


def test_torch_distributed_has_two_users():
    users = {room_of(path) for path in FILES if imports_distributed(path)}
    assert users == {"distributed", "shards"}


def test_the_reader_of_imports_sees_every_form(tmp_path, monkeypatch):
    """A guard on the guard: relative, absolute, nested and aliased imports are all seen."""
    home = tmp_path / "steadygrad"
    (home / "noise").mkdir(parents=True)
    file = home / "noise" / "x.py"
    file.write_text(
        "from ..cli import main\nimport steadygrad.watch as w\n"
        "def f():\n    from steadygrad import studies, NoiseScale, __version__\n"
        "    import_module('steadygrad.tasks.task')\n"
    )
    monkeypatch.setattr(sys.modules[__name__], "SOURCE", home)
    assert imported_rooms(file) == {"cli", "watch", "studies", "NoiseScale", "tasks"}


def modules_after(code: str) -> set[str]:
    script = f"import sys\n{code}\nprint('\\n'.join(sys.modules))"
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(out.stdout.split())


HELP = """
from steadygrad.cli import main
try:
    main(['--help'])
except SystemExit:
    pass
"""


@pytest.mark.parametrize(
    ("code", "before"),
    [
        ("import steadygrad.studies.folder", "steadygrad._checks.InputError: "),
        ("import steadygrad; steadygrad.advise()", "steadygrad._checks.InputError: "),
        ("from steadygrad.cli import main; main(['compare', '--help'])", "steadygrad: "),
        ("from steadygrad.cli import main; main(['report', 'x'])", "steadygrad: "),
    ],
)
@pytest.mark.parametrize("extra", ["msgspec", "rich"])
def test_a_missing_extra_is_named_with_its_remedy(extra: str, code: str, before: str):
    script = f"import sys; sys.modules['{extra}'] = None; {code}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    line = "This needs jinja2, matplotlib, msgspec, rich, scipy. Found no "
    line += f'{extra}. Remedy: pip install "steadygrad[cli]".'
    assert done.stderr.splitlines()[-1] == before + line


# What reads a run and draws its page.
DRAWING = [
    ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted((SOURCE / "studies").rglob("*.py"))
    if path.parent.name == "report"
    or path.stem in {"charts", "folder", "frame", "html", "page", "schema", "text"}
    or path.stem in {"analysis", "findings", "plan", "search", "words"}
    or path == SOURCE / "studies/trials.py"
]


@pytest.mark.parametrize(
    "code",
    ["import steadygrad", HELP, "\n".join(f"import {name}" for name in DRAWING)],
    ids=["import", "help", "pages"],
)
def test_loads_no_torch(code: str):
    loaded = modules_after(code)
    assert "steadygrad" in loaded
    assert "torch" not in loaded
    assert len(DRAWING) > 20
