"""Damaged runs: a page or an answer, or one line, and nothing outside of the run's folder changes.

``STEADYGRAD_DAMAGED=200 pytest tests/unit/cli/test_damage.py`` damages each study's run 200 times.
"""

import json
import os
import random
import shutil
import signal
import sys
import warnings
from contextlib import contextmanager

import pytest

from steadygrad.cli import main
from tests.unit.cli.conftest import PLAIN
from tests.unit.cli.quick import STUDIES, tiny

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="there are no pipes with names")
CASES = int(os.environ.get("STEADYGRAD_DAMAGED", "10"))
VALUES = [
    None, True, 0, -1, 3, 10**7, 10**9, 2**61, 10**400, 0.5, -1e308, 1e308, 5e-324, "nan", "inf",
    "-inf", "", "text", "../../outside/file", "\x00\x1b[31mred\nline", "\ud800", "é" * 300, "<b>&",
    [], {}, [1, [2, ["nan"]]], {"x": {}}, [0] * 1000, [1] * 10**5, "OUTSIDE/evil.py:make_task",
]  # fmt: skip
PLACES = ("outside", "here/run")
# `ab` says in its exit code what it found; its times are in its page, which kills would change.
RUNS = {**STUDIES, "ab": ["--pairs", "5", "--samples", "64"]}
SAYS = {"ab": (0, 3, 4)}
EVIL = "from pathlib import Path\nPath(__file__).with_name('ran').touch()\n"


class Hangs(BaseException):
    """A case that takes more than half a minute."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A complete run of each study."""
    home = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(home / "state"))
        for name, options in RUNS.items():
            code = main([name, tiny(), *options, *PLAIN, "--out", str(home / name)])
            assert code in SAYS.get(name, (0,))
    return home


def everything(folder, but):
    """All that lies in a folder, but for one folder in it."""
    paths = [path for path in folder.rglob("*") if but not in (path, *path.parents)]
    return {
        path: (path.lstat().st_mtime_ns, path.is_file() and path.read_bytes()) for path in paths
    }


def places(value, path=()):
    """Paths to all values in a nest."""
    items = value.items() if isinstance(value, dict) else ()
    items = enumerate(value) if isinstance(value, list) else items
    return [path, *(place for key, item in items for place in places(item, (*path, key)))]


def edited(path, chance, outside):
    """Some values changed or removed, as someone may who knows the format."""
    content = json.loads(path.read_bytes())
    for _ in range(chance.randint(1, 3)):
        *parents, last = chance.choice(places(content)[1:])
        nest = content
        for key in parents:
            nest = nest[key]
        value = chance.choice(VALUES)
        if isinstance(value, str):
            value = value.replace("OUTSIDE", str(outside))
        if chance.random() < 0.2:
            del nest[last]
        elif chance.random() < 0.2 and isinstance(nest[last], (int, float)):
            nest[last] *= chance.choice([-1, 2, 1e6, 1e-6])
        else:
            nest[last] = value
        if len(places(content)) == 1:
            break
    path.write_text(json.dumps(content))


def flipped(path, chance, outside):
    data = bytearray(path.read_bytes())
    for _ in range(chance.randint(1, 8)):
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)


def cut(path, chance, outside):
    os.truncate(path, chance.choice([0, 1, chance.randrange(path.stat().st_size), 1 << 40]))


def filled(path, chance, outside):
    texts = [b"\x00" * 99, b"[" * 10**5, b'{"a":' * 10**5, b"null", b"[]", b"1e999", b"\xff\xfe{"]
    path.write_bytes(chance.choice(texts))


def replaced(path, chance, outside):
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    links = ["nowhere", path.name, "..", outside, outside / "file", outside / path.name]
    links += ["/dev/zero", "/dev/full"]
    way = chance.choice([os.mkdir, os.mkfifo, *[lambda p: p.symlink_to(chance.choice(links))] * 3])
    way(path)


def moved(path, chance, outside):
    names = ["..json", "-.json", "x" * 200 + ".json", "\udcff.json", "a\n.json", "header.json"]
    others = [other.name for other in path.parent.iterdir() if other != path]
    to = path.with_name(chance.choice([*names, *others]))
    if not to.is_dir():
        chance.choice([shutil.move, shutil.copy])(path, to)


def swapped(path, chance, outside):
    shutil.copy(chance.choice(list(outside.rglob("*.json"))), path)


WAYS = [edited] * 6 + [flipped, cut, filled, replaced, moved, swapped]


def damage(folder, chance, outside):
    """Damages files of a run; its header, results and summary alike often."""
    for _ in range(chance.choice([1, 1, 1, 2, 4])):
        chosen = chance.choice(["header.json", "results/*", "results/*", "summary.json"])
        if chance.random() < 0.1:
            chosen = chance.choice(["checkpoints", "stop", "report.html", "results"])
            if not os.path.lexists(folder / chosen):
                (folder / chosen).mkdir()
        found = sorted(folder.glob(chosen))
        if found:
            path = chance.choice(found)
            plain = path.is_file() and not path.is_symlink() and path.stat().st_size < 1 << 20
            way = chance.choice(WAYS) if plain and path.stat().st_size else replaced
            try:
                way(path, chance, outside)
            except (IndexError, ValueError, RecursionError):  # already damaged
                filled(path, chance, outside)


@contextmanager
def half_a_minute():
    def hang(*_):
        raise Hangs

    before = signal.signal(signal.SIGALRM, hang)
    signal.alarm(30)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.few(3)
@pytest.mark.parametrize("case", range(CASES))
@pytest.mark.parametrize("name", RUNS)
def test_a_damaged_run(name, case, runs, tmp_path, monkeypatch, capsys):
    chance, outside, folder = random.Random(f"{name} {case}"), *map(tmp_path.joinpath, PLACES)
    shutil.copytree(runs, outside)
    for file, text in {"evil.py": EVIL, "file": "mine", "results/x.json": "{}"}.items():
        (outside / file).parent.mkdir(exist_ok=True)
        (outside / file).write_text(text)
    shutil.copytree(runs / name, folder)
    # The first one shows that an intact run passes.
    if case:
        damage(folder, chance, outside)
    monkeypatch.chdir(folder.parent)
    monkeypatch.setenv("XDG_STATE_HOME", str(outside / "state"))
    before = everything(tmp_path, folder)
    # As by someone who trusts the task; or the folder is their own.
    task = [tiny()] if chance.random() < 0.7 else []
    commands = [["report", "run"], [name, *task, "--resume", "run", "--budget", "2s"]]
    for command in (*commands, commands[0]):
        with warnings.catch_warnings(record=True) as heard, half_a_minute():
            warnings.simplefilter("always")
            code = main(command)
        out, err = capsys.readouterr()
        assert everything(tmp_path, folder) == before
        assert [str(each.message) for each in heard] == []
        assert "Traceback" not in err
        assert "Hangs" not in err
        assert (out + err).replace("\n", "").isprintable()
        right = (0,) if command[0] == "report" else SAYS.get(name, (0,))
        assert code in ((*right, 2) if case else right), err
        if code == 2:
            assert err.splitlines()[-1].startswith("steadygrad: "), err
            assert command[0] != "report" or (out, err.count("\n")) == ("", 1)
        elif command[0] == "report":
            assert err == ""
            assert len((folder / "report.html").read_bytes()) > 5000
        else:
            summary = json.loads((folder / "summary.json").read_bytes(), parse_constant=pytest.fail)
            assert summary["answer"].split()[0] in out


def test_a_pipe_in_place_of_the_checkpoints_is_not_waited_for(runs, tmp_path):
    folder = shutil.copytree(runs / "compare", tmp_path / "run")
    (folder / "results" / "speed.json").unlink()
    os.mkfifo(folder / "checkpoints")
    with half_a_minute():
        assert main(["compare", tiny(), "--resume", str(folder)]) == 0
