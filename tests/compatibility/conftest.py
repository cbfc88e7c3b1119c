"""The small model, its data and the trainers of the adapter tests."""

from tests.adapter.conftest import make_loader, make_trainer, one_thread, small

__all__ = ["make_loader", "make_trainer", "one_thread", "small"]
