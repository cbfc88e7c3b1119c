"""The small model and the parity driver as fixtures, with files in the folder of the test."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from tests.support import parity
from tests.support.parity import Run
from tests.support.small import Small


@pytest.fixture(autouse=True)
def one_thread(fixed_global_state: None) -> None:
    """The models are so small that a second thread only costs."""
    torch.set_num_threads(1)


@pytest.fixture
def small() -> type[Small]:
    """The class of the small model, to be used or derived from."""
    return Small


@pytest.fixture
def make_loader() -> Callable[..., Any]:
    """See :func:`parity.make_loader`."""
    return parity.make_loader


@pytest.fixture
def make_trainer(tmp_path: Path) -> Callable[..., L.Trainer]:
    """See :func:`parity.make_trainer`."""
    return partial(parity.make_trainer, default_root_dir=tmp_path)


@pytest.fixture
def fit_both(tmp_path: Path) -> Callable[..., tuple[Run, Run]]:
    """Trains two fresh modules with the same settings: plain first, RoundPipe second."""

    def fit(
        make_module: Callable[[], Any],
        loader: Any = None,
        *,
        val_loader: Any = None,
        callbacks: Callable[[], list[Any]] = list,
        plain: dict[str, Any] | None = None,
        ours: dict[str, Any] | None = None,
        **settings: Any,
    ) -> tuple[Run, Run]:
        data = parity.make_loader() if loader is None else loader
        settings["default_root_dir"] = tmp_path
        one, other = (
            parity.fit(kind, make_module, data, val_loader, callbacks=callbacks(), **{**settings, **(own or {})})
            for kind, own in zip(parity.KINDS, (plain, ours), strict=True)
        )
        return one, other

    return fit


@pytest.fixture
def assert_alike() -> Callable[..., None]:
    """See :func:`parity.assert_alike`."""
    return parity.assert_alike


@pytest.fixture
def assert_same_training() -> Callable[..., None]:
    """Both runs have moved, and to the same weights and the same optimizer state."""

    def check(plain: Run, ours: Run, **tolerances: float) -> None:
        plain.assert_moved()
        trained = ([run.state, run.optimizers, run.trainer.global_step] for run in (ours, plain))
        parity.assert_alike(*trained, **tolerances)

    return check


@pytest.fixture
def fit_alike(fit_both: Callable[..., tuple[Run, Run]], assert_same_training: Callable[..., None]) -> Any:
    """As ``fit_both``, and both must have trained the same."""

    def fit(*args: Any, **kwargs: Any) -> tuple[Run, Run]:
        plain, ours = fit_both(*args, **kwargs)
        assert_same_training(plain, ours)
        return plain, ours

    return fit
