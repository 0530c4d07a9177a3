"""States that load, states that are refused, and the optimizer after a refusal."""

import copy
import io

import pytest
import torch
import torch.distributed.checkpoint.state_dict as dcp
from torch import nn

from steadygrad._checks import InputError
from steadygrad.optim import LAMB, LANS, ScaledAdam

MAKERS = {
    "lans": lambda params: LANS(params, lr=1e-2, weight_decay=0.1),
    "lamb": lambda params: LAMB(params, lr=1e-2, weight_decay=0.1, max_grad_norm=1.0),
    "scaled_adam": lambda params: ScaledAdam(params, clipping_scale=1.5, clipping_update_period=4),
    "stateless7": lambda params: ScaledAdam(
        params, clipping_scale=1.5, clipping_update_period=4, recipe="stateless7"
    ),
}
every_optimizer = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


def network(width=4):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, width), nn.Linear(width, 1))
    model[1].bfloat16()
    return model


def feed(optimizer, steps):
    for step in steps:
        draw = torch.Generator().manual_seed(step)
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = torch.randn(p.shape, generator=draw).to(p)
        optimizer.step()


def started(make, steps=3, **options):
    model = network(**options)
    optimizer = make(model.parameters())
    feed(optimizer, range(steps))
    return model, optimizer


def everything(model, optimizer):
    """Values, and which tensors they are."""
    tensors = {f"{i}": p for i, p in enumerate(model.parameters())}
    for i, p in enumerate(model.parameters()):
        tensors |= {f"{i} {name}": value for name, value in optimizer.state[p].items()}
    options = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    values = {key: (id(t), t.dtype, t.tolist()) for key, t in tensors.items()}
    return values, copy.deepcopy(options)


def other_shapes(make):
    return started(make, width=7)[1].state_dict()


def too_few(make):
    model = network()
    return make(model[0].parameters()).state_dict()


def two_groups(make):
    model = network()
    return make([{"params": layer.parameters()} for layer in model]).state_dict()


def of_adam(make):
    # Before its first step it has no state: only its groups tell.
    return torch.optim.Adam(network().parameters()).state_dict()


def half_a_state(make):
    found = started(make)[1].state_dict()
    del found["state"][2]["exp_avg_sq"]
    return found


def short_master(make):
    found = started(make)[1].state_dict()
    found["state"][2]["master_weight"] = torch.ones(1, 3)
    return found


def without_a_state(make):
    found = started(make)[1].state_dict()
    del found["state"][2]
    return found


REFUSED = {
    without_a_state: "`state_dict` of",
    other_shapes: "parameter's shape",
    too_few: "parameter group",
    two_groups: "different number of parameter groups",
    of_adam: "`state_dict` of",
    half_a_state: "exp_avg_sq",
    short_master: "`master_weight` with the parameter's shape",
}


@pytest.mark.few(14)
@every_optimizer
@pytest.mark.parametrize("wrong", REFUSED, ids=lambda f: f.__name__)
def test_a_refused_state_leaves_everything_as_it_was(make, wrong):
    model, optimizer = started(make)
    before = everything(model, optimizer)
    with pytest.raises(ValueError, match=REFUSED[wrong]):
        optimizer.load_state_dict(wrong(make))
    assert everything(model, optimizer) == before
    twin, other = started(make)
    feed(optimizer, range(3, 6))
    feed(other, range(3, 6))
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)


@every_optimizer
def test_a_state_goes_to_its_parameters_device(make):
    _, optimizer = started(make)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    elsewhere = make(network().to("meta").parameters())
    for place in ("cpu", torch.device("cpu"), {"cpu": "cpu"}, "meta"):
        file.seek(0)
        elsewhere.load_state_dict(torch.load(file, map_location=place, weights_only=True))
        pairs = zip(elsewhere.state.values(), optimizer.state.values(), strict=True)
        for got, expected in pairs:
            assert {name: t.dtype for name, t in got.items()} == {
                name: t.dtype for name, t in expected.items()
            }
            assert {t.device.type for t in got.values()} == {"meta"}


@every_optimizer
def test_a_small_state_as_long_as_its_parameter_keeps_its_type(make):
    # Four elements, as the gradient norms, and as the gradients of the size, are.
    p = torch.ones(4, dtype=torch.float64, requires_grad=True)
    q = p.detach().clone().requires_grad_()
    optimizer, other = make([p]), make([q])
    feed(optimizer, range(3))
    other.load_state_dict(optimizer.state_dict())
    types = {name: value.dtype for name, value in optimizer.state[p].items()}
    assert {name: value.dtype for name, value in other.state[q].items()} == types


def moved(nest, device):
    """As Accelerate moves a state dict."""
    if isinstance(nest, (list, tuple)):
        return type(nest)(moved(value, device) for value in nest)
    if isinstance(nest, dict):
        return type(nest)({key: moved(value, device) for key, value in nest.items()})
    return nest.to(device) if isinstance(nest, torch.Tensor) else nest


@every_optimizer
def test_parameters_that_a_wrapper_exchanges(make):
    # Accelerate loads an optimizer's own state when it wraps it; with FSDP2 it then exchanges the
    # parameters of the groups for placeholders, and these for sharded ones.
    model, optimizer = network(), make(network().parameters())
    optimizer.load_state_dict(moved(optimizer.state_dict(), torch.device("cpu")))
    (group,) = optimizer.param_groups
    group["params"] = [torch.empty(1, dtype=p.dtype) for p in group["params"]]
    optimizer.state_dict()
    group["params"] = list(model.parameters())
    assert len(optimizer.state_dict()["state"]) == 4
    reference, fresh = network(), None
    fresh = make(reference.parameters())
    feed(optimizer, range(4))
    feed(fresh, range(4))
    assert set(optimizer.state) == set(model.parameters())
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(p, q)


@every_optimizer
@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
def test_the_state_dict_api_takes_no_step(make, flat):
    model, optimizer = network(), make(network().parameters())
    optimizer = make(model.parameters())
    options = dcp.StateDictOptions(flatten_optimizer_state_dict=flat)
    before = everything(model, optimizer)
    optimizer.step = None  # not to be called
    state = copy.deepcopy(dcp.get_optimizer_state_dict(model, optimizer, options=options))
    del optimizer.step
    assert everything(model, optimizer) == before
    feed(optimizer, range(3))
    weights = [p.detach().clone() for p in model.parameters()]
    optimizer.step = None
    dcp.set_optimizer_state_dict(model, optimizer, state, options=options)
    del optimizer.step
    assert [p.tolist() for p in model.parameters()] == [w.tolist() for w in weights]
    assert all(float(s["step"]) == 0 for s in optimizer.state.values())


@every_optimizer
def test_the_step_with_zero_gradients_moves_no_weight(make):
    # torch.distributed.checkpoint takes one, at a learning rate of zero, where there is no state.
    model, optimizer = started(make)
    saved = copy.deepcopy(dcp.get_optimizer_state_dict(model, optimizer))
    expected = copy.deepcopy(optimizer.state_dict()["state"])
    weights = [p.tolist() for p in model.parameters()]
    optimizer.zero_grad()
    optimizer.state.clear()
    dcp.set_optimizer_state_dict(model, optimizer, saved)
    assert [p.tolist() for p in model.parameters()] == weights
    for index, state in optimizer.state_dict()["state"].items():
        assert {k: v.tolist() for k, v in state.items()} == {
            k: v.tolist() for k, v in expected[index].items()
        }
    assert isinstance(optimizer.param_groups[0]["lr"], float)


@every_optimizer
def test_the_error_of_a_shape_names_it(make):
    _, optimizer = started(make)
    with pytest.raises(InputError, match=r"shape \(4, 3\). Found \(7, 3\). Remedy"):
        optimizer.load_state_dict(other_shapes(make))


@every_optimizer
def test_names_in_another_order_are_refused(make):
    shapes = {"a": (3,), "b": (3,), "c": (2,)}
    named = {name: torch.ones(shape).requires_grad_() for name, shape in shapes.items()}
    optimizer = make(named.items())
    other = make([(name, named[name].detach().clone().requires_grad_()) for name in "bac"])
    with pytest.raises(ValueError, match=r"'a' in its place\. Found that of 'b'"):
        optimizer.load_state_dict(other.state_dict())
    renamed = make([(f"module.{name}", p) for name, p in named.items()])
    renamed.state[named["a"]]["step"].fill_(5)
    optimizer.load_state_dict(renamed.state_dict())
    assert optimizer.state[named["a"]]["step"] == 5
