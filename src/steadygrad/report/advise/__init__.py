"""The page of an ``advise`` run: which batch size, why, and how sure."""

import math
from collections.abc import Iterable, Mapping
from itertools import pairwise

from steadygrad.record import Run
from steadygrad.report.advise import branches, charts, words
from steadygrad.report.advise.data import Advice, batch_of, gather, rows_of
from steadygrad.report.advise.tables import tables
from steadygrad.report.numbers import interval, number, show
from steadygrad.report.page import Html, document, el, figure, section, table
from steadygrad.report.provenance import inside, provenance

__all__ = ["page"]


def page(run: Run) -> str:
    """Draws the page; see :func:`steadygrad.report.render`."""
    advice = gather(run)
    title = words.headline(advice)
    return document(
        f"{advice.name}: {title}",
        _opening(advice, title, run.truncated),
        _over_training(advice),
        _branches(advice),
        _tradeoff(advice),
        _training(advice),
        _all_numbers(advice),
        section("What this cannot tell you", words.limits(advice)),
        provenance(run.header),
    )


def _opening(advice: Advice, title: str, truncated: bool) -> Html:
    created = str(inside(advice.header, "time", "created") or "")[:10]
    parts = ["advise", f"seed {show(advice.header.get('seed'))}", created]
    kicker = el("p.kicker", el("b", "steadygrad"), " · " + " · ".join(p for p in parts if p))
    given = advice.recommendation.get("words")
    sentences = [str(word) for word in given] if isinstance(given, list) else []
    missing = words.missing(advice, truncated)
    return el(
        "header",
        kicker,
        el("h1", title),
        [el("p.lede", sentences[0])] if sentences else None,
        el("ul.said", (el("li", said) for said in sentences[1:])) if sentences[1:] else None,
        _key_figures(advice),
        el("div.note", el("p", missing), role="note") if missing else None,
    )


def _key_figures(advice: Advice) -> Html | None:
    found = [
        _size_figure(advice),
        _rate_figure(advice),
        _cost_figure(advice),
        _noise_figure(advice),
    ]
    shown = [
        el("div", el("dt", name), el("dd.value", value), el("dd.detail", detail))
        for name, value, detail in (entry for entry in found if entry is not None)
    ]
    return el("dl.figures", shown) if shown else None


Figure = tuple[str, str, str] | None


def _size_figure(advice: Advice) -> Figure:
    size = advice.batch_size
    if not size > 0:
        return None
    span = interval(advice.recommendation.get("low"), advice.recommendation.get("high"), 2)
    between = f"; interval {span}" if span != "–" else ""
    return "Batch size", show(int(size)), f"{advice.count(size)}, measured by branches{between}"


def _rate_figure(advice: Advice) -> Figure:
    rate = number(advice.recommendation.get("lr"))
    if not rate > 0:
        return None
    rule = {"sqrt": "square-root", "linear": "linear", "constant": "constant"}
    name = str(advice.settings.get("lr_rule"))
    start = f"{show(advice.settings.get('lr'))} at batch {show(advice.settings.get('batch_size'))}"
    return "Learning rate", show(rate), f"{rule.get(name, name)} rule, from {start}"


def _cost_figure(advice: Advice) -> Figure:
    base, size = number(advice.settings.get("batch_size")), advice.batch_size
    rows = {batch_of(row): row for row in rows_of(advice.tradeoff, "rows")}
    source, more = "measured", _between({b: number(r.get("excess")) for b, r in rows.items()}, size)
    if not math.isfinite(more):
        ratios = {b: number(row.get("samples_ratio")) for b, row in rows.items()}
        least = ratios.get(base, math.nan)
        source, more = "by the fitted curve", _between(ratios, size) / least - 1 if least else -1
    if not (base > 0 and size > base and -1 < more < math.inf):
        return None
    fewer = size / base / (1 + more)
    extra = f"{show(abs(100 * more), 2)}% {'more' if more >= 0 else 'fewer'}"
    against = f"than at batch {show(base)}, for {extra} {advice.samples}"
    return "Steps", f"{show(fewer, 2)}× fewer", f"{against}, {source}"


def _between(values: Mapping[float, float], size: float) -> float:
    """A value at any batch size, linear between those that were tried; NaN outside of them."""
    if size in values:
        return values[size]
    for (low, below), (high, above) in pairwise(sorted(values.items())):
        if low < size < high:
            return below + (above - below) * (size - low) / (high - low)
    return math.nan


def _noise_figure(advice: Advice) -> Figure:
    events = [point.noise for point in advice.points if point.noise]
    if not events:
        return None
    last, detail = events[-1], "at the last point; a diagnostic, not a batch size"
    if not last.get("resolved"):
        low = number(last.get("low"))
        bound = f"at least {show(low)}; " if 0 < low < math.inf else ""
        return "Gradient noise scale", "unresolved", bound + "too few measurements to tell"
    span = interval(last.get("low"), last.get("high"))
    return "Gradient noise scale", show(number(last.get("value"))), f"{span}, {detail}"


def _over_training(advice: Advice) -> Html | None:
    if not any(point.samples > 0 and (point.noise or point.critical) for point in advice.points):
        return None
    chart = figure(charts.scales(advice), *words.over_training(advice))
    return section("The batch size that pays, over training", chart, _schedule(advice))


def _schedule(advice: Advice) -> Iterable[Html]:
    rows = advice.schedule
    if not rows:
        return
    starts = [number(row.get("from_samples")) for row in rows]
    ends = [*starts[1:], number(advice.recommendation.get("samples"))]
    cells = [
        [*(show(row.get(key)) for key in ("from_samples", "batch_size", "lr")), show(steps)]
        for row, start, end in zip(rows, starts, ends, strict=True)
        for steps in [_whole((end - start) / batch_of(row))]
    ]
    head = [f"from {advice.sample}", "batch size", "learning rate", "steps"]
    yield table("A schedule that follows it", head, cells)
    megatron = advice.recommendation.get("megatron")
    if megatron:
        yield el("p.more", "The same for Megatron-style launchers: ", el("code", str(megatron)))


def _whole(steps: float) -> float:
    return round(steps) if 0 < steps < math.inf else math.nan


def _branches(advice: Advice) -> Html | None:
    if not any(point.batch_sizes for point in advice.points):
        return None
    chart = figure(branches.branches(advice), *words.branches(advice))
    return section("How it was measured", chart)


def _tradeoff(advice: Advice) -> Html | None:
    critical = number(advice.tradeoff.get("critical_batch"))
    if not 0 < critical < math.inf:
        return None
    chart = figure(branches.tradeoff(advice), *words.tradeoff(advice, critical))
    return section("What a larger batch costs", chart)


def _training(advice: Advice) -> Html | None:
    if not advice.training:
        return None
    chart = figure(charts.training(advice), *words.training(advice))
    return section("The run itself", chart)


def _all_numbers(advice: Advice) -> Html | None:
    shown = list(tables(advice))
    return section("Every number", shown) if shown else None
