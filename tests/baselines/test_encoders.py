"""Encoders as laws: seeds side by side are seeds by themselves, outputs lie in their space, gradients are finite."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from ident3d.baselines.encoders import (
    BatchedLinear,
    BoxOutput,
    MLPEncoder,
    OutputNormalisation,
    ProductOutput,
    SphereOutput,
    Unbounded,
    mlp_encoder,
    output_normalisation,
)
from ident3d.errors import SpecError
from ident3d.spaces import Box, Product, Sphere

SEEDS = (4, 0, 11)
PARAMETRISATIONS: tuple[Literal["linear", "log"], ...] = ("linear", "log")
INITS: tuple[Literal["torch", "he"], ...] = ("torch", "he")


def points(*shape: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(9))


def product(seeds: int | None) -> ProductOutput:
    return ProductOutput(
        [SphereOutput(3, seeds, radius=2.0), BoxOutput(2, seeds, bound=(3.0, 4.0)), Unbounded(1, seeds)]
    )


OUTPUTS: dict[str, Callable[[int | None], OutputNormalisation]] = {
    "unbounded": lambda seeds: Unbounded(6, seeds),
    "sphere": lambda seeds: SphereOutput(6, seeds),
    "sphere, log": lambda seeds: SphereOutput(6, seeds, radius=3.0, parametrisation="log"),
    "box": lambda seeds: BoxOutput(6, seeds),
    "box, log": lambda seeds: BoxOutput(6, seeds, bound=7.4, parametrisation="log"),
    "product": product,
}


def gradients(module: nn.Module) -> list[Tensor]:
    return [p.grad for p in module.parameters() if p.grad is not None]


# Linear layers.


@pytest.mark.parametrize("init", INITS)
def test_a_seeds_weights_depend_on_no_other_seed(init: Literal["torch", "he"]) -> None:
    together = BatchedLinear(5, 7, seeds=SEEDS, init=init)
    for k, seed in enumerate(SEEDS):
        alone = BatchedLinear(5, 7, seeds=[seed], init=init)
        assert torch.equal(alone.weight[0], together.weight[k])
        assert torch.equal(alone.bias[0], together.bias[k])
    assert not torch.equal(together.weight[0], together.weight[1])
    assert not torch.equal(BatchedLinear(5, 7, seeds=SEEDS, init=init, key="other").weight, together.weight)


def test_weights_are_those_of_torch_in_law() -> None:
    n = 400
    layer = BatchedLinear(n, 300, seeds=[0, 1])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        theirs = nn.Linear(n, 300)
    for ours, reference in zip(layer.state_dict().values(), theirs.state_dict().values(), strict=True):
        assert float(ours.abs().max()) <= 1 / math.sqrt(n)
        assert float(ours.abs().max()) > 0.98 / math.sqrt(n)
        torch.testing.assert_close(ours.std(), torch.tensor(1 / math.sqrt(3 * n)), rtol=0.05, atol=0)
        torch.testing.assert_close(ours.std(), reference.std(), rtol=0.15, atol=0)


@pytest.mark.parametrize("slope", [0.01, 0.2, 1.0])
def test_he_keeps_the_variance(slope: float) -> None:
    layer = BatchedLinear(300, 400, seeds=[0], init="he", slope=slope)
    torch.testing.assert_close(layer.weight.var(), torch.tensor(2 / (300 * (1 + slope**2))), rtol=0.02, atol=0)
    assert not bool(layer.bias.any())
    y = layer(nn.functional.leaky_relu(points(1, 2000, 300, scale=3.0), slope))
    torch.testing.assert_close(y.var(), torch.tensor(9.0), rtol=0.1, atol=0)


def test_he_keeps_the_variance_through_an_encoder() -> None:
    x = points(1, 1000, 10)
    stds = {init: float(mlp_encoder(10, 10, seeds=[0], init=init)(x).detach().std()) for init in INITS}
    assert 0.5 < stds["he"] < 2
    assert stds["torch"] < 0.2


def test_no_global_generator_or_default_is_read() -> None:
    before, given = torch.get_rng_state(), BatchedLinear(5, 7, seeds=[0]).weight
    torch.set_default_dtype(torch.float64)
    try:
        again = BatchedLinear(5, 7, seeds=[0])
        dtypes = {t.dtype for m in (again, *(make(2) for make in OUTPUTS.values())) for t in m.state_dict().values()}
        assert Unbounded(3).scales().dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(again.weight, given)
    assert dtypes == {torch.float32}


# Encoders.


def test_the_papers_encoder() -> None:
    f = mlp_encoder(10, 10, seeds=[0])
    shapes = [tuple(p.shape) for name, p in f.named_parameters() if name.endswith("weight")]
    sizes = [10, 100, 500, 500, 500, 500, 100, 10]
    assert shapes == [(1, b, a) for a, b in pairwise(sizes)]
    assert f.slope == 0.01
    assert isinstance(f.output, Unbounded)


def plain(f: MLPEncoder, k: int, output: OutputNormalisation) -> nn.Sequential:
    """The encoder of seed number k, of torch's own layers."""
    parts: list[nn.Module] = []
    for layer in f.layers:
        assert isinstance(layer, BatchedLinear)
        linear = nn.Linear(layer.dim_in, layer.dim_out, device="meta").to_empty(device="cpu")
        linear.load_state_dict({"weight": layer.weight[k].detach(), "bias": layer.bias[k].detach()})
        parts += [linear, nn.LeakyReLU(0.01)]
    return nn.Sequential(*parts[:-1], output)


@pytest.mark.parametrize("name", OUTPUTS)
def test_seeds_side_by_side_are_seeds_by_themselves(name: str) -> None:
    make, x, target = OUTPUTS[name], points(3, 20, 4), points(3, 20, 6)
    together = mlp_encoder(4, 6, seeds=SEEDS, widths=(3, 5, 2), output=make(3))
    y = together(x)
    (y * target).sum().backward()
    assert len(gradients(together)) == len(list(together.parameters()))
    for k, seed in enumerate(SEEDS):
        alone = mlp_encoder(4, 6, seeds=[seed], widths=(3, 5, 2), output=make(1))
        reference = plain(alone, 0, make(None))
        y_alone, y_reference = alone(x[k : k + 1])[0], reference(x[k])
        torch.testing.assert_close(y_alone, y[k], atol=1e-5, rtol=0)
        torch.testing.assert_close(y_reference, y[k], atol=1e-5, rtol=0)
        (y_alone * target[k]).sum().backward()
        (y_reference * target[k]).sum().backward()
        for a, b, c in zip(gradients(together), gradients(alone), gradients(reference), strict=True):
            torch.testing.assert_close(b[0], a[k], atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(c, a[k], atol=1e-5, rtol=1e-5)


def test_seeds_take_steps_of_their_own() -> None:
    f = mlp_encoder(4, 6, seeds=SEEDS, widths=(3,), output=BoxOutput(6, 3))
    f(points(3, 20, 4))[1].sum().backward()
    for g in gradients(f):
        assert bool(g[1].any())
        assert not bool(g[[0, 2]].any())


def test_no_hidden_layer_is_a_linear_map() -> None:
    f = mlp_encoder(4, 3, seeds=[0], widths=())
    assert len(f.layers) == 1
    x, y = points(1, 5, 4), points(1, 5, 4, scale=-2.0)
    torch.testing.assert_close(f(x + y), f(x) + f(y) - f(torch.zeros(1, 5, 4)))


def test_the_state_goes_around() -> None:
    f, other = (mlp_encoder(4, 6, seeds=[s], widths=(3,), output=product(1)) for s in (0, 1))
    other.load_state_dict(f.state_dict())
    assert torch.equal(other(points(1, 5, 4)), f(points(1, 5, 4)))


# Output normalisations.


@pytest.mark.parametrize("parametrisation", PARAMETRISATIONS)
@pytest.mark.parametrize("seeds", [None, 1, 3])
def test_outputs_lie_in_their_space(seeds: int | None, parametrisation: Literal["linear", "log"]) -> None:
    y = points(*(() if seeds is None else (seeds,)), 500, 4, scale=5.0)
    sphere = SphereOutput(4, seeds, radius=2.5, parametrisation=parametrisation)
    box = BoxOutput(4, seeds, bound=(0.5, 1.0, 2.0, 20.0), parametrisation=parametrisation)
    assert bool(Sphere(4, 2.5).contains(sphere(y)).all())
    assert bool(Box(4, 0, (0.5, 1, 2, 20)).contains(box(y)).all())
    z = torch.cat([y, y, y], dim=-1)
    parts = ProductOutput([sphere, Unbounded(4, seeds), box])
    assert bool(Product(Sphere(4, 2.5)).contains(parts(z)[..., :4]).all())
    assert torch.equal(parts(z)[..., 4:8], y)
    torch.testing.assert_close(parts(z)[..., 8:], box(y))


def test_magnitudes_are_each_seeds_own() -> None:
    y = points(2, 5, 3)
    for output in (SphereOutput(3, 2), BoxOutput(3, 2)):
        with torch.no_grad():
            output.value[1] *= 4
        torch.testing.assert_close(output(y)[1], 4 * type(output)(3)(y[1]))
        torch.testing.assert_close(output(y)[0], type(output)(3)(y[0]))


def test_the_formulas() -> None:
    y = torch.tensor([[3.0, -4.0], [0.0, 2.0]])
    torch.testing.assert_close(SphereOutput(2, radius=5.0)(y), torch.tensor([[3.0, -4.0], [0.0, 5.0]]))
    bound = torch.tensor([2.0, 3.0])
    torch.testing.assert_close(BoxOutput(2, bound=(2.0, 3.0))(y), bound / (1 + torch.exp(-y)))
    assert torch.equal(Unbounded(2)(y), y)


@pytest.mark.parametrize("parametrisation", PARAMETRISATIONS)
@pytest.mark.parametrize("learnable", [True, False])
@pytest.mark.parametrize(("kind", "count"), [("sphere", 1), ("box", 4), ("unbounded", 0)])
def test_magnitudes_by_name(kind: str, count: int, learnable: bool, parametrisation: Literal["linear", "log"]) -> None:
    for seeds in (None, 2):
        output = output_normalisation(
            kind, 4, seeds, magnitude=7.4, learnable=learnable, parametrisation=parametrisation
        )
        shape = (count,) if seeds is None else (seeds, count)
        torch.testing.assert_close(output.scales(), torch.full(shape, 7.4))
        assert not output.scales().requires_grad
        learned = output.scale_parameters()
        assert [tuple(p.shape) for p in learned] == ([shape] if learnable and count else [])
        assert len(output.state_dict()) == (count > 0)  # a fixed magnitude is a buffer, and saved
        if learned:
            value = 7.4 if parametrisation == "linear" else math.log(7.4)
            torch.testing.assert_close(learned[0].detach(), torch.full(shape, value))


@pytest.mark.parametrize("kind", ["sphere", "box"])
def test_magnitudes_start_at_one(kind: str) -> None:
    for parametrisation in PARAMETRISATIONS:
        scales = output_normalisation(kind, 3, 2, parametrisation=parametrisation).scales()
        assert torch.equal(scales, torch.ones_like(scales))


def test_scales_are_a_copy() -> None:
    output = BoxOutput(2)
    output.scales().zero_()
    assert output.scales().tolist() == [1.0, 1.0]


def test_a_log_bound_stays_positive_where_a_linear_one_does_not() -> None:
    for parametrisation, positive in (("linear", False), ("log", True)):
        output = output_normalisation("box", 2, parametrisation=parametrisation)  # type: ignore[arg-type]
        optimiser = torch.optim.SGD(output.scale_parameters(), lr=10)
        for _ in range(3):
            optimiser.zero_grad()
            output(torch.zeros(5, 2)).sum().backward()
            optimiser.step()
        assert bool((output.scales() > 0).all()) is positive


def test_a_product_joins_its_parts() -> None:
    for seeds in (None, 3):
        output = product(seeds)
        assert (output.dim, output.seeds) == (6, seeds)
        assert len(output.scale_parameters()) == 2
        scales = torch.tensor([2.0, 3.0, 4.0])
        assert torch.equal(output.scales(), scales if seeds is None else scales.expand(3, 3))
        nested = ProductOutput([output, BoxOutput(1, seeds)])
        assert nested.scales().shape[-1] == 4


@pytest.mark.parametrize("name", OUTPUTS)
@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e-8, 1.0, 1e4])
def test_gradients_are_finite_everywhere(name: str, scale: float) -> None:
    output, y = OUTPUTS[name](None), points(50, 6, scale=scale).requires_grad_()
    (output(y) * points(50, 6)).sum().backward()
    assert y.grad is not None
    for g in (y.grad, *gradients(output)):
        assert bool(torch.isfinite(g).all())
        assert float(g.abs().max()) <= 1e8


def test_the_origin_goes_to_the_origin_of_a_sphere() -> None:
    assert not bool(SphereOutput(3)(torch.zeros(1, 3)).any())


def test_a_network_without_seeds_may_have_any_batch_dimensions() -> None:
    y = points(2, 3, 5, 6)
    for make in OUTPUTS.values():
        output = make(None)
        assert output(y).shape == y.shape
        torch.testing.assert_close(output(y)[1, 2], output(y[1, 2]))
        torch.testing.assert_close(output(y)[1, 2, 3], output(y[1, 2, 3]))


# Refusals.


@pytest.mark.usefixtures("unhooked")
@pytest.mark.parametrize("shape", [(5, 3), (1, 5, 3), (2, 5, 4)])
def test_other_shapes_are_refused(shape: tuple[int, ...]) -> None:
    for module in (
        BatchedLinear(3, 2, seeds=[0, 1]),
        mlp_encoder(3, 2, seeds=[0, 1]),
        Unbounded(3, 2),
        BoxOutput(3, 2),
    ):
        with pytest.raises(SpecError, match=r"expected \(seeds, batch, dim\) = \(2, batch, 3\)"):
            module(torch.zeros(shape))


@pytest.mark.usefixtures("unhooked")
def test_other_shapes_are_refused_without_seeds() -> None:
    for shape in ((), (4,), (5, 4), (3, 4)):
        with pytest.raises(SpecError, match=r"expected \(\.\.\., 3\)"):
            SphereOutput(3)(torch.zeros(shape))


@pytest.mark.usefixtures("unhooked")
@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: SphereOutput(1), "dim of a sphere = 1"),
        (lambda: SphereOutput(3, radius=0.0), "expected numbers above 0"),
        (lambda: SphereOutput(3, radius=math.nan), "radius = nan"),
        (lambda: SphereOutput(3, 0), "seeds = 0"),
        (lambda: BoxOutput(0), "dim = 0"),
        (lambda: BoxOutput(2, bound=(1.0, -1.0)), "expected numbers above 0"),
        (lambda: BoxOutput(2, bound=(1.0, 1.0, 1.0)), "3 values"),
        (lambda: Unbounded(0), "dim = 0"),
        (lambda: ProductOutput([]), "at least one output normalisation"),
        (lambda: ProductOutput([BoxOutput(2), BoxOutput(2, 3)]), "the same in all"),
        (lambda: output_normalisation("torus", 3), "space = 'torus': expected one of unbounded, sphere, box"),
        (lambda: MLPEncoder([], Unbounded(3, 1)), "at least one"),
        (lambda: mlp_encoder(3, 2, seeds=[0, 1], output=Unbounded(2, 3)), "expected dim 2, seeds 2"),
        (lambda: mlp_encoder(3, 2, seeds=[0, 1], output=Unbounded(3, 2)), "expected dim 2, seeds 2"),
        (lambda: mlp_encoder(3, 2, seeds=[0], output=Unbounded(2)), "output of dim 2, seeds None"),
    ],
)
def test_what_does_not_fit_is_refused(make: Callable[[], nn.Module], text: str) -> None:
    with pytest.raises(SpecError, match=text):
        make()


@pytest.mark.usefixtures("unhooked")
@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"dim_in": 0}, "dim_in = 0"),
        ({"dim_out": 0}, "dim_out = 0"),
        ({"seeds": []}, "at least one seed"),
        ({"seeds": [2, 2]}, "each seed once"),
        ({"seeds": [-2]}, "seed = -2"),
        ({"widths": (10, 0)}, "width = 0"),
        ({"slope": 0.0}, "slope = 0"),
        ({"init": "zeros"}, "init = 'zeros': expected one of torch, he"),
    ],
)
def test_bad_values_are_refused(wrong: dict[str, Any], text: str) -> None:
    given: dict[str, Any] = {"dim_in": 2, "dim_out": 2, "seeds": [0], **wrong}
    with pytest.raises(SpecError, match=text):
        mlp_encoder(given.pop("dim_in"), given.pop("dim_out"), **given)


@pytest.mark.usefixtures("unhooked")
def test_another_parametrisation_is_refused() -> None:
    with pytest.raises(SpecError, match="parametrisation = 'square': expected one of linear, log"):
        BoxOutput(2, parametrisation="square")  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_the_device_changes_nothing() -> None:
    here, there = (mlp_encoder(4, 6, seeds=SEEDS, output=product(3), device=device) for device in ("cpu", "cuda"))
    x = points(3, 20, 4)
    torch.testing.assert_close(there(x.cuda()).cpu(), here(x), atol=1e-5, rtol=1e-4)
    assert there.output.scales().device.type == "cpu"
