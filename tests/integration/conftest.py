"""The small model and its trainers, for the tests of this folder."""

from tests.support.small import *  # noqa: F403
