"""Adapters to trainers and loggers, each imported on demand."""

from steadygrad._checks import install

__all__ = ["MissingExtraError"]


class MissingExtraError(ImportError):
    """A package that an adapter needs is not installed.

    Args:
        package: The package's name for pip.
        extra: The extra of steadygrad that brings it; None: it comes from elsewhere.
    """

    def __init__(self, package: str, extra: str | None) -> None:
        remedy = install(extra) if extra else f"pip install {package}"
        super().__init__(f"Expected the package {package!r}. Found none. Remedy: {remedy}.")
