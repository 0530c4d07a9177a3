"""Running studies of float16."""

from pathlib import Path

from steadygrad.studies.inspect import Settings, Stop, inspect
from tests.unit.studies.helpers import Watcher

FP16 = Path(__file__).parent.parent / "fp16_task.py"


def spec(factory):
    return f"{FP16}:{factory}"


def look(folder, task, *, steps=16, monitor=None, stop=None):
    """A study of so many steps; on a tiny task 16 of them take about a second."""
    chosen = Settings(task=task, steps=steps, budget_seconds=600.0, device="cpu")
    return inspect(chosen, folder, monitor=monitor or Watcher(), stop=stop or Stop())
