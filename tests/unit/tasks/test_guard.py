"""A task's own errors: every kind but Ctrl-C becomes one readable line."""

import pytest

from steadygrad._checks import InputError
from steadygrad.tasks import TaskError, guarded


class Stop(BaseException):
    pass


@pytest.mark.parametrize("error", [KeyError("x"), SystemExit(3), Stop("enough\nof it")])
def test_what_a_task_raises_becomes_one_line(error):
    with pytest.raises(TaskError) as caught, guarded("Task.make_model"):
        raise error
    assert caught.value.__cause__ is error
    assert str(caught.value).startswith(
        f"Task.make_model should run without an error. Found {type(error).__name__}: "
    )
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), InputError("a line already")])
def test_ctrl_c_and_readable_lines_pass(error):
    with pytest.raises(type(error)) as caught, guarded("Task.make_model"):
        raise error
    assert caught.value is error


def test_a_generator_can_be_closed_inside():
    def numbers():
        with guarded("Task.train"):
            yield 1

    made = numbers()
    assert next(made) == 1
    made.close()
