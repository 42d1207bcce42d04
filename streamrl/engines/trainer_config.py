"""Config sections `trainer` and `critic`."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from streamrl.errors import ConfigError

TRAINER_BACKENDS = ("deepspeed", "torch")
TRAINER_DTYPES = ("auto", "float32", "bfloat16")
ATTENTION_IMPLEMENTATIONS = {
    "auto": None,
    "eager": "eager",
    "sdpa": "sdpa",
    "flex": "flex_attention",
    "flash": "flash_attention_2",
}
"""transformers' name of each value of trainer.attention; None lets transformers choose."""
DECAY_SCHEDULES = {
    "linear": ("polynomial", "lr_end"),
    "cosine": ("cosine_with_min_lr", "min_lr"),
    "polynomial": ("polynomial", "lr_end"),
    "cosine_with_min_lr": ("cosine_with_min_lr", "min_lr"),
    "cosine_warmup_with_min_lr": ("cosine_warmup_with_min_lr", "min_lr"),
    "warmup_stable_decay": ("warmup_stable_decay", "min_lr_ratio"),
}
"""Schedules that may end above 0: transformers' name, and its argument for the final rate."""
LR_SCHEDULES = (
    *("constant", "constant_with_warmup", "inverse_sqrt", "cosine_with_restarts"),
    *DECAY_SCHEDULES,
)
"""Names of transformers' schedules except reduce_lr_on_plateau, which needs an evaluation loss."""
BUCKET_ELEMENTS = 50_000_000
"""DeepSpeed's reduce bucket, allocated in full even for small models: a tenth of its default."""
LIVE_ELEMENTS = 1_000_000_000
"""Elements of parameters that ZeRO stage 3 keeps gathered: DeepSpeed's stage3_max_live_parameters
and stage3_max_reuse_distance."""

GRADIENT_SHARDING_STAGE = 2
PARAMETER_SHARDING_STAGE = 3
SAVE_TIMEOUT_S = 7200.0
"""Longest time of writing a checkpoint: 14 bytes per parameter of a trained model in bfloat16, so
980 GB for 70B, which is 136 MB/s."""
OFFLOAD = "offload"
"""Value of trainer.gradient_checkpointing that moves the inputs of layers to host memory."""


@dataclass
class TrainerConfig:
    """Config section `trainer`: ranks, parallelism, optimizer, learning rate, LoRA and memory."""

    #: deepspeed, or torch (data and tensor parallel).
    backend: str = "deepspeed"
    #: Number of ranks; data-parallel size times `tensor_parallel` times `sequence_parallel`.
    world_size: int = 1
    #: Tensor-parallel size. Above 1 it needs backend torch and excludes LoRA.
    tensor_parallel: int = 1
    #: Number of ranks that share the tokens of each micro-batch (DeepSpeed-Ulysses), for sequences
    #: whose activations do not fit one rank. Must divide the attention heads and the KV heads.
    sequence_parallel: int = 1
    #: ZeRO stage: 0 shards nothing, 1 optimizer state, 2 also gradients, 3 also parameters. Backend
    #: torch shards everything at 3 (FSDP2) and nothing below.
    zero_stage: int = 1
    #: Peak learning rate.
    lr: float = 1e-6
    #: Schedule by its name in transformers' `get_scheduler`, over all training steps of the run.
    #: constant also supports the warm-up below.
    lr_schedule: str = "constant"
    #: Warm-up steps. constant reaches lr in the last of these steps; transformers' schedules start
    #: at 0 in the first.
    warmup_steps: int = 0
    #: Warm-up steps as a fraction of the run's steps.
    warmup_ratio: float = 0.0
    #: Final learning rate of a decaying schedule; null for transformers' default.
    lr_min: float | None = None
    #: Further arguments of transformers' schedule, such as num_cycles or num_decay_steps.
    lr_schedule_options: dict[str, Any] = field(default_factory=dict)
    #: Weight decay of AdamW.
    weight_decay: float = 0.0
    #: Betas of AdamW.
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    #: Maximum gradient norm; 0 disables clipping.
    grad_clip: float = 1.0
    #: float32, bfloat16 (with float32 master weights) or auto. auto is bfloat16 on GPUs if the
    #: backend keeps master weights, float32 otherwise.
    dtype: str = "auto"
    #: Attention implementation: eager, sdpa, flex, flash (needs flash-attn) or auto. auto leaves
    #: the choice to transformers, except for models with attention logit soft-capping: flex on
    #: GPUs, eager on CPUs.
    attention: str = "auto"
    #: Rank of the LoRA adapters; 0 trains the full model.
    lora_rank: int = 0
    #: LoRA scaling: adapters are scaled by lora_alpha / lora_rank.
    lora_alpha: float = 16.0
    #: Linear layers with an adapter, by the ends of their names, such as q_proj; empty means all
    #: but the output head.
    lora_targets: list[str] = field(default_factory=list)
    #: CPU threads of a rank.
    threads: int = 1
    #: Recompute activations in the backward pass: less memory, more time. offload also keeps the
    #: inputs of the layers in host memory between the passes; on CPUs the same as true.
    gradient_checkpointing: bool | str = False
    #: Keep AdamW's moments and the master weights in host memory, and update there on `threads`
    #: threads: less GPU memory, slower updates. Needs backend deepspeed and zero_stage 1 or 3, or 2
    #: in float32.
    offload_optimizer: bool = False
    #: Timeout of a collective, s.
    collective_timeout_s: float = 300.0

    def __post_init__(self) -> None:
        self._check_choices()
        self._check_memory_options()
        for key in ("world_size", "tensor_parallel", "sequence_parallel", "threads"):
            if vars(self)[key] < 1:
                raise ConfigError(f"trainer.{key}={vars(self)[key]}: must be at least 1")
        for key in ("warmup_steps", "weight_decay", "grad_clip", "lora_rank"):
            if vars(self)[key] < 0:
                raise ConfigError(f"trainer.{key}={vars(self)[key]}: must not be negative")
        for key in ("lr", "collective_timeout_s", "lora_alpha"):
            if vars(self)[key] <= 0:
                raise ConfigError(f"trainer.{key}={vars(self)[key]}: must be above 0")
        self._check_schedule()
        if [0 <= beta < 1 for beta in self.betas] != [True, True]:
            raise ConfigError(f"trainer.betas={self.betas}: must be two numbers from 0 to below 1")
        if self.lora_targets and not self.lora_rank:
            raise ConfigError(
                f"trainer.lora_targets={self.lora_targets}: needs trainer.lora_rank above 0"
            )
        self._check_parallel_sizes()

    def _check_choices(self) -> None:
        if self.backend not in TRAINER_BACKENDS:
            raise ConfigError(
                f"trainer.backend={self.backend}: must be {' or '.join(TRAINER_BACKENDS)}"
            )
        if self.zero_stage not in (0, 1, 2, 3):
            raise ConfigError(f"trainer.zero_stage={self.zero_stage}: must be 0, 1, 2 or 3")
        if self.dtype not in TRAINER_DTYPES:
            allowed = ", ".join(TRAINER_DTYPES)
            raise ConfigError(f"trainer.dtype={self.dtype}: must be one of {allowed}")
        if self.attention not in ATTENTION_IMPLEMENTATIONS:
            allowed = ", ".join(ATTENTION_IMPLEMENTATIONS)
            raise ConfigError(f"trainer.attention={self.attention}: must be one of {allowed}")
        if self.dtype == "bfloat16" and not self.has_master_weights:
            raise ConfigError(
                "trainer.dtype=bfloat16: needs master weights, which backend deepspeed"
                " keeps from zero_stage 1 on, and backend torch with tensor_parallel above 1 or"
                " zero_stage 3 on several ranks"
            )

    def _check_memory_options(self) -> None:
        if self.gradient_checkpointing not in (False, True, OFFLOAD):
            raise ConfigError(
                f"trainer.gradient_checkpointing={self.gradient_checkpointing}: must be true, false"
                f" or {OFFLOAD}"
            )
        if self.offload_optimizer and (self.backend != "deepspeed" or not self.zero_stage):
            raise ConfigError(
                "trainer.offload_optimizer=true: needs trainer.backend=deepspeed, not"
                f" {self.backend}, and a trainer.zero_stage above 0, not {self.zero_stage}"
            )
        if (
            self.offload_optimizer
            and self.zero_stage == GRADIENT_SHARDING_STAGE
            and self.dtype != "float32"
        ):
            raise ConfigError(
                f"trainer.offload_optimizer=true: with trainer.zero_stage=2, trainer.dtype="
                f"{self.dtype} DeepSpeed would sum gradients in bfloat16: set zero_stage to 1 or 3,"
                " or dtype to float32"
            )

    def _check_schedule(self) -> None:
        if not 0 <= self.warmup_ratio < 1:
            raise ConfigError(
                f"trainer.warmup_ratio={self.warmup_ratio}: must be 0 or more, below 1"
            )
        if self.warmup_ratio and self.warmup_steps:
            raise ConfigError(
                f"trainer.warmup_ratio={self.warmup_ratio}: must be 0 beside"
                f" trainer.warmup_steps={self.warmup_steps}"
            )
        setting = f"trainer.lr_schedule={self.lr_schedule}"
        if self.lr_schedule not in LR_SCHEDULES:
            raise ConfigError(f"{setting}: must be one of {', '.join(LR_SCHEDULES)}")
        if self.lr_schedule_options and self.lr_schedule == "constant":
            raise ConfigError(
                f"trainer.lr_schedule_options={self.lr_schedule_options}: {setting} has no options;"
                " remove them"
            )
        if self.lr_min is None:
            return
        if not 0 <= self.lr_min < self.lr:
            raise ConfigError(
                f"trainer.lr_min={self.lr_min}: must be 0 or more, below trainer.lr={self.lr}"
            )
        if self.lr_schedule not in DECAY_SCHEDULES:
            decaying = ", ".join(DECAY_SCHEDULES)
            raise ConfigError(
                f"trainer.lr_min={self.lr_min}: {setting} does not decay to a minimum;"
                f" {decaying} do"
            )

    def _check_parallel_sizes(self) -> None:
        setting = f"trainer.tensor_parallel={self.tensor_parallel}"
        is_split = self.tensor_parallel > 1
        if is_split and self.backend != "torch":
            raise ConfigError(f"{setting}: needs trainer.backend=torch, not {self.backend}")
        if self.world_size % self.tensor_parallel:
            raise ConfigError(f"{setting}: must divide trainer.world_size={self.world_size}")
        if is_split and self.lora_rank:
            raise ConfigError(f"{setting}: does not support LoRA; trainer.lora_rank must be 0")
        if self.world_size % self.ranks_per_batch:
            times = " times trainer.tensor_parallel" * is_split
            raise ConfigError(
                f"trainer.sequence_parallel={self.sequence_parallel}:{times} must divide"
                f" trainer.world_size={self.world_size}"
            )

    @property
    def ranks_per_batch(self) -> int:
        """Consecutive ranks that train the same micro-batches; the tensor-parallel are closest."""
        return self.tensor_parallel * self.sequence_parallel

    @property
    def dp_size(self) -> int:
        """Number of data-parallel ranks, which train different micro-batches."""
        return self.world_size // self.ranks_per_batch

    @property
    def fsdp_size(self) -> int:
        """Number of ranks over which gradients are summed, and FSDP2 shards parameters."""
        return self.world_size // self.tensor_parallel

    def get_dp_rank(self, rank: int) -> int:
        return rank // self.ranks_per_batch

    @property
    def has_master_weights(self) -> bool:
        """Whether the optimizer keeps float32 copies of the parameters."""
        return self.zero_stage > 0 if self.backend == "deepspeed" else self.has_sharded_params

    @property
    def has_sharded_params(self) -> bool:
        """Whether a rank holds only a shard of the parameters: tensor parallel, ZeRO 3 or FSDP2."""
        is_stage_3 = self.zero_stage == PARAMETER_SHARDING_STAGE
        if self.backend == "deepspeed":
            return is_stage_3
        return self.tensor_parallel > 1 or (is_stage_3 and self.world_size > 1)

    @property
    def has_collective_forward(self) -> bool:
        """Whether a forward pass needs other ranks: for shards of parameters, or for tokens."""
        return self.has_sharded_params or self.sequence_parallel > 1

    def compute_lr(self, step: int, num_steps: int | None = None) -> float:
        """Return the learning rate of a training step, counted from 0.

        `num_steps` is the number of steps of the run, for schedules that depend on it. Raises
        ConfigError for options that transformers' schedule does not accept.
        """
        warmup = self.warmup_steps
        if self.warmup_ratio:
            assert num_steps is not None, "warmup_ratio needs the number of steps"
            warmup = math.ceil(self.warmup_ratio * num_steps)
        if self.lr_schedule == "constant":
            return self.lr * min(1.0, (step + 1) / max(1, warmup))
        return self.lr * self._make_lr_schedule(warmup, num_steps)(step)

    def _make_lr_schedule(self, warmup: int, num_steps: int | None) -> Callable[[int], float]:
        """Return the factor of the learning rate as a function of the training step."""
        import torch
        from transformers import get_scheduler

        name, options = self.lr_schedule, dict(self.lr_schedule_options)
        if self.lr_min is not None:
            name, key = DECAY_SCHEDULES[name]
            options[key] = self.lr_min / self.lr if key.endswith("ratio") else self.lr_min
        # get_scheduler needs an optimizer to read and set its learning rate; this one is a dummy.
        optimizer = torch.optim.SGD([torch.zeros(1)], lr=self.lr)
        try:
            scheduler = get_scheduler(name, optimizer, warmup, num_steps, options)
            factor: Callable[[int], float] = scheduler.lr_lambdas[0]
            factor(0)
        except (TypeError, ValueError, ZeroDivisionError) as error:
            raise ConfigError(
                f"trainer.lr_schedule={self.lr_schedule}: {error}; see trainer.lr_min and"
                " trainer.lr_schedule_options"
            ) from None
        return factor


@dataclass
class CriticConfig:
    """Config section `critic`, for algorithms with a value function.

    A separate critic trains on its own ranks; with shared_coef it is a head of the policy's model.
    """

    #: Hugging Face model directory of the initial critic; empty means model.path.
    path: str = ""
    #: Overrides of the section `trainer` for the critic; lr defaults to 1e-5.
    trainer: dict[str, Any] = field(default_factory=lambda: {"lr": 1e-5})
    #: PPO's value clipping range; null disables clipping.
    value_clip: float | None = 0.5
    #: Weight of the value loss in the policy's loss if policy and critic share a model (AC-share);
    #: null for a separate critic.
    shared_coef: float | None = None
    #: Critic warm-up: initial steps that train only the critic.
    warmup_alone: int = 0
    #: Processes that compute values; each follows the critic's versions.
    replicas: int = 1

    def __post_init__(self) -> None:
        if self.value_clip is not None and self.value_clip <= 0:
            raise ConfigError(f"critic.value_clip={self.value_clip}: must be above 0")
        if self.warmup_alone < 0:
            raise ConfigError(f"critic.warmup_alone={self.warmup_alone}: must not be negative")
        if self.shared_coef is not None and self.shared_coef < 0:
            raise ConfigError(f"critic.shared_coef={self.shared_coef}: must not be negative")
        if self.shared_coef is not None:
            self._check_shared()
        if self.replicas < 1:
            raise ConfigError(f"critic.replicas={self.replicas}: must be at least 1")

    def _check_shared(self) -> None:
        for key in ("path", "trainer", "warmup_alone"):
            default = vars(CriticConfig())[key]
            if vars(self)[key] != default:
                raise ConfigError(
                    f"critic.{key}={vars(self)[key]}: needs a separate critic; with"
                    f" critic.shared_coef={self.shared_coef} it is a head of the policy's model"
                )


REFERENCE_FILE = "reference.safetensors"
"""File of an EMA reference in a trainer checkpoint."""


@dataclass
class ReferenceConfig:
    """Config section `reference`; by default the reference stays a copy of the initial policy."""

    #: Update the reference every this many training steps; 0 never does.
    every: int = 0
    #: Weight of the old reference in an update; 0 copies the policy.
    decay: float = 0.0
    #: Processes that compute reference logprobs, each with a full copy of the model.
    replicas: int = 1

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise ConfigError(f"reference.replicas={self.replicas}: must be at least 1")
        if self.every < 0:
            raise ConfigError(f"reference.every={self.every}: must be 0 or more")
        if not 0 <= self.decay < 1:
            raise ConfigError(f"reference.decay={self.decay}: must be from 0 to below 1")
        if self.decay and not self.every:
            raise ConfigError(
                f"reference.decay={self.decay}: has no effect while reference.every=0;"
                " set reference.every"
            )

    def is_updated_at(self, version: int) -> bool:
        """Return whether the step that ends with `version` updates the reference."""
        return bool(self.every) and version > 0 and version % self.every == 0

    def find_reference_version(self, version: int) -> int:
        """Return the policy version at which the reference in use at `version` was updated last.

        With every=4, versions 4 to 7 use the reference of version 4. Without updates (every=0),
        returns `version` itself.
        """
        return version - version % self.every if self.every else version
