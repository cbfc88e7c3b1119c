"""Weights that training steps compute with while the next ones are still in the making.

[Note: stale weights]
A training step that waits for no update computes with the weights from *before the last update*: W[t+1] is made of
W[t] and of the gradient at W[t-1]. So every trained weight has up to two snapshots on the host, each of one *version*
of the weight (its fingerprint at that moment): the version that training steps compute with, and the latest one, which
the thread of the updates makes of the weight, bucket by bucket: ::

    update      t            t+1          t+2
    weight  W[t] -> W[t+1] -----> W[t+2] -----> W[t+3]
    steps           W[t]          W[t+1]        W[t+2]       (snapshots)

When the next optimizer step begins, the update before it has ended and no step computes: steps go over to the version
from before it, and the memory of the one that they have left takes the next. An optimizer step that updates nothing
leaves the versions as they are.

The weights themselves stay as they are in exact mode: all code between training steps sees them, finished. A training
step, and nothing else, runs with snapshots in the place of the data of the weights (``replaced`` in
:mod:`weights.futures`): so units, user code and hooks all compute with the same version, however they get hold of a
weight. The update that is under way meanwhile works on the data that was there before.

Code that writes a weight between two steps (``load_state_dict``, a callback) wants the next step to compute with it.
The version of the weight tells; then a snapshot is made of it at once, which waits for its update, as in the very first
step. A write through ``.data`` leaves no trace in it. It is in the snapshot that the next update makes, like everything
that happens to a weight, and so is computed with two steps later.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator

import torch
from torch import Tensor, nn

from ..common.fingerprints import Fingerprint, fingerprint_of
from ..common.sizes import num_bytes_of
from ..weights.futures import ParameterFuture, State, replaced, unwaited


class _Snapshots:
    """Of one weight, by version; see [Note: stale weights]."""

    def __init__(self) -> None:
        self.tensors: dict[Fingerprint, Tensor] = {}
        self.used: Fingerprint | None = None  # the version that steps compute with
        self._latest: Fingerprint | None = None  # of the weight, as the last update has left it
        self._updated: Tensor | None = None  # the memory of the weight, which an update is writing

    def current(self, weight: nn.Parameter) -> Tensor:
        """What the next step computes with; waits for the weight if anything but an update has written it."""
        with unwaited():
            now = fingerprint_of(weight)
        if self.used is None or self.used not in self.tensors or now != self._latest:
            data = weight.detach()
            self.used = None  # its memory may be taken
            self._make(now, data)
            self.used = self._latest = now
        return self.tensors[self.used]

    def note_update(self, weight: nn.Parameter, *, is_updated: bool) -> None:
        """An update begins, which raises the version of the weight if it is updated."""
        self.used = fingerprint_of(weight)
        self._latest = self.used._replace(version=self.used.version + is_updated)
        self._updated = weight.data

    def make_latest(self) -> None:
        """Makes the snapshot of the weight after its update, if the snapshots are older than the update."""
        data, self._updated = self._updated, None
        if data is not None and self._latest is not None:
            self._make(self._latest, data)

    def _make(self, version: Fingerprint, data: Tensor) -> None:
        """Makes the snapshot of a version, in memory that no step needs any more."""
        known = next((self.tensors.pop(other) for other in list(self.tensors) if other != self.used), None)
        with torch.inference_mode(False), torch.no_grad():
            if known is None or known.shape != data.shape or known.dtype != data.dtype:
                known = torch.empty_like(data)
            self.tensors[version] = known.copy_(data)


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
        with replaced({weight: snapshots.current(weight) for weight, snapshots in self._snapshots.items()}):
            yield

    def updating(self, weights: Collection[nn.Parameter]) -> Callable[[ParameterFuture], None]:
        """An update of ``weights`` begins; what is to be called on its thread for each bucket that it has written."""
        with unwaited():
            for weight, snapshots in self._snapshots.items():
                snapshots.note_update(weight, is_updated=weight in weights)
        return self._finish

    def _finish(self, future: ParameterFuture) -> None:
        for weight in future.parameters:
            if (snapshots := self._snapshots.get(weight)) is not None:
                snapshots.make_latest()
        future.turn(State.READY)

    @property
    def host_bytes(self) -> int:
        """What the snapshots take on the host."""
        return num_bytes_of(tensor for s in self._snapshots.values() for tensor in list(s.tensors.values()))
