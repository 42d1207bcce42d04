"""How a model is trained: the settings of the policy's trainer, and what a critic's adds."""

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
"""How attention may be computed, by transformers' names; auto is chosen by the model."""
DECAY_SCHEDULES = {
    "linear": ("polynomial", "lr_end"),
    "cosine": ("cosine_with_min_lr", "min_lr"),
    "polynomial": ("polynomial", "lr_end"),
    "cosine_with_min_lr": ("cosine_with_min_lr", "min_lr"),
    "cosine_warmup_with_min_lr": ("cosine_warmup_with_min_lr", "min_lr"),
    "warmup_stable_decay": ("warmup_stable_decay", "min_lr_ratio"),
}
"""For schedules that end above 0: transformers' name of those, and of what they fall to."""
LR_SCHEDULES = (
    *("constant", "constant_with_warmup", "inverse_sqrt", "cosine_with_restarts"),
    *DECAY_SCHEDULES,
)
"""transformers' names but for those that ask for a loss, which a step of RL has not."""
BUCKET_ELEMENTS = 50_000_000
"""Elements in one of DeepSpeed's reductions, for which it allocates that much; its own default is
ten times it."""

PARAMETER_SHARDING_STAGE = 3
"""The ZeRO stage in which a rank holds only its part of the parameters."""


@dataclass
class TrainerConfig:
    """How the policy is trained."""

    #: deepspeed, or torch: float32, data parallel and tensor parallel.
    backend: str = "deepspeed"
    #: Ranks: data parallel, or data parallel groups of `tensor_parallel` ranks each.
    world_size: int = 1
    #: Ranks that share every layer of the model and train the same micro-batches; more than 1 with
    #: backend torch, without LoRA.
    tensor_parallel: int = 1
    #: What ZeRO shards: 0 nothing, 1 optimizer, 2 and gradients, 3 and parameters. Backend torch
    #: shards all of it at 3 (FSDP2) and nothing below.
    zero_stage: int = 1
    #: Learning rate.
    lr: float = 1e-6
    #: How the learning rate goes on from there, by the names of transformers' `get_scheduler`, over
    #: all steps of the run; constant has the warm-up below besides.
    lr_schedule: str = "constant"
    #: Steps in which the learning rate rises to lr: to all of it in the last of them with constant,
    #: from 0 in the first with the schedules of transformers.
    warmup_steps: int = 0
    #: The same as a share of the run's steps.
    warmup_ratio: float = 0.0
    #: What the learning rate falls to, for schedules that fall; null for transformers' own.
    lr_min: float | None = None
    #: Further settings of the schedule, as transformers names them: num_cycles, num_decay_steps.
    lr_schedule_options: dict[str, Any] = field(default_factory=dict)
    #: AdamW's weight decay.
    weight_decay: float = 0.0
    #: AdamW's decay of its first and second moment.
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    #: Largest norm of the gradient; 0 for no clipping.
    grad_clip: float = 1.0
    #: float32, bfloat16 (with float32 master weights), or auto: bfloat16 on GPUs where there are
    #: master weights, float32 otherwise.
    dtype: str = "auto"
    #: How attention is computed: eager, sdpa, flex, flash (which needs flash-attn), or auto: as
    #: transformers chooses, but eager, or flex on GPUs, where a model caps attention's logits.
    attention: str = "auto"
    #: Rank of the adapters that are trained in place of the model (LoRA); 0 trains all of it.
    lora_rank: int = 0
    #: The adapters' part in a layer's output is weighed with this over the rank.
    lora_alpha: float = 16.0
    #: Linear layers with an adapter, by the ends of their names, as q_proj; empty for all but the
    #: output head.
    lora_targets: list[str] = field(default_factory=list)
    #: CPU threads of a rank.
    threads: int = 1
    #: Trade time for memory: recompute activations in the backward pass.
    gradient_checkpointing: bool = False
    #: Longest a rank waits for the others in a collective, s.
    collective_timeout_s: float = 300.0

    def __post_init__(self) -> None:
        self._check_choices()
        for key in ("world_size", "tensor_parallel", "threads"):
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
        if self.tensor_parallel > 1:
            self._check_tensor_parallel()

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
                " keeps from zero_stage 1 on"
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
        said = f"trainer.lr_schedule={self.lr_schedule}"
        if self.lr_schedule not in LR_SCHEDULES:
            raise ConfigError(f"{said}: must be one of {', '.join(LR_SCHEDULES)}")
        if self.lr_schedule_options and self.lr_schedule == "constant":
            raise ConfigError(
                f"trainer.lr_schedule_options={self.lr_schedule_options}: {said} has none"
            )
        if self.lr_min is None:
            return
        if not 0 <= self.lr_min < self.lr:
            raise ConfigError(
                f"trainer.lr_min={self.lr_min}: must be 0 or more, below trainer.lr={self.lr}"
            )
        if self.lr_schedule not in DECAY_SCHEDULES:
            falling = ", ".join(DECAY_SCHEDULES)
            raise ConfigError(f"trainer.lr_min={self.lr_min}: {said} has none; {falling} have one")

    def _check_tensor_parallel(self) -> None:
        said = f"trainer.tensor_parallel={self.tensor_parallel}"
        if self.backend != "torch":
            raise ConfigError(f"{said}: needs trainer.backend=torch, not {self.backend}")
        if self.world_size % self.tensor_parallel:
            raise ConfigError(f"{said}: must divide trainer.world_size={self.world_size}")
        if self.lora_rank:
            raise ConfigError(f"{said}: trains all of a model; trainer.lora_rank must be 0")

    @property
    def dp_size(self) -> int:
        """Parts the data of a step is dealt out in."""
        return self.world_size // self.tensor_parallel

    def get_dp_rank(self, rank: int) -> int:
        """Which of these parts a rank trains: neighbours are tensor parallel."""
        return rank // self.tensor_parallel

    @property
    def has_master_weights(self) -> bool:
        """Whether the optimizer keeps float32 weights of its own."""
        return self.backend == "deepspeed" and self.zero_stage > 0

    @property
    def has_sharded_params(self) -> bool:
        """Whether a rank has only its part of the parameters."""
        shards = self.zero_stage == PARAMETER_SHARDING_STAGE
        if self.backend == "deepspeed":
            return shards
        return self.tensor_parallel > 1 or (shards and self.world_size > 1)

    def compute_lr(self, step: int, num_steps: int | None = None) -> float:
        """Learning rate of a step, counted from 0, of so many in all.

        Raises ConfigError for settings that transformers' schedule does not take.
        """
        warmup = self.warmup_steps
        if self.warmup_ratio:
            assert num_steps is not None, "a share of the run's steps"
            warmup = math.ceil(self.warmup_ratio * num_steps)
        if self.lr_schedule == "constant":
            return self.lr * min(1.0, (step + 1) / max(1, warmup))
        return self.lr * self._make_lr_schedule(warmup, num_steps)(step)

    def _make_lr_schedule(self, warmup: int, num_steps: int | None) -> Callable[[int], float]:
        """The factor of a step, as transformers has it: a function of the step alone."""
        import torch
        from transformers import get_scheduler

        name, options = self.lr_schedule, dict(self.lr_schedule_options)
        if self.lr_min is not None:
            name, key = DECAY_SCHEDULES[name]
            options[key] = self.lr_min / self.lr if key.endswith("ratio") else self.lr_min
        # A schedule asks an optimizer for its learning rate, and changes it; this one updates none.
        asked = torch.optim.SGD([torch.zeros(1)], lr=self.lr)
        try:
            found = get_scheduler(name, asked, warmup, num_steps, options)
            factor: Callable[[int], float] = found.lr_lambdas[0]
            factor(0)
        except (TypeError, ValueError, ZeroDivisionError) as error:
            raise ConfigError(
                f"trainer.lr_schedule={self.lr_schedule}: {error}; see trainer.lr_min and"
                " trainer.lr_schedule_options"
            ) from None
        return factor


@dataclass
class CriticConfig:
    """The critic, for algorithms that have one, or have several: each has ranks of its own."""

    #: A Hugging Face model directory the critic starts from; empty takes model.path.
    path: str = ""
    #: What its trainer has other than `trainer`, by name; lr is 1e-5 unless it is said here.
    trainer: dict[str, Any] = field(default_factory=lambda: {"lr": 1e-5})
    #: How far a value may move in a step and still be improved; null for no bound.
    value_clip: float | None = 0.5
    #: Weight of the value loss beside the policy's, where both are heads of one model (AC-share);
    #: null for a critic that is a model of its own.
    shared_coef: float | None = None
    #: Steps at the start in which the critic is trained and the policy is not.
    warmup_alone: int = 0
    #: Processes that compute values: shadows, which follow the critic's versions.
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
        """What a critic of its own has, a head of the policy's model has not."""
        for key in ("path", "trainer", "warmup_alone"):
            default = vars(CriticConfig())[key]
            if vars(self)[key] != default:
                raise ConfigError(
                    f"critic.{key}={vars(self)[key]}: of a critic that is a model of its own; with"
                    f" critic.shared_coef={self.shared_coef} it is a head of the policy's"
                )
