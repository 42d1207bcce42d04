"""Factory of the engines of a real run: vLLM, transformers, DeepSpeed, torch.

Engines are imported inside methods: every actor unpickles the factory, few need torch or vLLM.
"""

from functools import partial
from typing import TYPE_CHECKING

from streamrl.config.device_memory import find_gpu_shortage
from streamrl.config.run_config import RunConfig
from streamrl.data.chat_template import load_tokenizer
from streamrl.dataflow import BASELINE_CALL, COST_CALL, REWARD_CALL, ModelCall
from streamrl.distributed.devices import check_device, find_smallest_gpu_bytes, has_local_gpu
from streamrl.engines.memory.gc_paused import pause_gc
from streamrl.engines.vllm.model_registry import is_held_as_stored
from streamrl.engines.vllm.rank_groups import RankGroup, assign_rank_groups
from streamrl.errors import ConfigError
from streamrl.files.hf_config import read_model_config
from streamrl.rewards.group_filter import build_group_filter
from streamrl.rewards.interface.reward import RewardContext, RowFunction
from streamrl.rewards.registry import build_rewards
from streamrl.rewards.reward_scorer import RewardScorer, RewardStages, score_costs
from streamrl.rewards.reward_set import COSTS

if TYPE_CHECKING:
    from streamrl.engines.generation.generation_engine import GenerationEngine
    from streamrl.engines.training.model_rank import ModelRank
    from streamrl.engines.training.model_trainer import ModelTrainer
    from streamrl.engines.vllm.peer_rank import PeerRank
    from streamrl.engines.vllm.requests import EngineSpec


class RealEngineFactory:
    """Builds vLLM generators, transformers scorers, and DeepSpeed or torch trainers.

    The driver sends the factory to all actors, so it must be picklable. Each method runs in the
    process that hosts the engine. Tests pass subclasses that wrap engines.
    """

    async def make_generator(
        self, config: RunConfig, max_length: int, replica: int
    ) -> "GenerationEngine":
        """Start the vLLM engine of a generator replica.

        Where a tensor-parallel engine spans trainer processes, only its leader's process calls
        this method, with its trainer rank as `replica`; the others call `make_peer_rank`.
        """
        check_assigned_device()
        with pause_gc():
            from streamrl.engines.generation.generation_engine import GenerationEngine

            return await GenerationEngine.start(_make_engine_spec(config, max_length, replica))

    async def make_peer_rank(self, config: RunConfig, max_length: int, rank: int) -> "PeerRank":
        """Start a vLLM worker: one tensor-parallel rank of an engine that another process leads."""
        check_assigned_device()
        with pause_gc():
            from streamrl.engines.vllm.requests import import_vllm

            spec = _make_engine_spec(config, max_length, rank)
            module = await import_vllm("peer_rank", spec)
            peer: PeerRank = await module.PeerRank.start(spec)
            return peer

    async def make_reward_scorer(
        self, config: RunConfig, role: str, compute_logits: RowFunction | None = None
    ) -> RewardStages:
        """Build and start the rewards, or the costs; rules need no torch.

        compute_logits: as in `RewardContext`.
        """
        with pause_gc():
            context = RewardContext(config.scorer, config.sandbox, compute_logits)
            stages = _make_reward_stages(config, role, context)
            await stages.rewards.start()
            return stages

    def make_scoring_rank(
        self, config: RunConfig, max_length: int, rank: int, call: ModelCall
    ) -> "ModelRank":
        """Load a rank of a model that only scores: reference, shadow critic or reward model."""
        check_assigned_device()
        with pause_gc():
            from streamrl.actors.model_engines import make_scoring_rank

            return make_scoring_rank(config, max_length, rank, call)

    def make_trainer(
        self, config: RunConfig, max_length: int, rank: int, role: str
    ) -> "ModelTrainer":
        check_assigned_device()
        with pause_gc():
            from streamrl.actors.model_engines import make_model_trainer

            gpu_bytes = find_smallest_gpu_bytes()
            if gpu_bytes and (shortage := find_gpu_shortage(config, {role: 0}, gpu_bytes)):
                raise ConfigError(shortage)
            return make_model_trainer(config, max_length, rank, role)


def _make_engine_spec(config: RunConfig, max_length: int, replica: int) -> "EngineSpec":
    """Return the settings of a vLLM engine, with the rank group of an engine that spans ranks."""
    from streamrl.engines.vllm.requests import EngineSpec

    size = config.generator.tensor_parallel
    is_shared = config.placement.is_hybrid and size > 1
    rank_group = RankGroup(replica, assign_rank_groups(config.trainer, size)) if is_shared else None
    path, reads_slowly = config.model.path, size > 1 or has_local_gpu()
    return EngineSpec(
        path,
        config.generator,
        seed=config.run.seed + (rank_group.leader_rank if rank_group else replica),
        max_length=max_length,
        should_keep_kv=config.weights.kv == "keep",
        rank_group=rank_group,
        # The trainer's first version has the directory's weights. On a CPU a single process
        # maps the directory faster than it loads and verifies a version by vLLM's loader.
        starts_empty=reads_slowly
        and not config.placement.is_hybrid
        and is_held_as_stored(read_model_config(path)),
        group_size=config.algorithm.group_size,
        run_seed=config.run.seed,
        returns_experts=config.returns_experts,
    )


def check_assigned_device() -> None:
    """Raise ConfigError if this process sees another device, or other GPUs, than Ray assigned."""
    import ray

    check_device(assigned_gpus=len(ray.get_gpu_ids()) if ray.is_initialized() else 0)


def _make_reward_stages(config: RunConfig, role: str, context: RewardContext) -> RewardStages:
    tokenizer = load_tokenizer(config.model.path)
    if role == COST_CALL.role:
        costs = build_rewards(config.costs, context, score_spec=COSTS)
        return RewardStages({COST_CALL.stage: partial(score_costs, costs, tokenizer)}, costs)
    rewards = build_rewards(config.rewards, context)
    accept = build_group_filter(config.filter, config.algorithm_settings.excluded_reasons)
    scorer = RewardScorer(
        rewards,
        tokenizer,
        accept,
        config.telemetry.rollouts,
        pass_score=config.evaluation.pass_score,
        extra_columns=config.extra_score_columns,
    )
    functions = {REWARD_CALL.stage: scorer.score, BASELINE_CALL.stage: scorer.score_baseline}
    return RewardStages(functions, rewards, scorer.drain_recorded)
