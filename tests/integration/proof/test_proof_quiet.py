"""Where splitting a batch changes nothing, the proof says nothing, and leaves nothing behind."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import MeanMetric

from tests.support.parity import make_loader, make_trainer
from tests.support.small import WIDTH, Small

# What differs ends the run.
STRICT: dict[str, Any] = {"num_microbatches": 4, "options": {"check_split": "error"}}


class Draws(Small):
    """Draws in its step, in a way that ``change`` gives inputs."""

    def __init__(self, change: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__(dropout=0.3)
        self.change = change
        self.recurrent = nn.LSTM(WIDTH, WIDTH, 2, dropout=0.5, batch_first=True)
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.change(self, x))


class Drops(nn.Module):
    """A unit that skips itself at random, as LayerDrop does, and adds noise."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x if float(torch.rand(())) < 0.5 else self.inner(x) + torch.randn_like(x)


def mixed(x: Tensor) -> Tensor:
    share = torch.distributions.Beta(2.0, 2.0).sample()
    return share * x + (1 - share) * x[torch.randperm(len(x))]


DRAWS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "modules": lambda m, x: x,
    "functions": lambda m, x: F.dropout(F.alpha_dropout(x, 0.2), 0.5),
    "recurrent": lambda m, x: m.recurrent(x[:, None])[0][:, 0],
    "attention": lambda m, x: m.attention(x[:, None], x[:, None], x[:, None])[0][:, 0],
    "fused attention": lambda m, x: F.scaled_dot_product_attention(*[x[:, None]] * 3, dropout_p=0.5)[:, 0],
    "noise": lambda m, x: x + torch.rand(len(x), 1) * torch.randn_like(x),
    "in place": lambda m, x: x + torch.empty(2 * len(x), WIDTH).normal_().view(2, len(x), WIDTH)[0] * 0,
    "rows that are kept": lambda m, x: x * torch.bernoulli(torch.full((len(x), 1), 0.7)),
    "classes": lambda m, x: x + torch.multinomial(x.softmax(-1), 1),
    "rows that are mixed": lambda m, x: mixed(x),
    "a number of Python": lambda m, x: x * random.random(),
    "numbers of NumPy": lambda m, x: x * float(np.random.rand()),
    "rows of NumPy, which cannot be told": lambda m, x: x + torch.from_numpy(np.random.rand(*x.shape)).float(),
    "columns, which cannot be told": lambda m, x: x[:, torch.randperm(x.shape[1])] + torch.randn(WIDTH, len(x)).T,
}


@pytest.mark.parametrize("case", DRAWS)
def test_random_numbers(case: str) -> None:
    make_trainer(**STRICT, limit_train_batches=2).fit(Draws(DRAWS[case]), make_loader())


def test_random_numbers_of_units() -> None:
    module = Small()
    module.body.append(Drops())
    make_trainer(**STRICT, limit_train_batches=2).fit(module, make_loader())


class Keeps(Small):
    """With all kinds of state that a step changes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(2, WIDTH)
        self.register_buffer("num_steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("table", torch.zeros(2**19))
        self.mean = MeanMetric()
        self.outputs: list[Any] = []
        self.by_name: dict[str, list[Any]] = {"rows": []}
        self.last: deque[Any] = deque(maxlen=3)
        self.names: set[str] = set()
        self.keeper = Keeper()
        self.chance = random.Random(3)
        self.generator = torch.Generator().manual_seed(4)
        self.body[0].register_forward_hook(self.keeper.see)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        if self.trainer.global_step == 0:
            self.chance.random(), torch.rand((), generator=self.generator)
        logits = self(self.norm(x))
        self.current = logits
        self.num_steps.fill_(batch_idx + 1)
        self.table[:3] = float(batch_idx + 1)
        self.mean(logits.detach().mean())
        self.outputs.append(logits.detach())
        self.by_name["rows"].append(y)
        self.names.add("step")
        self.keeper.names["step"] = "seen"
        batch[0].requires_grad_(False)
        self.log("loss", loss := F.cross_entropy(logits, y))
        return loss


class Keeper:
    """An object of the user's that hooks and steps fill."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}
        self.shapes: list[Any] = []

    def see(self, module: Any, args: Any, output: Tensor) -> None:
        self.shapes.append(output.shape[1:])


def state_after(check: str, copies: bool) -> dict[str, Any]:
    torch.manual_seed(5)
    random.seed(5)
    module = Keeps()
    options = {"check_split": check, "virtual_copies": copies}
    trainer = make_trainer(num_microbatches=4, options=options)
    trainer.fit(module, make_loader())
    names = ("outputs", "by_name", "last", "names")
    return {
        "weights": module.state_dict(),
        "optimizer": trainer.optimizers[0].state_dict()["state"],
        "logged": dict(trainer.logged_metrics),
        "mean": float(module.mean.compute()),
        "torch": torch.get_rng_state(),
        "python": random.random(),
        "drawn": (module.chance.random(), float(torch.rand((), generator=module.generator))),
        "keeper": vars(module.keeper),
        **{name: getattr(module, name) for name in names},
    }


@pytest.mark.parametrize("copies", [False, True])
def test_nothing_is_left_behind(copies: bool) -> None:
    with_proof, without = (state_after(check, copies) for check in ("exact", "off"))
    assert with_proof.pop("mean") == pytest.approx(without.pop("mean"))  # micro-batches come to it in any order
    tensors = ("weights", "optimizer", "logged", "torch", "outputs", "by_name")
    torch.testing.assert_close(
        {name: with_proof[name] for name in tensors}, {name: without[name] for name in tensors}, rtol=0, atol=0
    )
    for name in with_proof.keys() - set(tensors):
        assert with_proof[name] == without[name], name


def test_it_is_made_again_at_step_ten_and_for_another_layout() -> None:
    tried: list[int] = []

    class Counts(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if len(batch[0]) == 4:  # rows of two micro-batches
                tried.append(batch_idx)
            return self.loss(batch[:2])

    class Loader(list[Any]):
        """Eleven batches and one, of which the fourth has one entry more."""

    batches = Loader((torch.randn(8, WIDTH), torch.arange(8) % 3) for _ in range(12))
    batches[3] = (*batches[3], torch.zeros(8))
    loader = torch.utils.data.DataLoader(batches, batch_size=None)
    make_trainer(num_microbatches=4, options={"verify": 0}).fit(Counts(), loader)
    assert tried == [0, 3, 10]


def test_it_takes_fewer_rows_where_memory_is_short() -> None:
    rows: list[int] = []

    class Evaluates(Small):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            rows.append(len(batch[0]))
            self.log("val", self.loss(batch))

    weights, row = 4 * (WIDTH * WIDTH + WIDTH), 4 * WIDTH
    options = {"virtual_copies": True, "device_memory_limit": weights + 65 * row}
    trainer = make_trainer(devices=1, num_microbatches=4, options=options)
    trainer.validate(Evaluates(), make_loader(64, batch_size=64), verbose=False)
    assert rows == [32, 16, 8, 8, *[16] * 4]
