"""The findings of a study in at most six lines that a practitioner can act on."""

import math

from steadygrad.record import plural
from steadygrad.studies.advise.check import Checked
from steadygrad.studies.advise.recommend import Evidence

__all__ = ["explain"]


def explain(evidence: Evidence, status: str) -> list[str]:
    """The findings, the most important first."""
    words = _Words(evidence, status)
    lines = [
        words.fixed(),
        words.going_on(),
        words.growing(),
        words.rate(),
        words.certainty(),
        words.noise(),
    ]
    return [line for line in lines if line]


class _Words:
    def __init__(self, evidence: Evidence, status: str) -> None:
        self.evidence, self.status = evidence, status
        self.header = evidence.header
        self.base = self.header.plan.batch_size
        self.tolerance = self.header.settings.tolerance
        self.samples = plural(self.header.task.sample)

    def count(self, number: float) -> str:
        return f"{number:,.0f} {self.header.task.sample if number == 1 else self.samples}"

    def extra(self, overhead: float) -> str:
        percent = round(100 * overhead)
        if percent <= 0:
            return f"no more {self.samples}"
        return f"{percent}% more {self.samples}"

    def cost(self, run: Checked) -> str:
        """Overhead of a run from scratch with its interval."""
        if run.diverged:
            return "diverged or fell far behind"
        high = f"{round(100 * run.high)}%" if run.high < 3 else "300% or more"
        return f"{self.extra(run.overhead)} (95% interval {round(100 * run.low)}% to {high})"

    def fixed(self) -> str:
        """The fixed batch size from scratch."""
        evidence, size = self.evidence, self.evidence.constant
        if size is None:
            return self._nothing()
        length = self.count(evidence.length)
        failed, passed = evidence.failed, evidence.passed
        if passed is not None:
            text = (
                f"From scratch over {length}: train at batch {size:,} with learning rate "
                f"{evidence.lr(size):.3g}{self._warmup()}. Trained so, it took "
                f"{self._steps(passed)} of the steps of batch {self.base:,} and "
                f"{self.cost(passed)}."
            )
            if failed is not None:
                return f"{text} Batch {failed.batch_size:,} was tried too: {self.cost(failed)}."
            return f"{text} No larger batch was trained from scratch."
        if failed is not None:
            more = (
                "Batch" if evidence.known else "Whether a larger one is as good is not known: batch"
            )
            return (
                f"From scratch over {length}: stay at the task's own batch {self.base:,}. {more} "
                f"{failed.batch_size:,}, trained from scratch, needed {self.cost(failed)}."
            )
        if size == self.base:
            return (
                f"From scratch over {length}: stay at the task's own batch {self.base:,}. "
                "Predicted from branches, not trained from scratch."
            )
        return (
            f"Predicted, not trained: from scratch over {length}, batch {size:,} with learning "
            f"rate {evidence.lr(size):.3g}{self._warmup()} should stay within {self.tolerance:.0%} "
            f"more {self.samples} than batch {self.base:,}. A longer --budget trains it."
        )

    def _steps(self, run: Checked) -> str:
        return f"{run.steps / (self.evidence.length // self.base):.0%}"

    def _warmup(self) -> str:
        warmup = self.evidence.warmup_samples
        return (
            f", warmed up from the task's own over the first {self.count(warmup)}" if warmup else ""
        )

    def _nothing(self) -> str:
        criticals = self.evidence.criticals
        go_on = "" if self.status in ("failed", "complete") else " --resume goes on with it."
        if not criticals:
            return f"Nothing can be said yet: no point of training is measured.{go_on}"
        if all(not critical.resolved for critical in criticals.values()):
            return (
                "No batch size can be recommended: the validation loss of the smallest batch "
                f"fell by less than three standard errors along its branches.{go_on} "
                "Try another Task.lr, more data, or a shorter run."
            )
        return f"Nothing can be said yet.{go_on}"

    def going_on(self) -> str:
        """Going on from the last point that tells."""
        evidence = self.evidence
        if evidence.last is None:
            return ""
        plan, critical = self.header.plan, evidence.criticals[evidence.last]
        start = self.count(plan.points[evidence.last])
        over = self.count(plan.branch_samples[evidence.last])
        size, text = critical.safe, f"Going on from {start}"
        lr = f"learning rate {evidence.lr(size):.3g}"
        if not critical.known:
            return (
                f"{text}: the critical batch size is not known (95% interval {critical.low:,.0f} "
                f"to {_high(critical.high)}); batch {size:,} with {lr} is safe."
            )
        if math.isinf(critical.beyond):
            return (
                f"{text}: every batch tried, up to {size:,} with {lr}, stayed within "
                f"{self.tolerance:.0%} over the next {over}."
            )
        why = (
            "diverged"
            if critical.diverged == critical.beyond
            else f"cost more than {self.tolerance:.0%}"
        )
        return (
            f"{text}: batch {size:,} with {lr} stayed within {self.tolerance:.0%} over the next "
            f"{over}; {critical.beyond:,.0f} {why} (limit {critical.value:,.0f}, 95% interval "
            f"{critical.low:,.0f} to {_high(critical.high)})."
        )

    def growing(self) -> str:
        """The growing batch."""
        evidence, stages = self.evidence, self.evidence.schedule
        if not stages:
            return ""
        rows = ", ".join(f"{size:,} from {start:,}" for start, size in stages)
        run, constant = evidence.schedule_check, evidence.constant
        assert constant is not None
        steps = f"{evidence.steps(stages) / (evidence.length // constant):.0%} of the steps of"
        if run is None:
            return f"A growing batch, predicted, not trained: {rows} ({steps} batch {constant:,})."
        if run.within(self.tolerance):
            return (
                f"Growing batch: {rows} {self.samples}. Trained from scratch, it took {steps} "
                f"batch {constant:,} and {self.cost(run)} than batch {self.base:,}."
            )
        return (
            f"A growing batch is not advised: {rows}, trained from scratch, needed "
            f"{self.cost(run)}."
        )

    def rate(self) -> str:
        """The verdict on the learning rate."""
        found = self.evidence.rate
        if not found.verdict or found.losses is None:
            return ""
        lr = self.header.task.lr
        losses = ", ".join(
            f"{lr * rate:.3g}: {loss:.4g}" for rate, loss in sorted(found.losses.items())
        )
        length = self.count(self.header.plan.length)
        tried = (
            f"(validation loss after {length} from scratch at batch {self.base:,} by learning "
            f"rate: {losses})"
        )
        if found.verdict == "fits":
            return f"The learning rate {lr:.3g} fits {tried}."
        way = "low" if found.verdict == "low" else "high"
        other = "a higher" if way == "low" else "a lower"
        return (
            f"The learning rate {lr:.3g} looks too {way} for a run of that length {tried}: every "
            f"batch size here is an upper bound until it is tuned. Try {other} one first."
        )

    def certainty(self) -> str:
        """How sure all that is."""
        evidence, parts = self.evidence, []
        planned, reached = len(self.header.plan.points), len(evidence.criticals)
        if self.status != "complete":
            ways = {
                "interrupted": "was interrupted",
                "budget": "ran out of its budget",
                "failed": "failed",
            }
            go_on = "" if self.status == "failed" else "; --resume goes on with it"
            parts.append(
                f"Preliminary: the study {ways[self.status]} after measuring {reached} of "
                f"{planned} points{go_on}."
            )
        flat = [i for i, critical in evidence.criticals.items() if not critical.resolved]
        if flat:
            where = ", ".join(f"{self.header.plan.points[i]:,}" for i in flat)
            parts.append(
                f"Branches from {where} {self.samples} lower the validation loss by less than "
                f"three standard errors{self._epochs(flat[0])}: they say nothing."
            )
        if evidence.checked:
            parts.append(f"Runs from scratch: {evidence.checked[0].seeds} seeds.")
        if evidence.criticals:
            parts.append("Branches: this seed and its checkpoints only.")
        return " ".join(parts)

    def _epochs(self, point: int) -> str:
        """How often the data were seen by then, where that may be the reason."""
        epochs = self.header.plan.points[point] / self.header.task.train_size
        return f" (the data were seen {epochs:.0f} times by then)" if epochs >= 1.5 else ""

    def noise(self) -> str:
        """The gradient noise scale, for the record."""
        noise = self.evidence.noise
        if noise is None:
            return ""
        seen = self.count(self.header.plan.points[noise.point])
        if not noise.resolved:
            return f"Gradient noise scale after {seen}: unresolved, above {noise.low:,.0f}."
        return (
            f"Gradient noise scale after {seen}, for the record: {noise.value:,.0f} (95% interval "
            f"{noise.low:,.0f} to {noise.high:,.0f})."
        )


def _high(value: float) -> str:
    return f"{value:,.0f}" if math.isfinite(value) else "no limit"
