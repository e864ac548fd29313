"""Mixings as laws: the inverse undoes them, seeds do not see each other, the best conditioned candidate is taken."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ident3d.baselines import mixing
from ident3d.baselines.mixing import InvertibleMLP, best_conditioned, invertible_mlp
from ident3d.errors import SpecError

FEW = 200
DTYPES = [(torch.float64, 1e-10), (torch.float32, 1e-3)]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def points(seeds: int, dim: int, n: int = 500, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(seeds, n, dim, generator=generator(9), dtype=dtype)


@pytest.mark.parametrize(("dtype", "atol"), DTYPES)
@pytest.mark.parametrize(("dim", "layers", "slope"), [(10, 3, 0.2), (4, 1, 0.2), (3, 5, 0.5), (2, 2, 3.0), (1, 3, 0.2)])
def test_the_inverse_undoes_the_mixing(dim: int, layers: int, slope: float, dtype: torch.dtype, atol: float) -> None:
    g = invertible_mlp(dim, seeds=[0, 5], layers=layers, slope=slope, candidates=FEW, dtype=dtype)
    z = points(2, dim, dtype=dtype)
    torch.testing.assert_close(g.inverse(g(z)), z, atol=atol, rtol=0)
    torch.testing.assert_close(g(g.inverse(z)), z, atol=atol, rtol=0)


def test_it_is_the_formula_point_by_point() -> None:
    g = invertible_mlp(4, seeds=[3, 8], candidates=FEW, dtype=torch.float64)
    z = points(2, 4, n=7)
    x = g(z)
    for s, k in itertools.product(range(2), range(7)):
        y = z[s, k].numpy()
        for layer in range(3):
            y = g.weights[layer, s].numpy() @ (y if layer == 0 else np.where(y >= 0, y, 0.2 * y))
        np.testing.assert_allclose(x[s, k].numpy(), y, atol=1e-12)
    assert float(x.min()) < -1  # no leaky ReLU after the last layer, which leaves a fifth of what is below 0


def test_the_paper_has_ten_dimensions_and_three_layers() -> None:
    g = invertible_mlp(10, seeds=[0])
    assert g.weights.shape == (3, 1, 10, 10)
    assert g.weights.dtype == torch.float32
    assert g.slope == 0.2
    # Of 25,000 such matrices, the best have conditions of about 4; a single one has 28 in the median.
    assert bool(((g.conditions >= 1) & (g.conditions < 6)).all())


def test_columns_have_norm_one() -> None:
    w = invertible_mlp(6, seeds=[0, 1], candidates=FEW, dtype=torch.float64).weights
    torch.testing.assert_close((w**2).sum(dim=-2), torch.ones(3, 2, 6, dtype=torch.float64), atol=1e-12, rtol=0)
    assert not torch.allclose((w**2).sum(dim=-1), torch.ones(3, 2, 6, dtype=torch.float64), atol=1e-2)


def test_the_best_conditioned_candidate_is_taken() -> None:
    u = torch.rand(50, 3, 3, generator=generator(4), dtype=torch.float64).numpy() * 2 - 1
    normed = [w / np.sqrt((w**2).sum(axis=0)) for w in u]
    best = min(normed, key=lambda w: float(np.linalg.cond(w)))
    np.testing.assert_allclose(best_conditioned(3, 50, generator=generator(4)).numpy(), best, atol=1e-14)


@pytest.mark.parametrize("size", [1, 8 * 9, 8 * 9 * 7, 8 * 9 * 50])
def test_chunks_change_nothing(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = best_conditioned(3, 50, generator=generator(2))
    monkeypatch.setattr(mixing, "CHUNK_BYTES", size)
    assert torch.equal(best_conditioned(3, 50, generator=generator(2)), whole)


def test_more_candidates_are_never_worse() -> None:
    conditions = [invertible_mlp(5, seeds=[1], candidates=n).conditions for n in (1, 10, 100, 1000)]
    for more, fewer in itertools.pairwise(reversed(conditions)):
        assert bool((more <= fewer).all())
    assert bool((conditions[-1] < conditions[0]).all())


def test_a_seeds_mixing_depends_on_no_other_seed() -> None:
    together = invertible_mlp(5, seeds=[7, 0, 2], candidates=FEW)
    for k, seed in enumerate([7, 0, 2]):
        assert torch.equal(invertible_mlp(5, seeds=[seed], candidates=FEW).weights[:, 0], together.weights[:, k])


def test_seeds_and_layers_differ() -> None:
    w = invertible_mlp(5, seeds=[0, 1], candidates=FEW).weights.flatten(0, 1)
    assert all(not torch.allclose(a, b, atol=1e-2) for a, b in itertools.combinations(w, 2))


def test_the_first_layers_are_those_of_a_deeper_mixing() -> None:
    deep = invertible_mlp(4, seeds=[0], layers=4, candidates=FEW).weights
    assert torch.equal(invertible_mlp(4, seeds=[0], layers=2, candidates=FEW).weights, deep[:2])


def test_no_global_generator_or_default_is_read() -> None:
    before = torch.get_rng_state()
    given = invertible_mlp(4, seeds=[0], candidates=FEW)
    assert torch.equal(torch.get_rng_state(), before)
    torch.set_default_dtype(torch.float64)
    try:
        again = invertible_mlp(4, seeds=[0], candidates=FEW)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(again.weights, given.weights)
    assert again.weights.dtype == torch.float32


def test_precisions_agree() -> None:
    single, double = (invertible_mlp(4, seeds=[0], candidates=FEW, dtype=dtype) for dtype, _ in DTYPES[::-1])
    assert torch.equal(double.weights.float(), single.weights)


def test_nothing_is_trained_but_gradients_pass() -> None:
    g = invertible_mlp(4, seeds=[0], candidates=FEW)
    assert list(g.parameters()) == []
    assert set(g.state_dict()) == {"weights"}
    z = points(1, 4, dtype=torch.float32).requires_grad_()
    g(z).sum().backward()
    assert z.grad is not None
    assert bool(torch.isfinite(z.grad).all())


def test_conditions_are_those_of_numpy() -> None:
    g = invertible_mlp(4, seeds=[0, 9], candidates=FEW)
    expected = [[np.linalg.cond(w.double().numpy()) for w in g.weights[:, s]] for s in range(2)]
    np.testing.assert_allclose(g.conditions.numpy(), expected, rtol=1e-10)


def test_a_description_is_plain() -> None:
    g = invertible_mlp(4, seeds=[0, 9], candidates=FEW)
    described = g.describe()
    assert json.loads(json.dumps(described)) == described
    assert described == {"dim": 4, "layers": 3, "slope": 0.2, "conditions": g.conditions.tolist()}
    assert repr(g) == "InvertibleMLP(dim=4, seeds=2, layers=3, slope=0.2)"


@pytest.mark.usefixtures("unhooked")
@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"dim": 0}, "dim = 0"),
        ({"dim": 2.0}, "dim = 2.0"),
        ({"layers": 0}, "layers = 0"),
        ({"slope": 0}, "slope = 0"),
        ({"slope": -0.2}, "slope = -0.2"),
        ({"slope": math.inf}, "slope = inf"),
        ({"slope": math.nan}, "slope = nan"),
        ({"slope": "0.2"}, "slope = '0.2'"),
        ({"candidates": 0}, "candidates = 0"),
        ({"seeds": []}, "at least one seed"),
        ({"seeds": 3}, "at least one seed"),
        ({"seeds": "12"}, "at least one seed"),
        ({"seeds": [1, 2, 1]}, "each seed once"),
        ({"seeds": [-1]}, "seed = -1"),
        ({"seeds": [0.5]}, "seed = 0.5"),
    ],
)
def test_bad_values_are_refused(wrong: dict[str, Any], text: str) -> None:
    given: dict[str, Any] = {"dim": 2, "seeds": [0], "candidates": 5, **wrong}
    with pytest.raises(SpecError, match=text):
        invertible_mlp(given.pop("dim"), **given)


@pytest.mark.usefixtures("unhooked")
@pytest.mark.parametrize("shape", [(5, 3), (1, 5, 3), (2, 5, 4), (2, 5, 3, 1)])
@pytest.mark.parametrize("call", [InvertibleMLP.forward, InvertibleMLP.inverse])
def test_other_shapes_are_refused(call: Callable[[InvertibleMLP, Tensor], Tensor], shape: tuple[int, ...]) -> None:
    g = invertible_mlp(3, seeds=[0, 1], candidates=5)
    with pytest.raises(SpecError, match=r"expected \(seeds, batch, dim\) = \(2, batch, 3\)"):
        call(g, torch.zeros(shape))


@pytest.mark.usefixtures("unhooked")
@pytest.mark.parametrize(
    "weights", [torch.eye(2), torch.ones(1, 1, 2, 3), torch.ones(0, 1, 2, 2), torch.eye(2)[None, None] / 0]
)
def test_other_weights_are_refused(weights: Tensor) -> None:
    with pytest.raises(SpecError, match=r"expected finite ones of \(layers, seeds, dim, dim\)"):
        InvertibleMLP(weights)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_the_device_changes_nothing() -> None:
    here, there = (invertible_mlp(10, seeds=[0, 1], candidates=FEW, device=device) for device in ("cpu", "cuda"))
    assert torch.equal(there.weights.cpu(), here.weights)
    z = points(2, 10, dtype=torch.float32)
    torch.testing.assert_close(there(z.cuda()).cpu(), here(z), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(there.inverse(there(z.cuda())).cpu(), z, atol=1e-3, rtol=0)
