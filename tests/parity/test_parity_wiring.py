"""How units are wired: skips, sharing, recurrence, frozen and unused parts, loose parameters; and their copies."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.parity.driver import assert_parity, plain, train
from tests.support.models import WIDTH, Block, Chain, Regression, padded_sequences, sequences, vectors
from tests.support.parity import assert_alike


def tokens() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(13)
    return [
        (torch.randint(11, (n, 5), generator=generator), torch.randint(11, (n, 5), generator=generator))
        for n in (7, 7, 5)
    ]


class SkipsOverSeveralUnits(Regression):
    def __init__(self) -> None:
        super().__init__(6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        skips = []
        for block in self.blocks[:3]:
            x = block(x)
            skips.append(x)
        for block, skip in zip(self.blocks[3:], reversed(skips), strict=True):
            x = block(x * skip) + skip
        return self.head(x)


class DenselyConnected(Regression):
    def forward(self, x: Tensor) -> Tensor:
        seen = [self.stem(x)]
        for block in self.blocks:
            seen.append(block(sum(seen)))
        return self.head(torch.stack(seen).mean(0))


class ParallelBranches(Regression):
    """Branches of unequal depth that start from one tensor and meet again."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        left = self.blocks[1](self.blocks[0](x))
        right = self.blocks[2](x)
        return self.head(self.blocks[3](left - right)) + self.head(left)


class EncoderDecoder(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.source = nn.Embedding(11, 8)
        self.target = nn.Embedding(11, 8)
        self.transformer = nn.Transformer(8, 2, 2, 3, 12, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 11)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        source, target = batch
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1] - 1)
        out = self.transformer(self.source(source), self.target(target[:, :-1]), tgt_mask=mask, tgt_is_causal=True)
        return F.cross_entropy(self.head(out).flatten(0, 1), target[:, 1:].flatten())


class Siamese(Regression):
    def encode(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        one, other = self.encode(x), self.encode(x.flip(-1) * 0.5)
        return F.mse_loss(self.head(one * other), y) + (1 - F.cosine_similarity(one, other)).mean()


class TiedWeights(L.LightningModule):
    """The weight of the embedding is the weight of the head: the same parameter in two units."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.embedding.weight

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        source, target = batch
        x = self.embedding(source)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), target.flatten())


class WeightUsedInAndOutsideUnits(TiedWeights):
    """The weight of a block enters the loss by itself as well (a penalty)."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        penalty = sum(block.inner.weight.square().sum() for block in self.blocks)
        return super().training_step(batch, batch_idx) + 1e-2 * penalty


class WeightUsedOutsideUnitsLater(TiedWeights):
    """The weight of a block enters the loss by itself from the second batch on; another one in all, detached."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx) * self.blocks[3].inner.weight.detach().norm()
        return loss + 1e-2 * self.blocks[1].inner.weight.square().sum() if batch_idx >= 1 else loss


class RawParameters(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(WIDTH))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.gates = nn.ParameterList(nn.Parameter(torch.ones(WIDTH)) for _ in self.blocks)
        self.extra = nn.ParameterList([torch.ones(2, dtype=torch.complex64), torch.ones(0, 3)])

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        x = self.stem(x) + self.position
        for block, gate in zip(self.blocks, self.gates, strict=True):
            x = block(x * gate)
        return F.mse_loss(self.head(x) * self.scale.exp() + self.extra[0].abs().mean(), y)


class Recurrent(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, WIDTH, num_layers=2, batch_first=True, bidirectional=True)
        self.mix = nn.Linear(2 * WIDTH, WIDTH)
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.cell = nn.GRUCell(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 2)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        x, (h, c) = self.lstm(x)
        x, last = self.gru(self.mix(x), (h[:1] + c[-1:]).contiguous())
        state = last[0]
        for step in range(x.shape[1]):
            state = self.cell(x[:, step], state)
        return F.mse_loss(self.head(state), y)


class RecurrentInALoop(Regression):
    """A recurrent layer that is called for every time step, with its state; a list that user code sets on a unit."""

    def __init__(self) -> None:
        super().__init__(2)
        self.lstm = nn.LSTM(4, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        self.blocks[0].scales = [1.0, 2.0]
        out, state = self.lstm(x[:, :2])
        for i in range(2, x.shape[1]):
            out, state = self.lstm(x[:, i : i + 1], state)
        for block in self.blocks:
            out = block(out)
        return self.head(out[:, -1])


class PackedRecurrent(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, WIDTH, batch_first=True)
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, 2)

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y, lengths = batch
        packed, _ = self.lstm(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))
        packed, last = self.gru(packed)
        padded, _ = pad_packed_sequence(packed, batch_first=True, total_length=5)
        return F.mse_loss(self.head(last[0] + padded.sum(1)), y)


class Experts(nn.Module):
    """Routes every row to one of three experts, and keeps its auxiliary loss on itself."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        logits = self.router(x)
        share, chosen = logits.softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = (chosen == index).nonzero().squeeze(-1)
            out = out.index_add(0, rows, share[rows, None] * expert(x[rows]))
        self.auxiliary_loss = logits.logsumexp(-1).square().mean()
        return x + out


class MixtureOfExperts(Regression):
    def __init__(self) -> None:
        super().__init__(0)
        self.blocks = nn.ModuleList(Experts() for _ in range(4))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(self.head(x), y) + 0.1 * sum(block.auxiliary_loss for block in self.blocks)


class PartlyFrozen(Chain):
    """Frozen in front of all that is trained, in the middle, a part of a unit, and behind."""

    def __init__(self) -> None:
        super().__init__(6)
        for module in (self.stem, self.blocks[0], self.blocks[2], self.blocks[4].inner, self.head):
            module.requires_grad_(False)


class _Late(nn.Linear):
    """Computes without a graph in the first batch; an argument says which one it is."""

    def forward(self, x: Tensor, batch_idx: int = 0) -> Tensor:
        with torch.set_grad_enabled(torch.is_grad_enabled() and batch_idx > 0):
            return super().forward(x)


class FrozenAtFirst(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.stem = _Late(4, WIDTH)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        x = self.stem(x, batch_idx)
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(self.head(x), y)


class Teacher(Chain):
    """Distillation: a frozen model under no_grad, and targets cut off the student itself."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Sequential(nn.Linear(4, WIDTH), Block(), Block(), nn.Linear(WIDTH, 2)).requires_grad_(False)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        with torch.no_grad():
            target = self.teacher(x)
            own = self(x * 0.9)
        assert not target.requires_grad
        assert not own.requires_grad
        out = self(x)
        return F.mse_loss(out, y) + F.mse_loss(out, target) + 0.5 * F.mse_loss(out, own)


class UnusedParameters(Chain):
    """A block that is never called, and one whose result is thrown away."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        self.blocks[0](x)
        x = self.blocks[2](x)
        return self.head(self.blocks[3](x.detach()) + x)


class NestedStack(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(Block(), nn.Tanh(), Block()) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


class NestedContainers(Regression):
    def __init__(self) -> None:
        super().__init__(0)
        self.trunk = nn.Sequential(NestedStack(2), nn.LayerNorm(WIDTH), NestedStack(1))
        self.by_name = nn.ModuleDict({"a": Block(), "b": Block()})

    def forward(self, x: Tensor) -> Tensor:
        x = self.trunk(self.stem(x))
        return self.head(self.by_name["b"](x) + self.by_name["a"](x))


class TracedBlock(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = torch.jit.trace(self.blocks[1], torch.zeros(2, WIDTH))


MODELS: list[tuple[type[L.LightningModule], Callable[[], list[Any]]]] = [
    (SkipsOverSeveralUnits, vectors),
    (DenselyConnected, vectors),
    (ParallelBranches, vectors),
    (EncoderDecoder, tokens),
    (Siamese, vectors),
    (TiedWeights, tokens),
    (WeightUsedInAndOutsideUnits, tokens),
    (WeightUsedOutsideUnitsLater, tokens),
    (RawParameters, vectors),
    (Recurrent, sequences),
    (RecurrentInALoop, sequences),
    (PackedRecurrent, padded_sequences),
    (MixtureOfExperts, vectors),
    (PartlyFrozen, vectors),
    (FrozenAtFirst, vectors),
    (Teacher, vectors),
    (UnusedParameters, vectors),
    (NestedContainers, vectors),
]


@pytest.mark.parametrize(("model", "make_data"), [pytest.param(*entry, id=entry[0].__name__) for entry in MODELS])
@pytest.mark.ways("lazy")
def test_wiring(pipeline: dict[str, Any], model: type[L.LightningModule], make_data: Callable[[], list[Any]]) -> None:
    assert_parity(model, make_data, **pipeline, min_calls=3)


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace.*is deprecated")
@pytest.mark.ways("lazy")
def test_a_traced_unit(pipeline: dict[str, Any], way_to_copy: str) -> None:
    """Its weights are where TorchScript has them, which is the host."""
    if way_to_copy != "accelerator":
        assert_parity(TracedBlock, vectors, **pipeline, min_calls=3)
        return
    with pytest.raises(RuntimeError, match="TorchScript interpreter"):
        train(TracedBlock, vectors, **pipeline)


def noted(module: nn.Module, args: Any, output: Tensor) -> None:
    """A hook that does nothing."""


class HookForGood(Chain):
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        if not self.blocks[0]._forward_hooks:
            self.blocks[0].register_forward_hook(noted)
        return super().training_step(batch, batch_idx)


@pytest.mark.ways("lazy")
def test_a_hook_that_a_step_leaves_is_itself_in_copies() -> None:
    run = train(HookForGood, vectors, devices=2, num_microbatches=3)

    block = run.module.blocks[0]
    copies = (copy.deepcopy(block), pickle.loads(pickle.dumps(block)))
    assert [list(one._forward_hooks.values()) for one in copies] == [[noted]] * 2


class HooksThatHoldWhatTheyFill(Chain):
    """In closures: a list that is an attribute as well, and a dict that only closures know."""

    def __init__(self) -> None:
        super().__init__()
        hidden: list[Tensor] = []
        features: dict[str, Tensor] = {}
        self.hidden = hidden
        self.feature = lambda name: features.pop(name)

        @torch.no_grad()
        def keep(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            hidden.append(output)

        self.blocks[0].inner.register_forward_hook(lambda module, args, output: hidden.append(output))
        self.blocks[1].register_forward_hook(keep)
        self.blocks[3].register_forward_hook(print)  # holds nothing
        self.blocks[2].register_forward_pre_hook(lambda module, args: features.update(given=args[0]))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.hidden.clear()
        loss = super().training_step(batch, batch_idx)
        first, second = self.hidden
        return loss + (first - second).square().mean() + self.feature("given").square().mean()


class Keeper:
    """No module: its method is a hook."""

    def __init__(self) -> None:
        self.last: Any = None
        self.all: list[Tensor] = []

    def keep(self, factor: float, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        self.last = output * factor
        self.all.append(output)


class HooksOfAnObject(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.keeper = Keeper()
        self.blocks[0].inner.register_forward_hook(functools.partial(self.keeper.keep, 2.0))
        self.blocks[1].register_forward_hook(functools.partial(self.keeper.keep, 3.0))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.keeper.all = []
        loss = super().training_step(batch, batch_idx)
        first, second = self.keeper.all
        return loss + (first - second).square().mean() + self.keeper.last.square().mean()


@pytest.mark.parametrize("model", [HooksThatHoldWhatTheyFill, HooksOfAnObject])
def test_what_a_hook_holds_is_that_of_the_microbatch(pipeline: dict[str, Any], model: type[Any]) -> None:
    ours = assert_parity(model, vectors, **pipeline, min_calls=3).module
    theirs = plain(model, vectors).module
    found = [module.hidden if model is HooksThatHoldWhatTheyFill else vars(module.keeper) for module in (ours, theirs)]
    assert_alike(*found, rtol=1e-4, atol=1e-6)
