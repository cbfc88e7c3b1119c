"""What users should know of the sizes of their batches."""

from __future__ import annotations

from ...lightning_packages import PossibleUserWarning
from ..batches.splitting import Batches
from .notices import Notices

# What torch says of operands that do not fit.
_OF_SIZES = ("size", "shape", "dimension")


def hint_at_single(notices: Notices, batches: Batches, wanted: int, num_devices: int) -> None:
    """Says of a first training batch that is a single micro-batch that devices do not work side by side.

    Args:
        wanted: micro-batches that it should have been split into.
    """
    if len(batches.microbatches) > 1 or wanted == 1 or num_devices == 1:
        return
    rows = batches.batch_size
    why, remedy = "cannot be split", "split it yourself, with RoundPipeStrategy(split_batch=...)"
    if rows is not None:
        why, remedy = f"has {rows} row" + "s" * (rows > 1), f"give it a batch_size of {wanted} or more, if it can be"
    notices.warn(
        "single micro-batch",
        f"the first training batch {why}, so that it is a single micro-batch, and the {num_devices} devices work one "
        f"after the other. A batch of the DataLoader is what all devices work on together: {remedy}",
        category=PossibleUserWarning,
    )


def note_sizes(error: Exception, batches: Batches) -> None:
    """Code that needs several rows (batch statistics, ranking), or knows how many a batch has, raises anything: the way
    out is said beside it."""
    rows, count = batches.batch_size, len(batches.microbatches)
    if count < 2 or rows is None or not hasattr(error, "add_note"):  # since Python 3.11
        return
    if min(batches.sizes) == 1:
        error.add_note(
            f"The batch of {rows} rows was split into {count} micro-batches, some of a single row. If the code that "
            f"failed needs several rows, use a num_microbatches of {rows // 2} or less."
        )
    elif type(error) in (RuntimeError, ValueError, IndexError) and any(word in str(error) for word in _OF_SIZES):
        error.add_note(
            f"The batch of {rows} rows was split into {count} micro-batches of {min(batches.sizes)} or more. If the "
            "code that failed counts on the rows of the whole batch, take the number of its input, or use "
            "num_microbatches=1."
        )
