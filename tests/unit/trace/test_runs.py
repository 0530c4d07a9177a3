"""Files of traces: what processes saw adds up, names are mapped, and damage is refused."""

import json
import math

import pytest
import torch

from steadygrad.trace.runs import read_run
from steadygrad.trace.sketches import Key
from tests.refusals import refused
from tests.unit.trace.nets import make, train


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "a"
    train(folder, *make(), steps=3)
    return folder


def copied(folder, target, **changes):
    """A copy of a run with files changed: text of a name's file, or a function of its content."""
    target.mkdir()
    for path in folder.iterdir():
        text = path.read_text()
        change = changes.get(f"step_{int(path.name[5:14])}")
        if callable(change):
            file = json.loads(text)
            change(file)
            text = json.dumps(file)
        elif change is not None:
            text = change
        (target / path.name).write_text(text)
    return target


def test_two_processes_add_up(folder, tmp_path):
    """Each has half of the rows of an output, and half of a weight's rows; one weight is whole."""
    target = copied(folder, tmp_path / "b")
    path = next(target.glob("step-000000000-*"))
    for old in [*target.iterdir()]:
        if old != path:
            old.unlink()
    file = json.loads(path.read_text())
    whole = read_run(target).steps[0].values
    halves = []
    for rank in (0, 1):
        half = json.loads(json.dumps(file)) | {"rank": rank, "world": 2}
        for r in half["records"]:
            if r["kind"] in ("output", "data", "input"):
                r["rows"] //= 2
                r["count"] //= 2
            if r["kind"] == "weight" and r["name"] == "place":
                r["copy"] = rank == 1
            elif r["kind"] not in ("signal", "loss"):
                r["z"], r["square"] = [x / 2 for x in r["z"]], r.get("square", 0) / 2
        halves.append(half)
        (target / f"step-000000000-rank-{rank:05d}.json").write_text(json.dumps(half))
    found = read_run(target).steps[0]
    assert found.world == 2
    for key, value in found.values.items():
        assert value.z == pytest.approx(whole[key].z, rel=1e-12)
        expected = whole[key].norm / (math.sqrt(2) if key.kind == "signal" else 1)
        assert value.norm == pytest.approx(expected, rel=1e-12)
    assert found.values[Key("weight", "place")].spread == 0


def test_a_copy_that_differs_has_a_spread(folder, tmp_path):
    target = tmp_path / "b"
    target.mkdir()
    file = json.loads(next(folder.glob("step-000000000-*")).read_text())
    for rank in (0, 1):
        for r in file["records"]:
            r["copy"] = rank == 1
            r["z"] = [x * (1 + rank / 10) for x in r["z"]]
        text = json.dumps(file | {"rank": rank, "world": 2})
        (target / f"step-000000000-rank-{rank:05d}.json").write_text(text)
    found = read_run(target).steps[0].values[Key("weight", "place")]
    assert found.spread == pytest.approx(0.1, rel=0.5)


@pytest.mark.parametrize(
    ("pattern", "new", "names"),
    [
        ("blocks.*.mlp.*", "layers.*.ff.*", {"layers.0.ff.1.weight", "layers.1.ff.3.bias"}),
        ("blocks.1.*", "second.*", {"second.norm.weight", "blocks.0.norm.weight"}),
        ("embed.weight", "table", {"table", "norm.bias"}),
    ],
)
def test_names_are_mapped(folder, pattern, new, names):
    found = {key.name for key in read_run(folder, [(pattern, new)]).steps[0].values}
    assert names <= found


def test_a_module_is_mapped_with_what_is_in_it(folder):
    found = {key.name for key in read_run(folder, [("embed.*", "table.*")]).steps[0].values}
    assert {"table", "table.weight"} <= found
    assert not {name for name in found if name.startswith("embed")}


def test_a_step_without_all_its_ranks_is_left_out(folder, tmp_path):
    target = copied(folder, tmp_path / "b", step_1=lambda file: file.update(world=3))
    run = read_run(target)
    assert [*run.steps] == [0, 2]
    assert "step 1" in run.remarks[0]


def damage(**changes):
    return lambda file: file["records"][0].update(changes)


@pytest.mark.parametrize(
    "change",
    [
        "",
        "[1, 2]",
        '{"step": 0}',
        "[" * 40 + "]" * 40,
        "\x00",
        lambda file: file.update(step=-1),
        lambda file: file.update(world=0),
        lambda file: file.update(records=3),
        lambda file: file.update(schema=99),
        damage(z=[1.0]),
        damage(z=["a"] * 16),
        damage(z=[1e160] * 16),
        lambda file: file.update(world=2**31 - 1),
        damage(square=-1.0),
        damage(count=-3),
        damage(took=[-1]),
    ],
)
def test_a_damaged_file_is_refused_in_one_line(folder, tmp_path, change):
    target = copied(folder, tmp_path / "b", step_0=change)
    with refused("step-000000000-rank-00000.json", "Remedy"):
        read_run(target)


@pytest.mark.parametrize("make_it", [lambda path: None, lambda path: path.mkdir()])
def test_no_traces(tmp_path, make_it):
    make_it(tmp_path / "none")
    with refused("folder", "none"):
        read_run(tmp_path / "none")


def test_a_place_that_is_not_there_is_no_crash(folder, tmp_path):
    from steadygrad.trace.diff import compare

    def far(file):
        for record in file["records"]:
            record["took"], record["since"] = [10**6], 10**6

    target = copied(folder, tmp_path / "b", step_0=far)
    assert compare(read_run(folder), read_run(target)).verdict in ("same", "unknown", "part")


def test_infinity_has_the_projections_of_a_one(tmp_path):
    model, optimizer = make()
    with torch.no_grad():
        model.place[0, 0] = torch.inf
    train(tmp_path / "a", model, optimizer, steps=1)
    found = read_run(tmp_path / "a").steps[0].values[Key("start", "place")]
    with torch.no_grad():
        model, _ = make()
        model.place[0, 0] = 1.0
    assert found.bad == 1
    assert found.norm == pytest.approx(float(model.place.detach().norm()), rel=1e-5)


@pytest.mark.parametrize(
    "rename", [[("block.*", "layers.*")], [("blocks.*.norm.*", "norm.*")], [("embed.*", "norm.*")]]
)
def test_a_pattern_that_fits_nothing_or_joins_names_is_refused(folder, rename):
    with refused("rename", "Remedy"):
        read_run(folder, rename)


def test_the_model_itself_keeps_its_name(folder):
    found = {key.name for key in read_run(folder, [("*", "net.{0}*")]).steps[0].values}
    assert {"", "net.{0}embed"} <= found
