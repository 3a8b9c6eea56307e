"""What tests of data sets have in common: the numbers of samples, and loaders in several worlds."""

import numpy as np

from penstock.data.order import Share


def numbers(batch):
    """Which rows a batch of ``rows`` has."""
    return np.asarray(batch)[:, :4].copy().view("<u4")[:, 0].tolist()


def epoch_of(loader):
    return [number for batch in loader for number in numbers(batch)]


def steps_of_world(samples, consumed, world, *, batch_size, tail, workers=1):
    """Positions of each rank, step by step: ``[rank][step]``; and what was consumed after each."""
    taken, after = [], []
    for rank in range(world):
        mine = {}
        for worker in range(workers):
            share = Share(
                batch_size=batch_size,
                rank=rank,
                world=world,
                tail=tail,
                worker=worker,
                workers=workers,
            )
            mine |= {step.consumed: step for step in share.steps(samples, consumed)}
        after = sorted(mine)
        taken.append([mine[each].positions(samples) for each in after])
    return taken, after
