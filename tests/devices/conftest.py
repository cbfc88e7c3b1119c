"""Page-locked memory without a driver."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lightning_roundpipe.devices.gpu.pinned import PageLockedMemory
from tests.support.page_locks import PageLocks


@pytest.fixture
def driver() -> Iterator[PageLocks]:
    made = PageLocks()
    yield made
    made.host.dispose()
    assert made.locked == {}, "memory was left page-locked"


@pytest.fixture
def memory(driver: PageLocks) -> PageLockedMemory:
    return driver.host
