"""Updates that begin only when something waits for them: a callback that is not waited for would see old weights."""

import pytest

from tests.support.late_updates import Late, late, small_updates  # noqa: F401


@pytest.fixture(autouse=True)
def late_updates(late: Late) -> None:  # noqa: F811
    """In all tests of this folder."""
