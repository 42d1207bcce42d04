"""Config sections `trainer`, `critic` and `reference`."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import cos, pi
from typing import Annotated, Any, ClassVar

from streamrl.distributed.devices import count_cores_per_gpu
from streamrl.files.typed_settings import (
    FIXED_ON_RESUME,
    Conflict,
    above,
    at_least,
    below,
    check_conflicts,
    one_of,
)

TRAINER_BACKENDS = ("deepspeed", "torch")
MUON = "muon"
TRAINER_DTYPES = ("auto", "float32", "bfloat16")
ATTENTION_SETTINGS = ("auto", "eager")
LR_SCHEDULES = ("constant", "linear", "cosine")
BUCKET_ELEMENTS = 50_000_000
"""DeepSpeed's reduce bucket, allocated in full even for small models: a tenth of its default."""
HEAD_CHUNK_TOKENS = 1024
"""Tokens for which logits over the vocabulary exist at the same time."""
LIVE_ELEMENTS = 1_000_000_000
"""Elements of parameters that ZeRO stage 3 keeps gathered: DeepSpeed's stage3_max_live_parameters
and stage3_max_reuse_distance."""

MAX_GPU_THREADS = 8
GRADIENT_SHARDING_STAGE = 2
PARAMETER_SHARDING_STAGE = 3
LOAD_TIMEOUT_S = 1800.0
"""Timeout of collectives while models load: ranks that read large files arrive minutes apart."""
SAVE_TIMEOUT_S = 7200.0
"""Longest time of writing a checkpoint: 14 bytes per parameter of a trained model in bfloat16, so
980 GB for 70B, which is 136 MB/s."""
OFFLOAD = "offload"
"""Value of trainer.gradient_checkpointing that moves the inputs of layers to host memory."""


@dataclass
class TrainerConfig:
    """Config section `trainer`: ranks, parallelism, optimizer, learning rate, LoRA and memory."""

    # Without a type, so that it is no setting: config section, which messages name.
    section = "trainer"
    #: deepspeed, or torch (data and tensor parallel).
    backend: Annotated[str, one_of(*TRAINER_BACKENDS)] = "deepspeed"
    #: Number of ranks; data-parallel size times `tensor_parallel` times `sequence_parallel`.
    world_size: Annotated[int, at_least(1)] = 1
    #: Tensor-parallel size. Above 1 it needs backend torch and excludes LoRA.
    tensor_parallel: Annotated[int, at_least(1)] = 1
    #: Number of ranks that share the tokens of each micro-batch (DeepSpeed-Ulysses), for sequences
    #: whose activations do not fit one rank. Must divide the attention heads and the KV heads.
    sequence_parallel: Annotated[int, at_least(1)] = 1
    #: ZeRO stage: 0 shards nothing (as backend torch), 1 optimizer state, 2 also gradients, 3 also
    #: parameters. Backend torch shards everything at 3 (FSDP2) and nothing below.
    zero_stage: Annotated[int, at_least(0, 3)] = 1
    #: adamw, or muon: orthogonal updates of the matrices of the layers, AdamW for the rest. muon
    #: needs whole matrices on each rank: backend torch, tensor_parallel 1, zero_stage below 3, no
    #: LoRA.
    optimizer: Annotated[str, one_of("adamw", MUON), FIXED_ON_RESUME] = "adamw"
    #: Peak learning rate.
    lr: Annotated[float, above(0)] = 1e-6
    #: Learning rate after the warm-up, over all training steps of the run: constant, or falling to
    #: lr_min on a line or half a cosine.
    lr_schedule: Annotated[str, one_of(*LR_SCHEDULES)] = "constant"
    #: Warm-up steps, over which the rate rises on a line; the last of them has lr.
    warmup_steps: Annotated[int, at_least(0)] = 0
    #: Final learning rate of a falling schedule; null is 0.
    lr_min: Annotated[float | None, at_least(0)] = None
    #: Last training steps of the run, in which the rate falls, at most those after the warm-up;
    #: null is all of them.
    lr_decay_steps: Annotated[int | None, at_least(1)] = None
    #: Weight decay, decoupled from the gradient.
    weight_decay: Annotated[float, at_least(0)] = 0.0
    #: Betas of AdamW.
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    #: Maximum gradient norm; 0 disables clipping.
    grad_clip: Annotated[float, at_least(0)] = 1.0
    #: float32, bfloat16 (with float32 master weights) or auto. auto is bfloat16 on GPUs if the
    #: backend keeps master weights, float32 otherwise.
    dtype: Annotated[str, one_of(*TRAINER_DTYPES)] = "auto"
    #: auto leaves the implementation of attention to transformers, except for models with attention
    #: logit soft-capping: flex attention on GPUs, eager on CPUs. eager pads rows.
    attention: Annotated[str, one_of(*ATTENTION_SETTINGS)] = "auto"
    #: Rank of the LoRA adapters of all linear layers but the output head; 0 trains the full model.
    lora_rank: Annotated[int, at_least(0), FIXED_ON_RESUME] = 0
    #: LoRA scaling: adapters are scaled by lora_alpha / lora_rank.
    lora_alpha: Annotated[float, above(0), FIXED_ON_RESUME] = 16.0
    #: CPU threads of a rank. null is 1 on CPUs, where ranks share the cores; with GPUs it is a
    #: GPU's share of the node's cores, at most 8.
    threads: Annotated[int | None, at_least(1)] = None
    #: Recompute activations in the backward pass: less memory, more time. offload also keeps the
    #: inputs of the layers in host memory between the passes; on CPUs the same as true.
    gradient_checkpointing: Annotated[bool | str, one_of(True, False, OFFLOAD)] = False
    #: Keep AdamW's moments and the master weights in host memory, and update there on `threads`
    #: threads: less GPU memory, slower updates. Needs backend deepspeed and zero_stage 1 or 3, or 2
    #: in float32.
    offload_optimizer: bool = False
    #: Timeout of a collective, s.
    collective_timeout_s: Annotated[float, above(0)] = 300.0

    def __post_init__(self) -> None:
        check_conflicts(
            self, (*self._list_memory_conflicts(), *self._list_conflicts()), f"{self.section}."
        )

    def _list_memory_conflicts(self) -> Iterator[Conflict]:
        """Yield the rules between settings of precision and memory."""
        yield (
            self.dtype == "bfloat16" and not self.has_master_weights,
            "dtype",
            "needs master weights, which backend deepspeed keeps from zero_stage 1 on, and backend"
            " torch with tensor_parallel above 1 or zero_stage 3 on several ranks",
        )
        for key, is_missing in (
            ("backend=deepspeed", self.backend != "deepspeed"),
            ("a zero_stage above 0", not self.zero_stage),
        ):
            yield self.offload_optimizer and is_missing, "offload_optimizer", f"needs {key}"
        sums_in_bfloat16 = self.zero_stage == GRADIENT_SHARDING_STAGE and self.dtype != "float32"
        yield (
            self.offload_optimizer and sums_in_bfloat16,
            "offload_optimizer",
            f"with zero_stage=2, dtype={self.dtype} DeepSpeed would sum gradients"
            " in bfloat16: set zero_stage to 1 or 3, or dtype to float32",
        )

    def _list_conflicts(self) -> Iterator[Conflict]:
        """Yield the rules between settings of LoRA, the learning rate and parallel sizes."""
        setting = f"lr_schedule={self.lr_schedule}"
        has_two_betas = [0 <= beta < 1 for beta in self.betas] == [True, True]
        yield not has_two_betas, "betas", "must be two numbers from 0 to below 1"
        yield (
            self.lr_min is not None and self.lr_min >= self.lr,
            "lr_min",
            f"must be below lr={self.lr}",
        )
        for name in ("lr_min", "lr_decay_steps"):
            falls = self.lr_schedule != "constant"
            yield vars(self)[name] is not None and not falls, name, f"{setting} does not fall"
        is_split = self.tensor_parallel > 1
        yield (
            is_split and self.backend != "torch",
            "tensor_parallel",
            f"needs backend=torch, not {self.backend}",
        )
        yield (
            is_split and self.lora_rank,
            "tensor_parallel",
            "does not support LoRA; lora_rank must be 0",
        )
        has_parts = self.backend != "torch" or self.has_sharded_params or self.lora_rank
        yield (
            self.optimizer == MUON and has_parts,
            "optimizer",
            "needs whole matrices: backend=torch, tensor_parallel=1, zero_stage below 3, no LoRA",
        )
        yield from _list_size_conflicts(self, f"{self.section}.")

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

    def resolve_dtype(self, *, on_gpu: bool) -> str:
        """Return the dtype in which the trainer computes and publishes its model."""
        default = "bfloat16" if on_gpu and self.has_master_weights else "float32"
        return default if self.dtype == "auto" else self.dtype

    def resolve_threads(self, *, on_gpu: bool) -> int:
        """Return the CPU threads of a rank in this process."""
        return self.threads or (min(MAX_GPU_THREADS, count_cores_per_gpu()) if on_gpu else 1)

    def overlaps_reduction(self, *, on_gpu: bool) -> bool:
        """Return whether ZeRO reduces gradients while the backward pass computes more of them.

        Stage 1 reduces at the update, and DeepSpeed refuses its overlap for accumulated gradients.
        Without a GPU there is no second stream.
        """
        is_deepspeed = self.backend == "deepspeed"
        return is_deepspeed and on_gpu and self.zero_stage >= GRADIENT_SHARDING_STAGE

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

        `num_steps` is the number of steps of the run, from which a falling schedule counts back.
        """
        peak = self.lr * min(1.0, (step + 1) / max(1, self.warmup_steps))
        if self.lr_schedule == "constant":
            return peak
        assert num_steps is not None, "a falling schedule depends on the number of steps"
        steps_left = max(1, num_steps - self.warmup_steps)
        decay_steps = min(self.lr_decay_steps or steps_left, steps_left)
        progress = min(1.0, max(0.0, 1 - (num_steps - step) / decay_steps))
        share = 1 - progress if self.lr_schedule == "linear" else (1 + cos(pi * progress)) / 2
        lr_min = self.lr_min or 0.0
        return min(peak, lr_min + (self.lr - lr_min) * share)


@dataclass
class CriticTrainerConfig(TrainerConfig):
    """Settings of `trainer` with the changes of `critic.trainer`, for a separate critic."""

    section = "critic.trainer"


@dataclass
class RankLayout:
    """Ranks over which each copy of a model that only scores is split."""

    section: ClassVar[str] = ""
    #: Ranks of a copy; FSDP2 shards it over those that do not split its layers.
    world_size: Annotated[int, at_least(1)] = 1
    #: Ranks that split the layers of the model.
    tensor_parallel: Annotated[int, at_least(1)] = 1
    #: Ranks that share the tokens of each micro-batch.
    sequence_parallel: Annotated[int, at_least(1)] = 1

    def __post_init__(self) -> None:
        prefix = f"{self.section}." if self.section else ""
        check_conflicts(self, _list_size_conflicts(self, prefix), prefix)

    def to_trainer_config(self, trainer: TrainerConfig, key: str = "") -> "ScoringRanksConfig":
        """Return the settings of the ranks, with precision, attention and threads of a trainer.

        key: config key of a layout that has no section of its own, such as "rewards[0]".
        """
        return ScoringRanksConfig(
            section=key or self.section,
            backend="torch",
            world_size=self.world_size,
            tensor_parallel=self.tensor_parallel,
            sequence_parallel=self.sequence_parallel,
            zero_stage=PARAMETER_SHARDING_STAGE,
            dtype=trainer.dtype,
            attention=trainer.attention,
            threads=trainer.threads,
            collective_timeout_s=trainer.collective_timeout_s,
        )


def _list_size_conflicts(ranks: TrainerConfig | RankLayout, prefix: str) -> Iterator[Conflict]:
    """Yield the rules between a number of ranks and the sizes by which they share a model."""
    tp_size, world = ranks.tensor_parallel, f"{prefix}world_size={ranks.world_size}"
    yield ranks.world_size % tp_size, "tensor_parallel", f"must divide {world}"
    times = f"times {prefix}tensor_parallel={tp_size} " * (tp_size > 1)
    shared = tp_size * ranks.sequence_parallel
    yield ranks.world_size % shared, "sequence_parallel", f"{times}must divide {world}"


@dataclass
class ScoringRanksConfig(TrainerConfig):
    """Settings of ranks whose model only scores: backend torch, sharded whole, no optimizer."""

    section: str = ""

    @property
    def has_master_weights(self) -> bool:
        """True: a model that is not trained needs none, so that bfloat16 suits every layout."""
        return True


@dataclass
class ShadowConfig(RankLayout):
    """Config section `critic.shadow`: the ranks of each shadow critic."""

    section: ClassVar[str] = "critic.shadow"


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
    value_clip: Annotated[float | None, above(0)] = 0.5
    #: Weight of the value loss in the policy's loss if policy and critic share a model (AC-share);
    #: null for a separate critic.
    shared_coef: Annotated[float | None, at_least(0), FIXED_ON_RESUME] = None
    #: Critic warm-up: initial steps that train only the critic.
    warmup_alone: Annotated[int, at_least(0), FIXED_ON_RESUME] = 0
    #: Shadow critics, copies that follow the critic's versions and compute the values; 0: the ranks
    #: that train the critic compute them, and there is no second copy.
    replicas: Annotated[int, at_least(0)] = 0
    #: Ranks of each shadow critic.
    shadow: ShadowConfig = field(default_factory=ShadowConfig)

    def __post_init__(self) -> None:
        default = CriticConfig() if self.shared_coef is not None else self
        needs = (
            f"needs a separate critic; with critic.shared_coef={self.shared_coef} it is a head of"
            " the policy's model"
        )
        keys = ("path", "trainer", "warmup_alone")
        conflicts: list[Conflict] = [
            (vars(self)[key] != vars(default)[key], key, needs) for key in keys
        ]
        is_idle = self.shadow.world_size > 1 and not self.replicas
        number = "has no effect without shadow critics; set critic.replicas, their number"
        conflicts.append((is_idle, "shadow.world_size", number))
        check_conflicts(self, conflicts, "critic.")


REFERENCE_FILE = "reference.safetensors"
"""File of an EMA reference in a trainer checkpoint."""


@dataclass
class ReferenceConfig(RankLayout):
    """Config section `reference`; by default the reference stays a copy of the initial policy."""

    section: ClassVar[str] = "reference"
    #: Hugging Face model directory of a reference other than the initial policy, such as a teacher,
    #: with the policy's tokenizer; or a run directory, whose newest checkpoint counts. Empty means
    #: model.path.
    path: Annotated[str, FIXED_ON_RESUME] = ""
    #: Update the reference every this many training steps; 0 never does.
    every: Annotated[int, at_least(0)] = 0
    #: Weight of the old reference in an update; 0 copies the policy.
    decay: Annotated[float, at_least(0), below(1)] = 0.0
    #: Copies of the reference, each on `world_size` ranks. null: 1, but none with LoRA adapters,
    #: below which the policy's ranks have the reference.
    replicas: Annotated[int | None, at_least(1)] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        reason = "has no effect while reference.every=0; set reference.every"
        moves = "would replace the reference of reference.path by the policy; set one of them"
        conflicts: list[Conflict] = [
            (self.decay and not self.every, "decay", reason),
            (self.every and self.path, "every", moves),
        ]
        check_conflicts(self, conflicts, "reference.")

    def is_updated_at(self, version: int) -> bool:
        """Return whether the step that ends with `version` updates the reference."""
        return bool(self.every) and version > 0 and version % self.every == 0

    def find_reference_version(self, version: int) -> int:
        """Return the policy version at which the reference in use at `version` was updated last.

        With every=4, versions 4 to 7 use the reference of version 4. Without updates (every=0),
        returns `version` itself.
        """
        return version - version % self.every if self.every else version
