"""Reads the findings of a study back, and compares every number with the record."""

import math
import re

import pytest

from steadygrad.studies.advise.schema import Branch, Noise, Point, Scratch
from tests.unit.studies.advise.sentence_forms import FORMS, N


def number(text):
    return float(text.replace(",", ""))


class Sentences:
    """The findings of one record, one check for each form of sentence."""

    def __init__(self, header, journal, summary):
        self.header, self.journal, self.summary = header, journal, summary
        self.plan, self.task, self.tolerance = header.plan, header.task, header.settings.tolerance
        self.advice, self.going, self.schedule = (
            summary[name] for name in ("recommendation", "going_on", "schedule")
        )
        self.checked = {run["batch_size"]: run for run in summary["checked"]}
        self.points = {point["samples"]: point for point in summary["points"]}

    def check(self):
        """Checks all; returns the forms that were found."""
        found = [self.check_one(line) for line in self.summary["words"]]
        kinds = [form.split()[0] for form in found]
        assert len(kinds) == len(set(kinds)) <= 6
        assert ("going" in kinds) == (self.going is not None)
        assert ("growing" in kinds) == (self.schedule is not None)
        assert ("noise" in kinds) == bool(self.journal.select(Noise))
        self.nothing_above_what_diverged()
        return found

    def check_one(self, line):
        for form, pattern in FORMS.items():
            match = re.fullmatch(pattern, line)
            if match:
                getattr(self, f"say_{form.replace(' ', '_')}")(*match.groups())
                return form
        raise AssertionError(f"no form of sentence is {line!r}")

    def lr(self, size):
        power = {"sqrt": 0.5, "linear": 1.0, "constant": 0.0}[self.task.lr_rule]
        return self.task.lr * (size / 8) ** power

    def settings(self, size, lr, warmup):
        assert number(size) == self.advice["batch_size"]
        assert float(lr) == pytest.approx(self.lr(number(size)), rel=0.005)
        assert self.advice["lr"] == pytest.approx(self.lr(number(size)))
        assert self.advice["warmup_samples"] == number(warmup or "0") == self.warmed()
        self.warmed_as_recorded("constant", number(size))

    def warmed(self):
        """Until the first point, and over a quarter of the run at most."""
        quarter = self.advice["samples"] // 4
        most = quarter - quarter % 8
        return 0 if self.task.lr_rule == "constant" else min(self.plan.points[0], most)

    def warmed_as_recorded(self, purpose, size):
        runs = [r for r in self.journal.select(Scratch) if (r.purpose, r.rate) == (purpose, 1)]
        runs = [r for r in runs if r.batch_size == size != 8]
        assert {r.warmup_samples for r in runs} <= {self.warmed()}

    def length(self, text):
        assert number(text) == self.advice["samples"]
        # Wherever runs from scratch were recorded they are as long.
        for run in self.journal.select(Scratch):
            if run.rate == 1:
                assert 0.9 * number(text) < run.samples <= number(text)

    def needs(self, text, run):
        if math.isinf(run["loss"]):
            assert text == "diverged"
            return
        pattern = (
            rf"needs (at least )?(no|\d+%) more rows than batch {N} for the same loss"
            r"(?: \(95% interval (below 0%|-?\d+%) to (-?\d+%|300% or more)\))?"
        )
        least, extra, base, low, high = re.fullmatch(pattern, text).groups()
        assert number(base) == 8
        assert bool(least) == (low is None) == (run["overhead"] >= 3)
        told = 0 if extra == "no" else int(extra[:-1])
        assert told == pytest.approx(max(0, 100 * run["overhead"]), abs=0.51)
        if low is not None:
            assert (low == "below 0%") == (run["low"] < -0.333)
            assert low == "below 0%" or int(low[:-1]) == pytest.approx(100 * run["low"], abs=0.51)
            assert (high == "300% or more") == (run["high"] >= 3)
            assert "more" in high or int(high[:-1]) == pytest.approx(100 * run["high"], abs=0.51)

    def steps(self, percent, size, steps):
        whole = self.advice["samples"] // number(size)
        assert int(percent) == pytest.approx(100 * steps / whole, abs=0.51)

    def other(self, text, sure, sure_needs, unsure, unsure_needs, seeds):
        failed = [size for size, run in self.checked.items() if not run["within"]]
        tried = sure or unsure
        if tried is None:
            assert not failed
            assert all(size <= self.advice["batch_size"] for size in self.checked)
            return
        size = number(tried)
        run = self.checked[size]
        assert size == min(failed) > self.advice["batch_size"]
        self.needs(sure_needs or unsure_needs, run)
        assert (sure is not None) == (run["low"] > self.tolerance)
        if unsure:
            runs = [r for r in self.journal.select(Scratch) if r.batch_size == size]
            assert int(seeds) == len([r for r in runs if r.purpose == "constant"])

    def say_trained(self, length, size, lr, warmup, needs, percent, base, *other):
        self.length(length)
        self.settings(size, lr, warmup)
        run = self.checked[number(size)]
        assert run["within"]
        assert run["overhead"] <= self.tolerance
        assert self.advice["basis"] == "trained"
        recorded = [r for r in self.journal.select(Scratch) if r.batch_size == run["batch_size"]]
        recorded = [r for r in recorded if r.purpose == "constant"]
        assert run["loss"] == pytest.approx(sum(r.loss for r in recorded) / len(recorded))
        self.needs(needs, run)
        assert number(base) == 8
        self.steps(percent, base, recorded[0].steps)
        self.other(*other)

    def say_stay(self, length, base, *rest):
        *other, untried = rest
        self.length(length)
        assert number(base) == self.advice["batch_size"] == 8
        assert self.advice["basis"] == "trained"
        self.nothing_measured()
        self.other(*other)
        assert not other[0].startswith("No")
        (size,) = (number(each) for each in (other[1], other[3]) if each)
        sizes = {n for n in (12, 16, 24) if n % self.header.runtime.world_size == 0}
        nearest = size == min(sizes)
        sure = self.checked[size]["low"] > self.tolerance
        assert self.advice["known"] == (sure and nearest)
        assert bool(untried) == (sure and not nearest)

    def say_own(self, length, base, percent, budget):
        self.length(length)
        assert bool(budget) == (self.plan.candidates == 0)
        assert number(base) == self.advice["batch_size"] == 8
        assert int(percent) == 100 * self.tolerance
        assert not self.checked
        assert self.advice["basis"] == "own"
        assert not self.advice["known"]
        self.nothing_measured()

    def nothing_measured(self):
        assert [self.advice[name] for name in ("overhead", "low", "high")] == [None] * 3

    def say_predicted(self, length, size, lr, warmup, percent, base, budget):
        self.length(length)
        self.settings(size, lr, warmup)
        assert int(percent) == 100 * self.tolerance
        assert number(base) == 8 < number(size)
        assert bool(budget) == (self.plan.candidates == 0)
        self.only_predicted()

    def only_predicted(self):
        assert self.advice["basis"] == "predicted"
        assert not self.checked
        self.nothing_measured()

    def say_exhausted(self):
        assert self.advice["batch_size"] is None
        assert any(point["resolved"] for point in self.points.values())
        for point in self.journal.select(Point):
            if self.points[point.samples]["critical"]:
                late = [y for x, y in point.curve if x >= point.samples / 2]
                assert late[0] - late[-1] < 0.5 * abs(late[0])

    def say_flat(self, said):
        self.level(said, [point for point in self.points.values() if point["critical"]])
        assert self.advice["batch_size"] is None
        assert not any(point["resolved"] for point in self.points.values())
        assert any(point["critical"] for point in self.points.values())

    def level(self, said, flat):
        falls = [point["critical"]["fall"] for point in flat]
        assert all(fall < 3 for fall in falls)
        assert (said == "does not fall") == all(fall <= 0 for fall in falls)

    def say_nothing(self):
        assert not any(point["critical"] for point in self.points.values())

    def _from(self, start, size, lr, *, known):
        """The last point that tells, with its overheads up to a batch size."""
        last = max(n for n, point in self.points.items() if point["resolved"])
        assert number(start) == last == self.going["from_samples"]
        assert number(size) == self.going["batch_size"]
        assert float(lr) == pytest.approx(self.lr(number(size)), rel=0.005)
        critical = self.points[last]["critical"]
        assert self.going["known"] == critical["known"] == known
        return critical

    def at_most(self, critical, size, percent, over):
        assert int(percent) == 100 * self.tolerance
        assert number(over) == self.going["samples"]
        tried = {int(n): overhead for n, overhead in critical["overhead"].items()}
        assert all(v <= self.tolerance for n, v in tried.items() if n <= number(size))

    def say_going_unknown(self, start, low, high, upper, size, lr):
        critical = self._from(start, size, lr, known=False)
        self.interval(critical, low, high, upper)
        assert number(size) <= max(8, critical["low"])

    def interval(self, critical, low, high, upper):
        assert number(low) == pytest.approx(critical["low"], abs=0.51)
        assert (high == "no limit") == math.isinf(critical["high"])
        assert upper is None or number(upper) == pytest.approx(critical["high"], abs=0.51)

    def say_going_bounded(self, start, size, lr, percent, over, lost):
        critical = self._from(start, size, lr, known=True)
        self.at_most(critical, size, percent, over)
        assert number(lost) == self.lowest_diverged() <= critical["within"]

    def say_going_all(self, start, size, lr, percent, over):
        critical = self._from(start, size, lr, known=True)
        self.at_most(critical, size, percent, over)
        assert number(size) == max(map(int, critical["overhead"]))

    def say_going(self, start, size, lr, percent, over, beyond, why, limit, low, high, upper):
        critical = self._from(start, size, lr, known=True)
        self.at_most(critical, size, percent, over)
        self.interval(critical, low, high, upper)
        assert number(limit) == pytest.approx(critical["value"], abs=0.51)
        tried = {int(n): overhead for n, overhead in critical["overhead"].items()}
        assert number(beyond) == min(n for n, v in tried.items() if v > self.tolerance)
        assert (why == "diverged") == (number(beyond) == critical["diverged"])

    def stages(self, text):
        told = [tuple(map(number, each.split(" from "))) for each in text.split(", ")]
        rows = self.schedule["stages"]
        assert told == [(row["batch_size"], row["from_samples"]) for row in rows]
        at = [row["from_samples"] for row in rows] + [self.advice["samples"]]
        sizes = [row["batch_size"] for row in rows]
        whole = sum((b - a) // n for a, b, n in zip(at, at[1:], sizes, strict=False))
        assert self.schedule["steps"] == whole < self.advice["samples"] / self.advice["batch_size"]

    def say_growing_predicted(self, stages, percent, size):
        self.stages(stages)
        assert self.schedule["basis"] == "predicted"
        assert not self.schedule["advised"]
        self.fewer(percent, size)

    def fewer(self, percent, size):
        assert number(size) == self.advice["batch_size"]
        self.steps(percent, size, self.schedule["steps"])

    def say_growing(self, stages, needs, percent, size):
        self.stages(stages)
        assert self.schedule["advised"]
        own = self.schedule["stages"][0]["batch_size"] == 8
        assert self.schedule["warmup_samples"] == (0 if own else self.warmed())
        assert self.schedule["check"]["warmup_samples"] == self.warmed()
        assert self.schedule["check"]["overhead"] <= self.tolerance
        self.needs(needs, self.schedule["check"])
        self.fewer(percent, size)

    def say_growing_failed(self, stages, needs):
        self.stages(stages)
        assert not self.schedule["advised"]
        self.needs(needs, self.schedule["check"])

    def told(self, losses):
        """Losses by learning rate."""
        pairs = (each.split(": ") for each in losses.split(", "))
        return {float(lr): math.inf if loss == "diverged" else float(loss) for lr, loss in pairs}

    def nothing_of(self, said):
        """The verdict is of runs that may be longer than the one that is advised."""
        length = self.advice["samples"]
        elsewhere = length is not None and length != self.summary["rate"]["samples"]
        assert elsewhere == (said is not None)
        assert said is None or number(said) == length

    def tried(self, lr, whole, late, length, base, losses):
        assert float(lr) == pytest.approx(self.task.lr)
        assert late == "40"
        assert number(whole) == number(length) == self.judged()
        assert number(base) == 8
        told = self.told(losses)
        runs = [r for r in self.journal.select(Scratch) if r.rate != 1]
        assert len(told) == len(runs) + 1
        for run in runs:
            lr = float(f"{run.rate * self.task.lr:.3g}")
            # Means over the marks of which the verdict is.
            late = [loss for _, loss in run.curve[-5:]]
            assert told[lr] == pytest.approx(sum(late) / len(late), rel=0.001)
        return self.summary["rate"]["verdict"]

    def judged(self):
        """Samples of the runs by which the learning rate is judged."""
        if self.task.lr_decay == "none":
            return self.plan.length
        found = self.summary["rate"]["samples"]
        # As long as the runs from scratch that it is compared with.
        own = [r for r in self.journal.select(Scratch) if (r.batch_size, r.rate) == (8, 1)]
        assert any(0.9 * found < run.samples <= found for run in own)
        return found

    def others(self, text):
        """Rates beside the task's own, all that were tried."""
        runs = [r for r in self.journal.select(Scratch) if r.rate != 1]
        told = [float(lr) for lr in text.split(" and ")]
        assert told == sorted(float(f"{r.rate * self.task.lr:.3g}") for r in runs)
        assert self.summary["rate"]["verdict"] == ""
        return runs

    def say_rate_same(self, lr, late, length, others, own):
        assert float(lr) == float(own) == pytest.approx(self.task.lr)
        assert (late, number(length)) == ("40", self.judged())
        first, *rest = [[loss for _, loss in run.curve[-5:]] for run in self.others(others)]
        assert all(losses == pytest.approx(first) for losses in rest)

    def say_rate_rising(self, lr, late, length):
        assert float(lr) == pytest.approx(self.task.lr)
        assert (late, number(length)) == ("40", self.judged())
        losses = [loss for _, loss in self.journal.select(Point)[-1].curve]
        # The last five evaluations are one in the study.
        assert min(losses[-4:]) > max(losses[:3])
        assert self.summary["rate"]["verdict"] == ""

    def say_rate_fits(self, lr, whole, percent, *tried):
        *tried, said = tried
        assert self.tried(lr, whole, *tried) == "fits"
        assert int(percent) == 10
        self.nothing_of(said)

    def say_rate_elsewhere(self, lr, verdict, *tried):
        *tried, said = tried
        assert self.tried(lr, *tried) == verdict
        assert said is not None
        self.nothing_of(said)

    def say_rate(self, lr, verdict, whole, late, length, base, losses, bound, other):
        assert self.tried(lr, whole, late, length, base, losses) == verdict
        if verdict == "high":
            self.nothing_of(None)
        assert bool(bound) == any(point["resolved"] for point in self.points.values())
        assert other == {"low": "higher", "high": "lower"}[verdict]
        told = self.told(losses)
        better = [a for a, b in told.items() if b < told[float(lr)]]
        assert any(a > float(lr) if verdict == "low" else a < float(lr) for a in better)

    def last_noise(self):
        return max(self.journal.select(Noise), key=lambda event: event.point)

    def say_noise_unresolved(self, at, low):
        noise = self.last_noise()
        assert not noise.resolved
        assert number(at) == self.plan.points[noise.point]
        assert low is None if noise.low < 1 else number(low) == noise.low

    def say_noise(self, at, *numbers):
        noise = self.last_noise()
        assert noise.resolved
        assert number(at) == self.plan.points[noise.point]
        assert [*map(number, numbers)] == [noise.value, noise.low, noise.high]

    def say_certainty(self, *groups):
        partial, done, planned, begin, where, level, count, branches, going = groups
        measured = {n: point for n, point in self.points.items() if point["critical"]}
        assert bool(partial) == (self.summary["status"] != "complete")
        if partial:
            assert (int(done), int(planned)) == (len(measured), len(self.plan.points))
        flat = [n for n, point in measured.items() if not point["resolved"]]
        assert bool(level) == bool(flat)
        if level:
            assert (begin == "branches that begin") == (len(flat) > 1)
            told = [self.seen(each) for each in re.split(", | and ", where)]
            assert [samples for samples, _ in told] == flat
            for samples, seen in told:
                epochs = samples / self.task.train_size
                assert seen is None if epochs < 1.5 else int(seen) == round(epochs)
            self.level(level, [measured[n] for n in flat])
        assert bool(branches) == bool(measured)
        assert bool(going) == bool(self.going)
        assert bool(count) == bool(self.checked)
        assert not count or int(count) == self.plan.seeds

    def seen(self, text):
        """A number of samples, and how often the data were seen by then."""
        pattern = rf"{N} rows(?: \(data seen (\d+) times by then\))?"
        samples, seen = re.fullmatch(pattern, text).groups()
        return number(samples), seen

    def lowest_diverged(self):
        """Smallest batch size that diverged anywhere, from the events themselves."""
        kinds = [r for r in self.journal.select(Scratch) if (r.purpose, r.rate) == ("constant", 1)]
        events = [*self.journal.select(Branch), *kinds]
        lost = [event.batch_size for event in events if math.isinf(event.loss)]
        told = [point["critical"] for point in self.points.values() if point["critical"]]
        lost += [critical["diverged"] for critical in told if critical["diverged"]]
        lost += [size for size, run in self.checked.items() if run["overhead"] >= 3]
        return min(lost, default=math.inf)

    def nothing_above_what_diverged(self):
        advised = [self.advice["batch_size"] or 0]
        advised += [self.going["batch_size"]] if self.going else []
        advised += [row["batch_size"] for row in (self.schedule or {}).get("stages", ())]
        advised += [p["critical"]["safe"] for p in self.points.values() if p["critical"]]
        assert max(advised) < self.lowest_diverged()
