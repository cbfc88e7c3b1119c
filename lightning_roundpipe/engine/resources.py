"""What the steps of one engine share."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from torch import nn

from ..autograd.compiling import UnitCompiler
from ..common.threads import Workers
from ..devices.pool import DevicePool
from ..weights.placement import ReplicaCache
from .plans import Plans


@dataclass
class Resources:
    """What the steps of an engine have in common.

    Attributes:
        backward_runs_user_code: set when user code has a backward that runs user code.
        workers: threads of micro-batches.
        switches: flags that turned out to be switched on for a while only, see :meth:`UserCodeLock._latch`.
    """

    root: nn.Module
    pool: DevicePool
    plans: Plans
    replicas: ReplicaCache
    compiler: UnitCompiler | None
    exempt: tuple[type, ...]
    num_threads: int | None
    workers: Workers = field(default_factory=Workers)
    backward_runs_user_code: threading.Event = field(default_factory=threading.Event)
    switches: set[tuple[int, str]] = field(default_factory=set)
