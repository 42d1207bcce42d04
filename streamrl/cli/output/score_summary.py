"""Summary that `streamrl score` prints: counts, means, times, failures."""

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np


def format_score_summary(
    lines: Sequence[Mapping[str, Any]],
    sources: Sequence[str],
    counts: Mapping[str, int],
    seconds: float,
) -> list[str]:
    """Format mean scores, outcomes, times and failures of scored completions as lines of text.

    lines: JSON lines of the completions. sources: data source of each completion. counts:
    completions by outcome and killed processes by cause, from `RewardSet.drain_counts`. seconds:
    duration of the command.
    """
    scored = [line for line in lines if line["score"] is not None]
    rows = {
        f"{len(lines)} completions": f"in {seconds:.1f} s: "
        + _format_counts(line["verdict"] for line in lines)
    }
    if scored:
        rows["score"] = f"mean {_format_mean(line['score'] for line in scored)}"
        for name in scored[0]["components"]:
            scores = (line["components"][name] for line in scored)
            mean = _format_mean(score for score in scores if score is not None)
            rows[f"reward/{name}"] = f"mean {mean}: " + _format_counts(
                line["verdicts"][name] for line in scored
            )
            rows |= _summarize_numbers(
                name, [line.get("numbers", {}).get(name, {}) for line in scored]
            )
        if "cost" in scored[0]:
            rows["cost"] = f"mean {_format_mean(line['cost'] for line in scored)}"
            for name in scored[0]["costs"]:
                scores = (line["costs"][name] for line in scored)
                rows[f"cost/{name}"] = (
                    f"mean {_format_mean(score for score in scores if score is not None)}"
                )
    if len(set(sources)) > 1:
        rows |= _summarize_sources(lines, sources)
    rows["seconds"] = _format_seconds(lines)
    kills = {cause: count for cause, count in counts.items() if cause.startswith("scorer/")}
    rows |= {cause: f"{count} processes" for cause, count in kills.items()}
    failed = [line for line in lines if line["score"] is None]
    if failed:
        causes = _format_counts(line["cause"] for line in failed)
        rows["not scored"] = f"{causes}; first: {failed[0]['error']}"
    width = max(map(len, rows))
    return [f"{name:<{width}}  {text}" for name, text in rows.items()]


def _summarize_numbers(component: str, records: Sequence[Mapping[str, float]]) -> dict[str, str]:
    """Return the mean of each extra number of a component; `records` has one per completion."""
    names = dict.fromkeys(name for record in records for name in record)
    return {
        f"reward/{component}/{name}": f"mean"
        f" {_format_mean(record[name] for record in records if name in record)}"
        for name in names
    }


def _summarize_sources(
    lines: Sequence[Mapping[str, Any]], sources: Sequence[str]
) -> dict[str, str]:
    rows = {}
    for source in dict.fromkeys(sources):
        subset = [line for line, name in zip(lines, sources, strict=True) if name == source]
        scored = [line["score"] for line in subset if line["score"] is not None]
        words = _format_counts(line["verdict"] for line in subset)
        rows[f"source {source or '(none)'}"] = f"mean {_format_mean(scored)}: {words}"
    return rows


def _format_seconds(lines: Sequence[Mapping[str, Any]]) -> str:
    """Format percentiles over groups; all completions of a group share the same time."""
    times = {line["index"]: line["seconds"] for line in lines}
    p50, p99 = np.percentile(list(times.values()), [50, 99])
    slowest = max(times, key=lambda index: times[index])
    return (
        f"per group, queueing included: p50 {p50:.3f}, p99 {p99:.3f};"
        f" slowest {times[slowest]:.3f}, index {slowest}"
    )


def _format_mean(values: Iterable[float]) -> str:
    items = list(values)
    return f"{statistics.fmean(items):.4f}" if items else "none"


def _format_counts(words: Iterable[str]) -> str:
    """Format the number of occurrences of each word, most frequent word first."""
    return ", ".join(f"{word} {count}" for word, count in Counter(words).most_common())
