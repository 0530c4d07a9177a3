"""Markup is safe by construction."""

import pytest

from steadygrad.studies.html import Html, clean, document, el, escape, fill, table

NASTY = "<script>alert('x')</script> & \"quotes\""


def test_a_string_is_escaped_and_markup_is_not():
    inner = el("b", "bold")
    text = "&lt;script&gt;alert(&#x27;x&#x27;)&lt;/script&gt; &amp; &quot;quotes&quot;"
    assert el("p", NASTY, inner) == f"<p>{text}<b>bold</b></p>"


def test_attributes_are_escaped_and_absent_ones_left_out():
    found = el("td.number.wide", "1", aria_label='" onclick="x', title=None)
    assert found == '<td class="number wide" aria-label="&quot; onclick=&quot;x">1</td>'


def test_children_may_be_iterables_or_absent():
    assert el("ul", (el("li", text) for text in "a<"), None) == "<ul><li>a</li><li>&lt;</li></ul>"


def test_parts_that_fill_markup_are_escaped():
    found = fill("<i>{what}</i> is {name}", what=el("b", "It"), name="<{what}>")
    assert found == "<i><b>It</b></i> is &lt;{what}&gt;"
    assert isinstance(found, Html)


@pytest.mark.parametrize("character", ["\x00", "\x08", "\x1b", "\x85", "\ud800", "\uffff"])
def test_characters_that_no_page_can_hold(character: str):
    assert clean(f"a{character}b") == "a\ufffdb"
    assert escape(f"a{character}b").encode() == "a\ufffdb".encode()


@pytest.mark.parametrize("character", ["\n", "\t", "ß", "Σ", "字", "😀"])
def test_characters_that_stay(character: str):
    assert clean(character) == character


def test_table_scrolls_in_its_own_box_and_aligns_numbers():
    found = table("Losses <1>", ["name", "loss"], [["a&b", "1.5"]], text_columns=1)
    assert found.startswith(
        '<div class="scroll" tabindex="0" role="region" aria-label="Losses &lt;1'
    )
    assert '<tr><td>a&amp;b</td><td class="number">1.5</td></tr>' in found


def test_a_row_that_is_shorter_than_the_head_is_a_mistake():
    with pytest.raises(ValueError, match="shorter"):
        table("x", ["a", "b"], [["1"]])


def test_document_is_self_contained():
    page = document("A & B", el("p", "x"))
    assert page.startswith('<!doctype html>\n<html lang="en">')
    assert "<title>A &amp; B</title>" in page
    assert "width=device-width" in page
    assert "default-src 'none'" in page
    assert "prefers-color-scheme: dark" in page
    for loading in ("<script", "http:", "https:", "@import", "src="):
        assert loading not in page
