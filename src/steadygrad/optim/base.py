"""What both optimizers share: the life of a step.

A step is a few passes over plain local tensors with a packed sum over shards after each. Everything
it decides it decides on the device: nothing here reads a tensor.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor

from steadygrad import kernels
from steadygrad._checks import check_count, check_number
from steadygrad.kernels import choose_mode, give_up, warn_about
from steadygrad.optim.diagnostics import Report
from steadygrad.optim.leaves import Leaves, Scaling, buckets_of, local_grads
from steadygrad.optim.masters import follow_dtype, working_weight, write_back
from steadygrad.optim.packed_sums import PackedSums
from steadygrad.optim.state import StatefulOptimizer

if TYPE_CHECKING:
    from steadygrad.optim.device_choice import DeviceSteps
    from steadygrad.optim.device_job import DeviceJob
    from steadygrad.optim.plan import Plan

__all__ = ["ShardedOptimizer"]


class ShardedOptimizer(StatefulOptimizer):
    """An optimizer whose norms are those of whole tensors, however they are sharded.

    A subclass says what its state is and how a step goes; this class keeps torch's contract.

    Attributes:
        skipped: Steps left out because a gradient was not finite, a tensor.
    """

    # A GradScaler then hands over its scale and what it found, and does not wait for the device.
    _step_supports_amp_scaling = True
    _packed_sums: PackedSums | None = None
    _plans: "dict[int, Plan] | None" = None
    # States with the parameter's shape and small ones, as the kernels named here take them.
    _large: tuple[str, str]
    _small: tuple[str, ...]
    _kernels: tuple[str, ...]
    # Whether the first of them takes sums over weights too, in some steps.
    _early_sums = False
    # Name of the class that drives kernels for accelerators.
    _device_job: str
    _device_steps: "DeviceSteps | None" = None
    # Whether a parameter without a gradient, unless it is frozen, takes part as if it were zero.
    _none_is_zero = False

    @property
    def skipped(self) -> Tensor:
        """Steps left out because a gradient was not finite, with shape ``()``."""
        self._fill_state()
        first = next((p for group in self.param_groups for p in group["params"]), None)
        return torch.zeros(()) if first is None else self.state[first]["skipped"]

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Takes one step.

        If any gradient is not finite, on any process, no weight and no state moves, and the step
        is counted in ``skipped``.

        Args:
            closure: Evaluates the model again and returns the loss.

        Returns:
            What the closure returned.
        """
        self._check_capture()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._fill_state()
        for group in self.param_groups:
            self._check_state(group)
        job = self._ready_job()
        if job is None:
            self._step_by_parts()
        elif job.look(getattr(self, "found_inf", None), getattr(self, "grad_scale", None)):
            over_shards = self._sums_over(job.params) if job.sharded else None
            job.step(over_shards, Scaling(None, getattr(self, "found_inf", None)))
        return loss

    def _check_state(self, group: Mapping[str, Any]) -> None:
        """Refuses a group whose options are not those that its state is for."""

    def _ready_job(self) -> "DeviceJob | None":
        """All parameters for the kernels of the accelerator they are on; None: not this time."""
        if torch.compiler.is_compiling():
            return None
        groups = self.param_groups
        first = next((p for group in groups for p in group["params"] if p.numel()), None)
        if first is None or first.device.type not in kernels.DEVICES:
            return None
        if self._device_steps is None:
            from steadygrad.optim.device_choice import DeviceSteps

            self._device_steps = DeviceSteps(type(self).__name__, self._device_job)
        return self._device_steps.job(groups, self.state)

    def _step_by_parts(self) -> None:
        leaves = [found for group in self.param_groups for found in self._leaves(group)]
        if leaves:
            scale = getattr(self, "grad_scale", None)
            scaling = Scaling(
                None if scale is None else 1 / scale.to(torch.float64),
                getattr(self, "found_inf", None),
            )
            ok = self._update(leaves, self._sums_over_shards(leaves), scaling)
            self._count_skipped(ok, all(some.fused is not None for some in leaves))
            for some in leaves:
                if some.fused is None:
                    write_back(some.params, some.weights)
                else:
                    some.fused.release()

    def _update(
        self,
        leaves: list[Leaves],
        over_shards: Callable[[list[Tensor]], list[Tensor]],
        scaling: Scaling,
    ) -> Tensor:
        """Moves weights and state.

        Args:
            leaves: All parameters that take part.
            over_shards: Adds up a list of sums, one for each of ``leaves`` with shape
                ``(k, parameters)``, over shards, in one collective.
            scaling: What a gradient scaler has left to do.

        Returns:
            Whether the step was taken, with shape ``()``.
        """
        raise NotImplementedError

    def _check_capture(self) -> None:
        """A graph keeps what it has seen: the user must have said that this is meant."""
        if torch.compiler.is_compiling() or not torch.cuda.is_available():
            return
        capturable = all(group["capturable"] for group in self.param_groups)
        if torch.cuda.is_current_stream_capturing() and not capturable:
            raise RuntimeError(
                "Expected capturable=True while a CUDA graph records the step. Found False. "
                f"Remedy: {type(self).__name__}(..., capturable=True), and a tensor `lr` if it is "
                "to change."
            )

    def _count_skipped(self, ok: Tensor, on_host: bool) -> None:
        if on_host and bool(ok.numpy()):
            return
        everywhere = (self.state[p]["skipped"] for g in self.param_groups for p in g["params"])
        for count in {id(count): count for count in everywhere}.values():
            count.add_((~ok).to(count.device))

    def diagnostics(self, top: int = 10, *, grad_scale: float = 1.0) -> list[dict[str, Any]]:
        """What stands out, by group; see :mod:`steadygrad.optim.diagnostics`.

        Call it after ``backward`` and before ``zero_grad``, on every process. It reads tensors, and
        so waits for the device; nothing of it is computed unless it is called.

        Args:
            top: How many parameters to name in each list.
            grad_scale: Loss scale that is still in the gradients: ``scaler.get_scale()`` where
                ``scaler.unscale_(optimizer)`` has not been called.

        Returns:
            A dictionary of plain numbers for each group.
        """
        check_count("top", top)
        check_number("grad_scale", grad_scale, low=0, low_open=True)
        self._fill_state()
        groups = enumerate(self.param_groups)
        return [
            self._diagnose(group, Report(i, group, self.state, top, grad_scale), grad_scale)
            for i, group in groups
        ]

    def _diagnose(self, group: dict[str, Any], report: Report, grad_scale: float) -> dict[str, Any]:
        raise NotImplementedError

    def _kind(self, parameter: Tensor, group: Mapping[str, Any]) -> tuple[Any, ...]:
        """What parameters that are worked on together have in common."""
        return parameter.device, parameter.dtype, self._state_dtype(parameter, group)

    def _leaves(self, group: dict[str, Any], *, fused: bool = True) -> Iterable[Leaves]:
        """A group's parameters, by device and working type.

        Args:
            group: The group.
            fused: Whether some may be for compiled loops.
        """
        on_cpu = any(p.device.type == "cpu" for p in group["params"])
        name = type(self).__name__
        mode = choose_mode(name, group["foreach"], group["fused"], on_cpu=on_cpu)
        members = [
            p
            for p in group["params"]
            if p.numel() and (p.grad is not None or (self._none_is_zero and p.requires_grad))
        ]
        plan = self._plan(group, members) if fused and mode == "fused" else None
        if plan is not None:
            yield from plan
            members = plan.others
            if members and group["fused"] and members[0].numel():
                warn_about(name, members[0])
        kinds: dict[Any, list[Tensor]] = defaultdict(list)
        for p in members:
            kinds[self._kind(p, group)].append(p)
        for params in kinds.values():
            states = [self.state[p] for p in params]
            weights = [working_weight(p, s, group) for p, s in zip(params, states, strict=True)]
            yield Leaves(
                group=group,
                params=params,
                weights=weights,
                grads=local_grads(params),
                states=states,
                numels=[p.numel() for p in params],
                buckets=[[i] for i in range(len(weights))]
                if mode == "single"
                else buckets_of(weights),
            )

    def _plan(self, group: dict[str, Any], members: list[Tensor]) -> "Plan | None":
        """Who is for compiled loops, as at the last step if nothing has changed."""
        if self._plans is None:
            self._plans = {}
        plan = self._plans.get(id(group))
        if plan is not None and plan.group is group and plan.holds(members, self._known):
            return plan
        from steadygrad.kernels.cpu import NoKernelError
        from steadygrad.optim.plan import Plan

        for p in members:
            follow_dtype(p, self.state[p], group)
        kinds = [self._kind(p, group) for p in members]
        try:
            plan = Plan(
                group,
                members,
                self.state,
                self._known,
                kinds,
                self._large,
                self._small,
                self._kernels,
                self._early_sums,
            )
        except NoKernelError as error:
            give_up(type(self).__name__, error)
            return None
        # A load makes new groups; plans of the old ones would hold on to the old state.
        known = {id(each) for each in self.param_groups}
        self._plans = {key: old for key, old in self._plans.items() if key in known}
        self._plans[id(group)] = plan
        return plan if plan.holds(members, self._known) else None

    def _sums_over_shards(self, leaves: list[Leaves]) -> Callable[[list[Tensor]], list[Tensor]]:
        if all(some.fused is not None and not some.fused.sharded for some in leaves):
            return lambda columns: columns
        return self._sums_over([p for some in leaves for p in some.params])

    def _sums_over(self, params: list[Tensor]) -> Callable[[list[Tensor]], list[Tensor]]:
        if self._packed_sums is None:
            self._packed_sums = PackedSums()
        return self._packed_sums.over(params, self.param_groups)
