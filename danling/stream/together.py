"""Producer and trainer in one process."""

from __future__ import annotations

from typing import Any

from danling.runners import BaseRunner

from .loader import StreamLoader
from .producer import FeatureProducer


def run_together(producer: FeatureProducer, trainer: BaseRunner, *, split: str | None = None) -> Any:
    """Train on what a producer makes in the same process: whenever the trainer lacks samples, the producer makes a batch.

    The trainer comes to the same losses and weights as with a producer in another process, or before it. Whichever fails, its own
    error is raised. Where the trainer ends first, the log says that it was stopped, and goes on when both are run again.

    Args:
        producer: The producer.
        trainer: A runner with a `StreamLoader` over the producer's log among its loaders.
        split: What the producer goes over; as for `FeatureProducer.produce`.

    Returns:
        What `trainer.train()` returns.

    Raises:
        ValueError: If the trainer does not read that log, or there are several ranks.
    """
    loaders = [loader for loader in trainer.dataloaders.values() if isinstance(loader, StreamLoader)]
    loader = next((found for found in loaders if found.channel is producer.channel), None)
    if loader is None:
        raise ValueError(
            f"Expected a StreamLoader over the channel of the producer, {producer.channel.name}, in `dataloaders` of the trainer. "
            f"Received: {', '.join(found.channel.name for found in loaders) or 'none'}. Give both the same channel object."
        )
    if trainer.world_size > 1:
        raise ValueError(
            f"Expected one process for run_together. Received: {trainer.world_size}. Start the producer as its own job, with a "
            "SQLiteChannel between both."
        )
    production = producer.production(split)

    def pump() -> bool:
        try:
            progress = production.advance()
            if progress == "done":
                producer.end_production()
        except Exception as error:
            producer.fail_production(error)
            raise
        return progress == "made"

    loader.pump = pump
    try:
        results = trainer.train()
    except BaseException as error:
        producer.stop_production(f"its trainer ended with {type(error).__name__}: {error}")
        raise
    finally:
        loader.pump = None
    producer.stop_production("its trainer has finished")
    return results
