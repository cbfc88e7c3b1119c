"""Checkpoints that other strategies have written.

[Note: foreign checkpoints]
A checkpoint of RoundPipe is one of plain Lightning, and so is one of DDP. What others write differs:

- **Folders.** FSDP and DeepSpeed let every process write its part. Such a folder is made one file with tools of
  Lightning; the error says which.
- **Names of weights.** Wrappers leave marks in them (``_orig_mod.`` of ``torch.compile``, ``module.`` of DDP, ...). A
  weight of the file that the module does not know is taken for the missing one that has the same name without them.
- **Optimizer state.** A folder of FSDP that was made one file knows parameters by name, not by number, and one of
  ``ModelParallelStrategy`` has one entry per optimizer. DeepSpeed's has no optimizer state: weights can be loaded from
  it, a run cannot be resumed.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ..lightning_packages import (
    _PATH,
    FABRIC,
    CheckpointIO,
    MisconfigurationException,
    TorchCheckpointIO,
    _WrappingCheckpointIO,
    everywhere,
    of_each,
    pl,
    rank_zero_info,
)

_VERSION = "pytorch-lightning_version"
_MARKS = frozenset({"_orig_mod", "_forward_module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})


def refuse_folder(path: _PATH, checkpoint_io: CheckpointIO) -> None:
    """Says of a folder how it can be made a file; plugins of the user may read folders.

    Raises:
        IsADirectoryError: if ``path`` is a folder on this machine that ``checkpoint_io`` cannot read.
    """
    while isinstance(checkpoint_io, everywhere(_WrappingCheckpointIO)) and checkpoint_io.checkpoint_io is not None:
        checkpoint_io = checkpoint_io.checkpoint_io
    if not os.path.isdir(path) or type(checkpoint_io) not in everywhere(TorchCheckpointIO):
        return
    folder = Path(path)
    if (folder / ".metadata").is_file() and any(folder.glob("*.distcp")):
        raise IsADirectoryError(
            f"the checkpoint '{folder}' is a folder with the parts of several processes. Make one file of it "
            f"with python -m {pl.__name__}.utilities.consolidate_checkpoint {folder} (FSDPStrategy), or with "
            f"python -m {FABRIC}.utilities.consolidate_checkpoint {folder} (ModelParallelStrategy), and pass "
            f"'{folder}.consolidated'"
        )
    if (folder / "latest").is_file() or any(folder.glob("**/*_model_states.pt")):
        raise IsADirectoryError(
            f"the checkpoint '{folder}' is a folder that DeepSpeed has written. Make one file of its weights, "
            f"where DeepSpeed is installed, with {pl.__name__}.utilities.deepspeed."
            f"convert_zero_checkpoint_to_fp32_state_dict('{folder}', '{folder}.consolidated'). "
            f"{_without_optimizer_state(f'{folder}.consolidated')}"
        )
    raise IsADirectoryError(f"the checkpoint '{folder}' is a folder: pass the path of a checkpoint file")


def as_lightning_checkpoint(checkpoint: Any, path: _PATH, *, is_resumed: bool) -> dict[str, Any]:
    """What was in a file, in the form in which Lightning takes it.

    Args:
        is_resumed: whether a training is to go on from it; else only weights are needed.

    Raises:
        MisconfigurationException: if it is no checkpoint, or a training cannot go on from it.
    """
    if not isinstance(checkpoint, dict) or "state_dict" not in checkpoint:
        raise MisconfigurationException(
            f"{os.fspath(path)!r} is not a checkpoint of Lightning, which has an entry 'state_dict'. If it holds the "
            "weights alone, load them with module.load_state_dict(...), and leave ckpt_path away"
        )
    checkpoint.setdefault(_VERSION, of_each("pytorch", "__version__")[0])  # a file with weights and nothing else
    numbered = sorted(
        (key for key in checkpoint if key.startswith("optimizer_") and key[10:].isdigit()),
        key=lambda key: int(key[10:]),
    )
    if numbered and "optimizer_states" not in checkpoint:
        checkpoint["optimizer_states"] = [checkpoint.pop(key) for key in numbered]
    # Where Lightning itself has left out the optimizer (save_weights_only), it also has the message.
    is_weights_only = "loops" in checkpoint and "lr_schedulers" not in checkpoint
    if is_resumed and "optimizer_states" not in checkpoint and not is_weights_only:
        raise MisconfigurationException(
            f"training cannot go on from {os.fspath(path)!r}. {_without_optimizer_state(os.fspath(path))}"
        )
    return checkpoint


def _without_optimizer_state(file: str) -> str:
    return (
        "It has no optimizer state, as DeepSpeed's is not taken over: begin a new training from its weights, with "
        f"module.load_state_dict(torch.load({file!r}, weights_only=False)['state_dict']) and no ckpt_path"
    )


def _plain(name: str) -> str:
    """A name without the marks of wrappers."""
    return ".".join(part for part in name.split(".") if part not in _MARKS)


def with_names_of(module: nn.Module, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """``state`` under the names that ``module`` has for it, where these differ by marks of wrappers."""
    known = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    known.update(name for name, _ in module.named_buffers(remove_duplicate=False))
    known.update(module.state_dict())  # states of metrics, too
    strange = [name for name in state if name not in known]
    missing = [name for name in known if name not in state]
    if not strange or not missing:
        return state
    wanted = {_plain(name): name for name in missing}
    new = {name: wanted.get(_plain(name)) or wanted.get(_plain(name).removeprefix("module.")) for name in strange}
    uses = Counter(new.values())
    renamed = {old: name for old, name in new.items() if name is not None and uses[name] == 1}
    if not renamed:
        return state
    old, name = next(iter(renamed.items()))
    rank_zero_info(
        f"{len(renamed)} weights of the checkpoint have the names of a wrapper: {old!r} is taken for {name!r}"
    )
    return {renamed.get(key, key): value for key, value in state.items()}


def by_position(state: Mapping[str, Any], module: nn.Module, optimizer: Optimizer) -> Mapping[str, Any]:
    """The state of an optimizer with numbers for its parameters, where it has names.

    Raises:
        MisconfigurationException: if its parameters are not those of ``optimizer``.
    """
    saved_groups = state["param_groups"]
    names = [name for group in saved_groups for name in group["params"]]
    if not any(isinstance(name, str) for name in names) or len(saved_groups) != len(optimizer.param_groups):
        return state  # torch refuses other groups by itself
    name_of = {id(parameter): _plain(name) for name, parameter in module.named_parameters()}
    saved = {_plain(name): value for name, value in state["state"].items()}
    states: dict[int, Any] = {}
    groups: list[dict[str, Any]] = []
    for saved_group, group in zip(saved_groups, optimizer.param_groups, strict=True):
        own = [name_of.get(id(parameter), "?") for parameter in group["params"]]
        if different := sorted(set(own).symmetric_difference(map(_plain, saved_group["params"]))):
            raise MisconfigurationException(
                "the optimizer of the checkpoint has other parameters than the one of configure_optimizers: they "
                f"differ by {different[0]!r}" + (f" and {len(different) - 1} more" if len(different) > 1 else "")
            )
        first = sum(len(done["params"]) for done in groups)
        states.update({first + i: saved[name] for i, name in enumerate(own) if name in saved})
        groups.append({**saved_group, "params": list(range(first, first + len(own)))})
    return {**state, "state": states, "param_groups": groups}
