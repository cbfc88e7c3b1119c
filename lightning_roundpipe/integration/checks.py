"""What steps on several threads cannot honour, and models whose weights cannot travel: refused before a run.

[Note: weights that cannot travel]
A unit computes with copies of its parameters, and what a copy has is the values in the memory of the parameter: no
class, no attributes. So these are refused, before anything is trained:

- parameters with a class and a state of their own. bitsandbytes keeps the scales of ``Params4bit`` and ``Int8Params``
  in attributes, and lets ``to()`` quantize.
- parameters whose values are elsewhere: tensor classes that wrap other tensors (torchao, quanto, ``DTensor``), sparse
  layouts. Where devices use the memory of the host nothing is copied, and wrapped tensors work.
- modules that keep the scales of an integer weight in an attribute that is neither a parameter nor a buffer (HQQ). The
  same holds there.
- modules with hooks of ``accelerate`` (``device_map=``), which put weights on devices of their own choice.
- modules that assign to their own weights in ``forward``: the assignment would reach a copy.

Integer or 8-bit float weights in plain parameters and buffers (GPTQ, AWQ, FP8) travel like any others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from ..common.graphs import has_saved_tensor_hooks
from ..devices.gpu.driver import gpu_type
from ..lightning_packages import (
    BitsandbytesPrecision,
    Callback,
    DeepSpeedPrecision,
    FSDPPrecision,
    LayerSync,
    MisconfigurationException,
    Precision,
    TransformerEnginePrecision,
    XLAPrecision,
    everywhere,
    pl,
    rank_zero_info,
    rank_zero_warn,
)
from ..weights.futures import PendingParameter
from ..weights.units import UnitClasses, check_chosen

# Precision plugin -> why it cannot be followed.
_NOT_FOLLOWED = {
    DeepSpeedPrecision: "works with DeepSpeedStrategy only",
    FSDPPrecision: "works with FSDPStrategy only",
    XLAPrecision: "works with XLAStrategy only",
    BitsandbytesPrecision: "quantizes weights when they are moved to a GPU, and here they stay on the host",
    TransformerEnginePrecision: "keeps scales outside parameters and buffers, which device copies would not share",
}


def check_precision(plugin: Precision) -> None:
    """Raises:
    MisconfigurationException: for plugins that need another strategy, or weights that live on a device.
    """
    for kind, why in _NOT_FOLLOWED.items():
        if isinstance(plugin, everywhere(kind)):
            raise MisconfigurationException(
                f"{type(plugin).__name__} cannot be used with strategy='roundpipe': it {why}. Leave the plugin out and "
                "set precision='bf16-mixed' or 'bf16-true', or use another strategy"
            )


def is_callback(value: object) -> bool:
    """Whether it is a callback of Lightning, or an object of any class that has what Lightning asks of each."""
    return isinstance(value, everywhere(Callback)) or (hasattr(value, "setup") and hasattr(value, "state_key"))


def refuse_callback(callback: object) -> NoReturn:
    """Lightning itself would say of it that it has no attribute 'setup'.

    Raises:
        MisconfigurationException: always, naming the class and what it is.
    """
    kind = type(callback)
    base = next((base for base in kind.__mro__[:0:-1] if base.__name__.endswith("Callback")), kind)
    raise MisconfigurationException(
        f"callbacks= has a {kind.__name__}, a {base.__module__}.{base.__qualname__}: it is for the trainer of another "
        "library, and Lightning would never call its hooks. Leave it out; take a callback of Lightning, such as "
        f"EarlyStopping, or write a subclass of {pl.__name__}.Callback that does the same in hooks such as "
        "on_train_batch_end"
    )


def refuse_fabric() -> NoReturn:
    """In the place of the strategy, where Fabric asks for it.

    Raises:
        MisconfigurationException: always.
    """
    raise MisconfigurationException(
        "strategy='roundpipe' does not work with Fabric, which has no training_step that could run once for each "
        "micro-batch: write the step as a LightningModule, and train it with Trainer(strategy='roundpipe'). A loop of "
        "your own (zero_grad, manual_backward, step) goes into its training_step, with automatic_optimization = False"
    )


def note_unused_gpus(devices: Sequence[torch.device]) -> None:
    """Says how to use GPUs that Lightning itself does not look for."""
    found = gpu_type()
    if found not in (None, "cuda") and all(device.type == "cpu" for device in devices):
        rank_zero_info(
            f"this machine has accelerators of type {found!r}, which accelerator='auto' does not find: set "
            "Trainer(accelerator='roundpipe') to train on them"
        )


def note_layer_sync(layer_sync: LayerSync | None) -> None:
    """Warns that layers are not synchronized."""
    if layer_sync is not None:
        rank_zero_warn(
            f"sync_batchnorm=True, or the plugin {type(layer_sync).__name__}, has no effect with "
            "strategy='roundpipe': there is one process for all devices. Batch norm takes its statistics from each "
            "micro-batch; with num_microbatches=1 from the whole batch of this process."
        )


def check_modes() -> None:
    """Modes of torch are a matter of one thread: micro-batches would go around them.

    Raises:
        MisconfigurationException: for modes that see or change operators, and for hooks on what autograd saves. The
            default device is no such mode: tensors of a step are made on the host in any case.
    """
    functions = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    modes = [*functions, *_get_current_dispatch_mode_stack()]
    names = [type(mode).__name__ for mode in modes if not isinstance(mode, DeviceContext)]
    if has_saved_tensor_hooks():
        names.append("saved_tensors_hooks")
    if names:
        raise MisconfigurationException(
            f"steps would run inside {names[-1]}, which holds for the calling thread alone, and strategy='roundpipe' "
            "runs them on several: it would see nothing of them. Enter it in the modules whose operators it is for, or "
            "run without it"
        )


_REMEDY = "use plain dense weights (a model that is not quantized), or strategy='auto'"
# What a parameter class overrides if moving it is more than copying its values.
_MOVES = ("to", "cpu", "cuda", "__torch_function__")
# Class of PEFT -> what it does.
_WRITES_WEIGHTS = {"CPTEmbedding": "CPT projects the trained prompt in its forward"}
_INTERNAL = frozenset(vars(nn.Module()))


def check_model(root: nn.Module, units: UnitClasses | None = None, *, has_copies: bool) -> None:
    """Refuses weights without data, before they are brought to the host, and what cannot be trained correctly; see
    [Note: weights that cannot travel].

    Args:
        units: classes of modules that the user has chosen.
        has_copies: whether devices have memory of their own.

    Raises:
        MisconfigurationException: for the first parameter or module that is not supported, with its name.
        ValueError: for a class of ``units`` that does not occur in ``root``.
    """
    for name, module in root.named_modules():
        _check_module(name, module, has_copies)
    check_chosen(root, units)
    for name, parameter in root.named_parameters():
        if parameter.is_meta:
            raise MisconfigurationException(
                f"the weight {name!r} has no data (it is on the device 'meta'): give it some before the run, for "
                "instance with to_empty() and an initialisation, or make the module on the host, in configure_model"
            )
        reason = _why_not(parameter, has_copies)
        if reason:
            raise MisconfigurationException(
                f"strategy='roundpipe' cannot copy parameter {name!r} to a device: {reason}. Remedy: {_REMEDY}"
            )


def _check_module(name: str, module: nn.Module, has_copies: bool) -> None:
    kind = type(module).__name__
    tensors = (*module._parameters.values(), *module._buffers.values())
    if any(tensor is not None and is_lazy(tensor) for tensor in tensors):
        raise MisconfigurationException(
            f"the module {name!r} ({kind}) is lazy: it makes its weights when it is called first, and "
            "strategy='roundpipe' has to know them before that. Call it once in configure_model, with an example of "
            "what it gets: 'with torch.no_grad(): self(example)'"
        )
    if hasattr(module, "_hf_hook"):
        raise MisconfigurationException(
            f"module {name!r} ({kind}) has hooks of accelerate, which move its weights by themselves: "
            "strategy='roundpipe' keeps all weights on the host. Load the model without device_map"
        )
    if kind in _WRITES_WEIGHTS:
        raise MisconfigurationException(
            f"module {name!r} ({kind}) assigns to its own weights while it runs ({_WRITES_WEIGHTS[kind]}), and "
            "strategy='roundpipe' runs it on copies: train it with strategy='auto'"
        )
    frozen = [key for key, p in module._parameters.items() if p is not None and _is_integer(p)]
    beside = [key for key, value in vars(module).items() if key not in _INTERNAL and _holds_tensors(value)]
    if has_copies and frozen and beside:
        raise MisconfigurationException(
            f"module {name!r} ({kind}) has the quantized weight {frozen[0]!r}, and keeps tensors that belong to it in "
            f"its attribute {beside[0]!r}, which is neither a parameter nor a buffer and does not travel to a device "
            f"with strategy='roundpipe'. Remedy: {_REMEDY}"
        )


def _why_not(parameter: nn.Parameter, has_copies: bool) -> str:
    """Why copies of ``parameter`` would not do; empty if they would."""
    kind = type(parameter)
    named = f"it is a {kind.__module__}.{kind.__qualname__}"
    if parameter.layout is not torch.strided or parameter.is_quantized:
        return (
            f"it has the layout {parameter.layout} and the dtype {parameter.dtype}, and only dense tensors are copied"
        )
    if has_copies and kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return f"{named}, which keeps its values in other tensors"
    if issubclass(kind, nn.Parameter) and kind not in (nn.Parameter, PendingParameter):
        state = [key for key in vars(parameter) if not key.startswith("_")]
        own = [key for key in _MOVES if getattr(kind, key) != getattr(nn.Parameter, key)]
        if state or own:
            return f"{named}, and copies would lack its own {' and '.join(map(repr, (state or own)[:3]))}"
    if _is_integer(parameter):
        state = [key for key, value in vars(parameter).items() if _holds_tensors(value)]
        if state:
            return f"its attribute {state[0]!r} holds tensors, which its copies would lack"
    return ""


def _is_integer(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() and not tensor.is_complex()


def _holds_tensors(value: Any) -> bool:
    """Whether ``value`` is a tensor, or a container or plain object with one in it."""
    if isinstance(value, (Tensor, nn.Module)):
        return isinstance(value, Tensor)
    if isinstance(value, Mapping):
        inside: Any = value.values()
    elif isinstance(value, (list, tuple, set)):
        inside = value
    else:
        inside = vars(value).values() if hasattr(value, "__dict__") and not isinstance(value, type) else ()
    return any(isinstance(item, Tensor) for item in inside)
