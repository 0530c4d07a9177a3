"""Pages of random records: no title, key figure or verdict may contradict the summary."""

import html
import math
import re
from collections import Counter
from pathlib import Path

import pytest

from steadygrad.studies.folder import Run
from steadygrad.studies.page import render
from tests.unit.studies.advise.random_records import random_record

RECORDS, AT_ONCE = 120, 40


def figures_of(page):
    pattern = r'<dt>([^<]*)</dt><dd class="value">([^<]*)</dd><dd[^>]*>([^<]*)</dd>'
    return {name: rest for name, *rest in re.findall(pattern, page)}


def number(text):
    return float(text.replace(",", "").replace("−", "-").replace("%", ""))


def check_title(title, header, summary):
    advice, size = summary["recommendation"], summary["recommendation"]["batch_size"]
    if size is None:
        complete = summary["status"] == "complete"
        assert title == (
            "This study finds no batch size for tiny."
            if complete
            else "No batch size for tiny yet."
        )
        return "none"
    assert f" {size:,} rows per step" in title
    # Nothing is told to be trained that was not.
    assert title.startswith("Predicted, not trained:") == (advice["basis"] == "predicted")
    assert title.startswith("Stay") == (advice["basis"] in ("own", "trained") and size == 8)
    assert title.startswith("Train") == (advice["basis"] == "trained" and size > 8)
    if title.startswith("Stay"):
        assert title.endswith("known to be as good.") == (not advice["known"])
    return title.split()[0]


def check_figures(found, header, summary):
    advice, size = summary["recommendation"], summary["recommendation"]["batch_size"]
    assert ("Batch size" in found) == (size is not None)
    if size is None:
        return
    value, detail = found["Batch size"]
    assert number(value) == size
    assert detail.startswith("trained") == (advice["basis"] == "trained")
    assert detail.startswith("the task's own") == (advice["basis"] == "own")
    assert detail.endswith(f" {advice['samples']:,} rows")
    value, detail = found["Learning rate"]
    factor = {"sqrt": 0.5, "linear": 1.0, "constant": 0.0}[header.task.lr_rule]
    assert number(value) == pytest.approx(0.001 * (size / 8) ** factor, rel=0.005)
    assert ("warmed up" in detail) == (advice["warmup_samples"] > 0)
    runs = {run["batch_size"]: run for run in summary["checked"]}
    assert ("Sample overhead" in found) == ("Steps" in found) == (size in runs)
    if size in runs:
        value, detail = found["Sample overhead"]
        assert number(value) == pytest.approx(100 * runs[size]["overhead"], abs=0.51)
        assert ("below 0%" in detail) == (runs[size]["low"] < -0.333)
        low, high = re.fullmatch(r".*interval (.*) to (.*)", detail).groups()
        assert low == "below 0%" or number(low) == pytest.approx(100 * runs[size]["low"], abs=0.51)
        assert number(high) == pytest.approx(100 * runs[size]["high"], abs=0.51)
        value, detail = found["Steps"]
        assert number(value) == runs[size]["steps"] < number(re.findall(r"[\d,]+", detail)[0])
    check_half_lives(found, header, size)


def check_half_lives(found, header, size):
    task, half_lives = header.task, {}
    if task.beta2:
        half_lives["Adam's second moment"] = size * math.log(0.5) / math.log(task.beta2)
    if task.weight_decay and task.optimizer == "AdamW":
        factor = {"sqrt": 0.5, "linear": 1.0, "constant": 0.0}[task.lr_rule]
        lr = 0.001 * (size / 8) ** factor
        half_lives["the weight decay"] = size * math.log(2) / (lr * task.weight_decay)
    assert [name for name in found if "Half-life" in name] == [
        f"Half-life of {n}" for n in half_lives
    ]
    for name, samples in half_lives.items():
        value, detail = found[f"Half-life of {name}"]
        assert number(value) == round(samples)
        assert ("tokens" in detail) == (task.tokens_per_sample is not None)


def check_verdicts(page, summary):
    table = re.findall(r"<caption>[\d,]+ rows from scratch</caption>(.*?)</table>", page)
    assert bool(table) == bool(summary["checked"])
    rows = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in "".join(table).split("<tr>")[3:]]
    advised = summary["recommendation"]["batch_size"]
    trained = [*summary["checked"]]
    if summary["schedule"] and summary["schedule"]["check"]:
        trained.append(summary["schedule"]["check"])
    assert len(rows) == len(trained)
    for row, run in zip(rows, trained, strict=True):
        verdict = row[-1]
        assert verdict.startswith("within 20%") == run["within"]
        assert (verdict == "diverged") == math.isinf(run["loss"])
        assert (verdict == "not certain") == (not run["within"] and run["low"] <= 0.2)
        assert (verdict == "not within 20%") == (run["low"] > 0.2 and math.isfinite(run["loss"]))
        above = row[0] != "growing" and run["batch_size"] > advised
        assert ("above" in verdict) == (run["within"] and above)
        if run["overhead"] <= 0.2:
            assert number(row[5]) <= 20
        yield verdict


@pytest.mark.usefixtures("no_charts")
@pytest.mark.parametrize("first", range(0, RECORDS, AT_ONCE))
def test_no_page_contradicts_its_summary(first):
    seen: Counter[str] = Counter()
    for seed in range(first, first + AT_ONCE):
        header, journal, summary = random_record(seed)
        page = html.unescape(render(Run(Path(), header, journal, summary)))
        (title,) = re.findall(r"<h1>(.*?)</h1>", page)
        seen[check_title(title, header, summary)] += 1
        check_figures(figures_of(page), header, summary)
        seen.update(check_verdicts(page, summary))
        assert all(line in page for line in summary["words"])
        advised = bool(summary["schedule"] and summary["schedule"]["advised"])
        assert ("<pre" in page) == advised
        assert "have 0 seeds" not in page
    # Red without these, and what is above says nothing.
    assert {"none", "Predicted,", "Stay", "Train"} <= set(seen)
    assert {"within 20%", "not within 20%", "not certain", "diverged"} <= set(seen)
