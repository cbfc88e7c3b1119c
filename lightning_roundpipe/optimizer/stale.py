"""Weights that training steps compute with while the next ones are still in the making.

[Note: stale weights]
A training step that waits for no update computes with the weights from *before the last update*: W[t+1] is made of
W[t] and of the gradient at W[t-1]. So every trained weight has two snapshots on the host:

- the *front*: training steps compute with it,
- the *back*: the thread of the updates fills it, share by share, with what an update has made of the weight.

When the next optimizer step begins, the update before it has ended and no step computes: front and back change places.
An optimizer step that updates nothing leaves them as they are.

The weights themselves stay as they are in exact mode: everybody between training steps sees them, finished. A training
step, and nothing else, runs with the fronts in the place of the data of the weights (``replaced`` in
:mod:`weights.pending`). The update that is under way meanwhile works on the data that was there before.

Whoever writes a weight between two steps (``load_state_dict``, a callback) wants the next step to compute with it. The
fingerprint of a weight tells; then the front is made anew of the weight, which is waited for, as in the very first
step. A write through ``.data`` leaves no trace in it. It is in the snapshot that the next update makes, like everything
that happens to a weight, and so is computed with two steps later.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from ..common.fingerprints import Fingerprint, fingerprint_of
from ..common.sizes import num_bytes_of
from ..weights.pending import replaced, unwaited


class _Snapshots:
    """Front and back of one weight; see [Note: stale weights].

    Each has the fingerprint of the weight when the snapshot was made; None where there is none.
    """

    def __init__(self) -> None:
        self.front: Tensor | None = None
        self.back: Tensor | None = None
        self._front_of: Fingerprint | None = None
        self._back_of: Fingerprint | None = None
        self._updated: Fingerprint | None = None  # the weight since the last update
        self._is_one_behind = False

    def renew(self, weight: nn.Parameter) -> None:
        """Makes the front anew, if anybody but an update has written the weight; waits for the weight then."""
        with unwaited():
            now = fingerprint_of(weight)
        if self.front is not None and self._is_one_behind and now == self._updated:
            return
        self.front = _filled(self.front, weight.detach())
        self._front_of = self._updated = now
        self._is_one_behind = True

    def turn(self, before: Fingerprint, after: Fingerprint) -> None:
        """An update begins, and raises the version of the weight: the front becomes what the weight was before it."""
        if self._back_of == before:
            self.front, self.back = self.back, self.front
            self._front_of, self._back_of = self._back_of, self._front_of
        self._is_one_behind = self._front_of == before
        self._updated = after

    def refill(self, data: Tensor) -> None:
        """Makes the back anew, of the weight's data after the update."""
        self.back = _filled(self.back, data)
        self._back_of = self._updated


class StaleWeights:
    """The snapshots of all trained weights; see [Note: stale weights]."""

    NUM_SNAPSHOTS = 2  # of each

    def __init__(self) -> None:
        self._snapshots: dict[nn.Parameter, _Snapshots] = {}

    @contextlib.contextmanager
    def computing(self, weights: Iterable[nn.Parameter]) -> Iterator[None]:
        """Around a training step: ``weights`` are what they were before the last update.

        Raises:
            BaseException: what went wrong in an update that had to be waited for.
        """
        self._snapshots = {weight: self._snapshots.get(weight) or _Snapshots() for weight in weights}
        fronts: dict[nn.Parameter, Tensor] = {}
        for weight, snapshots in self._snapshots.items():
            snapshots.renew(weight)
            assert snapshots.front is not None
            fronts[weight] = snapshots.front
        with replaced(fronts):
            yield

    @contextlib.contextmanager
    def turning(self) -> Iterator[None]:
        """Around the moment at which an update begins and the versions of its weights are raised."""
        with unwaited():
            before = [fingerprint_of(weight) for weight in self._snapshots]
        yield
        with unwaited():
            for (weight, snapshots), then in zip(self._snapshots.items(), before, strict=True):
                snapshots.turn(then, fingerprint_of(weight))

    def refill(self, weight: nn.Parameter, data: Tensor) -> None:
        """The update of ``weight`` is done, and has made ``data``; called by its thread, before anybody else knows."""
        snapshots = self._snapshots.get(weight)
        if snapshots is not None:
            snapshots.refill(data)

    @property
    def host_bytes(self) -> int:
        """What the snapshots take on the host."""
        return num_bytes_of(tensor for s in self._snapshots.values() for tensor in (s.front, s.back))


def _filled(known: Tensor | None, data: Tensor) -> Tensor:
    """``known`` with the values of ``data``, or a copy of it if they differ in more than values."""
    with torch.inference_mode(False), torch.no_grad():
        if known is None or known.shape != data.shape or known.dtype != data.dtype:
            known = torch.empty_like(data)
        return known.copy_(data)
