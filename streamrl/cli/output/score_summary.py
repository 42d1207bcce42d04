"""What `streamrl score` says of all completions together."""

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np


def summarize_scores(
    lines: Sequence[Mapping[str, Any]],
    sources: Sequence[str],
    counts: Mapping[str, int],
    seconds: float,
) -> list[str]:
    """The lines a person reads. `sources` has the data source of each completion.

    `counts` is what RewardSet.drain_counts gives.
    """
    scored = [line for line in lines if line["score"] is not None]
    rows = {
        f"{len(lines)} completions": f"in {seconds:.1f} s: "
        + _format_counts(line["verdict"] for line in lines)
    }
    if scored:
        rows["score"] = f"mean {_format_mean(line['score'] for line in scored)}"
        for name in scored[0]["components"]:
            said = (line["components"][name] for line in scored)
            mean = _format_mean(one for one in said if one is not None)
            rows[f"reward/{name}"] = f"mean {mean}: " + _format_counts(
                line["verdicts"][name] for line in scored
            )
            rows |= _summarize_numbers(
                name, [line.get("numbers", {}).get(name, {}) for line in scored]
            )
        if "cost" in scored[0]:
            rows["cost"] = f"mean {_format_mean(line['cost'] for line in scored)}"
            for name in scored[0]["costs"]:
                said = (line["costs"][name] for line in scored)
                rows[f"cost/{name}"] = (
                    f"mean {_format_mean(one for one in said if one is not None)}"
                )
    if len(set(sources)) > 1:
        rows |= _summarize_sources(lines, sources)
    rows["seconds"] = _format_seconds(lines)
    ended = {cause: count for cause, count in counts.items() if cause.startswith("scorer/")}
    rows |= {cause: f"{count} processes" for cause, count in ended.items()}
    failed = [line for line in lines if line["score"] is None]
    if failed:
        causes = _format_counts(line["cause"] for line in failed)
        rows["not scored"] = f"{causes}; the first: {failed[0]['error']}"
    width = max(map(len, rows))
    return [f"{name:<{width}}  {text}" for name, text in rows.items()]


def _summarize_numbers(component: str, found: Sequence[Mapping[str, float]]) -> dict[str, str]:
    """The mean of every number that a reward gives besides its score."""
    names = dict.fromkeys(name for numbers in found for name in numbers)
    return {
        f"reward/{component}/{name}": f"mean"
        f" {_format_mean(one[name] for one in found if name in one)}"
        for name in names
    }


def _summarize_sources(
    lines: Sequence[Mapping[str, Any]], sources: Sequence[str]
) -> dict[str, str]:
    rows = {}
    for source in dict.fromkeys(sources):
        own = [line for line, of in zip(lines, sources, strict=True) if of == source]
        scored = [line["score"] for line in own if line["score"] is not None]
        words = _format_counts(line["verdict"] for line in own)
        rows[f"source {source or '(none)'}"] = f"mean {_format_mean(scored)}: {words}"
    return rows


def _format_seconds(lines: Sequence[Mapping[str, Any]]) -> str:
    """Of groups, each of which has one time."""
    times = {line["index"]: line["seconds"] for line in lines}
    middle, late = np.percentile(list(times.values()), [50, 99])
    slowest = max(times, key=lambda index: times[index])
    return (
        f"a group, waiting included: p50 {middle:.3f}, p99 {late:.3f};"
        f" the slowest {times[slowest]:.3f}, index {slowest}"
    )


def _format_mean(values: Iterable[float]) -> str:
    found = list(values)
    return f"{statistics.fmean(found):.4f}" if found else "none"


def _format_counts(words: Iterable[str]) -> str:
    return ", ".join(f"{word} {count}" for word, count in Counter(words).most_common())
