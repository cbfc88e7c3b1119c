"""The small model and its trainers, for the tests of this folder."""

from tests.support.small_fixtures import *  # noqa: F403
