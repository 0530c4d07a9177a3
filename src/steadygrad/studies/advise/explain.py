"""The findings of a study in at most six lines that a practitioner can act on."""

import math

from steadygrad.record import plural
from steadygrad.studies.advise.check import Checked
from steadygrad.studies.advise.critical import CAP
from steadygrad.studies.advise.recommend import Evidence

__all__ = ["explain"]

ENDS = {
    "interrupted": "was interrupted",
    "budget": "ran out of its budget",
    "failed": "failed",
}


def explain(evidence: Evidence, status: str) -> list[str]:
    """The findings, the most important first."""
    words = _Words(evidence, status)
    kinds = (words.fixed, words.going_on, words.growing, words.rate, words.certainty, words.noise)
    return [line for kind in kinds if (line := kind())]


class _Words:
    def __init__(self, evidence: Evidence, status: str) -> None:
        self.evidence, self.status, self.plan = evidence, status, evidence.plan
        self.base, self.tolerance = evidence.plan.batch_size, evidence.tolerance
        self.samples = plural(evidence.task.sample)

    def count(self, number: float) -> str:
        return f"{number:,.0f} {self.evidence.task.sample if number == 1 else self.samples}"

    def cost(self, run: Checked) -> str:
        """Overhead of a run from scratch with its interval."""
        if run.diverged:
            return "diverged or fell far behind"
        percent, low, high = (round(100 * part) for part in (run.overhead, run.low, run.high))
        extra = f"{percent}%" if percent > 0 else "no"
        end = f"{high}%" if run.high < CAP else "300% or more"
        return f"{extra} more {self.samples} (95% interval {low}% to {end})"

    def fixed(self) -> str:
        """The fixed batch size from scratch."""
        evidence, size = self.evidence, self.evidence.constant
        if size is None:
            return self.nothing()
        failed, passed, length = evidence.failed, evidence.passed, self.count(evidence.length)
        stay = f"From scratch over {length}: stay at the task's own batch {self.base:,}."
        settings = f"batch {size:,} with learning rate {evidence.lr(size):.3g}"
        if warmup := evidence.warmup_samples:
            settings += f", warmed up from the task's own over the first {self.count(warmup)}"
        if passed is not None:
            steps = passed.steps / (evidence.length // self.base)
            other = "No larger batch was trained from scratch."
            if failed is not None:
                other = f"Batch {failed.batch_size:,} was tried too: {self.cost(failed)}."
            return (
                f"From scratch over {length}: train at {settings}. Trained so, it took {steps:.0%} "
                f"of the steps of batch {self.base:,} and {self.cost(passed)}. {other}"
            )
        if failed is not None:
            more = "Whether a larger one is as good is not known: batch"
            return (
                f"{stay} {'Batch' if evidence.known else more} {failed.batch_size:,}, trained from "
                f"scratch, needed {self.cost(failed)}."
            )
        if size == self.base:
            return f"{stay} Predicted from branches, not trained from scratch."
        return (
            f"Predicted, not trained: from scratch over {length}, {settings} should stay within "
            f"{self.tolerance:.0%} more {self.samples} than batch {self.base:,}. A longer --budget "
            "trains it."
        )

    def nothing(self) -> str:
        criticals = self.evidence.criticals
        go_on = "" if self.status in ("failed", "complete") else " --resume goes on with it."
        if not criticals:
            return f"Nothing can be said yet: no point of training is measured.{go_on}"
        if any(critical.resolved for critical in criticals.values()):
            return f"Nothing can be said yet.{go_on}"
        return (
            "No batch size can be recommended: the validation loss of the smallest batch "
            f"fell by less than three standard errors along its branches.{go_on} "
            "Try another Task.lr, more data, or a shorter run."
        )

    def going_on(self) -> str:
        """Going on from the last point that tells."""
        evidence = self.evidence
        if evidence.last is None:
            return ""
        critical, limit = evidence.criticals[evidence.last], f"{self.tolerance:.0%}"
        start, size = self.count(self.plan.points[evidence.last]), critical.safe
        over = self.count(self.plan.branch_samples[evidence.last])
        batch = f"{size:,} with learning rate {evidence.lr(size):.3g}"
        high = f"{critical.high:,.0f}" if math.isfinite(critical.high) else "no limit"
        interval = f"95% interval {critical.low:,.0f} to {high}"
        if not critical.known:
            return (
                f"Going on from {start}: the critical batch size is not known ({interval}); batch "
                f"{batch} is safe."
            )
        if math.isinf(critical.beyond):
            return (
                f"Going on from {start}: every batch tried, up to {batch}, stayed within {limit} "
                f"over the next {over}."
            )
        diverged = critical.diverged == critical.beyond
        why = "diverged" if diverged else f"cost more than {limit}"
        return (
            f"Going on from {start}: batch {batch} stayed within {limit} over the next {over}; "
            f"{critical.beyond:,.0f} {why} (limit {critical.value:,.0f}, {interval})."
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
        cost = self.cost(run)
        return f"A growing batch is not advised: {rows}, trained from scratch, needed {cost}."

    def rate(self) -> str:
        """The verdict on the learning rate."""
        found, lr = self.evidence.rate, self.evidence.task.lr
        if not found.verdict:
            return ""
        losses = (f"{lr * rate:.3g}: {loss:.4g}" for rate, loss in found.losses.items())
        tried = (
            f"(validation loss after {self.count(self.plan.length)} from scratch at batch "
            f"{self.base:,} by learning rate: {', '.join(losses)})"
        )
        if found.verdict == "fits":
            return f"The learning rate {lr:.3g} fits {tried}."
        other = "higher" if found.verdict == "low" else "lower"
        return (
            f"The learning rate {lr:.3g} looks too {found.verdict} for a run of that length "
            f"{tried}: every batch size here is an upper bound until it is tuned. Try a {other} "
            "one first."
        )

    def certainty(self) -> str:
        """How sure all that is."""
        evidence, points, parts = self.evidence, self.plan.points, []
        if self.status != "complete":
            go_on = "" if self.status == "failed" else "; --resume goes on with it"
            parts.append(
                f"Preliminary: the study {ENDS[self.status]} after measuring "
                f"{len(evidence.criticals)} of {len(points)} points{go_on}."
            )
        flat = [points[i] for i, critical in evidence.criticals.items() if not critical.resolved]
        if flat:
            where = ", ".join(f"{samples:,}" for samples in flat)
            # That the data were seen often may be the reason.
            epochs = flat[0] / self.evidence.task.train_size
            seen = f" (the data were seen {epochs:.0f} times by then)" if epochs >= 1.5 else ""
            parts.append(
                f"Branches from {where} {self.samples} lower the validation loss by less than "
                f"three standard errors{seen}: they say nothing."
            )
        if evidence.checked:
            parts.append(f"Runs from scratch: {evidence.checked[0].seeds} seeds.")
        if evidence.criticals:
            parts.append("Branches: this seed and its checkpoints only.")
        return " ".join(parts)

    def noise(self) -> str:
        """The gradient noise scale, for the record."""
        noise = self.evidence.noise
        if noise is None:
            return ""
        seen = self.count(self.plan.points[noise.point])
        if not noise.resolved:
            return f"Gradient noise scale after {seen}: unresolved, above {noise.low:,.0f}."
        return (
            f"Gradient noise scale after {seen}, for the record: {noise.value:,.0f} (95% interval "
            f"{noise.low:,.0f} to {noise.high:,.0f})."
        )
