"""Dry run of an algorithm on random data, before a run starts with it."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from streamrl.algorithms.algorithm import Algorithm, AlgorithmSettings, list_derivation_columns
from streamrl.algorithms.objective import derive_group_columns, policy_loss
from streamrl.dataflow import CRITIC_BY_COLUMN, RETURNS_BY_CRITIC
from streamrl.errors import AlgorithmError, format_error
from streamrl.messages import REF_TOP_LOGPROBS, ColumnAxis, get_column_spec

NUM_GROUPS = 2
MAX_GROUP_SIZE = 4096
"""Limit of the dry run's group size, to bound its time."""
NUM_POSITIONS = 4
REPORTED_MEANS: Mapping[str, float] = {"score": 0.5, "cost": 0.5}
"""Means of a step that the dry run passes to adaptive parameters, if the column exists."""


def dry_run_algorithm(row: Algorithm, settings: AlgorithmSettings) -> None:
    """Run an algorithm on two groups of random tokens, to find its errors before a run starts.

    Derives columns, computes loss and gradient, and updates adaptive parameters. Raises
    AlgorithmError if a function fails or returns non-finite numbers, or if a critic gets no
    returns.
    """
    try:
        _run_step(row, settings)
    except AlgorithmError:
        raise
    # Errors that no check foresees, such as a tensor of a wrong dtype inside torch.
    except Exception as error:
        raise AlgorithmError(f"algorithm {row.name}: {format_error(error)}") from error


def find_read_settings(row: Algorithm, settings: AlgorithmSettings) -> frozenset[str]:
    """Return the names of the settings that an algorithm's functions read.

    Runs the algorithm on settings that record access. Valid for the table's algorithms, which read
    the same settings whatever the data is; a user's functions may not.
    """
    read: set[str] = set()

    class RecordingSettings(AlgorithmSettings):
        def __getattribute__(self, name: str) -> Any:
            read.add(name)
            return super().__getattribute__(name)

    _run_step(row, RecordingSettings(**vars(settings)))
    return frozenset(read)


def _run_step(row: Algorithm, settings: AlgorithmSettings) -> None:
    """Run a training step on random data: from columns to gradient and next adaptive parameters."""
    size = min(settings.group_size, MAX_GROUP_SIZE)
    step = _make_columns(row, settings, size)
    derived = derive_group_columns(row, settings, step, torch.arange(NUM_GROUPS * size) // size)
    for column, role in CRITIC_BY_COLUMN.items():
        if column in row.columns and RETURNS_BY_CRITIC[role] not in derived:
            raise AlgorithmError(
                f"algorithm {row.name}: derived lacks {RETURNS_BY_CRITIC[role]}, the target of the"
                f" {role}"
            )
    logprobs = step["generator_logprobs"].clone().requires_grad_()
    version_column = {"policy_version": torch.zeros_like(logprobs, dtype=torch.int32)}
    batch = {**step, **version_column, **derived}
    entropy = torch.ones_like(logprobs)
    leaves = {"gradient": logprobs}
    if REF_TOP_LOGPROBS in row.columns:
        # Two words of probability 0.37, of the reference 0.3.
        leaves["gradient by word"] = torch.full((*logprobs.shape, 2), -1.0, requires_grad=True)
        batch["word_logprobs"] = leaves["gradient by word"]
        batch[REF_TOP_LOGPROBS] = torch.full((*logprobs.shape, 2), -1.2)
    loss, _ = policy_loss(row, settings, batch, logprobs=logprobs, entropy=entropy)
    if not loss.requires_grad:
        raise AlgorithmError(f"algorithm {row.name}: the loss has no gradient")
    found = torch.autograd.grad(loss, [*leaves.values()], materialize_grads=True)
    gradients = dict(zip(leaves, found, strict=True))
    for name, tensor in {**derived, "loss": loss, **gradients}.items():
        if not tensor.double().isfinite().all():
            raise AlgorithmError(
                f"algorithm {row.name}: {name} is not finite with params {dict(settings.params)}"
            )
    means = {name: value for name, value in REPORTED_MEANS.items() if f"{name}s" in step}
    for param in row.dials:
        row.adapt_param(param, settings.params[param], means, settings)


def _make_columns(row: Algorithm, settings: AlgorithmSettings, size: int) -> dict[str, Tensor]:
    """Return random columns of two groups of `size` rollouts: in [0, 1), negated for logprobs."""
    rows = NUM_GROUPS * size
    random = torch.Generator().manual_seed(0)
    mask = (torch.arange(NUM_POSITIONS) > 0).expand(rows, NUM_POSITIONS)
    step = {"loss_mask": mask, "lengths": torch.full((rows,), NUM_POSITIONS)}
    logprob_columns = ("generator_logprobs", "ref_logprobs")
    for name in dict.fromkeys((*list_derivation_columns(row, settings), *logprob_columns)):
        spec = get_column_spec(name)
        if spec.axis in (ColumnAxis.GROUP, ColumnAxis.TEXT):
            raise AlgorithmError(f"algorithm {row.name}: column {name} has no values per rollout")
        is_per_token = spec.axis in (ColumnAxis.TOKEN, ColumnAxis.TURN)
        shape = (rows, NUM_POSITIONS) if is_per_token else (rows,)
        values = torch.rand(shape, generator=random)
        # All sampled tokens are of one turn, in one state.
        integers = mask.to(torch.int64) if spec.axis is ColumnAxis.TURN else torch.zeros(shape)
        integers = integers.to(getattr(torch, spec.dtype))
        values = -values if name.endswith("logprobs") else values
        step.setdefault(name, values if spec.dtype == "float32" else integers)
    return step
