"""Nests that a module may take or return: each kind is taken apart and put together again."""

import collections
import types
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence
from torch.utils import _pytree

from steadygrad import LossBalancer
from steadygrad._checks import InputError
from steadygrad._nests import tree_map_tensors, tree_tensors


class Pair(NamedTuple):
    left: Any
    right: Any = None


class NamedPair(Pair):
    """A subclass of a named tuple: torch's pytree takes it for a leaf."""


@dataclass
class Record:
    value: Any
    note: str = ""
    count: int = field(init=False, default=0)

    def __post_init__(self):
        self.count += 1


@dataclass(frozen=True)
class Frozen:
    value: Any


@dataclass(slots=True)
class Slotted:
    value: Any
    unset: Any = field(init=False)


@dataclass
class Output(OrderedDict):
    """As transformers' ModelOutput is: a dataclass whose fields are items, too."""

    logits: Any = None
    hidden: Any = None

    def __post_init__(self):
        for name in ("logits", "hidden"):
            if getattr(self, name) is not None:
                OrderedDict.__setitem__(self, name, getattr(self, name))


class Registered(Output):
    """Its subclasses tell torch how to take them apart."""


_pytree.register_pytree_node(
    Registered,
    lambda nest: (list(nest.values()), list(nest)),
    lambda values, names: Registered(**dict(zip(names, values, strict=True))),
    serialized_type_name="tests.unit.test_nests.Registered",
)


def with_an_attribute(tensor):
    record = Record(1)
    record.extra = tensor
    return record


# How it is made of one tensor, and how the tensor is had back. Every tool takes all of these.
KINDS = {
    "tensor": (lambda t: t, lambda n: n),
    "dict": (lambda t: {"z": t, "n": 3}, lambda n: n["z"]),
    "ordered dict": (lambda t: OrderedDict(z=t), lambda n: n["z"]),
    "list": (lambda t: [None, t], lambda n: n[1]),
    "tuple": (lambda t: (t, "x"), lambda n: n[0]),
    "named tuple": (Pair, lambda n: n.left),
    "named tuple's subclass": (NamedPair, lambda n: n.left),
    "dataclass": (Record, lambda n: n.value),
    "frozen": (Frozen, lambda n: n.value),
    "slots": (Slotted, lambda n: n.value),
    "attribute": (with_an_attribute, lambda n: n.extra),
    "dataclasses": (lambda t: Record([Frozen({"z": t})]), lambda n: n.value[0].value["z"]),
    "output": (lambda t: Output(hidden=(t, t)), lambda n: n.hidden[0]),
    "output's item": (lambda t: Output(logits=t), lambda n: n["logits"]),
    "registered output": (lambda t: Registered(logits=t), lambda n: n.logits),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("nested", [False, True])
def test_every_kind_is_taken_apart_and_put_together(kind, nested):
    make, value_of = KINDS[kind]
    tensor = torch.ones(2, requires_grad=True)
    inner = make(tensor)
    nest = {"first": [inner]} if nested else inner
    assert [found is tensor for found in tree_tensors(nest, "y")] == [True]
    doubled = tree_map_tensors(lambda t: 2 * t, nest, "y")
    new = doubled["first"][0] if nested else doubled
    assert type(new) is type(inner)
    assert value_of(new).eq(2).all()
    # The caller's is as it was.
    assert value_of(inner) is tensor
    assert doubled is not nest
    # Where nothing is replaced, or nothing has a gradient, it is the caller's own.
    assert tree_map_tensors(lambda t: t, nest, "y") is nest
    plain = [make(torch.ones(2))]
    assert tree_map_tensors(lambda t: 2 * t, plain, "y") is plain
    assert tree_tensors(plain, "y") == []


def test_a_dataclass_is_not_initialised_again():
    record = Record(torch.ones(2, requires_grad=True), "note")
    new = tree_map_tensors(lambda t: t + 1, record, "y")
    assert (new.note, new.count) == ("note", 1)
    slotted = tree_map_tensors(lambda t: t + 1, Slotted(record.value), "y")
    assert not hasattr(slotted, "unset")


def test_a_packed_sequence_stays_one():
    x = torch.randn(2, 3, 4, requires_grad=True)
    packed = pack_padded_sequence(x, torch.tensor([3, 2]), batch_first=True)
    new = tree_map_tensors(lambda t: 2 * t, packed, "y")
    assert isinstance(new, PackedSequence)
    assert torch.equal(new.data, 2 * packed.data)
    assert new.batch_sizes is packed.batch_sizes
    assert new.sorted_indices is None


def test_each_tensor_is_collected_once_in_order_and_replaced_in_each_place():
    one, two = (torch.ones(1, requires_grad=True) for _ in range(2))
    found = tree_tensors([two, {"a": one, "b": two}, torch.ones(1)], "y")
    assert [id(tensor) for tensor in found] == [id(two), id(one)]
    calls = []
    tree_map_tensors(lambda t: calls.append(t) or t + 1, [two, two], "y")
    assert len(calls) == 2
    # But an output's field and item stay one tensor.
    new = tree_map_tensors(lambda t: calls.append(t) or t + 1, Output(one), "y")
    assert new.logits is new["logits"]
    assert len(calls) == 3


class Several(dict):
    """A dict that torch does not know."""


class Slot:
    def __init__(self, found):
        self.deep = {"x": [found]}


@dataclass
class Rows(list):
    """A dataclass whose contents are not in its fields."""

    note: str = ""


def rows(tensor):
    found = Rows()
    found.append(tensor)
    return found


HIDDEN = {
    "dict": (lambda t: Several(z=t), r"`dict\(y\)`"),
    "user dict": (lambda t: collections.UserDict(z=t), r"`dict\(y\)`"),
    "set": (lambda t: {t}, r"`list\(y\)`"),
    "namespace": (lambda t: types.SimpleNamespace(z=t), r"`vars\(y\)`"),
    "object": (Slot, r"`vars\(y\)`"),
    "list's dataclass": (rows, r"`list\(y\)`"),
}


@pytest.mark.parametrize("kind", HIDDEN)
@pytest.mark.parametrize("nested", [False, True])
def test_what_cannot_be_taken_apart_is_refused(kind, nested):
    make, remedy = HIDDEN[kind]
    inner = make(torch.ones(2, requires_grad=True))
    nest = [Record(inner)] if nested else inner
    told = f"the output of 'a' .* {type(inner).__name__} .*{remedy}"
    with pytest.raises(InputError, match=told):
        tree_tensors(nest, "the output of 'a'")
    with pytest.raises(InputError, match=remedy):
        LossBalancer({"a": 1.0, "b": 1.0}).fork(nest)
    # What carries no gradient may come along.
    kept = make(torch.ones(2))
    assert tree_map_tensors(lambda t: t, [kept], "y")[0] is kept


def test_objects_in_an_object_are_not_searched():
    """As transformers' caches are, which its layers are handed in training too."""
    cache = types.SimpleNamespace(layers=[Slot(torch.ones(2, requires_grad=True))])
    assert tree_map_tensors(lambda t: 2 * t, [cache], "y")[0] is cache


def test_modules_are_not_looked_into():
    @dataclass(eq=False)
    class Layer(nn.Module):
        size: int

        def __post_init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(self.size))

    for module in (nn.Linear(2, 2), Layer(2)):
        nest = [module, Record(module)]
        assert tree_tensors(nest, "y") == []
        assert tree_map_tensors(lambda t: 2 * t, nest, "y") is nest


# The compiler of torch 2.10 breaks the graph at copies of objects; what it computes is the same.
WHOLE = not torch.__version__.startswith("2.10.")


class Options:
    """An object without tensors."""

    def __init__(self):
        self.sizes = {"a": [1, (2, 3)]}


@pytest.mark.parametrize("kind", ["list", "named tuple", "dataclass", "frozen", "dataclasses"])
@pytest.mark.filterwarnings("ignore:.*Function.* should not be instantiated")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_is_compiled_without_a_break(kind):
    make, value_of = KINDS[kind]

    @torch.compile(fullgraph=WHOLE, backend="eager")
    def compiled(x, options):
        nest = {"x": make(x), "options": options}
        return value_of(tree_map_tensors(lambda t: 2 * t, nest, "y")["x"])

    assert compiled(torch.ones(2, requires_grad=True), Options()).eq(2).all()
