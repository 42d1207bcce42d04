"""How a model is trained: the settings of the policy's trainer, and what a critic's adds."""

from dataclasses import dataclass, field
from typing import Any

from streamrl.errors import ConfigError

BACKENDS = ("deepspeed", "torch")
DTYPES = ("auto", "float32", "bfloat16")
ATTENTIONS = {
    "auto": None,
    "eager": "eager",
    "sdpa": "sdpa",
    "flex": "flex_attention",
    "flash": "flash_attention_2",
}
"""How attention may be computed, by transformers' names; auto is chosen by the model."""
BUCKET_ELEMENTS = 50_000_000
"""Elements in one of DeepSpeed's reductions, for which it allocates that much; its own default is
ten times it."""

SHARDS_PARAMETERS = 3
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
        if [0 <= beta < 1 for beta in self.betas] != [True, True]:
            raise ConfigError(f"trainer.betas={self.betas}: must be two numbers from 0 to below 1")
        if self.lora_targets and not self.lora_rank:
            raise ConfigError(
                f"trainer.lora_targets={self.lora_targets}: needs trainer.lora_rank above 0"
            )
        if self.tensor_parallel > 1:
            self._check_tensor_parallel()

    def _check_choices(self) -> None:
        if self.backend not in BACKENDS:
            raise ConfigError(f"trainer.backend={self.backend}: must be {' or '.join(BACKENDS)}")
        if self.zero_stage not in (0, 1, 2, 3):
            raise ConfigError(f"trainer.zero_stage={self.zero_stage}: must be 0, 1, 2 or 3")
        if self.dtype not in DTYPES:
            allowed = ", ".join(DTYPES)
            raise ConfigError(f"trainer.dtype={self.dtype}: must be one of {allowed}")
        if self.attention not in ATTENTIONS:
            allowed = ", ".join(ATTENTIONS)
            raise ConfigError(f"trainer.attention={self.attention}: must be one of {allowed}")
        if self.dtype == "bfloat16" and not self.has_master_weights:
            raise ConfigError(
                "trainer.dtype=bfloat16: needs master weights, which backend deepspeed"
                " keeps from zero_stage 1 on"
            )

    def _check_tensor_parallel(self) -> None:
        said = f"trainer.tensor_parallel={self.tensor_parallel}"
        if self.backend != "torch":
            raise ConfigError(f"{said}: needs trainer.backend=torch, not {self.backend}")
        if self.world_size % self.tensor_parallel:
            raise ConfigError(f"{said}: must divide trainer.world_size={self.world_size}")
        if self.lora_rank:
            raise ConfigError(f"{said}: trains all of a model; trainer.lora_rank must be 0")

    @property
    def num_shares(self) -> int:
        """Parts the data of a step is dealt out in."""
        return self.world_size // self.tensor_parallel

    def share_of(self, rank: int) -> int:
        """Which of these parts a rank trains: neighbours are tensor parallel."""
        return rank // self.tensor_parallel

    @property
    def has_master_weights(self) -> bool:
        """Whether the optimizer keeps float32 weights of its own."""
        return self.backend == "deepspeed" and self.zero_stage > 0

    @property
    def gathers(self) -> bool:
        """Whether a rank has only its part of the parameters."""
        shards = self.zero_stage == SHARDS_PARAMETERS
        if self.backend == "deepspeed":
            return shards
        return self.tensor_parallel > 1 or (shards and self.world_size > 1)

    def lr_at(self, step: int) -> float:
        """Learning rate of a step, counted from 0."""
        return self.lr * min(1.0, (step + 1) / max(1, self.warmup_steps))


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
