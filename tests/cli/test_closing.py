"""End of a run on a full disk: the original failure is reported first."""

from collections.abc import Mapping

import pytest

from streamrl.cli.run_setup.training import _close_sinks_at_exit
from streamrl.errors import DiskError, RewardError
from streamrl.telemetry.sink_group import SinkGroup


class FullDiskSinks(SinkGroup):
    """Sinks that fail with a full disk."""

    def __init__(self) -> None:
        super().__init__([])
        self.summary: Mapping[str, object] = {}

    def close(self, summary: Mapping[str, str | int | float | bool]) -> None:
        self.summary = dict(summary)
        raise DiskError("events.jsonl cannot be written: No space left on device")


def test_a_full_disk_on_close_does_not_hide_the_failure_of_the_run():
    sinks = FullDiskSinks()
    with (
        pytest.raises(RewardError, match="no verdict"),
        _close_sinks_at_exit(sinks, {"outcome": "failed"}),
    ):
        raise RewardError("no verdict")
    assert sinks.summary == {"outcome": "failed"}


def test_a_full_disk_on_close_of_a_successful_run_is_reported():
    with pytest.raises(DiskError, match="No space left"), _close_sinks_at_exit(FullDiskSinks(), {}):
        pass
