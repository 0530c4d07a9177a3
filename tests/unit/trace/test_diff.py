"""What a comparison says of losses, of factors, and of values that are not finite."""

import json
import random

import numpy as np
import pytest
import torch
from torch import nn

from steadygrad.trace import Trace
from steadygrad.trace.diff import compare
from steadygrad.trace.runs import read_run
from steadygrad.trace.words import summary
from tests.unit.nets import Net
from tests.unit.trace.nets import Fault, make, train


def said(tmp_path, fault=None, right=None, **options):
    """The summary of a run without a fault against one with it."""
    for name, loop in (("a", right), ("b", fault)):
        train(tmp_path / name, *make(), loop, **{"steps": 2, "clip": 0.0, **options})
    return summary(compare(read_run(tmp_path / "a"), read_run(tmp_path / "b")))


class Double(Fault):
    def on_loss(self, step, loss):
        return loss * 2


def test_a_loss_is_compared(tmp_path):
    found = said(tmp_path, Double())
    assert (found["step"], found["stage"], found["module"]) == (0, "loss", "")
    assert found["first"]["distance"] == pytest.approx(0.5, rel=1e-5)
    assert "2 times" in found["reasons"][0]


class Scaled(Fault):
    """A loss scale that is undone."""

    def __init__(self, scale):
        self.scale = scale

    def on_loss(self, step, loss):
        return loss * self.scale

    def on_gradients(self, step, model, optimizer):
        for p in model.parameters():
            p.grad.div_(self.scale)


def test_another_loss_scale_is_no_fault(tmp_path):
    found = said(tmp_path, Scaled(2048.0), Scaled(1024.0))
    assert found["verdict"] == "same"
    assert any("step 0" in remark for remark in found["remarks"])


class Later(Scaled):
    """A gradient that is three times too large, from step 2 on."""

    def on_gradients(self, step, model, optimizer):
        super().on_gradients(step, model, optimizer)
        if step >= 2:
            model.blocks[1].mlp[3].weight.grad *= 3


@pytest.mark.parametrize("scale", [1024.0, 4096.0])
def test_another_loss_scale_hides_no_gradient(tmp_path, scale):
    found = said(tmp_path, Later(scale), Scaled(1024.0), steps=3)
    place = [found[k] for k in ("verdict", "step", "stage", "module")]
    assert place == ["part", 2, "gradient", "blocks.1.mlp.3"]


class Clipped(Fault):
    """A loss that is four times too large, where clipping takes the factor away at first."""

    def on_loss(self, step, loss):
        return loss * 4

    def on_gradients(self, step, model, optimizer):
        if step < 2:
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


class First(Clipped):
    def on_loss(self, step, loss):
        return loss


def test_a_factor_that_clipping_took_away_is_the_losss(tmp_path):
    found = said(tmp_path, Clipped(), First(), steps=3)
    assert [found[k] for k in ("verdict", "step", "stage", "module")] == ["part", 0, "loss", ""]
    assert found["agrees"]


class Doubled(Fault):
    """Gradients of half of the weights are twice as large."""

    def on_gradients(self, step, model, optimizer):
        for p in [*model.parameters()][::2]:
            p.grad *= 2


def test_clipping_leaves_open_which_half_was_changed(tmp_path):
    found = said(tmp_path, Doubled(), clip=1e-3)
    assert (found["verdict"], found["stage"]) == ("unknown", "gradient")
    assert said(tmp_path, Doubled())["verdict"] == "part"


class Decayed(Scaled):
    def on_start(self, model, optimizer):
        optimizer.param_groups[0]["weight_decay"] = 0.5


def test_and_does_not_hide_the_fault(tmp_path):
    found = said(tmp_path, Decayed(2048.0), Scaled(1024.0))
    assert (found["step"], found["stage"]) == (0, "update")
    assert not any("times" in reason for reason in found["reasons"])
    assert "weight_decay" in found["reasons"][0]


class Broken(Fault):
    def __init__(self, count):
        self.count = count

    def on_step(self, step, model, optimizer):
        with torch.no_grad():
            model.place.view(-1)[: self.count] = torch.nan


def test_what_is_not_finite_in_both_is_said(tmp_path):
    found = said(tmp_path, Broken(3), Broken(3))
    assert found["verdict"] == "same"
    assert any("step 0" in remark for remark in found["remarks"])
    found = said(tmp_path, Broken(3), Broken(4))
    assert (found["verdict"], found["stage"]) == ("part", "weights at the start")


def test_rounding_leaves_every_generator_as_it_was(tmp_path):
    def call(net, x):
        return net.layer(x) * random.random() + np.random.rand()

    sums = []
    for rounding in (False, True):
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        model = Net(call, layer=nn.Linear(3, 2))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        folder = tmp_path / str(rounding)
        with Trace(model, optimizer, folder, rounding=rounding) as trace:
            for _ in range(4):
                model(torch.randn(5, 3)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                trace.step()
        sums.append([p.sum().item() for p in model.parameters()])
    assert sums[0] == sums[1]


class Noise(Scaled):
    """A gradient of noise, of the right size."""

    def on_gradients(self, step, model, optimizer):
        super().on_gradients(step, model, optimizer)
        gradient = model.blocks[0].mlp[1].weight.grad
        size = gradient.norm()
        gradient.copy_(torch.randn(gradient.shape) * size / gradient[0].numel())


@pytest.mark.parametrize(("scale", "clip"), [(2.0**16, 0.0), (1.0, 1e-4)])
def test_neither_a_loss_scale_nor_clipping_hides_a_gradient(tmp_path, scale, clip):
    found = said(tmp_path, Noise(scale), Scaled(scale), clip=clip)
    place = [found[k] for k in ("verdict", "step", "stage", "module")]
    assert place == ["part", 0, "gradient", "blocks.0.mlp.1"]


def compared(tmp_path, *runs, steps=1, rename=()):
    """The summary of two runs, each a model and a function that gives losses of its passes."""
    for folder, (model, losses) in zip("ab", runs, strict=True):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with Trace(model, optimizer, tmp_path / folder) as trace:
            for _ in range(steps):
                optimizer.zero_grad()
                for loss in losses(model):
                    loss.backward()
                optimizer.step()
                trace.step()
    return summary(compare(read_run(tmp_path / "a", rename), read_run(tmp_path / "b")))


def layers(call, **parts):
    torch.manual_seed(0)
    return Net(call, **{name: make() for name, make in parts.items()})


LINEAR = {"first": lambda: nn.Linear(4, 4), "last": lambda: nn.Linear(4, 4)}
X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))


def test_numbers_that_a_layer_draws_are_not_those_of_the_code_before_it(tmp_path):
    parts = {**LINEAR, "drop": lambda: nn.Dropout(0.5)}
    runs = []
    for p in (0.5, 0.0):
        model = layers(lambda net, x: net.last(net.drop(net.first(x).relu())), **parts)
        model.drop.p = p
        runs.append((model, lambda model: [model(X).square().mean()]))
    found = compared(tmp_path, *runs)
    assert (found["stage"], found["module"]) == ("forward pass", "drop")


def test_a_mask_of_infinities_at_other_places_is_another_one(tmp_path):
    def losses(place):
        mask = torch.zeros(8, 8)
        mask[0, place] = -torch.inf
        return lambda model: [model(X, mask).square().mean()]

    def model():
        return layers(lambda net, x, mask: net.last(mask.softmax(-1) @ net.first(x)), **LINEAR)

    assert compared(tmp_path / "1", (model(), losses(3)), (model(), losses(3)))["verdict"] == "same"
    found = compared(tmp_path / "2", (model(), losses(3)), (model(), losses(4)))
    assert (found["verdict"], found["stage"]) == ("part", "data")


@pytest.mark.parametrize("tokens", [8, 6])
def test_accumulation_where_the_batch_is_the_second_dimension(tmp_path, tokens):
    """What is summed over another dimension in other micro-batches is not compared."""
    x = torch.randn(tokens, 8, 4, generator=torch.Generator().manual_seed(0))

    def losses(cuts):
        return lambda model: [model(y).square().mean() / cuts for y in x.chunk(cuts, 1)]

    def model():
        return layers(lambda net, x: net.last(net.first(x).tanh()), **LINEAR)

    found = compared(tmp_path, (model(), losses(1)), (model(), losses(2)))
    assert found["verdict"] == "same"
    assert any("not compared" in remark for remark in found["remarks"])

    def wrong(model):
        return [loss * 2 for loss in losses(2)(model)]

    found = compared(tmp_path / "2", (model(), losses(1)), (model(), wrong))
    assert (found["verdict"], found["stage"]) == ("unknown", "gradient")


def test_runs_without_a_common_weight_are_not_known(tmp_path):
    def model(**parts):
        return layers(lambda net, x: next(net.children())(x), **parts)

    runs = [(model(**{name: LINEAR["first"]}), lambda m: [m(X).sum()]) for name in ("a", "b")]
    assert compared(tmp_path / "1", *runs)["verdict"] == "unknown"
    runs = [(model(**{name: LINEAR["first"]}), lambda m: [m(X).sum()]) for name in ("a", "b")]
    assert compared(tmp_path / "2", *runs, rename=[("a.*", "b.*")])["verdict"] == "same"


def test_inputs_by_place_and_by_name_are_the_same(tmp_path):
    def model():
        return layers(lambda net, x, y: net.last(net.first(x) + y), **LINEAR)

    first = (model(), lambda m: [m(X, X + 1).sum()])
    found = compared(tmp_path / "1", first, (model(), lambda m: [m(X, y=X + 1).sum()]))
    assert found["verdict"] == "same"
    found = compared(tmp_path / "2", first, (model(), lambda m: [m(x=X, y=X).sum()]))
    assert (found["verdict"], found["stage"]) == ("part", "data")


@pytest.mark.parametrize("act", [nn.ReLU, lambda: nn.MaxPool1d(2)])
def test_a_derivative_that_jumps_at_a_rounding_is_no_fault(tmp_path, act):
    """Rounding turns single elements of a ReLU on; of these the gradients differ wholly."""
    x = torch.randn(4096, 16, generator=torch.Generator().manual_seed(0))

    def run(roundings):
        torch.manual_seed(0)
        width = 128 if act is not nn.ReLU else 256
        model = nn.Sequential(nn.Linear(16, 256), act(), nn.Linear(width, 16), nn.Tanh())
        with torch.no_grad():
            model[0].weight *= 1 + roundings * 2.0**-23 * torch.randn(256, 16)
        return model, lambda model: [model(x).square().mean()]

    found = compared(tmp_path, run(0), run(8), steps=6)
    assert found["verdict"] == "same", found["answer"]
    assert found["remarks"] == []


def test_the_step_at_which_the_other_run_had_these_data(tmp_path):
    """As of a run that was resumed and counts from 0 again."""
    train(tmp_path / "a", *make(), steps=4)
    model, optimizer = make()
    train(tmp_path / "b", model, optimizer, steps=2)
    train(tmp_path / "b", model, optimizer, steps=2, start=2)
    for path in sorted((tmp_path / "b").iterdir()):
        file = json.loads(path.read_text())
        file["step"] -= 2
        path.write_text(json.dumps(file))
    found = summary(compare(read_run(tmp_path / "a"), read_run(tmp_path / "b")))
    assert (found["step"], found["stage"]) == (0, "data")
    assert any("at step 2" in reason for reason in found["reasons"])


def test_a_gap_is_said(tmp_path):
    for name in "ab":
        train(tmp_path / name, *make(), steps=4)
    (tmp_path / "b/step-000000002-rank-00000.json").unlink()
    found = summary(compare(read_run(tmp_path / "a"), read_run(tmp_path / "b")))
    assert found["verdict"] == "same"
    assert any("step 2" in remark for remark in found["remarks"])


def test_an_option_of_a_weight_is_named_whatever_its_group(tmp_path):
    for name, decayed in (("a", "place"), ("b", "norm.weight")):
        model, _ = make()
        weights = dict(model.named_parameters())
        one = weights.pop(decayed)
        groups = [{"params": [one], "weight_decay": 0.3}, {"params": [*weights.values()]}]
        train(tmp_path / name, model, torch.optim.AdamW(groups, weight_decay=0.0), steps=1)
    found = summary(compare(read_run(tmp_path / "a"), read_run(tmp_path / "b")))
    assert (found["stage"], found["module"]) == ("update", "")
    assert found["reasons"] == ["Its weight_decay is 0.3 in A, 0.0 in B."]


def test_runs_that_are_traced_from_a_later_step_on_may_have_grown_apart(tmp_path):
    def run(name, factor, start, first=0):
        model, optimizer = make()
        with torch.no_grad():
            model.place *= factor
        train(tmp_path / name, model, optimizer, steps=1, start=start)

    run("a", 1.0, 3)
    run("b", 1.001, 3)
    found = summary(compare(read_run(tmp_path / "a"), read_run(tmp_path / "b")))
    assert (found["verdict"], found["stage"]) == ("unknown", "weights at the start")


@pytest.mark.filterwarnings("ignore:Complex modules")
def test_complex_weights_have_rounding(tmp_path):
    def run(cuts):
        torch.manual_seed(0)
        model = nn.Linear(4, 4).to(torch.complex64)
        x = X.to(torch.complex64)
        return model, lambda m: [m(y).abs().square().mean() / cuts for y in x.chunk(cuts)]

    assert compared(tmp_path, run(1), run(2), steps=2)["verdict"] == "same"


def test_what_one_model_alone_is_given_is_a_fault_where_it_matters(tmp_path):
    """As labels that a trainer hands to a model, or a mask of ones."""
    call = lambda net, x, mask=None: net.last(net.first(x if mask is None else x * mask))
    runs = [
        (layers(call, **LINEAR), lambda m: [m(X).square().sum()]),
        (layers(call, **LINEAR), lambda m: [m(X, torch.ones(8, 4)).square().sum()]),
        (layers(call, **LINEAR), lambda m: [m(X, torch.full((8, 4), 0.5)).square().sum()]),
    ]
    found = compared(tmp_path / "1", runs[0], runs[1])
    assert (found["verdict"], len(found["remarks"])) == ("same", 1)
    runs[0] = (layers(call, **LINEAR), runs[0][1])
    found = compared(tmp_path / "2", runs[0], runs[2])
    assert (found["verdict"], found["stage"]) == ("part", "data")


def test_a_dictionary_goes_by_its_names(tmp_path):
    call = lambda net, batch: net.last(net.first(batch["x"]) + batch["y"])
    runs = [
        (layers(call, **LINEAR), lambda m: [m({"x": X, "y": X + 1}).sum()]),
        (layers(call, **LINEAR), lambda m: [m({"y": X + 1, "x": X}).sum()]),
    ]
    assert compared(tmp_path, *runs)["verdict"] == "same"


def test_other_options_are_said_where_rounding_hides_them(tmp_path):
    for name, decay in (("a", 1e-12), ("b", 2e-12)):
        model, _ = make()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=decay)
        train(tmp_path / name, model, optimizer, steps=1)
    found = summary(compare(read_run(tmp_path / "a"), read_run(tmp_path / "b")))
    assert found["verdict"] == "same"
    assert any("weight_decay is 1e-12 in A" in remark for remark in found["remarks"])


def test_of_weights_that_come_later_the_first_step_is_not_known(tmp_path):
    def run(factor):
        model = layers(lambda net, x: [*net.children()][-1](net.first(x)), **LINEAR)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with Trace(model, optimizer, tmp_path / str(factor)) as trace:
            for step in range(3):
                if step == 1:
                    torch.manual_seed(1)
                    model.new = nn.Linear(4, 2)
                    group = {"params": model.new.parameters(), "lr": 0.1 * factor}
                    optimizer.add_param_group(group)
                model(X).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                trace.step()

    for factor in (1.0, 1.5):
        run(factor)
    found = summary(compare(read_run(tmp_path / "1.0"), read_run(tmp_path / "1.5")))
    place = [found[k] for k in ("verdict", "step", "stage", "module")]
    assert place == ["unknown", 2, "weights at the start", "new"]
