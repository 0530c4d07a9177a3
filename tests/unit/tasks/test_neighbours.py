"""Files beside a task's file: importable for as long as the task is, and nothing written."""

import subprocess
import sys

import pytest

from steadygrad._checks import InputError
from steadygrad.tasks import load_task
from tests.unit.tasks.test_registry import GOOD

LAZY = GOOD.replace(
    "def losses(model, batch):",
    "def losses(model, batch):\n    from lazy_losses import scale\n"
    "    from lazy_package.inner import SHIFT\n    from lazy_folder.deep import POWER\n"
    "    return scale(model(batch)).mean(1) + SHIFT * POWER\n\ndef unused(model, batch):",
).replace("lambda: torch.nn.Linear(3, 2)", "make_model") + (
    "\ndef make_model():\n    from lazy_model import make\n    return make()\n"
)
FILES = {
    "my_task.py": LAZY,
    "lazy_model.py": "import torch\nmake = lambda: torch.nn.Linear(3, 2)\n",
    "lazy_losses.py": "def scale(x): return x.square()\n",
    "lazy_package/__init__.py": "",
    "lazy_package/inner.py": "SHIFT = 0.5\n",
    "lazy_folder/deep.py": "POWER = 2\n",
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    for name, source in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(source)
    finders = list(sys.meta_path)
    yield tmp_path
    sys.meta_path[:] = finders
    for name in [name for name in sys.modules if name.startswith("lazy_")]:
        del sys.modules[name]


def test_late_imports_work_and_write_nothing(folder):
    before = sorted(folder.rglob("*"))
    task = load_task(f"{folder}/my_task.py:make_task")
    model = task.make_model()
    batch = task.train.batch([0, 1])
    expected = model(batch).square().mean(1) + 1.0
    assert task.per_sample_loss(model, batch).tolist() == expected.tolist()
    assert sorted(folder.rglob("*")) == before
    # The machinery of tracebacks still finds the source.
    assert sys.modules["lazy_losses"].__file__ == str(folder / "lazy_losses.py")


def test_a_task_loaded_twice_is_found_once(folder):
    finders = len(sys.meta_path)
    load_task(f"{folder}/my_task.py:make_task")
    load_task(f"{folder}/my_task.py:make_task")
    assert len(sys.meta_path) == finders + 1


def test_a_file_that_fails_leaves_nothing_behind(folder):
    finders = list(sys.meta_path)
    (folder / "broken.py").write_text("raise KeyError('x')\n")
    with pytest.raises(InputError, match="KeyError"):
        load_task(f"{folder}/broken.py:make_task")
    assert sys.meta_path == finders


def test_a_data_folder_hides_no_package(folder):
    """A folder without __init__.py comes last, as for ``python file.py``; a file comes first."""
    (folder / "colorsys.py").write_text("LOCAL = True\n")
    (folder / "wave").mkdir()
    source = "import colorsys, wave\nassert colorsys.LOCAL and wave.open\n"
    (folder / "my_task.py").write_text(source + GOOD)
    script = (
        "from steadygrad.tasks import load_task\n"
        f"load_task({str(folder / 'my_task.py:make_task')!r})\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
