"""Local shards and packed sums: all that the tools need of torch.distributed.

Everything here also works without a process group, where a sum over ranks is the value itself.
"""

from steadygrad.sharding.packed_sum import PackedSum
from steadygrad.sharding.partial_gradients import PartialGradients
from steadygrad.sharding.processes import check_gloo, join_processes, leave_processes
from steadygrad.sharding.rank_sum import RankSum
from steadygrad.sharding.shard_sum import ShardSum
from steadygrad.sharding.shards import (
    aligned,
    first_shard,
    is_on_mesh_of,
    is_sharded,
    local,
    shared_out,
)
from steadygrad.sharding.whole import (
    load_model_state,
    load_optimizer_state,
    shard_model,
    whole_states,
)
from steadygrad.sharding.worlds import (
    World,
    data_parallel_world,
    fsdp_modules,
    gather_json,
    process_world,
    replicas,
)
from steadygrad.sharding.zero_sum import ZeroSum

__all__ = [
    "PackedSum",
    "PartialGradients",
    "RankSum",
    "ShardSum",
    "World",
    "ZeroSum",
    "aligned",
    "check_gloo",
    "data_parallel_world",
    "first_shard",
    "fsdp_modules",
    "gather_json",
    "is_on_mesh_of",
    "is_sharded",
    "join_processes",
    "leave_processes",
    "load_model_state",
    "load_optimizer_state",
    "local",
    "process_world",
    "replicas",
    "shard_model",
    "shared_out",
    "whole_states",
]
