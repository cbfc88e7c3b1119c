"""Key-value caches of ``transformers`` whose layers go where their decoder layer runs.

```
generate, micro-batch 0     token 5   layer 3 on GPU 0:  keys 3 + 1 -> keys 3     on GPU 0
                            token 6   layer 3 on GPU 1:  keys 3 come to GPU 1, + 1 -> keys 3
```

The engine does not look into the cache that a unit is given: it is an object that belongs to user code, and the unit
changes it. A layer of it holds the keys and values of one decoder layer, and stays on the device where that ran. The
same decoder layer may have another device for the next token. So before new keys are appended, what the layer holds
comes to their device: a copy from one compute stream to the other, for which the host does not wait.

An encoder-decoder reads the keys of its encoder without appending to them: these do not follow.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..common.attributes import attribute_set


@contextlib.contextmanager
def caches_followed() -> Iterator[None]:
    """While open, layers of caches go to the device of the keys that are appended to them, on any thread."""
    caches = sys.modules.get("transformers.cache_utils")
    if caches is None:  # a model that has caches has imported it
        yield
        return
    original = caches.Cache.update

    @functools.wraps(original)
    def update(self: Any, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        if layer_idx < len(self.layers):
            _bring(self.layers[layer_idx], key_states.device)
        return original(self, key_states, value_states, layer_idx, *args, **kwargs)

    with attribute_set(caches.Cache, "update", update):
        yield


def _bring(layer: Any, device: torch.device) -> None:
    """All tensors of one layer of a cache come to ``device``, if its keys are elsewhere."""
    keys = getattr(layer, "keys", None)
    if keys is None or keys.device == device:
        return
    for name, value in list(vars(layer).items()):
        if isinstance(value, Tensor):
            setattr(layer, name, value.to(device, non_blocking=True))
        elif isinstance(value, torch.device):
            setattr(layer, name, device)
