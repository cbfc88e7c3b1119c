"""Precision that cannot be had here: an error when the Trainer is made."""

from __future__ import annotations

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
from tests.support.parity import KINDS, make_trainer
from tests.support.rows import compat


def made_without_its_package(kind: type[Precision], precision: str) -> Precision:
    """A plugin as it is where the package that it needs is installed."""
    plugin = object.__new__(kind)
    plugin.precision = precision  # type: ignore[misc]
    return plugin


NEED_PACKAGES: list[Any] = [
    pytest.param(
        "transformer-engine",
        marks=compat("Precision", "transformer-engine", "refused", "An error; without the package, Lightning's own."),
    ),
    pytest.param(
        "transformer-engine-float16",
        marks=compat(
            "Precision", "transformer-engine-float16", "refused", "An error; without the package, Lightning's own."
        ),
    ),
]


@pytest.mark.parametrize("precision", NEED_PACKAGES)
def test_what_needs_a_package_says_so_as_in_plain(precision: str) -> None:
    messages = []
    for kind in KINDS:
        with pytest.raises(ModuleNotFoundError, match="transformer_engine") as caught:
            make_trainer(kind, precision=precision)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


REFUSED: list[Any] = [
    pytest.param(
        TransformerEnginePrecision,
        r"keeps scales outside parameters.*precision='bf16-mixed'",
        marks=compat(
            "Plugin",
            "TransformerEnginePrecision",
            "refused",
            "An error when the Trainer is made: its scales live outside parameters and buffers. Use bf16-mixed.",
        ),
    ),
    pytest.param(
        BitsandbytesPrecision,
        "only supported on CUDA GPUs|quantizes weights when they are moved to a GPU.*precision='bf16-mixed'",
        marks=compat(
            "Plugin",
            "BitsandbytesPrecision",
            "refused",
            "An error when the Trainer is made: it quantizes weights that are moved to a GPU, and these stay on the "
            "host. Without a GPU, Lightning's own error.",
        ),
    ),
    pytest.param(
        FSDPPrecision,
        r"works with FSDPStrategy only.*precision='bf16-mixed'",
        marks=compat(
            "Plugin", "FSDPPrecision", "refused", "An error when the Trainer is made: set precision, without plugin."
        ),
    ),
    pytest.param(
        DeepSpeedPrecision,
        r"works with DeepSpeedStrategy only.*precision='bf16-mixed'",
        marks=compat(
            "Plugin",
            "DeepSpeedPrecision",
            "refused",
            "An error when the Trainer is made: set precision, without plugin.",
        ),
    ),
    pytest.param(
        XLAPrecision,
        r"works with XLAStrategy only.*precision='bf16-mixed'",
        marks=compat(
            "Plugin", "XLAPrecision", "refused", "An error when the Trainer is made: set precision, without plugin."
        ),
    ),
]


@compat("Misuse", "precision plugin of another strategy", "refused", "An error when the Trainer is made.")
@pytest.mark.parametrize(("kind", "message"), REFUSED)
def test_plugins_of_other_strategies_are_refused(kind: type[Precision], message: str) -> None:
    with pytest.raises((MisconfigurationException, RuntimeError), match=message):
        make_trainer(plugins=[made_without_its_package(kind, "bf16-mixed")])
    strategy = RoundPipeStrategy(precision_plugin=made_without_its_package(kind, "bf16-mixed"))
    with pytest.raises(MisconfigurationException, match=message.rpartition("|")[2]):
        strategy.set_world_ranks()  # what the Trainer calls


@pytest.mark.parametrize("settings", [{"precision": "half"}, {"precision": "16-mixed", "plugins": [Precision()]}])
def test_impossible_choices_raise_what_plain_raises(settings: dict[str, Any]) -> None:
    messages = []
    for kind in KINDS:
        with pytest.raises(ValueError, match=r"[pP]recision") as caught:
            make_trainer(kind, **settings)
        messages.append(_without_address(str(caught.value)))
    assert messages[0] == messages[1]


def _without_address(text: str) -> str:
    """Up to the address of an object."""
    return text.split(" object at ")[0]
