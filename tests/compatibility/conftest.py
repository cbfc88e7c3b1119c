"""The small model, its data, the trainers and the comparisons of the adapter tests."""

from tests.adapter.conftest import *  # noqa: F403
