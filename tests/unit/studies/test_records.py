"""The runs whose pages the documentation shows: their summaries follow from their results."""

from pathlib import Path

import pytest

from steadygrad._studies import STUDIES
from steadygrad.studies.folder import read_run
from steadygrad.studies.run import _summary
from steadygrad.studies.strict_json import dumps
from steadygrad.studies.study import study_of

RECORDS = Path(__file__).parents[3] / "docs" / "records"


@pytest.mark.parametrize("study", STUDIES)
def test_the_recorded_summary_is_computed_anew_number_for_number(study):
    run = read_run(RECORDS / study)
    assert run.unreadable == ()
    found = _summary(study_of(run.header), run.results, "complete")
    assert {*found} == {*run.summary}
    for name, value in run.summary.items():
        # As text: a NaN is not equal to itself.
        assert dumps(found[name]) == dumps(value), name
