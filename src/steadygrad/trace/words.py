"""What a comparison found, in words, as plain values, and as a page."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import ChoiceLoader, PackageLoader

from steadygrad.studies.page import environment
from steadygrad.trace.diff import STAGE, Difference, Place
from steadygrad.trace.runs import Run

# Steps and modules of the page's table.
_STEPS, _MODULES = 12, 200
_NOUNS = {
    "data": "input {part} of the model",
    "start": "{name}",
    "input": "what is handed to {name}",
    "output": "the output of {name}",
    "loss": "the loss",
    "signal": "the gradient at the {part} of {name}",
    "gradient": "the gradient of {name}",
    "before": "{part} of {name}, before the step,",
    "state": "{part} of {name}, after the step,",
    "weight": "the update of {name}",
}


def summary(found: Difference) -> Mapping[str, Any]:
    """The answer in one sentence (``answer``), and what belongs to it, as plain values."""
    first = found.first
    return {
        "verdict": found.verdict,
        "answer": _answer(found),
        "step": first and first.step,
        "stage": first and first.stage,
        "module": first and first.module,
        "agrees": _agreement(found),
        "reasons": found.reasons,
        "next": [_plain(place) for place in found.next],
        "first": first and _plain(first),
        "steps": [*found.steps],
        "remarks": found.remarks,
    }


def place_in_words(place: Place) -> str:
    """A value, and how it differs."""
    key = place.key
    part = key.part.partition(".")[0] if key.kind == "signal" else key.part
    noun = _NOUNS[key.kind].format(name=key.name or "the model", part=part)
    call = f" in call {key.call + 1}" if key.call else ""
    how = place.how or f"differs by {share(place.distance)}"
    return f"{noun}{call} {how if how.startswith(('differs', 'draws')) else f'is {how}'}"


def share(x: float) -> str:
    """A relative distance."""
    if not math.isfinite(x):
        return "all of it"
    if x < 1e-4:
        return f"{x:.1e}" if x else "0"
    return f"{x:.0%}" if x >= 0.1 else f"{100 * x:.2g}%"


def _answer(found: Difference) -> str:
    first, numbers = found.first, [*found.steps]
    if not numbers:
        return "Not known: no step was traced in both runs."
    if first is None:
        span = f"step {numbers[0]}" if len(numbers) == 1 else f"steps {numbers[0]} to {numbers[-1]}"
        places = [p for places in found.steps.values() for p in places]
        most = max((p.distance for p in places if p.stage == STAGE["output"]), default=0.0)
        apart = f"; outputs of modules differ by at most {share(most)}" if most else ""
        same = ", to the last digit that a trace keeps" * (not any(p.distance for p in places))
        return f"The runs are the same within rounding over {span}{same}{apart}."
    alike = [p for p in found.steps[first.step] if p.key[::2] == first.key[::2]]
    count = sum(place.differs for place in alike)
    others = f" (unexplained: {count} of {len(alike)} such values)" if len(alike) > 1 else ""
    words = f"{place_in_words(first)}{others}."
    if found.verdict == "unknown":
        return f"Not known. The first to differ, at step {first.step}: {words}"
    return f"Step {first.step}, {'' if first.certain else 'probably '}in the {first.stage}: {words}"


def _agreement(found: Difference) -> str:
    """What agrees before the first place that differs."""
    if found.first is None:
        return ""
    last, places = found.first.step, found.steps[found.first.step]
    before = places[: places.index(found.first)]
    earlier = sum(number < last for number in found.steps)
    if not earlier and not before:
        return ""
    steps = f"{earlier} step{'s' * (earlier > 1)} and " if earlier else ""
    most = max((x.distance / (x.allowed or 1.0) for x in before if not x.differs), default=0.0)
    within = f": the largest difference is {share(most)} of what rounding may cause" if most else ""
    return f"Before it {steps}{len(before)} values of step {last} agree{within}."


def _plain(place: Place) -> Mapping[str, Any]:
    return {
        "step": place.step,
        "stage": place.stage,
        "module": place.module,
        "what": place_in_words(place),
        "distance": place.distance if math.isfinite(place.distance) else None,
        "allowed": place.allowed if math.isfinite(place.allowed) else None,
    }


def page(found: Difference, a: Run, b: Run) -> str:
    """Draws the page: the answer, and relative distances by step and module."""
    pages = environment().overlay(
        loader=ChoiceLoader([PackageLoader("steadygrad", name) for name in ("trace", "studies")])
    )
    steps = [*found.steps][-_STEPS:]
    places = [p for n in steps for p in found.steps[n]]
    # Those of the forward pass have its order.
    places.sort(key=lambda p: p.stage != STAGE["output"])
    modules = [*dict.fromkeys(p.module for p in places)]
    table = {
        "title": "Relative distance by module, in the order of computation, and step",
        "columns": ["module", *(f"step {number}" for number in steps)],
        "rows": [
            [name or "(the model)", *(_cell(found.steps[n], name) for n in steps)]
            for name in modules[:_MODULES]
        ],
        "text_columns": 1,
    }
    more = max(0, len(modules) - _MODULES)
    html = pages.get_template("page.html")
    return html.render(said=summary(found), distances=table, more=more, runs=(a, b))


def _cell(places: Sequence[Place], module: str) -> str:
    """Of the value that comes nearest to what rounding and its inputs explain, or goes beyond."""
    own = [p for p in places if p.module == module]
    one = max(own, key=lambda p: p.distance / p.allowed if p.allowed else p.distance, default=None)
    if one is None:
        return "–"
    return f"{share(one.distance)} unexplained" if one.differs else share(one.distance)
