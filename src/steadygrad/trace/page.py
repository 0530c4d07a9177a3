"""The page of a comparison: the answer, and relative distances by step and module."""

from collections.abc import Iterable

from jinja2 import ChoiceLoader, PackageLoader

from steadygrad.studies.page import environment
from steadygrad.trace.diff import Difference, Place
from steadygrad.trace.runs import Run
from steadygrad.trace.words import place_in_words, share, summary

__all__ = ["render"]

# Steps and modules of the table.
_STEPS, _MODULES = 12, 200


def render(found: Difference, a: Run, b: Run) -> str:
    """Draws the page; the same runs give the same page."""
    pages = environment().overlay(
        loader=ChoiceLoader([PackageLoader("steadygrad", name) for name in ("trace", "studies")])
    )
    steps = [*found.steps][-_STEPS:]
    modules = [*dict.fromkeys(p.module for n in steps for p in found.steps[n])]
    table = {
        "title": "Relative distance by module, in the order of computation, and step",
        "columns": ["module", *(f"step {number}" for number in steps)],
        "rows": [
            [name or "(the model)", *(_cell(found.steps[n], name) for n in steps)]
            for name in modules[:_MODULES]
        ],
        "text_columns": 1,
    }
    also = [(p.stage, p.module or "(the model)", place_in_words(p)) for p in found.next]
    return pages.get_template("page.html").render(
        said=summary(found),
        distances=table,
        also=also,
        more=max(0, len(modules) - _MODULES),
        runs=[_facts(run) for run in (a, b)],
    )


def _facts(run: Run) -> dict[str, object]:
    last = [*run.steps.values()][-1:]
    return {
        "folder": str(run.folder),
        "steps": len(run.steps),
        "processes": last[0].world if last else 0,
        "micro-batches": last[0].passes if last else 0,
        "torch": last[0].torch if last else "",
    }


def _cell(places: Iterable[Place], module: str) -> str:
    """Of the value that comes nearest to what rounding and its inputs explain, or goes beyond."""
    one = max((p for p in places if p.module == module), key=_nearness, default=None)
    if one is None:
        return "–"
    return f"{share(one.distance)} parts" if one.differs else share(one.distance)


def _nearness(place: Place) -> float:
    return place.distance / place.allowed if place.allowed else place.distance
