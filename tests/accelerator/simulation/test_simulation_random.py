"""Random numbers depend on the generator when an operator is issued, not on when it runs."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.accelerator

DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": nn.Dropout(0.5),
    "alpha-dropout": nn.AlphaDropout(0.5),
    "multinomial": lambda x: torch.multinomial(x.abs() + 0.1, 100, replacement=True),
    "multinomial-once": lambda x: torch.multinomial(x.abs() + 0.1, 100),
    "bernoulli": lambda x: torch.bernoulli(torch.full_like(x, 0.5)),
    "normal": lambda x: torch.randn_like(x),
    "uniform": lambda x: x.clone().uniform_(),
    "integers": lambda x: torch.randint_like(x, 1000),
    "permutation": lambda x: torch.randperm(1000, device=x.device),
    "gumbel": lambda x: nn.functional.gumbel_softmax(x),
}


@pytest.fixture
def ones() -> Tensor:
    return torch.ones(1000, device="sim:0")


@pytest.mark.parametrize("name", DRAWS)
def test_same_seed_gives_the_same_numbers_and_the_next_draw_others(name: str, ones: Tensor) -> None:
    draw = DRAWS[name]
    torch.manual_seed(3)
    first, second = draw(ones), draw(ones)
    torch.manual_seed(3)
    assert torch.equal(draw(ones), first)
    assert torch.equal(draw(ones), second)
    assert not torch.equal(first, second)


def test_delay_changes_no_number(ones: Tensor, sim: ModuleType) -> None:
    torch.manual_seed(3)
    expected = nn.functional.dropout(ones)
    torch.manual_seed(3)
    with sim.options(delay_us=500, jitter=1):
        assert torch.equal(nn.functional.dropout(ones), expected)


def test_state_that_is_put_back_gives_the_same_numbers(ones: Tensor, sim: ModuleType) -> None:
    state = sim.get_rng_state("sim:0")
    first = torch.rand_like(ones)
    sim.set_rng_state(state, "sim:0")
    assert torch.equal(torch.rand_like(ones), first)


def test_forked_generators_leave_the_outer_state_alone(ones: Tensor, sim: ModuleType) -> None:
    before = sim.get_rng_state("sim:0")
    with torch.random.fork_rng(devices=[0], device_type="sim"):
        torch.rand_like(ones)
    assert torch.equal(sim.get_rng_state("sim:0"), before)


def test_generator_of_its_own_gives_its_own_numbers() -> None:
    own = torch.Generator("sim:1").manual_seed(5)
    first, second = (torch.randn(5, device="sim:1", generator=own) for _ in range(2))
    assert not torch.equal(first, second)
    assert torch.equal(torch.randn(5, device="sim:1", generator=own.manual_seed(5)), first)


def test_generator_of_the_host_is_refused() -> None:
    with pytest.raises(RuntimeError, match="Expected a 'sim' device type for generator"):
        torch.randn(5, device="sim:1", generator=torch.Generator())


def test_dropout_scales_what_it_keeps_and_its_gradient_has_the_same_mask(ones: Tensor) -> None:
    x = ones.requires_grad_()
    kept = nn.functional.dropout(x, 0.25)
    kept.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, kept.detach())
    torch.testing.assert_close(kept.detach().unique().cpu(), torch.tensor([0.0, 4 / 3]))
    assert 0.2 < (kept == 0).float().mean().item() < 0.3


def test_multinomial_draws_only_what_has_a_weight() -> None:
    weights = torch.tensor([0.0, 3.0, 0.0, 1.0], device="sim:0")
    drawn = torch.multinomial(weights, 500, replacement=True)
    assert drawn.unique().tolist() == [1, 3]
    assert drawn.device.type == "sim"


def test_checkpoint_draws_the_same_mask_again(ones: Tensor) -> None:
    x, masks = ones.requires_grad_(), []

    def block(t: Tensor) -> Tensor:
        out = nn.functional.dropout(t * 2)
        masks.append(out.detach() != 0)
        return out.square()

    checkpoint(block, x, use_reentrant=False).sum().backward()
    assert len(masks) == 2
    assert torch.equal(*masks)
