"""A trace changes nothing, writes what a step computed, and refuses what it cannot do."""

import copy
import json
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from steadygrad.optim import LANS
from steadygrad.trace import Trace
from tests.refusals import refused
from tests.unit.nets import Net
from tests.unit.trace.nets import batch, loss_of, make, train


def read(folder, step=0, rank=0):
    path = folder / f"step-{step:09d}-rank-{rank:05d}.json"
    return json.loads(path.read_text())


def names(file, *kinds):
    return [
        (r["kind"], r.get("name", ""), r.get("part", ""))
        for r in file["records"]
        if r["kind"] in kinds
    ]


def state_of(model, optimizer):
    states = [x for s in optimizer.state.values() for x in s.values()]
    return [*model.state_dict().values(), *states, torch.get_rng_state()]


def plain(steps=4, micros=1, dropout=0.1):
    model, optimizer = make(dropout)
    for step in range(steps):
        tokens, targets = batch(step)
        optimizer.zero_grad()
        for part in range(micros):
            loss = loss_of(model, tokens[part::micros], targets[part::micros]) / micros
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return state_of(model, optimizer)


@pytest.mark.parametrize("options", [{}, {"every": 2}, {"rounding": True}])
@pytest.mark.parametrize("micros", [1, 2])
def test_training_is_the_same_to_the_bit(tmp_path, options, micros):
    model, optimizer = make(0.1)
    train(tmp_path / "a", model, optimizer, micros=micros, **options)
    found = state_of(model, optimizer)
    assert all(map(torch.equal, found, plain(micros=micros)))


def test_a_batch_norm_is_the_same_when_rounding_is_measured(tmp_path):
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 1))
    models = model, copy.deepcopy(model)
    for traced, one in zip((True, False), models, strict=True):
        torch.manual_seed(1)
        optimizer = torch.optim.SGD(one.parameters(), 0.1, momentum=0.9)
        trace = Trace(one, optimizer, tmp_path / "a", rounding=True) if traced else None
        for _ in range(2):
            one(torch.randn(8, 3)).square().mean().backward()
            optimizer.step()
            _ = trace and trace.step()
    pairs = zip(models[0].state_dict().values(), models[1].state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert any("noise" in r for r in read(tmp_path / "a")["records"])


@pytest.mark.parametrize("rounding", [False, True])
def test_a_graph_around_the_model_gets_its_gradient_once(tmp_path, rounding):
    before, model = nn.Linear(3, 3), nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    trace = Trace(model, optimizer, tmp_path, rounding=rounding)
    model(before(torch.ones(2, 3))).sum().backward()
    expected = before.weight.grad.clone()
    optimizer.step()
    trace.step()
    assert torch.equal(before.weight.grad, expected)


def test_what_a_step_computed_is_in_the_order_of_computation(tmp_path):
    model = nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    trace = Trace(model, optimizer, tmp_path)
    loss = model(torch.randn(4, 3)).square().mean()
    loss.backward()
    optimizer.step()
    trace.step(loss)
    file = read(tmp_path)
    passes = names(file, "data", "input", "output", "signal")
    # The last layer's output is the model's as well.
    outputs = [("output", name, "0") for name in ("0", "1", "2", "")]
    signals = [("signal", name, "output.0") for name in ("2", "", "1", "0")]
    assert passes == [("data", "", "0"), *outputs, *signals]
    weights = ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert [name for _, name, _ in names(file, "gradient")] == weights
    assert names(file, "state") == [("state", name, "momentum_buffer") for name in weights]
    assert names(file, "before") == []
    assert [r["took"] for r in file["records"] if r["kind"] == "output"] == [[0], [1], [2], [0]]
    assert file["options"][0]["options"]["momentum"] == 0.9
    assert file["options"][0]["parameters"] == weights
    assert names(file, "loss")


def test_code_between_modules_is_seen_where_it_is_handed_on(tmp_path):
    inner = Net(lambda net, x: net.b(net.a(x) * 2), a=nn.Linear(3, 3), b=nn.Linear(3, 3))
    model = Net(lambda net, x: net.inner(x) + 1, inner=inner)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    trace = Trace(model, optimizer, tmp_path)
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    trace.step()
    records = [r for r in read(tmp_path)["records"] if r["kind"] in ("data", "input", "output")]
    found = [(r["kind"], r.get("name", ""), r.get("maker", "")) for r in records]
    assert found == [
        ("data", "", ""),
        ("output", "inner.a", "inner.a"),
        ("input", "inner.b", "inner"),
        ("output", "inner.b", "inner.b"),
        ("output", "inner", "inner"),
        ("output", "", ""),
    ]


def test_steps_are_counted_from_a_start(tmp_path):
    train(tmp_path / "a", *make(), steps=7, start=5, every=3)
    found = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert found == [f"step-{n:09d}-rank-00000.json" for n in (5, 8, 11)]


def test_a_number_of_steps(tmp_path):
    model, optimizer = make()
    trace = Trace(model, optimizer, tmp_path, steps=2)
    for step in range(4):
        loss_of(model, *batch(step)).backward()
        optimizer.step()
        trace.step()
        optimizer.zero_grad()
    assert len([*tmp_path.iterdir()]) == 2
    assert not model.embed._forward_hooks


@pytest.mark.parametrize("end", ["close", "with", "drop"])
def test_hooks_go_with_the_trace(tmp_path, end):
    model, optimizer = make()
    trace = Trace(model, optimizer, tmp_path)
    assert model.embed._forward_hooks
    if end == "with":
        with trace:
            pass
    elif end == "close":
        trace.close()
    del trace
    assert not any(module._forward_hooks for module in model.modules())
    assert not optimizer._optimizer_step_pre_hooks


def test_a_copy_of_the_model_is_not_traced(tmp_path):
    model, optimizer = make()
    trace = Trace(model, optimizer, tmp_path)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        loss_of(other, *batch(0)).backward()
    loss_of(model, *batch(0)).backward()
    optimizer.step()
    trace.step()
    assert read(tmp_path)["passes"] == 1


def test_an_evaluation_within_a_step_is_not_seen(tmp_path):
    model, optimizer = make()
    trace = Trace(model, optimizer, tmp_path)
    with torch.no_grad():
        model(batch(1)[0])
    loss_of(model, *batch(0)).backward()
    with torch.no_grad():
        model(batch(2)[0])
    optimizer.step()
    trace.step()
    train(tmp_path / "b", *make(), steps=1, clip=0.0)
    found, other = read(tmp_path)["records"], read(tmp_path / "b")["records"]
    assert [r for r in other if r["kind"] != "loss"] == found


def test_a_step_that_a_scaler_leaves_out_has_no_gradients(tmp_path):
    model, optimizer = make()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4)
    trace = Trace(model, optimizer, tmp_path)
    for step in range(2):
        optimizer.zero_grad()
        loss = scaler.scale(loss_of(model, *batch(step)))
        (loss * (torch.inf if step else 1)).backward()
        scaler.step(optimizer)
        scaler.update()
        trace.step()
    assert names(read(tmp_path, 0), "gradient")
    assert not names(read(tmp_path, 1), "gradient")


def test_compiled_a_model_is_one_module(tmp_path):
    model, optimizer = make()
    compiled = torch.compile(model, backend="eager")
    trace = Trace(compiled, optimizer, tmp_path)
    loss_of(compiled, *batch(0)).backward()
    optimizer.step()
    trace.step()
    file = read(tmp_path)
    assert names(file, "data", "output", "input") == [("data", "", "0"), ("output", "", "0")]
    assert ("gradient", "blocks.0.norm.weight", "") in names(file, "gradient")


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_checkpointing_repeats_is_not_seen_twice(tmp_path, reentrant):
    def call(net, x):
        return net.last(checkpoint(net.first, net.before(x), use_reentrant=reentrant))

    parts = {name: nn.Linear(3, 3) for name in ("before", "first", "last")}
    model = Net(call, **parts)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    trace = Trace(model, optimizer, tmp_path)
    model(torch.randn(2, 3)).sum().backward()
    optimizer.step()
    trace.step()
    outputs = names(read(tmp_path), "output")
    assert outputs == [("output", name, "0") for name in (*parts, "")]


def test_states_in_eight_bits_and_numbers_are_seen(tmp_path):
    model = nn.Linear(80, 80)
    optimizer = LANS(model.parameters(), 0.1, state_dtype="8bit")
    trace = Trace(model, optimizer, tmp_path)
    model(torch.randn(2, 80)).sum().backward()
    optimizer.step()
    trace.step()
    assert {name for _, name, _ in names(read(tmp_path), "state")} == {"weight", "bias"}


def test_a_layer_that_is_called_very_often_is_told_apart_at_first(tmp_path):
    def call(net, x):
        for _ in range(40):
            x = net.cell(x)
        return x

    model = Net(call, cell=nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    trace = Trace(model, optimizer, tmp_path)
    model(torch.randn(2, 2)).sum().backward()
    optimizer.step()
    trace.step()
    calls = [r.get("call", 0) for r in read(tmp_path)["records"] if r["kind"] == "output"]
    assert calls == [*range(16), 0]  # and the model's own, which is the last call's


def test_refusals(tmp_path):
    model, optimizer = make()
    with refused("model"):
        Trace(optimizer, optimizer, tmp_path)
    with refused("optimizer"):
        Trace(model, model, tmp_path)
    for name in ("every", "steps"):
        with refused(name):
            Trace(model, optimizer, tmp_path, **{name: 0})
    with refused("start"):
        Trace(model, optimizer, tmp_path, start=-1)
    (tmp_path / "file").write_text("")
    with refused("folder"):
        Trace(model, optimizer, tmp_path / "file")
    train(tmp_path / "a", model, optimizer, steps=2)
    for start in (0, 1):
        with refused("folder", "start"):
            Trace(model, optimizer, tmp_path / "a", start=start)
    Trace(model, optimizer, tmp_path / "a", start=2).close()


def test_a_folder_that_is_gone_is_said(tmp_path):
    model, optimizer = make()
    trace = Trace(model, optimizer, tmp_path / "a")
    loss_of(model, *batch(0)).backward()
    optimizer.step()
    (tmp_path / "a").rmdir()
    with pytest.warns(UserWarning, match="step-000000000"):
        trace.step()
    assert not model.embed._forward_hooks


@pytest.mark.parametrize("order", ["step first", "twice", "closure"])
def test_calls_in_another_order_are_said(tmp_path, order):
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    trace = Trace(model, optimizer, tmp_path)

    def closure():
        loss = model(torch.ones(2, 3)).sum()
        loss.backward()
        return loss

    if order == "closure":
        with pytest.warns(UserWarning, match="trace.step"):
            optimizer.step(closure)
        return
    closure()
    if order == "step first":
        trace.step()
    else:
        optimizer.step()
    with pytest.warns(UserWarning, match="trace.step"):
        optimizer.step()
