"""What the tests of mistakes share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from tests.support.small import Small

Step = Callable[[Any, Any, int], Any]


class Batches:
    """An iterable of ready-made batches."""

    def __init__(self, batches: Any) -> None:
        self.batches = list(batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def with_step(step: Step, base: type[Small] = Small) -> Any:
    """The small model with another ``training_step``."""
    return type("Mistaken", (base,), {"training_step": step})()


def refusal(make_trainer: Any, make_loader: Any) -> Callable[..., str]:
    """Makes a check that a run ends in its step number ``after`` with an error, whose message the check returns."""

    def check(
        module: Any, match: str, error: type[Exception] = MisconfigurationException, loader: Any = None,
        after: int = 0, **settings: Any,
    ) -> str:  # fmt: skip
        before = {name: weight.clone() for name, weight in module.state_dict().items()}
        trainer = make_trainer(**settings)
        with pytest.raises(error, match=match) as caught:
            trainer.fit(module, make_loader() if loader is None else loader)
        assert trainer.global_step == after
        now = {name: weight for name, weight in module.state_dict().items() if not weight.is_meta}
        moved = [name for name, weight in now.items() if not torch.equal(weight, before[name])]
        assert after or len(moved) <= 1, f"nothing but the change itself may have happened: {moved}"
        return str(caught.value)

    return check
