"""Every sample once per epoch: over worlds, workers, interruptions; and orders that are permutations."""

import itertools

import numpy as np
import pytest
from data_runs import steps_of_world
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.errors import ConfigError
from penstock.data import Epoch, FlashDataset, FlashLoader, Order, Share, quality_of, rates
from penstock.data.permutation import Permutation
from tries import tries


@given(n=st.integers(0, 3000), key=st.integers(0, 2**64))
def test_a_permutation_has_every_number_once(n, key):
    found = Permutation(n, key)(np.arange(n))
    assert sorted(found.tolist()) == list(range(n))


@given(n=st.integers(1, 2**61), places=st.lists(st.integers(0, 2**61), min_size=1, max_size=20))
def test_a_permutation_of_any_size_takes_no_memory(n, places):
    where = np.unique(np.array(places) % n)
    found = Permutation(n, 1)(where)
    assert len(np.unique(found)) == len(where)
    assert ((found >= 0) & (found < n)).all()


def test_a_permutation_is_that_of_its_key():
    places = np.arange(1000)
    base = Permutation(1000, 1, 2)(places)
    assert (base == Permutation(1000, 1, 2)(places)).all()
    for key in ((1, 3), (2, 2), (12,), ("1", 2)):
        assert (base != Permutation(1000, *key)(places)).sum() > 900
    with pytest.raises(ConfigError, match="2\\*\\*62"):
        Permutation(-1)


@st.composite
def orders(draw):
    kind = draw(st.sampled_from(["sequential", "full", "window"]))
    seed = draw(st.integers(0, 9))
    if kind != "window":
        return Order(kind=kind, seed=seed)
    lanes, stripe = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    chunk = draw(st.integers(1, 8))
    chunks = lanes * stripe * draw(st.integers(1, 4))
    return Order(
        kind=kind,
        seed=seed,
        chunk_samples=chunk,
        window_chunks=chunks,
        lanes=lanes,
        stripe_samples=stripe,
    )


@given(order=orders(), samples=st.integers(1, 700), cut=st.integers(1, 300))
def test_an_epoch_has_every_sample_once_however_it_is_asked_for(order, samples, cut):
    positions = np.arange(samples)
    whole = Epoch(order, samples, 5).at(positions)
    assert sorted(whole.tolist()) == list(range(samples))
    epoch = Epoch(order, samples, 5)
    parts = [epoch.at(positions[start : start + cut]) for start in range(0, samples, cut)]
    assert np.concatenate(parts).tolist() == whole.tolist()
    assert Order.from_json(order.to_json()) == order


def test_windows_keep_what_is_read_together():
    """A window has whole chunks, and with lanes a rank has chunks of its own."""
    order = Order(
        kind="window", chunk_samples=8, window_chunks=8, lanes=2, stripe_samples=4, seed=1
    )
    samples = 8 * 64
    epoch = Epoch(order, samples, 0)
    for start in range(0, samples, 64):
        assert epoch.edge(start) == epoch.edge(start + 63) == start + 64
        inside = epoch.at(np.arange(start, start + 64))
        assert len(np.unique(inside // 8)) == 8
        turns = np.arange(64) // 4 % 2
        mine, other = (set((inside[turns == lane] // 8).tolist()) for lane in (0, 1))
        assert len(mine) == len(other) == 4
        assert not mine & other


def test_epochs_and_seeds_differ():
    positions = np.arange(1000)
    seen = {
        tuple(Epoch(Order(kind=kind, seed=seed, **more), 1000, epoch).at(positions).tolist())
        for kind, more in (("full", {}), ("window", {"chunk_samples": 10, "window_chunks": 10}))
        for seed in (0, 1)
        for epoch in (0, 1)
    }
    assert len(seen) == 8


@settings(max_examples=tries(60))
@given(
    samples=st.integers(1, 400),
    worlds=st.lists(
        st.tuples(st.integers(1, 5), st.integers(1, 9), st.integers(1, 3), st.integers(0, 6)),
        min_size=1,
        max_size=6,
    ),
    order=orders(),
)
def test_each_sample_once_per_epoch_over_worlds_and_interruptions(samples, worlds, order):
    """Each world trains some steps and ends; another, of any size, goes on from the state."""
    epoch = Epoch(order, samples, 2)
    seen, consumed = [], 0
    for world, batch_size, workers, steps in itertools.chain(worlds, [(2, 3, 2, 10**9)]):
        taken, after = steps_of_world(
            samples, consumed, world, batch_size=batch_size, tail="uneven", workers=workers
        )
        for step in range(min(steps, len(after))):
            for rank in range(world):
                seen += epoch.at(taken[rank][step]).tolist()
            consumed = after[step]
    assert consumed == samples
    assert sorted(seen) == list(range(samples))


@given(samples=st.integers(1, 300), world=st.integers(1, 5), batch_size=st.integers(1, 9))
def test_tails(samples, world, batch_size):
    """``drop`` leaves out less than a step; ``pad`` gives each rank as many, none missing."""
    whole = samples // (world * batch_size) * world * batch_size
    taken, _ = steps_of_world(samples, 0, world, batch_size=batch_size, tail="drop")
    flat = [each for rank in taken for step in rank for each in step]
    assert sorted(flat) == list(range(whole))
    taken, _ = steps_of_world(samples, 0, world, batch_size=batch_size, tail="pad")
    assert {len(rank) for rank in taken} == {len(taken[0])}
    assert len({tuple(len(step) for step in rank) for rank in taken}) == 1
    flat = [each for rank in taken for step in rank for each in step]
    assert set(flat) == set(range(samples))
    assert len(flat) - samples < world
    for tail in ("drop", "pad", "uneven"):
        share = Share(batch_size=batch_size, world=world, tail=tail)
        assert share.count(samples) == len(list(share.steps(samples, 0)))


def test_quality_is_1_for_a_true_shuffle_and_0_for_none():
    n = 60_000
    true = quality_of(np.random.default_rng(0).permutation(n), total=n)
    full = quality_of(Epoch(Order(kind="full"), n, 0).at(np.arange(n)), total=n)
    for found in (true, full):
        assert found.displacement == pytest.approx(1, abs=0.02)
        assert found.spread == pytest.approx(1, abs=0.01)
        assert found.separation == pytest.approx(1, abs=0.02)
    none = quality_of(np.arange(n), total=n)
    assert none.displacement < 0.01
    assert none.spread < 0.05
    assert none.separation < 0.001
    window = Order(kind="window", chunk_samples=50, window_chunks=100)
    some = quality_of(Epoch(window, n, 0).at(np.arange(n)), total=n)
    assert some.displacement == pytest.approx(1, abs=0.05)
    assert 0.5 < some.spread < 0.95
    assert 0.01 < some.separation < 0.2


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Order(kind="random"), "none of sequential, full, window"),
        (lambda: Order(kind="window", window_chunks=3, lanes=2), "multiple of lanes"),
        (lambda: Order(kind="window", window_chunks=2, stripe_samples=3), "lanes \\* stripe"),
        (lambda: Order(seed=0, chunk_samples=0), "1 or more"),
        (lambda: Order.from_json({"kind": "full", "speed": 1}), "no 'speed'"),
        (lambda: Share(batch_size=0), "batch_size is 0"),
        (lambda: Share(batch_size=1, rank=2, world=2), "rank 2 is not below world 2"),
        (lambda: Share(batch_size=1, tail="cut"), "none of uneven"),
    ],
)
def test_what_makes_no_sense_is_refused(make, says):
    with pytest.raises(ConfigError, match=says):
        make()


# -- what "auto" is -------------------------------------------------------------------------------


@pytest.mark.parametrize(("random", "kind"), [(0.3e9, "window"), (2.9e9, "full")])
def test_auto_is_decided_by_what_was_measured(rows, monkeypatch, random, kind):
    """Kept beside the index: the next time the order is the same, and nothing is measured."""
    path, _ = rows(800, 1024)
    times = iter([1 / random, 1 / 3e9] * 2)
    monkeypatch.setattr(rates, "LEAST_BYTES", 0)
    monkeypatch.setattr(rates, "_time", lambda reader, samples: len(samples) * 1024 * next(times))
    for _ in range(2):
        with FlashLoader(FlashDataset(path, memory="512KiB"), 8) as loader:
            if not loader._resources.reader.is_direct:
                pytest.skip("no direct I/O in the directory for temporary files")
            assert loader.order.kind == kind
            assert loader.rates.random_bytes_per_s == pytest.approx(random)
            assert loader.stats()["order"]["kind"] == kind
    with FlashLoader(FlashDataset(path, memory="512KiB"), 8, rank=1, world=2) as loader:
        assert loader.rates is None  # another rank may measure otherwise
        assert loader.order.kind == "window"
    opened = FlashDataset(path, rebuild=True).opened
    assert rates.known_rates(opened) is None


def test_the_probe_reads_and_frees(rows, monkeypatch):
    path, _ = rows(800, 1024)
    monkeypatch.setattr(rates, "LEAST_BYTES", 0)
    with FlashLoader(FlashDataset(path, memory="512KiB"), 8) as loader:
        found = loader.rates
        assert found is None or min(found.random_bytes_per_s, found.sequential_bytes_per_s) > 0
        assert loader._resources.memory.used_bytes == 0
        assert sum(len(batch) for batch in loader) == 800
