"""In this process as on all ranks."""

from tests.contracts.problems import small_parameters_are_coded  # noqa: F401
