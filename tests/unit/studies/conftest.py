"""What tests of studies share."""

from tests.unit.studies.helpers import one_thread

__all__ = ["one_thread"]
