"""What travels to the devices in a step: with and without working copies, frozen weights and room on the devices.

Bytes are counted, not timed: the same on every machine.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks._report import Report, parser, progress, rounded
from lightning_roundpipe.common.sizes import num_bytes_of
from lightning_roundpipe.devices.pool import DevicePool
from lightning_roundpipe.devices.transfer import Transfer
from lightning_roundpipe.engine.runner import Engine, StepRequest
from lightning_roundpipe.planning import CostProfile, Machine, Partition
from tests.support.engine.lazy_link import LazyLink
from tests.support.engine.plain_loop import cut_at

METHOD = """
A decoder of pre-norm blocks (attention, MLP of four times the width) is trained by the engine on two virtual devices
that copy everything. Two blocks per forward stage, one per backward stage, four micro-batches in one round, the same
plan in every step. 'lora' freezes all matrices of the blocks and adds adapters of rank 8 to each. Counted are bytes
that are uploaded and downloaded in the last of five steps, over both devices: in the first steps units are learned in
full precision. 'weights' are those of units; the rest are activations, gradients of activations (up) and gradients of
weights (down). 'tight' limits each device to the given multiple of the bytes of a block in float32, 'roomy' does not.
device_peak_mib is the most that the books of a device had in any of the steps.
"""
NUM_DEVICES = 2
NUM_MICROBATCHES = 4
NUM_STEPS = 5
RANK = 8
TIGHT_BLOCKS = 4.0
MIB = 2**20


class Linear(nn.Module):
    """A matrix; with adapters, it is frozen, and a product of two small ones is added to it."""

    def __init__(self, inputs: int, outputs: int, adapts: bool) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs, bias=False).requires_grad_(not adapts)
        self.adapter = (
            nn.Sequential(nn.Linear(inputs, RANK, False), nn.Linear(RANK, outputs, False)) if adapts else None
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) if self.adapter is None else self.base(x) + self.adapter(x)


class Block(nn.Module):
    """Attention and MLP."""

    def __init__(self, width: int, adapts: bool) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attend, self.project = Linear(width, 3 * width, adapts), Linear(width, width, adapts)
        self.up, self.down = Linear(width, 4 * width, adapts), Linear(4 * width, width, adapts)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.attend(self.norms[0](x)).unflatten(-1, (3, 4, -1)).movedim(-3, 0).transpose(2, 3)
        x = x + self.project(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Decoder(nn.Module):
    """Blocks between an embedding and a head."""

    def __init__(self, num_blocks: int, width: int, adapts: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(width, width).requires_grad_(not adapts)
        self.blocks = nn.ModuleList(Block(width, adapts) for _ in range(num_blocks))
        self.head = Linear(width, width, adapts)

    def step(self, tokens: Tensor) -> Tensor:
        """The loss."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.roll(-1, 1).flatten())


def plan(costs: CostProfile, machine: Machine, num_microbatches: int, training: bool) -> Partition:
    """The embedding goes with the first block, and the head is fused with the last."""
    count = len(costs.calls)
    return cut_at(count, training, range(3, count - 2, 2), range(2, count - 2), count - 2)


@contextlib.contextmanager
def counted_weights(pool: DevicePool) -> Iterator[list[int]]:
    """Bytes of the uploads of weights that are submitted while it is open."""
    found: list[int] = []

    def note(upload: Any, tensors: Sequence[Tensor], what: str, **options: Any) -> Transfer:
        if what.startswith("weights"):
            found.append(num_bytes_of(tensors))
        return upload(tensors, what, **options)  # type: ignore[no-any-return]

    for device in pool.devices:
        upload = device.upload
        device.upload = lambda *args, _upload=upload, **options: note(_upload, *args, **options)  # type: ignore
    yield found
    for device in pool.devices:
        del device.upload


def measure(training: str, precision: str, room: str, num_blocks: int, width: int) -> dict[str, Any]:
    """One case."""
    torch.manual_seed(0)
    model = Decoder(num_blocks, width, training == "lora")
    block_bytes = sum(p.numel() * p.element_size() for p in model.blocks[0].parameters())
    limit = int(TIGHT_BLOCKS * block_bytes) if room == "tight" else None
    pool = DevicePool([torch.device("cpu")] * NUM_DEVICES, link=LazyLink(), memory_limit=limit)
    engine = Engine(model, pool, plan)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    tokens = torch.randint(width, (2 * NUM_MICROBATCHES, 16))
    shares = [1 / NUM_MICROBATCHES] * NUM_MICROBATCHES
    for step in range(NUM_STEPS):
        request = StepRequest(
            model.step, tokens.chunk(NUM_MICROBATCHES), shares, "train", step, loss_of=lambda loss: loss
        )
        with (
            counted_weights(pool) as weights,
            torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed", cache_enabled=False),
        ):
            result = engine.run(request)
        for parameter, gradient in result.gradients.items():
            parameter.grad = gradient
        optimizer.step()
    return {
        "training": training,
        "precision": precision,
        "room": room,
        "up_mib": rounded(sum(result.bytes_up) / MIB),
        "up_weights_mib": rounded(sum(weights) / MIB),
        "down_mib": rounded(sum(result.bytes_down) / MIB),
        "device_peak_mib": rounded(max(device.memory.peak for device in pool.devices) / MIB),
        "model_mib": rounded(sum(p.numel() * p.element_size() for p in model.parameters()) / MIB),
        "working_copies_mib": rounded(engine.working_copies.host_bytes / MIB),
    }


def main() -> None:
    """Counts and prints."""
    args = parser(__doc__, repeats=1).parse_args()
    num_blocks, width = (3, 32) if args.quick else (8, 256)
    parameters = {"blocks": num_blocks, "width": width, "rank": RANK, "tight_blocks": TIGHT_BLOCKS}
    report = Report("bytes_moved", METHOD, {**parameters, "devices": NUM_DEVICES, "num_microbatches": NUM_MICROBATCHES})
    results = []
    for training in ("full", "lora"):
        for room in ("roomy", "tight"):
            for precision in ("32-true", "bf16-mixed"):
                results.append(measure(training, precision, room, num_blocks, width))
                progress(str(results[-1]))
    report.emit(results)


if __name__ == "__main__":
    main()
