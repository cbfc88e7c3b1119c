"""Hooks, parametrizations, running statistics, activation checkpointing and random paths around and inside units."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from tests.parity.driver import assert_parity, assert_same, sequential, train
from tests.support.models import WIDTH, Block, Chain, vectors
from tests.support.rows import compat


def images() -> list[tuple[Tensor, Tensor]]:
    """More than two rows per micro-batch everywhere: batch norm refuses single ones, and pairs are ill-conditioned."""
    generator = torch.Generator().manual_seed(22)
    return [
        (torch.randn(n, 1, 8, 8, generator=generator), torch.randn(n, 1, 8, 8, generator=generator))
        for n in (17, 17, 15)
    ]


class RecordedHiddenStates(Chain):
    """Forward hooks on submodules inside the units record hidden states that enter the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden: list[Tensor] = []
        for block in self.blocks:
            block.inner.register_forward_hook(self.record)

    def record(self, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        self.hidden.append(output)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.hidden = []
        loss = super().training_step(batch, batch_idx)
        assert len(self.hidden) == len(self.blocks)
        assert all(len(hidden) == len(batch[0]) for hidden in self.hidden)
        return loss + 0.1 * sum(hidden.square().mean() for hidden in self.hidden)


class RecordedByName(Chain):
    """The same with a dict that is written by key, as feature extractors do."""

    def __init__(self) -> None:
        super().__init__()
        self.features: dict[str, Tensor] = {}
        for index, block in enumerate(self.blocks):
            block.outer.register_forward_hook(self.recorder(f"block{index}"))

    def recorder(self, name: str) -> Callable[..., None]:
        def record(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            self.features[name] = output

        return record

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        assert all(len(feature) == len(batch[0]) for feature in self.features.values())
        return loss + 0.1 * sum(self.features[f"block{i}"].square().mean() for i in range(len(self.blocks)))


class RecordedFromTheSecondStepOn(RecordedByName):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.outer._forward_hooks.clear()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == 1:
            for index, block in enumerate(self.blocks):
                block.outer.register_forward_hook(self.recorder(f"block{index}"))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        if self.global_step:
            return super().training_step(batch, batch_idx)
        return Chain.training_step(self, batch, batch_idx)


class Extractor(nn.Module):
    """A module that keeps by hooks what parts of another one give, and gives that."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.features: dict[str, Tensor] = {}
        for name in ("0", "1"):
            dict(self.model.named_modules())[name].register_forward_hook(self.keep(name))

    def keep(self, name: str) -> Callable[..., None]:
        return lambda module, args, output: self.features.__setitem__(name, output)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        self.features.clear()
        self.model(x)
        return self.features


class FeaturesOfAModule(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.extractor = Extractor()

    def run_block(self, block: nn.Module, x: Tensor) -> Tensor:
        features = self.extractor(x)
        return block(features["0"] + features["1"])


class HooksOfOneStep(Chain):
    """Registered by every step, which removes them: on a frozen part, and on units that are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Sequential(nn.Linear(4, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 2)).requires_grad_(False)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        found: dict[str, Any] = {}
        handles = [
            self.teacher[0].register_forward_hook(lambda module, args, output: found.update(teacher=output)),
            self.blocks[1].register_forward_hook(lambda module, args, output: found.update(given_back=output)),
            self.blocks[2].register_forward_pre_hook(lambda module, args: found.update(given=args[0])),
        ]
        with torch.no_grad():
            self.teacher(batch[0])
        loss = super().training_step(batch, batch_idx)
        for handle in handles:
            handle.remove()
        return loss + sum((found["teacher"] - found[name]).square().mean() for name in ("given", "given_back"))


class HooksThatChangeTheOutput(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].inner.register_forward_hook(lambda module, args, output: output * 2)
        self.blocks[1].outer.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
        self.blocks[2].inner.register_forward_hook(
            lambda module, args, kwargs, output: output + args[0], with_kwargs=True
        )


class HooksOnUnits(Chain):
    """Hooks on the units themselves: they see and change what goes in and out, and record it for the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []
        self.blocks[0].register_forward_hook(lambda module, args, output: output * 2)
        self.blocks[1].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
        self.blocks[2].register_forward_hook(self.record)
        self.blocks[3].register_forward_pre_hook(
            lambda module, args, kwargs: (args, {**kwargs, "x": kwargs["x"] * 0.5}), with_kwargs=True
        )

    def record(self, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        self.seen = [args[0], output] if args else [output]

    def run_block(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(x=x) if block is self.blocks[3] else block(x)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss + 0.1 * sum(x.square().mean() for x in self.seen)


class FrozenBlockThatRequiresGradients(Chain):
    """A hook inside a frozen unit starts a graph there, as ``enable_input_require_grads`` of transformers does."""

    def __init__(self) -> None:
        super().__init__()
        # Its backward reads the weight as it is then.
        self.blocks[0].outer = nn.Sequential(nn.LayerNorm(WIDTH), self.blocks[0].outer)
        self.stem.requires_grad_(False)
        self.blocks[0].requires_grad_(False)
        self.blocks[0].inner.register_forward_hook(lambda module, args, output: output.requires_grad_())

    def run_block(self, block: nn.Module, x: Tensor) -> Tensor:
        out = super().run_block(block, x)
        assert out.requires_grad == torch.is_grad_enabled()
        return out


class FrozenPartThatRequiresGradients(FrozenBlockThatRequiresGradients):
    """The same inside a unit that trains another part."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].outer.requires_grad_(True)


class BackwardHooks(Chain):
    """Full backward hooks, on a unit and inside one, that scale the gradient of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].register_full_backward_hook(lambda module, grad_input, grad_output: (grad_input[0] * 0.5,))
        self.blocks[2].inner.register_full_backward_hook(lambda module, grad_input, grad_output: (grad_input[0] * 0.5,))
        self.head.register_full_backward_pre_hook(lambda module, grad_output: (grad_output[0] * 2.0,))


class TensorHooks(Chain):
    """Hooks on tensors between the units."""

    def run_block(self, block: nn.Module, x: Tensor) -> Tensor:
        out = block(x)
        if out.requires_grad:
            out.register_hook(lambda gradient: gradient * 0.5)
        return out


class Pair(Block):
    """A block with two results."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), self.inner(x).square().mean()


class HooksOnOneResult(TensorHooks):
    """Hooks on a result of units whose other result gets its gradient before."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Pair() for _ in self.blocks)
        self.others: list[Tensor] = []

    def run_block(self, block: nn.Module, x: Tensor) -> Tensor:
        def run(x: Tensor) -> Tensor:
            out, other = block(x)
            self.others.append(other)
            return out

        return super().run_block(run, x)  # type: ignore[arg-type]

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.others = []
        return super().training_step(batch, batch_idx) + 0.1 * sum(self.others)


class WeightNormalisation(Chain):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            parametrizations.weight_norm(block.inner)
            parametrizations.orthogonal(block.outer)
        parametrizations.weight_norm(self.head)


class LegacyWeightNormalisation(Chain):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            nn.utils.weight_norm(block.inner)
        nn.utils.weight_norm(self.head)


class Checkpointing(Chain):
    reentrant = False

    def run_block(self, block: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(block, x, use_reentrant=self.reentrant)


class ReentrantCheckpointing(Checkpointing):
    reentrant = True


class CheckpointedPairs(Chain):
    """Two units and user code between them under one checkpoint."""

    reentrant = False

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def pair(self, first: nn.Module, second: nn.Module, x: Tensor) -> Tensor:
        return second(torch.tanh(first(x)) * self.scale)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for first, second in (self.blocks[:2], self.blocks[2:]):
            x = checkpoint(self.pair, first, second, x, use_reentrant=self.reentrant)
        return self.head(x)


class ReentrantCheckpointedPairs(CheckpointedPairs):
    reentrant = True


class CheckpointedBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class CheckpointingInsideUnits(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(CheckpointedBlock() for _ in range(4))


MODELS: list[type[Chain]] = [
    RecordedHiddenStates,
    RecordedByName,
    RecordedFromTheSecondStepOn,
    FeaturesOfAModule,
    HooksOfOneStep,
    HooksThatChangeTheOutput,
    HooksOnUnits,
    FrozenBlockThatRequiresGradients,
    FrozenPartThatRequiresGradients,
    BackwardHooks,
    TensorHooks,
    HooksOnOneResult,
    WeightNormalisation,
    LegacyWeightNormalisation,
    ReentrantCheckpointing,
    Checkpointing,
    CheckpointedPairs,
    ReentrantCheckpointedPairs,
    CheckpointingInsideUnits,
]


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
@pytest.mark.ways("lazy")
def test_hooks_and_checkpointing(pipeline: dict[str, Any], model: type[Chain]) -> None:
    assert_parity(model, vectors, **pipeline, min_calls=4)


# ---------------------------------------------------------------------------------------------------------------------
# Statistics that every forward updates: exact as one micro-batch, and otherwise as micro-batches one after the other.


class ConvBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.conv(x)))


class UNet(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([ConvBlock(1, 3), ConvBlock(3, 4)])
        self.middle = ConvBlock(4, 4)
        self.up = nn.ModuleList([ConvBlock(8, 3), ConvBlock(6, 3)])
        self.free_norm = nn.BatchNorm2d(3, affine=False)
        self.head = nn.Conv2d(3, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.middle(x)
        for block, skip in zip(self.up, reversed(skips), strict=True):
            x = block(torch.cat([F.interpolate(x, scale_factor=2.0), skip], 1))
        return self.head(self.free_norm(x))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return F.mse_loss(self(x), y)


class SpectralNormalisation(Chain):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            parametrizations.spectral_norm(block.inner)
        parametrizations.spectral_norm(self.head)


class LegacySpectralNormalisation(Chain):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            nn.utils.spectral_norm(block.inner)
        nn.utils.spectral_norm(self.head)


class SharedBatchNorm(Chain):
    """One normalisation that is called between all blocks: several updates per micro-batch, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH, momentum=0.3)

    def run_block(self, block: nn.Module, x: Tensor) -> Tensor:
        return self.norm(block(x))


def many_vectors() -> list[tuple[Tensor, Tensor]]:
    return vectors(23, 23, 20)


STATISTICS: list[tuple[type[L.LightningModule], Callable[[], list[Any]]]] = [
    (UNet, images),
    (SharedBatchNorm, many_vectors),
]
with_statistics = pytest.mark.parametrize(
    ("model", "make_data"), [pytest.param(*entry, id=entry[0].__name__) for entry in STATISTICS]
)


@with_statistics
@pytest.mark.ways("aliases")
def test_running_statistics_of_one_microbatch_are_exact(model: Callable[[], L.LightningModule], make_data: Any) -> None:
    assert_parity(model, make_data, devices=4, num_microbatches=1, min_calls=4)


@with_statistics
def test_running_statistics_are_those_of_microbatches_in_sequence(
    pipeline: dict[str, Any], model: Callable[[], L.LightningModule], make_data: Any
) -> None:
    reference = sequential(model, pipeline["num_microbatches"])
    assert_parity(model, make_data, **pipeline, reference=reference, min_calls=4)


@compat("Library", "torch (`spectral_norm`)")
@pytest.mark.parametrize("model", [SpectralNormalisation, LegacySpectralNormalisation])
def test_spectral_normalisation_iterates_once_per_step(
    pipeline: dict[str, Any], model: Callable[[], L.LightningModule]
) -> None:
    assert_parity(model, vectors, **pipeline, min_calls=4)


# ---------------------------------------------------------------------------------------------------------------------
# Units that are skipped at random. What was drawn belongs to the micro-batch, so a reference replays the decisions.


class SkipsAtRandom(Chain):
    """LayerDrop; notes which blocks ran, by the first number of the batch, or replays such notes."""

    def __init__(self, decisions: dict[float, list[bool]] | None = None) -> None:
        super().__init__()
        self.decisions: dict[float, list[bool]] = {} if decisions is None else decisions
        self.replays = decisions is not None

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        key = batch[0][0, 0].item()
        replayed: Iterator[bool] = iter(self.decisions[key]) if self.replays else iter(())
        x = self.stem(batch[0])
        for block in self.blocks:
            runs = next(replayed) if self.replays else bool(torch.rand(()) < 0.6)
            if not self.replays:
                self.decisions.setdefault(key, []).append(runs)
            if runs:
                x = block(x)
        return F.mse_loss(self.head(x), batch[1])


def test_units_skipped_at_random(pipeline: dict[str, Any]) -> None:
    run = train(SkipsAtRandom, vectors, **pipeline)
    decisions = run.module.decisions
    assert len(decisions) == 3 * pipeline["num_microbatches"]
    assert len({tuple(runs) for runs in decisions.values()}) > 2, "all micro-batches drew the same numbers"
    reference = sequential(lambda: SkipsAtRandom(decisions), pipeline["num_microbatches"])
    assert_same(run, train(reference, vectors))


class OtherOrder(Chain):
    """The path depends on the batch: blocks in another order, one of them again, one not at all."""

    ORDERS = ((0, 1, 2, 3), (3, 1, 0, 1), (2, 2, 2, 0))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        x = self.stem(x)
        for index in self.ORDERS[batch_idx]:
            x = self.blocks[index](x)
        return F.mse_loss(self.head(x), y)


def test_paths_that_change_between_batches(pipeline: dict[str, Any]) -> None:
    run = assert_parity(OtherOrder, vectors, **pipeline, min_calls=6)
    assert run.watch.num_off_plan > 0, "the second batch should have left the plan"
