"""What a step returns: detached at once, on the host in the end, in containers of the same kind."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_roundpipe.devices.virtual import VirtualDevice
from lightning_roundpipe.usercode.outputs import Results, brought_home, without_graph
from tests.support.engine.lazy_link import LazyLink
from tests.support.engine.modelled import kept
from tests.support.engine.steps import Steps

CONTAINERS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "tensor": (lambda x: x, lambda v: v),
    "nested": (lambda x: {"a": [(x, 1)]}, lambda v: v["a"][0][0]),
}


@pytest.fixture
def device() -> Iterator[VirtualDevice]:
    device = VirtualDevice(0, link=LazyLink())
    device.open()
    yield device
    device.close()


@pytest.fixture
def graph() -> Tensor:
    return torch.arange(3.0, requires_grad=True) * 2


@pytest.mark.parametrize(("wrap", "unwrap"), CONTAINERS.values(), ids=CONTAINERS)
def test_tensors_arrive_detached_in_containers_of_the_same_kind(
    device: VirtualDevice, graph: Tensor, wrap: Any, unwrap: Any
) -> None:
    output = wrap(graph)
    arrived = Results(output, lambda tensor: device).arrive()
    assert type(arrived) is type(output)
    assert not unwrap(arrived).requires_grad
    torch.testing.assert_close(unwrap(arrived), torch.tensor([0.0, 2.0, 4.0]))
    assert unwrap(output) is graph  # the user may have kept it: it stays what it was


@pytest.mark.parametrize("value", [None, 3, object(), {"a": [1, None]}, (torch.ones(2),)])
def test_what_is_on_the_host_without_a_graph_is_kept(value: Any) -> None:
    assert Results(value, lambda tensor: None).arrive() is value
    assert brought_home(value) is value


@pytest.mark.parametrize(("wrap", "unwrap"), CONTAINERS.values(), ids=CONTAINERS)
def test_what_attributes_hold_is_detached(graph: Tensor, wrap: Any, unwrap: Any) -> None:
    held = wrap(graph)
    kept = unwrap(without_graph(held))
    assert not kept.requires_grad
    torch.testing.assert_close(kept, graph.detach())
    assert unwrap(held) is graph


def test_results_are_waited_for(device: VirtualDevice, graph: Tensor) -> None:
    results = Results(graph, lambda tensor: device)
    ((_, transfer),) = results._arriving.values()
    assert transfer.tensors[0].isnan().all()
    assert torch.equal(results.arrive(), torch.tensor([0.0, 2.0, 4.0]))
    assert transfer.tensors[0].tolist() == [0.0, 2.0, 4.0]


def test_a_tensor_that_comes_twice_travels_once(device: VirtualDevice, graph: Tensor) -> None:
    arrived = Results([graph, {"same": graph}], lambda tensor: device).arrive()
    assert arrived[0] is arrived[1]["same"]
    assert device.d2h.num_bytes == 3 * 4


def test_sparse_tensors_do_not_need_a_lane(device: VirtualDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "download", None, raising=False)
    sparse = torch.eye(3).to_sparse()
    assert Results(sparse, lambda tensor: device).arrive().to_dense().equal(torch.eye(3))


def test_the_graph_is_not_kept(device: VirtualDevice) -> None:
    leaf = torch.ones(2, requires_grad=True)  # the graph holds it
    alive = weakref.ref(leaf)
    results = Results({"x": 2 * leaf}, lambda tensor: device)
    del leaf
    assert alive() is None
    assert results.arrive()["x"].tolist() == [2.0, 2.0]


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """``cpu()`` of the stand-in for a GPU, which has no values."""
    monkeypatch.setattr(Tensor, "cpu", lambda tensor: torch.full(tensor.shape, 7.0))


@pytest.mark.usefixtures("moved")
def test_what_is_on_a_gpu_is_brought_home(graph: Tensor) -> None:
    there, here = torch.ones(2, device="meta", requires_grad=True) * 2, torch.ones(2, requires_grad=True)
    found = brought_home({"a": [there, here, graph]})
    assert found["a"][0].tolist() == [7.0, 7.0]
    assert found["a"][1] is here
    assert found["a"][2].tolist() == graph.tolist()
    assert not found["a"][2].requires_grad


class LeavesTracesBehind(nn.Module):
    """What projects do, with results that are still on a GPU when the step ends."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.collected: list[Any] = []
        self.features: dict[str, Tensor] = {}
        self.last: Any = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        self.collected.append({"rows": x.detach().to("meta")})
        self.features["rows"] = x.detach().to("meta")
        self.last = (x.detach().to("meta"), "name")
        return x.sum()


@pytest.mark.usefixtures("moved")
def test_what_is_left_in_attributes_is_on_the_host() -> None:
    model = LeavesTracesBehind()
    Steps(model, kept).train([torch.randn(2, 3) for _ in range(2)], merge=list)
    assert [entry["rows"].device.type for entry in model.collected] == ["cpu", "cpu"]
    assert [rows.device.type for rows in model.features["rows"]] == ["cpu", "cpu"]
    assert model.last[0].device.type == "cpu"
