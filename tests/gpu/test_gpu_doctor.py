"""``roundpipe doctor`` on GPUs."""

from __future__ import annotations

import json

import pytest
import torch

from lightning_roundpipe.cli import main

pytestmark = pytest.mark.gpu


def test_all_facts_about_gpus_are_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    facts = document["facts"]
    assert document["unknown"] == {}
    assert [gpu["name"] for gpu in facts["gpus"]] == [
        torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())
    ]
    assert all(speed > 0 for way in ("h2d", "d2h") for speed in facts["links"][f"{way}_bytes_per_ms"])
    assert facts["page_locking"]["error"] == 0
