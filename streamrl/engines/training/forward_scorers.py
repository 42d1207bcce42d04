"""Forward-only scoring of finished rollouts: reference logprobs and critic values."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from streamrl.buffer.packing import pack_rollouts
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
from streamrl.engines.training.collate import build_batch, find_token_slice
from streamrl.messages import Array, Columns
from streamrl.weights.lora_merge import build_full_weights
from streamrl.weights.parameters import ParameterSet

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class LogprobScorer:
    """Computes token logprobs under the reference model, in micro-batches of bounded tokens."""

    def __init__(
        self,
        model_path: str,
        *,
        temperature: float,
        micro_batch_tokens: int,
        threads: int = 1,
        dtype: str = "auto",
        options: ModelLoadOptions = DEFAULT_OPTIONS,
    ) -> None:
        torch.set_num_threads(threads)
        self._model = load_model(model_path, dtype=resolve_dtype(dtype), options=options)
        run_mlps_in_chunks(self._model)
        self._model_path = model_path
        self._temperature = temperature
        self._micro_batch_tokens = micro_batch_tokens

    def load_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """Load a newer version of the reference; raise WeightsError if it is of another model."""
        # Skip the value head of a model shared by policy and critic.
        policy_tensors = {
            name: value for name, value in tensors.items() if not name.startswith(VALUE_HEADS)
        }
        copy_parameters(self._model, policy_tensors, model_path=self._model_path)

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


class ValueScorer:
    """Computes token values under a critic, in micro-batches of bounded tokens."""

    def __init__(
        self,
        model_path: str,
        *,
        micro_batch_tokens: int,
        threads: int = 1,
        dtype: str = "auto",
        shares_policy: bool = False,
        options: ModelLoadOptions = DEFAULT_OPTIONS,
    ) -> None:
        """Load the critic's model.

        `shares_policy` says that the critic is a value head of the policy's model (AC-share).
        """
        torch.set_num_threads(threads)
        self._model_path = model_path
        self._model: PreTrainedModel = load_value_model(
            model_path, dtype=resolve_dtype(dtype), options=options
        )
        run_mlps_in_chunks(self._model)
        self._parameters = ParameterSet.from_module(self._model)
        self._policy_only_names = frozenset[str]()
        if shares_policy:
            names = dict(load_skeleton(model_path).named_parameters(remove_duplicate=False)).keys()
            self._policy_only_names = frozenset(names - self._parameters.shapes.keys())
        self._micro_batch_tokens = micro_batch_tokens

    def load_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """Load a newer version of the critic; raise WeightsError if it is of another model."""
        critic_tensors = {
            name: value for name, value in tensors.items() if name not in self._policy_only_names
        }
        copy_parameters(self._model, critic_tensors, model_path=self._model_path)

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
    model: "PreTrainedModel", tensors: Mapping[str, Tensor], *, model_path: str
) -> None:
    """Copy published parameters into a model.

    LoRA adapters are merged into the weights of the directory `model_path`. Raises WeightsError,
    before changing the model, if the parameters belong to another model.
    """
    full = build_full_weights(
        tensors, ParameterSet.from_module(model), model_path=model_path, device=get_local_device()
    )
    for name, parameter in model.named_parameters(remove_duplicate=False):
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
        world_size=1,
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
