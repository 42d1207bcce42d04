"""Device leases of roles on shared slots."""

from pathlib import Path

import pytest

from streamrl.actors.actor_context import (
    TRAINER_PHASE,
    make_lease,
    map_phase_slots,
    shares_slots,
)
from streamrl.config.run_config import RunConfig, load_config
from streamrl.stream.device_lease import DeviceArbiter, SharedDeviceLease

RULE = "{kind: math}"
MODEL = "{kind: model, path: judge}"


def config(tmp_path: Path, rewards: str, pool: str = "", *, algorithm: str = "grpo") -> RunConfig:
    placement = f"mode: mixed, pools: [{pool}]" if pool else "mode: colocated"
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "model: {path: model}\n"
        "data: {train: rows.jsonl}\n"
        f"algorithm: {{name: {algorithm}, group_size: 4}}\n"
        f"rewards: [{rewards}]\n"
        f"placement: {{{placement}}}\n"
        "pipeline: {groups_per_step: 8}\n"
    )
    return load_config(path, skips_dry_run=True)


@pytest.mark.parametrize(
    ("rewards", "may_use_devices"),
    [
        (MODEL, True),
        (f"{RULE}, {MODEL}", True),
        ("{kind: function, path: 'mine.py:f'}", True),
        (RULE, False),
        (f"{RULE}, {{kind: code}}", False),
    ],
)
def test_only_rewards_that_may_use_devices_are_a_phase_with_a_shared_lease(
    tmp_path: Path, rewards: str, may_use_devices: bool
):
    shared = config(tmp_path, rewards)
    phases = {TRAINER_PHASE, "generator"} | ({"reward"} if may_use_devices else set())
    assert set(map_phase_slots(shared)) == phases
    for role in (TRAINER_PHASE, "generator", "reward"):
        lease = make_lease(shared, DeviceArbiter(timeout_s=1.0), f"{role}-0", role)
        assert isinstance(lease, SharedDeviceLease) is (role in phases)


def test_a_critic_on_slots_of_its_own_scores_while_generators_hold_those_of_the_policy(
    tmp_path: Path,
):
    apart = config(tmp_path, RULE, "{policy: 1, generator: 1}", algorithm="ppo")
    assert not shares_slots(apart, "critic")
    assert shares_slots(apart, "policy") and shares_slots(apart, TRAINER_PHASE)
    together = config(tmp_path, RULE, "{policy: 1, generator: 1, critic: 1}", algorithm="ppo")
    assert shares_slots(together, "critic")
