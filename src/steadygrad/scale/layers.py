"""Which modules are scaled, what lies around what, and whose scale a parameter's gradient has."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import Tensor, nn

from steadygrad._checks import InputError

__all__ = ["Layer", "Layers", "choose", "parts_of", "plain_name"]

# What wrappers put into names: torch.compile, activation checkpointing, FSDP1.
_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}
LOSS = ""


@dataclass(frozen=True)
class Layer:
    """A place whose gradients have a scale of their own.

    Attributes:
        name: The module's name without wrappers; empty for the loss.
        module: None for the loss.
        parent: Index of the next layer around it; the loss is layer 0, around all.
    """

    name: str
    module: nn.Module | None
    parent: int = 0


@dataclass
class Layers:
    """The chosen modules of a model. Layer 0 is the loss, which lies around every other.

    Attributes:
        model: The model.
        layers: All of them, the loss first.
        version: Counts how often the model's parameters became others.
    """

    model: nn.Module
    layers: list[Layer]
    version: int = 0
    _owners: dict[int, int] = field(default_factory=dict)
    _own: frozenset[int] = frozenset()

    def around(self) -> list[list[bool]]:
        """Whether layer ``j`` is, or lies around, layer ``i``."""
        chains = [set(self.chain(i)) for i in range(len(self.layers))]
        return [[j in chain for j in range(len(self.layers))] for chain in chains]

    def chain(self, index: int) -> Iterator[int]:
        """A layer and those around it, from the inside out."""
        yield index
        while index:
            index = self.layers[index].parent
            yield index

    def owner(self, parameter: Tensor) -> int:
        """Index of the innermost layer around a parameter; the loss's for a foreign one."""
        if id(parameter) not in self._owners:
            # fully_shard exchanges parameter objects, also after this was built.
            self._owners = self.owners()
            self._owners.setdefault(id(parameter), 0)
        return self._owners[id(parameter)]

    def owners(self) -> dict[int, int]:
        """Indices of the innermost layers around the model's parameters, by their identity."""
        found = self._find_owners()
        if found.keys() != self._own:
            self.version, self._own = self.version + 1, frozenset(found)
        return found

    def _find_owners(self) -> dict[int, int]:
        index = {id(layer.module): i for i, layer in enumerate(self.layers) if layer.module}
        owners: dict[int, tuple[int, str]] = {}
        for name, modules in _paths(self.model):
            owner = next((index[id(m)] for m in reversed(modules) if id(m) in index), 0)
            for leaf, parameter in modules[-1]._parameters.items():
                if parameter is not None:
                    full = ".".join(part for part in (name, leaf) if part)
                    known, first = owners.setdefault(id(parameter), (owner, full))
                    if known != owner:
                        raise self._torn(first, known, full, owner)
        return {key: owner for key, (owner, _) in owners.items()}

    def _torn(self, first: str, one: int, second: str, other: int) -> InputError:
        return InputError(
            "Expected every parameter under one scale. Found one that is both "
            f"{plain_name(first)!r}, in {self._shown(one)}, and {plain_name(second)!r}, in "
            f"{self._shown(other)}: no divisor gives its gradient back. Remedy: choose neither "
            "module, or one around both."
        )

    def _shown(self, index: int) -> str:
        return f"the chosen {self.layers[index].name!r}" if index else "no chosen module"


def plain_name(name: str) -> str:
    """A name without the parts that wrappers put there."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _paths(model: nn.Module) -> Iterator[tuple[str, list[nn.Module]]]:
    """Every path to every module, with the modules along it from the model on."""

    def walk(name: str, path: list[nn.Module]) -> Iterator[tuple[str, list[nn.Module]]]:
        yield name, path
        for part, child in path[-1]._modules.items():
            # A module that holds itself would have paths without end.
            if child is not None and not any(child is known for known in path):
                yield from walk(f"{name}.{part}" if name else part, [*path, child])

    return walk("", [model])


def _named(model: nn.Module) -> dict[str, nn.Module]:
    """Modules by plain name, every alias of them; of a wrapper and what it wraps, the latter."""
    inner = model
    while isinstance(inner, nn.parallel.DistributedDataParallel) or hasattr(inner, "_orig_mod"):
        inner = inner.module if not hasattr(inner, "_orig_mod") else inner._orig_mod  # type: ignore[assignment]
    return {plain_name(name): path[-1] for name, path in _paths(inner)}


def choose(model: nn.Module, patterns: Iterable[str]) -> tuple[Layers, list[str]]:
    """Finds the modules that patterns choose.

    A pattern is compared part by part with a module's name: ``*`` is any one part, or a piece of
    it, ``**`` is any number of parts. Where several match, the last one counts.

    Args:
        model: The model, wrapped or not; names are those inside the wrappers.
        patterns: Patterns of names.

    Returns:
        The layers, and the pattern that chose each but the first.

    Raises:
        InputError: If a pattern matches nothing, or a parameter is under two different scales.
    """
    named = _named(model)
    chosen: dict[int, tuple[str, nn.Module, str]] = {}
    for pattern in patterns:
        matching = [(n, m) for n, m in named.items() if n and _matches(n.split("."), pattern)]
        if not matching:
            raise _unmatched(pattern, [name for name in named if name])
        for name, module in matching:
            first = chosen[id(module)][0] if id(module) in chosen else name
            chosen[id(module)] = (first, module, pattern)
    order = {id(module): i for i, module in enumerate(named.values())}
    found = sorted(chosen.values(), key=lambda entry: order[id(entry[1])])
    for name, module, _ in found:
        if not _is_called(module):
            items = ", or choose its items, by " + repr(f"{name}.*") if module._modules else ""
            raise InputError(
                f"Expected chosen modules that are called. Found {name!r}, a "
                f"{type(module).__name__} without a forward. Remedy: do not choose it{items}."
            )
    layers = Layers(model, _nested(model, [(name, module) for name, module, _ in found]))
    layers.owner(next(iter(model.parameters()), Tensor()))
    return layers, [pattern for _, _, pattern in found]


def _nested(model: nn.Module, chosen: list[tuple[str, nn.Module]]) -> list[Layer]:
    index = {id(module): i for i, (_, module) in enumerate(chosen, start=1)}
    parents: dict[int, int] = {}
    for _, path in _paths(model):
        *before, last = path
        if id(last) in index:
            parent = next((index[id(m)] for m in reversed(before) if id(m) in index), 0)
            known = parents.setdefault(index[id(last)], parent)
            if known != parent and any(True for _ in last.parameters()):
                name = chosen[index[id(last)] - 1][0]
                raise InputError(
                    f"Expected every chosen module in one place. Found {name!r} both inside and "
                    "outside of another chosen module: its parameters would be under two scales. "
                    "Remedy: leave one of the two out."
                )
    return [
        Layer(LOSS, None),
        *(Layer(name, module, parents[i]) for i, (name, module) in enumerate(chosen, start=1)),
    ]


def _matches(parts: Sequence[str], pattern: str) -> bool:
    def match(left: Sequence[str], wanted: Sequence[str]) -> bool:
        if not wanted:
            return not left
        if wanted[0] == "**":
            return any(match(left[i:], wanted[1:]) for i in range(len(left) + 1))
        return bool(left) and fnmatchcase(left[0], wanted[0]) and match(left[1:], wanted[1:])

    return match(parts, pattern.split("."))


def _unmatched(pattern: str, names: list[str]) -> InputError:
    near = get_close_matches(pattern, names, n=3, cutoff=0.4)
    hint = f"did you mean {', '.join(map(repr, near))}?" if near else "see model.named_modules()."
    return InputError(
        f"Parameter `layer_scales` should have patterns that match modules. Found {pattern!r}, "
        f"which matches none of {len(names)}. Remedy: {hint}"
    )


def parts_of(model: nn.Module) -> list[str]:
    """Names of the largest parts that a model is visibly made of, for automatic scales.

    The model's children; in place of a list, a dictionary, a sequence or a module without a
    forward its items, and in place of the only part with parameters what it is made of. Parts that
    share a parameter, with each other or with what is no part, cannot have scales of their own:
    the largest one gives way to its own parts, one without any is left out.
    """
    named = _named(model)
    found = _untied(model, named, _children(named, ""))
    while len(alone := [name for name in found if _size(named[name])]) == 1:
        deeper = _untied(model, named, _opened(named, found, set(alone)))
        if not any(_size(named[name]) for name in deeper):
            break
        found = deeper
    return found


def _children(named: Mapping[str, nn.Module], name: str) -> list[str]:
    found: list[str] = []
    for part, child in named[name]._modules.items():
        full = plain_name(f"{name}.{part}" if name else part)
        if child is None or full not in named or full == name:
            continue
        inner = named[full]
        opened = isinstance(inner, nn.Sequential) or not _is_called(inner)
        found += _children(named, full) if opened else [full]
    return found


def _opened(named: Mapping[str, nn.Module], names: list[str], wide: Collection[str]) -> list[str]:
    """Names with the children of some of them in their place; of a module's names the first."""
    found: dict[int, str] = {}
    for name in names:
        for each in _children(named, name) if name in wide else [name]:
            found.setdefault(id(named[each]), each)
    return list(found.values())


def _untied(model: nn.Module, named: Mapping[str, nn.Module], names: list[str]) -> list[str]:
    names = _opened(named, names, ())
    while torn := _torn_parts(model, {id(named[name]): name for name in names}):
        wide = {name: _size(named[name]) for name in torn if _children(named, name)}
        if not wide:
            return [name for name in names if name not in torn]
        names = _opened(named, names, {n for n, size in wide.items() if size == max(wide.values())})
    return names


def _torn_parts(model: nn.Module, parts: Mapping[int, str]) -> set[str]:
    """Parts with a parameter that is also another's, or that of what is no part."""
    users: dict[int, set[str]] = {}
    for _, modules in _paths(model):
        # The outermost: a part inside another one is torn as well.
        user = next((parts[id(m)] for m in modules if id(m) in parts), "")
        for parameter in modules[-1]._parameters.values():
            if parameter is not None:
                users.setdefault(id(parameter), set()).add(user)
    return {user for several in users.values() if len(several) > 1 for user in several} - {""}


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _is_called(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward
