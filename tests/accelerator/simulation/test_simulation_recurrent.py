"""Recurrent networks: the fused cells that accelerators are asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

pytestmark = pytest.mark.accelerator

NETWORKS: dict[str, tuple[type[nn.RNNBase], dict[str, Any]]] = {
    "lstm": (nn.LSTM, {}),
    "lstm-deep": (nn.LSTM, {"num_layers": 2, "bidirectional": True, "batch_first": True}),
    "lstm-without-bias": (nn.LSTM, {"bias": False}),
    "lstm-projected": (nn.LSTM, {"proj_size": 2}),
    "gru": (nn.GRU, {}),
    "gru-deep": (nn.GRU, {"num_layers": 2, "bidirectional": True, "batch_first": True}),
    "gru-without-bias": (nn.GRU, {"bias": False}),
    "rnn-tanh": (nn.RNN, {}),
    "rnn-relu": (nn.RNN, {"nonlinearity": "relu", "num_layers": 2}),
}
LENGTHS = torch.tensor([5, 3, 1])


class Packed(nn.Module):
    """Runs a network on sequences of several lengths."""

    def __init__(self, network: nn.RNNBase) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        packed = pack_padded_sequence(x, LENGTHS)
        assert isinstance(packed, PackedSequence)
        output, state = self.network(packed)
        return pad_packed_sequence(output)[0], state


def _network(name: str) -> nn.RNNBase:
    make, options = NETWORKS[name]
    return make(3, 4, **options).double()


def _leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.double, requires_grad=True)


@pytest.mark.parametrize("name", NETWORKS)
def test_network_in_training_agrees(name: str, assert_same_as_host: Callable[..., None]) -> None:
    assert_same_as_host(_network(name), _leaf(5, 3, 3))


@pytest.mark.parametrize("name", ["lstm", "lstm-deep", "gru", "gru-deep", "rnn-tanh"])
def test_network_on_packed_sequences_agrees(name: str, assert_same_as_host: Callable[..., None]) -> None:
    network = _network(name)
    network.batch_first = False
    assert_same_as_host(Packed(network), _leaf(5, 3, 3))


@pytest.mark.parametrize("make", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_cell_agrees(make: Callable[..., nn.Module], assert_same_as_host: Callable[..., None]) -> None:
    assert_same_as_host(make(3, 4).double(), _leaf(2, 3))


def test_second_derivatives_of_an_lstm_cell_agree(assert_same_as_host: Callable[..., None]) -> None:
    cell = nn.LSTMCell(3, 4).double()
    weights = [weight.detach().clone().requires_grad_() for weight in cell.parameters()]

    def squared_gradient(x: Tensor, h: Tensor, c: Tensor, *parameters: Tensor) -> Tensor:
        hy, _ = torch.lstm_cell(x, (h, c), *parameters)
        (gradient,) = torch.autograd.grad(hy.sum(), x, create_graph=True)
        return gradient.square().sum()

    assert_same_as_host(squared_gradient, _leaf(2, 3), _leaf(2, 4), _leaf(2, 4), *weights)


def test_dropout_between_layers_is_drawn_on_the_device() -> None:
    network = nn.LSTM(3, 4, num_layers=2, dropout=0.5).to("sim:0")
    x = torch.randn(5, 2, 3, device="sim:0")
    torch.manual_seed(1)
    first = network(x)[0]
    assert not torch.equal(network(x)[0], first)
    torch.manual_seed(1)
    assert torch.equal(network(x)[0], first)
