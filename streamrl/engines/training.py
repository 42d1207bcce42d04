"""One rank of the policy's trainer: micro-batches in, one optimizer update per step out.

A step is a stream. Micro-batches are trained as their groups arrive, each adding the gradient of a
plain sum; what the sum is to be divided by is known when the step is complete, and `step` divides
once, over all ranks and before clipping. So neither the cut into micro-batches nor the number of
ranks has a say in the update.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from streamrl.algorithms import AlgorithmConfig, columns_needed, policy_loss
from streamrl.engines.batching import TOKEN_COLUMNS, build_batch, group_advantages
from streamrl.engines.deepspeed_backend import DeepSpeedBackend
from streamrl.engines.forward import DTYPES, load_model, local_device, resolve_dtype, token_logprobs
from streamrl.engines.packing import Pick
from streamrl.engines.ranks import join_ranks
from streamrl.engines.torch_backend import TorchBackend
from streamrl.errors import CheckpointError, ConfigError, StreamError
from streamrl.messages import Columns

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BACKENDS: Mapping[str, Callable[["PreTrainedModel", "TrainerConfig"], "TrainingBackend"]] = {
    "deepspeed": DeepSpeedBackend,
    "torch": TorchBackend,
}


@dataclass
class TrainerConfig:
    """How the policy is trained."""

    #: deepspeed, or torch: plain data parallelism in float32.
    backend: str = "deepspeed"
    #: Ranks, all data parallel.
    world_size: int = 1
    #: What ZeRO shards: 0 nothing, 1 optimizer, 2 and gradients, 3 and parameters.
    zero_stage: int = 1
    #: Learning rate.
    lr: float = 1e-6
    #: Steps in which the learning rate rises to that in equal parts.
    warmup_steps: int = 0
    #: AdamW's weight decay.
    weight_decay: float = 0.0
    #: AdamW's decay of its first and second moment.
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    #: Largest norm of the gradient; 0 for no clipping.
    grad_clip: float = 1.0
    #: float32, bfloat16 (with float32 master weights), or auto: bfloat16 on GPUs where there are
    #: master weights, float32 otherwise.
    dtype: str = "auto"
    #: CPU threads of a rank.
    threads: int = 1
    #: Trade time for memory: recompute activations in the backward pass.
    gradient_checkpointing: bool = False
    #: Longest a rank waits for the others in a collective, s.
    collective_timeout_s: float = 300.0

    def __post_init__(self) -> None:
        self._check_choices()
        for key in ("world_size", "threads"):
            if vars(self)[key] < 1:
                raise ConfigError(f"trainer.{key}={vars(self)[key]}: must be at least 1")
        for key in ("warmup_steps", "weight_decay", "grad_clip"):
            if vars(self)[key] < 0:
                raise ConfigError(f"trainer.{key}={vars(self)[key]}: must not be negative")
        for key in ("lr", "collective_timeout_s"):
            if vars(self)[key] <= 0:
                raise ConfigError(f"trainer.{key}={vars(self)[key]}: must be above 0")
        if [0 <= beta < 1 for beta in self.betas] != [True, True]:
            raise ConfigError(f"trainer.betas={self.betas}: must be two numbers from 0 to below 1")

    def _check_choices(self) -> None:
        if self.backend not in BACKENDS:
            raise ConfigError(f"trainer.backend={self.backend}: must be deepspeed or torch")
        if self.zero_stage not in (0, 1, 2, 3):
            raise ConfigError(f"trainer.zero_stage={self.zero_stage}: must be 0, 1, 2 or 3")
        if self.dtype != "auto" and self.dtype not in DTYPES:
            allowed = ", ".join(("auto", *DTYPES))
            raise ConfigError(f"trainer.dtype={self.dtype}: must be one of {allowed}")
        if self.dtype == "bfloat16" and not self._master_weights:
            raise ConfigError(
                "trainer.dtype=bfloat16: needs master weights, which backend deepspeed keeps from"
                " zero_stage 1 on"
            )

    @property
    def _master_weights(self) -> bool:
        return self.backend == "deepspeed" and self.zero_stage > 0

    @property
    def torch_dtype(self) -> torch.dtype:
        """What the parameters are held in on this machine."""
        return resolve_dtype(self.dtype) if self._master_weights else torch.float32

    def lr_at(self, step: int) -> float:
        """Learning rate of a step, counted from 0."""
        return self.lr * min(1.0, (step + 1) / max(1, self.warmup_steps))


class TrainingBackend(Protocol):
    """Gradients and the optimizer. What is collective has to be called by all ranks alike."""

    @property
    def module(self) -> "PreTrainedModel":
        """The model."""
        ...

    @property
    def forward(self) -> Callable[..., Any]:
        """What to call for a forward pass. May be collective."""
        ...

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of a summed loss. May be collective."""
        ...

    def step(self, *, divisor: float, lr: float) -> float:
        """Update with the gradient summed over ranks and divided; its norm before clipping.

        Collective. A norm that is not finite leaves the parameters as they are.
        """
        ...

    def full_state(self) -> Iterator[tuple[str, Tensor]]:
        """Whole parameters under all their names, tied ones included. May be collective."""
        ...

    def save(self, directory: Path) -> None:
        """Write parameters and optimizer into a directory that exists. Collective."""
        ...

    def load(self, directory: Path) -> None:
        """Read what `save` wrote. Collective."""
        ...

    def close(self) -> None:
        """Leave the ranks."""
        ...


class PolicyTrainer:
    """One rank. Every method but `close` has to be called by all ranks alike.

    With more than one rank, MASTER_ADDR and MASTER_PORT in the environment name rank 0's machine.
    """

    def __init__(
        self,
        model_path: str,
        *,
        config: TrainerConfig,
        algorithm: AlgorithmConfig,
        temperature: float,
        rank: int = 0,
        seed: int = 0,
    ) -> None:
        torch.manual_seed(seed)
        torch.set_num_threads(config.threads)
        join_ranks(rank=rank, world_size=config.world_size, timeout_s=config.collective_timeout_s)
        self.rank = rank
        self.num_steps = 0
        self._config = config
        self._row, self._settings = algorithm.row, algorithm.settings
        needed = columns_needed(algorithm)
        self._token_columns = [name for name in TOKEN_COLUMNS if name in needed]
        self._temperature = temperature
        self._model_path = model_path
        self._num_rollouts = 0
        module = load_model(model_path, dtype=config.torch_dtype)
        if config.gradient_checkpointing:
            module.gradient_checkpointing_enable({"use_reentrant": False})
        self._backend: TrainingBackend = BACKENDS[config.backend](module, config)

    def train_micro_batch(
        self, groups: Mapping[str, Columns], picks: Sequence[Pick]
    ) -> dict[str, float]:
        """Forward and backward of the picked rollouts; sums for `algorithms.summarise`.

        `groups` holds the columns of every group picked from, whole: advantages compare all of its
        rollouts. Without picks the rank only keeps the others company.
        """
        batch = build_batch(
            groups,
            picks,
            advantages=group_advantages(self._row, self._settings, groups),
            token_columns=self._token_columns,
        ).to(local_device())
        scores = token_logprobs(
            self._backend.forward,
            batch["token_ids"],
            batch["attention_mask"],
            temperature=self._temperature,
            entropy_mode="gradient" if self._settings.entropy_coef else "value",
        )
        loss, sums = policy_loss(
            self._row,
            self._settings,
            batch.to_dict(),
            logprobs=scores.logprobs,
            entropy=scores.entropy,
        )
        self._backend.backward(loss)
        self._num_rollouts += len(picks)
        values = torch.stack([value.double() for value in sums.values()]).tolist()
        return dict(zip(sums, values, strict=True))

    def step(self, normaliser: float) -> dict[str, float]:
        """Update with the gradient of the step's summed loss over `normaliser`, on all ranks.

        Reports the gradient's norm before clipping and the learning rate. A normaliser of 0 is a
        step nobody trained anything in: no update. Raises StreamError if the gradient is not
        finite, before it has touched the parameters.
        """
        lr = self._config.lr_at(self.num_steps)
        if normaliser == 0:
            assert not self._num_rollouts, f"{self._num_rollouts} rollouts, but a normaliser of 0"
            return {"policy/grad_norm": 0.0, "policy/lr": lr}
        norm = self._backend.step(divisor=normaliser, lr=lr)
        if not math.isfinite(norm):
            raise StreamError(f"step {self.num_steps}: the gradient's norm is {norm}; no update")
        self.num_steps += 1
        self._num_rollouts = 0
        return {"policy/grad_norm": norm, "policy/lr": lr}

    def full_state(self) -> Iterator[tuple[str, Tensor]]:
        """The whole parameters under all their names, tied ones included.

        Exhaust it on every rank. A tensor may be a view the next step changes.
        """
        return self._backend.full_state()

    def save(self, directory: Path) -> None:
        """Write all that training needs to go on as if it had not stopped."""
        directory.mkdir(parents=True, exist_ok=True)
        self._backend.save(directory)
        torch.save(self._progress(), _progress_file(directory, self.rank))

    def load(self, directory: Path) -> None:
        """Go on from what `save` wrote. Raises CheckpointError if it is not of this layout."""
        path = _progress_file(directory, self.rank)
        if not path.is_file():
            raise CheckpointError(f"{directory} holds no trainer state of rank {self.rank}")
        saved = torch.load(path, weights_only=True)
        layout = self._layout()
        if saved["layout"] != layout:
            raise CheckpointError(f"{directory} was written by {saved['layout']}, not {layout}")
        self._backend.load(directory)
        self.num_steps = saved["num_steps"]
        torch.set_rng_state(saved["rng"])
        if saved["cuda_rng"] is not None:
            torch.cuda.set_rng_state(saved["cuda_rng"])

    def save_model(self, directory: Path) -> None:
        """Write the policy and its tokenizer as a Hugging Face directory; rank 0 writes."""
        module = self._backend.module
        state = {}
        for name, tensor in self.full_state():
            if self.rank == 0:
                state[name] = tensor.to("cpu")
        if self.rank == 0:
            from transformers import AutoTokenizer

            buffers = module.state_dict().keys() - state.keys()
            state |= {name: module.get_buffer(name) for name in buffers}
            module.save_pretrained(directory, state_dict=state)
            AutoTokenizer.from_pretrained(self._model_path).save_pretrained(directory)

    def close(self) -> None:
        """Leave the ranks and release the engine."""
        self._backend.close()

    def _layout(self) -> str:
        config = self._config
        stage = f" zero_stage={config.zero_stage}" if config.backend == "deepspeed" else ""
        return f"{config.backend}{stage} world_size={config.world_size}"

    def _progress(self) -> dict[str, Any]:
        on_gpu = torch.cuda.is_available()
        return {
            "layout": self._layout(),
            "num_steps": self.num_steps,
            "rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state() if on_gpu else None,
        }


def _progress_file(directory: Path, rank: int) -> Path:
    return directory / f"rank_{rank}.pt"
