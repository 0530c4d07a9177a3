"""The findings in words: one template for each kind, the answer, the remarks, and the table."""

from collections.abc import Sequence
from itertools import groupby
from statistics import fmean

from steadygrad.studies.compare.schema import LEAST_RATIO, MOST_RATIO, Edge, Ratio, Summary, Verdict
from steadygrad.studies.schema import Table
from steadygrad.studies.text import listed, loss, plural, show, unfinished

# What is done otherwise with an optimizer, by what it shows.
NOTES = {
    "own_schedule": "Its schedule is its own: no warm-up and no decay were applied; it was "
    "evaluated at the weights of its eval().",
    "own_rate": "It estimates its learning rate: there is no ladder, and all runs have its default "
    "factor.",
}


def answer(s: Summary) -> str:
    """The answer in one sentence; one that hangs on a condition opens with it."""
    if not s.verdicts:
        return "No optimizer can be judged yet: there are too few seeds of each for a verdict."
    better = [row for row in s.verdicts if row.verdict == "better"]
    text = _better(better, s) if better else _stay(s.verdicts, s)
    edges = [found for found in s.findings if isinstance(found, Edge) and found.hangs]
    before = "" if s.status == "complete" else "Preliminary: "
    if edges:
        names = listed(dict.fromkeys(s.optimizers[edge.optimizer] for edge in edges))
        why = "as the best learning rate is the last one tried"
        before += f"{names} may be better than shown, {why}; so far, "
    return before + (text.replace("Stay with", "stay with", 1) if before else text)


def _better(rows: Sequence[Verdict], s: Summary) -> str:
    """Optimizers that are better, with their learning rates."""
    names = listed(f"{_named(row, s)} (learning rate {row.lr:.3g})" for row in rows)
    row = rows[0]
    adamw = f"AdamW{'' if _are_several(s) else f' ({row.baseline_lr:.3g})'}"
    text = f"better than {adamw} after {s.samples:,} {plural(s.sample)}"
    if len(rows) > 1:
        return f"{names} are {text}; they were not tested against each other."
    means = f"{fmean(row.losses.values()):.4g} against {fmean(row.baseline_losses.values()):.4g}"
    losses = "" if row.failed else f": validation loss {means} on {row.pairs} fresh seeds"
    return f"{names} is {text}{losses}."


def _stay(rows: Sequence[Verdict], s: Summary) -> str:
    """No optimizer is better."""
    worst = max(rows, key=lambda row: row.baseline_lost)
    others = "no other optimizer is shown to be better"
    after = f"after {s.samples:,} {plural(s.sample)}"
    if worst.baseline_lost:
        at = f"{worst.baseline_lost} of {worst.pairs} seeds{_at(worst.batch_size, s)}"
        return f"AdamW diverged on {at}, and {others} {after}."
    if all(row.verdict == "worse" for row in rows):
        names = dict.fromkeys(s.optimizers[row.optimizer] for row in rows)
        others = f"it is better than {listed(names)}"
    rate = "" if _are_several(s) else f" at learning rate {worst.baseline_lr:.3g}"
    return f"Stay with AdamW{rate}: {others} {after}."


def remarks(s: Summary) -> tuple[str, ...]:
    """At most three more sentences, the most important first."""
    texts = [said(found, s) for found in s.findings]
    return tuple([*unfinished(s.status), *filter(None, texts)][:3])


def said(found: Edge | Verdict, s: Summary) -> str:
    """A finding in words; empty where the answer or the table says it."""
    name = _named(found, s)
    if isinstance(found, Edge):
        beyond = "is the last one tried: a better one may lie beyond"
        return "" if found.hangs else f"The best learning rate of {name} {beyond}."
    if found.failed:
        lost = f"{found.lost} of {found.pairs} seeds, AdamW on {found.baseline_lost}"
        return f"{name} diverged on {lost}."
    if found.verdict == "better" and found.time_ratio:
        low, high = found.time_ratio.low, found.time_ratio.high
        time = "and time" if high < 1 else "but no time" if low >= 1 else "and perhaps time"
        same = f"the same loss takes roughly {ratios(found)[1]} times AdamW's time"
        return f"{name} saves {plural(s.sample)} {time}: {same}."
    if found.verdict != "cannot tell":
        return ""
    text = f"{name} cannot be told from AdamW on {found.pairs} seeds"
    if found.rates_limit:
        error = "within the error of the tuned learning rates"
        return f"{text}; more seeds would not help, as the difference is {error}."
    more = f"about {found.needed:,}" if found.needed else "not even 10,000"
    return f"{text}; {more} would tell, if the true difference is {signed(found.mean)}."


def too_little(s: Summary) -> str | None:
    """Without a verdict nothing is said."""
    why = "The budget was over before enough seeds for a verdict were trained"
    return None if s.verdicts or s.rise else why


def table(s: Summary) -> Table | None:
    """The verdicts; None where there is none."""
    rows, several = list[tuple[str, ...]](), _are_several(s)
    for batch_size, own in groupby(s.verdicts, lambda row: row.batch_size):
        judged, size = [*own], (show(batch_size),) * several
        base = max(judged, key=lambda row: row.pairs)
        numbers = show(base.baseline_lr), "–", loss(fmean(base.baseline_losses.values())), "–"
        rows.append(("AdamW", "baseline", *size, *numbers))
        for row in judged:
            mean = loss(fmean(row.losses.values()))
            numbers = show(row.lr), difference(row), mean, ratios(row)[0]
            rows.append((s.optimizers[row.optimizer], row.verdict, *size, *numbers))
    if not rows:
        return None
    title = f"{s.task} after {s.samples:,} {plural(s.sample)}, with confidence intervals"
    heads = ("optimizer", "verdict", *("batch size",) * several, "learning rate", "difference")
    heads += ("loss", "AdamW needs (× samples)")
    return Table(title, heads, tuple(rows), text_columns=2)


def difference(row: Verdict) -> str:
    """Mean paired difference from AdamW with its confidence interval."""
    if not row.failed:
        return f"{signed(row.mean)} ({signed(row.low)} to {signed(row.high)})"
    name, lost = ("", row.lost) if row.lost else ("AdamW ", row.baseline_lost)
    return f"{name}diverged on {lost} of {row.pairs} seeds"


def signed(value: float) -> str:
    """A number with its sign."""
    return f"{'+' if value > 0 else ''}{show(value)}"


def ratios(row: Verdict) -> tuple[str, str]:
    """AdamW's samples, and the time over AdamW's, for the same loss; bounds are said as bounds."""
    samples, time = row.sample_ratio, row.time_ratio
    if samples is None:
        return "–", "–"
    ends = samples.value, samples.low, samples.high
    signs = ["≤ " if x <= LEAST_RATIO else "≥ " if x >= MOST_RATIO else "" for x in ends]
    # The more samples, the less time.
    value, high, low = ({"≤ ": "≥ ", "≥ ": "≤ "}.get(sign, "") for sign in signs)
    return _bounded(samples, *signs), _bounded(time, value, low, high) if time else "–"


def _bounded(ratio: Ratio, value: str, low: str, high: str) -> str:
    return f"{value}{ratio.value:.2f} ({low}{ratio.low:.2f} to {high}{ratio.high:.2f})"


def _named(found: Verdict | Edge, s: Summary) -> str:
    return f"{s.optimizers[found.optimizer]}{_at(found.batch_size, s)}"


def _at(batch_size: int, s: Summary) -> str:
    return f" at batch size {batch_size:,}" if _are_several(s) else ""


def _are_several(s: Summary) -> bool:
    return len({row.batch_size for row in s.tuned}) > 1
