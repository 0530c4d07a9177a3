"""From what a user types to a task; every mistake is one line."""

import os
import pickle
import sys
import traceback

import pytest

from steadygrad._checks import InputError
from steadygrad.tasks import TaskError, load_function, load_task, sources

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
STOP = "class Stop(BaseException): ...\n"


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


def refused(spec, *found, kind=InputError):
    """The error that ``spec`` raises: one line, naming all of ``found``."""
    with pytest.raises(InputError) as caught:
        load_task(spec)
    message = str(caught.value)
    assert type(caught.value) is kind
    assert "\n" not in message
    assert message.count("Remedy") == 1
    assert [text for text in found if text not in message] == []
    return caught.value


@pytest.mark.parametrize(
    ("file", "spec"),
    [
        ("my_task.py", "my_task.py"),
        ("my_task.py", "~/my_task.py"),
        ("a:b/my_task.py", "a:b/my_task.py"),
        (os.fsdecode(b"caf\xe9/my_task.py"), os.fsdecode(b"caf\xe9/my_task.py")),
    ],
    ids=ascii,
)
def test_where_the_file_may_lie(file, spec, write, tmp_path, monkeypatch):
    write(GOOD, file)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load_task(f"{spec}:make_task").name == "tiny"


@pytest.mark.parametrize(
    ("spec", "hint"),
    [
        ("char-ml", "'char-lm'?"),
        ("digits_classifier", "'digits-classifier'?"),
        ("", "''"),
        ("imagenet", "'imagenet'"),
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
    error = refused(spec and spec.replace("FOLDER", folder), "char-lm, digits-classifier", hint)
    assert len(str(error)) < 500


# A file, and what its error names: of the file itself, or of its function.
FILES = {
    "syntax": ("def make_task(:\n    pass\n", "line 1"),
    "indent": ("x = 1\n  y = 2\n", "(my_task.py, line 2)"),
    "bytes": (b"\x89PNG\r\n\x1a\n\x00\x00", "SyntaxError"),
    "null": (b"x = 1\0", "null bytes"),
    "latin": (b"name = '\xe9'\n", "utf-8"),
    "import": (f"import no_such_package\n{GOOD}", "ModuleNotFoundError"),
    "exit": (f"import sys; sys.exit(3)\n{GOOD}", "SystemExit: 3"),
    "its own kind": (f"{STOP}raise Stop('at once')\n", "Stop: at once"),
}
FUNCTIONS = {
    "two lines": ("raise RuntimeError('one\\ntwo')", "RuntimeError: one."),
    "no message": ("raise RuntimeError", "Found RuntimeError."),
    "its own kind": ("raise Stop('enough')", "Stop: enough."),
    "arguments": ("return make_task(1, 2, 3)", "TypeError"),
}


@pytest.mark.parametrize("case", FILES)
def test_a_file_that_cannot_be_imported(write, case):
    source, found = FILES[case]
    error = refused(f"{write(source)}:make_task", "Importing", found, kind=TaskError)
    assert type(error.__cause__).__name__ in str(error)


@pytest.mark.parametrize("case", FUNCTIONS)
def test_a_factory_that_raises(write, case):
    body, found = FUNCTIONS[case]
    path = write(f"{GOOD}\n{STOP}\ndef wrong():\n    {body}\n")
    error = refused(f"{path}:wrong", found, "--debug", kind=TaskError)
    assert "Importing" not in str(error)
    # It keeps its own traceback.
    shown = "".join(traceback.format_exception(error))
    assert f'File "{path}", line 18, in wrong' in shown


@pytest.mark.parametrize("source", ["def make_task():\n    raise {}\n", "raise {}\n"])
def test_ctrl_c_is_not_swallowed(write, source):
    path = write(source.format("KeyboardInterrupt"))
    with pytest.raises(KeyboardInterrupt):
        load_task(f"{path}:make_task")


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("tusk", "'tusk'"),
        ("number", "'number'"),
        ("nothing", "None"),
        ("settings", "dict"),
        # A task's own errors stay readable.
        ("empty", "len(train)"),
        ("large", "`batch_size = 11`"),
    ],
)
def test_functions_that_give_no_task(write, name, found):
    more = [
        "number = 3",
        "def nothing(): ...",
        "def settings(): return {'lr': 1}",
        "def empty(): return make_task(rows=0)",
        "def large(): return make_task(batch_size=11)",
    ]
    refused(f"{write(GOOD + chr(10).join(more))}:{name}", found)


def test_a_script_that_parses_its_arguments_sees_none_of_ours(write, monkeypatch):
    own = "\nimport argparse\nLR = argparse.ArgumentParser().parse_args()\n"
    inner = "\ndef parsing():\n    argparse.ArgumentParser().parse_args()\n    return make_task()\n"
    monkeypatch.setattr(sys, "argv", given := ["steadygrad", "advise", "--budget", "20s"])
    path = write(GOOD + own + inner)
    assert load_task(f"{path}:parsing").name == "tiny"
    assert load_function(f"{path}:losses").__name__ == "losses"
    assert sys.argv is given


LATE_IMPORT = "from late_sibling_of_my_task import ROWS as rows\n    "


def test_siblings_import_early_and_late(write, tmp_path):
    early, late = "sibling_of_my_task", "late_sibling_of_my_task"
    write("LR = 0.25\n", f"{early}.py")
    write("ROWS = 7\n", f"{late}.py")
    write("", "not_imported.py")
    source = GOOD.replace("lr=0.1", "lr=LR").replace("return Task", LATE_IMPORT + "return Task")
    path = write(f"from {early} import LR\n" + source)
    task = load_task(f"{path}:make_task")
    assert (task.lr, len(task.train)) == (0.25, 7)
    assert sys.path[0] == str(path.parent)  # as with `python my_task.py`
    # What a record keeps of a task.
    assert sources(f"{path}:make_task") == [path, tmp_path / f"{late}.py", tmp_path / f"{early}.py"]
    del sys.modules[early], sys.modules[late]


WITH_DATACLASS = """
from __future__ import annotations
import pickle
from dataclasses import dataclass

@dataclass
class Row:
    features: list[float]

COPY = pickle.loads(pickle.dumps(Row([1.0])))
"""


def test_dataclasses_and_pickles_work_inside_the_file(write):
    path = write(WITH_DATACLASS + GOOD)
    task = load_task(f"{path}:make_task")
    module = sys.modules[task.per_sample_loss.__module__]
    assert module.Row([1.0]) == module.COPY
    assert pickle.loads(pickle.dumps(task.per_sample_loss)) is task.per_sample_loss
    assert module.__file__ == str(path)


def test_changed_files_and_files_of_one_name_are_read_anew(write):
    first = load_task(f"{write(GOOD)}:make_task")
    changed = load_task(f"{write(GOOD.replace('lr=0.1', 'lr=0.2'))}:make_task")
    other = load_task(f"{write(GOOD.replace('tiny', 'other'), 'other/my_task.py')}:make_task")
    assert [(task.name, task.lr) for task in (first, changed, other)] == [
        ("tiny", 0.1),
        ("tiny", 0.2),
        ("other", 0.1),
    ]
    assert first.per_sample_loss.__module__ != other.per_sample_loss.__module__
