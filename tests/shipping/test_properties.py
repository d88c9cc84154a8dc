"""Random graphs and random programs: a plain namespace, the notebook and every rank end up equal, aliases and views
included.
"""

from __future__ import annotations

import random
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nbdist.shipping import Away, Home

from .shapes import mutate, picture

NAMES = ["a", "b", "c", "d"]
ALL = [*NAMES, "keep"]


class Pool:
    """Home and two Aways in one process, with memory that is shared as between processes."""

    def __init__(self, views: bool = False) -> None:
        self.views = views
        self.plain: dict[str, Any] = {}
        self.ns: dict[str, Any] = {}
        self.home = Home(self.ns, 2)
        self.spaces: list[dict[str, Any]] = [{}, {}]
        self.aways = [Away(space, rank) for rank, space in enumerate(self.spaces)]

    def notebook(self, seed: int) -> None:
        mutate(self.plain, NAMES, seed, self.views)
        mutate(self.ns, NAMES, seed, self.views)

    def ship(self, reads: list[str], fail: bool = False) -> frozenset[str]:
        import os

        shipment = self.home.ship(reads)
        for ranks, parcel in shipment.parcels:
            for rank in ranks:
                self.aways[rank].receive(parcel.head, [os.dup(file) for file in parcel.files])
        for away in self.aways:
            away.rollback() if fail else away.commit()
        self.home.rollback(shipment) if fail else self.home.commit(shipment)
        return shipment.names

    def cell(self, reads: list[str], seeds: list[int], running: tuple[int, ...] = (0, 1)) -> None:
        names = self.ship(reads)
        for seed in seeds:
            mutate(self.plain, reads, seed, self.views)
        lead = running[0]
        heads = {}
        back = None
        for rank in running:
            self.aways[rank].begin(reads, names, rank == lead)
            for seed in seeds:
                mutate(self.spaces[rank], reads, seed, self.views)
        for rank in running:
            parcel = self.aways[rank].give(lead=rank == lead)
            if rank == lead:
                back = parcel
            else:
                heads[rank] = parcel.head
        assert back is not None
        arrival = self.home.accept(back, heads, lead=lead)
        assert not arrival.notes and not arrival.handles, arrival


STEP = st.one_of(
    st.tuples(st.just("notebook"), st.integers(0, 10**6)),
    st.tuples(
        st.just("cell"),
        st.lists(st.sampled_from(NAMES), min_size=1, unique=True),
        st.lists(st.integers(0, 10**6), max_size=4),
        st.sampled_from([(0, 1), (0, 1), (0,), (1,)]),
    ),
    st.tuples(st.just("failed"), st.lists(st.sampled_from(NAMES), min_size=1, unique=True)),
    st.tuples(st.just("prune")),
)


def run(steps: list[Any], views: bool = False) -> None:
    random.seed(0)
    pool = Pool(views)
    for step in steps:
        if step[0] == "notebook":
            pool.notebook(step[1])
        elif step[0] == "failed":
            pool.ship(step[1], fail=True)
        elif step[0] == "prune":
            pool.home.prune()
        else:
            pool.cell(sorted(step[1]), step[2], step[3])
            assert picture(pool.ns, NAMES) == picture(pool.plain, NAMES)
    if not views:
        pool.home.prune()
    pool.ship(ALL if views else NAMES)
    want = picture(pool.plain, NAMES)
    assert picture(pool.ns, NAMES) == want
    for space in pool.spaces:
        assert picture(space, NAMES) == want


@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(STEP, max_size=10))
def test_a_program_through_the_ranks_is_the_program(steps: list[Any]) -> None:
    run(steps)


# A base that is shipped after a view of it had travelled alone is a copy on the ranks, so these cells read all names.
WITH_VIEWS = st.one_of(
    st.tuples(st.just("notebook"), st.integers(0, 10**6)),
    st.tuples(
        st.just("cell"),
        st.just(ALL),
        st.lists(st.integers(0, 10**6), max_size=4),
        st.sampled_from([(0, 1), (0, 1), (0,), (1,)]),
    ),
)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(WITH_VIEWS, max_size=10))
def test_views_go_on_sharing_memory(steps: list[Any]) -> None:
    run(steps, views=True)
