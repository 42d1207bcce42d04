"""A row tried on a made-up step, before a run is started on it."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from streamrl.algorithms.algorithm import Algorithm, Settings
from streamrl.algorithms.columns import columns_derived_from
from streamrl.algorithms.objective import derive, policy_loss
from streamrl.dataflow import CRITICS, RETURNS
from streamrl.errors import AlgorithmError
from streamrl.messages import Per, column_spec

GROUPS = 2
GROUP_SIZE = 4096
"""Rollouts of a group at most: more are no run's, and would be a wait."""
WIDTH = 4
SHOWN: Mapping[str, float] = {"score": 0.5, "cost": 0.5}
"""What the step shows to dials, of what its columns have."""


def rehearse(row: Algorithm, settings: Settings) -> None:
    """Derive and train two groups of tokens that say nothing, and turn the dials.

    Raises AlgorithmError for a row that fails, gives numbers that are not finite, or does not say
    what a critic is to learn.
    """
    try:
        _play(row, settings)
    except AlgorithmError:
        raise
    # What no check has foreseen, as a tensor of another kind.
    except Exception as error:
        what = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise AlgorithmError(f"algorithm {row.name}: {what}") from error


def settings_read(row: Algorithm, settings: Settings) -> frozenset[str]:
    """The names of the settings that a row of the table reads: the others change nothing under it.

    Its functions read what they read whatever the data is; those of a user may not.
    """
    read: set[str] = set()

    class Watched(Settings):
        def __getattribute__(self, name: str) -> Any:
            read.add(name)
            return super().__getattribute__(name)

    _play(row, Watched(**vars(settings)))
    return frozenset(read)


def _play(row: Algorithm, settings: Settings) -> None:
    """The step: from columns to the gradient of the loss, and to the next value of the dials."""
    size = min(settings.group_size, GROUP_SIZE)
    step = _made_up(row, settings, size)
    derived = derive(row, settings, step, torch.arange(GROUPS * size) // size)
    for column, role in CRITICS.items():
        if column in row.columns and RETURNS[role] not in derived:
            raise AlgorithmError(
                f"algorithm {row.name}: derived has no {RETURNS[role]} for the {role} to learn"
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
    shown = {name: value for name, value in SHOWN.items() if f"{name}s" in step}
    for name in row.dials:
        row.turn(name, settings.params[name], shown, settings)


def _made_up(row: Algorithm, settings: Settings, size: int) -> dict[str, Tensor]:
    """Columns of two groups: numbers from 0 to 1, of logprobs the negative ones."""
    rows = GROUPS * size
    random = torch.Generator().manual_seed(0)
    mask = (torch.arange(WIDTH) > 0).expand(rows, WIDTH)
    step = {"loss_mask": mask, "lengths": torch.full((rows,), WIDTH)}
    known = ("generator_logprobs", "ref_logprobs")
    for name in dict.fromkeys((*columns_derived_from(row, settings), *known)):
        spec = column_spec(name)
        if spec.per is Per.GROUP:
            raise AlgorithmError(f"algorithm {row.name}: column {name} is of no single rollout")
        shape = (rows, WIDTH) if spec.per is Per.TOKEN else (rows,)
        made = torch.rand(shape, generator=random)
        blank = torch.from_numpy(np.zeros(shape, spec.dtype))
        made = -made if name.endswith("logprobs") else made
        step.setdefault(name, made if spec.dtype == "float32" else blank)
    return step
