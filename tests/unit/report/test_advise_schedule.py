"""Opening of an `advise` page, and the growing batch that it shows."""

import html
import re
from typing import Any

import pytest
from matplotlib.figure import Figure

from steadygrad.noise import BatchSizeSchedule
from steadygrad.studies.advise.report import training
from steadygrad.studies.advise.report.data import Advice
from steadygrad.studies.folder import Run
from steadygrad.studies.page import render
from tests.unit.report.conftest import STAGES

pytestmark = pytest.mark.usefixtures("no_charts")


def figures_of(page: str) -> dict[str, tuple[str, str]]:
    """Values and details of the key figures, by name."""
    pattern = r'<dt>([^<]*)</dt><dd class="value">([^<]*)</dd><dd[^>]*>([^<]*)</dd>'
    found = re.findall(pattern, html.unescape(page))
    return {name: (value, detail) for name, value, detail in found}


def forms_of(page: str) -> dict[str, str]:
    """The schedule for other trainers, by the trainer's name."""
    found = re.findall(r"<h3>([^<:]*):[^<]*</h3><pre[^>]*><code>(.*?)</code>", page, re.DOTALL)
    return {name: html.unescape(text) for name, text in found}


def test_its_words_are_a_sentence_and_a_list(whole_run: Run):
    page = render(whole_run)
    (lede,) = re.findall(r'<p class="lede">(.*?)</p>', page)
    (said,) = re.findall(r'<ul class="said">(.*?)</ul>', page)
    items = re.findall(r"<li>(.*?)</li>", said)
    assert whole_run.summary is not None
    assert [html.unescape(text) for text in (lede, *items)] == whole_run.summary["words"]
    assert 2 <= len(items) + 1 <= 6


def test_one_sentence_has_no_list(make_run: Any):
    page = render(make_run(summary=lambda total: total.update(words=["All there is."])))
    assert '<p class="lede">All there is.</p>' in page
    assert 'class="said"' not in page


def test_the_key_figures_are_the_summarys(make_run: Any):
    def change(summary: dict[str, Any]) -> None:
        summary["recommendation"] |= {"overhead": 0.126, "low": -0.021, "high": 3.0}
        summary["recommendation"] |= {"half_life": 1234.4, "decay_half_life": 7000.0}

    assert figures_of(render(make_run(summary=change))) == {
        "Batch size": ("16", "trained from scratch over 24,576 sequences"),
        "Learning rate": ("0.00141", "warmed up from 0.001 over the first 384 sequences"),
        "Sample overhead": (
            "13%",
            "in sequences, against batch 8; 95% interval −2% to 300% or more",
        ),
        "Steps": ("1,536", "instead of 3,072 at batch 8"),
        # 1,234.4 sequences of 64 tokens.
        "Half-life of Adam's second moment": (
            "1,234",
            "sequences, 79,002 tokens, at this batch size",
        ),
        "Half-life of the weight decay": ("7,000", "sequences, 448,000 tokens, at this batch size"),
        "Gradient noise scale": ("96", "95% interval 52 – 410; no advice on a batch size"),
    }


def test_a_predicted_batch_size_says_so_and_has_no_cost(make_run: Any):
    def change(summary: dict[str, Any]) -> None:
        nothing = dict.fromkeys(("overhead", "low", "high"))
        summary["recommendation"] |= nothing | {"basis": "predicted", "batch_size": 64}
        summary |= {"checked": [], "schedule": None}

    page = render(make_run(summary=change))
    found = figures_of(page)
    detail = "predicted from branches and not trained, for 24,576 sequences"
    assert found["Batch size"] == ("64", detail)
    assert not {"Sample overhead", "Steps"} & set(found)
    assert "The fixed batch size is predicted from branches." in page


def test_the_tasks_own_batch_size_costs_nothing(make_run: Any):
    def change(summary: dict[str, Any]) -> None:
        summary["recommendation"] |= {"batch_size": 8, "lr": 0.001, "warmup_samples": 0}

    found = figures_of(render(make_run(summary=change)))
    assert found["Learning rate"] == ("0.001", "the task's own")
    assert not {"Sample overhead", "Steps"} & set(found)


def test_a_half_life_without_tokens_and_kept(make_run: Any):
    run = make_run(task={"tokens_per_sample": None}, settings={"keep_half_life": True})
    # 8 ln(0.5) / ln(0.99)
    expected = ("552", "sequences, kept from the task")
    assert figures_of(render(run))["Half-life of Adam's second moment"] == expected
    page = render(make_run(task={"beta2": None}))
    assert "Half-life of Adam's second moment" not in figures_of(page)


def schedule_of(page: str) -> list[list[str]]:
    (found,) = re.findall(r"<caption>A growing batch</caption>.*?</table>", page)
    return [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in found.split("<tr>")[2:]]


def test_the_schedule_has_a_row_for_each_stage(whole_run: Run):
    assert whole_run.summary is not None
    stages = whole_run.summary["schedule"]["stages"]
    assert [(s["from_samples"], s["batch_size"]) for s in stages] == list(STAGES)
    assert schedule_of(render(whole_run)) == [
        ["0", "16", "0.00141"],
        ["384", "32", "0.002"],
        ["1,536", "64", "0.00283"],
    ]


def test_the_schedule_in_the_form_of_every_trainer(whole_run: Run):
    schedule = BatchSizeSchedule({"from_samples": a, "batch_size": b} for a, b in STAGES)
    assert forms_of(render(whole_run)) == {
        "Megatron": "0:16 24576:32 98304:64",
        "OLMo-core": schedule.to_olmo_core(64),
        "Lightning": schedule.to_lightning(8),
        "Hugging Face Trainer": schedule.to_hugging_face(8),
    }


def test_without_tokens_no_trainer_counts_them(make_run: Any):
    page = render(make_run(task={"tokens_per_sample": None}))
    assert list(forms_of(page)) == ["Lightning", "Hugging Face Trainer"]
    assert "OLMo-core" not in page


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"check": {"overhead": 0.07, "low": 0.04, "high": 0.09}, "advised": True},
            '"more">Trained from scratch, its sample overhead was 7% (95% interval 4% to 9%).',
        ),
        (
            {"check": {"overhead": 0.7, "low": 0.4, "high": 3.0}, "advised": False},
            "It is not advised. Trained from scratch, its sample overhead was 70% (95%",
        ),
        (
            {"check": None, "advised": False},
            "It is not advised. It was predicted from branches and not trained.",
        ),
    ],
)
def test_the_schedule_says_what_it_stands_on(make_run: Any, change: Any, words: str):
    def edit(summary: dict[str, Any]) -> None:
        check = summary["schedule"]["check"] | change["check"] if change["check"] else None
        summary["schedule"] |= change | {"check": check}

    page = render(make_run(summary=edit))
    assert words in page
    assert (forms_of(page) != {}) == change["advised"]
    assert ("set the learning rates of the table yourself" in page) == change["advised"]
    assert ("the growing batch below, which is not advised." in page) != change["advised"]
    assert "It takes 420 steps. Its learning rate is warmed up over the first 384" in page


def test_without_a_schedule_the_fixed_batch_size_is_drawn(make_run: Any):
    run = make_run(summary=lambda total: total.update(schedule=None))
    page = render(run)
    assert "A growing batch</caption>" not in page
    assert "Grey: the fixed batch size for a run from scratch." in page
    axes = Figure().subplots()
    training._draw_schedule(axes, Advice(run), 200.0, 30_000.0)
    assert axes.lines[0].get_xydata().tolist() == [[200, 16], [30_000, 16]]


def test_the_schedule_is_drawn_as_a_staircase(whole_run: Run):
    axes = Figure().subplots()
    training._draw_schedule(axes, Advice(whole_run), 200.0, 30_000.0)
    (line,) = axes.lines
    expected = [[200, 16], [384, 32], [1536, 64], [30_000, 64]]
    assert line.get_xydata().tolist() == expected
    assert line.get_drawstyle() == "steps-post"
