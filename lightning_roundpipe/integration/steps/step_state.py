"""The state before a step, so that the step can be run again: [Note: steps that are run again] in
:mod:`retry`.

Weights, gradients, optimizer state and attributes are not in it: the engine gives them back as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from ...common.fingerprints import Versions, version_of
from ...common.sizes import num_bytes_of
from ...common.trees import mapped, tensors_in
from ...usercode.generators import ForeignStates
from .modules import ModuleScan

# Buffers are copied up to this size: statistics are small, tables and masks are not.
_MAX_COPIED_BYTES = 2**20


class StepState:
    """What a step may change before it fails.

    Args:
        devices: whose generators user code may draw from.
    """

    def __init__(self, scan: ModuleScan, batch: Any, devices: Sequence[torch.device]) -> None:
        self._batch = mapped(batch, anew=object)
        plain = (module for _, module in scan.named if isinstance(module._buffers, dict))  # TorchScript has its own
        self._registered = [(module, dict(module._buffers)) for module in plain]
        self._buffers = [_Buffer(*found) for found in scan.buffers()]
        self._weights = Versions(scan.parameters())
        self._batch_tensors = Versions(enumerate(tensor for _, tensor in tensors_in(batch)))
        # Generators that user code may draw from. The engine itself restores torch's generator of the host.
        self._put_back = [*map(_metric_state, scan.metrics), ForeignStates().put_back]
        self._put_back += [_restorer_of(device) for device in set(devices) if device.type != "cpu"]

    @property
    def batch(self) -> Any:
        """The batch with containers of its own: user code may take entries out of the one that it is given."""
        return mapped(self._batch, anew=object)

    def lost(self) -> str | None:
        """What has changed since and cannot be put back, in words; None if everything can."""
        for name in self._weights.written():
            return f"the weight {name!r}"
        if self._batch_tensors.written():
            return "a tensor of the batch"
        for buffer in self._buffers:
            if buffer.has_changed() and buffer.copy is None:
                return f"the buffer {buffer.name!r}"
        return None

    def too_large(self) -> Iterator[str]:
        """Names of buffers that have changed, and of which there is no copy."""
        return (buffer.name for buffer in self._buffers if buffer.copy is None and buffer.has_changed())

    def changed_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Name and present value of the buffers that have others now, as far as that can be told."""
        for buffer in self._buffers:
            if (now := buffer.changed_to()) is not None:
                yield buffer.name, now

    def restore(self) -> None:
        """Puts back everything that is not :meth:`lost`."""
        for module, buffers in self._registered:
            for name in [name for name in module._buffers if name not in buffers]:
                delattr(module, name)
            module._buffers.update({name: buffer for name, buffer in buffers.items() if buffer is None})
        for buffer in self._buffers:
            if buffer.copy is not None:
                buffer.put_back(buffer.copy)
        for put_back in self._put_back:
            put_back()


class _Buffer:
    """A buffer before a step."""

    def __init__(self, name: str, module: nn.Module, key: str, tensor: Tensor) -> None:
        self.name = name
        self._module, self._key, self._tensor = module, key, tensor
        self._version = version_of(tensor)
        self.copy = _clone(tensor) if num_bytes_of([tensor]) <= _MAX_COPIED_BYTES else None

    def has_changed(self) -> bool:
        """Whether it is another tensor now, or shows that it was written in place."""
        return self._module._buffers.get(self._key) is not self._tensor or version_of(self._tensor) != self._version

    def changed_to(self) -> Tensor | None:
        """The buffer as it is now, if it has other values."""
        now = self._module._buffers.get(self._key)
        if now is None or (self.copy is None and not self.has_changed()):
            return None
        same = self.copy is not None and now.shape == self.copy.shape and _is_equal(now, self.copy)
        return None if same else now

    def put_back(self, values: Tensor) -> None:
        """The same tensor again, with these values."""
        self._module._buffers[self._key] = self._tensor
        # By value as well: batch norm in user code writes without raising the version, as does what writes ``data``.
        if version_of(self._tensor) != self._version or not _is_equal(self._tensor, values):
            with torch.inference_mode(self._tensor.is_inference()), torch.no_grad():
                self._tensor.copy_(values)


def _is_equal(tensor: Tensor, values: Tensor) -> bool:
    try:
        return torch.equal(tensor, values)
    except NotImplementedError:  # of other layouts, such as sparse ones: their version tells
        return True


def _clone(tensor: Tensor) -> Tensor:
    """A copy for the same modes: evaluation in inference mode must not leave its tensors to training."""
    with torch.inference_mode(tensor.is_inference()):
        return tensor.detach().clone()


def _metric_state(metric: Metric) -> Callable[[], None]:
    """Puts back what updates change: the states (tensors in place, lists by appending) and counters beside them."""

    names = [name for name in metric._defaults if name in vars(metric)]  # others are those of a metric inside

    def states(values: dict[str, Any]) -> dict[str, Any]:
        own = ((name, values[name]) for name in names)
        return {name: _clone(value) if isinstance(value, Tensor) else list(value) for name, value in own}

    before = {**metric.__dict__, **states(metric.__dict__)}

    def put_back() -> None:
        metric.__dict__.clear()
        metric.__dict__.update({**before, **states(before)})  # the step may fail once more

    return put_back


def _restorer_of(device: torch.device) -> Callable[[], None]:
    api = torch.get_device_module(device)
    state = api.get_rng_state(device)
    return lambda: api.set_rng_state(state, device)
