"""Draws of replays, by hand and for any store."""

from collections.abc import Mapping

from streamrl.data.replays import ReplayConfig, ReplayStore
from streamrl.messages import GroupInfo, find_replayed_uid, make_replay_uid


def info(rate: float | None, version: int = 0) -> GroupInfo:
    return GroupInfo((5, 5), 6, ((version, 6),), pass_rate=rate)


def make_store(steps: Mapping[int, Mapping[str, GroupInfo]], **settings: float) -> ReplayStore:
    config = ReplayConfig(**{"frac": 0.9, "size": 3, "max_age": 8, **settings})  # type: ignore[arg-type]
    store = ReplayStore(config, seed=0, max_lead=1)
    for version, infos in steps.items():
        store.record_step(version, infos)
    return store


def draw_sources(store: ReplayStore, version: int, busy: frozenset[str] = frozenset()) -> set[str]:
    """Return the groups that 200 admissions at a version replay."""
    uids = [store.draw_uid(version, slot, busy) for slot in range(200)]
    return {str(find_replayed_uid(uid)) for uid in uids if uid is not None}


def test_a_replay_has_a_uid_of_its_own_that_names_its_group():
    assert make_replay_uid("3:17:2", 0) == "3:17:1002"
    assert find_replayed_uid("3:17:1002") == find_replayed_uid("3:17:45002") == "3:17:2"
    assert find_replayed_uid("3:17:2") is None


def test_the_latest_groups_with_right_and_wrong_rollouts_are_replayed_in_later_steps():
    first = {"0:0:0": info(0.5), "0:1:0": info(1.0), "0:2:0": info(0.0), "0:3:0": info(None)}
    second = {
        "0:4:0": info(0.25, 1),
        "0:5:1": info(0.75, 1),
        make_replay_uid("0:0:0", 7): info(0.5),
    }
    store = make_store({0: first, 1: second})
    assert draw_sources(store, 0) == set()
    assert draw_sources(store, 1) == {"0:0:0"}
    assert draw_sources(store, 2) == {"0:0:0", "0:4:0", "0:5:1"}
    assert draw_sources(store, 2, frozenset({"0:0:0", "0:4:0"})) == {"0:5:1"}
    store.record_step(2, {"0:6:0": info(0.5, 2)})
    assert draw_sources(store, 3) == {"0:4:0", "0:5:1", "0:6:0"}, "size 3"


def test_a_group_whose_tokens_could_become_too_old_is_not_replayed():
    # Admitted at 7, trained at 8 at the latest, 8 versions after it was sampled.
    store = make_store({0: {"0:0:0": info(0.5)}})
    assert draw_sources(store, 7) == {"0:0:0"}
    assert draw_sources(store, 8) == set()


def test_a_share_of_the_admissions_are_replays_and_a_restored_store_draws_the_same():
    store = make_store({0: {f"0:{i}:0": info(0.5) for i in range(9)}}, frac=0.25, size=9)
    draws = [store.draw_uid(3, slot, ()) for slot in range(4000)]
    assert 900 < sum(uid is not None for uid in draws) < 1100
    restored = make_store({}, frac=0.25, size=9)
    restored.load_state_dict(store.state_dict())
    assert [restored.draw_uid(3, slot, ()) for slot in range(4000)] == draws
    assert len({uid for uid in draws if uid}) == sum(uid is not None for uid in draws)
