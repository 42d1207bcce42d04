"""Rules of tensor parallelism: which models can be split over how many ranks.

The rules take sizes from config.json or from a `ModelShape`.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from streamrl.engines.models.model_shapes import ModelShape
from streamrl.engines.trainer_config import PARAMETER_SHARDING_STAGE, TrainerConfig
from streamrl.errors import ConfigError
from streamrl.files.hf_config import read_model_config

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

COLUMN_STYLE = "colwise"
COLUMN_STYLES = frozenset({COLUMN_STYLE, "colwise_gather_output", "colwise_rep"})
"""Styles of transformers' plans that split a matrix by its outputs."""
ROW_STYLES = frozenset({"rowwise", "rowwise_split_input", "rowwise_rep"})
"""Styles that split a matrix by its inputs; its bias is whole on every rank."""
SHARED_NORM_STYLE = "replicated_with_grad_allreduce"
"""Style of the norms of queries and keys: whole on every rank, which sees its own heads."""
QUERY_KEY_NORMS = ("q_norm", "k_norm", "q_layernorm", "k_layernorm")
"""Names of these norms; some plans omit them."""
SPLIT_EXPERTS_STYLE = "grouped_gemm"
"""Style of the parameters of all experts: each rank has some of the experts."""
EXPERT_STYLES = frozenset(
    {SPLIT_EXPERTS_STYLE, "ep_router", "moe_tp_experts", "ep_dispatch_experts"}
)
SUPPORTED_STYLES = (
    COLUMN_STYLES | ROW_STYLES | EXPERT_STYLES | {SHARED_NORM_STYLE, "mla_kv_a_proj", "all_reduce"}
)
MAX_EXPERTS = 256
"""Most experts of a layer that the column of routed experts, uint8, tells apart."""
EXPERT_COUNT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")
HEADS_KEY, KV_HEADS_KEY, INTERMEDIATE_KEY = (
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
)
EXPERT_INTERMEDIATE_KEY = "moe_intermediate_size"
"""Key of an expert's size in some mixture-of-experts families; others use INTERMEDIATE_KEY."""
DIVIDED_KEYS = (HEADS_KEY, KV_HEADS_KEY, INTERMEDIATE_KEY)

AnyConfig: TypeAlias = "PreTrainedConfig | type[PreTrainedConfig]"
"""Config of a model, or class of configs of a family."""
SplitSizes = Mapping[str, int]
"""Sizes that the number of tensor-parallel ranks must divide, by their key in config.json."""


class ExpertSizes(NamedTuple):
    """Sizes of a mixture of experts; all are 0 of a dense model but the number of layers."""

    num_layers: int
    num_experts: int
    top_k: int


def get_expert_sizes(config: "PreTrainedConfig") -> ExpertSizes:
    text_config = config.get_text_config()
    sizes = text_config.to_dict()
    num_experts = next((sizes[name] for name in EXPERT_COUNT_KEYS if sizes.get(name)), 0)
    # Families name both in ways of their own.
    top_k = text_config.num_experts_per_tok if num_experts else 0
    return ExpertSizes(text_config.num_hidden_layers, num_experts, top_k)


def has_experts(model_path: str) -> bool:
    config = vars(read_model_config(model_path).get_text_config())
    return any(config.get(name) for name in EXPERT_COUNT_KEYS)


def check_generator_split(model_path: str, ranks: int) -> None:
    """Raise ConfigError if vLLM cannot split the model over `ranks` tensor-parallel ranks."""
    names = (*DIVIDED_KEYS, EXPERT_INTERMEDIATE_KEY) if has_experts(model_path) else DIVIDED_KEYS
    sizes = _read_sizes(read_model_config(model_path).get_text_config(), names)
    if reason := explain_unservable_split(sizes, ranks):
        raise ConfigError(f"generator.tensor_parallel={ranks}: {reason}")


def check_trainer_split(model_path: str, trainer: TrainerConfig) -> None:
    """Raise ConfigError if tensor- and sequence-parallel ranks cannot share the model."""
    config = read_model_config(model_path)
    sizes = _read_sizes(config.get_text_config(), (*DIVIDED_KEYS, *EXPERT_COUNT_KEYS))
    check_rank_split(config, sizes, trainer)


def check_rank_split(config: "AnyConfig | None", sizes: SplitSizes, trainer: TrainerConfig) -> None:
    """Raise ConfigError if ranks cannot share a model of these sizes.

    None as `config` skips the check of the family, for a planner that does not know it.
    """
    ranks, section = trainer.tensor_parallel, trainer.section
    if ranks > 1:
        reason = _explain_missing_plan(config) if config is not None else ""
        reason = reason or _explain_indivisible(sizes, ranks)
        if not reason and trainer.zero_stage == PARAMETER_SHARDING_STAGE:
            reason = _explain_uneven_experts(sizes, ranks, trainer.fsdp_size)
        if reason:
            raise ConfigError(f"{section}.tensor_parallel={ranks}: {reason}")
    size = trainer.sequence_parallel
    heads = {key: sizes[key] for key in (HEADS_KEY, KV_HEADS_KEY) if key in sizes}
    if size > 1 and (reason := _explain_indivisible(heads, size * ranks)):
        times = f" times tensor_parallel={ranks}" * (ranks > 1)
        raise ConfigError(f"{section}.sequence_parallel={size}:{times} {reason}")


def _explain_uneven_experts(sizes: SplitSizes, tensor_parallel: int, fsdp_size: int) -> str:
    """Explain why FSDP2 cannot shard the experts of a tensor-parallel rank; "" if it can."""
    experts = next((sizes[name] for name in EXPERT_COUNT_KEYS if name in sizes), 0)
    experts //= tensor_parallel
    if not experts % fsdp_size:
        return ""
    return (
        f"leaves {experts} experts to a rank, which zero_stage=3 shards over {fsdp_size} ranks: use"
        " sizes that divide"
    )


def get_split_sizes(shape: ModelShape, *, is_trained: bool) -> SplitSizes:
    """Return the sizes of a model that are split: vLLM cuts each expert, training none."""
    sizes = {HEADS_KEY: shape.heads, KV_HEADS_KEY: shape.kv_heads}
    if not shape.experts:
        return sizes | {INTERMEDIATE_KEY: shape.intermediate}
    dense_sizes = {INTERMEDIATE_KEY: shape.dense_intermediate} if shape.dense_intermediate else {}
    if is_trained:
        return sizes | dense_sizes | {EXPERT_COUNT_KEYS[0]: shape.experts}
    return sizes | dense_sizes | {EXPERT_INTERMEDIATE_KEY: shape.intermediate}


def explain_unservable_split(sizes: SplitSizes, ranks: int) -> str:
    """Explain why vLLM cannot split a model over `ranks` tensor-parallel ranks; "" if it can.

    With fewer key-value heads than ranks, vLLM replicates heads.
    """
    replicates_kv = KV_HEADS_KEY in sizes and not ranks % sizes[KV_HEADS_KEY]
    return _explain_indivisible(
        {name: size for name, size in sizes.items() if name != KV_HEADS_KEY or not replicates_kv},
        ranks,
    )


def _explain_missing_plan(config: AnyConfig) -> str:
    family, plan = config.model_type, get_split_plan(config)
    if not plan:
        return f"transformers has no plan to split layers of {family}"
    others = sorted({style for style in plan.values() if style not in SUPPORTED_STYLES})
    if others:
        return f"transformers' plan for {family} splits layers in other ways: {', '.join(others)}"
    return ""


def get_split_plan(config: AnyConfig) -> dict[str, str]:
    """Return transformers' plan to split decoder layers: the style of each module or parameter.

    Names begin at the base model, with * for numbers. Experts follow the plan for expert
    parallelism, all else the plan for tensor parallelism.
    """
    families: Any = config
    experts = families.base_model_ep_plan or {}
    return {
        name: style
        for name, style in {**(families.base_model_tp_plan or {}), **experts}.items()
        if "*" in name
        and (name in experts or not any(name.startswith(f"{expert}.") for expert in experts))
    }


def find_family_config(family: str) -> "type[PreTrainedConfig] | None":
    """Return transformers' config class of a model_type; None for one that it does not know."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    try:
        return CONFIG_MAPPING[family]  # a lazy mapping, whose `get` finds nothing
    except KeyError:
        return None


def _read_sizes(config: "PreTrainedConfig", names: Iterable[str]) -> SplitSizes:
    # getattr instead of to_dict(): transformers maps the names that families use to standard ones.
    sizes = {name: getattr(config, name) for name in names if hasattr(config, name)}
    return {name: size for name, size in sizes.items() if size}


def _explain_indivisible(sizes: SplitSizes, ranks: int) -> str:
    reasons = (f"must divide the model's {k}={size}" for k, size in sizes.items() if size % ranks)
    return next(reasons, "")
