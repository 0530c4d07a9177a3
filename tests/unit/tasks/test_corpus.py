"""The corpus: the same files in the same order everywhere, split without a leak."""

import hashlib
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from steadygrad._checks import InputError
from steadygrad.tasks.char_lm import (
    OTHER,
    VOCABULARY,
    encode,
    read_corpus,
    source_names,
)
from tests.unit.tasks.tiny import decode


def is_held_out(name: str) -> bool:
    """About one path in twenty, whatever else there is."""
    return hashlib.sha256(name.encode()).digest()[0] < 13


def write(root: Path, names: list[str], text: str = "x = 1\n") -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"# {name}\n{text}", newline="")
    return root


MANY = [f"m{i}.py" for i in range(60)]


def test_tests_packages_caches_and_machine_files_are_left_out(tmp_path):
    kept = ["a.py", "pkg/__init__.py", "pkg/testing.py", "unittest/case.py"]
    dropped = [
        "test/test_a.py",
        "pkg/tests/test_b.py",
        "unittest/test/c.py",
        "idlelib/idle_test/d.py",
        "site-packages/e.py",
        "dist-packages/f.py",
        "__pycache__/g.py",
        "encodings/cp1252.py",
        "pydoc_data/topics.py",
        "config-3.11-x86_64-linux-gnu/python-config.py",
        "_sysconfigdata__linux_x86_64-linux-gnu.py",
        "sitecustomize.py",
        "notes.txt",
    ]
    assert source_names(write(tmp_path, kept + dropped)) == kept


def test_names_are_sorted_as_posix_paths(tmp_path):
    # Sorted folder by folder, "a" would come before "a.py"; as whole strings "." < "/".
    assert source_names(write(tmp_path, ["a/b.py", "a.py", "B.py"])) == ["B.py", "a.py", "a/b.py"]


def test_whole_files_are_held_out(tmp_path):
    train, valid, _ = read_corpus(write(tmp_path, MANY))
    for name in MANY:
        inside, outside = (valid, train) if is_held_out(name) else (train, valid)
        assert f"# {name}\n" in inside
        assert f"# {name}\n" not in outside
    assert len(train + valid) == sum(len(f"# {name}\nx = 1\n") for name in MANY)


def test_the_digest_sees_names_borders_and_every_byte(tmp_path):
    digests = set()
    for number, change in enumerate(("none", "byte", "name", "border")):
        root = write(tmp_path / str(number), MANY)
        if change == "byte":
            (root / "m3.py").write_text("# m3.py\nx = 2\n")
        if change == "name":
            (root / "m9.py").rename(root / "m9a.py")  # still the last in order
        if change == "border":
            # m30.py follows m3.py: one file that swallows the next one's name and text.
            swallowed = (root / "m30.py").read_text()
            (root / "m30.py").unlink()
            (root / "m3.py").write_text((root / "m3.py").read_text() + "m30.py" + swallowed)
        digests.add(read_corpus(root)[2]["sha256"])
    assert len(digests) == 4


def test_the_digest_is_the_same_wherever_the_folder_lies(tmp_path):
    first, second = (read_corpus(write(tmp_path / name, MANY)) for name in ("here", "there"))
    assert first == second


def test_bytes_that_are_not_utf8_are_other_characters(tmp_path):
    root = write(tmp_path, MANY)
    (root / "latin.py").write_bytes("name = 'é'\n".encode("latin-1"))
    assert not is_held_out("latin.py")
    assert "name = '\ufffd'\n" in read_corpus(root)[0]


def test_windows_line_ends_become_line_feeds(tmp_path):
    train, *_ = read_corpus(write(tmp_path, MANY, "x = 1\r\n"))
    assert "\r" not in train
    assert train.endswith("\nx = 1\n")


def test_a_missing_folder_has_a_remedy(tmp_path, monkeypatch):
    with pytest.raises(InputError, match=r"Found 0 and 0 under .*python311.*Remedy: .*zipped"):
        read_corpus(tmp_path / "python311.zip")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path / "none")})
    with pytest.raises(InputError, match=r"Found 0 and 0 under .*none"):
        read_corpus()


def test_too_few_files_have_a_remedy(tmp_path):
    with pytest.raises(InputError, match="Found 0 and 0 under"):
        read_corpus(tmp_path)
    with pytest.raises(InputError, match="Found 1 and 0 under"):
        read_corpus(write(tmp_path, ["m1.py"]))


SCRIPT = """
from steadygrad.tasks.char_lm import read_corpus
print("\\n".join(read_corpus()[2].values()))
"""


@pytest.mark.slow
def test_the_standard_library_reads_the_same_in_another_process():
    out = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        # Another order of sets and of str hashes than this process has.
        env={**os.environ, "PYTHONHASHSEED": "12345"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert out.stdout.splitlines() == [*read_corpus()[2].values()]


def test_the_standard_library_is_there_without_its_tests():
    names = source_names(Path(sysconfig.get_paths()["stdlib"]))
    assert len(names) > 300
    assert {"argparse.py", "asyncio/events.py"} <= set(names)
    assert not any("test" in Path(name).parent.parts for name in names)
    assert len(read_corpus()[0]) > 5_000_000


def test_tokens_are_one_byte_a_character():
    text = "def f():\n    return '~' # é\t日\x00𝄞"
    tokens = encode(text)
    assert len(tokens) == len(text)
    assert decode(tokens) == "def f():\n    return '~' # \ufffd\ufffd\ufffd\ufffd\ufffd"
    assert tokens[-1] == OTHER == len(VOCABULARY) == 96


def test_every_character_of_the_vocabulary_has_its_own_token():
    assert list(encode(VOCABULARY)) == list(range(96))
