"""The commands beside the studies: functions of their options' values."""

import json
import platform
import re
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import resources
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from shlex import quote
from typing import Any

from steadygrad import __version__
from steadygrad._checks import InputError, from_extra, install
from steadygrad.cli.console import emit, printable


def report(values: Mapping[str, Any]) -> None:
    """Draws the page of a run again, and prints its path."""
    from steadygrad.studies.page import write

    emit(printable(str(write(values["RUN"]))))


def diff(values: Mapping[str, Any]) -> int:
    """Prints where two runs part, and draws a page; 3 where they do, 4 where it is not known."""
    from_extra("msgspec", "cli")
    from steadygrad._files import replace
    from steadygrad.trace import diff, runs, words

    rename = [_renaming(text) for text in values.get("rename", ())]
    a, b = runs.read_run(values["A"], rename), runs.read_run(values["B"])
    found = diff.compare(a, b)
    said, path = words.summary(found), values["B"] / "diff.html"
    lines = [said["answer"], *filter(None, [said["agrees"]]), *said["reasons"]]
    lines += [f"Then, in the {x['stage']}: {x['what']}." for x in said["next"]]
    lines += said["remarks"]
    try:
        replace(path, words.page(found, a, b).encode("utf-8", "replace"))
        lines += ["", f"Page: {path}"]
    except OSError as error:
        lines += ["", f"No page: {path}: {error.strerror}"]
    emit(json.dumps(said, indent=2) if values.get("json") else "\n".join(map(printable, lines)))
    return {"same": 0, "part": 3}.get(found.verdict, 4)


def _renaming(text: str) -> tuple[str, str]:
    old, equals, new = text.partition("=")
    if not (old and equals):
        raise InputError(
            f"Parameter `--rename` should be OLD=NEW. Found {text!r}. Remedy: 'old.*=new.*'."
        )
    return old, new


def init(values: Mapping[str, Any]) -> None:
    """Writes a task that runs as it is; a file that exists is left alone."""
    name, path = values["FILE"], Path(values["FILE"])
    # A name that is not printable cannot be pasted; bytes that are no UTF-8 are not printable.
    if not name.endswith(".py") or not path.suffix or not name.isprintable():
        raise InputError(
            "FILE should name a file of Python, in characters that can be printed. "
            f"Found {name!r}. Remedy: such as my_task.py."
        )
    text = (resources.files("steadygrad.tasks") / "template.py").read_text(encoding="utf-8")
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text.replace("examples/my_task.py", "FILE"))
    except OSError as error:
        raise InputError(
            f"FILE should be a new file that can be written. Found {name}: "
            f"{error.strerror}. Remedy: another name, or another folder."
        ) from None
    emit(f"{name}: now run `steadygrad advise {quote(f'{name}:make_task')} --budget 2m`")


def doctor(values: Mapping[str, Any]) -> None:
    """Prints versions, the machine, a step on each device, gloo, and missing extras."""
    found = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "steadygrad": __version__,
        **{name: _version(name) for name in ("torch", "numpy", "numba")},
        **_tried("import torch", _here),
        **_tried("extras", _missing),
    }
    lines = [printable(f"{name:20}  {value}") for name, value in found.items()]
    emit(json.dumps(found, indent=2) if values.get("json") else "\n".join(lines))


def _tried(name: str, look: Callable[..., Any], *arguments: Any) -> dict[str, object]:
    """The values of a look, or its error: an installation may be broken anywhere."""
    try:
        found = look(*arguments)
    except Exception as error:
        found = " ".join(f"fails: {type(error).__name__}: {error}".split())[:300]
    return found if isinstance(found, dict) else {name: found or "works"}


def _here() -> dict[str, object]:
    import torch

    from steadygrad.distributed import check_gloo

    devices = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    found: dict[str, object] = {name: torch.cuda.get_device_name(name) for name in devices}
    # With the build, such as +cu130, which PyPI's metadata leave out.
    found["torch"] = torch.__version__
    found["threads"] = torch.get_num_threads()
    found["instruction set"] = torch.backends.cpu.get_cpu_capability()
    for device in ("cpu", *devices, *["mps"] * torch.backends.mps.is_available()):
        found |= _tried(f"step on {device}", _step, device)
    return found | _tried("gloo", check_gloo)


def _version(package: str) -> str | None:
    with suppress(PackageNotFoundError):
        return version(package)
    return None


def _missing() -> dict[str, str]:
    """Extras of which a package is missing, and how to get them."""
    lines = requires("steadygrad") or ()
    needs = [re.match(r"([\w.-]+).*\bextra == .([\w-]+)", line) for line in lines]
    absent = sorted({need[2] for need in needs if need and _version(need[1]) is None})
    return {f"missing {extra}": install(extra) for extra in absent}


def _step(device: str) -> str:
    """One step of LANS, by loops or kernels where there are any, judged by multi-tensor calls."""
    import torch

    from steadygrad.optim import LANS, checks

    own, other = torch.linspace(-1, 1, 100_000, device=device).repeat(2, 1).unbind()
    own.grad, other.grad = own.cos(), other.cos()
    checks.warn_once.cache_clear()  # what was said of one device is said of the next
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        LANS([own]).step()
    LANS([other], foreach=True).step()
    torch.testing.assert_close(own, other)
    # A step that finds none though it looks for them warns.
    path = {"cpu": "compiled loops (Numba)", "cuda": "kernels (Triton), as multi-tensor calls"}
    found = "multi-tensor calls" if caught else path.get(own.device.type, "multi-tensor calls")
    return " ".join([found, *(f"({warning.message})" for warning in caught)])
