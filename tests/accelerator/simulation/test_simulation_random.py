"""Random numbers depend on the generator when an operator is issued, not on when it runs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

pytestmark = pytest.mark.accelerator

# Those that the tests of training draw are compared there.
DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "alpha-dropout": nn.AlphaDropout(0.5),
    "multinomial": lambda x: torch.multinomial(x.abs() + 0.1, 100, replacement=True),
    "multinomial-once": lambda x: torch.multinomial(x.abs() + 0.1, 100),
    "bernoulli": lambda x: torch.bernoulli(torch.full_like(x, 0.5)),
    "integers": lambda x: torch.randint_like(x, 1000),
    "permutation": lambda x: torch.randperm(1000, device=x.device),
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


def test_generator_of_its_own_gives_its_own_numbers() -> None:
    own = torch.Generator("sim:1").manual_seed(5)
    first, second = (torch.randn(5, device="sim:1", generator=own) for _ in range(2))
    assert not torch.equal(first, second)
    assert torch.equal(torch.randn(5, device="sim:1", generator=own.manual_seed(5)), first)


def test_generator_of_the_host_is_refused() -> None:
    with pytest.raises(RuntimeError, match="Expected a 'sim' device type for generator"):
        torch.randn(5, device="sim:1", generator=torch.Generator())
