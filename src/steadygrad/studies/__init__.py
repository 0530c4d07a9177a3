"""The experiments behind the commands; each writes the folder of a run."""

from importlib.util import find_spec

from steadygrad._checks import InputError, install

# All modules of the studies import this package first.
NEEDED = ("jinja2", "matplotlib", "msgspec", "rich", "scipy")
if missing := [name for name in NEEDED if find_spec(name) is None]:
    raise InputError(
        f"This needs {', '.join(NEEDED)}. Found no {', '.join(missing)}. Remedy: {install('cli')}."
    )
