"""What a unit finds in its forward, it finds when it is run again for its backward: hooks that are there for the call
alone, lists, dicts and attributes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.parity.driver import assert_parity
from tests.support.huggingface import Task, adapted, batches, compare_tasks, lora, text
from tests.support.models import Block, Chain, vectors


class DuringTheCall(Chain):
    """A wrapper that registers hooks inside the units, for the call of the model alone."""

    def register(self, x: Tensor) -> Iterator[Any]:
        """Gives the handles of hooks, which know something about the rows."""
        for block in self.blocks:
            yield block.inner.register_forward_pre_hook(lambda module, args: (args[0] * x[:, :1].to(args[0].device),))

    @contextmanager
    def hooks(self, x: Tensor) -> Iterator[None]:
        with ExitStack() as stack:
            for handle in self.register(x):
                stack.enter_context(handle)
            yield

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        with self.hooks(x):
            found = self(x)
        return F.mse_loss(found, y)


class KeywordsOfPreHooks(DuringTheCall):
    """An argument that is kept on the side."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.outer = Scaled()

    def register(self, x: Tensor) -> Iterator[Any]:
        def give(module: nn.Module, args: Any, kwargs: Any) -> Any:
            return args, {**kwargs, "scale": x[:, :1].to(args[0].device)}

        for block in self.blocks:
            yield block.outer.register_forward_pre_hook(give, with_kwargs=True)


class Scaled(Block):
    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        found = super().forward(x)
        return found if scale is None else found * scale


class ForwardHooks(DuringTheCall):
    def register(self, x: Tensor) -> Iterator[Any]:
        for block in self.blocks[:3]:
            yield block.inner.register_forward_hook(lambda module, args, output: output * x[:, 1:2])
        yield self.blocks[0].outer.register_forward_hook(
            lambda module, args, kwargs, output: output + args[0], with_kwargs=True
        )


class RecordingHooks(DuringTheCall):
    """Hooks that change nothing, beside others: what they have seen enters the loss."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.outer.register_forward_hook(lambda module, args, output: output * 0.5)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.seen: list[Tensor] = []
        loss = super().training_step(batch, batch_idx)
        return loss + 0.1 * sum(seen.square().mean() for seen in self.seen)

    def register(self, x: Tensor) -> Iterator[Any]:
        for block in self.blocks:
            yield block.inner.register_forward_hook(lambda module, args, output: self.seen.append(output))


class OneOfTwoCalls(DuringTheCall):
    """The same units are called without the hooks before, and after."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        before = self(x)
        with self.hooks(x):
            found = self(x)
        return F.mse_loss(found, y) + (found - before).square().mean() + self(-x).square().mean()


class OneOfTwoCallsInFront(OneOfTwoCalls):
    def register(self, x: Tensor) -> Iterator[Any]:
        yield from super().register(x)
        for block in self.blocks:
            yield block.outer.register_forward_hook(lambda module, args, output: output * x[:, :1])


@pytest.mark.parametrize(
    "model",
    [
        DuringTheCall,
        KeywordsOfPreHooks,
        ForwardHooks,
        RecordingHooks,
        OneOfTwoCalls,
        OneOfTwoCallsInFront,
    ],
    ids=lambda model: model.__name__,
)
def test_hooks_that_a_call_found_are_found_when_it_is_run_again(pipeline: dict[str, Any], model: type[Chain]) -> None:
    assert_parity(model, vectors, **pipeline, min_calls=4)


def activated() -> nn.Module:
    """The tokens from which on the adapter is active are found in each row, and kept by hooks."""
    return adapted(lora(alora_invocation_tokens=[3]))


def activated_under_checkpoints() -> nn.Module:
    """PEFT registers hooks for what a checkpoint runs again."""
    model = activated()
    model.enable_input_require_grads()
    model.base_model.model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def of_many_tasks() -> nn.Module:
    """Its router draws in training mode."""
    config = peft.PolyConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "down_proj"], r=2, n_tasks=3, n_skills=2)
    return adapted(config).eval()


def named() -> nn.Module:
    """Rows have adapters of their own. PEFT asks for the evaluation mode then."""
    model = adapted()
    model.add_adapter("other", lora(r=3))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
    return model.eval()


def marked(rows: int) -> dict[str, Any]:
    return {**text(rows), "mark": torch.arange(rows) % 2}


class OnTheSide(Task):
    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        mark, peft_type = batch.pop("mark"), self.model.peft_type
        if peft_type == "POLY":
            batch["task_ids"] = mark
        elif not self.model.training:
            batch["adapter_names"] = [("default", "other")[i] for i in mark]
        return self.model(**batch).loss


@pytest.mark.parametrize(
    "make", [activated, activated_under_checkpoints, of_many_tasks, named], ids=lambda make: make.__name__
)
def test_arguments_that_peft_keeps_in_hooks(make: Callable[[], nn.Module]) -> None:
    settings = {"devices": 2, "num_microbatches": 3}
    plain, _ = compare_tasks(lambda: OnTheSide(make()), batches(marked), **settings)
    assert plain.moved


class Weighted(Block):
    """The weights of its branches are in a list and in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.scaling = {"default": 1.0, "other": 0.5}
        self.offsets = [0.5]

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scaling["default"] * (super().forward(x) + self.offsets[0])


class ScaledForTheCall(Chain):
    """What the containers hold is changed for one of two calls."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Weighted() for _ in self.blocks)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        before = [(block.scaling["default"], block.offsets[0]) for block in self.blocks]
        for i, block in enumerate(self.blocks):
            block.scaling["default"] *= 0.25 * (i + 1)
            block.offsets[0] = float(i)
        scaled = self(x)
        for block, (scale, offset) in zip(self.blocks, before, strict=True):
            block.scaling["default"], block.offsets[0] = scale, offset
        return F.mse_loss(self(x), y) + F.mse_loss(scaled, y)


@pytest.mark.ways("lazy")
def test_lists_and_dicts_that_are_changed_for_a_call(pipeline: dict[str, Any]) -> None:
    assert_parity(ScaledForTheCall, vectors, **pipeline, min_calls=4)


class ScaledAdapter(Task):
    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        layers = [module for module in self.model.modules() if hasattr(module, "scale_layer")]
        for layer in layers:
            layer.scale_layer(0.5)
        loss = self.model(**batch).loss
        for layer in layers:
            layer.unscale_layer(0.5)
        return loss


def test_adapters_that_are_scaled_for_a_call() -> None:
    settings = {"devices": 2, "num_microbatches": 3}
    plain, ours = compare_tasks(lambda: ScaledAdapter(adapted()), **settings)
    for run in (plain, ours):
        scaling = [module.scaling for module in run.module.modules() if hasattr(module, "scale_layer")]
        assert scaling == [{"default": 4.0}] * len(scaling)
