"""Where Lightning is in an epoch's data. It begins an epoch by making iterators, and has no way to begin further on;
this reaches into them. Must not know why, nor what a checkpoint is. Tested with Lightning 2.6.
"""

from __future__ import annotations

from typing import Any

from torch.utils.data import dataloader


def draws_anew(trainer: Any) -> bool:
    """Whether the Trainer will still make the iterators of the epoch that comes, after `on_train_epoch_start`."""
    loop = trainer.fit_loop
    is_resuming = getattr(loop, "is_resuming", loop.restarting)
    return trainer.current_epoch > 0 and not is_resuming and not loop.epoch_loop.restarting


def knows_itself(loop: Any) -> bool:
    """Whether every loader keeps its own place, as the Trainer asks them to."""
    loaders = loop._combined_loader.flattened
    return all(hasattr(one, "state_dict") and hasattr(one, "load_state_dict") for one in loaders)


def validates(loop: Any) -> bool:
    """Whether the Trainer validates after the batch that it has just trained on."""
    return bool(loop.epoch_loop._should_check_val_fx(loop._data_fetcher))


def end_epoch(loop: Any) -> None:
    """The checkpoint was made after the last batch of an epoch. The Trainer counts that epoch as over, but then takes
    the next one for the one it was in the middle of, and miscounts from there on."""
    if loop.restarted_mid_epoch:
        loop.reset_restart_stage()


def begin_epoch(loop: Any) -> None:
    """Make the iterators once more, now that it is known what is random."""
    epoch = loop.epoch_progress.current.processed
    for one in loop._combined_loader.flattened:
        batches: Any = getattr(one, "batch_sampler", None)
        samplers: list[Any] = [getattr(one, "sampler", None), batches, getattr(batches, "sampler", None)]
        for sampler in samplers:
            if callable(getattr(sampler, "set_epoch", None)):
                sampler.set_epoch(epoch)
    iter(loop._data_fetcher)


def skip(loop: Any, count: int) -> None:
    """Pass over the first batches of an epoch that was just begun."""
    fetcher = loop._data_fetcher
    if getattr(fetcher, "batches", None):  # of a loader without a length one batch is fetched ahead
        for _ in range(count):
            next(fetcher)
        fetcher.fetched -= count  # the Trainer adds them
        return
    combined = getattr(fetcher.iterator, "_iterator", None)
    inner = getattr(combined, "iterators", [])
    if combined is not None and len(inner) == 1 and _draws_indices(inner[0]):
        _skip_indices(inner[0], count)
        combined._idx += count
        return
    for _ in range(count):
        next(fetcher.iterator)


def _draws_indices(iterator: Any) -> bool:
    return (
        isinstance(iterator, dataloader._BaseDataLoaderIter)
        and iterator._dataset_kind == dataloader._DatasetKind.Map
        and hasattr(iterator, "_sampler_iter")
    )


def _skip_indices(iterator: Any, count: int) -> None:
    """Without loading the samples, but those that worker processes have begun with."""
    begun = min(count, getattr(iterator, "_send_idx", 0) - getattr(iterator, "_rcvd_idx", 0))
    for _ in range(count - begun):
        next(iterator._sampler_iter)
    for _ in range(begun):
        next(iterator)
