"""The modules that steps treat in a way of their own, found once and again only when modules come or go."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torchmetrics import Metric

from ...lightning_packages import everywhere, pl


class ModuleScan:
    """What a user's model consists of, as far as steps have to know.

    To walk through all modules takes long: so :meth:`refresh`, on the Trainer's thread when a step begins, only asks
    every known module whether it has the children that it had. If all have, there are no other modules.

    Attributes:
        named: every module with its name, each once.
        metrics: which all micro-batches share.
        norms: which keep statistics of batches, or of samples.
        lightning_modules: with their names.
        checkpointed, cached, prompted: with activation checkpointing, ``config``, or prompts, as models of Hugging Face
            and PEFT have them.
    """

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        self._walk()

    def refresh(self) -> None:
        """Finds modules that have come or gone."""
        if any(_children(leaf) for leaf in self._leaves):
            self._walk()
        for parent, children in self._parents:
            found = _children(parent)
            if len(found) != len(children) or not all(map(operator.is_, found.values(), children)):
                self._walk()
                return

    def _walk(self) -> None:
        self.named = list(self.root.named_modules())
        modules = [module for _, module in self.named]
        self._leaves = [module for module in modules if not _children(module)]
        self._parents = [(module, tuple(_children(module).values())) for module in modules if _children(module)]
        self.metrics = [module for module in modules if isinstance(module, Metric)]
        self.norms = [module for module in modules if isinstance(module, _NormBase)]
        self.lightning_modules = [(name, m) for name, m in self.named if isinstance(m, everywhere(pl.LightningModule))]
        self.cached = [module for module in modules if hasattr(vars(module).get("config"), "__dict__")]
        self.checkpointed = [module for module in modules if hasattr(module, "gradient_checkpointing")]
        self.prompted = [module for module in modules if hasattr(type(module), "get_prompt")]

    @property
    def couples_rows(self) -> bool:
        """Whether a module computes with statistics of all rows of a micro-batch."""
        return any(module.training for module in self.norms if isinstance(module, _BatchNorm))

    def buffers(self) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
        """(name, module, key in the module, tensor) of every buffer, but for the states of metrics."""
        for prefix, module in self.named:
            if not isinstance(module, Metric):
                for key, tensor in module._buffers.items():
                    if tensor is not None:
                        yield f"{prefix}.{key}".lstrip("."), module, key, tensor

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(name, parameter), each parameter once."""
        known: set[int] = set()
        for prefix, module in self.named:
            for key, parameter in module._parameters.items():
                if parameter is not None and id(parameter) not in known:
                    known.add(id(parameter))
                    yield f"{prefix}.{key}".lstrip("."), parameter


def _children(module: nn.Module) -> Any:
    return module._modules
