"""What `kill_matrix.py` asks of pytest: which tests run, how each ends, and the lines it covers."""

import json
import os
from pathlib import Path

import pytest

REPORT, TESTS, LINES = (os.environ.get(f"KILL_{n}") for n in ("REPORT", "TESTS", "LINES"))
TRACE = []


def pytest_configure(config):
    # With several processes the first one runs no test.
    distributes = getattr(config.option, "numprocesses", None) and not is_worker(config)
    if LINES and not distributes:
        import coverage

        source = [str(config.rootpath / "src" / "steadygrad")]
        trace = coverage.Coverage(
            f"{LINES}/lines", data_suffix=True, source=source, config_file=False, messages=False
        )
        trace.start()
        TRACE.append(trace)
    config.pluginmanager.register(Reports(config), "kill-reports")


def is_worker(config):
    return hasattr(config, "workerinput")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Takes listed tests and files: a mutant may change which cases there are."""
    if TESTS:
        wanted = set(Path(TESTS).read_text().splitlines())
        takes = [bool(wanted & {i.nodeid, i.nodeid.partition("::")[0]}) for i in items]
        left = [item for item, taken in zip(items, takes, strict=True) if not taken]
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item, taken in zip(items, takes, strict=True) if taken]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item):
    for trace in TRACE:
        trace.switch_context(item.nodeid)
    result = yield
    for trace in TRACE:
        trace.switch_context("")
    return result


def pytest_sessionfinish():
    for trace in TRACE:
        trace.stop()
        trace.save()


class Reports:
    """Writes a line as each phase of a test ends, so that a run cut short tells what it found."""

    def __init__(self, config):
        writes = REPORT and not is_worker(config)
        self.file = open(REPORT, "a", buffering=1) if writes else None  # noqa: SIM115

    def write(self, *row):
        if self.file:
            self.file.write(json.dumps(row) + "\n")

    def pytest_runtest_logstart(self, nodeid):
        self.write(nodeid, "start", "", 0.0)

    def pytest_runtest_logreport(self, report):
        self.write(report.nodeid, report.when, report.outcome, round(report.duration, 4))
