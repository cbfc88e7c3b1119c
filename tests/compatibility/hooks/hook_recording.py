"""Records every hook of a module, a callback and a datamodule: its place, its arguments, and what it sees.

[Note: recorded hooks]
Hooks of all three owners go into one list, so that lists of two runs show the order across owners as well. A step runs
once per micro-batch, so its entries are joined: the rows are added up, and everything else that the micro-batches see
must agree.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import lightning as L
import torch
from lightning.pytorch.core.hooks import CheckpointHooks, DataHooks, ModelHooks
from torch import Tensor
from torch.optim import Optimizer

from tests.support.identical import assert_identical

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")


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
            entry = {"hook": f"{owner}.{name}", "args": self._described(args), "kwargs": self._described(kwargs)}
            trainer = next((arg for arg in args if isinstance(arg, L.Trainer)), None)
            if trainer is None and owner != "callback":
                trainer = instance._trainer if owner == "module" else instance.trainer
            if trainer is not None and trainer.lightning_module is not None:
                entry["sees"] = self._seen(trainer, in_step=is_step)
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
        entry["args"] = self._described(rest)
        last = self.entries[-1] if self.entries else {"hook": None}
        if last["hook"] != entry["hook"]:
            self.entries.append({**entry, "rows": len(batch[0])})
            return
        last["rows"] += len(batch[0])
        assert_identical(entry, {key: value for key, value in last.items() if key != "rows"})

    def forget_rows_of_the_last_step(self) -> None:
        """For a step that fails: micro-batches after the one that fails do not begin."""
        next(entry for entry in reversed(self.entries) if "rows" in entry).pop("rows")

    def _described(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return {"dtype": str(value.dtype), "requires_grad": value.requires_grad, "values": value.detach().clone()}
        if isinstance(value, Mapping):
            return {
                "type": type(value).__name__,
                **{self._described(str(key)): self._described(value[key]) for key in value},
            }
        if isinstance(value, (list, tuple)):
            return [type(value).__name__, *map(self._described, value)]
        if isinstance(value, BaseException):
            return f"{type(value).__name__}: {value}"
        if isinstance(value, Optimizer):
            return [type(value).__name__, *({k: v for k, v in g.items() if k != "params"} for g in value.param_groups)]
        if isinstance(value, str):
            return value.replace(self._folder, "FOLDER")
        return value if isinstance(value, (int, float, bool, type(None))) else type(value).__name__

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
            "metrics": self._described({**trainer.callback_metrics, **trainer.logged_metrics}),
            "weights": _flat_tensor(list(module.parameters())),
            **({} if in_step else outside),
        }


def _flat_tensor(tensors: list[Any]) -> Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors]) if tensors else torch.zeros(0)


def names_of(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """The hooks, in order."""
    return [entry["hook"] for entry in entries]
