"""Late updates, and a folder for what trainers write."""

from pathlib import Path

import pytest

from tests.support.late_updates import late, small_updates  # noqa: F401


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the current one."""
    monkeypatch.chdir(tmp_path)
