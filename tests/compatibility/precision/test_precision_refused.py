"""Precision that cannot be had here: an error when the Trainer is made."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from lightning.pytorch.plugins import (
    BitsandbytesPrecision,
    DeepSpeedPrecision,
    FSDPPrecision,
    TransformerEnginePrecision,
    XLAPrecision,
)
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_roundpipe import RoundPipeStrategy
from tests.support.parity import both_refuse, make_trainer
from tests.support.rows import compat


def made_without_its_package(kind: type[Precision], precision: str) -> Precision:
    """A plugin as it is where the package that it needs is installed."""
    plugin = object.__new__(kind)
    plugin.precision = precision  # type: ignore[misc]
    return plugin


@compat("Precision", "transformer-engine; transformer-engine-float16", "refused", "Use bf16-mixed.")
@pytest.mark.parametrize("precision", ["transformer-engine", "transformer-engine-float16"])
def test_what_needs_a_package_says_so_as_in_plain(precision: str) -> None:
    both_refuse(partial(make_trainer, precision=precision), ModuleNotFoundError, "transformer_engine")


REFUSED: dict[type[Precision], str] = {
    TransformerEnginePrecision: r"keeps scales outside parameters.*precision='bf16-mixed'",
    BitsandbytesPrecision: (
        "only supported on CUDA GPUs|quantizes weights when they are moved to a GPU.*precision='bf16-mixed'"
    ),
    FSDPPrecision: r"works with FSDPStrategy only.*precision='bf16-mixed'",
    DeepSpeedPrecision: r"works with DeepSpeedStrategy only.*precision='bf16-mixed'",
    XLAPrecision: r"works with XLAStrategy only.*precision='bf16-mixed'",
}


@compat("Plugin", "TransformerEnginePrecision", "refused", "Use bf16-mixed.")
@compat(
    "Plugin",
    "BitsandbytesPrecision",
    "refused",
    "It quantizes weights that move to a GPU, and these stay on the host.",
)
@compat("Plugin", "FSDPPrecision; DeepSpeedPrecision; XLAPrecision", "refused", "Set `precision`, without a plugin.")
@compat("Misuse", "precision plugin of another strategy", "refused", "The error comes with the Trainer.")
@pytest.mark.parametrize("kind", REFUSED)
def test_plugins_of_other_strategies_are_refused(kind: type[Precision]) -> None:
    message = REFUSED[kind]
    with pytest.raises((MisconfigurationException, RuntimeError), match=message):
        make_trainer(plugins=[made_without_its_package(kind, "bf16-mixed")])
    strategy = RoundPipeStrategy(precision_plugin=made_without_its_package(kind, "bf16-mixed"))
    with pytest.raises(MisconfigurationException, match=message.rpartition("|")[2]):
        strategy._configure_launcher()  # what the Trainer calls


@pytest.mark.parametrize("settings", [{"precision": "half"}, {"precision": "16-mixed", "plugins": [Precision()]}])
def test_impossible_choices_raise_what_plain_raises(settings: dict[str, Any]) -> None:
    both_refuse(partial(make_trainer, **settings), ValueError, r"[pP]recision")
