"""The page in a real browser: headless Chromium, when it is installed."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from msgspec.structs import replace

from steadygrad._studies import STUDIES
from steadygrad.studies.folder import read_run
from steadygrad.studies.page import render
from steadygrad.studies.summary import summarize
from tests.unit.report.conftest import contrast, luminance, made_run

RECORDS = Path(__file__).parents[3] / "docs" / "records"
CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium")

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-logging=stderr",
    "--window-size=1400,900",
    "--dump-dom",
]
DARK = "--blink-settings=preferredColorScheme=0"

# Chromium has no window narrower than 500 px; a frame has. The page itself stays untouched.
OUTER = """<!doctype html><meta charset="utf-8"><link rel="icon" href="data:,">
<iframe id="phone" style="border:0;width:390px;height:800px" srcdoc="{page}"></iframe>
<iframe id="desk" style="border:0;width:1280px;height:800px" srcdoc="{page}"></iframe>
<pre id="result"></pre>
<script>
function measure(frame) {{
  const page = frame.contentDocument, view = frame.contentWindow;
  const shown = [...page.querySelectorAll("svg")].map(svg => svg.getBoundingClientRect());
  const charts = shown.filter(box => box.width > 100 && box.height > 100);
  const label = [...page.querySelectorAll("svg text")].find(t => t.getClientRects().length);
  return {{
    width: view.innerWidth,
    scroll: page.documentElement.scrollWidth,
    widest: Math.max(0, ...charts.map(box => box.right)),
    charts: charts.length,
    title: page.title,
    ink: view.getComputedStyle(page.body).color,
    paper: view.getComputedStyle(page.body).backgroundColor,
    label: label ? view.getComputedStyle(label).fill : null,
    labelSize: label ? label.getBoundingClientRect().height : null,
  }};
}}
addEventListener("load", () => {{
  const found = {{phone: measure(phone), desk: measure(desk)}};
  result.textContent = JSON.stringify(found);
}});
</script>"""


class Look:
    """The browser's report on one page."""

    def __init__(self, page: str, folder: Path, *flags: str):
        outer = folder / "outer.html"
        outer.write_text(OUTER.format(page=html.escape(page)), encoding="utf-8")
        profile = f"--user-data-dir={folder / 'profile'}"
        done = subprocess.run(
            [str(CHROMIUM), *FLAGS, *flags, profile, outer.as_uri()],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        match = re.search(r'<pre id="result">(.*?)</pre>', done.stdout, flags=re.DOTALL)
        assert match is not None, done.stderr
        found = json.loads(html.unescape(match.group(1)))
        self.phone, self.desk = found["phone"], found["desk"]
        self.console = [line for line in done.stderr.splitlines() if ":CONSOLE" in line]


def assert_well_shown(look: Look, charts: int) -> None:
    assert look.console == []
    for view, width in ((look.phone, 390), (look.desk, 1280)):
        assert view["width"] == width
        assert view["scroll"] <= width
        assert view["charts"] == charts
        assert view["widest"] <= width
        # 4.5 is what WCAG AA asks of small text.
        assert contrast(view["ink"], view["paper"]) > 4.5
        if charts:
            assert contrast(view["label"], view["paper"]) > 4.5
            # A line of 10 px has a box of 11 px or more: still readable on a phone.
            assert view["labelSize"] > 10


@pytest.mark.few(3)
@pytest.mark.parametrize("mode", ["light", "dark"])
@pytest.mark.parametrize("study", STUDIES)
def test_a_page_on_a_phone_and_on_a_desk(study: str, mode: str, tmp_path: Path):
    page = render(read_run(RECORDS / study))
    look = Look(page, tmp_path, *([DARK] if mode == "dark" else []))
    assert_well_shown(look, charts=page.count('class="chart"'))
    assert (luminance(look.desk["paper"]) < 0.1) == (mode == "dark")


def test_hostile_names_run_nothing_and_do_not_widen_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    script = "<img src=x onerror=\"document.title='pwned'\"><script>document.title='pwned'</script>"

    said = {"answer": script, "remarks": ("z" * 500, script)}
    change = lambda *run: replace(summarize(*run), **said)
    monkeypatch.setattr("steadygrad.studies.page.summarize", change)
    task = {"name": script + "x" * 300, "sample": script, "provenance": {"y" * 99: "y" * 3000}}
    look = Look(render(made_run(task=task)), tmp_path)
    assert_well_shown(look, charts=2)
    assert look.desk["title"].startswith("<img src=x")
