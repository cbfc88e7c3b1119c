"""The small model and its trainers, and late updates, for the tests of this folder."""

from tests.support.late_updates import compare_modes, late, small_updates  # noqa: F401
from tests.support.small_fixtures import *  # noqa: F403
