"""Cost of a large data set: `python -m benchmarks.data` prints one JSON object.

The benchmark generates rows as JSONL and parquet. A separate process per format measures:

- seconds until the driver has checked the run, and once more with parquet unpacked and in the page
  cache;
- memory of that check, without libraries;
- bytes of the data stream sent to the coordinator;
- seconds to the coordinator's first 64 prompts, and prompts per second after these.

For the first format, also the rows per second of `data check`.
"""

import argparse
import json
import os
import pickle
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.command import (
    BenchmarkParser,
    at_least,
    report_progress,
    run_benchmark,
    run_command,
)
from benchmarks.random_model import write_model

FORMATS = ("jsonl", "parquet")
FIRST, MORE = 64, 2048
LONGEST_S = 600.0
BATCH = 10_000
RECIPE = """
model: {{path: {folder}/model}}
data: {{train: {{path: {path}, label_key: answer}}}}
rewards: [{{kind: exact}}]
algorithm: {{group_size: 4}}
pipeline: {{groups_per_step: 4, micro_batch_tokens: 1024}}
generator: {{max_new_tokens: 16}}
"""
Row = dict[str, str]


def make_parser() -> BenchmarkParser:
    """Declare the number of rows and the formats."""
    parser = BenchmarkParser("data", __doc__)
    parser.add_argument("--rows", type=at_least(1), default=1_000_000)
    parser.add_argument("--formats", choices=FORMATS, nargs="+", default=list(FORMATS))
    parser.set_quick(rows=20_000)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    run_benchmark(make_parser(), measure, argv)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Write the rows in each format and measure each in a process of its own."""
    results: dict[str, Any] = {"rows": arguments.rows}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["HF_DATASETS_CACHE"] = str(folder / "cache")
        write_model(1, folder / "model")
        for kind in arguments.formats:
            report_progress(f"{arguments.rows:,} rows of {kind}")
            path = folder / f"rows.{kind}"
            WRITERS[kind](path, make_rows(arguments.rows))
            results[kind] = {"mb": path.stat().st_size / 1e6}
            for part in (_start, _check) if kind == arguments.formats[0] else (_start,):
                program = f"import sys, benchmarks.data as b; b.{part.__name__}(*sys.argv[1:])"
                words = [sys.executable, "-c", program, str(folder), str(path)]
                lines = run_command(words, f"reading {kind}", timeout_s=LONGEST_S)
                results[kind] |= json.loads(lines.splitlines()[-1])
            path.unlink()
    return results


def make_rows(count: int) -> Iterator[Row]:
    """Make distinct rows of about 300 bytes."""
    words = [f"t{i}" for i in range(4, 64)]
    for i in range(count):
        text = " ".join(words[(i * k + k) % len(words)] for k in range(1, 30 + i % 20))
        yield {"id": str(i), "data_source": "made", "prompt": text, "answer": words[i % 60]}


def write_jsonl(path: Path, rows: Iterator[Row]) -> None:
    with path.open("w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def write_parquet(path: Path, rows: Iterator[Row]) -> None:
    """Write columns in row groups of some thousand rows."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    batch = pa.RecordBatch.from_pylist(list(islice(rows, BATCH)))
    with pq.ParquetWriter(path, batch.schema) as writer:
        while batch.num_rows:
            writer.write_batch(batch)
            batch = pa.RecordBatch.from_pylist(list(islice(rows, BATCH)), schema=batch.schema)


WRITERS: dict[str, Callable[[Path, Iterator[Row]], None]] = {
    "jsonl": write_jsonl,
    "parquet": write_parquet,
}


def _start(folder: str, path: str) -> None:
    """Check a run on the file as the driver does, then draw prompts as the coordinator does."""
    from streamrl.config.preflight import prepare_run
    from streamrl.config.run_config import load_config

    recipe = Path(folder) / "recipe.yaml"
    recipe.write_text(RECIPE.format(folder=folder, path=path))
    config = load_config(recipe)
    small = Path(folder) / "small.jsonl"
    write_jsonl(small, make_rows(8))
    # Warm up with a run of eight rows: loads the tokenizer and starts reward processes.
    prepare_run(load_config(recipe, [f"data.train={{path: {small}, label_key: answer}}"]))
    before_mb, began = _peak_mb(), time.perf_counter()
    prepared = prepare_run(config)
    seconds, memory_mb = time.perf_counter() - began, _peak_mb() - before_mb
    began = time.perf_counter()
    prepare_run(config)
    again = time.perf_counter() - began
    sent = pickle.dumps(prepared.prompts)
    began = time.perf_counter()
    stream = pickle.loads(sent)
    stream.draw_prompts(FIRST)
    first = time.perf_counter() - began
    began = time.perf_counter()
    stream.draw_prompts(MORE)
    rate = MORE / (time.perf_counter() - began)
    results = {"check_s": seconds, "check_again_s": again, "driver_mb": memory_mb}
    results |= {"sent_mb": len(sent) / 1e6, "first_prompts_s": first, "prompts_per_s": rate}
    print(json.dumps(results))


def _check(folder: str, path: str) -> None:
    """Read every row as `streamrl data check` does."""
    from streamrl.cli.data import validate_file
    from streamrl.data.chat_template import load_tokenizer
    from streamrl.data.config import parse_data_files
    from streamrl.data.prompt_file import PromptLimits
    from streamrl.files.hf_config import read_vocab_size

    model = f"{folder}/model"
    entry = {"path": path, "label_key": "answer"}
    (file,) = parse_data_files(entry, key="FILE")
    tokenizer, limits = load_tokenizer(model), PromptLimits(256, read_vocab_size(model))
    before_mb, began = _peak_mb(), time.perf_counter()
    report = validate_file(file, tokenizer, limits)
    seconds = time.perf_counter() - began
    assert not report.num_bad, report.problems[:3]
    rate, memory_mb = report.num_rows / seconds, _peak_mb() - before_mb
    print(json.dumps({"data_check_rows_per_s": rate, "data_check_mb": memory_mb}))


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


if __name__ == "__main__":
    main()
