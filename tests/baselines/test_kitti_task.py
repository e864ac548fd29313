"""KITTI Masks as the trainer sees them: each seed's own pairs, the losses of the settings, codes, scores."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats  # type: ignore[import-untyped]
from torch import Tensor
from torch.distributions import Normal, kl_divergence
from torch.nn import functional

import ident3d
from ident3d.baselines import kitti_task
from ident3d.baselines.kitti_settings import KittiSettings
from ident3d.baselines.kitti_task import AHEAD, KittiTask, StepPairs, check_data
from ident3d.baselines.losses import dot_infonce, lp_infonce
from ident3d.baselines.slowvae import SlowVAE, slowvae_terms
from ident3d.baselines.training import RunOptions, TrainingSettings, train
from ident3d.datasets.kitti_masks import KITTI_FACTORS, KittiMasks
from ident3d.errors import SpecError

CPU = torch.device("cpu")
SEEDS = (4, 0)
KINDS: dict[str, dict[str, Any]] = {
    "laplace": {},
    "box": {"model_space": "box", "magnitude": 3.0, "parametrisation": "log"},
    "slowvae": {"model": "slowvae"},
}


@functools.cache
def silhouettes(max_delta_t: int = 1) -> KittiMasks:
    """Twenty sequences of up to 30 frames."""
    return KittiMasks(synthetic=True, sequences=20, frames=30, max_delta_t=max_delta_t)


def tiny(**changes: Any) -> KittiSettings:
    return KittiSettings(**{"dim": 3, "batch": 8, "samples": 64, **changes})


def task_of(seeds: Sequence[int] = SEEDS, max_delta_t: int = 1, **changes: Any) -> KittiTask:
    settings = tiny(max_delta_t=max_delta_t, **changes)
    return KittiTask(settings, silhouettes(max_delta_t), seeds, CPU)


def spread_out(task: KittiTask) -> KittiTask:
    """With codes that differ from each other more than those of untrained encoders do."""
    encoder = task.model.encoder if isinstance(task.model, SlowVAE) else task.model
    with torch.no_grad():
        encoder.linear.weight.mul_(20)
    return task


# Pairs.


@pytest.mark.parametrize("max_delta_t", [1, 5])
def test_a_step_has_the_pairs_of_each_seeds_own_series(max_delta_t: int) -> None:
    """In any order, past the blocks of steps whose frames are chosen at once, and into the second pass."""
    data = silhouettes(max_delta_t)
    pairs = StepPairs(data, 6, SEEDS, CPU)
    assert len(data) // 6 < AHEAD
    for step in (0, 1, AHEAD - 1, AHEAD, 2 * AHEAD + 3, AHEAD - 1, 0, 7, AHEAD + 1):
        found = pairs.at(step)
        assert (found.dtype, tuple(found.shape)) == (torch.uint8, (2, 12, 1, 64, 64))
        for of_seed, seed in zip(found, SEEDS, strict=True):
            anchors, positives, _, _ = data.pairs(6, seed=seed).batch(step)
            assert torch.equal(of_seed, torch.cat([anchors, positives]))
    assert not torch.equal(pairs.at(0)[0], pairs.at(0)[1])


def test_what_becomes_of_a_step_leaves_the_store_as_it_is() -> None:
    data = silhouettes()
    pairs, before = StepPairs(data, 6, SEEDS, CPU), data.masks.copy()
    first = pairs.at(3).clone()
    pairs.at(3).fill_(9)
    assert torch.equal(pairs.at(3), first)
    np.testing.assert_array_equal(data.masks, before)


def test_more_pairs_than_there_are_are_refused() -> None:
    anchors = len(silhouettes())
    assert StepPairs(silhouettes(), anchors, [0], CPU).at(1).shape[1] == 2 * anchors
    with pytest.raises(SpecError, match=rf"batch_size = {anchors + 1}: expected at most {anchors}"):
        StepPairs(silhouettes(), anchors + 1, [0], CPU)


# Losses.


@pytest.mark.parametrize("switches", [(0.7, True, True), (1.0, False, True), (1.0, True, False)], ids=str)
@pytest.mark.parametrize(
    ("conditional", "space", "p"),
    [("laplace", "unbounded", 1.0), ("normal", "box", 2.0), ("gennorm(3)", "unbounded", 3.0), ("vmf", "sphere", None)],
)
def test_contrastive_losses_are_infonce_of_the_codes(
    conditional: str, space: Any, p: float | None, switches: tuple[float, bool, bool]
) -> None:
    of_loss: dict[str, Any] = dict(zip(("tau", "include_self", "positive_in_denominator"), switches, strict=True))
    task = spread_out(task_of(max_delta_t=5, conditional=conditional, model_space=space, **of_loss))
    step = 70
    batches = [silhouettes(5).pairs(8, seed=seed).batch(step) for seed in SEEDS]
    with torch.no_grad():
        x, positive = (task.model(torch.stack(part)) for part in list(zip(*batches, strict=True))[:2])
        infonce = dot_infonce if p is None else functools.partial(lp_infonce, p=p)
        torch.testing.assert_close(task.losses(step), infonce(x, positive, **of_loss))
    assert not torch.equal(task.losses(step), task.losses(step + 1))
    assert torch.equal(task.losses(step), task.losses(step))


def sampled(task: KittiTask, step: int) -> tuple[Tensor, dict[str, Tensor]]:
    """SlowVAE's losses of a step, and what they are of: masks, means, logarithms of variances, samples, logits."""
    model = task.model
    assert isinstance(model, SlowVAE)
    decoded: list[Tensor] = []
    hook = model.decoder.register_forward_pre_hook(lambda module, given: decoded.append(given[0]))
    with torch.no_grad():
        losses = task.losses(step)
        hook.remove()
        masks, (z,) = task.pairs.at(step), decoded
        mean, log_variance = model.posterior(masks)
        return losses, {"masks": masks, "m": mean, "v": log_variance, "z": z, "logits": model.decode(z)}


def test_slowvae_losses_are_its_terms() -> None:
    task = spread_out(task_of(model="slowvae", beta=0.5, gamma=3.0, rate=2.0))
    losses, of = sampled(task, 5)
    terms = slowvae_terms(of["logits"], of["masks"], of["m"], of["v"], 2.0)
    torch.testing.assert_close(losses, 2 * terms.reconstruction + 0.5 * terms.normal + 3.0 * terms.transition)


def test_slowvaes_noise_is_standard_normal_and_a_function_of_seed_and_step() -> None:
    def noise(task: KittiTask, step: int) -> Tensor:
        _, of = sampled(task, step)
        return (of["z"] - of["m"]) / (of["v"] / 2).exp()

    task = task_of(model="slowvae", dim=10)
    drawn = torch.stack([noise(task, step) for step in range(6)])
    assert stats.kstest(drawn.flatten().numpy(), "norm").pvalue > 0.001
    assert len(set(drawn.flatten().tolist())) > 0.99 * drawn.numel()
    torch.rand(3)  # torch's own generator is not read
    torch.testing.assert_close(noise(task, 4), drawn[4])
    alone = noise(task_of(SEEDS[1:], model="slowvae", dim=10), 4)
    torch.testing.assert_close(alone[0], drawn[4, 1], rtol=1e-4, atol=1e-4)


def test_without_gamma_the_losses_are_those_of_a_beta_vae() -> None:
    losses, of = sampled(spread_out(task_of(model="slowvae", beta=4.0, gamma=0.0)), 2)
    standard = Normal(torch.zeros(()), torch.ones(()))
    kl = kl_divergence(Normal(of["m"], (of["v"] / 2).exp()), standard).sum(-1)
    nll = functional.binary_cross_entropy_with_logits(of["logits"], of["masks"].float(), reduction="none")
    torch.testing.assert_close(losses, 2 * (nll.sum((2, 3, 4)) + 2.0 * kl).mean(1))


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_is_trained_alike_alone_and_beside_others(kind: str) -> None:
    seeds, options = (7, 0, 3), RunOptions(1, 3, quiet=True)
    together = task_of(seeds, **KINDS[kind])
    beside = train(together, TrainingSettings(3, 1e-3), options).curve[-1]
    state = together.model.state_dict()
    for k, seed in enumerate(seeds):
        alone = task_of([seed], **KINDS[kind])
        own = train(alone, TrainingSettings(3, 1e-3), options).curve[-1]
        for name in ("loss", "mcc_spearman", "mcc", "r2"):
            assert own[name][0] == pytest.approx(beside[name][k], rel=1e-4, abs=1e-4)
        for name, value in alone.model.state_dict().items():
            torch.testing.assert_close(value[0], state[name][k], rtol=1e-4, atol=1e-5)
    assert len(set(beside["loss"])) == 3


# Codes and scores.


@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_those_of_the_codes_of_the_scored_frames(kind: str) -> None:
    task, data = spread_out(task_of(samples=100, **KINDS[kind])), silhouettes()
    task.model.eval()
    masks = torch.from_numpy(data.masks[task.scored]).unsqueeze(1)
    with torch.no_grad():
        codes = task.model(torch.stack([masks, masks]))
    torch.testing.assert_close(task.codes(), codes)
    latents, scores = data.latents[task.scored], task.scores()
    detailed = task.detailed_scores(task.codes())
    assert scores.keys() == detailed.keys() == {"mcc_spearman", "mcc", "r2"}
    for k, of_seed in enumerate(codes):
        expected: dict[str, Any] = {
            "mcc_spearman": ident3d.mcc(of_seed, latents, correlation="spearman"),
            "mcc": ident3d.mcc(of_seed, latents, correlation="pearson"),
            "r2": ident3d.r2(of_seed, latents),
        }
        for name, score in expected.items():
            assert scores[name][k] == pytest.approx(score.mean, abs=1e-4)
            assert detailed[name][k].per_factor == pytest.approx(score.per_factor, abs=1e-4)
    assert scores["mcc_spearman"] != scores["mcc"]
    matched = [score.per_factor for score in task.matched(task.codes())]
    assert matched == [score.per_factor for score in detailed["mcc_spearman"]]


def test_codes_come_in_order_however_many_are_encoded_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    task = spread_out(task_of(samples=70))
    whole, frames = task.codes(), np.array([5, 3, 3, 390, 0])
    some = task.codes(frames)
    assert whole.shape == (2, 70, 3)
    monkeypatch.setattr(kitti_task, "AT_ONCE", 2)
    torch.testing.assert_close(task.codes(frames), some)
    monkeypatch.setattr(kitti_task, "AT_ONCE", 33)
    torch.testing.assert_close(task.codes(), whole)
    torch.testing.assert_close(task.codes(task.scored[:4]), whole[:, :4])
    assert torch.equal(some[:, 1], some[:, 2])


def test_the_scored_frames_are_the_same_for_all_and_distinct() -> None:
    scored = task_of(samples=200).scored
    for k, task in enumerate([task_of([9], samples=200), *(task_of(samples=200, **of) for of in KINDS.values())]):
        torch.manual_seed(k)
        np.testing.assert_array_equal(task.scored, scored)
    np.testing.assert_array_equal(task_of(samples=200, max_delta_t=5, batch=32, dim=10).scored, scored)
    assert len(set(scored.tolist())) == 200
    frames = len(silhouettes().masks)
    assert set(scored.tolist()) <= set(range(frames))
    assert stats.kstest(scored / frames, "uniform").pvalue > 0.001
    assert sorted(task_of(samples=frames).scored.tolist()) == list(range(frames))


def test_an_unused_code_counts_as_uncorrelated() -> None:
    """A code less than there are factors leaves one of them without any. Where no code is used, there is no score."""
    task = task_of()
    codes = task.codes()
    codes[1, :, 2] = 0.5
    whole, less = task.matched(codes)
    assert min(whole.per_factor) > 0
    assert min(less.per_factor) == 0 < max(less.per_factor)
    codes[1] = 0.5
    with pytest.raises(SpecError, match="did the encoder collapse"):
        task.matched(codes)


@pytest.mark.parametrize("parametrisation", ["linear", "log"])
def test_box_codes_lie_in_the_box_whose_bounds_are_learned(parametrisation: Any) -> None:
    task = task_of(conditional="normal", model_space="box", magnitude=3.0, parametrisation=parametrisation)
    train(task, TrainingSettings(5, 1e-3, scale_learning_rate=0.1), RunOptions(quiet=True))
    assert task.output is not None
    bounds = task.output.scales()
    assert bounds.shape == (2, 3)
    assert bool(((bounds - 3).abs() > 0.1).all())  # Adam's five steps of a rate of their own
    assert bool(((bounds - 3).abs() < 2).all())
    codes = spread_out(task).codes()
    assert bool((codes >= 0).all())
    assert bool((codes <= bounds.unsqueeze(1)).all())
    assert bool((codes.amax(1) > 0.5 * bounds).all())


# Mistakes.


@pytest.mark.parametrize("kind", KINDS)
def test_data_that_do_not_fit_are_refused(kind: str) -> None:
    data, frames = silhouettes(5), len(silhouettes(5).masks)
    check_data(tiny(max_delta_t=5, samples=frames, **KINDS[kind]), data)
    words = rf"samples = {frames + 1}: KITTI Masks \(SYNTHETIC silhouettes, seed 0\) has {frames} masks"
    with pytest.raises(SpecError, match=words):
        check_data(tiny(max_delta_t=5, samples=frames + 1, **KINDS[kind]), data)
    for max_delta_t in (1, 4):
        settings = tiny(max_delta_t=max_delta_t, **KINDS[kind])
        with pytest.raises(SpecError, match=rf"data of max_delta_t = 5, settings of {max_delta_t}: expected the same"):
            check_data(settings, data)
        with pytest.raises(SpecError, match="data of max_delta_t = 5"):
            KittiTask(settings, data, [0], CPU)


@pytest.mark.parametrize("column", [0, 1, 2])
def test_a_latent_that_never_changes_is_refused(column: int) -> None:
    data = KittiMasks(synthetic=True, sequences=4, frames=30)
    data.latents[:, column] = 21.5
    name = KITTI_FACTORS.names[column]
    with pytest.raises(SpecError, match=rf"silhouettes, seed 0\): {name} is 21\.5 in all masks"):
        check_data(tiny(), data)
    data.latents[::2, column] = 22.0
    check_data(tiny(), data)


def test_what_is_not_scored_does_not_make_a_latent_change() -> None:
    data = KittiMasks(synthetic=True, sequences=4, frames=30)
    settings = tiny(samples=64)
    scored = set(KittiTask(settings, data, [0], CPU).scored.tolist())
    left_out = next(k for k in range(len(data.masks)) if k not in scored)
    data.latents[:, 2] = 100.0
    data.latents[left_out, 2] = 101.0
    with pytest.raises(SpecError, match="area is 100 in all masks that are scored"):
        check_data(settings, data)
