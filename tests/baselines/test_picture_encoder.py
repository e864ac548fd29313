"""Encoders of pictures: weights by seed, normalised pictures, float32 at the end, chunks that change no gradient."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ident3d.baselines.model_loss import model_loss
from ident3d.baselines.outputs import output_normalisation
from ident3d.baselines.picture_encoder import WIDTH, PictureEncoder, encode_in_chunks, picture_encoder
from ident3d.baselines.threedident_settings import Encoding
from ident3d.errors import SpecError

pytest.importorskip("torchvision")

STATISTICS = (0.4, 0.5, 0.6), (0.1, 0.2, 0.3)
SPACES = ["unbounded", "box", "sphere"]


def make(network: str = "resnet18", dim: int = 3, side: int = 16, seed: int = 0, **of: Any) -> PictureEncoder:
    return picture_encoder(Encoding(network, **of), dim, statistics=STATISTICS, side=side, seed=seed)


def pictures(n: int, side: int = 16, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (n, 3, side, side), dtype=torch.uint8, generator=generator)


class Flat(nn.Module):
    """A network with `WIDTH * dim` outputs, linear in the pictures, that keeps what it is given."""

    def __init__(self, dim: int, side: int = 4) -> None:
        super().__init__()
        self.layer = nn.Linear(3 * side * side, WIDTH * dim)
        self.given = torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        self.given = x
        y: Tensor = self.layer(x.flatten(1))
        return y


def flat(space: str = "unbounded", dim: int = 3, **of: Any) -> PictureEncoder:
    torch.manual_seed(0)
    return PictureEncoder(Flat(dim), output_normalisation(space, dim, **of), STATISTICS)


def same_state(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.state_dict().items(), other.state_dict().items(), strict=True)
    return all(name == name_2 and torch.equal(x, y) for (name, x), (name_2, y) in pairs)


# What it is


@pytest.mark.parametrize(
    ("network", "dim", "side"),
    [("resnet18", 10, 16), ("resnet18", 2, 32), ("shufflenet_v2_x0_5", 3, 17), ("mobilenet_v3_small", 1, 24)],
)
def test_representations_are_float32_of_n_dimensions(network: str, dim: int, side: int) -> None:
    encoder = make(network, dim, side)
    assert (encoder.linear.in_features, encoder.linear.out_features) == (10 * dim, dim)
    for training in (True, False):
        f = encoder.train(training)(pictures(4, side))
        assert (f.dtype, f.shape) == (torch.float32, (4, dim))
        assert bool(f.isfinite().all())


def test_networks_of_every_kind_are_encoders() -> None:
    """That of a version of its own, which its state has to name."""
    assert make("mnasnet0_5", side=32)(pictures(2, 32)).shape == (2, 3)


@pytest.mark.parametrize("network", ["resnet18", "mobilenet_v2"])  # the second draws for its dropout
def test_initial_weights_are_a_function_of_the_seed(network: str) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one = make(network, side=32, seed=4)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert same_state(make(network, side=32, seed=4), one)
    weights = [(x, y) for x, y in zip(one.parameters(), make(network, side=32, seed=5).parameters(), strict=True)]
    drawn = [(x, y) for x, y in weights if x.ndim > 1]  # biases and scales begin at constants
    assert drawn
    assert not any(torch.equal(x, y) for x, y in drawn)


def test_a_trial_with_the_size_of_pictures_leaves_no_trace() -> None:
    encoder = make("resnet18")
    layers = [m for m in encoder.modules() if isinstance(m, nn.BatchNorm2d)]
    assert len(layers) == 20
    for layer in layers:
        assert layer.num_batches_tracked is not None
        assert layer.running_mean is not None
        assert int(layer.num_batches_tracked) == 0
        assert not layer.running_mean.any()
    assert same_state(encoder, make("resnet18", side=48))
    assert all(parameter.grad is None and parameter.requires_grad for parameter in encoder.parameters())


def test_it_is_the_published_head_on_the_network() -> None:
    """Leaky ReLU of slope 0.01, a linear layer, the model space."""
    encoder = flat("box", magnitude=3.0)
    hidden: list[Tensor] = []
    encoder.network.register_forward_hook(lambda module, args, result: hidden.append(result.double()))
    f = encoder(pictures(6, 4))
    assert bool((hidden[0] < 0).any())
    weight, bias = encoder.linear.weight.double(), encoder.linear.bias.double()
    y = torch.where(hidden[0] > 0, hidden[0], 0.01 * hidden[0]) @ weight.T + bias
    torch.testing.assert_close(f.double(), 3 * torch.sigmoid(y), rtol=1e-5, atol=1e-6)


def test_pictures_are_normalised_by_the_statistics_given() -> None:
    encoder, x = flat(), pictures(5, 4)
    encoder(x)
    given = encoder.network.given
    assert isinstance(given, Tensor)
    mean, std = (torch.tensor(values, dtype=torch.float64).reshape(3, 1, 1) for values in STATISTICS)
    torch.testing.assert_close(given.double(), (x.double() / 255 - mean) / std, rtol=1e-5, atol=1e-5)
    assert given.is_contiguous(memory_format=torch.channels_last)


def test_a_checkpoint_holds_the_statistics() -> None:
    encoder, x = make("resnet18").eval(), pictures(4)
    other = picture_encoder(
        Encoding("resnet18"), 3, statistics=((0.0, 0.0, 0.0), (1.0, 1.0, 1.0)), side=16, seed=9
    ).eval()
    assert not torch.equal(other(x), encoder(x))
    other.load_state_dict(encoder.state_dict())
    assert torch.equal(other(x), encoder(x))


@pytest.mark.parametrize("space", SPACES)
def test_the_last_layer_is_float32_whatever_the_rest_is(space: str) -> None:
    encoder, x = flat(space), pictures(6, 4)
    hidden: list[Tensor] = []
    encoder.network.register_forward_hook(lambda module, args, result: hidden.append(result))
    with torch.autocast("cpu", torch.bfloat16):
        f = encoder(x)
    assert hidden[0].dtype == torch.bfloat16
    assert f.dtype == torch.float32
    expected = encoder.output(encoder.linear(nn.functional.leaky_relu(hidden[0].float())))
    assert torch.equal(f, expected)
    assert not torch.equal(f, encoder(x))


# Model spaces


@pytest.mark.parametrize("parametrisation", ["linear", "log"])
def test_in_a_box_each_coordinate_is_below_its_bound(parametrisation: str) -> None:
    encoder = make(space="box", magnitude=2.5, parametrisation=parametrisation)
    assert encoder.output.scales().tolist() == pytest.approx([2.5] * 3)
    with torch.no_grad():
        encoder.linear.weight.mul_(20)  # to fill it
        f = encoder(pictures(64))
    assert 0 <= float(f.min()) < 0.5
    assert 2.0 < float(f.max()) <= 2.5
    (bounds,) = encoder.output.scale_parameters()
    assert bounds.requires_grad
    assert bounds.shape == (3,)


@pytest.mark.parametrize("parametrisation", ["linear", "log"])
def test_on_a_sphere_each_has_the_norm_of_the_radius(parametrisation: str) -> None:
    encoder = make(space="sphere", magnitude=4.0, parametrisation=parametrisation)
    f = encoder(pictures(16))
    torch.testing.assert_close(f.norm(dim=1), torch.full((16,), 4.0))
    (radius,) = encoder.output.scale_parameters()
    assert radius.requires_grad


def test_unbounded_are_the_outputs_of_the_linear_layer() -> None:
    encoder, x = flat("unbounded"), pictures(5, 4)
    outputs: list[Tensor] = []
    encoder.linear.register_forward_hook(lambda module, args, result: outputs.append(result))
    assert torch.equal(encoder(x), outputs[0])
    assert encoder.output.scale_parameters() == []


# What is refused


@pytest.mark.filterwarnings("ignore:The default weight initialization:FutureWarning")
@pytest.mark.parametrize(
    ("network", "side", "words"),
    [
        ("googlenet", 32, "'googlenet' does not encode pictures of 32 x 32 px"),  # a tuple in training
        ("inception_v3", 32, "'inception_v3' does not encode pictures of 32 x 32 px"),  # too small
        pytest.param("inception_v3", 299, "'inception_v3' does not encode", marks=pytest.mark.slow),  # a tuple
        ("vit_b_16", 32, r"'vit_b_16' does not encode pictures of 32 x 32 px \(.*224"),  # a size of its own
        ("squeezenet1_1", 8, "'squeezenet1_1' does not encode pictures of 8 x 8 px"),
    ],
)
def test_networks_that_do_not_encode_the_pictures_are_refused(network: str, side: int, words: str) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    with pytest.raises(SpecError, match=f"encoder = {words}.*one tensor.* this size: resnet18 does"):
        make(network, side=side)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("network", ["resnet", "ResNet-18", "", "fcn_resnet50", "quantized_resnet18", "r3d_18"])
def test_other_networks_are_refused(network: str) -> None:
    with pytest.raises(SpecError, match=rf"encoder = '{network}': expected a classifier .* such as resnet18"):
        make(network)


def test_a_sphere_of_one_dimension_is_refused() -> None:
    with pytest.raises(SpecError, match="dim of a sphere = 1"):
        make(dim=1, space="sphere")


# Chunks


def plain() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU(), nn.Flatten(), nn.Linear(5 * 36, 4))


def normalising() -> nn.Module:
    layers = [nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.Flatten(), nn.Linear(5 * 36, 4), nn.BatchNorm1d(4)]
    return nn.Sequential(*layers)


def dropping() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 64, 30), nn.ReLU(), nn.Dropout(0.5), nn.Linear(30, 4))


def net(kind: Callable[[], nn.Module], dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(3)
    return kind().to(dtype)


def pairs(n: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(8)
    x = torch.randn(n, 3, 8, 8, generator=generator, dtype=dtype)
    return x, x + 0.1 * torch.randn(x.shape, generator=generator, dtype=dtype)


def infonce(codes: tuple[Tensor, Tensor]) -> Tensor:
    return model_loss("normal", *codes, tau=1.0, include_self=True, positive_in_denominator=True)


def in_one_graph(encoder: nn.Module, x: Tensor, positive: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """The same pieces, with the activations of all kept."""
    pieces = []
    for start in range(0, len(x), chunk):
        part = slice(start, start + chunk)
        pieces.append(encoder(torch.cat([x[part], positive[part]])).chunk(2))
    return torch.cat([first for first, _ in pieces]), torch.cat([second for _, second in pieces])


def gradients(encoder: nn.Module, codes: tuple[Tensor, Tensor]) -> list[Tensor]:
    encoder.zero_grad()
    infonce(codes).backward()  # type: ignore[no-untyped-call]
    found = [parameter.grad for parameter in encoder.parameters()]
    assert all(gradient is not None and bool(gradient.any()) for gradient in found)
    return [gradient.clone() for gradient in found if gradient is not None]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 9, 10, 11, 100])
def test_chunks_change_neither_loss_nor_gradients(chunk: int, dtype: torch.dtype) -> None:
    encoder, (x, positive) = net(plain, dtype), pairs(10, dtype)
    whole = encode_in_chunks(encoder, x, positive, None)
    codes = encode_in_chunks(encoder, x, positive, chunk)
    assert all(code.shape == (10, 4) and code.dtype == dtype for code in codes)
    torch.testing.assert_close(codes, whole)
    torch.testing.assert_close(whole, (encoder(x), encoder(positive)))
    torch.testing.assert_close(infonce(codes), infonce(whole))
    expected = gradients(encoder, whole)
    torch.testing.assert_close(gradients(encoder, codes), expected)


@pytest.mark.parametrize("chunk", [2, 3, 4, 7])
def test_batch_normalisation_sees_a_chunk_at_a_time(chunk: int) -> None:
    encoder, (x, positive) = net(normalising), pairs(8)
    naive = copy.deepcopy(encoder)
    codes = encode_in_chunks(encoder, x, positive, chunk)
    expected = in_one_graph(naive, x, positive, chunk)
    torch.testing.assert_close(codes, expected)
    assert not torch.allclose(codes[0], encode_in_chunks(copy.deepcopy(encoder), x, positive, None)[0])
    torch.testing.assert_close(gradients(encoder, codes), gradients(naive, expected))
    assert same_state(encoder, naive)  # after the second pass, too
    assert int(encoder.get_buffer("1.num_batches_tracked")) == -(-8 // chunk)
    for n in (5, 6):  # and the next steps begin there
        parts = x[:n], positive[:n]
        codes, expected = encode_in_chunks(encoder, *parts, 2), in_one_graph(naive, *parts, 2)
        torch.testing.assert_close(gradients(encoder, codes), gradients(naive, expected))
        assert same_state(encoder, naive)


@pytest.mark.parametrize("chunk", [2, 3])
def test_a_chunk_is_dropped_out_the_same_way_again(chunk: int) -> None:
    encoder, (x, positive) = net(dropping), pairs(6)
    found = []
    for encode in (encode_in_chunks, in_one_graph):
        torch.manual_seed(11)
        codes = encode(encoder, x, positive, chunk)
        torch.manual_seed(12)  # the backward pass has no say
        found.append([*codes, *gradients(encoder, codes)])
    torch.testing.assert_close(*found)


def test_a_chunk_has_the_number_format_of_the_first_pass() -> None:
    """Backward runs outside of autocast."""
    encoder, (x, positive) = net(plain, torch.float32), pairs(6, torch.float32)
    found = []
    for encode in (encode_in_chunks, in_one_graph):
        with torch.autocast("cpu", torch.bfloat16):
            codes = encode(encoder, x, positive, 2)
        assert codes[0].dtype == torch.bfloat16
        found.append(gradients(encoder, codes))
    torch.testing.assert_close(*found, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("chunk", "sizes"), [(None, [12]), (6, [12]), (4, [8, 4, 8, 4]), (3, [6, 6] * 2), (1, [2] * 12)]
)
def test_a_chunk_is_computed_twice_and_all_at_once_once(chunk: int | None, sizes: list[int]) -> None:
    encoder, (x, positive), seen = net(plain), pairs(6), list[int]()
    encoder.register_forward_pre_hook(lambda module, args: seen.append(len(args[0])))
    gradients(encoder, encode_in_chunks(encoder, x, positive, chunk))
    assert sorted(seen) == sorted(sizes)


def test_an_encoder_of_pictures_goes_in_chunks() -> None:
    encoder, x, positive = make("resnet18"), pictures(7, seed=1), pictures(7, seed=2)
    naive = copy.deepcopy(encoder)
    codes, expected = encode_in_chunks(encoder, x, positive, 3), in_one_graph(naive, x, positive, 3)
    torch.testing.assert_close(codes, expected)
    torch.testing.assert_close(gradients(encoder, codes), gradients(naive, expected))
    assert same_state(encoder, naive)
