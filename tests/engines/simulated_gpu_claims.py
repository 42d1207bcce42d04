"""Claims about the areas of `tests.engines.simulated_gpu_run`, as data.

A claim is a sentence and a function of the area's result. Tests check each; a planted fault that
breaks none, and raises nothing, has survived.
"""

from collections.abc import Callable, Mapping
from typing import Any

Claims = Mapping[str, Callable[[Any], object]]


def is_one_ahead(offload: Any) -> bool:
    """Return whether each layer's copy is queued as the layer before it computes."""
    computed = offload["queued"].count("l")
    one_ahead = "cc" + "lc" * (computed - 1) + "l"
    return (
        computed >= 2 * offload["layers"]  # several passes
        and offload["queued"] == one_ahead
        and offload["compute stream"] == ["wait", "compute", "record"] * computed
    )


def takes_free_memory(offload: Any) -> bool:
    copies = range(offload["queued"].count("c"))
    is_late = offload["released"] == [max(0, number - 1) for number in copies]
    return offload["resident"] == 2 and is_late


ONE_COPY = "the sums of a micro-batch reach the CPU in one copy, beside the rows' lengths"
TRAINING: Claims = {
    "trainers train on the GPU as on the CPU": lambda training: (
        training["numbers"] < 1e-4 and training["parameters"] < 1e-4
    ),
    ONE_COPY: lambda training: training["host_copies"] == [2, 2],
}
PULL: Claims = {
    "published weights are loaded on the GPU": lambda weights: (
        weights["difference"] < 1e-5 and weights["devices"] == ["simgpu"]
    ),
    "a version is pulled without a copy to the CPU": lambda weights: weights["pull_copies"] == 0,
}


def is_close(result: Any) -> bool:
    return bool(result["difference"] < 1e-4)


AS_ON_CPU: Claims = {"the results are those of the CPU": is_close}

RANKS: Claims = {
    "ranks with a GPU each compute what they compute on the CPU": lambda ranks: (
        ranks["difference"] < 1e-3 and ranks["leaves"] > 5
    )
}
PLACED: Claims = {
    "adapters are merged on the GPU": lambda load: (
        load["placed"] == ["simgpu"] and load["difference"] < 1e-5
    )
}
CLAIMS: Mapping[str, Claims] = {
    "losses": {
        "all losses and gradients are those of the CPU": lambda losses: (
            losses["ok"] and losses["variants"] > 20
        )
    },
    "scores": {
        "scorers compute on the GPU what they compute on the CPU": lambda scores: (
            scores["difference"] < 1e-4
        ),
        "with layers in host memory all else is on the GPU": lambda scores: (
            (scores["layers"], scores["others"]) == (["cpu"], ["simgpu"])
        ),
    },
    "offload": {
        # A layer that computed before its copy would give NaN.
        "layers in host memory change no bit, nor once another version is loaded": lambda offload: (
            offload["equal"] == [True, True] and offload["is_updated"]
        ),
        "each layer is copied while the layer before computes": is_one_ahead,
        "two layers at most are on the GPU, and memory is taken once it is free": takes_free_memory,
    },
    "lora": TRAINING,
    "two heads": TRAINING,
    "checkpoint": {
        "a checkpoint repeats a step": lambda checkpoint: checkpoint["repeats"],
        "a checkpoint of the GPU holds what that of the CPU holds": lambda checkpoint: (
            max(v for name, v in checkpoint.items() if name not in ("repeats", "written")) < 1e-4
        ),
        "what is written is in host memory": lambda checkpoint: checkpoint["written"] == ["cpu"],
    },
    "pretraining": {
        "the pretraining loss is that of the CPU": lambda losses: max(losses.values()) < 1e-3
    },
    "weights": {
        **PULL,
        "published weights are copied once": lambda weights: (
            weights["publish_copies"] == weights["tensors"]
            and weights["host_bytes"] == weights["tensor_bytes"]
        ),
        "no other stream of the GPU is waited for": lambda weights: weights["publish_waits"] == 0,
    },
    "adapters": {
        **PULL,
        "pulled adapters are merged on the GPU": lambda pull: pull["merged on"] == ["simgpu"],
    },
    "resharding": {
        "resharding on a GPU copies what ranks tell each other to the CPU, and no weights": (
            lambda stats: stats == {"is_planned": True, "host_copies": 1, "difference": 0.0}
        )
    },
    "served on the CPU": {
        "resharding between devices is not planned": lambda stats: not stats["is_planned"]
    },
    "batch on the CPU": {
        "a batch left on the CPU is found": lambda error: error.startswith("aten::embedding")
    },
    "column on the CPU": {
        "a column left on the CPU is found": lambda error: error.startswith("aten::where")
    },
    "deepspeed": {
        "DeepSpeed trains in bfloat16 on the GPU": lambda training: (
            len(training["norms"]) == 2
            and min(training["norms"]) > 0
            and training["devices"] == ["simgpu"]
        ),
        ONE_COPY: lambda training: training["host_copies"] == [2, 2],
    },
    "maths": AS_ON_CPU,
    "reward model": AS_ON_CPU,
    "sliding window": AS_ON_CPU,
    "experts": {
        "a mixture is saved with the buffers of its routers": lambda saved: (
            saved["buffers"] > 0 and saved["difference"] == 0 and saved["written"] == ["cpu"]
        )
    },
    "FSDP2": RANKS,
    "ZeRO 3": RANKS,
    "sequence parallel": RANKS,
    "ranks that score": RANKS,
    "resharding ranks": {
        "resharding between ranks moves every byte": lambda ranks: all(
            moved["exact"] and moved["received"] > 0 for rank in ranks for moved in rank
        )
    },
    "broadcasts": {
        "once both are members, versions and slices are broadcast": lambda outcomes: (
            outcomes[1:] == [(True, None)] * 4
        )
    },
    "worker": {
        **PLACED,
        "what a worker has loaded is compared on the GPU": lambda load: (
            load["compared"] > 0
            and not load["differing"]
            and load["host_bytes"] < load["bytes"] / 2
        ),
        "a worker's parameters are found by their values": lambda load: load["bound"],
    },
    "slices": {
        "slices reach the model on the GPU, and are compared": lambda load: (
            load["compared"] > 0
            and (load["difference"], load["differing"], load["bytes"]) == (0.0, [], 0)
        )
    },
    "peer": PLACED,
    "engine": PLACED,
    "pieces": {
        "parameters are found by their values": lambda pieces: (
            pieces == {"found": 2, "of other values": 0}
        )
    },
    "pinning": {
        "after a failure to pin memory the GPU computes": lambda pinning: (
            pinning == {"pinned": False, "sum": 3.0}
        )
    },
}


def list_broken_claims(area: str, result: Any) -> list[str]:
    return [claim for claim, holds in CLAIMS[area].items() if not holds(result)]
