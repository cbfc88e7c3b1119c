"""The figures of the RoundPipe paper, arXiv 2604.27085, from its measured layer profiles.

[Note: what the figures mean]
Bubbles: one isolated iteration of 16 micro-batches on 8 devices, with the paper's own partitions.

- *Bubble* is ``Timeline.bubble_ratio``: 1 - work / (makespan x 8), where work is the sum of all stage times.
- *Asynchronous* is the same iteration's ``Timeline.bubble_parts["inside"]``: the bubble without fill (idle from the
  begin to a device's first action) and without drain (idle after its last one), as a share of the whole makespan.
- Every backward recomputes its layers, which counts as work; the head is never recomputed.
- A micro-batch is under way for the profile's hop time between stages on different devices, for none on one device.
- Stages bound to devices: as GPipe, 1F1B and so on define their order; a backward starts when its gradient is there.
- RoundPipe: rounds of 8 micro-batches, and the recompute of a B stage runs ahead of the gradient: the action starts
  when its device is free, but no earlier than needed to have the recompute done when the gradient arrives.

Throughput: tokens of an optimizer step / ``step_ms`` of several overlapping steps (asynchronous optimizer), with this
package's own plan of the paper's ring: a stage on one device at a time. The machine is `PaperModel.machine`: memory of
the GPU, links as fast as the hops say. A hop goes down to the host and up again. Nothing else is limited: the paper
gives no speed for host memory or the optimizer.
"""

from __future__ import annotations

import functools
import math

import pytest

from lightning_roundpipe.planning import (
    Machine,
    Partition,
    Simulation,
    bound_stage_costs,
    interleaved_one_f_one_b,
    looped_bfs,
    one_f_one_b,
    plan_training,
    round_robin,
    simulate,
    stage_costs,
)
from tests.planning.paper import MODELS, NUM_DEVICES, NUM_MICROBATCHES, ROUND_SIZE, PaperModel, with_head

models = pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)


def machine_of(model: PaperModel) -> Machine:
    """That of the bubbles: only hops take time."""
    return Machine(NUM_DEVICES, hop_ms=model.hop_ms)


def run(
    model: PaperModel,
    plan: Partition,
    *,
    hop_ms: float,
    round_size: int | None = ROUND_SIZE,
    recompute_ahead: bool = False,
) -> Simulation:
    """One iteration of RoundPipe."""
    schedule = round_robin(plan.num_stages, NUM_MICROBATCHES, NUM_DEVICES, round_size=round_size)
    costs = stage_costs(plan, model.profile())
    return simulate(schedule, costs, Machine(NUM_DEVICES, hop_ms=hop_ms), recompute_ahead=recompute_ahead)


# ---------------------------------------------------------------------------------------------------------------------
# Bubbles


@models
def test_bubble_of_one_f_one_b_is_that_of_the_paper(model: PaperModel) -> None:
    costs = bound_stage_costs(with_head(model.one_f_one_b), model.profile())
    timeline = simulate(one_f_one_b(NUM_DEVICES, NUM_MICROBATCHES), costs, machine_of(model)).timeline
    assert 100 * timeline.bubble_ratio == pytest.approx(model.bubbles["1F1B"], abs=0.1)


@models
def test_bubbles_of_the_looped_schedules_are_those_of_the_paper(model: PaperModel) -> None:
    costs = bound_stage_costs(with_head(model.looped), model.profile())
    for name, build in (("interleaved 1F1B", interleaved_one_f_one_b), ("looped BFS", looped_bfs)):
        schedule = build(len(model.looped), NUM_MICROBATCHES, NUM_DEVICES)
        timeline = simulate(schedule, costs, machine_of(model)).timeline
        assert 100 * timeline.bubble_ratio == pytest.approx(model.bubbles[name], abs=0.1), name


@models
def test_bubbles_of_roundpipe_are_those_of_the_paper(model: PaperModel) -> None:
    """Within 0.3 points for four models, and 1.0 above for GPT-OSS-20B, whose partition may not be the one shown."""
    timeline = run(model, model.partition(), hop_ms=model.hop_ms, recompute_ahead=True).timeline
    synchronous, inside = 100 * timeline.bubble_ratio, 100 * timeline.bubble_parts["inside"]
    tolerance = 1.1 if model is MODELS["GPT-OSS-20B"] else 0.35
    assert synchronous == pytest.approx(model.bubbles["RoundPipe, synchronous"], abs=tolerance)
    assert inside == pytest.approx(model.bubbles["RoundPipe, asynchronous"], abs=tolerance)


@models
def test_overlapping_steps_idle_about_as_much_as_one_step_inside(model: PaperModel) -> None:
    """Why the paper may take the bubble without fill and drain for that of an asynchronous optimizer."""
    plan = model.partition()
    costs = stage_costs(plan, model.profile())
    work = NUM_MICROBATCHES * math.fsum(cost.duration_ms for cost in costs)
    steady = simulate(
        round_robin(plan.num_stages, NUM_MICROBATCHES, NUM_DEVICES, round_size=ROUND_SIZE, num_steps=4),
        costs,
        machine_of(model),
        recompute_ahead=True,
        microbatches_per_step=NUM_MICROBATCHES,
        optimizer="asynchronous",
    )
    idle = 1 - work / (steady.step_ms * NUM_DEVICES)
    one_step = run(model, plan, hop_ms=model.hop_ms, recompute_ahead=True).timeline
    assert idle == pytest.approx(one_step.bubble_parts["inside"], abs=0.02)
    assert idle < one_step.bubble_ratio


# ---------------------------------------------------------------------------------------------------------------------
# Our own plans


@models
def test_plan_in_rounds_is_never_slower_than_the_papers(model: PaperModel) -> None:
    """Under the rules of the planner: it does not know about recompute that runs ahead. One round is below.

    Times are compared, not bubbles: calls in the fused stage save work, which makes the bubble look larger.
    """
    counts = {"num_microbatches": NUM_MICROBATCHES, "round_size": ROUND_SIZE}
    plan = plan_training(model.profile(), machine_of(model), **counts, may_split=False)
    assert set(plan.splits) == {1}
    ours = run(model, plan.partition, hop_ms=model.hop_ms)
    papers = run(model, model.partition(), hop_ms=model.hop_ms)
    assert ours.step_ms <= papers.step_ms * (1 + 1e-12)


@models
def test_plan_in_one_round_is_faster_than_the_papers_best(model: PaperModel) -> None:
    """Even where nothing runs ahead: the paper's partition in rounds, with recompute ahead, is its figure above."""
    machine = machine_of(model)
    plan = plan_training(model.profile(), machine, num_microbatches=NUM_MICROBATCHES, may_split=False).partition
    ours = run(model, plan, hop_ms=model.hop_ms, round_size=None).step_ms
    ahead = run(model, plan, hop_ms=model.hop_ms, round_size=None, recompute_ahead=True).step_ms
    papers = min(
        run(model, model.partition(), hop_ms=model.hop_ms, round_size=size, recompute_ahead=True).step_ms
        for size in (ROUND_SIZE, None)
    )
    assert ours < papers
    assert ahead <= ours * (1 + 1e-12)


# ---------------------------------------------------------------------------------------------------------------------
# Scaling


def test_counted_parameters_and_links_are_those_of_the_models() -> None:
    """The counted parameters are those in the models' names, and all hops say the same about the links."""
    nominal = (1.7e9, 8e9, 20.9e9, 32.8e9, 235e9)
    for model, parameters in zip(MODELS.values(), nominal, strict=True):
        sizes = model.architecture
        counted = model.num_layers * sizes.layer_parameters + sizes.head_parameters
        assert counted == pytest.approx(parameters, rel=0.07)  # the embedding is not among the calls
        assert model.machine(1).h2d_bytes_per_ms == pytest.approx(20 * 2**20)


@functools.cache
def tokens_per_s(name: str, num_devices: int) -> float:
    """Simulated throughput of this package's own plan, steps overlapping."""
    model = MODELS[name]
    profile, machine = model.profile(), model.machine(num_devices)
    plan = plan_training(profile, machine, num_microbatches=model.num_microbatches, may_split=False).partition
    simulation = simulate(
        round_robin(plan.num_stages, model.num_microbatches, num_devices, num_steps=4),
        stage_costs(plan, profile),
        machine,
        microbatches_per_step=model.num_microbatches,
        optimizer="asynchronous",
    )
    return model.tokens_per_step / simulation.step_ms * 1e3


@pytest.mark.parametrize(
    ("name", "num_devices"),
    [(name, n) for name, model in MODELS.items() if name != "Qwen3-235B LoRA" for n in model.tokens_per_s],
)
def test_throughput_and_speed_up_are_close_to_the_measured(name: str, num_devices: int) -> None:
    """Tokens per second and speed-up within 10 % of the measured ones; GPT-OSS-20B was measured on 8 devices only.

    Not asserted for Qwen3-235B LoRA: 64 sequences per step are fewer than the 80-100 that the paper needs to hide the
    transfers of a mixture of experts, and what it measured (a speed-up of 3.8 on 8 devices, where these links alone
    would allow 7.9) is bound by a host whose speed it does not give.
    """
    measured = MODELS[name].tokens_per_s
    assert tokens_per_s(name, num_devices) == pytest.approx(measured[num_devices], rel=0.1)
    if 1 in measured:
        speed_up = tokens_per_s(name, num_devices) / tokens_per_s(name, 1)
        assert speed_up == pytest.approx(measured[num_devices] / measured[1], rel=0.1)
