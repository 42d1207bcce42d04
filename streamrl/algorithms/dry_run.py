"""A row tried on a made-up step, before a run is started on it."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from streamrl.algorithms.algorithm import Algorithm, AlgorithmSettings
from streamrl.algorithms.columns import list_derivation_columns
from streamrl.algorithms.objective import derive_group_columns, policy_loss
from streamrl.dataflow import CRITIC_BY_COLUMN, RETURNS_BY_CRITIC
from streamrl.errors import AlgorithmError
from streamrl.messages import ColumnAxis, get_column_spec

NUM_GROUPS = 2
MAX_GROUP_SIZE = 4096
"""Rollouts of a group at most: more are no run's, and would be a wait."""
NUM_POSITIONS = 4
REPORTED_MEANS: Mapping[str, float] = {"score": 0.5, "cost": 0.5}
"""What the step shows to dials, of what its columns have."""


def dry_run_algorithm(row: Algorithm, settings: AlgorithmSettings) -> None:
    """Derive and train two groups of tokens that say nothing, and turn the dials.

    Raises AlgorithmError for a row that fails, gives numbers that are not finite, or does not say
    what a critic is to learn.
    """
    try:
        _run_step(row, settings)
    except AlgorithmError:
        raise
    # What no check has foreseen, as a tensor of another kind.
    except Exception as error:
        what = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise AlgorithmError(f"algorithm {row.name}: {what}") from error


def find_read_settings(row: Algorithm, settings: AlgorithmSettings) -> frozenset[str]:
    """The names of the settings that a row of the table reads: the others change nothing under it.

    Its functions read what they read whatever the data is; those of a user may not.
    """
    read: set[str] = set()

    class Watched(AlgorithmSettings):
        def __getattribute__(self, name: str) -> Any:
            read.add(name)
            return super().__getattribute__(name)

    _run_step(row, Watched(**vars(settings)))
    return frozenset(read)


def _run_step(row: Algorithm, settings: AlgorithmSettings) -> None:
    """The step: from columns to the gradient of the loss, and to the next value of the dials."""
    size = min(settings.group_size, MAX_GROUP_SIZE)
    step = _make_columns(row, settings, size)
    derived = derive_group_columns(row, settings, step, torch.arange(NUM_GROUPS * size) // size)
    for column, role in CRITIC_BY_COLUMN.items():
        if column in row.columns and RETURNS_BY_CRITIC[role] not in derived:
            raise AlgorithmError(
                f"algorithm {row.name}: derived has no {RETURNS_BY_CRITIC[role]} for the"
                f" {role} to learn"
            )
    logprobs = step["generator_logprobs"].clone().requires_grad_()
    versions = {"policy_version": torch.zeros_like(logprobs, dtype=torch.int32)}
    batch = {**step, **versions, **derived}
    entropy = torch.ones_like(logprobs)
    loss, _ = policy_loss(row, settings, batch, logprobs=logprobs, entropy=entropy)
    if not loss.requires_grad:
        raise AlgorithmError(f"algorithm {row.name}: its loss has no gradient")
    (gradient,) = torch.autograd.grad(loss, logprobs, materialize_grads=True)
    for what, found in {**derived, "loss": loss, "gradient": gradient}.items():
        if not found.double().isfinite().all():
            raise AlgorithmError(
                f"algorithm {row.name}: {what} is not finite with params {dict(settings.params)}"
            )
    shown = {name: value for name, value in REPORTED_MEANS.items() if f"{name}s" in step}
    for name in row.dials:
        row.adapt_param(name, settings.params[name], shown, settings)


def _make_columns(row: Algorithm, settings: AlgorithmSettings, size: int) -> dict[str, Tensor]:
    """Columns of two groups: numbers from 0 to 1, of logprobs the negative ones."""
    rows = NUM_GROUPS * size
    random = torch.Generator().manual_seed(0)
    mask = (torch.arange(NUM_POSITIONS) > 0).expand(rows, NUM_POSITIONS)
    step = {"loss_mask": mask, "lengths": torch.full((rows,), NUM_POSITIONS)}
    known = ("generator_logprobs", "ref_logprobs")
    for name in dict.fromkeys((*list_derivation_columns(row, settings), *known)):
        spec = get_column_spec(name)
        if spec.axis is ColumnAxis.GROUP:
            raise AlgorithmError(f"algorithm {row.name}: column {name} is of no single rollout")
        shape = (rows, NUM_POSITIONS) if spec.axis is ColumnAxis.TOKEN else (rows,)
        made = torch.rand(shape, generator=random)
        blank = torch.from_numpy(np.zeros(shape, spec.dtype))
        made = -made if name.endswith("logprobs") else made
        step.setdefault(name, made if spec.dtype == "float32" else blank)
    return step
