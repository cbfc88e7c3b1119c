"""Records every hook of a module, a callback and a datamodule: its place, its arguments, and what it sees.

[Note: recorded hooks]
What a hook sees is the state of the run at each of its calls, and at the first one all that the attributes of Trainer
and LightningModule say. Answers that follow from the strategy are left out.

Hooks of all three owners go into one list, so that lists of two runs show the order across owners as well. A step runs
once per micro-batch, so its entries are joined: the rows are added up, and everything else that the micro-batches see
must agree.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.core.hooks import CheckpointHooks, DataHooks, ModelHooks
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from tests.compatibility.inventory import inventory
from tests.support.identical import assert_identical

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")
# Answers that follow from the strategy: test_attributes_that_follow_from_the_strategy. The number of steps makes the
# loader of the training, if there is none yet, which would change the order of hooks: it is asked in training steps.
_OWN = {"strategy", "num_devices", "device_ids", "estimated_stepping_batches"}


def _public(*classes: type) -> list[str]:
    return [name for owner in classes for name, value in vars(owner).items() if inspect.isfunction(value)]


MODULE_HOOKS = [
    # The old name is an error beside the new one.
    *(n for n in _public(ModelHooks, DataHooks, CheckpointHooks) if n[0] != "_" and n != "configure_sharded_model"),
    *_STEPS,
    *("configure_callbacks", "configure_optimizers", "configure_gradient_clipping", "lr_scheduler_step"),
    *("optimizer_step", "optimizer_zero_grad", "backward"),
]
CALLBACK_HOOKS = [name for name in _public(L.Callback) if name[0] != "_"]
DATAMODULE_HOOKS = [
    *(name for name in _public(DataHooks) if name[0] != "_"),
    *("state_dict", "load_state_dict", "on_exception"),
]


def described(value: Any, folder: str) -> Any:
    """The value in terms that two runs share: no identities, and ``FOLDER`` for the folder of the run."""
    if isinstance(value, Tensor):
        return {"dtype": str(value.dtype), "requires_grad": value.requires_grad, "values": value.detach().clone()}
    if isinstance(value, Mapping):
        entries = {str(key).replace(folder, "FOLDER"): described(entry, folder) for key, entry in value.items()}
        return entries if type(value) is dict else {"type": type(value).__name__, **entries}
    if isinstance(value, (list, tuple)):
        found = [described(entry, folder) for entry in value]
        return found if type(value) is list else [type(value).__name__, *found]
    if isinstance(value, BaseException):
        return f"{type(value).__name__}: {value}"
    if isinstance(value, Optimizer):
        return [type(value).__name__, *({k: v for k, v in g.items() if k != "params"} for g in value.param_groups)]
    if isinstance(value, LRScheduler):
        return {name: entry for name, entry in value.state_dict().items() if isinstance(entry, (int, float))}
    if isinstance(value, LRSchedulerConfig):
        return described(vars(value), folder)
    if isinstance(value, (str, Path)):
        return str(value).replace(folder, "FOLDER")
    is_plain = isinstance(value, (int, float, type(None), torch.dtype, torch.device))
    return value if is_plain else type(value).__name__


def _said(owner: Any, names: Sequence[str], folder: str) -> dict[str, Any]:
    """What the attributes say; an error is an answer as well."""
    found = {}
    for name in names:
        try:
            found[name] = described(getattr(owner, name), folder)
        except (RuntimeError, TypeError, MisconfigurationException) as error:
            found[name] = described(error, folder)
    return found


class Recording:
    """What hooks were called with and what they saw, in order.

    Args:
        folder: of the run; texts show it as ``FOLDER``, so that two runs can be compared.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self.entries: list[dict[str, Any]] = []

    def recorded(self, owner: str, base: type, names: Sequence[str]) -> type:
        """A subclass of ``base`` whose methods are noted here before they run."""
        methods = {name: self._noting(owner, name, getattr(base, name)) for name in names}
        return type(base.__name__, (base,), methods)

    def _noting(self, owner: str, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def method(instance: Any, *args: Any, **kwargs: Any) -> Any:
            is_step = owner == "module" and name in _STEPS
            entry = {
                "hook": f"{owner}.{name}",
                "args": described(args, self._folder),
                "kwargs": described(kwargs, self._folder),
            }
            trainer = next((arg for arg in args if isinstance(arg, L.Trainer)), None)
            if trainer is None and owner != "callback":
                trainer = instance._trainer if owner == "module" else instance.trainer
            if trainer is not None and trainer.lightning_module is not None:
                entry["sees"] = self._seen(trainer, in_step=is_step)
                if entry["hook"] not in names_of(self.entries[:-1]):  # the last one may be of the same step
                    entry["told"] = self._told(trainer, name)
            if is_step:
                self._note_step(entry, *args)
            else:
                self.entries.append(entry)
            return original(instance, *args, **kwargs)

        # Not functools.wraps: Lightning looks through it, and calls some hooks only where they are overridden.
        method.__name__ = name
        method.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
        return method

    def _note_step(self, entry: dict[str, Any], batch: Any, *rest: Any) -> None:
        entry["args"] = described(rest, self._folder)
        last = self.entries[-1] if self.entries else {"hook": None}
        if last["hook"] != entry["hook"]:
            self.entries.append({**entry, "rows": len(batch[0])})
            return
        last["rows"] += len(batch[0])
        assert_identical(entry, {key: value for key, value in last.items() if key != "rows"})

    def forget_rows_of_the_last_step(self) -> None:
        """For a step that fails: micro-batches after the one that fails do not begin."""
        next(entry for entry in reversed(self.entries) if "rows" in entry).pop("rows")

    def _seen(self, trainer: L.Trainer, in_step: bool) -> dict[str, Any]:
        module = trainer.lightning_module
        gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
        # A step here does not see the gradients of the step before, and one of its micro-batches may stop the trainer.
        outside = {
            "should_stop": trainer.should_stop,
            "gradients": [*gradients, _flat_tensor(list(gradients.values()))],
        }
        return {
            "state": f"{trainer.state.fn} {trainer.state.stage} {trainer.state.status}",
            "progress": [trainer.global_step, trainer.current_epoch, trainer.fit_loop.batch_idx],
            "is_last_batch": trainer.is_last_batch,
            "modes": [
                torch.is_grad_enabled(),
                torch.is_inference_mode_enabled(),
                *(m.training for m in module.modules()),
            ],
            "device": str(module.device),
            "rates": [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups],
            "metrics": described({**trainer.callback_metrics, **trainer.logged_metrics}, self._folder),
            "weights": _flat_tensor(list(module.parameters())),
            **({} if in_step else outside),
        }

    def _told(self, trainer: L.Trainer, hook: str) -> dict[str, Any]:
        names = inventory()
        asked = [n for n in names["Trainer attribute"] if n not in _OWN]
        if hook == "training_step":
            asked.append("estimated_stepping_batches")
        return {
            "trainer": _said(trainer, asked, self._folder),
            "module": _said(trainer.lightning_module, names["LightningModule attribute"], self._folder),
        }


def _flat_tensor(tensors: list[Any]) -> Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors]) if tensors else torch.zeros(0)


def names_of(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """The hooks, in order."""
    return [entry["hook"] for entry in entries]
