"""``steadygrad diff``: exit codes, what it prints, and the page."""

import json

import pytest
import torch

from steadygrad.cli import main
from tests.unit.trace.nets import Fault, make, train


class Moved(Fault):
    def on_step(self, step, model, optimizer):
        if step == 1:
            with torch.no_grad():
                model.blocks[1].mlp[1].weight.mul_(1.25)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("diff")
    train(root / "a", *make(), steps=3)
    train(root / "same", *make(), steps=2)
    train(root / "moved", *make(), Moved(), steps=3)
    train(root / "later", *make(), steps=1, start=7)
    return root


@pytest.mark.parametrize(
    ("other", "code", "verdict"),
    [("a", 0, "same"), ("same", 0, "same"), ("moved", 3, "part"), ("later", 4, "unknown")],
)
def test_exit_code_and_json(runs, capsys, other, code, verdict):
    assert main(["diff", str(runs / "a"), str(runs / other), "--json"]) == code
    out, err = capsys.readouterr()
    assert err == ""
    assert json.loads(out)["verdict"] == verdict
    assert (runs / other / "diff.html").is_file()


def test_where_they_part(runs, capsys):
    main(["diff", str(runs / "a"), str(runs / "moved"), "--json"])
    found = json.loads(capsys.readouterr().out)
    place = {name: found[name] for name in ("step", "stage", "module")}
    assert place == {"step": 1, "stage": "weights at the start", "module": "blocks.1.mlp.1"}
    assert len(found["next"]) == 3
    assert found["first"]["distance"] == pytest.approx(0.25, rel=0.35)
    assert "1.25" in found["reasons"][0]


def test_what_a_terminal_shows(runs, capsys):
    main(["diff", str(runs / "a"), str(runs / "moved")])
    answer, before, *_ = capsys.readouterr().out.splitlines()
    assert answer.startswith("Step 1, ")
    assert "blocks.1.mlp.1.weight" in answer
    assert "1 step and " in before


def test_names_are_mapped(runs, capsys, tmp_path):
    model, optimizer = make()
    model.layers = model.blocks
    del model.blocks
    model.forward = lambda tokens, mask=None: forward(model, tokens)
    train(tmp_path / "b", model, optimizer, steps=2)
    words = ["diff", str(runs / "a"), str(tmp_path / "b")]
    assert main([*words, "--rename", "blocks.*=layers.*"]) == 0
    assert (
        main([*words, "--rename", "blocks.0.*=layers.0.*", "--rename", "blocks.1.*=layers.1.*"])
        == 0
    )
    capsys.readouterr()


def forward(model, tokens):
    x = model.embed(tokens) + model.place
    for block in model.layers:
        x = block(x)
    return model.head(model.norm(x))


def test_a_name_of_a_module_can_do_nothing_to_the_page(tmp_path, capsys):
    evil = "<script>alert(1)</script>"
    model = torch.nn.Sequential()
    model.add_module(evil, torch.nn.Linear(2, 2))
    for run, factor in (("a", 1.0), ("b", 2.0)):
        from steadygrad.trace import Trace

        torch.manual_seed(0)
        optimizer = torch.optim.SGD(model.parameters(), 0.0)
        with Trace(model, optimizer, tmp_path / run) as trace:
            (model(torch.ones(2, 2)).sum() * factor).backward()
            optimizer.step()
            trace.step()
        optimizer.zero_grad()
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 3
    assert evil in capsys.readouterr().out
    page = (tmp_path / "b/diff.html").read_text()
    assert "<script" not in page
    assert "alert(1)" in page


@pytest.mark.parametrize("words", [["a"], ["a", "none"], ["a", "a", "--rename", "x"], ["a", ""]])
def test_bad_input(runs, capsys, monkeypatch, words):
    monkeypatch.chdir(runs)
    assert main(["diff", *words]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "Remedy" in err


def test_a_folder_that_cannot_be_written_has_no_page(runs, capsys, monkeypatch):
    def full(path, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("steadygrad._files.replace", full)
    assert main(["diff", str(runs / "a"), str(runs / "same")]) == 0
    assert "No space" in capsys.readouterr().out
