"""All scores at once: those of the metrics, deaf to what they should ignore; the table says what was measured."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from ident3d.baselines import evaluation
from ident3d.baselines.evaluation import Evaluation, evaluate_codes, evaluation_text, limits_of, percent
from ident3d.ceilings import Ceiling
from ident3d.errors import SpecError
from ident3d.factors import FACTORS
from ident3d.metrics import dci, mcc, r2

NAMES = ("object_x", "object_hue", "ground_hue")
N = 400
Array = NDArray[np.float64]


def made(seed: int = 0, n: int = N, extra: int = 1) -> tuple[Array, Array]:
    """Codes that mix the factors a little, some more of noise; and the factors."""
    generator = np.random.default_rng(seed)
    z = generator.random((n, 3))
    mixed = z @ (np.eye(3) + 0.3 * generator.standard_normal((3, 3))) + 0.1 * generator.standard_normal((n, 3))
    return np.concatenate([mixed, generator.standard_normal((n, extra))], axis=1), z


def refused(text: str) -> Any:
    return pytest.raises(SpecError, match=re.escape(text))


def test_scores_are_those_of_the_metrics() -> None:
    codes, z = made()
    found = evaluate_codes(codes, z, NAMES)
    assert found.r2 == r2(codes, z, names=NAMES)
    assert found.mcc == mcc(codes, z, names=NAMES)
    assert found.mcc_spearman == mcc(codes, z, names=NAMES, correlation="spearman")
    assert found.dci == dci(codes, z, names=NAMES)
    assert found.names == NAMES


@pytest.mark.parametrize("seed", range(3))
def test_order_sign_scale_and_offset_of_codes_count_for_nothing(seed: int) -> None:
    codes, z = made(seed)
    order = np.random.default_rng(seed).permutation(4)
    mapped = (codes * [-1e-3, 2, -50, 1] + [5, 0, -1, 3])[:, order]
    before, after = (evaluate_codes(c, z, NAMES) for c in (codes, mapped))
    for name, scores in before.per_factor().items():
        np.testing.assert_allclose(after.per_factor()[name], scores, rtol=1e-9)
    for name, score in before.headline().items():
        assert after.headline()[name] == pytest.approx(score, abs=2e-3)
    assert tuple(order[list(after.mcc.assignment)]) == before.mcc.assignment
    flips = np.sign([-1, 2, -50, 1])[list(before.mcc.assignment)]
    assert tuple(flips * after.mcc.signs) == before.mcc.signs


def test_noise_lowers_every_score_and_perfect_codes_have_1() -> None:
    _, z = made(n=2000)
    noise = np.random.default_rng(5).standard_normal(z.shape)
    falling = [evaluate_codes(z[:, ::-1] + scale * noise, z, NAMES).headline() for scale in (0, 0.1, 1)]
    for name in ("r2", "mcc", "mcc_spearman", "informativeness"):
        values = [scores[name] for scores in falling]
        assert values[0] == pytest.approx(1, abs=1e-3)
        assert values[0] > values[1] + 0.01 > values[2] + 0.1
    assert falling[0]["disentanglement"] == falling[0]["completeness"] == pytest.approx(1, abs=1e-3)


def test_tensors_and_factors_are_taken() -> None:
    codes, z = made()
    table = FACTORS.select(NAMES)
    same = evaluate_codes(torch.tensor(codes), torch.tensor(z), table)
    assert same == evaluate_codes(codes, z, NAMES)


def test_headline_and_scores_by_factor() -> None:
    codes, z = made()
    found = evaluate_codes(codes, z, NAMES)
    assert found.dci is not None
    assert found.headline() == {
        "r2": found.r2.mean,
        "mcc": found.mcc.mean,
        "mcc_spearman": found.mcc_spearman.mean,
        "disentanglement": found.dci.disentanglement,
        "completeness": found.dci.completeness,
        "informativeness": found.dci.informativeness,
    }
    for name, scores in found.per_factor().items():
        assert found.headline()[name] == pytest.approx(np.mean(scores))
        assert len(scores) == 3
    assert len(set(found.per_factor().values())) == 3


def test_dci_is_plain_or_left_out() -> None:
    codes, z = made()
    found, without = (evaluate_codes(codes, z, NAMES, with_dci=asked) for asked in (True, False))
    plain = json.loads(json.dumps(found.to_plain_dci(), allow_nan=False))
    assert plain["disentanglement"] == found.headline()["disentanglement"]
    assert np.shape(plain["importance"]) == (3, 4)
    assert without.dci is None
    assert without.to_plain_dci() == {}
    assert set(found.headline()) - set(without.headline()) == {"disentanglement", "completeness", "informativeness"}
    assert without.r2 == found.r2


def test_dci_of_many_rows_is_of_some_that_a_seed_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    codes, z = made()
    monkeypatch.setattr(evaluation, "DCI_ROWS", N)
    assert evaluate_codes(codes, z, NAMES, seed=1).dci == dci(codes, z, names=NAMES)
    monkeypatch.setattr(evaluation, "DCI_ROWS", N // 2)
    one, same, other = (evaluate_codes(codes, z, NAMES, seed=seed) for seed in (1, 1, 2))
    assert one == same
    assert one.dci not in (other.dci, dci(codes, z, names=NAMES))
    assert one.r2 == r2(codes, z, names=NAMES)  # of all rows
    assert evaluate_codes(torch.tensor(codes), torch.tensor(z), NAMES, seed=1) == one


def test_drawn_rows_keep_their_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second half's codes are turned about: a map of the first must fail there, and rows that were mixed not."""
    _, z = made(n=1000)
    codes = np.where(np.arange(1000)[:, None] < 500, z, 1 - z)
    for most in (1000, 300):
        monkeypatch.setattr(evaluation, "DCI_ROWS", most)
        assert evaluate_codes(codes, z, NAMES).headline()["informativeness"] < -2


def test_a_constant_code_is_uncorrelated_and_constant_codes_are_refused() -> None:
    codes, z = made()
    codes[:, 3] = 0.3
    found = evaluate_codes(codes, z, NAMES)
    assert found.mcc.constant_codes == (3,)
    codes[:, 0] = codes[:, 1] = 2.0
    assert evaluate_codes(codes, z, NAMES, with_dci=False).mcc.per_factor.count(0.0) == 2
    codes[:, 2] = 1.0
    with refused("every code is constant"):
        evaluate_codes(codes, z, NAMES)


def test_what_has_no_score_is_refused() -> None:
    codes, z = made()
    with refused("2 codes for 3 factors"):
        evaluate_codes(codes[:, :2], z, NAMES)
    with refused("factor ground_hue is constant"):
        evaluate_codes(codes, z * [1, 1, 0], NAMES)
    with refused("names has 2 entries for 3 columns"):
        evaluate_codes(codes, z, NAMES[:2])
    with refused("seed = -1: expected a whole number"):
        evaluate_codes(codes, z, NAMES, seed=-1)
    codes[7, 0] = np.nan
    with refused("not finite"):
        evaluate_codes(codes, z, NAMES)


def test_what_dci_alone_refuses_is_said_and_costs_no_other_score(monkeypatch: pytest.MonkeyPatch) -> None:
    codes, z = made()
    monkeypatch.setitem(sys.modules, "sklearn", None)
    found = evaluate_codes(codes, z, NAMES)
    assert found.r2 == r2(codes, z, names=NAMES)
    assert found.dci is None
    assert "pip install 'ident3d[baselines]'" in found.to_plain_dci()["absent"]
    assert evaluate_codes(codes, z, NAMES, with_dci=False).to_plain_dci() == {}


CEILINGS = (
    Ceiling("object_hue", 0.9629630, 0.9813068, ((1 / 6, 1 / 2),)),
    Ceiling("object_x", 1.0, 1.0),
    Ceiling("spotlight_hue", 0.5, 0.6, ((0.0, 0.5),)),
)


def table(found: Evaluation, ceilings: tuple[Ceiling, ...] | None = None) -> dict[str, list[str]]:
    """The lines of the table by their first word."""
    lines = evaluation_text(found, ceilings).splitlines()
    assert max(map(len, lines)) <= 160
    cells = [re.split(r"\s{2,}", line) for line in lines]
    return {row[0]: row[1:] for row in cells if row[0] in ("factor", *NAMES, "mean")}


def test_the_table_holds_each_factor_and_the_mean_in_percent() -> None:
    found = evaluate_codes(*made(), NAMES, with_dci=False)
    lines = table(found)
    assert list(lines) == ["factor", *NAMES, "mean"]
    assert lines["factor"] == ["R2", "MCC"]
    for name, r2_of, mcc_of in zip(NAMES, found.r2.per_factor, found.mcc.per_factor, strict=True):
        assert lines[name] == [f"{100 * r2_of:.2f}", f"{100 * mcc_of:.2f}"]
    assert lines["mean"] == [f"{100 * found.r2.mean:.2f}", f"{100 * found.mcc.mean:.2f}"]
    assert table(found, (CEILINGS[1],)) == table(found, CEILINGS[1:]) == lines  # none of these factors is below 1


def test_ceilings_below_1_stand_beside_their_factors() -> None:
    found = evaluate_codes(*made(), NAMES, with_dci=False)
    lines = table(found, CEILINGS)
    assert lines["factor"] == ["R2", "MCC", "ceiling R2", "ceiling |corr|"]
    assert lines["object_hue"][2:] == ["96.30", "98.13"]
    assert lines["object_x"][2:] == lines["ground_hue"][2:] == []
    # Of three factors, two of which may reach 100.
    assert lines["mean"][2:] == ["98.77", "99.38"]
    assert "Ceiling:" in evaluation_text(found, CEILINGS)
    assert limits_of(NAMES, CEILINGS) == {"object_hue": CEILINGS[0]}


def test_no_minus_stands_before_a_zero() -> None:
    codes, z = made()
    codes[:, :2] = 1.0
    found = evaluate_codes(codes, z, NAMES, with_dci=False)
    assert "-0.00" not in evaluation_text(found)
    assert percent(-0.00001) == "0.00"
    assert percent(-0.0001) == "-0.01"
