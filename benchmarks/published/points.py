"""Published figures as plain data, with their sources.

Some are read off a figure or a text. Settings that a source does not give are assumptions, stated
in the module that models it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

HYBRIDFLOW = "arXiv:2409.19256"
REAL = "arXiv:2406.14088 v1, vws.svg"
FLEXRLHF = "arXiv:2312.11819"


# HybridFlow: 16 nodes of 8 A100-80GB, 200 Gb/s between them; PPO with four models of one size, 1024
# prompts of 1024 tokens, 1024 tokens of response, 8 updates in a step.


@dataclass(frozen=True)
class Fig15:
    """Generation on 16 GPUs, trained as 1-8-2: the best t_g, and the fraction of t_g=8 it saves."""

    model: str
    best: int
    saved: float


FIG_15 = (Fig15("llama-7b", 2, 0.603), Fig15("llama-13b", 4, 0.364))

FIG_12: Mapping[tuple[str, int], str] = {
    ("llama-7b", 16): "colocate",
    ("llama-7b", 32): "colocate",
    ("llama-7b", 64): "colocate",
    ("llama-13b", 16): "colocate",
    ("llama-13b", 32): "colocate",
    ("llama-13b", 64): "colocate",
    ("llama-13b", 96): "split",
    ("llama-13b", 128): "standalone",
    ("llama-34b", 32): "colocate",
    ("llama-34b", 64): "colocate",
    ("llama-34b", 96): "split",
    ("llama-34b", 128): "split",
}
"""The best placement by model and GPUs."""
FIG_12_STANDALONE = (64, 32, 16, 16)
"""GPUs of actor, critic, reference, reward of the standalone placement of 13B on 128 GPUs."""


# ReaL: PetaFLOP/s of its heuristic (8-way tensor parallel, one stage per node, all calls on all
# devices) and of its search. 2^17 tokens a step, prompts of 128, 4 mini-batches.

LENGTHS: Mapping[int, int] = {128: 512, 384: 256, 896: 128}
"""Rollouts of a step by tokens of a response."""
REAL_SIZES = ("llama-7b", "llama-13b", "llama-34b", "llama-70b")
REAL_DEVICES = (8, 16, 32, 64)
"""GPUs by model size; twice as many if actor and critic both have it."""

REAL_PFLOPS: Mapping[tuple[str, int], tuple[tuple[float, float], ...]] = {
    ("actor", 128): ((0.684, 0.917), (1.041, 1.292), (2.143, 2.501), (3.075, 3.229)),
    ("actor", 384): ((0.511, 0.772), (0.741, 1.010), (1.451, 1.571), (1.885, 2.049)),
    ("actor", 896): ((0.347, 0.589), (0.465, 0.726), (0.876, 0.958), (1.056, 1.100)),
    ("critic", 128): ((0.684, 0.917), (1.101, 1.505), (2.374, 2.729), (4.070, 4.517)),
    ("critic", 384): ((0.511, 0.772), (0.833, 1.282), (1.750, 2.493), (2.711, 3.578)),
    ("critic", 896): ((0.347, 0.589), (0.559, 0.936), (1.093, 1.711), (1.752, 3.140)),
    ("both", 128): ((0.892, 1.466), (1.523, 1.743), (3.692, 4.222), (5.196, 6.454)),
    ("both", 384): ((0.612, 0.930), (1.080, 1.521), (2.085, 2.563), (3.151, 3.456)),
    ("both", 896): ((0.378, 0.642), (0.622, 0.983), (1.405, 1.627), (1.740, 2.112)),
}
"""(heuristic, ReaL) by the model that grows (the other is 7B) and response tokens."""
REAL_HEURISTIC_S: Mapping[tuple[str, int], tuple[float, ...]] = {
    ("actor", 128): (31.3, 30.1, 34.0, 43.7),
    ("actor", 384): (42.3, 42.6, 50.5, 71.6),
    ("actor", 896): (63.4, 69.0, 84.6, 129.0),
    ("critic", 128): (31.3, 28.5, 30.7, 33.0),
    ("critic", 384): (42.3, 37.9, 41.9, 49.8),
    ("critic", 896): (63.4, 57.5, 67.9, 77.8),
    ("both", 128): (24.0, 27.1, 33.7, 47.6),
    ("both", 384): (35.3, 38.5, 60.0, 78.9),
    ("both", 896): (58.2, 67.9, 89.9, 144.0),
}
"""Seconds of a heuristic step: FLOP by ReaL's formula over its PetaFLOP/s."""
REAL_MEAN_GAIN = 1.26
"""Mean gain over the heuristic, weighted by GPUs."""


# FlexRLHF: samples/s, A100-80GB, 100 GB/s between nodes, prompts and responses of 256 tokens.


@dataclass(frozen=True)
class Throughput:
    """Samples per second of a strategy; 0 if out of memory."""

    model: str
    gpus: int
    strategy: str
    samples_per_s: float


FLEX_SIZES = ("llama-7b", "llama-13b", "llama-33b", "llama-65b")
FLEX: tuple[Throughput, ...] = tuple(
    Throughput(model, gpus, strategy, value)
    for gpus, strategy, values in (
        (8, "colocated", (16.12, 7.32, 0.69, 0.0)),
        (8, "interleaved-1", (17.35, 7.63, 0.69, 0.0)),
        (16, "colocated", (32.15, 15.35, 0.64, 0.14)),
        (16, "interleaved-1", (34.70, 15.66, 0.64, 0.14)),
        (16, "interleaved-2", (18.27, 8.27, 0.97, 0.24)),
        (32, "colocated", (61.95, 28.60, 0.93, 0.20)),
        (32, "interleaved-1", (69.44, 28.54, 0.95, 0.20)),
        (32, "disaggregated", (None, None, 4.76, 1.75)),
        (128, "colocated", (None, None, 2.11, 0.55)),
        (128, "disaggregated", (None, None, 10.07, 6.80)),
    )
    for model, value in zip(FLEX_SIZES, values, strict=True)
    if value is not None
)
FLEX_MIXED = Throughput("llama-33b", 16, "with 8 V100", 0.79)
"""8 A100, and 8 V100 for reference and reward."""


# verl: seconds of a step on H20, https://github.com/volcengine/verl docs/advance/fully_async.md and
# one_step_off.md.


@dataclass(frozen=True)
class VerlRun:
    """A run and its published parts, in seconds; 0 if not published.

    train: training devices. generate: generating devices, 0 if colocated. gen_s: wait for rollouts.
    forward_s, reference_s: log-probability passes of policy and reference. update_s: updates.
    sampled_s: sampling within gen_s, averaged over ranks.
    """

    name: str
    model: str
    train: int
    generate: int
    step_s: float
    gen_s: float = 0.0
    forward_s: float = 0.0
    update_s: float = 0.0
    reference_s: float = 0.0
    sampled_s: float = 0.0

    @property
    def rest_s(self) -> float:
        """Seconds of the step outside its parts."""
        return self.step_s - self.gen_s - self.forward_s - self.update_s - self.reference_s


VERL = (
    VerlRun("7b-28k", "qwen2.5-7b", 32, 0, 790.10, 357.41, 107.71, 313.81),
    VerlRun("7b-28k", "qwen2.5-7b", 64, 0, 365.28, 150.72, 70.26, 133.41),
    VerlRun("7b-28k", "qwen2.5-7b", 128, 0, 356.30, 177.85, 53.92, 113.81),
    VerlRun("7b-28k", "qwen2.5-7b", 16, 16, 294.77, 21.26, 0.0, 269.80),
    VerlRun("7b-28k", "qwen2.5-7b", 32, 32, 189.26, 28.46, 0.0, 156.98),
    VerlRun("7b-28k", "qwen2.5-7b", 64, 64, 150.63, 33.14, 0.0, 113.16),
    VerlRun("30b-8k", "qwen3-30b-a3b", 128, 0, 497.89, 348.05, 28.73, 86.27, 20.86),
    VerlRun("30b-8k", "qwen3-30b-a3b", 32, 96, 282.75, 22.06, 0.0, 206.63, 50.05),
    VerlRun("7b-20k", "qwen2.5-7b", 16, 0, 749.0, 321.0, 88.0, 286.0, sampled_s=247.0),
    VerlRun("7b-20k", "qwen2.5-7b", 12, 4, 520.0, 45.0, 108.0, 337.0, sampled_s=458.0),
    VerlRun("7b-8k", "qwen2.5-7b", 16, 0, 699.0, 207.0, 119.0, 344.0, sampled_s=162.0),
    VerlRun("7b-8k", "qwen2.5-7b", 12, 4, 566.0, 59.0, 120.0, 347.0, sampled_s=501.0),
)


# NeMo-RL v0.6: seconds of a step, https://docs.nvidia.com/nemo/rl/0.6.0, performance summary; bf16.


@dataclass(frozen=True)
class NemoRun:
    """A run; generation is at most `steps_ahead` steps ahead, on devices of its own if above 0.

    mean: average tokens of a sequence.
    """

    model: str
    device: str
    gpus: int
    steps_ahead: int
    step_s: float
    mean: int


NEMO = (
    NemoRun("deepseek-v3", "H100", 256, 0, 134.0, 701),
    NemoRun("deepseek-v3", "H100", 512, 0, 111.0, 697),
    NemoRun("deepseek-v3", "H100", 512, 1, 64.1, 710),
    NemoRun("qwen3-235b-a22b", "H100", 128, 0, 395.0, 5698),
    NemoRun("qwen3-235b-a22b", "H100", 256, 0, 312.0, 5713),
    NemoRun("qwen3-235b-a22b", "H100", 256, 1, 231.0, 5721),
    NemoRun("qwen3-30b-a3b", "H100", 32, 0, 192.0, 3203),
    NemoRun("qwen3-30b-a3b", "H100", 32, 1, 152.0, 3201),
    NemoRun("qwen3-30b-a3b", "H100", 192, 8, 34.5, 3206),
    NemoRun("deepseek-v3", "GB200", 128, 0, 108.0, 711),
    NemoRun("deepseek-v3", "GB200", 256, 0, 98.7, 700),
    NemoRun("deepseek-v3", "GB200", 256, 1, 61.7, 708),
    NemoRun("qwen3-235b-a22b", "GB200", 64, 0, 286.0, 5709),
    NemoRun("qwen3-235b-a22b", "GB200", 128, 0, 345.0, 5693),
    NemoRun("qwen3-235b-a22b", "GB200", 128, 1, 278.0, 5705),
    NemoRun("qwen3-30b-a3b", "GB200", 16, 0, 221.0, 3199),
    NemoRun("qwen3-30b-a3b", "GB200", 16, 1, 301.0, 3197),
)
