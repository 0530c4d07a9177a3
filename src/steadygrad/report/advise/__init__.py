"""The page of an ``advise`` run: which batch size, why, and how sure."""

from collections.abc import Iterable
from typing import Any

from steadygrad.record import Run
from steadygrad.report.advise import branches, training, words
from steadygrad.report.advise.data import Advice, gather, percent, percent_interval
from steadygrad.report.advise.scratch import scratch
from steadygrad.report.advise.tables import tables
from steadygrad.report.numbers import interval, show
from steadygrad.report.page import Html, document, el, section
from steadygrad.report.provenance import provenance

__all__ = ["page"]

BASES = {
    "trained": "trained from scratch over",
    "predicted": "predicted from branches and not trained, for",
}


def page(run: Run) -> str:
    """Draws the page; see :func:`steadygrad.report.render`."""
    advice = gather(run)
    title = words.headline(advice)
    numbers = list(tables(advice))
    return document(
        f"{advice.task.name}: {title}",
        _opening(advice, title),
        scratch(advice),
        training.over_training(advice),
        branches.how_measured(advice),
        branches.learning_rate(advice),
        training.the_run(advice),
        section("What this cannot tell you", words.limits(advice)),
        section("Every number", numbers) if numbers else None,
        provenance(run.header),
    )


def _opening(advice: Advice, title: str) -> Html:
    header = advice.header
    parts = ["advise", f"seed {header.settings.seed}", str(header.time.get("created", ""))[:10]]
    kicker = el("p.kicker", el("b", "steadygrad"), " · " + " · ".join(p for p in parts if p))
    sentences, missing = advice.words, words.missing(advice)
    figures = [
        el("div", el("dt", name), el("dd.value", value), el("dd.detail", detail))
        for name, value, detail in _figures(advice)
    ]
    return el(
        "header",
        kicker,
        el("h1", title),
        [el("p.lede", sentences[0])] if sentences else None,
        el("ul.said", (el("li", said) for said in sentences[1:])) if sentences[1:] else None,
        el("dl.figures", figures) if figures else None,
        el("div.note", el("p", missing), role="note") if missing else None,
    )


Figure = tuple[str, str, str]


def _figures(advice: Advice) -> Iterable[Figure]:
    """Name, value and detail of each key figure."""
    found, size = advice.recommendation, advice.batch_size
    if size is not None:
        basis = f"{BASES[found['basis']]} {show(advice.length)} {advice.samples}"
        yield "Batch size", show(size), basis
        warmup = found["warmup_samples"]
        first = f"the first {show(warmup)} {advice.samples}"
        start = f"warmed up from {show(advice.task.lr)} over {first}"
        yield "Learning rate", show(found["lr"]), start if warmup else "the task's own"
    if size is not None and size != advice.base and found["overhead"] is not None:
        yield from _costs(advice, size)
    if found.get("half_life") is not None:
        yield _half_life(advice, found["half_life"])
    yield from _noise(advice)


def _costs(advice: Advice, size: int) -> Iterable[Figure]:
    found, steps, own = advice.recommendation, advice.steps(size), advice.steps(advice.base)
    span = percent_interval(found["low"], found["high"])
    detail = f"more {advice.samples} than batch {show(advice.base)}; 95% interval {span}"
    yield "Sample overhead", percent(found["overhead"]), detail
    if steps and own:
        yield "Steps", show(steps), f"instead of {show(own)} at batch {show(advice.base)}"


def _half_life(advice: Advice, samples: float) -> Figure:
    tokens = advice.task.tokens_per_sample
    also = f", {show(samples * tokens)} tokens" if tokens else ""
    kept = "kept from the task" if advice.header.settings.keep_half_life else "at this batch size"
    name, unit = "Half-life of Adam's second moment", f"{advice.samples}{also}, {kept}"
    return name, show(round(samples)), unit


def _noise(advice: Advice) -> Iterable[Figure]:
    events: list[Any] = [point.noise for point in advice.points if point.noise]
    if not events:
        return
    last = events[-1]
    if not last.resolved:
        bound = f"at least {show(last.low)}; " if last.low > 0 else ""
        yield "Gradient noise scale", "unresolved", f"{bound}too few measurements to tell"
        return
    span = f"95% interval {interval(last.low, last.high)}"
    yield "Gradient noise scale", show(last.value), f"{span}; no advice on a batch size"
