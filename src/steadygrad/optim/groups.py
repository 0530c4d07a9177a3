"""Parameter groups by patterns on names."""

import warnings
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase
from itertools import chain
from typing import Any, NamedTuple

from torch import Tensor, nn

from steadygrad._checks import InputError, check_number, check_type
from steadygrad._names import plain_name

Options = Mapping[str, Any]
_MULTIPLIERS = {"lr_mult": "lr", "wd_mult": "weight_decay"}


class _Named(NamedTuple):
    """A parameter and its names."""

    name: str
    parameter: Tensor
    aliases: tuple[str, ...]  # the name without wrappers, then tied names

    def matches(self, pattern: str) -> bool:
        # A ParameterDict's keys may hold brackets, which in a pattern mean something else.
        names = (self.name, *self.aliases[:1])
        return pattern in names or any(fnmatchcase(name, pattern) for name in names)


def param_groups(
    model: nn.Module | Iterable[tuple[str, Tensor]],
    options: Mapping[str, Options] | None = None,
    *,
    lr: float | Tensor | None = None,
    weight_decay: float | None = None,
    strict: bool = True,
) -> list[dict[str, Any]]:
    """An optimizer's groups, from patterns on parameter names.

    ``optimizer = LANS(param_groups(model, {"*.bias": {"weight_decay": 0.0}}), lr=5e-3)``

    - **Patterns** are names, or those of :func:`fnmatch.fnmatchcase` on the whole name: ``*``
      matches any characters, dots included, so ``"encoder.*"`` matches all below ``encoder`` and
      ``"*.bias"`` every bias but one of the outermost module, which is called ``"bias"``.
    - Where **several patterns** match a parameter their options are merged; of one option the last
      pattern's value holds.
    - **``lr_mult`` and ``wd_mult``** multiply the parameter's learning rate and weight decay: what
      a pattern says, else the arguments ``lr`` and ``weight_decay``. They do not multiply each
      other. The groups hold the products, which schedules scale.
    - **Tied parameters** come once, under their first name. **Frozen** ones (``requires_grad`` is
      false now) are left out: add them with ``add_param_group`` when you thaw them.
    - **Wrappers**: names are tried with and without ``module.`` (DDP), ``_orig_mod.``
      (torch.compile) and the like. The groups keep the names that ``named_parameters()`` gives.

    Args:
        model: A module, or named parameters.
        options: Options by pattern, in order.
        lr: Base learning rate; every group without its own gets it. A tensor is copied for each.
        weight_decay: Base weight decay, likewise.
        strict: Whether a pattern that matches no parameter, frozen ones included, is an error; a
            warning otherwise.

    Returns:
        Groups of named parameters, as every torch optimizer takes them: one for each different set
        of options, in the order of their first parameters.
    """
    named = _named_parameters(model)
    remedy = '{"*.bias": {"weight_decay": 0.0}}'
    options = check_type("options", options or {}, Mapping, remedy)  # type: ignore[type-abstract]
    for pattern, wanted in options.items():
        # torch's groups hold these beside options.
        if not isinstance(wanted, Mapping) or {"params", "param_names"} & {*wanted}:
            raise InputError(
                f"Expected options by name, without params and param_names, for {pattern!r}. "
                f"Found {wanted!r}. Remedy: {{'weight_decay': 0.0}}."
            )
        for name in {*_MULTIPLIERS} & {*wanted}:
            check_number(name, wanted[name], low=0)
        if not any(entry.matches(pattern) for entry in named):
            _report_unmatched(pattern, named, strict)
    trained = [entry for entry in named if entry.parameter.requires_grad]
    if not trained:
        raise InputError(
            f"Expected a parameter that requires a gradient. Found none among {len(named)}. "
            "Remedy: requires_grad_() before the groups are built."
        )
    bases = {"lr": lr, "weight_decay": weight_decay}
    groups: list[tuple[Options, dict[str, Any]]] = []
    for entry in trained:
        some = (own for pattern, own in options.items() if entry.matches(pattern))
        wanted = dict(chain.from_iterable(own.items() for own in some))
        # Tensors are alike where they are the same one: to compare them would read them.
        key = {n: (Tensor, id(v)) if isinstance(v, Tensor) else v for n, v in wanted.items()}
        if not any(known == key for known, _ in groups):
            groups.append((key, {"params": [], **_resolve(entry.name, wanted, bases)}))
        group = next(group for known, group in groups if known == key)
        group["params"].append((entry.name, entry.parameter))
    return [group for _, group in groups]


def _named_parameters(model: nn.Module | Iterable[tuple[str, Tensor]]) -> list[_Named]:
    """Every parameter once, with its other names."""
    if isinstance(model, nn.Module):
        model = model.named_parameters(remove_duplicate=False)
    pairs: list[Any] = [*model] if isinstance(model, Iterable) else [model]
    names: dict[Tensor, list[str]] = {}
    for pair in pairs:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[1], Tensor)):
            raise InputError(
                "Expected a module, or pairs of a name and a parameter. Found "
                f"{type(pair).__name__}. Remedy: the model, or its named_parameters()."
            )
        names.setdefault(pair[1], []).append(pair[0])
    bare = {name: plain_name(name) for name, _ in pairs}
    # "module" may also be a name of the user's: only a wrapper of the whole model is in every name.
    while bare and all(plain.startswith("module.") for plain in bare.values()):
        bare = {name: plain.removeprefix("module.") for name, plain in bare.items()}
    return [_Named(own[0], p, tuple(bare[name] for name in own)) for p, own in names.items()]


def _report_unmatched(pattern: str, named: list[_Named], strict: bool) -> None:
    tied = [(e.aliases[0], n) for e in named for n in e.aliases[1:] if fnmatchcase(n, pattern)]
    if tied:
        hint = f"{tied[0][1]!r} is tied to {tied[0][0]!r} and goes by that name."
    else:
        names = [entry.aliases[0] for entry in named]
        # Ends of names too, for a pattern such as "*.baises".
        ends = {n.split(".", cut)[-1]: n for n in names for cut in range(n.count(".") + 1)}
        near = [ends[end] for end in get_close_matches(pattern.strip("*."), ends)]
        hint = f"Near names: {', '.join(near or names[:3])}."
    message = f"Expected the pattern {pattern!r} to match a parameter. Found none. {hint}"
    if strict:
        raise InputError(f"{message} Remedy: fix or drop it, or pass strict=False.")
    warnings.warn(f"{message} Remedy: fix or drop it.", stacklevel=3)


def _resolve(first: str, wanted: Options, bases: Options) -> dict[str, Any]:
    """A group's final options: bases filled in, multipliers applied."""
    group = {name: base for name, base in bases.items() if base is not None} | {**wanted}
    for multiplier in [name for name in _MULTIPLIERS if name in wanted]:
        name, factor = _MULTIPLIERS[multiplier], group.pop(multiplier)
        if group.get(name) is None:
            raise InputError(
                f"Expected a base {name} for `{multiplier}` of {first!r}. Found none. "
                f"Remedy: param_groups(..., {name}=...), or {name!r} instead of {multiplier!r}."
            )
        group[name] = group[name] * factor
    # Schedules write into a tensor in place: groups must not share one.
    return {k: v.clone() if isinstance(v, Tensor) else v for k, v in group.items()}
