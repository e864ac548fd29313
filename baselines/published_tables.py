"""What each of the paper's tables shows: its rows, their scores, whose results stand beside them, and which of the
settings that a result has can move a score.

Zimmermann et al. 2021, tables 1 to 5. A further table is a function that gives its rows, and an entry of
`TABLES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ident3d.baselines import kitti_settings, mlp_settings, threedident_settings
from ident3d.baselines.paper import (
    KITTI_ROWS,
    MLP_ROWS,
    SUPERVISED_3DIDENT,
    THREEDIDENT_ROWS,
    KittiRow,
    MLPRow,
    Published,
    SpaceName,
    ThreeDIdentRow,
    ThreeDIdentScores,
)
from ident3d.baselines.results import Result
from ident3d.baselines.runs import flat
from ident3d.errors import SpecError
from ident3d.schema import to_plain

__all__ = ["DATA", "PublishedTable", "Score", "StandIn", "TableRow", "published_table"]

DATA = "data."
"""What the names of settings that tell the data begin with. Results of different data are never taken together."""

Settings = Mapping[str, Any]
"""By dotted names, as `flat` gives them."""


@dataclass(frozen=True)
class Score:
    """One score of a row, and whose results it takes.

    Attributes:
        label: such as `unsupervised` or `supervised MCC`.
        mode: of the results: the value of the setting that is the table's `mode`.
        rows: of the results, None among them for results of no row; None for results of any row and of none.
        score: its name in a result.
        paper: as published; None where the paper is blank.
        settings: the paper's.
        counts: whether a setting, given by its name and beside all settings of the result, can move the score.
        stated: settings that have no default: a result must state them.
        required: whether a result that lacks the score is refused; if not, it is left out.
    """

    label: str
    mode: str
    rows: frozenset[str | None] | None
    score: str
    paper: Published | None
    settings: Settings
    counts: Callable[[str, Settings], bool]
    stated: tuple[str, ...] = ()
    required: bool = True


@dataclass(frozen=True)
class TableRow:
    """A row: its name, what it is in a text for each of the table's headings, and its scores in order."""

    name: str
    about: tuple[str, ...]
    scores: tuple[Score, ...]


@dataclass(frozen=True)
class StandIn:
    """Data that may stand in for the paper's: the table's title, and the lines of such results, say so.

    Attributes:
        name: what the data are called, in the plural.
        paper: what the paper's are called.
        holds: whether a result with these settings is one on the data that stand in.
    """

    name: str
    paper: str
    holds: Callable[[Settings], bool]


@dataclass(frozen=True)
class PublishedTable:
    """A table.

    Attributes:
        experiment: of the results.
        title: what it shows.
        headings: one for each text of a row's `about`.
        label: the heading of the scores' labels.
        about: what headings and labels mean, in sentences.
        seeds: that the paper's scores are over.
        presets: in their order.
        rows: gives the rows.
        mode: the setting of a result that tells which of a row's scores it is for.
        digits: decimals that the paper's scores are printed with.
        stand_in: data whose scores have no difference to the paper's, since it would mean nothing; None without such.
    """

    experiment: str
    title: str
    headings: tuple[str, ...]
    label: str
    about: str
    seeds: int
    presets: tuple[str, ...]
    rows: Callable[[], list[TableRow]]
    mode: str = "mode"
    digits: int = 2
    stand_in: StandIn | None = None

    def takes(self, score: Score, result: Result) -> bool:
        """Whether a result of the table's experiment is one of a score's, with or without the score itself."""
        of_mode = result.settings.get(self.mode) == score.mode
        return of_mode and (score.rows is None or result.row in score.rows)

    def comparable(self, result: Result) -> bool:
        """Whether the difference of a result to the paper means something."""
        return self.stand_in is None or not self.stand_in.holds(flat(result.settings))


# A setting that cannot move a mode's score is no difference. What the row is made of stays: a run that carries a row's
# name but not its laws is told from others.
_OF_LOSS = frozenset({"tau", "include_self", "positive_in_denominator"})
_OF_MLP_ROW = ("space", "marginal", "conditional", "model_space", "model")
_SEEN_BY_MLP_IDENTITY = frozenset({*_OF_MLP_ROW, "dim", "layers", "candidates", "samples"})
_MLP_COUNTS: dict[str, Callable[[str, Settings], bool]] = {
    "identity": lambda name, _: name in _SEEN_BY_MLP_IDENTITY,
    "supervised": lambda name, _: name not in {"mode", *_OF_LOSS},
    "unsupervised": lambda name, _: name != "mode",
}


def _mlp_rows(table: int) -> list[TableRow]:
    return [TableRow(row.row, _mlp_about(row), _mlp_scores(row)) for row in MLP_ROWS if row.table == table]


def _matches(row: MLPRow | ThreeDIdentRow) -> str:
    return "yes" if row.matches else "no"


def _mlp_about(row: MLPRow) -> tuple[str, ...]:
    return (row.space, row.marginal, row.conditional, row.model_space, row.model, _matches(row))


def _mlp_scores(row: MLPRow) -> tuple[Score, ...]:
    settings = flat(to_plain(mlp_settings.row_settings(row.row, "paper")))
    return tuple(
        Score(mode, mode, frozenset({row.row}), row.score, getattr(row, mode), settings, counts)
        for mode, counts in _MLP_COUNTS.items()
    )


SYNTHETIC = f"{DATA}synthetic"
_STATED_KITTI = tuple(f"{DATA}{name}" for name in ("name", "synthetic", "sequences", "frames", "seed"))
_OF_BOUNDS = frozenset({"magnitude", "parametrisation", "training.scale_learning_rate"})
_UNSEEN_BY_KITTI_MODEL = {
    "contrastive": frozenset({"beta", "gamma", "rate"}),
    "slowvae": _OF_LOSS | _OF_BOUNDS | {"conditional"},
}
_KITTI_NAMES = {"contrastive": "contrastive", "slowvae": "SlowVAE"}


def _kitti_rows() -> list[TableRow]:
    return [TableRow(row.row, _kitti_about(row), _kitti_scores(row)) for row in KITTI_ROWS]


def _kitti_about(row: KittiRow) -> tuple[str, ...]:
    model = _KITTI_NAMES.get(row.model, f"contrastive, {row.model}")
    return (f"{row.mean_dt_s:g} s", model, row.model_space)


def _kitti_scores(row: KittiRow) -> tuple[Score, ...]:
    """The row's own score; then that of runs which carry its name, but train the other model."""
    settings = flat({**to_plain(kitti_settings.row_settings(row.row, "paper")), "data": {"synthetic": False}})
    own = settings["model"]
    return tuple(
        Score(
            label="MCC" if model == own else f"MCC, {_KITTI_NAMES[model]}",
            mode=model,
            rows=frozenset({row.row}),
            score="mcc_spearman",
            paper=row.mcc if model == own else None,
            settings=settings,
            counts=_kitti_counts(model),
            stated=_STATED_KITTI,
        )
        for model in sorted(_UNSEEN_BY_KITTI_MODEL, key=lambda model: model != own)
    )


def _kitti_counts(model: str) -> Callable[[str, Settings], bool]:
    unseen = _UNSEEN_BY_KITTI_MODEL[model] | {"model"}
    return lambda name, _: name == SYNTHETIC if name.startswith(DATA) else name not in unseen


Part = Literal["test", "train"]
_3DIDENT = {"resolution": 224, "samples": 250_000, "test_samples": 25_000, "scene": "3dident-v1"}
"""The published dataset, as a result's `data` tells it."""
_COUNTED_DATA = frozenset(f"{DATA}{name}" for name in _3DIDENT)
_STATED = (*(f"{DATA}{name}" for name in _3DIDENT), f"{DATA}name")

_OF_MATCHING = frozenset({"match", "allow_self"})
_UNSEEN_BY_PAIRS = {"exact": _OF_MATCHING, "augmented": _OF_MATCHING | {"conditional"}}
_UNSEEN_BY_SUPERVISED = _OF_LOSS | _OF_MATCHING | {"pairs", "conditional", "model"}
# An untrained encoder's radius or bounds only scale its outputs, to which both scores are blind.
_SEEN_BY_IDENTITY = frozenset({"encoding.network", "encoding.space", "factors", "samples"})
# Only training samples are drawn for scoring; each set is scored by itself.
_UNSEEN_BY_PART = {"test": "samples", "train": f"{DATA}test_samples"}


def _counts(mode: str, part: Part) -> Callable[[str, Settings], bool]:
    """Which settings can move the scores that a mode has on the test or training set."""

    def counts(name: str, settings: Settings) -> bool:
        if name.startswith(DATA):
            return name in _COUNTED_DATA and name != _UNSEEN_BY_PART[part]
        if name in ("mode", _UNSEEN_BY_PART[part]):
            return False
        if mode == "identity":
            return name in _SEEN_BY_IDENTITY
        if mode == "supervised":
            return name not in _UNSEEN_BY_SUPERVISED
        return name not in _UNSEEN_BY_PAIRS.get(str(settings["pairs"]), frozenset())

    return counts


def _threedident_rows(part: Part) -> list[TableRow]:
    rows = [
        TableRow(
            row.row,
            (row.conditional, row.model_space, row.model, _matches(row)),
            (_identity_score(row, part), *_encoder_scores("unsupervised", row.row, getattr(row, part), part)),
        )
        for row in THREEDIDENT_ROWS
    ]
    scores = _encoder_scores("supervised", None, SUPERVISED_3DIDENT[part], part)
    return [*rows, TableRow("supervised", ("-", "unbounded", "-", "-"), scores)]


def _identity_score(row: ThreeDIdentRow, part: Part) -> Score:
    paper = row.identity_test if part == "test" else row.identity_train
    # The paper's one number stands at the first row; so do runs that were started without a row.
    rows = frozenset({row.row, *([None] if paper else [])})
    return _threedident_score("identity", "r2", rows, paper, part, _paper_settings(row.row))


def _encoder_scores(mode: str, row: str | None, paper: ThreeDIdentScores | None, part: Part) -> tuple[Score, ...]:
    """R2 and MCC of trained encoders: of a row, or, where supervised, of whichever row's command trained them."""
    rows = None if row is None else frozenset({row})
    settings = _paper_settings("4.1", space="unbounded") if row is None else _paper_settings(row)
    return tuple(
        _threedident_score(mode, score, rows, None if paper is None else getattr(paper, score), part, settings)
        for score in ("r2", "mcc")
    )


def _threedident_score(
    mode: str, score: str, rows: frozenset[str | None] | None, paper: Published | None, part: Part, settings: Settings
) -> Score:
    return Score(
        label=f"{mode} {score.upper()}",
        mode=mode,
        rows=rows,
        score=score if part == "test" else f"train_{score}",
        paper=paper,
        settings=settings,
        counts=_counts(mode, part),
        stated=_STATED,
        # An encoder may be scored where only the test set is at hand.
        required=part == "test",
    )


def _paper_settings(row: str, space: SpaceName | None = None) -> dict[str, Any]:
    plain = to_plain(threedident_settings.row_settings(row, "paper"))
    if space is not None:
        plain["encoding"]["space"] = space
    return flat({**plain, "data": _3DIDENT})


_M = "M: whether model and model space are those of the data."
_MLP: dict[str, Any] = {
    "experiment": "mlp",
    "headings": ("space", "marginal", "conditional", "model space", "model", "M"),
    "label": "encoder",
    "about": f"{_M} encoder: trained on positive pairs "
    "(unsupervised), on the true latents (supervised), or none: the observations are scored (identity). The "
    "paper prints identity and supervised once for several rows.",
    "seeds": 5,
    "presets": tuple(mlp_settings.PRESETS),
}
_3DIDENT_TABLE: dict[str, Any] = {
    "experiment": "3dident",
    "headings": ("conditional", "model space", "model", "M"),
    "label": "encoder, score",
    "about": f"{_M} encoder: trained on positive pairs (unsupervised), on the true latents (supervised), or with its "
    "initial weights (identity). The paper prints identity once, and supervised beside its tables: our supervised runs "
    "are taken together whatever their row, since their loss knows neither pairs nor a model. Runs on different data "
    "stand apart; where their notes would be the same, they name the data.",
    "seeds": 3,
    "presets": tuple(threedident_settings.PRESETS),
}
TABLES: dict[int, PublishedTable] = {
    1: PublishedTable(title="R2 (identifiability up to affine maps), in %", rows=lambda: _mlp_rows(1), **_MLP),
    2: PublishedTable(title="MCC (identifiability up to permutations), in %", rows=lambda: _mlp_rows(2), **_MLP),
    3: PublishedTable(
        experiment="kitti",
        title="MCC (Spearman), in %",
        headings=("mean dt", "model", "model space"),
        label="score",
        about="mean dt: mean time between the frames of a positive pair. model: SlowVAE, or contrastive and the "
        "conditional that its loss assumes. score: MCC by Spearman correlation; a run that carries a row's name but "
        "trains the other model has a line of its own, which names the model.",
        seeds=10,
        presets=tuple(kitti_settings.PRESETS),
        rows=_kitti_rows,
        mode="model",
        digits=1,
        # Whatever does not say that it is none is taken for synthetic.
        stand_in=StandIn("SYNTHETIC silhouettes", "KITTI Masks", lambda settings: settings.get(SYNTHETIC) is not False),
    ),
    4: PublishedTable(
        title="Test R2 and MCC on 3DIdent, in %", rows=lambda: _threedident_rows("test"), **_3DIDENT_TABLE
    ),
    5: PublishedTable(
        title="Training R2 and MCC on 3DIdent, in %", rows=lambda: _threedident_rows("train"), **_3DIDENT_TABLE
    ),
}


def published_table(number: int) -> PublishedTable:
    """A table by its number.

    Args:
        number: 1 to 5.

    Raises:
        SpecError: any other value; the text lists the numbers.
    """
    if isinstance(number, bool) or number not in TABLES:
        raise SpecError(f"table = {number!r}: expected one of {', '.join(map(str, TABLES))}")
    return TABLES[number]
