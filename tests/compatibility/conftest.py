"""The small model, its data, the trainers and the comparisons of the integration tests; and a model that logs."""

from typing import Any

import pytest

from tests.support.small import *  # noqa: F403


@pytest.fixture
def logs(small: Any) -> Any:
    """The small model with a logged training loss and a logged validation loss."""

    class Logs(small):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            self.log("loss", loss)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val", self.loss(batch))

    return Logs
