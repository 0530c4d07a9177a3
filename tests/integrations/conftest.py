"""The trainers are of the dependency group ``integrations``, which `make test` leaves out.

Where all of them should be installed, as in `make test-integrations`, a test that is skipped fails.
"""

import os
from collections.abc import Iterator
from typing import Any

import pytest

# Before they are read in: nothing is asked of a network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Iterator[None]:
    """A module whose import was skipped."""
    return unskipped((yield))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Iterator[None]:
    """A test that was skipped."""
    return unskipped((yield))


def unskipped(report: Any) -> Any:
    """The report of a failure, where nothing may be skipped."""
    if report.skipped and os.environ.get("STEADYGRAD_ALL_TRAINERS"):
        report.outcome = "failed"
    return report
