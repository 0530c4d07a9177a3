"""The examples for trainers run as they stand, and print what the pages show."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from tests.integrations.pages import ROOT, blocks, shape

pytestmark = pytest.mark.slow

# The package that an example needs, and the page that shows its output.
EXAMPLES = {
    "hf_trainer.py": ("transformers", "transformers.md"),
    "accelerate_loop.py": ("accelerate", "accelerate.md"),
    "lightning_trainer.py": ("lightning", "lightning.md"),
}


def said(name, package):
    """What an example prints."""
    if find_spec(package) is None:
        pytest.skip(f"{package} is of the dependency group integrations")
    command = [sys.executable, "-W", "error", name]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command, cwd=ROOT / "examples", env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", EXAMPLES)
def test_prints_what_its_page_shows(name):
    package, page = EXAMPLES[name]
    shown = shape(blocks(page, "text")[-1])
    assert shape(said(name, package))[-len(shown) :] == shown


def test_a_study_begins_at_a_checkpoint_of_the_trainer():
    assert "status: complete" in said("continue_hf_checkpoint.py", "transformers")
