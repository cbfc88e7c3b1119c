"""What the tests of mistakes share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from tests.support.parity import make_loader, make_trainer
from tests.support.small import Small

Step = Callable[[Any, Any, int], Any]


def with_step(step: Step) -> Any:
    """The small model with another ``training_step``."""
    return type("Mistaken", (Small,), {"training_step": step})()


def assert_refused(
    module: Any,
    match: str,
    error: type[Exception] = MisconfigurationException,
    loader: Any = None,
    after: int = 0,
    **settings: Any,
) -> str:
    """A run ends in its step number ``after`` with an error, whose message is returned."""
    before = {name: weight.clone() for name, weight in module.state_dict().items()}
    trainer = make_trainer(**settings)
    with pytest.raises(error, match=match) as caught:
        trainer.fit(module, make_loader() if loader is None else loader)
    assert trainer.global_step == after
    now = {name: weight for name, weight in module.state_dict().items() if not weight.is_meta}
    moved = [name for name, weight in now.items() if not torch.equal(weight, before[name])]
    assert after or len(moved) <= 1, f"nothing but the change itself may have happened: {moved}"
    return str(caught.value)
