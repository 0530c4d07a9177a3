"""A page escapes every text, and loads nothing."""

import pytest

from steadygrad.studies.page import render
from tests.unit.report.conftest import made_run

NASTY = "<script>alert('x')</script> & \"quotes\""


@pytest.mark.parametrize("character", ["\x00", "\x08", "\x1b", "\x85", "\ud800", "\uffff"])
@pytest.mark.usefixtures("no_charts")
def test_characters_that_no_page_can_hold(character: str):
    page = render(made_run(task={"sample": f"a{character}b"}))
    assert "a\ufffdb" in page
    page.encode()


@pytest.mark.usefixtures("no_charts")
def test_a_name_is_text_wherever_it_stands():
    page = render(made_run(task={"name": NASTY, "provenance": {NASTY: NASTY}}))
    assert "<script" not in page
    assert "&lt;script&gt;" in page


def test_a_page_is_self_contained():
    page = render(made_run())
    assert page.startswith('<!doctype html>\n<html lang="en">')
    for part in ("width=device-width", "default-src 'none'", "prefers-color-scheme: dark"):
        assert part in page
    for loading in ("<script", "@import", "src=", "url(http"):
        assert loading not in page


@pytest.mark.usefixtures("no_charts")
def test_a_table_scrolls_in_its_own_box():
    assert '<div class="scroll" tabindex="0" role="region" aria-label=' in render(made_run())
