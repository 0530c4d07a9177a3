"""Trials as jobs of Slurm, by submitit: ``--executor examples/slurm_executor.py:make_executor``.

A study hands its trials to any ``concurrent.futures.Executor``. submitit's jobs are no futures, so
a thread waits for each. Without Slurm the jobs are processes of this machine, as when this file is
run itself.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import submitit

JOBS = 8  # at a time


class Jobs(ThreadPoolExecutor):
    """Each call is a job; jobs that still run when the study stops are cancelled."""

    def __init__(self, cluster: submitit.AutoExecutor, at_a_time: int) -> None:
        super().__init__(at_a_time)
        self.cluster, self.running = cluster, set()

    def submit(self, call: Callable[..., Any], /, *arguments: Any, **options: Any) -> Future:
        """Sends a call to the cluster."""

        def attempt() -> tuple[Any, Exception | None]:
            # submitit would hand over an error as text.
            try:
                return call(*arguments, **options), None
            except Exception as error:
                return None, error

        def wait() -> Any:
            job = self.cluster.submit(attempt)
            self.running.add(job)
            result, error = job.result()
            self.running.discard(job)
            if error is not None:
                raise error
            return result

        return super().submit(wait)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Ends the threads, and the jobs that they wait for."""
        for job in [*self.running] if cancel_futures else []:
            job.cancel(check=False)
        super().shutdown(wait, cancel_futures=cancel_futures)


def make_executor() -> Jobs:
    """What ``--executor`` calls."""
    cluster = submitit.AutoExecutor(folder="slurm-logs/%j")
    # On GPUs: gpus_per_node=1. As the cluster wants: slurm_partition=..., slurm_account=...
    cluster.update_parameters(timeout_min=240, cpus_per_task=4)
    return Jobs(cluster, JOBS)


if __name__ == "__main__":
    with make_executor() as executor:
        print(sorted(executor.map(abs, range(-3, 1))), "from jobs")
