"""What a step has changed is put back before it is run again."""

from __future__ import annotations

import torch
from torch import nn

from lightning_roundpipe.integration.steps.modules import ModuleScan
from lightning_roundpipe.integration.steps.step_state import StepState
from tests.support.models import Statistics

HOST = torch.device("cpu")


def test_buffers_are_put_back_that_were_written_without_a_new_version() -> None:
    """By batch norm, through ``data``, in inference mode; others can only be told by their version."""
    norm, given = nn.BatchNorm1d(3), Statistics()
    with torch.inference_mode():
        made = Statistics()
    given.register_buffer("graph", torch.eye(3).to_sparse())
    given.register_buffer("expanded", torch.ones(1).expand(3))
    state = StepState(ModuleScan(nn.ModuleList([norm, given, made])), None, [HOST])
    versions = [buffer._version for buffer in (norm.running_mean, given.mean)]
    norm(torch.arange(6.0).reshape(2, 3))
    given.mean.data += 1.0
    given.graph *= 2.0
    with torch.inference_mode():
        made.mean += 1.0
    assert [buffer._version for buffer in (norm.running_mean, given.mean)] == versions
    state.restore()
    for mean in (norm.running_mean, given.mean, made.mean):
        assert mean.tolist() == [0.0] * 3
    assert norm.running_var.tolist() == [1.0] * 3
    assert norm.num_batches_tracked == 0
    assert torch.equal(given.graph.to_dense(), torch.eye(3))


def test_buffers_that_a_step_has_made_go() -> None:
    root = Statistics()
    root.register_buffer("scale", None)
    state = StepState(ModuleScan(root), None, [HOST])
    root.scale = torch.ones(3)
    root.register_buffer("num_rows", torch.zeros(()))
    state.restore()
    assert root.scale is None
    assert not hasattr(root, "num_rows")


def test_evaluation_in_inference_mode_leaves_tensors_to_training_that_it_may_change() -> None:
    root = Statistics()
    root.seen.update(torch.ones(1))
    root.metrics.update(torch.ones(1))
    with torch.inference_mode():
        state = StepState(ModuleScan(root), None, [HOST])
        root.mean += 1.0
        root.metrics.update(torch.ones(1))
        state.restore()
    root.mean += 1.0
    root.metrics.update(torch.tensor(4.0))
    assert root.mean.tolist() == [1.0] * 3
    assert root.metrics["loss"].compute() == 2.5
