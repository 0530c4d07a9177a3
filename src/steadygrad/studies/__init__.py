"""The experiments behind the commands; each writes the folder of a run."""

try:
    import msgspec as _  # noqa: F401
except ModuleNotFoundError as error:
    # All modules of the studies need it, and import this package first.
    raise ModuleNotFoundError(
        "Expected the package 'msgspec'. Found none. Remedy: pip install \"steadygrad[cli]\".",
        name="msgspec",
    ) from error
