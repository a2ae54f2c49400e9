"""How are this step's tokens computed?

Importing this package brings in no torch: whoever computes imports `engine.runner_factory`, and
whoever only schedules, or simulates, does without.
"""

from engine.active_job import ActiveJob
from engine.engine_config import EngineConfig, KernelsChoice, Quantization
from engine.handoff_role import HandoffRole
from engine.host import EngineHost
from engine.kv_cache_config import NULL_BLOCK_ID, KVCacheConfig, blocks_within
from engine.local_node import LocalNode
from engine.loop import Engine, LaunchingRunner, StepHandle, StepResult, StepRunner
from engine.pipelined import PipelinedEngine
from engine.publisher import Listener
from engine.role_change import RoleChange
from engine.role_policy import RolePolicy

__all__ = [
    "NULL_BLOCK_ID",
    "ActiveJob",
    "Engine",
    "EngineConfig",
    "EngineHost",
    "HandoffRole",
    "KVCacheConfig",
    "KernelsChoice",
    "LaunchingRunner",
    "Listener",
    "LocalNode",
    "PipelinedEngine",
    "Quantization",
    "RoleChange",
    "RolePolicy",
    "StepHandle",
    "StepResult",
    "StepRunner",
    "blocks_within",
]
