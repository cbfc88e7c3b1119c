"""One thread per test: the models are tiny."""

from tests.support.small_fixtures import one_thread  # noqa: F401
