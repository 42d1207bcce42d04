"""The environment that vLLM reads when it is imported."""


def make_vllm_env(device: str, *, threads: int = 1) -> dict[str, str]:
    """Environment a process needs before it imports torch; `device` is "cpu" or "cuda".

    `threads` is GeneratorConfig.threads, which has no effect but through here. Raises ValueError on
    another device.
    """
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device {device!r}: must be cpu or cuda")
    env = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # vLLM would configure all loggers of the process, in half a second; see
        # `build_vllm_engine`.
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
        # It would bind the processes of a split engine to cores that others compute on.
        env["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    return env
