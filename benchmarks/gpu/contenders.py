"""Ways to train the same model on the same tokens: this strategy, and others."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_roundpipe
from benchmarks._report import QUIET, rounded

from .measuring import WARMUP, Job, Meter
from .models import LEARNING_RATE, Causal, Rows, Size, batches, layers_of, make_model, trained
from .probes import overlap
from .results import NotRunError


def roundpipe(job: Job, meter: Meter) -> None:
    """RoundPipeStrategy, through the Trainer."""
    options = {"num_microbatches": job.size.microbatches, **job.options}
    if job.is_tiny:
        options["virtual_copies"] = lightning_roundpipe.VirtualLink(gb_per_s=25.0, latency_us=10.0)
    strategy = lightning_roundpipe.RoundPipeStrategy(**options)
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        timeline = lightning_roundpipe.RoundPipeTimeline(trace, first_step=WARMUP - 1, num_steps=1)
        trainer = L.Trainer(
            accelerator="roundpipe",
            strategy=strategy,
            devices=[0],
            precision="bf16-mixed",
            max_epochs=1,
            callbacks=[timeline, Metering(meter)],
            default_root_dir=folder,
            **QUIET,
        )
        loader = DataLoader(Rows(job.size), batch_size=job.size.rows * job.size.microbatches)
        trainer.fit(Causal(make_model(job.size)), loader)


class Metering(L.Callback):
    """Tells the meter about the steps of a Trainer, and it the Trainer when they are enough."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter

    def on_train_batch_start(self, *args: Any, **kwargs: Any) -> None:
        self._meter.begin_step()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, *args: Any, **kwargs: Any
    ) -> None:
        if self._meter.is_last_of_warmup:
            self._meter.figures["timeline"] = _timeline_figures(trainer.strategy)
        self._meter.end_step(float(outputs["loss"]))
        trainer.should_stop = not self._meter.goes_on


def _timeline_figures(strategy: Any) -> dict[str, Any]:
    """Of the step that was traced."""
    step = strategy.last_step
    statistics = strategy.device_statistics("cpu")
    return {
        "busy_share": rounded(step.timeline.busy_fraction),
        "transfers_under_compute": rounded(overlap(step.timeline)),
        "bytes_up": sum(step.bytes_up),
        "bytes_down": sum(step.bytes_down),
        "host_activation_bytes": step.saved_bytes,
        "num_stages": step.partition.num_stages,
        "num_microbatches": step.num_microbatches,
        "kept_free_bytes": strategy.pool[0].memory.spare,
        "page_locked": {name: value for name, value in statistics.items() if name.startswith("host.")},
    }


def resident(job: Job, meter: Meter) -> None:
    """Model and optimizer on the device, layers recomputed by torch."""
    model = _checkpointed(make_model(job.size)).to(job.device)
    optimizer = torch.optim.AdamW(trained(model), lr=LEARNING_RATE, fused=True)
    _train(job, meter, model, _torchs_optimizer(optimizer))


def fsdp2(job: Job, meter: Meter) -> None:
    """``fully_shard`` over one device, with the parameters and the optimizer on the host."""
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    device = job.device
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    distributed.init_process_group(backend, store=distributed.HashStore(), rank=0, world_size=1)
    try:
        model = _checkpointed(make_model(job.size))
        settings: dict[str, Any] = {
            "mesh": init_device_mesh(device.type, (1,)),
            "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
            "offload_policy": OffloadPolicy() if device.type == "cpu" else CPUOffloadPolicy(),
        }
        for layer in layers_of(model):
            fully_shard(layer, **settings)
        fully_shard(model, **settings)
        optimizer = torch.optim.AdamW(trained(model), lr=LEARNING_RATE, fused=True)
        # The policy casts: autocast would do so again.
        _train(job, meter, model, _torchs_optimizer(optimizer), context=nullcontext)
    finally:
        distributed.destroy_process_group()


def deepspeed(job: Job, meter: Meter) -> None:
    """ZeRO-3 on one GPU, with parameters and optimizer on the host."""
    if importlib.util.find_spec("deepspeed") is None:
        raise NotRunError("deepspeed is not installed")
    if job.is_tiny:
        raise NotRunError("needs a GPU")
    import deepspeed as library

    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29533"}
    os.environ.update(alone)
    library.init_distributed(dist_backend="nccl")
    on_host = {"device": "cpu", "pin_memory": True}
    zero = {"stage": 3, "offload_param": on_host, "offload_optimizer": on_host, "overlap_comm": True}
    model = _checkpointed(make_model(job.size))
    engine, *_ = library.initialize(
        model=model,
        model_parameters=trained(model),
        config={
            "train_micro_batch_size_per_gpu": job.size.rows,
            "gradient_accumulation_steps": job.size.microbatches,
            "bf16": {"enabled": True},
            "zero_optimization": zero,
            "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE}},
        },
    )

    def microbatch_done(loss: Tensor, is_last: bool) -> None:
        engine.backward(loss)
        engine.step()

    _train(job, meter, engine, microbatch_done, context=nullcontext)


def roundpipe_library(job: Job, meter: Meter) -> None:
    """The library of the paper's authors, in bf16, with its own optimizer, which is one update behind by default."""
    if importlib.util.find_spec("roundpipe") is None:
        raise NotRunError("the library roundpipe is not installed")
    if job.is_tiny:
        raise NotRunError("needs a GPU")
    import roundpipe as library
    from roundpipe.optim import Adam

    config = library.RoundPipeRunConfig(num_microbatch=job.size.microbatches)
    made = make_model(job.size).to(torch.bfloat16)
    model = library.wrap_model_to_roundpipe(made, model_run_config=config, optim_dtype=torch.float32)
    optimizer = Adam(model.optim_parameters(), lr=LEARNING_RATE)
    model.train()

    def loss_of(outputs: Any, labels: Tensor) -> Tensor:
        loss = model.loss_function(logits=outputs.logits, labels=labels, vocab_size=job.size.vocabulary)
        return loss / job.size.microbatches  # type: ignore[no-any-return]

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    for tokens in _while(meter, job.size):
        meter.begin_step()
        loss = model.forward_backward(input_kwargs={"input_ids": tokens}, label=tokens, loss_fn=loss_of)
        model.step(update)
        _settle(job.device)
        meter.end_step(float(loss))


CONTENDERS: dict[str, Callable[[Job, Meter], None]] = {
    "roundpipe": roundpipe,
    "resident": resident,
    "fsdp2": fsdp2,
    "deepspeed": deepspeed,
    "roundpipe_library": roundpipe_library,
}


def _checkpointed(model: nn.Module) -> nn.Module:
    """Recomputes its layers in the backward, as this strategy does."""
    inner: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
    inner.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def _torchs_optimizer(optimizer: torch.optim.Optimizer) -> Callable[[Tensor, bool], None]:
    """What is done with the loss of a micro-batch."""

    def microbatch_done(loss: Tensor, is_last: bool) -> None:
        loss.backward()  # type: ignore[no-untyped-call]
        if is_last:
            optimizer.step()
            optimizer.zero_grad()

    return microbatch_done


def _train(
    job: Job,
    meter: Meter,
    model: nn.Module,
    microbatch_done: Callable[[Tensor, bool], None],
    *,
    context: Callable[[], AbstractContextManager[Any]] | None = None,
) -> None:
    """A plain loop: nothing of a Trainer costs time in it.

    Args:
        microbatch_done: is given the loss of a micro-batch, and whether it is the last one of a step.
        context: around the forward; autocast if not given.
    """
    autocast = context or (lambda: torch.autocast(job.device.type, torch.bfloat16))
    num = job.size.microbatches
    for tokens in _while(meter, job.size):
        meter.begin_step()
        total = torch.zeros((), device=job.device)
        for index, rows in enumerate(tokens.chunk(num)):
            there = rows.to(job.device)
            with autocast():
                loss = model(input_ids=there, labels=there).loss
            # DeepSpeed divides the loss by the number of micro-batches by itself; for Adam, the scale does not matter.
            microbatch_done(loss / num, index == num - 1)
            total += loss.detach() / num
        _settle(job.device)
        meter.end_step(float(total))


def _while(meter: Meter, size: Size) -> Iterator[Tensor]:
    """Tokens, as long as steps are to be made."""
    for tokens in batches(size):
        if not meter.goes_on:
            return
        yield tokens


def _settle(device: torch.device) -> None:
    """Waits until the device is done, without a busy loop that would look like work of the host."""
    if device.type == "cuda":
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        event.synchronize()
