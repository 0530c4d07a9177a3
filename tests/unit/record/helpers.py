"""What tests of records share."""

from pathlib import Path

import pytest

from steadygrad._checks import InputError
from steadygrad.record import RunWriter

HEADER = {"study": "advise", "seed": 3, "task": {"name": "char-lm"}}


def assert_one_line(error: pytest.ExceptionInfo[InputError], *parts: str) -> None:
    text = str(error.value)
    assert "\n" not in text
    for part in parts:
        assert part in text


def write(folder: Path, *losses: float) -> bytes:
    with RunWriter.create(folder, HEADER) as writer:
        for step, loss in enumerate(losses):
            writer.append("train", steps=step, loss=loss)
    return (folder / "record.jsonl").read_bytes()


def no_space(*_: object) -> None:
    raise OSError(28, "No space left on device")
