"""The loss that a model conditional stands for, by the name that the paper's tables give it."""

from __future__ import annotations

import functools
import math
import re

from torch import Tensor

from ident3d.baselines.losses import dot_infonce, lp_infonce
from ident3d.errors import SpecError

__all__ = ["check_model_space", "loss_power", "model_loss"]

_POWERS = {"vmf": None, "laplace": 1.0, "normal": 2.0}


def loss_power(model: str, option: str = "model") -> float | None:
    """p of the loss's distance; None for the dot product.

    Args:
        model: vmf, laplace, normal or gennorm(P).
        option: what it is called where it is asked for.

    Raises:
        SpecError: another model.
    """
    if model in _POWERS:
        return _POWERS[model]
    number = re.fullmatch(r"gennorm\(\s*([0-9.]+)\s*\)", model) if isinstance(model, str) else None
    try:
        p = float(number[1]) if number else math.nan
    except ValueError:
        p = math.nan
    if not 1 <= p < math.inf:
        raise SpecError(f"{option} = {model!r}: expected vmf, laplace, normal or gennorm(P) with P of at least 1")
    return p


def check_model_space(model: str, space: str, option: str = "model") -> None:
    """Refuse a model space that the model's distance does not admit.

    Args:
        model: as for `loss_power`.
        space: sphere, box or unbounded.
        option: what the model is called where it is asked for.

    Raises:
        SpecError: the dot product elsewhere than on a sphere, where long vectors would win whatever their direction.
    """
    if loss_power(model, option) is None and space != "sphere":
        raise SpecError(
            f"{option} = vmf in model_space = {space}: the dot product needs a sphere; choose model_space = sphere, or "
            f"{option} = laplace, normal or gennorm(P)"
        )


def model_loss(
    model: str,
    x: Tensor,
    positive: Tensor,
    *,
    tau: float,
    include_self: bool,
    positive_in_denominator: bool,
    gather: bool = False,
) -> Tensor:
    """InfoNCE with the distance of a model conditional.

    Args:
        model: as for `loss_power`.
        x, positive, tau, include_self, positive_in_denominator, gather: as for `lp_infonce`.

    Returns:
        One value a run, (*seeds,).
    """
    p = loss_power(model)
    loss = dot_infonce if p is None else functools.partial(lp_infonce, p=p)
    return loss(
        x,
        positive,
        tau=tau,
        include_self=include_self,
        positive_in_denominator=positive_in_denominator,
        gather=gather,
    )
