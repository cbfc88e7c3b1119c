"""Plain Lightning on a simulated GPU: for comparisons where a GPU computes otherwise than the host.

Autocast has other lists of operators there, so that mixed precision of the host is no reference for that of a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import SingleDeviceStrategy


class _Simulated(Accelerator):
    """The first simulated GPU, as Lightning knows accelerators."""

    def setup_device(self, device: torch.device) -> None:
        torch.get_device_module(device).set_device(device)

    def teardown(self) -> None:
        pass

    @staticmethod
    def parse_devices(devices: Any) -> int:
        return 1

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        return [torch.device("sim", 0)]

    @staticmethod
    def auto_device_count() -> int:
        return 1

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def name() -> str:
        return "simulated"

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        return {}


def on_simulated_gpu(trainer_options: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a Trainer that trains as ``trainer_options`` say, on a simulated GPU."""
    settings = dict(trainer_options)
    plugins = [
        MixedPrecision(plugin.precision, "sim", plugin.scaler) if isinstance(plugin, MixedPrecision) else plugin
        for plugin in settings.pop("plugins", [])
    ]
    if str(settings.get("precision", "")).endswith("-mixed"):
        plugins.append(MixedPrecision(settings.pop("precision"), "sim"))
    strategy = SingleDeviceStrategy(torch.device("sim", 0), accelerator=_Simulated())
    return {**settings, "plugins": plugins, "strategy": strategy, "accelerator": "auto"}
