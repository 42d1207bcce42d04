"""Environment variables that vLLM and torch read at import."""

MODEL_RUNNERS = {"cpu": "V1", "cuda": "V2"}
"""vLLM's model runner by device.

Pinned: otherwise vLLM falls back to V1, which samples and preempts with other code, where Triton is
missing or V2 lacks a feature.
"""


def make_vllm_env(device: str, *, threads: int = 1) -> dict[str, str]:
    """Return the environment variables to set before importing torch and vLLM.

    `device` is "cpu" or "cuda". `threads` is GeneratorConfig.threads, which takes effect only
    through OMP_NUM_THREADS.
    """
    env = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_V2_MODEL_RUNNER": str(int(MODEL_RUNNERS[device] == "V2")),
        # vLLM would configure the loggers of the whole process, in 0.5 s. `build_vllm_engine`
        # configures vLLM's own logger.
        "VLLM_CONFIGURE_LOGGING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": str(threads),
    }
    if device == "cpu":
        # vLLM compiles one function of the sampler even in eager mode: 20 s in the C++ compiler.
        env["TORCHDYNAMO_DISABLE"] = "1"
        # vLLM would bind the processes of a tensor-parallel engine to cores that are in use.
        env["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    return env
