"""Runs of the same training in plain Lightning and pipelined, and their comparison.

Every run has an optimizer from here and so many steps. Plain runs are kept: many pipelines are compared with each.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import partial
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from tests.support.accelerator.plain import on_gpu
from tests.support.identical import assert_identical
from tests.support.parity import Run, assert_alike, fit

MakeModule = Callable[[], L.LightningModule]
MakeData = Callable[[], Iterable[Any]]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

# Adam divides by the root of the second moment. Where the true gradient is zero (the bias of an attention key, a bias
# in front of a normalisation) that is rounding noise over rounding noise, a full step of a random sign, unless eps is
# above the noise. Raising it keeps the tolerances tight for everything else.
default_optimizer: MakeOptimizer = partial(torch.optim.AdamW, lr=1e-2, eps=1e-3)
_SEED = 1234
# What the order of sums can do in float32, where its precision is 1e-7: an element that is small because large numbers
# cancel is as uncertain as they are, so the tolerance counts in the largest element, too. What a test is to notice, a
# micro-batch that is lost or counted wrongly, changes elements by a thousandth of that and more.
_TOLERANCES: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-6, "of_largest": 1e-5}
# Settings of the Trainer for pipelined runs, which a way to copy may add to.
pipelined: dict[str, Any] = {}
# Plain runs that several tests compare with.
_references: dict[Hashable, Run] = {}


def train(
    make_module: MakeModule,
    make_data: MakeData,
    *,
    devices: int | None = None,
    num_microbatches: int | str = "auto",
    strategy_options: Mapping[str, Any] = {},
    trainer_options: Mapping[str, Any] = {},
    steps: int = 3,
    optimizer: MakeOptimizer | None = default_optimizer,
) -> Run:
    """Trains for ``steps`` optimizer steps: pipelined over ``devices``, or (None) plain, on one device."""

    def make() -> L.LightningModule:
        module = make_module()
        if optimizer is not None:
            # On the instance, where Lightning looks first: one training, many optimizers, no boilerplate in modules.
            trained = partial(filter, lambda p: p.requires_grad)
            object.__setattr__(module, "configure_optimizers", lambda: optimizer(trained(module.parameters())))
        return module

    chosen = {"devices": devices, "num_microbatches": num_microbatches, "options": strategy_options, **pipelined}
    if pipelined and devices is not None:  # GPUs that are not enough are in the pool several times
        chosen["devices"] = [i % torch.accelerator.device_count() for i in range(devices)]
    elif pipelined and ({"precision", "plugins"} & set(trainer_options)):
        trainer_options = on_gpu(trainer_options)
    run = fit(
        "plain" if devices is None else "roundpipe",
        make,
        make_data,
        seed=_SEED,
        **{"max_epochs": -1, "max_steps": steps, **trainer_options, **({} if devices is None else chosen)},
    )
    assert run.trainer.global_step == steps
    return run


def assert_same(actual: Run, expected: Run, *, exact: bool = False) -> None:
    """Losses, gradients, parameters, buffers and optimizer state agree; ``exact``: bit for bit.

    Not where plain Lightning updates weights on a GPU, whose kernels round otherwise than those of the host. What
    autocast makes of such a weight may differ by a whole rounding of its 16 bits. So the first step is compared there,
    which no update precedes, and how far all steps have come.
    """
    is_on_gpu = bool(pipelined) and torch.cuda.is_available()
    if exact and not is_on_gpu:
        assert_identical(actual.results, expected.results)
    elif is_on_gpu and str(expected.trainer.precision).endswith("-mixed"):
        for name in ("losses", "gradients"):
            one, other = actual.results[name][:1], expected.results[name][:1]
            assert_alike(one, other, name, **_TOLERANCES, equal_nan=True)
        assert difference(actual.state, expected.state) < 1e-2 * difference(expected.state, expected.start)
    else:
        assert_alike(actual.results, expected.results, **_TOLERANCES, equal_nan=exact)


def difference(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """Root of the summed squares of the differences between all values of two states of a model."""
    return float(sum((one[name] - other[name]).square().sum() for name in one) ** 0.5)


def sequential(
    make_module: MakeModule, num_microbatches: int, weight: Callable[[Any], float] | None = None
) -> MakeModule:
    """The reference for batch-coupled models.

    Its module runs ``training_step`` on the micro-batches one after the other and returns the mean of the losses,
    weighted by rows or by ``weight``: what pipelining does, without any pipeline.
    """

    def make() -> L.LightningModule:
        module = make_module()
        step = module.training_step

        def training_step(batch: Any, batch_idx: int) -> Tensor:
            tensors = list(batch.values()) if isinstance(batch, Mapping) else list(batch)
            count = min(num_microbatches, len(tensors[0]))
            parts: list[Any] = list(zip(*(t.tensor_split(count) for t in tensors), strict=True))
            rows = [len(part[0]) for part in parts]
            if isinstance(batch, Mapping):
                parts = [dict(zip(batch, part, strict=True)) for part in parts]
            weights = rows if weight is None else [weight(part) for part in parts]
            losses = []
            for part, part_weight in zip(parts, weights, strict=True):
                losses.append(step(part, batch_idx) * (part_weight / sum(weights)))
                torch.clear_autocast_cache()  # Lightning 2.5 fills it: gradients would add up in the low dtype
            return torch.stack(losses).sum()

        object.__setattr__(module, "training_step", training_step)
        return module

    return make


def plain(make_module: MakeModule, make_data: MakeData, **common: Any) -> Run:
    """The plain run, which has moved; tests that compare with the same one share it."""
    key = (make_module, make_data, *((name, repr(value)) for name, value in sorted(common.items())))
    if key not in _references:
        _references[key] = train(make_module, make_data, **common)
        _references[key].assert_moved()
    return _references[key]


def assert_parity(
    make_module: MakeModule,
    make_data: MakeData,
    *,
    devices: int,
    num_microbatches: int,
    strategy_options: Mapping[str, Any] = {},
    reference: MakeModule | None = None,
    min_calls: int = 2,
    **common: Any,
) -> Run:
    """Trains a module plain and pipelined, and compares all there is to compare.

    Args:
        make_module: makes the module, called under a fixed seed; ``optimizer`` takes the place of its
            ``configure_optimizers`` unless it is None.
        make_data: makes the dataloader, or a list of batches.
        reference: makes the module of the plain run, where it must be another one (batch statistics).
        min_calls: unit calls that each micro-batch must make at least; guards against comparing plain with plain.
        common: arguments of both runs: ``trainer_options``, ``steps``, ``optimizer``.

    Returns:
        the pipelined run.
    """
    expected = plain(reference or make_module, make_data, **common)
    # A model that is not coupled shows no difference when its first batch is split, and says nothing.
    options = {"check_split": "error" if reference is None else "warn", **strategy_options}
    chosen = {"devices": devices, "num_microbatches": num_microbatches, "strategy_options": options}
    run = train(make_module, make_data, **chosen, **common)
    assert_same(run, expected)
    assert min(run.watch.num_calls) >= min_calls, f"only {run.watch.num_calls} unit calls per micro-batch"
    if num_microbatches > 1:
        assert run.watch.num_devices == {devices}
    return run
