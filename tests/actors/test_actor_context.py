"""Device leases of roles on shared slots."""

from pathlib import Path

import pytest

from streamrl.actors.actor_context import TRAINER_PHASE, make_lease, map_phase_slots
from streamrl.config.run_config import RunConfig, load_config
from streamrl.stream.device_lease import DedicatedDeviceLease, DeviceArbiter, SharedDeviceLease

RULE = "{kind: math}"
MODEL = "{kind: model, path: judge}"


def config(tmp_path: Path, rewards: str) -> RunConfig:
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "model: {path: model}\n"
        "data: {train: rows.jsonl}\n"
        "algorithm: {name: grpo, group_size: 4}\n"
        f"rewards: [{rewards}]\n"
        "placement: {mode: colocated}\n"
        "pipeline: {groups_per_step: 8}\n"
    )
    return load_config(path, skips_dry_run=True)


@pytest.mark.parametrize(
    "rewards",
    [
        MODEL,
        f"{RULE}, {MODEL}",
        "{kind: function, path: 'mine.py:f'}",
    ],
)
def test_a_reward_that_may_use_devices_gets_a_shared_device_lease(tmp_path: Path, rewards: str):
    shared = config(tmp_path, rewards)
    assert set(map_phase_slots(shared)) == {TRAINER_PHASE, "generator", "reward"}
    lease = make_lease(shared, DeviceArbiter(timeout_s=1.0), "reward-0", "reward")
    assert isinstance(lease, SharedDeviceLease)


@pytest.mark.parametrize("rewards", [RULE, f"{RULE}, {{kind: code}}"])
def test_rule_based_rewards_hold_no_device_phase(tmp_path: Path, rewards: str):
    shared = config(tmp_path, rewards)
    assert set(map_phase_slots(shared)) == {TRAINER_PHASE, "generator"}
    arbiter = DeviceArbiter(timeout_s=1.0)
    assert isinstance(make_lease(shared, arbiter, "reward-0", "reward"), DedicatedDeviceLease)
    assert isinstance(make_lease(shared, arbiter, "generator-0", "generator"), SharedDeviceLease)
    assert isinstance(make_lease(shared, arbiter, TRAINER_PHASE, TRAINER_PHASE), SharedDeviceLease)
