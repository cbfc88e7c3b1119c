"""The optimizer overlaps, as it does for users, and no update begins before something waits for it."""

from tests.support.late_updates import late, late_updates, small_updates  # noqa: F401
