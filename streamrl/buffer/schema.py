"""What the stages of a queue have declared, and whether callers keep to it."""

from collections.abc import Mapping, Sequence

from streamrl.buffer.config import StageSchema
from streamrl.buffer.wire_types import ColumnCommit
from streamrl.errors import ContractError
from streamrl.messages import ColumnAxis, GroupInfo, check_column_sizes, get_column_spec


class ColumnContract:
    """The columns that each stage needs and makes. All methods raise ContractError."""

    def __init__(self, stages: Mapping[str, StageSchema]) -> None:
        self._required_columns = {stage: frozenset(ports.needs) for stage, ports in stages.items()}
        self._produced_columns = {
            stage: frozenset(ports.produces) for stage, ports in stages.items()
        }
        everything = frozenset[str]().union(*self._produced_columns.values())
        self._foreign_columns = {
            stage: everything - own for stage, own in self._produced_columns.items()
        }

    def check_request(self, stage: str, columns: Sequence[str]) -> None:
        """A stage takes no columns but those it needs."""
        if alien := set(columns) - self._get_columns(self._required_columns, stage):
            raise ContractError(f"stage {stage} takes {sorted(alien)}: not what it needs")

    def check_commit(self, commit: ColumnCommit, info: GroupInfo | None) -> None:
        """A stage puts the columns it declared, and none of another's, in the group's sizes."""
        stage, uid, names = commit.lease.stage, commit.lease.uid, commit.column_sizes.keys()
        if not names >= self._get_columns(self._produced_columns, stage):
            missing = sorted(self._produced_columns[stage] - names)
            raise ContractError(f"stage {stage} put no {missing} for {uid}")
        if not names.isdisjoint(self._foreign_columns[stage]):
            foreign = sorted(names & self._foreign_columns[stage])
            raise ContractError(f"stage {stage} put {foreign} for {uid}: not its own")
        if info is None:
            if early := sorted(n for n in names if get_column_spec(n).axis is not ColumnAxis.GROUP):
                raise ContractError(f"stage {stage} put {early} for {uid} before its rollouts")
            return
        if not info.version_tokens:
            raise ContractError(f"group {uid}: no token of it was sampled (loss_mask)")
        if info.min_version < 0:
            raise ContractError(f"group {uid}: a sampled token has no policy_version")
        if min(info.lengths, default=0) < 1:
            shortest = min(info.lengths, default=0)
            raise ContractError(f"group {uid}: a rollout of {shortest} tokens (lengths)")
        check_column_sizes(commit.column_sizes, info)

    def _get_columns(self, columns: Mapping[str, frozenset[str]], stage: str) -> frozenset[str]:
        if stage not in columns:
            raise ContractError(f"stage {stage}: this queue has {', '.join(columns)}")
        return columns[stage]
