"""Updates and norms before the optimizer is called: kept if it is called as assumed, taken back if not."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_roundpipe.engine import early as engine_early
from lightning_roundpipe.engine import protocol
from lightning_roundpipe.engine.clipping import clip_factor
from lightning_roundpipe.engine.early import Early, EarlyWork
from lightning_roundpipe.engine.gradients import GradientStore
from lightning_roundpipe.engine.optimizer import Updates, keeps_gradients
from lightning_roundpipe.engine.pending import PendingParameter
from lightning_roundpipe.engine.transfer import Done

from .test_engine_optimizer import SEPARABLE, make_weights

_TIMEOUT_S = 30.0
STEPS = 4


@pytest.fixture(autouse=True)
def small_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is offered is taken at once."""
    monkeypatch.setattr(engine_early, "SHARE_BYTES", 1)
    torch.set_num_threads(1)


class Training:
    """Steps of an optimizer in whose closures gradients are offered, as soon as they are there.

    Args:
        is_early: whether they are, else the optimizer steps without :class:`Updates`.
    """

    def __init__(self, make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], is_early: bool = True) -> None:
        self.weights = make_weights()
        self.optimizer = make(self.weights)
        self.updates = Updates(1) if is_early else None
        self._taken = threading.Event()
        if self.updates is not None:
            self.early.set_aside(1 << 20)
            take = self.early._take

            def noted(offers: Any) -> None:
                try:
                    take(offers)
                finally:
                    self._taken.set()

            self.early._take = noted  # type: ignore[method-assign]

    @property
    def early(self) -> EarlyWork:
        assert self.updates is not None
        return self.updates.early

    def offer(self, gradients: Mapping[nn.Parameter, Tensor]) -> None:
        """Offers gradients, and waits until they have been taken."""
        if self.updates is not None:
            self._taken.clear()
            held = {p: g.detach() for p, g in gradients.items()}
            self.early.offer(list(held), lambda: held)
            if self.early.is_open:
                assert self._taken.wait(_TIMEOUT_S)

    def gradients(self, step: int) -> dict[nn.Parameter, Tensor]:
        generator = torch.Generator().manual_seed(100 + step)
        return {w: torch.randn(w.shape, generator=generator) for w in self.weights}

    def step(
        self,
        number: int,
        between: Callable[[Training], None] = lambda training: None,
        kind: Early = Early.UPDATES,
        num_offered: int = 4,
    ) -> None:
        """One step; ``between`` is called after the early updates, before the optimizer is."""

        def closure() -> None:
            gradients = self.gradients(number)
            self.optimizer.zero_grad()
            for weight in self.weights[len(self.weights) - num_offered :]:
                self.offer({weight: gradients[weight]})
            for weight, gradient in gradients.items():
                weight.grad = gradient
            between(self)

        if self.updates is None:
            self.optimizer.step(closure)
            return
        with self.updates.overlapping(self.optimizer, list, kind):
            self.optimizer.step(closure)
        self.updates.wait()

    def finished(self) -> tuple[list[Tensor], dict[str, Any]]:
        return [w.detach().clone() for w in self.weights], self.optimizer.state_dict()


def assert_same(ours: Training, plain: Training) -> None:
    (weights, state), (expected, expected_state) = ours.finished(), plain.finished()
    assert state["param_groups"] == expected_state["param_groups"]
    assert state["state"].keys() == expected_state["state"].keys()
    pairs = [
        (state["state"][i][name], value)
        for i, known in expected_state["state"].items()
        for name, value in known.items()
    ]
    for one, other in (*zip(weights, expected, strict=True), *pairs):
        assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))


def adam(weights: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(weights, lr=0.1)


def both(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> Iterator[Training]:
    yield from (Training(make), Training(make, is_early=False))


# --- the numbers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SEPARABLE)
def test_an_early_update_is_the_same_update(name: str) -> None:
    make = lambda weights: SEPARABLE[name]([{"params": weights}])  # noqa: E731
    for training in (pair := list(both(make))):
        for number in range(STEPS):
            training.step(number)
    assert_same(*pair)
    with_state = sum(w.dim() == 2 for w in pair[0].weights[-4:]) if name == "Muon" else 4
    begins_with_state = name.startswith("Adagrad")
    assert pair[0].early.num_kept == with_state * (STEPS if begins_with_state else STEPS - 1)
    assert not pair[0].early.is_mistaken


@pytest.mark.parametrize("name", SEPARABLE)
def test_who_keeps_gradients(name: str) -> None:
    """Those that are said to keep them do: an early update could not be taken back otherwise."""
    weights = make_weights()
    optimizer = SEPARABLE[name]([{"params": weights}])
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    for _ in range(3):
        before = [(weight.grad.clone(), weight.grad._version) for weight in weights]
        optimizer.step()
        kept = all(torch.equal(w.grad, g) and w.grad._version == v for w, (g, v) in zip(weights, before, strict=True))
        assert kept or not keeps_gradients(optimizer)
    assert keeps_gradients(optimizer) is ("nesterov" not in name)


def test_custom_optimizers_say_that_they_keep_gradients() -> None:
    class Own(torch.optim.SGD):
        pass

    class Keeping(Own):
        keeps_gradients = True

    assert not keeps_gradients(Own(make_weights(), lr=0.1))
    assert keeps_gradients(Keeping(make_weights(), lr=0.1))


def test_weights_without_gradient_and_new_weights() -> None:
    """What was offered last time need not come this time; weights without state wait for the call."""
    for training in (pair := list(both(adam))):
        training.step(0)
        training.step(1, num_offered=6)
        training.optimizer.add_param_group({"params": [new := nn.Parameter(torch.ones(3))]})
        training.weights.append(new)
        training.step(2, num_offered=2)
    assert_same(*pair)
    assert pair[0].early.num_kept == 6 + 1


# --- assumptions that are wrong --------------------------------------------------------------------------------------


def change_gradient(training: Training) -> None:
    training.weights[-1].grad.mul_(0.5)  # type: ignore[union-attr]


def replace_gradient(training: Training) -> None:
    training.weights[-1].grad = training.weights[-1].grad.clone()  # type: ignore[union-attr]


def drop_gradient(training: Training) -> None:
    training.weights[-1].grad = None


def change_rate(training: Training) -> None:
    training.optimizer.param_groups[0]["lr"] *= 2


def change_rate_in_place(training: Training) -> None:
    training.optimizer.param_groups[0]["lr"].mul_(2)


def add_option(training: Training) -> None:
    training.optimizer.param_groups[0]["weight_decay"] = 0.5


def write_weight(training: Training) -> None:
    with torch.no_grad():
        training.weights[-1].add_(1)


def write_state(training: Training) -> None:
    training.optimizer.state[training.weights[-1]]["exp_avg"].zero_()


DISTURBANCES = [
    change_gradient, replace_gradient, drop_gradient, change_rate, change_rate_in_place, add_option,
    write_weight, write_state,
]  # fmt: skip


@pytest.mark.parametrize("disturb", DISTURBANCES)
def test_wrong_assumptions_change_nothing(disturb: Callable[[Training], None]) -> None:
    rate = torch.tensor(0.1) if disturb is change_rate_in_place else 0.1
    for training in (
        pair := list(both(lambda w: torch.optim.AdamW(w, lr=rate.clone() if isinstance(rate, Tensor) else rate)))
    ):
        training.step(0)
        training.step(1)
        training.step(2, disturb)
        training.step(3)
    assert_same(*pair)
    early = pair[0].early
    assert early.is_mistaken
    assert early.num_taken_back > 0
    is_known_of_one = disturb in (change_gradient, replace_gradient, drop_gradient)
    assert early.num_kept == 4 + (3 if is_known_of_one else 0), "the last step does not begin early any more"
    assert not any(type(weight) is PendingParameter for weight in pair[0].weights)


def test_a_weight_that_is_taken_out() -> None:
    for training in (pair := list(both(adam))):
        training.step(0)
        training.step(1, lambda t: t.optimizer.param_groups[0]["params"].pop())
    assert all(map(torch.equal, pair[0].weights, pair[1].weights))
    assert (pair[0].early.num_kept, pair[0].early.num_taken_back) == (3, 1)


LOOKS: dict[str, Callable[[Training], Any]] = {
    "weight": lambda t: t.weights[-1].detach().clone(),
    "data": lambda t: t.weights[-1].data.clone(),
    "norm": lambda t: t.weights[-2].norm(),
    "state": lambda t: t.optimizer.state[t.weights[-1]]["exp_avg"].clone(),
    "state_dict": lambda t: t.optimizer.state_dict()["state"][6]["exp_avg"].clone(),
    "another thread": lambda t: on_a_thread(lambda: t.weights[-1].detach().clone()),
}


def on_a_thread(function: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join(_TIMEOUT_S)
    return found[0]


@pytest.mark.parametrize("look", LOOKS)
def test_who_looks_sees_old_values(look: str) -> None:
    seen: list[list[Tensor]] = []
    for training in (pair := list(both(adam))):
        seen.append([])
        training.step(0)
        training.step(1, lambda t: seen[-1].append(LOOKS[look](t)))
    assert_same(*pair)
    assert len(seen[0]) == 1
    assert torch.equal(seen[0][0], seen[1][0])
    assert pair[0].early.num_taken_back == 4
    assert pair[0].early.is_mistaken


def test_gradients_and_harmless_things_may_be_looked_at() -> None:
    def between(training: Training) -> None:
        for weight in training.weights:
            assert weight.grad is not None
            weight.grad.norm()
            assert weight.shape == weight.grad.shape
            weight.grad = weight.grad

    for training in (pair := list(both(adam))):
        for number in range(3):
            training.step(number, between)
    assert_same(*pair)
    assert pair[0].early.num_taken_back == 0


def test_a_look_before_anything_has_begun_is_no_mistake() -> None:
    training = Training(adam)
    training.step(0)
    training.step(1, lambda t: t.weights[0].norm(), num_offered=0)
    training.step(2)
    assert training.early.num_kept == 4
    assert not training.early.is_mistaken


def test_once_more() -> None:
    """A step that is tried again brings other gradients."""

    def again(training: Training) -> None:
        if training.updates is not None:
            training.early.start_again()
        gradients = training.gradients(77)
        for weight, gradient in gradients.items():
            weight.grad = gradient
        training.offer({training.weights[2]: gradients[training.weights[2]]})

    for training in (pair := list(both(adam))):
        training.step(0)
        training.step(1, again)
        training.step(2)
    assert_same(*pair)
    assert (pair[0].early.num_kept, pair[0].early.num_taken_back) == (1 + 4, 4)
    assert not pair[0].early.is_mistaken


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt()])
def test_a_closure_that_fails(error: BaseException) -> None:
    def fail(training: Training) -> None:
        raise error

    training = Training(adam)
    training.step(0)
    weights, state = training.finished()
    expected = [{name: value.clone() for name, value in known.items()} for known in state["state"].values()]
    with pytest.raises(type(error)) as caught:
        training.step(1, fail)
    assert caught.value is error
    assert training.early.num_taken_back == 4
    found, state = training.finished()
    assert all(map(torch.equal, found, weights))
    for known, values in zip(expected, state["state"].values(), strict=True):
        assert all(torch.equal(values[name], value) for name, value in known.items())
    training.step(1)
    assert training.early.num_kept == 4


def test_gradients_that_do_not_come() -> None:
    for training in (pair := list(both(adam))):

        def lose(training: Training = training) -> Mapping[nn.Parameter, Tensor]:
            raise RuntimeError("the link is down")

        training.step(0)
        training.step(1, lambda t, lose=lose: t.updates and t.early.offer(t.weights[:1], lose))  # type: ignore[misc]
        training.step(2)
    assert_same(*pair)
    assert pair[0].early.num_kept == 8


class Counting(torch.optim.SGD):
    """Keeps a number per weight, and fails when told to."""

    is_separable = True
    keeps_gradients = True
    fails = False
    nested = False

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        for group in self.param_groups:
            for weight in group["params"]:
                known = self.state[weight]
                known["count"] = known.get("count", 0) + 1
                known["sum"] = known.get("sum", torch.zeros_like(weight)) + weight.grad
                if self.nested:
                    known.setdefault("all", []).append(known["sum"])
                weight.sub_(known["sum"] * group["lr"] / known["count"])
                if self.fails and threading.current_thread().name == "roundpipe-early":
                    raise ValueError("not now")
        return result


def test_state_of_any_kind_is_put_back() -> None:
    for training in (pair := list(both(lambda weights: Counting(weights, lr=0.1)))):
        training.step(0)
        training.step(1, change_gradient)
        training.step(2)
    assert_same(*pair)
    assert pair[0].early.num_taken_back == 1


def test_state_that_could_not_be_put_back() -> None:
    class Nested(Counting):
        nested = True

    training = Training(lambda weights: Nested(weights, lr=0.1))
    for number in range(3):
        training.step(number)
    assert training.early.num_kept == 0


def test_an_early_update_that_fails_is_made_again() -> None:
    class Failing(Counting):
        fails = True

    for training in (pair := list(both(lambda weights: Failing(weights, lr=0.1)))):
        for number in range(3):
            training.step(number)
    assert_same(*pair)
    assert pair[0].early.num_kept == 0
    assert pair[0].early.is_mistaken


def test_memory_set_aside() -> None:
    """Two moments and a weight of the last two, of 0 and 2 dimensions of length 1 and 2, and their step counts."""
    training = Training(adam)
    training.early.set_aside((1 + 2) * 3 * 4 + 2 * 4)
    for number in range(3):
        training.step(number)
    assert training.early.num_kept == 2 * 2
    assert training.early.host_bytes == (1 + 2) * 3 * 4 + 2 * 4
    plain = Training(adam, is_early=False)
    for number in range(3):
        plain.step(number)
    assert_same(training, plain)


def test_the_copies_of_updated_weights_are_out_of_date() -> None:
    training = Training(adam)
    training.step(0)
    before = [weight._version for weight in training.weights]
    training.step(1)
    assert all(weight._version > version for weight, version in zip(training.weights, before, strict=True))


def test_the_protocol_is_kept() -> None:
    with protocol.following() as checker:
        training = Training(adam)
        training.step(0)
        training.step(1)
        training.step(2, change_rate)
    assert checker.counts[protocol.Event.TAKEN_BACK] == 4


# --- norms -----------------------------------------------------------------------------------------------------------


def test_norms_are_taken_early() -> None:
    found: list[list[bool]] = []

    def between(training: Training) -> None:
        training.weights[-1].grad.mul_(2)  # type: ignore[union-attr]
        gradients = [weight.grad for weight in training.weights if weight.grad is not None]
        norms = [training.early.known_norm(gradient) for gradient in gradients]
        found.append([norm is not None for norm in norms])
        plain = clip_factor(gradients, 0.1, 1)
        ours = clip_factor(gradients, 0.1, 1, training.early.known_norm)
        assert plain is not None
        assert ours is not None
        assert torch.equal(plain, ours)

    training = Training(adam)
    training.step(0, between, Early.NORMS)
    assert found == [[False] * 3 + [True] * 3 + [False]], "not that of the one that was changed"
    assert training.early.num_kept == 0
    assert training.early.known_norm(training.weights[-2].grad) is None  # type: ignore[arg-type]


# --- gradients that are complete -------------------------------------------------------------------------------------


class Late(Done):
    """Comes when it is waited for."""

    num_waits = 0

    def await_done(self) -> None:
        self.num_waits += 1


def test_collecting_leaves_the_sums_as_they_are() -> None:
    a, b, c = (nn.Parameter(torch.zeros(2)) for _ in range(3))
    ones = torch.ones(2)
    store = GradientStore()
    transfers = [Late([ones * 1, ones * 2]), Late([ones * 3, ones * 4])]
    for ordinal, transfer in enumerate(transfers):
        store.add_later([a, b], transfer, (0, 1), ordinal)
    store.add_later([b], Late([ones * 5]), (1, 1), 0)
    found = store.collect([a, b, c])
    assert transfers[1].num_waits > 0
    assert set(found) == {a}, "b has two sums"
    assert torch.equal(found[a], ones * 4)
    version = found[a]._version
    total = store.take()
    assert total[a].data_ptr() == found[a].data_ptr()
    assert total[a]._version == version
    assert torch.equal(total[a], ones * 4)
    assert torch.equal(total[b], ones * 11)
    assert store.collect([a, b]) == {}, "all was taken"
    total[a].mul_(2)
    assert found[a]._version > version
