"""Random models under random settings train as in plain Lightning; ``make test-random`` tries many more of them."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.support.parity import compare, make_loader
from tests.support.random_models import Random


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    metafunc.parametrize("seed", range(metafunc.config.getoption("--random")))


def settings_for(seed: int) -> dict[str, Any]:
    draw = random.Random(-1 - seed)
    return {
        "devices": draw.randint(1, 3),
        "num_microbatches": draw.randint(2, 4),
        "accumulate_grad_batches": draw.choice([1, 1, 2]),
        "gradient_clip_val": draw.choice([None, None, 0.5]),
        "max_epochs": 2,
        "max_steps": 3,
        "options": {
            "virtual_copies": draw.random() < 0.5,
            "optimizer_overlap": draw.choice(["exact", "off"]),
        },
    }


@pytest.mark.ways("aliases")
def test_random_models_train_as_in_plain_lightning(seed: int) -> None:
    compare(lambda: Random(seed), make_loader(20), tolerances={"atol": 1e-5}, **settings_for(seed))
