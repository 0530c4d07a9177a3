"""The findings in words: one template for each kind, the answer, the remarks, and the table."""

import math
from collections.abc import Sequence
from functools import singledispatch
from itertools import groupby
from statistics import fmean

from steadygrad.studies.compare import schema
from steadygrad.studies.compare.schema import LEAST_RATIO, MOST_RATIO, Ratio, Summary, Verdict
from steadygrad.studies.schema import Finding, Table
from steadygrad.studies.text import ENDS, listed, loss, plural, show

# What is done otherwise with an optimizer, by what it shows.
NOTES = {
    "own_schedule": "Its schedule is its own: no warm-up and no decay were applied; it was "
    "evaluated at the weights of its eval().",
    "own_rate": "It estimates its learning rate: there is no ladder, and all runs have its default "
    "factor.",
    "matrices": "It takes matrices only: AdamW has embeddings, the last layer and the rest, at "
    "1e-3 where the other has its default rate, and in proportion.",
}


def answer(s: Summary) -> str:
    """The answer in one sentence; one that hangs on a condition opens with it."""
    rows = [found for found in s.findings if isinstance(found, Verdict)]
    if not rows:
        return "No optimizer can be judged yet: a verdict needs two seeds of each."
    better = [row for row in rows if row.verdict == "better"]
    text = said(s.flips[0], s) if s.flips else _better(better, s) if better else _stay(rows, s)
    edges = [found for found in s.findings if isinstance(found, schema.Edge) and found.hangs]
    before = [] if s.status == "complete" else ["Preliminary: "]
    if edges and not s.flips:
        names = listed(dict.fromkeys(s.optimizers[edge.optimizer] for edge in edges))
        why = "as the best learning rate is the last one tried"
        before.append(f"{names} may be better than shown, {why}; so far, ")
    return "".join([*before, text.replace("Stay with", "stay with", 1) if before else text])


def _better(rows: Sequence[Verdict], s: Summary) -> str:
    """Optimizers that are better, with learning rates, or with batch sizes where several are."""
    places, several = dict[str, list[str]](), _are_several(s)
    for row in rows:
        place = f"{row.multiple * s.batch_size:,}" if several else f"{row.lr:.3g}"
        places.setdefault(s.optimizers[row.optimizer], []).append(place)
    what, row = "batch size" if several else "learning rate", rows[0]
    names = listed(f"{name} ({what} {listed(found)})" for name, found in places.items())
    adamw = "AdamW" if several else f"AdamW ({row.baseline_lr:.3g})"
    text = f"better than {adamw} after {row.samples:,} {plural(s.sample)}"
    if len(places) > 1:
        return f"{names} are {text}; they were not tested against each other."
    losses = f"{row.loss:.4g} against {row.baseline_loss:.4g} on {len(row.losses)} fresh seeds"
    return f"{names} is {text}{'' if several else f': validation loss {losses}'}."


def _stay(rows: Sequence[Verdict], s: Summary) -> str:
    """No optimizer is better."""
    worst = max(rows, key=lambda row: row.baseline_lost)
    others = "no other optimizer is shown to be better"
    after = f"after {worst.samples:,} {plural(s.sample)}"
    if worst.baseline_lost:
        at = f"{worst.baseline_lost} of {len(worst.losses)} seeds{_at(worst.multiple, s)}"
        return f"AdamW diverged on {at}, and {others} {after}."
    if all(row.verdict == "worse" for row in rows):
        names = dict.fromkeys(s.optimizers[row.optimizer] for row in rows)
        others = f"it is better than {listed(names)}"
    rate = "" if _are_several(s) else f" at learning rate {worst.baseline_lr:.3g}"
    return f"Stay with AdamW{rate}: {others} {after}."


def remarks(s: Summary) -> tuple[str, ...]:
    """At most three more sentences, the most important first."""
    end = [f"The study {ENDS[s.status]}; --resume continues it."] if s.status in ENDS else []
    if s.flips:
        flipped = {flip.optimizer for flip in s.flips}
        rows = [found for found in s.findings if isinstance(found, Verdict)]
        rows = [r for r in rows if r.verdict == "better" and r.optimizer not in flipped]
        end += [_better(rows, s)] if rows else []
    texts = [said(found, s) for found in s.findings if found not in s.flips[:1]]
    return tuple([*end, *filter(None, texts)][:3])


@singledispatch
def said(found: Finding, s: Summary) -> str:
    """A finding in words; empty where the answer or the table says it."""
    raise NotImplementedError


@said.register
def _flip(found: schema.Flip, s: Summary) -> str:
    short, long = (f"{samples:,}" for samples in found.samples)
    name, at = s.optimizers[found.optimizer], _at(found.multiple, s)
    verdicts = f"{found.short} than AdamW after {short} {plural(s.sample)}, and {found.long} after"
    return f"The order changes with the length of the training: {name} is {verdicts} {long}{at}."


@said.register
def _edge(found: schema.Edge, s: Summary) -> str:
    if found.hangs and not s.flips:
        return ""
    name = f"{s.optimizers[found.optimizer]}{_at(found.multiple, s)}"
    return f"The best learning rate of {name} is the last one tried: a better one may lie beyond."


@said.register
def _brackets(found: schema.Brackets, s: Summary) -> str:
    sizes = (
        f"{s.optimizers[name]} " + (f"{low:,} to {high:,}" if high else f"at least {low:,}")
        for name, (low, high) in found.sizes.items()
    )
    more = f"20% more {plural(s.sample)} than at {s.batch_size:,}"
    return f"Critical batch size ({more}): {listed(sizes)}."


@said.register
def _verdict(row: Verdict, s: Summary) -> str:
    """Diverged seeds, the time of a better optimizer, or the seeds that would decide."""
    name, at, seeds = s.optimizers[row.optimizer], _at(row.multiple, s), len(row.losses)
    if row.lost:
        return f"{name} diverged on {row.lost} of {seeds} seeds{at}, AdamW on {row.baseline_lost}."
    if row.verdict == "better" and row.time_ratio:
        low, high, step = row.time_ratio.low, row.time_ratio.high, s.costs[row.optimizer].time_ratio
        time = "and time" if high < 1 else "but no time" if low >= 1 else "and perhaps time"
        saves, same = (
            f"{name} saves {plural(s.sample)} {time}{at}",
            f"the same loss {ratios(row)[1]}",
        )
        return f"{saves}: a step takes {step:.2f} times as long as AdamW's, and {same} times."
    if row.verdict != "cannot tell" or row.baseline_lost:
        return ""
    text = f"{name} cannot be told from AdamW{at} on {seeds} seeds"
    if row.rates_limit:
        error = "within the error of the tuned learning rates"
        return f"{text}; more seeds would not help, as the difference is {error}."
    more = f"about {row.needed:,}" if row.needed else "not even 8,000"
    return f"{text}; {more} would tell, if the true difference is {signed(row.mean)}."


def too_little(s: Summary) -> str | None:
    """Without a verdict nothing is said."""
    if s.verdicts or s.rise:
        return None
    return "The budget was over before two seeds of the verdicts were trained"


def table(s: Summary) -> Table | None:
    """The verdicts after the longest trainings; None where there is none."""
    rows, several = list[tuple[str, ...]](), _are_several(s)
    longest = max((row.samples for row in s.verdicts), default=0)
    for multiple, own in groupby(s.verdicts, lambda row: row.multiple):
        judged = [row for row in own if row.samples == longest]
        size = (show(multiple * s.batch_size),) * several
        base = {seed: value for row in judged for seed, value in row.baseline_losses.items()}
        for row in judged[:1]:
            mean = loss(fmean(base.values()))
            rows.append(("AdamW", "baseline", *size, show(row.baseline_lr), "–", mean, "–"))
        for row in judged:
            numbers = show(row.lr), difference(row), loss(row.loss), ratios(row)[0]
            rows.append((s.optimizers[row.optimizer], row.verdict, *size, *numbers))
    if not rows:
        return None
    title = f"{s.task} after {longest:,} {plural(s.sample)}, with confidence intervals"
    heads = ("optimizer", "verdict", *("batch size",) * several, "learning rate", "difference")
    heads += ("loss", "AdamW needs (× samples)")
    return Table(title, heads, tuple(rows), text_columns=2)


def difference(row: Verdict) -> str:
    """Mean paired difference from AdamW with its confidence interval."""
    if math.isfinite(row.mean):
        return f"{signed(row.mean)} ({signed(row.low)} to {signed(row.high)})"
    name, lost = ("", row.lost) if row.lost else ("AdamW ", row.baseline_lost)
    return f"{name}diverged on {lost} of {len(row.losses)} seeds"


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


def _are_several(s: Summary) -> bool:
    return len({row.multiple for row in s.tuned}) > 1


def _at(multiple: int, s: Summary) -> str:
    return f" at batch size {multiple * s.batch_size:,}" if _are_several(s) else ""
