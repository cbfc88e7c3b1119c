"""What device copies of weights are made from: the masters, or copies of them in the dtype that autocast computes in.

[Note: working copies]
Under mixed precision a device gets the *low* parameters of a unit (see [Note: low parameters] in :mod:`weights.casts`)
in the low dtype, which halves what travels. The cast is made on the host, once per step and weight, into a *working
copy* that is kept: a buffer of the low dtype. The masters stay as they are, and gradients of low parameters add up in
the masters' dtype.

Which parameters are low is learned in runs in the masters' dtypes, for training and evaluation apart, and holds for
one state of autocast. So a unit has two *forms*: low and full. It takes its full form

- in every run that learns something about it, and from there to the end of the step,
- in steps that begin with nothing known about it, or after it was switched to another behaviour,
- for good, in training or in evaluation, as soon as it was called in another state of autocast there.

Both forms give the same values, so that a forward in one and a recomputation in the other agree.

A copy is right as long as its master does not change. Trainable masters may change between a training step and the
next step. An update behind the pipeline makes the copies of a bucket of weights right after the weights, on its thread.
They are right in the next step if nothing looks at the weights before it begins (UNSEEN in [Note: parameter futures] in
:mod:`weights.futures`). Who needs the copy of a weight whose update is under way waits for both. All others count as
changed if their version, address, shape or dtype says so, or some of their values do,
or if another kind of step begins. Writes through ``.data`` leave no other trace: callbacks swap weights before a
validation in this way, and let a frozen teacher follow its student, which changes all values. So a few values of
every such master are looked at in every step.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ..common.fingerprints import Fingerprint, fingerprint_of
from ..common.sizes import num_bytes_of
from ..common.threads import Worker
from .casts import CastWatch, Use, in_doubt
from .events import tell
from .futures import ParameterFuture, State, await_update, take_unseen, unwaited
from .units import Unit

Autocast = tuple[bool, torch.dtype]
_LOW = (torch.bfloat16, torch.float16)  # what autocast computes in
# Less is cast before another thread has begun.
_MIN_HELPED_BYTES = 2**20
_NUM_SAMPLES = 32


@dataclass
class _Evidence:
    """What is known about a unit.

    Attributes:
        autocast: the state in which it was called; None if there were several.
        uses: of its parameters, the worst of all runs.
    """

    autocast: Autocast | None
    uses: dict[nn.Parameter, Use] = field(default_factory=dict)


@dataclass
class _Copy:
    """A working copy.

    Attributes:
        version: what it was made of, see :meth:`WorkingCopies.version`.
        made_of: the same, if an update has made it.
    """

    data: Tensor
    version: Hashable = None
    made_of: Fingerprint | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)


class WorkingCopies:
    """See [Note: working copies]. May be used from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._evidence: dict[tuple[Unit, bool], _Evidence] = {}
        self._forms: dict[Unit, bool] = {}
        self._copies: dict[tuple[nn.Parameter, torch.dtype], _Copy] = {}
        self._samples: dict[nn.Parameter, bytes] = {}  # in this step
        self._helper: Worker | None = None
        self._num_steps = 0
        self._num_updates = 0
        self._num_loops = 0
        self._kind: Hashable = None
        self._trains = False

    # --- what the masters are now --------------------------------------------------------------------------------

    def begin_step(self, kind: Hashable, *, training: bool, helper: Worker | None = None) -> None:
        """A step begins; a training step before it may have been followed by an update.

        Args:
            helper: a thread that was started, for the casts that no update has made: it has more intra-op threads than
                those that load weights.
        """
        with self._lock:
            self._helper = helper
            self._num_updates += self._trains
            self._num_loops += kind != self._kind
            self._kind, self._trains = kind, training
            self._forms.clear()
            self._samples.clear()
            self._num_steps += 1  # last: see updating
        self._trust(take_unseen())

    def outlast_step(self, masters: Iterable[nn.Parameter]) -> bool:
        """Whether device copies of all of ``masters`` are likely to be right in the next step, too."""
        return not self._trains or not any(master.requires_grad for master in masters)

    def source(self, master: nn.Parameter, dtype: torch.dtype) -> Tensor:
        """What to upload for a device copy in ``dtype``, on the host; it does not change before the next step."""
        await_update(master)  # with no lock held
        if dtype == master.dtype:
            with unwaited():
                return master.detach()
        with self._lock, unwaited():
            copy = self._copies.get((master, dtype))
            cast = torch.empty_like(master, device="meta")  # as autocast would make it
            if copy is None or copy.data.shape != cast.shape or copy.data.stride() != cast.stride():
                with torch.inference_mode(False):  # else it could not be written to in training
                    copy = self._copies[master, dtype] = _Copy(torch.empty_like(master, dtype=dtype))
        version = self.version(master, dtype)
        if copy.version != version:

            def convert() -> None:
                with copy.lock:  # not the other one: different weights are converted at the same time
                    if copy.version != version:
                        self._convert(copy, master, dtype)
                        copy.version = version

            if self._helper is None or master.nbytes < _MIN_HELPED_BYTES:
                convert()
            else:
                self._helper.call(convert, "roundpipe-cast")
        return copy.data

    def _convert(self, copy: _Copy, master: nn.Parameter, dtype: torch.dtype) -> None:
        tell("refresh", (master,), place=dtype)
        with unwaited():
            copy.data.copy_(master.detach())

    def updating(self, weights: Collection[nn.Parameter]) -> Callable[[ParameterFuture], None]:
        """An update of ``weights`` begins; what is to be called on its thread for each bucket that it has written."""
        num_steps = self._num_steps

        def finish(future: ParameterFuture) -> None:
            with unwaited():
                if not self._refresh(future.parameters):
                    future.turn(State.READY)
                    return
                future.turn(State.UNSEEN)
                if self._num_steps != num_steps:  # else the step that begins next finds it unseen
                    self._trust(future.parameters)
                    future.turn(State.READY)
                future.wake()

        return finish

    def _refresh(self, weights: Iterable[nn.Parameter]) -> bool:
        """Makes the copies of ``weights``; whether there are any."""
        found = False
        for master, dtype, copy in self._copies_of(weights):
            if copy.data.shape == master.shape:
                found = True
                with copy.lock:
                    self._convert(copy, master, dtype)
                    copy.version, copy.made_of = self._version(master, dtype), fingerprint_of(master)
        return found

    def _trust(self, weights: Iterable[nn.Parameter]) -> None:
        """A step has begun, and nothing has looked at ``weights`` since their update has made their copies."""
        for master, dtype, copy in self._copies_of(weights):
            if copy.made_of == fingerprint_of(master):
                copy.version = self._version(master, dtype)

    def _copies_of(self, weights: Iterable[nn.Parameter]) -> Iterator[tuple[nn.Parameter, torch.dtype, _Copy]]:
        for master in weights:
            for dtype in _LOW:
                if (copy := self._copies.get((master, dtype))) is not None:
                    yield master, dtype, copy

    def version(self, master: nn.Parameter, dtype: torch.dtype) -> Hashable:
        """Equal as long as a device copy that was made of :meth:`source` is still right."""
        if not self._is_counted(master) and master not in self._samples:
            await_update(master)
        return self._version(master, dtype)

    def _version(self, master: nn.Parameter, dtype: torch.dtype) -> Hashable:
        """The same of a master that is written; on the thread of its update as well, which must not wait for itself."""
        values: Hashable = self._num_updates
        if not self._is_counted(master):
            values = self._samples.get(master)
            if values is None:
                values = self._samples[master] = _sample(master)
        with unwaited():
            return dtype, values, self._num_loops, id(master), fingerprint_of(master)

    def _is_counted(self, master: nn.Parameter) -> bool:
        """Whether training steps say when ``master`` changes; otherwise its values do."""
        return master.requires_grad and self._trains

    @property
    def host_bytes(self) -> int:
        """What the working copies take on the host."""
        with self._lock:
            return num_bytes_of(copy.data for copy in self._copies.values())

    @property
    def expected_bytes(self) -> int:
        """What they are going to take, as far as it is known which ones there will be."""
        with self._lock:
            sizes = {
                master: master.numel() * self._dtype_of(unit, master).itemsize
                for (unit, trains), evidence in self._evidence.items()
                if trains == self._trains
                for master in evidence.uses
                if self._dtype_of(unit, master) != master.dtype
            }
        return sum(sizes.values())

    def clear(self) -> None:
        """Forgets everything, copies included."""
        with self._lock:
            self._evidence.clear()
            self._forms.clear()
            self._copies.clear()
            self._samples.clear()

    # --- which form a unit takes ---------------------------------------------------------------------------------

    @contextlib.contextmanager
    def learning(
        self, autocast: Autocast, unit: Unit, module: nn.Module, leaves: Mapping[nn.Parameter, nn.Parameter]
    ) -> Iterator[CastWatch | None]:
        """Around a run of ``unit`` in its full form, in this state of autocast: learns from it.

        Args:
            module: its replica.
            leaves: parameters of the replica, with their masters.
        """
        if not autocast[0]:
            yield None
            return
        with CastWatch(leaves, autocast[1]) as watch:
            yield watch
        uses = {master: use for leaf, master in leaves.items() if (use := watch.use_of(leaf)) is not None}
        for leaf in in_doubt(module):
            uses[leaves[leaf]] = Use.OTHER
        self.note_run(unit, autocast, uses)

    def note_run(self, unit: Unit, autocast: Autocast, uses: Mapping[nn.Parameter, Use]) -> None:
        """Notes what a run of ``unit`` in its full form has made of its parameters."""
        with self._lock:
            evidence = self._evidence.setdefault((unit, self._trains), _Evidence(autocast))
            if evidence.autocast != autocast:
                evidence.autocast = None
            for master, use in uses.items():
                evidence.uses[master] = max(use, evidence.uses.get(master, use))
            self._forms[unit] = False

    def is_low(self, unit: Unit, autocast: Autocast | None = None) -> bool:
        """Whether ``unit`` takes its low form at the moment.

        Args:
            autocast: its state at the call that is to be run; None if that is not known yet.
        """
        evidence = self._evidence.get((unit, self._trains))
        if evidence is None:
            return False
        with self._lock:
            if autocast is not None and evidence.autocast != autocast:
                evidence.autocast = None
                self._forms[unit] = False
            form = self._forms.get(unit)
            if form is None:
                # Without facts its next run learns.
                form = bool(unit.facts) and any(self._dtype_of(unit, p) != p.dtype for p in evidence.uses)
                self._forms[unit] = form
            return form

    def dtype_of(self, unit: Unit, master: nn.Parameter) -> torch.dtype:
        """In which dtype ``master`` travels for the low form of ``unit``."""
        with self._lock:
            return self._dtype_of(unit, master)

    def gradient_dtypes(self) -> dict[nn.Parameter, torch.dtype]:
        """Masters whose gradient autocast computes in a dtype that overflows earlier than the master's: as a whole, if
        the batch is not split. Which is where plain training finds that its loss scale is too high.
        """
        found: dict[nn.Parameter, torch.dtype] = {}
        several: set[nn.Parameter] = set()
        with self._lock:
            for (_, trains), evidence in self._evidence.items():
                if not trains or evidence.autocast is None or evidence.autocast[1] is not torch.float16:
                    continue
                for master, use in evidence.uses.items():
                    if use is not Use.CAST or master in found:
                        several.add(master)
                    found[master] = evidence.autocast[1]
        return {master: dtype for master, dtype in found.items() if master not in several}

    def _dtype_of(self, unit: Unit, master: nn.Parameter) -> torch.dtype:
        evidence = self._evidence.get((unit, self._trains))
        if evidence is None or evidence.autocast is None:
            return master.dtype
        dtype = evidence.autocast[1]
        worst = Use.CAST if master.requires_grad else Use.CAST_AGAIN
        is_low = evidence.uses.get(master, Use.OTHER) <= worst and dtype.itemsize < master.dtype.itemsize
        return dtype if is_low else master.dtype


def _sample(master: nn.Parameter) -> bytes:
    """A few values of ``master``, over its whole memory; nothing for tensors that are no plain memory."""
    with unwaited():
        data = master.data
    if type(data) is not Tensor or not data.is_contiguous() or not data.numel():
        return b""
    num_samples = min(_NUM_SAMPLES, data.numel())
    values = data.as_strided((num_samples,), (data.numel() // num_samples,))
    return bytes(values.contiguous().view(torch.uint8).numpy())
