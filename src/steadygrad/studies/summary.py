"""The summary of a run, with a remark that holds for every study."""

import numpy as np
from msgspec.structs import replace

from steadygrad._studies import module_of
from steadygrad.studies.folder import Results
from steadygrad.studies.schema import Header, Summary

DEPENDENT = (
    "A sample's loss depends on the other samples of its batch: the batch size is part of what is "
    "trained, and no batch can be cut into micro-batches, as a noise scale needs."
)


def summarize(header: Header, results: Results, status: str) -> Summary:
    """The content of ``summary.json``, a pure function of a run and of how it ended."""
    findings = module_of(header.study, "findings")
    with np.errstate(all="ignore"):  # of a damaged run's numbers
        summary: Summary = findings.summarize(header, results, status)
    if header.task.dependent:
        summary = replace(summary, remarks=(*summary.remarks[:2], DEPENDENT))
    return summary
