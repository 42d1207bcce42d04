"""Cost of a new version of the weights: `python -m benchmarks.weights` prints one JSON object.

Per size (millions of float32 parameters), transport and number of generators, medians over some
versions, in seconds. With idle engines:

- publish_s: in the publisher;
- transfer_s: fetch and verify in a generator; load_s: load into vLLM (slowest generator);
- end_to_end_s: from the call to publish until all generators use the version;
- memcpy_s: copy of the same bytes into warm memory in the publisher.

`split` is one generator of two vLLM processes, each of which maps the buckets of a transport and
reads its own slices, or with `collective` receives them alone: rank_bytes that each has read,
planned_bytes of the plan, and publish_s_per_gb, load_s_per_gb and pull_s_per_gb (transfer and load)
beside memcpy_s_per_gb of the same run.

Then with running rollouts: pause_s in which an engine decodes nothing, and decode_step_s, the time
of a decode step.
"""

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import ray

from benchmarks.actors import start_actor, wait_for_all
from benchmarks.command import BenchmarkParser, at_least, report_progress, run_benchmark
from benchmarks.random_model import SHAPES, write_model
from benchmarks.weights_actors import BenchmarkGenerator, BenchmarkPublisher
from streamrl.actors.launch.ray_cluster import connect_cluster
from streamrl.actors.transport.ray_calls import fetch_reply
from streamrl.engines.vllm.environment import make_vllm_env
from streamrl.placement.config import PlacementConfig
from streamrl.weights.config import AUTO, TRANSPORTS

WARM_UP_VERSIONS = 3
"""Versions until buffers are used for the second time."""

SPLIT_RANKS = 2
STORE_VERSIONS = 5
OTHERS_MB = 512
START_S = 300.0
CALL_S = 120.0
"""Longer than a transport's own timeout, so that its error comes first."""


def make_parser() -> BenchmarkParser:
    """Declare sizes, transports and numbers of generators."""
    parser = BenchmarkParser("weights", __doc__)
    transports = [name for name in TRANSPORTS if name != AUTO]
    parser.add_argument("--sizes", nargs="+", type=int, default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--transports", nargs="+", default=transports, choices=transports)
    parser.add_argument("--generators", nargs="+", type=at_least(1), default=[1, 2])
    parser.add_argument(
        "--versions", type=at_least(1), default=3, help="measured versions per combination"
    )
    parser.set_quick(sizes=[1], generators=[1], versions=1)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the selection and print the results."""
    run_benchmark(make_parser(), measure, argv)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure every size."""
    return {f"{size}M": measure_size(size, arguments) for size in arguments.sizes}


def measure_size(millions: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure all transports and numbers of generators for one model size."""
    store_mb = OTHERS_MB + STORE_VERSIONS * 4 * millions
    placement = PlacementConfig(cpus=8, object_store_mb=store_mb)
    with tempfile.TemporaryDirectory() as folder, connect_cluster(placement):
        model = write_model(millions, Path(folder) / "model")
        publisher = start_actor(BenchmarkPublisher, millions, num_cpus=1)
        env = {"env_vars": make_vllm_env("cpu")}
        names = [f"generator-{i}" for i in range(max(arguments.generators))]
        readers = {n: start_actor(BenchmarkGenerator, num_cpus=1, runtime_env=env) for n in names}
        report_progress(f"{millions}M: starting {len(readers)} vLLM engines")
        starts = [reader.start.remote(name, model) for name, reader in readers.items()]
        wait_for_all(starts, "start of the engines", timeout_s=START_S)
        versions = itertools.count()
        num_bytes = fetch_reply(publisher.num_bytes.remote(), "publisher.num_bytes")
        results: dict[str, Any] = {"bytes": num_bytes}
        for transport in arguments.transports:
            results[transport] = {}
            for number in arguments.generators:
                some = dict(list(readers.items())[:number])
                fetch_reply(
                    publisher.set_transport.remote(transport, list(some)),
                    "publisher.set_transport",
                )
                changes = [reader.set_transport.remote(transport) for reader in some.values()]
                wait_for_all(changes, f"readers of {transport}", timeout_s=CALL_S)
                figures = measure_transport(
                    publisher, list(some.values()), versions, arguments.versions
                )
                results[transport][f"generators_{number}"] = figures
                report_progress(f"{millions}M {transport} to {number}: {figures}")
        for reader in readers.values():
            ray.kill(reader)
        results["split"] = measure_split(publisher, model, versions, arguments)
        fetch_reply(publisher.end.remote(), "publisher.end")
    return results


def measure_split(
    publisher: Any, model: str, versions: Iterator[int], arguments: argparse.Namespace
) -> dict[str, Any]:
    """Return medians of an idle generator of SPLIT_RANKS processes, by transport."""
    name, env = "split-generator", {"env_vars": make_vllm_env("cpu")}
    reader = start_actor(BenchmarkGenerator, num_cpus=1, runtime_env=env)
    wait_for_all([reader.start.remote(name, model, SPLIT_RANKS)], name, timeout_s=START_S)
    gigabytes = fetch_reply(publisher.num_bytes.remote(), "publisher.num_bytes") / 1e9
    results: dict[str, Any] = {}
    for transport in arguments.transports:
        fetch_reply(publisher.set_transport.remote(transport, [name]), "publisher.set_transport")
        wait_for_all([reader.set_transport.remote(transport)], name, timeout_s=CALL_S)
        for _ in range(WARM_UP_VERSIONS):
            measure_version(publisher, [reader], next(versions))
            layouts = fetch_reply(reader.list_layouts.remote(), f"{name}.list_layouts")
            fetch_reply(publisher.set_readers.remote({name: layouts}), "publisher.set_readers")
        rows = [
            measure_version(publisher, [reader], next(versions)) for _ in range(arguments.versions)
        ]
        medians = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
        results[transport] = {
            **medians,
            **fetch_reply(reader.count_rank_bytes.remote(), f"{name}.count_rank_bytes"),
            "publish_s_per_gb": medians["publish_s"] / gigabytes,
            "load_s_per_gb": medians["load_s"] / gigabytes,
            "pull_s_per_gb": (medians["transfer_s"] + medians["load_s"]) / gigabytes,
            "memcpy_s_per_gb": medians["memcpy_s"] / gigabytes,
        }
        report_progress(f"{round(gigabytes * 250)}M split {transport}: {results[transport]}")
    return results


def measure_transport(
    publisher: Any, readers: Sequence[Any], versions: Iterator[int], number: int
) -> dict[str, float]:
    """Return medians over `number` versions with idle engines, and as many with running
    rollouts."""
    for _ in range(WARM_UP_VERSIONS):
        measure_version(publisher, readers, next(versions))
    rows = [measure_version(publisher, readers, next(versions)) for _ in range(number)]
    results = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    results["end_to_end_over_memcpy"] = results["end_to_end_s"] / results["memcpy_s"]
    decoding = [reader.start_decoding.remote() for reader in readers]
    wait_for_all(decoding, "generators that begin to decode", timeout_s=CALL_S)
    busy = [measure_version(publisher, readers, next(versions)) for _ in range(number)]
    results["pause_s"] = statistics.median(row["pause_s"] for row in busy)
    resting = [reader.stop_decoding.remote() for reader in readers]
    steps = wait_for_all(resting, "generators that end decoding", timeout_s=CALL_S)
    results["decode_step_s"] = statistics.median(steps)
    results["end_to_end_decoding_s"] = statistics.median(row["end_to_end_s"] for row in busy)
    return results


def measure_version(publisher: Any, readers: Sequence[Any], version: int) -> dict[str, float]:
    """Publish a version and load it in all readers; the slowest reader counts."""
    name = f"version {version}"
    manifest, publish_s, memcpy_s = fetch_reply(
        publisher.publish.remote(version), f"publish of {name}"
    )
    published = time.perf_counter()
    pulls = [reader.pull.remote(manifest) for reader in readers]
    rows = wait_for_all(pulls, f"readers of {name}", timeout_s=CALL_S)
    # Exclude the publisher's work for the measurement itself.
    end_to_end_s = publish_s + time.perf_counter() - published
    slowest = {name: max(row[name] for row in rows) for name in rows[0]}
    return {"memcpy_s": memcpy_s, "publish_s": publish_s, **slowest, "end_to_end_s": end_to_end_s}


if __name__ == "__main__":
    main()
