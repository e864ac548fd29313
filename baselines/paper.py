"""The published numbers: tables 1 to 5 of Zimmermann et al. 2021, as data.

R. Zimmermann, Y. Sharma, S. Schneider, M. Bethge, W. Brendel, Contrastive Learning Inverts the Data Generating Process,
ICML 2021. Tables 1 and 2 score multi-layer perceptrons on ten latents (R2, MCC; 5 seeds), table 3 scores KITTI Masks
(MCC; 10 seeds), tables 4 and 5 score 3DIdent on its test and its training set (R2 and MCC; 3 seeds). All scores are
mean and standard deviation in percent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ident3d.errors import SpecError

__all__ = [
    "MLP_ROWS",
    "MLPRow",
    "Published",
    "kitti_row",
    "mlp_row",
    "threedident_row",
    "KITTI_ROWS",
    "KittiRow",
    "SUPERVISED_3DIDENT",
    "THREEDIDENT_ROWS",
    "ThreeDIdentRow",
    "ThreeDIdentScores",
]

SpaceName = Literal["sphere", "box", "unbounded"]


@dataclass(frozen=True)
class Published:
    """A score of the paper.

    Attributes:
        mean: over the paper's seeds, in percent.
        std: standard deviation over them, in percentage points.
    """

    mean: float
    std: float


@dataclass(frozen=True)
class MLPRow:
    """A row of table 1 or 2.

    Attributes:
        row: the table's number and the row's place in it, such as 2.10.
        table: 1 (R2) or 2 (MCC).
        space: where latents live.
        marginal: p(z), as MLPSettings reads it.
        conditional: p(z~ | z), as ident3d.conditional reads it.
        model_space: where representations live.
        model: the conditional that the loss assumes.
        matches: column M: whether model and model space are those of the data.
        score: what the table's numbers are.
        identity: the score of the observations themselves. The paper prints it once for all rows of one space and
            marginal, at the first of them; None at the others.
        supervised: the score of an encoder trained on the true latents; None where the paper leaves it blank.
        unsupervised: the score of the contrastive encoder.
    """

    row: str
    table: int
    space: SpaceName
    marginal: str
    conditional: str
    model_space: SpaceName
    model: str
    matches: bool
    score: Literal["r2", "mcc"]
    identity: Published | None
    supervised: Published | None
    unsupervised: Published | None


@dataclass(frozen=True)
class KittiRow:
    """A row of table 3: KITTI Masks, MCC by Spearman correlation.

    Attributes:
        row: such as 3.10.
        mean_dt_s: mean time between the frames of a pair, in seconds.
        model: slowvae, or the conditional that the contrastive loss assumes.
        model_space: where representations live.
        mcc: the score.
    """

    row: str
    mean_dt_s: float
    model: Literal["slowvae", "laplace", "normal"]
    model_space: SpaceName
    mcc: Published


@dataclass(frozen=True)
class ThreeDIdentScores:
    """R2 and MCC on one set of 3DIdent."""

    r2: Published
    mcc: Published


@dataclass(frozen=True)
class ThreeDIdentRow:
    """A row of tables 4 (test set) and 5 (training set), which list the same encoders.

    Attributes:
        row: the row of table 4, such as 4.1.
        conditional: the law of positive pairs, or SimCLR's augmentations.
        model_space: where representations live.
        model: the conditional that the loss assumes.
        matches: column M.
        identity_test: R2 without training, table 4; printed at the first row alone.
        identity_train: the same, table 5.
        test: table 4.
        train: table 5; None where the paper leaves it blank.
    """

    row: str
    conditional: Literal["normal", "laplace", "augmentations"]
    model_space: SpaceName
    model: Literal["normal", "vmf"]
    matches: bool
    identity_test: Published | None
    identity_train: Published | None
    test: ThreeDIdentScores
    train: ThreeDIdentScores | None


# The paper's own notation names one parameter, such as Laplace(0.05) and GenNorm(3; 0.05). It stands here as the scale
# of ident3d's law of that name, as it is given: for a normal law that is the standard deviation.
#
# Each line: space, marginal, conditional, model space, model, M, then identity, supervised and unsupervised as
# MEAN±STD, or - where the paper is blank.
_MLP = {
    1: """
sphere     uniform     vmf(1)           sphere     vmf         yes  66.98±2.79  99.71±0.05  99.42±0.05
sphere     uniform     vmf(10)          sphere     vmf         no   -           -           99.86±0.01
sphere     uniform     laplace(0.05)    sphere     vmf         no   -           -           99.91±0.01
sphere     uniform     normal(0.05)     sphere     vmf         no   -           -           99.86±0.00
box        uniform     normal(0.05)     unbounded  normal      no   67.93±7.40  99.78±0.06  99.60±0.02
box        uniform     laplace(0.05)    unbounded  normal      no   -           -           99.64±0.02
box        uniform     laplace(0.05)    unbounded  gennorm(3)  no   -           -           99.70±0.02
box        uniform     normal(0.05)     unbounded  gennorm(3)  no   -           -           99.69±0.02
sphere     normal(1)   laplace(0.05)    sphere     vmf         no   63.37±2.41  99.70±0.07  99.02±0.01
sphere     normal(1)   normal(0.05)     sphere     vmf         no   -           -           99.02±0.02
unbounded  laplace(1)  normal(1)        unbounded  normal      no   62.49±1.65  99.65±0.04  98.13±0.14
unbounded  normal(1)   normal(1)        unbounded  normal      no   63.57±2.30  99.61±0.17  98.76±0.03
""",
    2: """
box        uniform     laplace(0.05)    box        laplace     yes  46.55±1.34  99.93±0.03  98.62±0.05
box        uniform     gennorm(0.05,3)  box        gennorm(3)  yes  -           -           99.90±0.06
box        uniform     normal(0.05)     box        normal      no   -           -           99.77±0.01
box        uniform     laplace(0.05)    box        normal      no   -           -           99.76±0.02
box        uniform     gennorm(0.05,3)  box        laplace     no   -           -           98.80±0.02
box        uniform     laplace(0.05)    unbounded  laplace     no   -           99.97±0.03  98.57±0.02
box        uniform     gennorm(0.05,3)  unbounded  gennorm(3)  no   -           -           99.85±0.01
box        uniform     normal(0.05)     unbounded  normal      no   -           -           58.26±3.00
box        uniform     laplace(0.05)    unbounded  normal      no   -           -           59.67±2.33
box        uniform     normal(0.05)     unbounded  gennorm(3)  no   -           -           43.80±2.15
""",
}


def _published(text: str) -> Published | None:
    if text == "-":
        return None
    mean, std = text.split("±")
    return Published(float(mean), float(std))


def _mlp_row(table: int, place: int, line: str) -> MLPRow:
    space, marginal, law, model_space, model, matches, *scores = line.split()
    identity, supervised, unsupervised = map(_published, scores)
    return MLPRow(
        row=f"{table}.{place}",
        table=table,
        space=space,  # type: ignore[arg-type]
        marginal=marginal,
        conditional=law.replace(",", ", "),
        model_space=model_space,  # type: ignore[arg-type]
        model=model,
        matches=matches == "yes",
        score="r2" if table == 1 else "mcc",
        identity=identity,
        supervised=supervised,
        unsupervised=unsupervised,
    )


MLP_ROWS: tuple[MLPRow, ...] = tuple(
    _mlp_row(table, place, line)
    for table, text in _MLP.items()
    for place, line in enumerate(text.strip().splitlines(), 1)
)
_BY_NAME = {row.row: row for row in MLP_ROWS}


def mlp_row(row: str) -> MLPRow:
    """A row of table 1 or 2 by its name.

    Args:
        row: such as 1.1 or 2.10; a text, because the number 2.10 is 2.1.

    Raises:
        SpecError: any other value; the text lists the rows.
    """
    if isinstance(row, str) and row in _BY_NAME:
        return _BY_NAME[row]
    hint = "" if isinstance(row, str) else "a text, e.g. '2.1': "
    raise SpecError(f"row = {row!r}: expected {hint}one of {', '.join(_BY_NAME)}")


KITTI_ROWS: tuple[KittiRow, ...] = (
    KittiRow("3.1", 0.05, "slowvae", "unbounded", Published(66.1, 4.5)),
    KittiRow("3.2", 0.05, "laplace", "unbounded", Published(77.1, 1.0)),
    KittiRow("3.3", 0.05, "laplace", "box", Published(74.1, 4.4)),
    KittiRow("3.4", 0.05, "normal", "unbounded", Published(58.3, 5.4)),
    KittiRow("3.5", 0.05, "normal", "box", Published(59.9, 5.5)),
    KittiRow("3.6", 0.15, "slowvae", "unbounded", Published(79.6, 5.8)),
    KittiRow("3.7", 0.15, "laplace", "unbounded", Published(79.4, 1.9)),
    KittiRow("3.8", 0.15, "laplace", "box", Published(80.9, 3.8)),
    KittiRow("3.9", 0.15, "normal", "unbounded", Published(60.2, 8.7)),
    KittiRow("3.10", 0.15, "normal", "box", Published(68.4, 6.7)),
)


def kitti_row(row: str) -> KittiRow:
    """A row of table 3 by its name.

    Args:
        row: 3.1 to 3.10; a text, because the number 3.10 is 3.1.

    Raises:
        SpecError: any other value; the text lists the rows.
    """
    for found in KITTI_ROWS:
        if isinstance(row, str) and found.row == row:
            return found
    hint = "" if isinstance(row, str) else "a text, e.g. '3.1': "
    raise SpecError(f"row = {row!r}: expected {hint}one of {', '.join(found.row for found in KITTI_ROWS)}")


def _scores(r2: tuple[float, float], mcc: tuple[float, float]) -> ThreeDIdentScores:
    return ThreeDIdentScores(Published(*r2), Published(*mcc))


THREEDIDENT_ROWS: tuple[ThreeDIdentRow, ...] = (
    ThreeDIdentRow(
        *("4.1", "normal", "box", "normal", True),
        Published(5.25, 1.20),
        Published(5.35, 0.72),
        test=_scores((96.73, 0.10), (98.31, 0.04)),
        train=_scores((97.83, 0.13), (98.85, 0.07)),
    ),
    ThreeDIdentRow(
        *("4.2", "normal", "unbounded", "normal", False, None, None),
        test=_scores((96.43, 0.03), (54.94, 0.02)),
        train=_scores((97.72, 0.02), (55.90, 2.22)),
    ),
    ThreeDIdentRow(
        *("4.3", "laplace", "box", "normal", False, None, None),
        test=_scores((96.87, 0.08), (98.38, 0.03)),
        train=_scores((97.95, 0.05), (98.94, 0.03)),
    ),
    ThreeDIdentRow(
        *("4.4", "normal", "sphere", "vmf", False, None, None),
        test=_scores((65.74, 0.01), (42.44, 3.27)),
        train=_scores((66.73, 0.03), (42.72, 3.20)),
    ),
    ThreeDIdentRow(
        *("4.5", "augmentations", "sphere", "vmf", False, None, None),
        test=_scores((45.51, 1.43), (46.34, 1.59)),
        train=None,
    ),
)
SUPERVISED_3DIDENT: dict[str, ThreeDIdentScores] = {
    "test": _scores((98.67, 0.03), (99.33, 0.01)),
    "train": _scores((99.98, 0.01), (99.99, 0.01)),
}
"""An encoder of 3DIdent trained on the true latents, without bounds: no row of the tables, printed beside them."""


def threedident_row(row: str) -> ThreeDIdentRow:
    """A row of tables 4 and 5 by its name.

    Args:
        row: 4.1 to 4.5.

    Raises:
        SpecError: any other value; the text lists the rows.
    """
    for found in THREEDIDENT_ROWS:
        if found.row == row:
            return found
    raise SpecError(f"row = {row!r}: expected one of {', '.join(found.row for found in THREEDIDENT_ROWS)}")
