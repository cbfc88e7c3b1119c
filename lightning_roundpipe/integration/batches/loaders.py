"""What the loaders of the Trainer tell of a batch, and how the earlier batches of each were read."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch.utils.data import DataLoader, default_collate

from ...common.trees import children_of
from ...lightning_packages import CombinedLoader, everywhere, is_overridden, is_param_in_hook_signature, kind_of, pl
from ..uneven_loaders import UnevenLoader
from .reading import UNKNOWN, BatchSource, Role


@dataclass
class _Known:
    """What is known of loaders that are used together.

    Attributes:
        held: what their earlier batches have held.
        is_placed: whether ``batch_idx`` is the place of a batch in its loader. It may not be in an epoch that is
            resumed in its middle: only loaders that remember their place go on there, others begin again.
    """

    loaders: list[Any]
    source: BatchSource
    held: dict[str, Role] = field(default_factory=dict)
    is_placed: bool = False


class Readings:
    """How the batches of one run are read: what is known of each loader, and what its batches have held."""

    def __init__(self, module: pl.LightningModule) -> None:
        self._module = module
        self._arrived: Any = None
        self._known: dict[Any, _Known] = {}

    def arrives(self, batch: Any) -> None:
        """Notes what a loader has given, before the transfer hooks of the user change it."""
        self._arrived = _layout_of(batch) if self._is_hooked and not isinstance(batch, Iterator) else None

    @functools.cached_property
    def _is_hooked(self) -> bool:
        return self._overrides("transfer_batch_to_device", "on_after_batch_transfer")

    def of(self, kind: str, batch: Any, rest: Sequence[Any]) -> tuple[BatchSource, dict[str, Role]]:
        """The source of the batch that is under way, and what the batches before it have held.

        Args:
            rest: arguments of the step behind the batch. Where loaders are used one after the other, Lightning gives
                the index of the loader last.
        """
        trainer = self._module.trainer
        combined = getattr(trainer._active_loop, "_combined_loader", None)
        if not isinstance(combined, everywhere(CombinedLoader)):
            return UNKNOWN, {}
        loaders, index = list(combined.flattened), None
        is_joined = False
        if combined._mode == "sequential":
            index = rest[-1] if len(loaders) > 1 and rest else 0
            loaders = loaders[index : index + 1]
        else:
            is_joined = not (len(loaders) == 1 and combined.iterables is loaders[0])
        known = self._known.get((kind, index))
        if known is None or [*map(id, known.loaders)] != [*map(id, loaders)]:
            known = self._known[kind, index] = _Known(loaders, _joined(map(self._source, loaders), is_joined))
        source = known.source
        if source.is_collated and self._is_hooked:  # the hooks may have left the layout as it was
            source = replace(source, is_collated=self._arrived == _layout_of(batch))
        if len(source.sizes) > 1 and len(loaders) == 1:
            source = replace(source, sizes=self._sizes(known, kind, rest))
        return source, known.held

    def _sizes(self, known: _Known, kind: str, rest: Sequence[Any]) -> tuple[int, ...]:
        """Of the usual size and that of the last batch, those that this batch may have, the likely one first."""
        usual, last = known.source.sizes
        if not rest or not is_param_in_hook_signature(getattr(self._module, kind), "batch_idx", min_args=2):
            return (usual, last) if known.held else (usual,)
        known.is_placed |= rest[0] == 0
        likely = (last, usual) if rest[0] == len(known.loaders[0]) - 1 else (usual, last)
        return likely[:1] if known.is_placed else likely

    def _source(self, loader: Any) -> BatchSource:
        if isinstance(loader, UnevenLoader):  # the place of a batch in it does not tell its size
            return replace(self._source(loader.unwrapped), sizes=())
        sampler = getattr(loader, "batch_sampler", None)
        if sampler is None:
            return BatchSource(is_item=getattr(loader, "batch_size", None) is None)
        if not isinstance(loader, DataLoader):
            return UNKNOWN
        return BatchSource(
            _sizes_of(sampler), is_collated=self._is_collated(loader), may_be_collated=_calls_default(loader.collate_fn)
        )

    def _is_collated(self, loader: DataLoader[Any]) -> bool:
        """Whether batches leave the loader in the form that ``default_collate`` gives, and are seen then."""
        return loader.collate_fn is default_collate and not self._overrides("on_before_batch_transfer")

    def _overrides(self, *hooks: str) -> bool:
        datamodule = getattr(self._module._trainer, "datamodule", None)
        owners: list[tuple[Any, type[Any]]] = [(self._module, kind_of(self._module, pl.LightningModule))]
        if datamodule is not None:
            owners.append((datamodule, kind_of(datamodule, pl.LightningDataModule)))
        return any(is_overridden(hook, owner, plain) for hook in hooks for owner, plain in owners)


def _layout_of(value: Any) -> Any:
    """The containers in a batch, with their lengths."""
    children = children_of(value)
    return None if children is None else (type(value), tuple((name, _layout_of(entry)) for name, entry in children))


def _calls_default(collate: Any) -> bool:
    """Whether a ``collate_fn`` names ``default_collate`` in its code."""
    function = getattr(collate, "func", collate)  # of a functools.partial
    function = function if hasattr(function, "__code__") else vars(type(function)).get("__call__")
    return default_collate.__name__ in getattr(getattr(function, "__code__", None), "co_names", ())


def _sizes_of(sampler: Any) -> tuple[int, ...]:
    """The usual size of a batch, and that of the last one if it differs; none if it is not known."""
    if isinstance(sampler, (list, tuple)):
        sizes = {len(batch) for batch in sampler}
        return (max(sizes),) if len(sizes) == 1 else ()
    size = getattr(sampler, "batch_size", None)
    if not isinstance(size, int) or size < 1:
        return ()
    try:
        total = len(sampler.sampler)
    except (AttributeError, TypeError, NotImplementedError):
        return (size,)  # of unknown length: the last batch must be told by its rows
    if getattr(sampler, "drop_last", False) or not total % size:
        return (size,)
    return (size, total % size) if total > size else (total,)


def _joined(sources: Iterable[BatchSource], is_joined: bool) -> BatchSource:
    """What is known of a batch to which each loader gives a part."""
    first, *others = sources
    same = all(other.sizes[:1] == first.sizes[:1] for other in others)
    return BatchSource(
        sizes=first.sizes if same else (),
        is_collated=all(source.is_collated for source in (first, *others)),
        may_be_collated=any(source.may_be_collated for source in (first, *others)),
        is_joined=is_joined,
        is_item=any(source.is_item for source in (first, *others)),
    )
