"""Printed lines, and the stream that they are printed on."""

import pytest
from rich.table import Table

from steadygrad.cli.console import cleaned, complain, emit, note, printable, rendered


def test_a_text_is_no_markup_and_no_emoji():
    found = Table("layer")
    found.add_row("blocks[bold]1[/bold] :smile:")
    out = rendered(found, "Train at [bold]32[/bold] :smile:.", stream=None)
    assert "blocks[bold]1[/bold] :smile:" in out
    assert out.endswith("Train at [bold]32[/bold] :smile:.")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("größer × 2", "größer × 2"),
        ("a\x1b[2Jb", r"a\x1b[2Jb"),
        ("a\r\nb\tc\x07", r"a\r\nb\tc\x07"),
        ("\x9b31m\x7f", r"\x9b31m\x7f"),
        ("abc\u202edcba", r"abc\u202edcba"),
        ("\udc80", r"\udc80"),
    ],
)
def test_control_characters_are_escaped(text, shown):
    assert printable(text) == shown
    nest = {text: [text, (1.5, None, True)], "b": {"c": text}}
    assert cleaned(nest) == {shown: [shown, [1.5, None, True]], "b": {"c": shown}}


def test_an_error_is_one_line(capsys):
    complain("Expected one\n  thing.\tFound \x1b[31mred.")
    assert capsys.readouterr().err == "steadygrad: Expected one thing. Found \\x1b[31mred.\n"


@pytest.mark.parametrize("write", [emit, note])
def test_what_a_stream_cannot_encode_is_escaped(write, monkeypatch, tmp_path):
    with (tmp_path / "out").open("w", encoding="ascii") as stream:
        monkeypatch.setattr("sys.stdout" if write is emit else "sys.stderr", stream)
        write("größer")
    assert (tmp_path / "out").read_text() == "gr\\xf6\\xdfer\n"
