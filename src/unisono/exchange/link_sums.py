"""Make what adds up groups as the user has asked for."""

from __future__ import annotations

from unisono.exchange.compressed_sums import Bf16Sum, CompressedSum
from unisono.exchange.group_sum import SumPlan
from unisono.exchange.local_steps import LocalSteps
from unisono.exchange.power_sgd import PowerSgdSum
from unisono.exchange.slow_link import Bf16Gradients, DiLoCo, PowerSGD, SlowLink

_SUMS: dict[type[SlowLink], type[CompressedSum]] = {
    Bf16Gradients: Bf16Sum,
    DiLoCo: LocalSteps,
    PowerSGD: PowerSgdSum,
}


def sum_of(plan: SumPlan) -> CompressedSum:
    """Make it for one division of the work."""
    return _SUMS[type(plan.state.link)](plan)
