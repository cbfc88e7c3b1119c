"""Plain Lightning on a GPU, simulated or not: for comparisons where a GPU computes otherwise than the host.

Autocast has other lists of operators there, so that mixed precision of the host is no reference for that of a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import SingleDeviceStrategy


class _First(Accelerator):
    """The first GPU, whatever its type, as Lightning knows accelerators."""

    def setup_device(self, device: torch.device) -> None:
        torch.get_device_module(device).set_device(device)

    def teardown(self) -> None:
        pass

    @staticmethod
    def parse_devices(devices: Any) -> int:
        return 1

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        return [_gpu()]

    @staticmethod
    def auto_device_count() -> int:
        return 1

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def name() -> str:
        return "first"

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        return {}


def _gpu() -> torch.device:
    found = torch.accelerator.current_accelerator()
    assert found is not None
    return torch.device(found.type, 0)


def on_gpu(trainer_options: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a Trainer that trains as ``trainer_options`` say, on the first GPU."""
    settings, gpu = dict(trainer_options), _gpu()
    plugins = [
        MixedPrecision(plugin.precision, gpu.type, plugin.scaler) if isinstance(plugin, MixedPrecision) else plugin
        for plugin in settings.pop("plugins", [])
    ]
    if str(settings.get("precision", "")).endswith("-mixed"):
        plugins.append(MixedPrecision(settings.pop("precision"), gpu.type))
    strategy = SingleDeviceStrategy(gpu, accelerator=_First())
    return {**settings, "plugins": plugins, "strategy": strategy, "accelerator": "auto"}
