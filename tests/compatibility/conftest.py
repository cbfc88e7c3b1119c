"""One thread per test: the models are tiny."""

from tests.support.small import one_thread  # noqa: F401
