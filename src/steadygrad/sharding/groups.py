"""New process groups that only their members have to make."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

__all__ = ["group_of"]


def group_of(
    ranks: Sequence[int], spanning: Sequence[dist.ProcessGroup | None]
) -> dist.ProcessGroup:
    """Makes a new process group; all of its members call this, and no other process.

    torch names such a group by its ranks and by the number of groups that this process is in. Where
    that differs between the members (a group for rank 0 alone, the stages of a pipeline), each
    would wait for the others under a name of its own, for good. So they agree on the greatest
    number, and who is in fewer groups makes some of one process until it is in as many.

    Args:
        ranks: Members of the group.
        spanning: Groups that they all have, such that a maximum taken over one after the other
            reaches every member; None is the default group.
    """
    count = greatest = len(dist.distributed_c10d._world.pg_names)
    for group in spanning:
        device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
        number = torch.tensor([greatest], device=device)
        dist.all_reduce(number, dist.ReduceOp.MAX, group=group)
        greatest = int(number)
    for _ in range(greatest - count):
        dist.new_group([dist.get_rank()], use_local_synchronization=True)
    made = dist.new_group(list(ranks), use_local_synchronization=True)
    assert isinstance(made, dist.ProcessGroup)  # only members get here
    return made
