"""What the RoundPipe paper, arXiv 2604.27085, says about five models: profiles, partitions and published figures.

Times are in ms per micro-batch of 4 x 2048 tokens on one RTX 4090. Sizes are counted from the models' public
configurations; the paper gives none.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

from lightning_roundpipe.planning import CallCost, CostProfile, Machine, Partition, Stage, StageKind

NUM_DEVICES = 8
NUM_MICROBATCHES = 16
ROUND_SIZE = 8
SEQUENCES = 4  # per micro-batch
TOKENS = SEQUENCES * 2048


@dataclass(frozen=True)
class Architecture:
    """The sizes of a decoder's layers and head, from the model's public configuration.

    Attributes:
        hidden: Width of the activation between layers.
        heads, key_value_heads, head_size: The attention.
        inner: Width inside the gated feed-forward of one expert; a dense layer is one expert, always active.
        experts, active_experts: Experts of a layer, and how many of them a token goes through.
        vocabulary: Number of tokens that the head tells apart.
    """

    hidden: int
    heads: int
    key_value_heads: int
    head_size: int
    inner: int
    vocabulary: int
    experts: int = 1
    active_experts: int = 1

    @property
    def layer_parameters(self) -> int:
        """Weights of the attention's and the experts' matrices."""
        attention = 2 * self.hidden * self.head_size * (self.heads + self.key_value_heads)
        return attention + self.experts * 3 * self.hidden * self.inner

    @property
    def head_parameters(self) -> int:
        """Weights of the LM head."""
        return self.hidden * self.vocabulary

    @property
    def layer_graph_bytes(self) -> int:
        """What the backward of a layer keeps, in fp16.

        The inputs of both norms and of the projections; query, key, value and output of the attention; per active
        expert its input, gate, up, activation and product.
        """
        attention = 3 * self.hidden + 2 * self.head_size * (self.heads + self.key_value_heads)
        return TOKENS * 2 * (attention + self.active_experts * (self.hidden + 4 * self.inner))

    @property
    def head_graph_bytes(self) -> int:
        """Peak in head and loss: logits in fp16, the same in fp32, and their log-softmax in fp32."""
        return TOKENS * (2 + 4 + 4) * self.vocabulary


@dataclass(frozen=True)
class PaperModel:
    """One model of the paper: what it costs, how it was cut, and what came out.

    Attributes:
        architecture: Where the sizes come from.
        num_layers: Number of equal layers; the LM head follows them.
        layer_ms, head_ms: Forward, and backward without recompute.
        hop_ms: Time of an activation from one GPU to another.
        num_sequences: Sequences of an optimizer step in the throughput figures.
        one_f_one_b, looped: Layers of each model stage bound to a device, in order; the head comes on top of the last.
        forward, backward: Layers of RoundPipe's F and B stages in execution order; the fused stage has the head alone.
        bubbles: Simulated bubble in percent, 8 devices, 16 micro-batches.
        tokens_per_s: Measured throughput of asynchronous RoundPipe by number of devices.
        is_lora: Whether the weights are frozen. The gradients of the adapters are left out.
    """

    architecture: Architecture
    num_layers: int
    layer_ms: tuple[float, float]
    head_ms: tuple[float, float]
    hop_ms: float
    num_sequences: int
    one_f_one_b: tuple[int, ...]
    looped: tuple[int, ...]
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    bubbles: dict[str, float]
    tokens_per_s: dict[int, int]
    is_lora: bool = False

    @property
    def boundary_bytes(self) -> int:
        """Bytes of the activation between two layers, fp16."""
        return TOKENS * self.architecture.hidden * 2

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of an optimizer step in the throughput figures."""
        return self.num_sequences // SEQUENCES

    @property
    def tokens_per_step(self) -> int:
        """Tokens of an optimizer step in the throughput figures."""
        return self.num_microbatches * TOKENS

    def profile(self) -> CostProfile:
        """The layers and the head as calls, weights, gradients and activations in fp16."""
        sizes = self.architecture

        def call(name: str, times: tuple[float, float], parameters: int, output_bytes: int, graph: int) -> CallCost:
            return CallCost(
                name,
                *times,
                weight_bytes=2 * parameters,
                gradient_bytes=0 if self.is_lora else 2 * parameters,
                input_bytes=self.boundary_bytes,
                output_bytes=output_bytes,
                workspace_bytes=graph,
            )

        layer = (self.layer_ms, sizes.layer_parameters, self.boundary_bytes, sizes.layer_graph_bytes)
        layers = (call(f"layers.{i}", *layer) for i in range(self.num_layers))
        return CostProfile((*layers, call("lm_head", self.head_ms, sizes.head_parameters, 0, sizes.head_graph_bytes)))

    def machine(self, num_devices: int) -> Machine:
        """RTX 4090s: 24 GiB each, and links as fast as the paper's hops say (20 MiB/ms for all five models)."""
        link = self.boundary_bytes / self.hop_ms
        return Machine(num_devices, 24 * 2**30, h2d_bytes_per_ms=link, d2h_bytes_per_ms=link)

    def partition(self) -> Partition:
        """The paper's partition for RoundPipe."""
        cuts = list(accumulate(self.forward, initial=0))
        pieces = [(StageKind.FORWARD, start, stop) for start, stop in pairwise(cuts)]
        pieces.append((StageKind.FUSED, self.num_layers, self.num_layers + 1))
        cuts = [self.num_layers - done for done in accumulate(self.backward, initial=0)]
        pieces.extend((StageKind.BACKWARD, start, stop) for stop, start in pairwise(cuts))
        return Partition(self.num_layers + 1, tuple(Stage(i, *piece) for i, piece in enumerate(pieces)))


def with_head(layers: tuple[int, ...]) -> tuple[int, ...]:
    """Calls of each bound stage: the head on top of the last stage's layers."""
    return (*layers[:-1], layers[-1] + 1)


def _bubbles(*percent: float) -> dict[str, float]:
    names = ("1F1B", "interleaved 1F1B", "looped BFS", "RoundPipe, synchronous", "RoundPipe, asynchronous")
    return dict(zip(names, percent, strict=True))


def _tokens(*per_second: int) -> dict[int, int]:
    return dict(zip((1, 2, 4, 8), per_second, strict=True))


MODELS = {
    "Qwen3-1.7B": PaperModel(
        architecture=Architecture(2048, 16, 8, 128, 6144, 151936),
        num_layers=28,
        layer_ms=(7.43, 15.83),
        head_ms=(22.1, 43.7),
        hop_ms=1.6,
        num_sequences=512,
        one_f_one_b=(3, 3, 4, 4, 4, 4, 4, 2),
        looped=(*[1] * 18, *[2] * 5, 0),
        forward=(7,) * 4,
        backward=(*[3] * 8, 2, 2),
        bubbles=_bubbles(35.2, 27.8, 25.0, 19.1, 4.0),
        tokens_per_s=_tokens(8881, 17026, 33178, 65417),
    ),
    "Llama-3.1-8B": PaperModel(
        architecture=Architecture(4096, 32, 8, 128, 14336, 128256),
        num_layers=32,
        layer_ms=(18.50, 41.21),
        head_ms=(37.2, 74.5),
        hop_ms=3.2,
        num_sequences=256,
        one_f_one_b=(4,) * 8,
        looped=(1,) * 32,
        forward=(5, 5, 5, 5, 6, 6),
        backward=(2,) * 16,
        bubbles=_bubbles(42.1, 30.6, 29.2, 14.3, 1.3),
        tokens_per_s=_tokens(3142, 6259, 12278, 24275),
    ),
    "GPT-OSS-20B": PaperModel(
        architecture=Architecture(2880, 64, 8, 64, 2880, 201088, experts=32, active_experts=4),
        num_layers=24,
        layer_ms=(21.64, 81.78),
        head_ms=(44.3, 86.3),
        hop_ms=2.25,
        num_sequences=128,
        one_f_one_b=(3,) * 8,
        looped=(1,) * 24,
        forward=(4, 5, 5, 5, 5),
        backward=(1,) * 24,
        bubbles=_bubbles(41.7, 30.9, 30.4, 14.0, 3.3),
        tokens_per_s={8: 18122},
    ),
    "Qwen3-32B": PaperModel(
        architecture=Architecture(5120, 64, 8, 128, 25600, 151936),
        num_layers=64,
        layer_ms=(40.56, 91.17),
        head_ms=(54.9, 108.3),
        hop_ms=4.0,
        num_sequences=128,
        one_f_one_b=(8,) * 8,
        looped=(1,) * 64,
        forward=(2, 2, *[3] * 20),
        backward=(1,) * 64,
        bubbles=_bubbles(34.9, 15.1, 13.7, 6.7, 2.6),
        tokens_per_s=_tokens(740, 1476, 2897, 5516),
    ),
    "Qwen3-235B LoRA": PaperModel(
        architecture=Architecture(4096, 64, 4, 128, 1536, 151936, experts=128, active_experts=8),
        num_layers=94,
        layer_ms=(43.02, 58.38),
        head_ms=(42.4, 43.3),
        hop_ms=3.2,
        num_sequences=64,
        one_f_one_b=(11, *[12] * 6, 11),
        looped=(0, *[1] * 94, 0),
        forward=(2,) * 47,
        backward=(1,) * 94,
        bubbles=_bubbles(31.2, 6.0, 4.4, 3.3, 1.0),
        tokens_per_s=_tokens(480, 808, 1281, 1820),
        is_lora=True,
    ),
}
