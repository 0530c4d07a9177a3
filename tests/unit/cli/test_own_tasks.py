"""``steadygrad tasks`` and ``steadygrad init``."""

from steadygrad.cli import main
from steadygrad.tasks import BUILT_IN, load_task
from tests.unit.cli.quick import ROOT


def test_every_built_in_task_has_a_line(capsys):
    assert main(["tasks"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[: len(BUILT_IN)]] == [*BUILT_IN]
    assert lines[-1] == "One of your own: steadygrad init my_task.py"
    assert all(line.endswith(".") for line in lines[: len(BUILT_IN)])


def test_the_task_that_is_written_is_the_example(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["init", "mine.py"]) == 0
    assert "steadygrad advise mine.py:make_task" in capsys.readouterr().out
    example = (ROOT / "examples/my_task.py").read_text()
    assert (tmp_path / "mine.py").read_text() == example.replace("examples/my_task.py", "mine.py")
    assert load_task("mine.py:make_task").name == "linear-regression"


def test_a_file_that_exists_is_left_alone(tmp_path, capsys):
    path = tmp_path / "mine.py"
    path.write_text("x = 1\n")
    assert main(["init", str(path)]) == 2
    assert "File exists. Remedy: another name" in capsys.readouterr().err
    assert path.read_text() == "x = 1\n"
