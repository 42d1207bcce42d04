"""Input and output of the planner: problem, options of the run, memory of a call and estimate."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from streamrl.dataflow import CallKind, Dataflow, ModelCall
from streamrl.engines.generator_config import GeneratorConfig
from streamrl.engines.models.model_shapes import ModelShape
from streamrl.engines.trainer_config import OFFLOAD, TrainerConfig
from streamrl.errors import ConfigError
from streamrl.placement.clusters import Cluster
from streamrl.placement.config import DEFAULT_SLICE_S
from streamrl.planner.problem.workload import Workload
from streamrl.resharding.grids import RankGrid
from streamrl.weights.config import AUTO


@dataclass(frozen=True)
class RunOptions:
    """Settings of a run's config that affect its speed.

    They are pipeline.depth, pipeline.on_stale, placement.slice_s, weights.publish_every,
    reference.every (of an EMA reference) and filter.oversample (None for auto).

    The planner replaces `depth` by the staleness bound of the placement that it evaluates.
    """

    depth: int | None = None
    on_stale: str = "wait"
    slice_s: float = DEFAULT_SLICE_S
    publish_every: int = 1
    reference_every: int = 1
    oversample: float | None = 1.0

    def get_max_steps_ahead(self, max_staleness: int) -> int:
        return max_staleness if self.depth is None else self.depth

    def round_to_publish_every(self, steps: int) -> int:
        """Round a number of training steps down to a multiple of weights.publish_every.

        Over such a number of steps, generators use each published version equally long, so means
        over the steps are not biased.
        """
        return steps - steps % self.publish_every


@dataclass(frozen=True)
class RunMemory:
    """Settings of a run of streamrl that decide on its memory.

    trainers: settings of each trained role, by role; a placement sets their sizes.
    generator: settings of the generator; a placement sets its size.
    scores_from_host: weights of models that score stay in host memory (scorer.offload), and pass to
      the device in every forward pass.
    transport: weights.transport.
    """

    trainers: Mapping[str, TrainerConfig]
    generator: GeneratorConfig = field(default_factory=GeneratorConfig)
    scores_from_host: bool = False
    transport: str = AUTO

    def list_savings(
        self, call: ModelCall, grid: RankGrid, zero_stage: int
    ) -> Sequence[tuple[bool, bool | str]]:
        """Return what a placement may add to the config to save a call's memory on GPUs.

        Pairs of `is_offloaded` and `checkpointing` of an assignment, the fastest first. What the
        config sets stays.
        """
        if call.kind is CallKind.SCORE:
            return [(False, False)] if self.scores_from_host else [(False, False), (True, False)]
        if call.kind is CallKind.GENERATE:
            return [(False, False)]
        trainer = self.trainers[call.role]
        checkpointings = {False: (False, True, OFFLOAD), True: (False, OFFLOAD), OFFLOAD: (False,)}
        # As `TrainerConfig` checks: an offloaded optimizer is DeepSpeed's, with ZeRO.
        can_offload = trainer.backend == "deepspeed" and grid.tp_size == 1 and zero_stage > 0
        return [
            (is_offloaded, checkpointing)
            for is_offloaded in (False, True)[: 1 + (can_offload and not trainer.offload_optimizer)]
            for checkpointing in checkpointings[trainer.gradient_checkpointing]
        ]


@dataclass(frozen=True)
class PlacementProblem:
    """Run for which to find a placement: calls, models, workload of a step, cluster and options.

    models: by role; a rule-based reward has no model and takes no devices.
    score_tokens: by role, maximum tokens of a scoring batch where the run's config sets a maximum.
    kv_cache_bytes: size of the KV cache per generating device; 0 takes the memory left over.
    run_memory: of a run of streamrl; None for another system, whose memory the cost constants give.
    hosts: by scoring role, the trained role whose ranks compute it if both have the same devices.
    """

    dataflow: Dataflow
    models: Mapping[str, ModelShape]
    workload: Workload
    cluster: Cluster
    run_options: RunOptions = field(default_factory=RunOptions)
    score_tokens: Mapping[str, int] = field(default_factory=dict)
    kv_cache_bytes: int = 0
    run_memory: RunMemory | None = None
    hosts: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for call in self.dataflow.calls:
            needed = call.role if call.kind is CallKind.TRAIN else call.followed_role
            if needed and needed not in self.models:
                raise ConfigError(f"model of {needed}: missing; {call.stage} computes with it")

    def find_model(self, stage: str) -> ModelShape | None:
        """Return the shape of the model that a stage computes with; None without a model."""
        call = next(call for call in self.dataflow.calls if call.stage == stage)
        return self.models.get(call.role) or self.models.get(call.followed_role)

    @property
    def placed_stages(self) -> list[str]:
        """Stages that compute with a model and so need devices, in the order of the dataflow."""
        return [call.stage for call in self.dataflow.ordered_calls if self.find_model(call.stage)]


@dataclass(frozen=True)
class CallMemory:
    """Bytes that a call holds on each of its devices: always, and additionally while computing."""

    resident_bytes: float
    active_bytes: float

    @property
    def peak_bytes(self) -> float:
        return self.resident_bytes + self.active_bytes


@dataclass(frozen=True)
class PlacementEstimate:
    """Steady-state estimate of a placement.

    step_s: time of a training step.
    tokens_per_s: sampled tokens that are trained, over the whole cluster.
    idle: by stage, the fraction of a step in which the stage does not compute.
    device_idle: idle fraction of all devices of the cluster, used or not.
    memory_bytes, free_bytes: used and free memory of the device with the least free memory.
    infeasible_reason: empty for a feasible placement; otherwise step_s is infinite and all other
      figures are NaN.
    """

    step_s: float
    tokens_per_s: float = math.nan
    idle: Mapping[str, float] = field(default_factory=dict)
    device_idle: float = math.nan
    memory_bytes: float = math.nan
    free_bytes: float = math.nan
    infeasible_reason: str = ""
