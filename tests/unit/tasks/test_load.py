"""From what a user types to a task; every mistake is one line with a remedy."""

import os
import pickle
import sys
import traceback
from pathlib import Path

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


@pytest.fixture
def write(tmp_path):
    def write(source: str | bytes, name: str = "my_task.py") -> Path:
        path = tmp_path / name
        path.write_bytes(source if isinstance(source, bytes) else source.encode())
        return path

    return write


@pytest.fixture(autouse=True)
def a_path_of_its_own(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])


def refused(spec: str, *found: str, kind: type[InputError] = InputError) -> InputError:
    """The error that ``spec`` raises: one line, naming all of ``found`` and a remedy."""
    with pytest.raises(InputError) as caught:
        load_task(spec)
    message = str(caught.value)
    assert type(caught.value) is kind
    assert "\n" not in message
    assert [text for text in found if text not in message] == []
    return caught.value


def test_a_task_from_a_file(write, tmp_path):
    write(GOOD)
    assert load_task(f"{tmp_path}/my_task.py:make_task").name == "tiny"


def test_a_relative_path_and_a_home_path(write, tmp_path, monkeypatch):
    write(GOOD)
    monkeypatch.chdir(tmp_path)
    assert load_task("my_task.py:make_task").name == "tiny"
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    assert load_task("~/my_task.py:make_task").name == "tiny"


def test_a_colon_in_the_path(write, tmp_path):
    (tmp_path / "a:b").mkdir()
    write(GOOD, "a:b/my_task.py")
    assert load_task(f"{tmp_path}/a:b/my_task.py:make_task").name == "tiny"


@pytest.mark.parametrize("spec", ["n" * 100_000, "n" * 100_000 + ".py:make_task"])
def test_a_name_without_end_is_not_repeated(spec):
    assert len(str(refused(spec, "nnn", "Remedy"))) < 400


def test_a_path_that_is_too_long_for_a_file_system_is_not_there():
    refused("n" * 3_000 + ".py:make_task", "in a file that is there", "Remedy")


@pytest.mark.parametrize(
    ("spec", "hint"),
    [
        ("char-ml", "did you mean 'char-lm'?"),
        ("digits_classifier", "did you mean 'digits-classifier'?"),
        ("", "a path, relative to"),
        ("imagenet", "a path, relative to"),
    ],
)
def test_an_unknown_name_lists_the_built_ins(spec, hint):
    refused(spec, "char-lm, digits-classifier, digits-autoencoder", repr(spec), hint, "Remedy")


@pytest.mark.parametrize("end", ["", ":", ":not a name"])
def test_a_file_without_its_factory(write, end):
    refused(f"{write(GOOD)}{end}", "path/file.py:make_task", "Remedy")


def test_a_spec_that_is_no_text():
    refused(None, "`spec` should be of type str. Found None", "Remedy")


def test_a_missing_file_and_a_folder(tmp_path):
    refused(f"{tmp_path}/none.py:make_task", "none.py", "Remedy")
    refused(f"{tmp_path}:make_task", "in a file that is there", "Remedy")


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("def make_task(:\n    pass\n", "line 1"),
        ("x = 1\n  y = 2\n", "unexpected indent (my_task.py, line 2)"),
        (b"\x89PNG\r\n\x1a\n\x00\x00", ""),
        (b"x = 1\0", "null bytes"),
        (b"name = '\xe9'\n", "utf-8"),
    ],
)
def test_a_file_that_is_not_python(write, source, found):
    refused(f"{write(source)}:make_task", "Importing the file", found, "Remedy", kind=TaskError)


def test_no_such_factory_lists_what_there_is(write):
    path = write(GOOD + "\ndef make_other(): ...\n")
    refused(f"{path}:make_tusk", "make_tusk", "`def make_tusk`")
    refused(f"{write('x = 1', 'empty.py')}:make_task", "Found None")


def test_a_factory_that_is_not_a_function(write):
    refused(
        f"{write('make_task = 3')}:make_task", "should define 'make_task', a function", "Remedy"
    )


@pytest.mark.parametrize("value", ["None", "{'lr': 1}"])
def test_a_factory_that_returns_no_task(write, value):
    path = write(f"def make_task():\n    return {value}\n")
    refused(f"{path}:make_task", "should be of type Task. Found", "`return Task(...)`")


def test_a_factory_that_raises_keeps_its_own_traceback(write):
    path = write("def make_task():\n    raise KeyError('weights\\nand more')\n")
    error = refused(f"{path}:make_task", "Found KeyError", "--debug", kind=TaskError)
    assert isinstance(error.__cause__, KeyError)
    shown = "".join(traceback.format_exception(error))
    assert f'File "{path}", line 2, in make_task' in shown
    assert "raise KeyError(" in shown


def test_only_the_first_line_of_the_users_message(write):
    path = write("def make_task():\n    raise RuntimeError('one\\ntwo')\n")
    error = refused(f"{path}:make_task", "RuntimeError: one.", kind=TaskError)
    assert "two" not in str(error)
    silent = write("def make_task():\n    raise RuntimeError\n")
    refused(f"{silent}:make_task", "Found RuntimeError. Remedy", kind=TaskError)


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("import no_such_package", "ModuleNotFoundError"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
    ],
)
def test_a_file_that_raises_while_imported(write, line, found):
    path = write(f"{line}\n{GOOD}")
    error = refused(f"{path}:make_task", "Importing the file of", found, kind=TaskError)
    assert type(error.__cause__).__name__ in found


def test_a_script_that_parses_its_arguments_sees_none_of_ours(write, monkeypatch):
    own = "\nimport argparse\nLR = argparse.ArgumentParser().parse_args()\n"
    inner = "\ndef parsing():\n    argparse.ArgumentParser().parse_args()\n    return make_task()\n"
    monkeypatch.setattr(sys, "argv", given := ["steadygrad", "advise", "--budget", "20s"])
    path = write(GOOD + own + inner)
    assert load_task(f"{path}:parsing").name == "tiny"
    assert load_function(f"{path}:losses").__name__ == "losses"
    assert sys.argv is given


def test_a_factory_that_wants_arguments(write):
    path = write("def make_task(size):\n    return size\n")
    refused(f"{path}:make_task", "TypeError", "'size'", kind=TaskError)


@pytest.mark.parametrize(
    ("arguments", "found"),
    [("rows=0", "len(train)"), ("batch_size=11", "`batch_size = 11`")],
)
def test_a_tasks_own_errors_stay_readable(write, arguments, found):
    path = write(f"{GOOD}\ndef wrong():\n    return make_task({arguments})\n")
    error = refused(f"{path}:wrong", "Parameter", found)
    assert str(error).count("Remedy") == 1


@pytest.mark.parametrize("source", ["def make_task():\n    raise {}\n", "raise {}\n"])
def test_ctrl_c_is_not_swallowed(write, source):
    path = write(source.format("KeyboardInterrupt"))
    with pytest.raises(KeyboardInterrupt):
        load_task(f"{path}:make_task")


def test_an_exception_of_the_users_own_kind_is_one_line(write):
    stop = "class Stop(BaseException): ...\n"
    path = write(f"{stop}def make_task():\n    raise Stop('enough')\n")
    refused(f"{path}:make_task", "Found Stop: enough.", "--debug", kind=TaskError)
    path = write(f"{stop}raise Stop('at once')\n")
    refused(f"{path}:make_task", "Importing", "Found Stop: at once", kind=TaskError)


def test_siblings_import_early_and_late(write):
    write("LR = 0.25\n", "sibling_of_my_task.py")
    write("ROWS = 7\n", "late_sibling_of_my_task.py")
    source = GOOD.replace("lr=0.1", "lr=LR").replace("return Task", LATE_IMPORT + "return Task")
    path = write("from sibling_of_my_task import LR\n" + source)
    task = load_task(f"{path}:make_task")
    assert (task.lr, len(task.train)) == (0.25, 7)
    assert sys.path[0] == str(path.parent)  # as with `python my_task.py`
    del sys.modules["sibling_of_my_task"], sys.modules["late_sibling_of_my_task"]


LATE_IMPORT = "from late_sibling_of_my_task import ROWS as rows\n    "

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
    assert module.__name__.startswith("_steadygrad_task_")


def test_a_changed_file_is_read_again(write):
    path = write(GOOD)
    assert load_task(f"{path}:make_task").lr == 0.1
    write(GOOD.replace("lr=0.1", "lr=0.2"))
    assert load_task(f"{path}:make_task").lr == 0.2


def test_two_files_of_one_name_do_not_meet(write, tmp_path):
    (tmp_path / "other").mkdir()
    first = write(GOOD)
    second = write(GOOD.replace("tiny", "other"), "other/my_task.py")
    tasks = [load_task(f"{path}:make_task") for path in (first, second)]
    assert [task.name for task in tasks] == ["tiny", "other"]
    assert tasks[0].per_sample_loss.__module__ != tasks[1].per_sample_loss.__module__


def test_a_folder_whose_name_is_not_utf8(tmp_path):
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    (folder / "my_task.py").write_text(GOOD)
    assert load_task(f"{folder}/my_task.py:make_task").name == "tiny"


def test_the_sources_of_a_task_are_its_file_and_what_it_imported_beside(tmp_path):
    (tmp_path / "nets_of_mine.py").write_text("size = 3\n")
    (tmp_path / "not_imported.py").write_text("")
    (tmp_path / "my_task.py").write_text(f"import nets_of_mine\n{GOOD}")
    spec = f"{tmp_path}/my_task.py:make_task"
    load_task(spec)
    assert sources(spec) == [tmp_path / "my_task.py", tmp_path / "nets_of_mine.py"]
