"""What a run says of splits that change something."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

_WORDS = ("splitting the batch", "as one micro-batch", "in every micro-batch", "as two")


def told(run: Callable[[], Any]) -> list[str]:
    """Runs something; what the proof has said, in order."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    texts = [str(warning.message) for warning in caught]
    return [text for text in texts if any(words in text for words in _WORDS)]
