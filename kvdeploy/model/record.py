"""What kvdeploy remembers of a cluster between runs. A cache, never the truth: processes,
Terraform's state and nodes are asked before it is believed.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field

from kvdeploy.model.base import Stored
from kvdeploy.model.infra import ClusterIdentity
from kvdeploy.model.spec import ClusterSpec

SCHEMA = 1


class StageRecord(Stored):
    digest: str
    result: dict[str, Any]


class Record(Stored):
    schema_version: int = SCHEMA
    cluster: str
    target: str = "local"
    kvdeploy_version: str = ""
    spec: ClusterSpec | None = None
    """What was last asked for."""
    identity: ClusterIdentity | None = None
    """Of a cluster on AWS; written before anything is made."""
    generations: dict[str, int] = Field(default_factory=dict)
    """How often each node was replaced on purpose, and one."""
    stages: dict[str, StageRecord] = Field(default_factory=dict)

    def with_stage(self, name: str, stage: StageRecord) -> Record:
        return self.model_copy(update={"stages": {**self.stages, name: stage}})

    def without_stages(self, *names: str) -> Record:
        kept = {k: v for k, v in self.stages.items() if k not in names}
        return self.model_copy(update={"stages": kept})
