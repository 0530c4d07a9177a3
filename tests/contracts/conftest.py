"""Eight-bit states for small problems too."""

from tests.contracts.problems import small_parameters_are_coded  # noqa: F401
