"""EMA reference: when it is updated, how far, and through a checkpoint."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from streamrl.engines.trainer_config import ReferenceConfig
from streamrl.engines.training.ema_reference import EmaReference
from streamrl.errors import CheckpointError, ConfigError


def policy(value: float) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters as a trainer does: in a buffer that is reused for each."""
    buffer = torch.empty(2)
    for name in ("a", "b"):
        buffer.fill_(value)
        yield name, buffer


def state(reference: EmaReference) -> dict[str, list[float]]:
    return {name: tensor.tolist() for name, tensor in reference.named_tensors()}


def test_a_soft_update_keeps_the_decay_of_the_old_reference_in_float32():
    """The weight of the old reference is 0.75, and the last bit of bfloat16 is 2 ** -7."""
    reference = EmaReference(decay=0.75)
    for value in (1.0, 1 + 2**-7, 1 + 2**-7):
        policy_tensor = torch.full((1,), value, dtype=torch.bfloat16)
        reference.update_from_policy([("a", policy_tensor)], moves=True)
    assert state(reference) == {"a": [1 + 2**-7 * (1 - 0.75**2)]}


def test_resume_loads_the_reference_or_reports_that_it_is_missing(tmp_path: Path):
    reference = EmaReference(decay=0.5)
    reference.update_from_policy(policy(1.0), moves=False)
    reference.update_from_policy(policy(2.0), moves=True)
    reference.save(tmp_path)
    resumed = EmaReference(decay=0.5)
    resumed.load(tmp_path)
    resumed.update_from_policy(policy(9.0), moves=False)
    assert state(resumed) == state(reference) == {"a": [1.5, 1.5], "b": [1.5, 1.5]}
    with pytest.raises(CheckpointError, match="without an EMA reference"):
        resumed.load(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="saved without c"):
        resumed.update_from_policy([("c", torch.ones(1))], moves=True)


def test_the_reference_is_updated_at_the_configured_versions():
    config = ReferenceConfig(every=4)
    assert [v for v in range(13) if config.is_updated_at(v)] == [4, 8, 12]
    assert [config.find_reference_version(v) for v in (0, 3, 4, 7, 8)] == [0, 0, 4, 4, 8]
    fixed = ReferenceConfig()
    assert not any(fixed.is_updated_at(v) for v in range(10))
    assert fixed.find_reference_version(7) == 7


def test_a_decay_without_updates_is_rejected():
    with pytest.raises(ConfigError, match="has no effect while"):
        ReferenceConfig(decay=0.9)
