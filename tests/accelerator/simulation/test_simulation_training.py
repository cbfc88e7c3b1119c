"""Whole trainings: the device's results are the host's, without a race and without a wait."""

from __future__ import annotations

import copy
import threading
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

pytestmark = pytest.mark.accelerator


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 50)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        return self.head(self.blocks(self.embed(x), mask=mask, is_causal=True))


def _perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))


MODELS = {
    "perceptron": (_perceptron, lambda: (torch.randn(32, 16), torch.randint(4, (32,)))),
    "transformer": (Transformer, lambda: (torch.randint(50, (4, 12)), torch.randint(50, (4, 12)))),
}
OPTIMIZERS = {"single": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}


def _losses(model: nn.Module, x: Tensor, y: Tensor, device: str, options: dict[str, bool], amp: bool = False) -> Any:
    model, x, y = copy.deepcopy(model).to(device), x.to(device), y.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **options)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=amp):
            out = model(x)
        loss = F.cross_entropy(out.float().flatten(0, -2), y.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).cpu()


@pytest.mark.parametrize("device", ["sim:0", "sim:1"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", MODELS)
def test_losses_are_those_of_the_host(name: str, optimizer: str, device: str, sim: ModuleType) -> None:
    make, batch = MODELS[name]
    model, (x, y) = make(), batch()
    found = _losses(model, x, y, device, OPTIMIZERS[optimizer])
    torch.testing.assert_close(found, _losses(model, x, y, "cpu", OPTIMIZERS[optimizer]), rtol=1e-4, atol=0)
    counts = sim.stats()
    assert (counts["races"], counts["synchronous_operators"]) == (0, 0), counts


def test_autocast_computes_in_low_precision(sim: ModuleType) -> None:
    model, x, y = _perceptron(), torch.randn(32, 16), torch.randint(4, (32,))
    found = _losses(model, x, y, "sim:0", {}, amp=True)
    torch.testing.assert_close(found, _losses(model, x, y, "cpu", {}, amp=True), rtol=2e-2, atol=0)
    with torch.autocast("sim", torch.bfloat16):
        assert model.to("sim:0")[0](x.to("sim:0")).dtype == torch.bfloat16


def test_one_graph_on_two_devices_has_the_gradients_of_the_host() -> None:
    first, second, x = nn.Linear(8, 8), nn.Linear(8, 1), torch.randn(4, 8)
    expected = torch.autograd.grad(second(first(x)).sum(), first.parameters())
    on_0, on_1 = copy.deepcopy(first).to("sim:0"), copy.deepcopy(second).to("sim:1")
    found = torch.autograd.grad(on_1(on_0(x.to("sim:0")).to("sim:1")).sum(), on_0.parameters())
    torch.testing.assert_close([gradient.cpu() for gradient in found], list(expected))


def test_operator_on_tensors_of_two_devices_is_refused() -> None:
    with pytest.raises(RuntimeError, match="same device, but found at least two devices, sim:0 and sim:1"):
        torch.ones(3, device="sim:0") + torch.ones(3, device="sim:1")


def test_operator_on_tensors_of_device_and_host_is_refused() -> None:
    with pytest.raises(RuntimeError, match="same device, but found at least two devices, sim:0 and cpu"):
        torch.ones(3, device="sim:0") + torch.ones(3)


def test_backward_runs_on_a_thread_for_each_device() -> None:
    threads: dict[int, set[int]] = {0: set(), 1: set()}
    for index, seen in threads.items():
        x = torch.ones(3, device=f"sim:{index}", requires_grad=True)
        y = x * 2
        y.register_hook(lambda _, seen=seen: seen.add(threading.get_ident()))
        y.sum().backward()
    found = threads[0] | threads[1]
    assert len(found) == 2
    assert threading.get_ident() not in found


def test_backward_runs_on_the_stream_of_the_forward(sim: ModuleType) -> None:
    stream, seen = sim.Stream("sim:0"), []
    x = torch.ones(3, device="sim:0", requires_grad=True)
    stream.wait_stream(sim.current_stream(0))
    with sim.stream(stream):
        y = x * 2
        y.register_hook(lambda _: seen.append(sim.current_stream(0)))
        loss = y.sum()
    sim.current_stream(0).wait_stream(stream)
    loss.backward()
    assert seen == [stream]


def test_many_threads_on_streams_of_their_own_do_not_race(sim: ModuleType) -> None:
    results: list[Any] = []

    def work(index: int) -> None:
        try:
            device = f"sim:{index % 2}"
            with sim.stream(sim.Stream(device)):
                weight = torch.eye(64, device=device, requires_grad=True)
                for _ in range(10):
                    x = torch.ones(8, 64).pin_memory().to(device, non_blocking=True)
                    (x @ weight).sum().backward()
                assert weight.grad is not None
                results.append(weight.grad.cpu()[0, 0].item())
        except Exception as error:
            results.append(repr(error))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [80.0] * 8
    assert sim.stats()["races"] == 0
