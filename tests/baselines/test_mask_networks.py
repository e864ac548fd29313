"""Networks of masks: torch's own layers with the same weights, seeds side by side, weights by seed, refusals."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from scipy import stats  # type: ignore[import-untyped]
from torch import Tensor, nn

from ident3d.baselines.encoders import BatchedLinear
from ident3d.baselines.mask_networks import MaskDecoder, MaskEncoder, SeedConv, side_by_side
from ident3d.baselines.outputs import BoxOutput, Unbounded
from ident3d.errors import SpecError

SEEDS = (4, 0, 11)
DIM = 5
Network = MaskEncoder | MaskDecoder


class Elsewhere(Tensor):
    """A tensor that is on the CPU and says that it is not, to take the way of other devices."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda")


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def bits(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) < 0.3


def encoder(*seeds: int) -> MaskEncoder:
    return MaskEncoder(DIM, seeds=seeds)


def decoder(*seeds: int) -> MaskDecoder:
    return MaskDecoder(DIM, seeds=seeds)


def inputs(network: Network, seeds: int = len(SEEDS), batch: int = 3) -> Tensor:
    """Masks as numbers, or latents."""
    if isinstance(network, MaskEncoder):
        return bits(seeds, batch, 1, 64, 64).float()
    return randn(seeds, batch, DIM)


def layers(network: Network) -> list[SeedConv]:
    found = [layer for layer in network.convolutions if isinstance(layer, SeedConv)]
    assert len(found) == 5
    return found


def gradients(network: nn.Module) -> list[Tensor]:
    found = [parameter.grad for parameter in network.parameters()]
    assert all(gradient is not None and bool(gradient.any()) for gradient in found)
    return [gradient for gradient in found if gradient is not None]


def plain_encoder() -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 4, 2, 1), nn.ReLU(), nn.Conv2d(32, 32, 4, 2, 1), nn.ReLU()),
        *(nn.Conv2d(32, 64, 4, 2, 1), nn.ReLU(), nn.Conv2d(64, 64, 4, 2, 1), nn.ReLU()),
        *(nn.Conv2d(64, 256, 4), nn.ReLU(), nn.Flatten(), nn.Linear(256, DIM)),
    )


def plain_decoder() -> nn.Sequential:
    return nn.Sequential(
        *(nn.Linear(DIM, 256), nn.ReLU(), nn.Unflatten(1, (256, 1, 1)), nn.ConvTranspose2d(256, 64, 4), nn.ReLU()),
        *(nn.ConvTranspose2d(64, 64, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(64, 32, 4, 2, 1), nn.ReLU()),
        *(nn.ConvTranspose2d(32, 32, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(32, 1, 4, 2, 1)),
    )


MAKERS: dict[str, tuple[Callable[..., Network], Callable[[], nn.Sequential]]] = {
    "encoder": (encoder, plain_encoder),
    "decoder": (decoder, plain_decoder),
}
each_network = pytest.mark.parametrize("name", MAKERS)


def in_plain_order(network: Network) -> list[BatchedLinear | SeedConv]:
    """Layers in the order in which they follow each other."""
    if isinstance(network, MaskEncoder):
        return [*layers(network), network.linear]
    return [network.linear, *layers(network)]


def plain(name: str, network: Network, k: int) -> nn.Sequential:
    """Seed number k of a network, of torch's own layers."""
    with torch.random.fork_rng(devices=[]):
        made = MAKERS[name][1]()
    with_weights = [layer for layer in made if not isinstance(layer, nn.ReLU | nn.Flatten | nn.Unflatten)]
    for theirs, ours in zip(with_weights, in_plain_order(network), strict=True):
        theirs.load_state_dict({"weight": ours.weight[k].detach(), "bias": ours.bias[k].detach()})
    return made.to(network.linear.weight.dtype)


# What they are


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@each_network
def test_a_network_is_that_of_torchs_layers(name: str, dtype: torch.dtype) -> None:
    """Values and gradients, of weights and inputs; in float64 but for rounding."""
    network = MAKERS[name][0](*SEEDS).to(dtype)
    x = inputs(network).to(dtype).requires_grad_()
    before, found = x.detach().clone(), network(x)
    assert found.dtype == dtype
    upstream = randn(*found.shape, seed=1).to(dtype)
    found.backward(upstream)
    assert torch.equal(x.detach(), before)
    assert x.grad is not None
    value, gradient = (1e-6, 1e-4) if dtype == torch.float32 else (1e-14, 1e-12)
    ours = [p.grad for layer in in_plain_order(network) for p in (layer.weight, layer.bias)]
    for k in range(len(SEEDS)):
        reference, own = plain(name, network, k), x[k].detach().clone().requires_grad_()
        expected = reference(own)
        torch.testing.assert_close(found[k], expected, rtol=0, atol=value)
        expected.backward(upstream[k])
        torch.testing.assert_close(x.grad[k], own.grad, rtol=gradient, atol=gradient)
        for a, b in zip(ours, gradients(reference), strict=True):
            assert a is not None
            torch.testing.assert_close(a[k], b, rtol=gradient, atol=gradient)


@pytest.mark.parametrize("count", [1, 3])
@each_network
def test_groups_of_one_convolution_are_seeds_one_after_the_other(name: str, count: int) -> None:
    """The way of other devices than the CPU, here."""
    network = MAKERS[name][0](*SEEDS[:count])
    results = []
    for kind in (Tensor, Elsewhere):
        x = inputs(network, count).requires_grad_()
        y = network(x.as_subclass(kind)).as_subclass(Tensor)
        network.zero_grad()
        y.backward(randn(*y.shape, seed=1))
        assert x.grad is not None
        results.append([y.detach(), x.grad, *(g.clone() for g in gradients(network))])
    assert results[0][0].shape[:2] == (count, 3)
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)


def test_groups_are_one_convolution(monkeypatch: pytest.MonkeyPatch) -> None:
    network, groups, shapes = encoder(*SEEDS), list[int](), list[tuple[int, ...]]()
    forward = SeedConv.forward

    def spy(layer: SeedConv, x: Tensor, parameters: tuple[Tensor, Tensor], groups_: int) -> Tensor:
        groups.append(groups_)
        shapes.append(tuple(x.shape))
        return forward(layer, x, parameters, groups_)

    monkeypatch.setattr(SeedConv, "forward", spy)
    x = inputs(network, batch=7)
    side_by_side(layers(network), x.as_subclass(Elsewhere))
    assert groups == [3] * 5
    assert shapes[:2] == [(7, 3, 64, 64), (7, 3 * 32, 32, 32)]
    side_by_side(layers(network), x)
    assert groups[5:] == [1] * 15
    assert shapes[5:7] == [(7, 1, 64, 64), (7, 32, 32, 32)]


@each_network
def test_a_seed_depends_on_no_other(name: str) -> None:
    make = MAKERS[name][0]
    together = make(*SEEDS)
    x = inputs(together)
    y = together(x)
    y[1].sum().backward()
    for parameter in together.parameters():
        assert parameter.grad is not None
        assert bool(parameter.grad[1].any())
        assert not bool(parameter.grad[[0, 2]].any())
    for k, seed in enumerate(SEEDS):
        alone = make(seed)
        for mine, ours in zip(alone.parameters(), together.parameters(), strict=True):
            assert torch.equal(mine[0], ours[k])
        torch.testing.assert_close(alone(x[k : k + 1]), y[k : k + 1], rtol=0, atol=1e-6)


# Weights


@each_network
def test_initial_weights_have_the_law_of_torchs_layers(name: str) -> None:
    """Uniform in +-1 / sqrt(n) by a Kolmogorov-Smirnov test, which torch's own pass, too."""
    network = MAKERS[name][0](0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        reference = [layer for layer in MAKERS[name][1]() if len(list(layer.parameters()))]
    for ours, theirs in zip(in_plain_order(network), reference, strict=True):
        bound = 1 / math.sqrt(ours.weight[0, 0].numel())  # of a transposed one, the outputs of an input
        for values, torchs in zip((ours.weight[0], ours.bias[0]), theirs.parameters(), strict=True):
            assert values.shape == torchs.shape
            for drawn in (values.detach().flatten().numpy(), torchs.detach().flatten().numpy()):
                assert abs(drawn).max() <= bound * (1 + 1e-6)
                assert stats.kstest(drawn, "uniform", (-bound, 2 * bound)).pvalue > 1e-3


@each_network
def test_layers_and_seeds_have_weights_of_their_own(name: str) -> None:
    drawn = [layer.weight[k].flatten()[:16] for layer in in_plain_order(MAKERS[name][0](*SEEDS)) for k in range(3)]
    for k, one in enumerate(drawn):
        for other in drawn[:k]:
            assert float(torch.cosine_similarity(one, other, dim=0).detach()) < 0.95


def test_encoders_and_decoders_have_weights_of_their_own() -> None:
    first, last = layers(encoder(0))[0].weight.detach(), layers(decoder(0))[-1].weight.detach()
    assert first.numel() == last.numel()
    assert float(torch.cosine_similarity(first.flatten(), last.flatten(), dim=0)) < 0.5


@each_network
def test_weights_are_a_function_of_the_seed_alone(name: str) -> None:
    make, before = MAKERS[name][0], torch.get_rng_state()
    given = make(*SEEDS).state_dict()
    torch.set_default_dtype(torch.float64)
    try:
        again = make(*SEEDS).state_dict()
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(torch.get_rng_state(), before)
    for key, value in given.items():
        assert again[key].dtype == torch.float32
        assert torch.equal(again[key], value)


def test_numbers_of_parameters() -> None:
    """By hand: inputs of an output and its bias, times the outputs, layer by layer."""
    convolutions = 32 * (16 + 1) + 32 * (32 * 16 + 1) + 64 * (32 * 16 + 1) + 64 * (64 * 16 + 1) + 256 * (64 * 16 + 1)
    assert convolutions == 377_792
    transposed = (256 * 64 + 64 * 64 + 64 * 32 + 32 * 32 + 32 * 1) * 16 + 64 + 64 + 32 + 32 + 1
    assert transposed == 377_537
    for seeds in ([0], [0, 1, 2]):
        f, g = MaskEncoder(10, seeds=seeds), MaskDecoder(10, seeds=seeds)
        assert sum(p.numel() for p in f.parameters()) == len(seeds) * (convolutions + 10 * (256 + 1))
        assert sum(p.numel() for p in g.parameters()) == len(seeds) * (transposed + 256 * (10 + 1))


# Masks and codes


def test_masks_may_be_of_any_type() -> None:
    f, masks = encoder(*SEEDS), bits(3, 4, 1, 64, 64)
    expected = f(masks.float())
    assert expected.shape == (3, 4, DIM)
    for dtype in (torch.bool, torch.uint8, torch.int64, torch.float64, torch.bfloat16):
        given = masks.to(dtype)
        codes = f(given)
        assert codes.dtype == torch.float32
        assert torch.equal(codes, expected)
        assert torch.equal(given, masks.to(dtype))


def test_the_order_of_memory_does_not_matter() -> None:
    f, masks = encoder(*SEEDS), bits(3, 4, 1, 64, 64).float()
    expected = f(masks)
    others = {
        "seeds innermost": masks.permute(1, 2, 3, 4, 0).contiguous().permute(4, 0, 1, 2, 3),
        "pixels transposed": masks.mT.contiguous().mT,
        "every other one": torch.stack([masks, 1 - masks], 2).flatten(1, 2)[:, ::2],
    }
    for name, x in others.items():
        assert x.stride() != masks.stride(), name
        torch.testing.assert_close(f(x), expected, rtol=0, atol=1e-6)
    shared = masks[:1].expand(3, -1, -1, -1, -1)  # one batch for all seeds
    torch.testing.assert_close(f(shared), f(shared.contiguous()), rtol=0, atol=1e-6)


def test_the_output_normalisation_is_applied() -> None:
    x, numbers = bits(3, 6, 1, 64, 64), encoder(*SEEDS)(bits(3, 6, 1, 64, 64))
    bound = (0.5, 1.0, 2.0, 3.0, 20.0)
    f = MaskEncoder(DIM, seeds=SEEDS, output=BoxOutput(DIM, 3, bound=bound))
    torch.testing.assert_close(f(x), torch.tensor(bound) * numbers.sigmoid())
    assert torch.equal(MaskEncoder(DIM, seeds=SEEDS, output=Unbounded(DIM, 3))(x), numbers)
    f(x).sum().backward()
    assert len(gradients(f)) == 13  # two of each layer, and the bounds


@pytest.mark.parametrize("output", [None, BoxOutput(DIM, 3)])
def test_under_autocast_codes_are_float32(output: BoxOutput | None) -> None:
    """The convolutions' results are bfloat16's, of 8 bits; what follows is computed in float32."""
    f, x = MaskEncoder(DIM, seeds=SEEDS, output=output), bits(3, 6, 1, 64, 64)
    expected, hidden = f(x), list[Tensor]()
    f.linear.register_forward_pre_hook(lambda module, args: hidden.append(args[0]))
    with torch.autocast("cpu", torch.bfloat16):
        codes = f(x)
    assert codes.dtype == hidden[0].dtype == torch.float32
    assert torch.equal(hidden[0], hidden[0].bfloat16().float())
    numbers = torch.baddbmm(f.linear.bias.unsqueeze(1), hidden[0], f.linear.weight.mT)
    torch.testing.assert_close(codes, numbers if output is None else output(numbers), rtol=1e-6, atol=1e-7)
    assert not torch.equal(codes, expected)
    torch.testing.assert_close(codes, expected, rtol=0, atol=5e-3 * float(expected.detach().abs().max()))


def test_under_autocast_logits_are_near_those_of_float32() -> None:
    g, z = decoder(*SEEDS), randn(3, 6, DIM)
    expected = g(z)
    with torch.autocast("cpu", torch.bfloat16):
        logits = g(z)
    torch.testing.assert_close(logits.float(), expected, rtol=0, atol=0.02 * float(expected.detach().abs().max()))


# Refusals


@pytest.mark.usefixtures("unhooked")
@pytest.mark.parametrize(
    "shape",
    [(2, 3, 64, 64), (3, 4, 1, 64, 64), (2, 4, 3, 64, 64), (2, 4, 1, 32, 32), (2, 4, 1, 64, 63), (2, 4, 64, 64, 1)],
)
def test_masks_of_other_shapes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(SpecError, match=r"masks of shape \(.*\): expected \(2, batch, 1, 64, 64\)"):
        encoder(0, 1)(torch.zeros(shape))


@pytest.mark.usefixtures("unhooked")
@pytest.mark.parametrize("shape", [(4, DIM), (1, 4, DIM), (2, 4, DIM + 1), (2, 4, DIM, 1)])
def test_latents_of_other_shapes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(SpecError, match=rf"expected \(seeds, batch, dim\) = \(2, batch, {DIM}\)"):
        decoder(0, 1)(torch.zeros(shape))


@pytest.mark.parametrize("make", [MaskEncoder, MaskDecoder])
@pytest.mark.parametrize(
    ("dim", "seeds", "text"),
    [
        (3, [], "at least one seed"),
        (3, [2, 2], "each seed once"),
        (3, [-1], "seed = -1"),
        (0, [0], "= 0: expected"),
        (-2, [0], "= -2: expected"),
    ],
)
def test_bad_values_are_refused(make: Callable[..., Network], dim: int, seeds: list[int], text: str) -> None:
    with pytest.raises(SpecError, match=text):
        make(dim, seeds=seeds)


@pytest.mark.parametrize(
    "output", [Unbounded(4, 2), BoxOutput(3, 3), BoxOutput(3), BoxOutput(1, 2)], ids=["dim", "seeds", "none", "one"]
)
def test_an_output_that_does_not_fit_is_refused(output: Unbounded | BoxOutput) -> None:
    text = f"output of dim {output.dim}, seeds {output.seeds}: expected dim 3, seeds 2"
    with pytest.raises(SpecError, match=text):
        MaskEncoder(3, seeds=[0, 1], output=output)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@each_network
def test_the_device_changes_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # 10 bits
    network = MAKERS[name][0](*SEEDS)
    x, expected = inputs(network), network(inputs(network))
    torch.testing.assert_close(network.cuda()(x.cuda()).cpu(), expected, rtol=1e-4, atol=1e-5)
