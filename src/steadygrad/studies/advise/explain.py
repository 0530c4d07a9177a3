"""The findings of a study in at most six lines that a practitioner can act on."""

import math
from collections.abc import Sequence

from steadygrad.studies.advise.check import Checked
from steadygrad.studies.advise.critical import CAP, REACH
from steadygrad.studies.advise.rates import LATE, LATE_PART, WORTH
from steadygrad.studies.advise.recommend import Evidence
from steadygrad.studies.text import listed, plural

__all__ = ["explain"]

ENDS = {"interrupted": "was interrupted", "budget": "ran out of its budget", "failed": "failed"}
UNTRIED = "No larger batch was trained with every seed."


def explain(evidence: Evidence, status: str) -> list[str]:
    """The findings, the most important first."""
    words = _Words(evidence, status)
    kinds = (words.fixed, words.rate, words.going_on, words.growing, words.certainty, words.noise)
    return [line for kind in kinds if (line := kind())]


class _Words:
    def __init__(self, evidence: Evidence, status: str) -> None:
        self.evidence, self.status, self.plan = evidence, status, evidence.plan
        self.base, self.tolerance = evidence.plan.batch_size, evidence.tolerance
        self.samples = plural(evidence.task.sample)

    def count(self, number: float) -> str:
        return f"{number:,.0f} {self.evidence.task.sample if number == 1 else self.samples}"

    def needs(self, run: Checked) -> str:
        """The overhead of a run from scratch, with its interval, in words."""
        if math.isinf(run.loss):
            return "diverged"
        goal = f"more {self.samples} than batch {self.base:,} for the same loss"
        if run.diverged:
            return f"needs at least {CAP:.0%} {goal}"
        percent, low, high = (round(100 * part) for part in (run.overhead, run.low, run.high))
        extra = f"{percent}%" if percent > 0 else "no"
        start = f"{low}%" if run.low > 1 / REACH - 1 + 1e-9 else "below 0%"
        end = f"{high}%" if run.high < CAP else f"{CAP:.0%} or more"
        return f"needs {extra} {goal} (95% interval {start} to {end})"

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
            steps = self.steps(passed.steps, self.base)
            other = self.failed(failed) if failed else UNTRIED
            return (
                f"From scratch over {length}: train at {settings}. Trained so, it "
                f"{self.needs(passed)}. {steps} {other}"
            )
        if failed is not None:
            sure = failed.low > self.tolerance
            other = " No smaller one was tried." if sure and not evidence.known else ""
            return f"{stay} {self.failed(failed)}{other}"
        if size == self.base:
            more = f"need at most {self.tolerance:.0%} more {self.samples} from scratch"
            return f"{stay} No larger one was shown to {more}.{self.unplanned()}"
        comma = "," if warmup else ""
        return (
            f"Predicted, not trained: from scratch over {length}, {settings}{comma} should stay "
            f"within {self.tolerance:.0%} more {self.samples} than batch {self.base:,}."
            f"{self.unplanned()}"
        )

    def unplanned(self) -> str:
        """A sentence where the plan has no runs from scratch, which resuming does not add."""
        if self.plan.candidates:
            return ""
        return (
            " The budget was too short for a run from scratch, and --resume adds none: begin a new "
            "study with a longer --budget."
        )

    def failed(self, run: Checked) -> str:
        """Sentences about a batch size that was trained and is not advised."""
        batch, needs = f"Batch {run.batch_size:,}", self.needs(run)
        if run.low > self.tolerance:
            return f"{batch}, trained from scratch, {needs}."
        unknown = f"Whether {batch[0].lower()}{batch[1:]} is as good is not known"
        return f"{unknown}: it {needs}, but its {run.seeds} runs differ too much."

    def steps(self, steps: int, size: int) -> str:
        """Optimizer steps from scratch, beside the steps of a batch size."""
        share, same = steps / (self.evidence.length // size), f"Over the same {self.samples}"
        return f"{same} it takes {share:.0%} as many optimizer steps as batch {size:,}."

    def nothing(self) -> str:
        criticals = self.evidence.criticals
        more = "" if self.status in ("failed", "complete") else " --resume continues the study."
        if not criticals:
            return f"Nothing can be said yet: no point of training is measured.{more}"
        if self.evidence.measured:
            return (
                "No batch size for a run from scratch: before each point of training, over the "
                "second half of the run so far, the validation loss of the smallest batch did not "
                f"fall significantly.{more} Try a lower Task.lr, more data, or another --budget."
            )
        return (
            "No batch size can be recommended: the validation loss of the smallest batch "
            f"{self.flat(list(criticals))} along its branches.{more} "
            "Try another Task.lr, more data, or a longer --budget."
        )

    def flat(self, points: Sequence[int]) -> str:
        """Sentence on the smallest batch's loss along the branches of unresolved points."""
        zero = {point.point for point in self.evidence.points if not point.valid_loss}
        if zero.issuperset(points):
            return "is exactly 0"
        if any(self.evidence.criticals[i].falls for i in points):
            return "falls by less than three standard errors"
        return "does not fall"

    def going_on(self) -> str:
        """Advice for continuing from the last resolved point."""
        evidence = self.evidence
        if evidence.last is None:
            return ""
        critical = evidence.criticals[evidence.last]
        start, size = self.count(self.plan.points[evidence.last]), evidence.safe(critical)
        batch = f"batch {size:,} with learning rate {evidence.lr(size):.3g}"
        over = f"over the next {self.count(self.plan.branch_samples[evidence.last])}"
        more = f"at most {self.tolerance:.0%} more {self.samples}"
        needs = f"{batch} needs {more} than the best batch, {over}"
        high = f"{critical.high:,.0f}" if math.isfinite(critical.high) else "no limit"
        interval = f"95% interval {critical.low:,.0f} to {high}"
        why = "diverged" if critical.diverged == critical.beyond else "needs more"
        limit = f"(limit {critical.value:,.0f}, {interval})"
        said = f"{needs}; batch {critical.beyond:,.0f} {why} {limit}"
        if not critical.known:
            said = f"the critical batch size is not known ({interval}); until it is, use {batch}"
        elif size < critical.within:
            said = f"{needs}; batch {evidence.diverged:,.0f} diverged elsewhere in this study"
        elif math.isinf(critical.beyond):
            said = f"{needs}, as do all smaller ones; no larger one was tried"
        return f"Continuing from {start}: {said}."

    def growing(self) -> str:
        """The growing batch."""
        evidence, stages = self.evidence, self.evidence.schedule
        if not stages:
            return ""
        rows = ", ".join(f"{size:,} from {start:,}" for start, size in stages)
        run, constant = evidence.schedule_check, evidence.constant
        assert constant is not None
        rows, steps = f"{rows} {self.samples}", self.steps(evidence.steps(stages), constant)
        if run is None:
            said = "predicted from branches and not trained from scratch"
            return f"A growing batch is not advised: {rows}, {said}. {steps}"
        needs = self.needs(run)
        if run.within(self.tolerance):
            return f"Growing batch: {rows}. Trained from scratch, it {needs}. {steps}"
        return f"A growing batch is not advised: {rows}, trained from scratch, {needs}."

    def rate(self) -> str:
        """The verdict on the learning rate."""
        found, lr = self.evidence.rate, self.evidence.task.lr
        if not found.verdict:
            return self.no_verdict() if found.why else ""
        length = self.count(found.samples)
        shown = {rate: f"{loss:.4g}" for rate, loss in found.losses.items() if loss < math.inf}
        losses = (f"{lr * rate:.3g}: {shown.get(rate, 'diverged')}" for rate in found.losses)
        tried = (
            f"(mean validation loss over the last {LATE_PART:.0%} of {length} from scratch at "
            f"batch {self.base:,} by learning rate: {', '.join(losses)})"
        )
        other = self.evidence.constant is not None and self.evidence.length != found.samples
        elsewhere = f" That says nothing of a run of {self.count(self.evidence.length)}."
        elsewhere = elsewhere if other else ""
        if found.verdict == "fits":
            return (
                f"No better learning rate than {lr:.3g} was found for a run of {length}: none "
                f"has a lower loss at each of the last {LATE} evaluations and saves {WORTH:.0%} of "
                f"the {self.samples} {tried}.{elsewhere}"
            )
        said = f"The learning rate {lr:.3g} looks too {found.verdict} for a run of {length} {tried}"
        if found.verdict == "high" and elsewhere:
            return f"{said}.{elsewhere}"
        # The best constant rate falls with the length of the run: it is too low for shorter ones.
        bound = "every batch size here was measured with it and is an upper bound"
        said += f": {bound}." if self.evidence.measured else "."
        return f"{said} Tune it first: try a {'higher' if found.verdict == 'low' else 'lower'} one."

    def no_verdict(self) -> str:
        """Why other learning rates were trained and nothing is said of the task's."""
        found, lr = self.evidence.rate, self.evidence.task.lr
        others = listed(f"{lr * rate:.3g}" for rate in found.losses if rate != 1)
        place = f"over the last {LATE_PART:.0%} of {self.count(found.samples)} from scratch"
        reasons = {
            "same": f"{place} the validation losses at {others} are the same as at {lr:.3g}. "
            "Check that Task.make_optimizer uses its learning rate",
            "zero": f"{place} the validation loss is exactly 0 at all three, so that none is "
            "better. Try a harder task, or a smaller --budget",
            "rising": f"{place} the validation loss is above that of the evaluations before. "
            "Another rate would look better by overfitting less. Try more data or a smaller "
            "--budget",
        }
        return f"No verdict on the learning rate {lr:.3g}: {reasons[found.why]}."

    def certainty(self) -> str:
        """The certainty of the advice."""
        evidence, points, parts = self.evidence, self.plan.points, []
        if self.status != "complete":
            more = "" if self.status == "failed" else "; --resume continues it"
            parts.append(
                f"Preliminary: the study {ENDS[self.status]} after measuring "
                f"{len(evidence.criticals)} of {len(points)} points{more}."
            )
        flat = [i for i, critical in evidence.criticals.items() if not critical.resolved]
        if flat:
            where = listed(self.count(points[i]) + self.seen(points[i]) for i in flat)
            begin = "branches that begin" if len(flat) > 1 else "branch that begins"
            parts.append(
                f"Over the {begin} after {where} the validation loss {self.flat(flat)}, so no "
                "batch size can be judged there."
            )
        if evidence.checked:
            parts.append(f"The runs from scratch have {evidence.checked[0].seeds} seeds.")
        if evidence.criticals:
            advice = ", and the advice for continuing," if evidence.last is not None else ""
            parts.append(f"The branches{advice} rest on one seed.")
        return " ".join(parts)

    def seen(self, samples: int) -> str:
        """Number of times the data were seen, where that may be why the loss no longer falls."""
        epochs = samples / self.evidence.task.train_size
        return f" (data seen {epochs:.0f} times by then)" if epochs >= 1.5 else ""

    def noise(self) -> str:
        """The gradient noise scale, which is no advice."""
        noise = self.evidence.noise
        if noise is None:
            return ""
        seen = self.count(self.plan.points[noise.point])
        if not noise.resolved:
            above = f", above {noise.low:,.0f}" if noise.low >= 1 else ""
            return f"Gradient noise scale after {seen}: unresolved{above}."
        return (
            f"Gradient noise scale after {seen}: {noise.value:,.0f} (95% interval "
            f"{noise.low:,.0f} to {noise.high:,.0f}). It is no recommendation."
        )
