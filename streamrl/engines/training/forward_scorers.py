"""Forward-only scoring of finished rollouts: reference logprobs and critic values."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor
from transformers import PreTrainedModel

from streamrl.buffer.micro_batch_schedule import pack_rollouts
from streamrl.distributed.devices import get_local_device
from streamrl.engines.dtypes import resolve_dtype
from streamrl.engines.models.activation_checkpointing import run_mlps_in_chunks
from streamrl.engines.models.forward import (
    DEFAULT_OPTIONS,
    VALUE_HEADS,
    ModelLoadOptions,
    compute_token_logprobs,
    compute_token_values,
    load_model,
    load_skeleton,
    load_value_model,
)
from streamrl.engines.models.layer_offload import iter_writable_parameters, keep_layers_on_host
from streamrl.engines.training.collate import build_batch, find_token_slice
from streamrl.messages import Array, Columns
from streamrl.weights.parameters import ParameterSet, build_full_weights


class _Scorer:
    """Computes a column of tokens under a model, in micro-batches of bounded tokens."""

    def __init__(
        self,
        load: Callable[..., PreTrainedModel],
        model_path: str,
        *,
        micro_batch_tokens: int,
        threads: int = 1,
        dtype: str = "auto",
        options: ModelLoadOptions = DEFAULT_OPTIONS,
    ) -> None:
        torch.set_num_threads(threads)
        self._model = load(model_path, dtype=resolve_dtype(dtype), options=options)
        run_mlps_in_chunks(self._model)
        if options.keeps_layers_on_host:
            keep_layers_on_host(self._model)
        self._model_path = model_path
        self._micro_batch_tokens = micro_batch_tokens

    def copy_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy a newer version into the model; raise WeightsError if it is of another model."""
        own = {name: value for name, value in tensors.items() if not self._is_of_others(name)}
        copy_parameters(self._model, own, model_path=self._model_path)

    def _is_of_others(self, name: str) -> bool:
        """Return whether a published parameter is of the other part of a shared model."""
        return name.startswith(VALUE_HEADS)


class LogprobScorer(_Scorer):
    """Computes token logprobs under the reference model."""

    def __init__(self, model_path: str, *, temperature: float, **settings: Any) -> None:
        super().__init__(load_model, model_path, **settings)
        self._temperature = temperature

    def compute_ref_logprobs(self, columns: Columns) -> dict[str, Array]:
        """Compute the column ref_logprobs of a group with token_ids, loss_mask and lengths.

        Logprobs are at the sampling temperature, and 0 where loss_mask is false. Raises ValueError
        if a rollout exceeds `micro_batch_tokens`.
        """

        def logprobs(batch: TensorDict) -> Tensor:
            ids, attention = batch["token_ids"], batch["attention_mask"]
            return compute_token_logprobs(
                self._model, ids, attention, temperature=self._temperature
            ).logprobs

        return {"ref_logprobs": compute_token_column(columns, logprobs, self._micro_batch_tokens)}


class ValueScorer(_Scorer):
    """Computes token values under a critic."""

    def __init__(self, model_path: str, *, shares_policy: bool = False, **settings: Any) -> None:
        """Load the critic's model.

        `shares_policy` says that the critic is a value head of the policy's model (AC-share).
        """
        super().__init__(load_value_model, model_path, **settings)
        self._policy_only_names = frozenset[str]()
        if shares_policy:
            names = dict(load_skeleton(model_path).named_parameters(remove_duplicate=False)).keys()
            shapes = ParameterSet.from_module(self._model).shapes
            self._policy_only_names = frozenset(names - shapes.keys())

    def _is_of_others(self, name: str) -> bool:
        return name in self._policy_only_names

    def compute_values(self, columns: Columns) -> Array:
        """Compute the values, float32, of all tokens of a group, concatenated over the rollouts.

        The columns must include token_ids, loss_mask and lengths. Values are 0 where loss_mask is
        false. Raises ValueError if a rollout exceeds `micro_batch_tokens`.
        """

        def values(batch: TensorDict) -> Tensor:
            return compute_token_values(self._model, batch["token_ids"], batch["attention_mask"])

        return compute_token_column(columns, values, self._micro_batch_tokens)


@torch.no_grad()
def copy_parameters(
    model: PreTrainedModel, tensors: Mapping[str, Tensor], *, model_path: str
) -> None:
    """Copy published parameters into a model.

    LoRA adapters are merged into the weights of the directory `model_path`. Raises WeightsError,
    before changing the model, if the parameters belong to another model.
    """
    full = build_full_weights(
        tensors, ParameterSet.from_module(model), model_path=model_path, device=get_local_device()
    )
    for name, parameter in iter_writable_parameters(model):
        parameter.copy_(full[name])


def compute_token_column(
    columns: Columns,
    compute: Callable[[TensorDict], Tensor],
    micro_batch_tokens: int,
    *,
    agree_on_rounds: Callable[[int], int] = lambda num_rounds: num_rounds,
) -> Array:
    """Compute a float32 column with an entry per token of a group, in micro-batches.

    `compute` maps a micro-batch to its entries [B, T]. Entries are 0 where loss_mask is false.
    `agree_on_rounds` maps the number of micro-batches to that of the rank with the most: where
    `compute` is a collective, this rank then computes dummy micro-batches as well. Raises
    ValueError if a rollout exceeds `micro_batch_tokens`.
    """
    lengths = columns["lengths"]
    result = np.zeros(len(columns["token_ids"]), np.float32)
    rounds = pack_rollouts(
        [("", index, int(length)) for index, length in enumerate(lengths)],
        dp_size=1,
        micro_batch_tokens=micro_batch_tokens,
    )
    num_missing = agree_on_rounds(len(rounds)) - len(rounds)
    for (picks,) in [*rounds, *[((),)] * num_missing]:
        batch = build_batch({"": columns}, picks, derived={"": {}}, token_columns=("token_ids",))
        with torch.inference_mode():
            values = compute(batch.to(get_local_device())).cpu().numpy()
        # A dummy micro-batch has a row but no pick.
        for (_, index), row in zip(picks, values, strict=bool(picks)):
            result[find_token_slice(lengths, index)] = row[: lengths[index]]
    return np.where(columns["loss_mask"], result, np.float32(0))
