"""From what a user types to a task; every mistake is one line."""

import os
import pickle
import sys

import pytest

from steadygrad.tasks import TaskError, load_function, load_task, sources
from tests.refusals import refused

GOOD = """
import torch
from steadygrad.tasks import Task, TensorSamples

def losses(model, batch):
    return model(batch).square().mean(1)

def make_task(rows=10, batch_size=2):
    return Task(
        name="tiny", sample="row", make_model=lambda: torch.nn.Linear(3, 2),
        train=TensorSamples(torch.ones(rows, 3)), valid=TensorSamples(torch.ones(4, 3)),
        per_sample_loss=losses, make_optimizer=torch.optim.SGD, lr=0.1, batch_size=batch_size,
    )
"""


@pytest.fixture
def write(tmp_path):
    def write(source, name="my_task.py"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(source if isinstance(source, bytes) else source.encode())
        return path

    return write


@pytest.fixture(autouse=True)
def a_path_of_its_own(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])


def test_where_the_file_may_lie(write, tmp_path, monkeypatch):
    name = os.fsdecode(b"a:caf\xe9/my_task.py")
    write(GOOD, name)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load_task(f"~/{name}:make_task").name == "tiny"


@pytest.mark.parametrize(
    ("spec", "hint"),
    [
        ("char-ml", "'char-lm'?"),
        ("", "''"),
        ("n" * 3_000 + ".py:make_task", "nnn"),
        # A name without end is not repeated.
        ("n" * 100_000, "nnn"),
        (None, "`spec`"),
        ("FOLDER/none.py:make_task", "none.py"),
        ("FOLDER:make_task", "path/file.py:make_task"),
        ("FOLDER/my_task.py", "path/file.py:make_task"),
        ("FOLDER/my_task.py:not a name", "path/file.py:make_task"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_names_no_function_lists_the_built_ins(spec, hint, write):
    folder = str(write(GOOD).parent)
    with refused("char-lm, digits-classifier", hint) as error:
        load_task(spec and spec.replace("FOLDER", folder))
    assert len(str(error.value)) < 500


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("def make_task(:\n    pass\n", "line 1"),
        (b"\x89PNG\r\n\x1a\n\x00\x00", "SyntaxError"),
        (b"name = '\xe9'\n", "utf-8"),
        (f"import no_such_package\n{GOOD}", "ModuleNotFoundError"),
        (f"import sys; sys.exit(3)\n{GOOD}", "SystemExit: 3"),
    ],
)
def test_a_file_that_cannot_be_imported(write, source, found):
    with refused("Importing", found, kind=TaskError):
        load_task(f"{write(source)}:make_task")


@pytest.mark.parametrize(
    ("more", "found"),
    [
        ("", "'wrong'"),
        ("wrong = 3", "'wrong'"),
        ("def wrong(): return {'lr': 1}", "dict"),
        # A task's own errors stay readable.
        ("def wrong(): return make_task(batch_size=11)", "`batch_size = 11`"),
    ],
)
def test_functions_that_give_no_task(write, more, found):
    with refused(found):
        load_task(f"{write(GOOD + more)}:wrong")


def test_a_script_that_parses_its_arguments_sees_none_of_ours(write, monkeypatch):
    own = "\nimport argparse\nLR = argparse.ArgumentParser().parse_args()\n"
    inner = "\ndef parsing():\n    argparse.ArgumentParser().parse_args()\n    return make_task()\n"
    monkeypatch.setattr(sys, "argv", given := ["steadygrad", "advise", "--budget", "20s"])
    path = write(GOOD + own + inner)
    assert load_task(f"{path}:parsing").name == "tiny"
    assert load_function(f"{path}:losses").__name__ == "losses"
    assert sys.argv is given


def test_siblings_import_early_and_late(write, tmp_path):
    early, late = "sibling_of_my_task", "late_sibling_of_my_task"
    write("LR = 0.25\n", f"{early}.py")
    write("ROWS = 7\n", f"{late}.py")
    write("", "not_imported.py")
    source = GOOD.replace("lr=0.1", "lr=LR")
    source = source.replace("return Task", f"from {late} import ROWS as rows\n    return Task")
    path = write(f"from {early} import LR\n" + source)
    task = load_task(f"{path}:make_task")
    assert (task.lr, len(task.train)) == (0.25, 7)
    assert sys.path[0] == str(path.parent)  # as with `python my_task.py`
    # What a record keeps of a task.
    assert sources(f"{path}:make_task") == [path, tmp_path / f"{late}.py", tmp_path / f"{early}.py"]
    del sys.modules[early], sys.modules[late]


def test_dataclasses_and_pickles_work_inside_the_file(write):
    row = "from dataclasses import dataclass\n\n@dataclass\nclass Row:\n    x: 'list[float]'\n"
    loss = load_task(f"{write(row + GOOD)}:make_task").per_sample_loss
    assert pickle.loads(pickle.dumps(loss)) is loss
