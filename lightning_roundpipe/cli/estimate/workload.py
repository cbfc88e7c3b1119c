"""What a model costs on a GPU, from its shape alone: a `CostProfile` and the memory of the host.

[Note: times from shapes]
A call takes the sum of three kinds of work, each at a share of what the data sheet promises:

- products of matrices: 2 floating-point operations per weight and token, at a share of the peak; weights of routed
  experts, which are many small products, at a lower one; never faster than the device memory delivers the weights;
- attention: 4 operations per query element and attended token (half of the square, or the window), at a share of the
  peak with fp32 accumulation;
- everything in between (norms, rotary embedding, activations, residuals, dispatch to experts, the loss), which only
  moves bytes. `_traffic` counts what the operators of the plain Hugging Face code read and write; fused kernels
  (torch.compile, Liger) move about a third of it.

A backward takes twice the forward, plus adding up the gradients of the weights. Under LoRA the frozen matrices need no
gradient: once the forward. No call takes less than its kernels take to launch.

[Note: memory from shapes]
`_graph_bytes` counts what autograd keeps inside one layer for one micro-batch, and the gradients that are alive at the
worst moment of its backward, operator by operator, with an attention that keeps no scores. A loss in Hugging Face code
has logits, log-probabilities and two gradients of their size at once; one in chunks only ever those of a chunk.

[Note: one host]
Weights and activations of all devices come through one host. What its memory and its bridges give to the copies of all
devices together is no figure of a data sheet, and far below the sum of the links: of the RoundPipe paper's figures for
eight RTX 4090 (five models, from 1.7 to 235 billion weights), those that copies bound are explained by 15 to 30 GB/s,
and so are those of its second machine, with eight A800. One device alone gets what its link gives.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_roundpipe.planning import CallCost, CostProfile

from ..memory import BYTES_PER_WEIGHT, host_states
from .gpus import Gpu
from .models import LayerShape, ModelShape

_FP32 = 4
LOSS_CHUNK = 1024
"""Tokens per chunk of a chunked loss."""


@dataclass(frozen=True)
class Pace:
    """One end of the range of what real code reaches; see [Note: times from shapes].

    Attributes:
        name: "slow" or "fast".
        matmul: Share of the peak that products of matrices reach.
        experts: Share of the peak that products of routed experts reach.
        attention: Share of the peak that attention reaches.
        traffic: Share of the bytes that the plain code moves between its products.
        memory: Share of the device memory's bandwidth.
        launch_ms: Time in ms to launch the kernels of one call.
        pcie: Share of the link's raw bandwidth.
        copies_bytes_per_ms: Bandwidth that the copies of all devices share, both ways together; see [Note: one host].
        host_bytes_per_ms: Bandwidth of the host memory for the optimizer.
        optimizer_bytes: Bytes of host memory that AdamW touches per trained weight: written with one operator after the
            other, or fused into one pass.
    """

    name: str
    matmul: float
    experts: float
    attention: float
    traffic: float
    memory: float
    launch_ms: float
    pcie: float
    copies_bytes_per_ms: float
    host_bytes_per_ms: float
    optimizer_bytes: int


SLOW = Pace("slow", 0.60, 0.25, 0.40, 1.0, 0.80, 1.0, 0.50, 15e6, 100e6, 84)
FAST = Pace("fast", 0.85, 0.50, 0.85, 1 / 3, 0.90, 0.2, 0.85, 30e6, 300e6, 30)


@dataclass(frozen=True)
class Workload:
    """What is trained, how, and on which GPU.

    Attributes:
        dtype: Type that weights travel and compute in: a key of `BYTES_PER_WEIGHT`.
        lora_rank: Rank of the adapters beside every matrix of attention and dense MLP; None for full fine-tuning.
        fp16_accumulation: Whether fp16 products accumulate in fp16.
        chunked_loss: Whether head and loss run in chunks of `LOSS_CHUNK` tokens.
    """

    shape: ModelShape
    gpu: Gpu
    seq_len: int
    dtype: str = "bf16"
    lora_rank: int | None = None
    fp16_accumulation: bool = False
    chunked_loss: bool = False

    @property
    def element_bytes(self) -> int:
        """Bytes of a weight or an activation."""
        return BYTES_PER_WEIGHT[self.dtype]

    @property
    def attention_peak_tflops(self) -> float:
        """Peak of attention, which accumulates in fp32; the type fp32 runs as TF32, at half the rate of the others."""
        return self.gpu.tflops * 2 / self.element_bytes

    @property
    def peak_tflops(self) -> float:
        """Peak of the other products."""
        peak = self.gpu.fp16_accumulate_tflops if self.fp16_accumulation else self.gpu.tflops
        return peak * 2 / self.element_bytes

    @property
    def num_trained(self) -> int:
        """Weights that get gradients, each once."""
        if self.lora_rank is None:
            return self.shape.num_weights
        return sum(_num_adapter(layer, self.lora_rank) for layer in self.shape.layers)

    def host_bytes_per_sequence(self) -> int:
        """Bytes of the inputs of layers, norm and head that wait on the host for the backward of one sequence.

        They are as wide as the embedding that they begin with: autocast leaves sums of fp32 and 16-bit tensors in fp32.
        """
        num_calls = len(self.shape.layers) + 2
        size = _FP32 if self.lora_rank is None else self.element_bytes
        return num_calls * self.seq_len * self.shape.hidden * size

    def host_state(self, num_sets: int) -> dict[str, int]:
        """Bytes that stay in host memory, by purpose; `num_sets` of gradients."""
        size = self.element_bytes
        frozen = 0 if self.lora_rank is None else self.shape.num_weights
        return host_states(self.num_trained * size, frozen * size, size, num_sets)


def cost_profile(workload: Workload, microbatch_size: int, pace: Pace) -> CostProfile:
    """Return the costs of all calls on one micro-batch: embedding, layers, final norm, head with the loss."""
    clock = _Clock(workload, pace, microbatch_size * workload.seq_len)
    layers = [clock.layer(f"layers.{index}", layer) for index, layer in enumerate(workload.shape.layers)]
    return CostProfile((clock.embedding(), *layers, clock.norm(), clock.head()))


class _Clock:
    """Turns the work of calls on `num_tokens` tokens into times and sizes."""

    def __init__(self, workload: Workload, pace: Pace, num_tokens: int) -> None:
        self.workload, self.pace, self.num_tokens = workload, pace, num_tokens
        self.size = workload.element_bytes
        self.peak_per_ms = workload.peak_tflops * 1e9
        self.attention_per_ms = workload.attention_peak_tflops * 1e9 * pace.attention
        self.bytes_per_ms = workload.gpu.bytes_per_ms * pace.memory
        self.is_lora = workload.lora_rank is not None
        self.stream_bytes = num_tokens * workload.shape.hidden * self.size

    def embedding(self) -> CallCost:
        """Rows of a table; its gradient is a table of its own per micro-batch."""
        shape = self.workload.shape
        table = (shape.num_embedding + shape.num_other) * self.size
        trained = 0 if self.is_lora else table
        return self._call(
            "embedding",
            2 * self.stream_bytes / self.bytes_per_ms,
            (2 * self.stream_bytes + 4 * trained) / self.bytes_per_ms if trained else 0.0,
            weight_bytes=table,
            gradient_bytes=trained,
            input_bytes=self.num_tokens * 8,
            output_bytes=self.stream_bytes,
            workspace_bytes=trained,
        )

    def layer(self, name: str, layer: LayerShape) -> CallCost:
        """One decoder layer."""
        tokens = self.num_tokens
        products = self._products_ms(layer.num_dense, layer.num_dense, self.pace.matmul)
        if layer.num_experts:
            visited = min(1.0, tokens * layer.experts_per_token / layer.num_experts)
            active = layer.num_expert * layer.experts_per_token / layer.num_experts
            products += self._products_ms(active, layer.num_expert * visited, self.pace.experts)
        rank = self.workload.lora_rank or 0
        num_adapter = _num_adapter(layer, rank)
        adapters = self._products_ms(num_adapter, num_adapter, self.pace.matmul) if rank else 0.0
        attended = _mean_attended(self.workload.seq_len, layer.window)
        attention = 4 * layer.query_width * attended * tokens / self.attention_per_ms
        moved = tokens * _traffic(layer, is_lora=self.is_lora) * self.size / 2
        between = moved * self.pace.traffic / self.bytes_per_ms
        num_trained = num_adapter if self.is_lora else layer.num_weights
        adding_up = 4 * num_trained * self.size / self.bytes_per_ms
        weight_bytes = (layer.num_weights + num_adapter) * self.size
        largest = 0 if self.is_lora else layer.largest_weight * self.size
        return self._call(
            name,
            products + adapters + attention + between,
            products * (1 if self.is_lora else 2) + 2 * (adapters + attention + between) + adding_up,
            weight_bytes=weight_bytes,
            gradient_bytes=num_trained * self.size,
            input_bytes=self.stream_bytes,
            output_bytes=self.stream_bytes,
            workspace_bytes=tokens * _graph_bytes(layer, self.size) + largest,
        )

    def norm(self) -> CallCost:
        """The norm after the last layer."""
        layer = self.workload.shape.layers[-1]
        moved = _NORM_TRAFFIC[layer.family.norm] * self.num_tokens * layer.hidden * self.size / 2
        between = moved * self.pace.traffic / self.bytes_per_ms
        weight_bytes = self.workload.shape.hidden * self.size
        return self._call(
            "norm",
            between,
            2 * between,
            weight_bytes=weight_bytes,
            gradient_bytes=0 if self.is_lora else weight_bytes,
            input_bytes=self.stream_bytes,
            output_bytes=self.stream_bytes,
            workspace_bytes=self.num_tokens * layer.hidden * _norm_bytes(layer, self.size),
        )

    def head(self) -> CallCost:
        """The head and the loss behind it, which leaves nothing to send on."""
        shape = self.workload.shape
        weight_bytes = shape.num_embedding * self.size
        trained = 0 if self.is_lora else weight_bytes
        products = self._products_ms(shape.num_embedding, shape.num_embedding, self.pace.matmul)
        # Bytes per logit, forward: written (2), to fp32 (6), log-softmax (8). Backward: zeros for the picked elements
        # (4), through the log-softmax (12), back to 16 bits and into the product (8).
        pass_ms = shape.vocab * self.num_tokens * self.pace.traffic / self.bytes_per_ms
        at_once = min(self.num_tokens, LOSS_CHUNK) if self.workload.chunked_loss else self.num_tokens
        return self._call(
            "head",
            products + 16 * pass_ms,
            products * (1 if self.is_lora else 2) + 24 * pass_ms + 4 * trained / self.bytes_per_ms,
            weight_bytes=weight_bytes,
            gradient_bytes=trained,
            input_bytes=self.stream_bytes,
            output_bytes=0,
            workspace_bytes=at_once * shape.vocab * logit_bytes(self.size) + self.stream_bytes + trained,
        )

    def _products_ms(self, num_weights: float, num_read: float, share: float) -> float:
        """Time of a forward's products with `num_weights` per token, `num_read` weights in all."""
        compute = 2 * num_weights * self.num_tokens / (self.peak_per_ms * share)
        return max(compute, num_read * self.size / self.bytes_per_ms)

    def _call(self, name: str, forward_ms: float, backward_ms: float, **sizes: int) -> CallCost:
        launch = self.pace.launch_ms
        return CallCost(name, max(forward_ms, launch), max(backward_ms, 2 * launch) if backward_ms else 0.0, **sizes)


def logit_bytes(size: int) -> int:
    """Bytes per logit at the worst moment of the loss: logits, log-probabilities, two fp32 gradients.

    The fp32 copy of the logits is gone by then.
    """
    return size + 3 * _FP32


def _num_adapter(layer: LayerShape, rank: int) -> int:
    return rank * sum(rows + columns for rows, columns in layer.linears)


def _mean_attended(seq_len: int, window: int | None) -> float:
    """Tokens that a token attends to, itself included, on average over a sequence."""
    width = min(window or seq_len, seq_len)
    return width - width * (width - 1) / (2 * seq_len)


# Bytes that the plain code reads and writes per element of a 16-bit tensor, forward.
# An RMS norm: to fp32 (6), square (8), mean (4), scale (8), back (6), weights (4).
_NORM_TRAFFIC = {"rms": 36, "rms_fp32": 40}
_ROTARY_TRAFFIC = 20  # two products, a half negated, a concatenation, a sum
_RESIDUAL_TRAFFIC = 6
# per element of the inner width; "clamped" adds biases, two clamps, and works on strided halves
_ACTIVATION_TRAFFIC = {"gated": 10, "clamped": 40}
_DISPATCH_TRAFFIC = 14  # gather, weigh, put back, sum


def _traffic(layer: LayerShape, *, is_lora: bool) -> int:
    """Bytes per token that a layer moves between its products; see [Note: times from shapes]."""
    heads_width = layer.query_width + layer.key_width
    routed = layer.experts_per_token
    moved = (layer.family.num_norms * _NORM_TRAFFIC[layer.family.norm] + 2 * _RESIDUAL_TRAFFIC) * layer.hidden
    moved += _ROTARY_TRAFFIC * heads_width
    moved += _NORM_TRAFFIC[layer.family.norm] * heads_width if layer.family.has_qk_norm else 0
    moved += _ACTIVATION_TRAFFIC[layer.family.activation] * (layer.mlp_width + routed * layer.expert_width)
    moved += _DISPATCH_TRAFFIC * routed * layer.hidden
    if is_lora:
        # read the input once more; scale the adapter's output and add it
        moved += sum(2 * rows + 12 * columns for rows, columns in layer.linears)
    return moved


def _norm_bytes(layer: LayerShape, size: int) -> int:
    """Bytes per element that a norm keeps: its fp32 input, and what it multiplies by its weights."""
    return {"rms": _FP32 + size, "rms_fp32": 2 * _FP32}[layer.family.norm]


def _graph_bytes(layer: LayerShape, size: int) -> int:
    """Bytes per token of a layer's graph and of its gradients in flight; see [Note: memory from shapes]."""
    h, heads_width = layer.hidden, layer.query_width + layer.key_width
    inner, routed = layer.mlp_width, layer.experts_per_token
    expert_inner = routed * layer.expert_width
    kept = layer.family.num_norms * _norm_bytes(layer, size) * h
    kept += 2 * size * h  # what goes into attention and MLP
    kept += 2 * size * heads_width  # queries, keys, values, and the output of attention
    kept += _norm_bytes(layer, size) * heads_width if layer.family.has_qk_norm else 0
    kept += {"gated": 4, "clamped": 7}[layer.family.activation] * size * (inner + expert_inner)
    kept += 2 * size * routed * h  # rows as they go to the experts and as they come back
    dense_gradients = 2 * size * inner
    expert_gradients = max(3 * size * routed * h, size * routed * h + 3 * size * expert_inner)
    # A norm behind the MLP goes backward while the MLP's graph is still whole.
    norm_gradients = 4 * _FP32 * h if layer.family.num_norms > 2 else 0
    return kept + size * h + max(dense_gradients, expert_gradients, norm_gradients)
