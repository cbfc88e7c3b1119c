"""What an entry is given: the options of its Trainers, which watch what is trained, and a place for all that remains.

[Note: entries]
An entry is a module of :mod:`entries` with ``CASES``: a name and a :class:`Case` each. Its function makes data, and
calls the project's own classes as the project's pages tell its users to. It knows one thing of this comparison, the
:class:`Run`: what ``run.trainer()`` gives is passed to the project wherever it takes arguments of a Trainer, and
``run.keep(...)`` takes predictions and the like. Losses, gradients, logged values and weights are seen by a callback.

Nothing here may import Lightning: a project decides which of its two packages there is.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# Of larger tensors so many elements are kept, at equal distances.
SAMPLES = 4096
DEVICES = 2
# Each kind of run with its options of the strategy; "set" takes those of the case besides.
VARIANTS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "auto": {},
    "one": {"num_microbatches": 1},
    "two": {"num_microbatches": 2},
    "copies": {"num_microbatches": 2, "virtual_copies": True},
    "set": {"num_microbatches": 2},
}
_QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A training of the project.

    Attributes:
        act: makes data and trains.
        what: is run, in a few words for the table.
        options: of the strategy, which make several micro-batches exact where they are not by themselves.
        options_text: the same as users write them.
    """

    act: Callable[[Run], None]
    what: str = ""
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    options_text: str = ""


class Run:
    """One variant of one case.

    Args:
        options: of the strategy; None is plain Lightning.
        folder: into which the project may write.
        package: of Lightning that the project imports.
    """

    def __init__(self, options: Mapping[str, Any] | None, folder: Path, package: str) -> None:
        self._options = options
        self.folder = folder
        self._package = importlib.import_module(package)
        self.watches: list[Any] = []
        self.kept: dict[str, Any] = {}

    def trainer(self, *callbacks: Any, **more: Any) -> dict[str, Any]:
        """Arguments of a Trainer. Those of ``more`` are the project's."""
        watch = _watch(self._package.__name__)
        self.watches.append(watch)
        ours: dict[str, Any] = {"devices": 1}
        if self._options is not None:
            from lightning_roundpipe import RoundPipeStrategy

            ours = {"devices": DEVICES, "strategy": RoundPipeStrategy(threads_per_device=1, **self._options)}
        return {**_QUIET, **ours, "callbacks": [*callbacks, watch], **more}

    def fit(self, make_module: Callable[[], Any], *data: Any, **more: Any) -> tuple[Any, Any]:
        """Trains for one epoch, saves, and goes on with the file for another one, as users with a Trainer of their own.

        Args:
            make_module: makes the module, anew for the second Trainer.
            data: as for ``Trainer.fit``.
            more: arguments of the Trainers.

        Returns:
            the second Trainer, and its module
        """
        path = self.folder / "first.ckpt"
        first = self._package.Trainer(**self.trainer(max_epochs=1, **more))
        torch.manual_seed(1)
        first.fit(make_module(), *data)
        first.save_checkpoint(path)
        second, module = self._package.Trainer(**self.trainer(max_epochs=2, **more)), make_module()
        torch.manual_seed(2)
        second.fit(module, *data, ckpt_path=path, weights_only=False)
        return second, module

    def keep(self, **values: Any) -> None:
        """Keeps what else is compared."""
        self.kept.update({name: leaves_of(value) for name, value in values.items()})

    @property
    def outcome(self) -> dict[str, Any]:
        """All there is to compare."""
        return {"trainings": [watch.seen for watch in self.watches], "kept": self.kept}


def _watch(package: str) -> Any:
    watch = type("Watch", (_Watch, importlib.import_module(package).Callback), {})()
    watch.package = package
    return watch


class _Watch:
    """The callback's methods; what it has seen is plain data. Projects may copy what they are given: it stays one."""

    package = ""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, Any] = {
            "start": {}, "weights": {}, "gradients": [], "steps": [], "logged": [], "outputs": [],
            "num_microbatches": [],
        }  # fmt: skip

    def __deepcopy__(self, memo: Any) -> _Watch:
        return self

    def __reduce__(self) -> Any:
        return _watch, (self.package,)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.seen["start"] = _state_of(pl_module)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        named = [(name, p.grad) for name, p in pl_module.named_parameters() if p.grad is not None]
        self.seen["gradients"].append({n: _sampled(g.to_dense() if g.is_sparse else g) for n, g in named})

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen["steps"].append({"outputs": leaves_of(outputs), "logged": leaves_of(dict(trainer.logged_metrics))})
        step = getattr(trainer.strategy, "last_step", None)
        if step is not None:
            self.seen["num_microbatches"].append(step.num_microbatches)

    def _on_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *rest: Any) -> None:
        self.seen["outputs"].append(leaves_of(outputs))

    on_validation_batch_end = on_test_batch_end = on_predict_batch_end = _on_batch_end

    def _on_end(self, trainer: Any, pl_module: Any) -> None:
        self.seen["logged"].append(leaves_of(dict(trainer.callback_metrics)))

    on_train_epoch_end = on_validation_end = on_test_end = _on_end

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        self.seen["weights"] = _state_of(pl_module)


def _state_of(module: Any) -> dict[str, Tensor]:
    return {name: _sampled(value) for name, value in module.state_dict().items() if isinstance(value, Tensor)}


def _sampled(tensor: Tensor) -> Tensor:
    flat = tensor.detach().reshape(-1)
    return flat[:: -(-flat.numel() // SAMPLES) or 1].to("cpu", copy=True)


def leaves_of(value: Any, depth: int = 0) -> Any:
    """Numbers and tensors of a nesting, as plain data; of other objects their attributes, or else nothing."""
    if isinstance(value, Tensor):
        return _sampled(value.as_subclass(Tensor))
    if isinstance(value, str):
        # Files are in the folder of the variant.
        return value.replace(os.getcwd(), ".")
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, Mapping):
        return {str(key): leaves_of(entry, depth) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [leaves_of(entry, depth) for entry in value]
    if hasattr(value, "__array__"):
        array = value.__array__()
        return (
            leaves_of(torch.as_tensor(array))
            if array.dtype.kind in "fiub"
            else [leaves_of(str(entry)) for entry in array.reshape(-1)]
        )
    attributes = getattr(value, "__dict__", {}) if depth < 2 else {}
    return {name: leaves_of(entry, depth + 1) for name, entry in attributes.items() if not name.startswith("_")}
