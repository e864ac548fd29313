"""The losses that model conditionals stand for: their powers, their values, and the spaces that they need."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ident3d.baselines.losses import dot_infonce, lp_infonce
from ident3d.baselines.model_loss import check_model_space, loss_power, model_loss
from ident3d.errors import SpecError

POWERS = {"laplace": 1.0, "normal": 2.0, "gennorm(3)": 3.0, "gennorm( 1.5 )": 1.5, "gennorm(1)": 1.0, "vmf": None}
SWITCHES = [(True, True), (True, False), (False, True), (False, False)]
OTHERS = [
    *("gaussian", "Normal", "", "gennorm", "gennorm()", "gennorm(0.99)", "gennorm(-2)", "gennorm(nan)", "gennorm(inf)"),
    *("gennorm(2", "gennorm(1.2.3)", "gennorm(.)", "gennorm(p=3)", "vmf(1)", "normal(0.05)", None, 2, 2.0),
    f"gennorm({'9' * 400})",
]


def codes(*shape: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    x = torch.rand(*shape, generator=generator)
    return x, x + 0.1 * torch.randn(x.shape, generator=generator)


@pytest.mark.parametrize("model", POWERS)
def test_models_have_powers(model: str) -> None:
    assert loss_power(model) == POWERS[model]


@pytest.mark.parametrize(("include_self", "positive_in_denominator"), SWITCHES)
@pytest.mark.parametrize("shape", [(12, 3), (2, 12, 3)])
@pytest.mark.parametrize("model", POWERS)
def test_the_loss_is_that_of_the_power(
    model: str, shape: tuple[int, ...], include_self: bool, positive_in_denominator: bool
) -> None:
    x, positive = codes(*shape)
    options: dict[str, Any] = {"include_self": include_self, "positive_in_denominator": positive_in_denominator}
    found = model_loss(model, x, positive, tau=0.4, **options)
    p = POWERS[model]
    if p is None:
        expected = dot_infonce(x, positive, tau=0.4, **options)
    else:
        expected = lp_infonce(x, positive, p=p, tau=0.4, **options)
    assert found.shape == shape[:-2]
    assert torch.equal(found, expected)
    assert not torch.equal(found, model_loss(model, x, positive, tau=0.5, **options))


@pytest.mark.parametrize("model", ["laplace", "normal", "gennorm(3)", "vmf"])
def test_the_loss_is_the_formula(model: str) -> None:
    """-log( e^s(x, x~) / (e^s(x, x~) + sum_j e^s(x, x_j)) ), over all anchors j."""
    x, positive = codes(9, 4)
    p = loss_power(model)

    def score(a: Tensor, b: Tensor) -> Tensor:
        return ((a * b).sum(-1) if p is None else -(a - b).abs().pow(p).sum(-1)) / 0.7

    own, others = score(x, positive), score(x[:, None], x[None])
    expected = -(own - torch.logsumexp(torch.cat([own[:, None], others], dim=1), dim=1)).mean()
    found = model_loss(model, x, positive, tau=0.7, include_self=True, positive_in_denominator=True)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("gather", [False, True])
@pytest.mark.parametrize(("model", "kind"), [("normal", "lp_infonce"), ("vmf", "dot_infonce")])
def test_whether_ranks_exchange_is_handed_on(
    model: str, kind: str, gather: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, Any]] = []

    def loss(x: Tensor, positive: Tensor, **options: Any) -> Tensor:
        seen.append(options)
        return x.sum()

    monkeypatch.setattr(f"ident3d.baselines.model_loss.{kind}", loss)
    x, positive = codes(4, 2)
    model_loss(model, x, positive, tau=3.0, include_self=False, positive_in_denominator=False, gather=gather)
    expected = {"tau": 3.0, "include_self": False, "positive_in_denominator": False, "gather": gather}
    assert seen == [expected if model == "vmf" else {**expected, "p": 2.0}]


@pytest.mark.parametrize("model", OTHERS, ids=lambda model: str(model)[:20])
def test_other_models_are_refused(model: Any) -> None:
    words = r"model = .*: expected vmf, laplace, normal or gennorm\(P\) with P of at least 1"
    with pytest.raises(SpecError, match=words):
        loss_power(model)
    with pytest.raises(SpecError, match=words):
        check_model_space(model, "sphere")
    with pytest.raises(SpecError, match=words):
        model_loss(model, *codes(4, 2), tau=1.0, include_self=True, positive_in_denominator=True)


@pytest.mark.parametrize("model", POWERS)
@pytest.mark.parametrize("space", ["sphere", "box", "unbounded"])
def test_the_dot_product_needs_a_sphere(model: str, space: str) -> None:
    if model == "vmf" and space != "sphere":
        with pytest.raises(
            SpecError, match=f"model = vmf in model_space = {space}: .* choose model_space = sphere, or"
        ):
            check_model_space(model, space)
    else:
        check_model_space(model, space)
