"""Calls of a model's ranks: how they share leased groups."""

from hypothesis import given
from hypothesis import strategies as st

from streamrl.actors.rank_calls import share_leases
from streamrl.messages import Experience, GroupInfo, GroupLease


@given(st.lists(st.integers(1, 4096), max_size=40), st.integers(1, 8))
def test_ranks_share_all_leases_whole_and_about_equally(sizes: list[int], dp_size: int):
    experiences = [
        Experience(
            GroupLease(token, f"0:{token}:0", "value", 1, 10.0),
            0,
            info=GroupInfo((size,), size, ((0, size),)),
        )
        for token, size in enumerate(sizes)
    ]
    shares = share_leases(experiences, dp_size)
    leases = [lease for share in shares for lease in share]
    assert len(shares) == dp_size
    assert sorted(lease.token for lease in leases) == list(range(len(sizes)))
    loads = [sum(sizes[lease.token] for lease in share) for share in shares]
    assert max(loads) - min(loads) <= max(sizes, default=0)
