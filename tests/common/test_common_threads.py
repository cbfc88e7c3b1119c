"""Threads with a number of intra-op threads of their own."""

from __future__ import annotations

import threading

import torch

from lightning_roundpipe.common.threads import Worker, Workers


def threads_of(worker: Worker) -> int:
    found: list[int] = []
    worker.begin(lambda: found.append(torch.get_num_threads()), "asked")
    assert worker.done().wait(60)
    return found[0]


def test_a_worker_keeps_its_number_and_changes_no_others(fixed_global_state: None) -> None:
    torch.set_num_threads(1)
    workers = Workers(3)
    worker = workers.take()
    worker.start()
    assert torch.get_num_threads() == 1
    torch.set_num_threads(2)
    assert threads_of(worker) == 3
    found: list[int] = []
    other = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    other.start()
    other.join()
    assert found == [2]
    workers.give_back([worker])
    assert workers.take() is worker, "the caller's number is not its own"
    workers.give_back([worker])
    workers.close()
    assert not worker.is_alive
