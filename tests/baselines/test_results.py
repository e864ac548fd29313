"""Results: saved and read they are the same; what is no result, or a damaged one, is named and refused."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ident3d import __version__
from ident3d.baselines.results import Result, load_result, load_results, spread, versions
from ident3d.errors import DatasetError, SpecError


def make(**changes: Any) -> Result:
    values: dict[str, Any] = {
        "experiment": "mlp",
        "row": "2.1",
        "preset": "quick",
        "settings": {"mode": "unsupervised", "dim": 3, "widths": (10, 50), "training": {"steps": 20, "warmup": 0.03}},
        "seeds": (0, 1),
        "scores": {"r2": (0.9, 0.8), "mcc": (0.7, 0.6)},
        "per_factor": {"r2": [[0.9, 0.9, 0.9], [0.8, 0.8, -0.8]]},
        "extra": {"mixing": {"conditions": [[1.5, 2.0]]}, "note": None},
        "curve": ({"step": 10, "loss": [1.0, 2.0], "r2": [0.1, 0.2], "seconds": 1.5},),
        "steps": 20,
        "device": "cpu (Example CPU, 2 threads)",
        "versions": {"python": "3.11"},
        "wall_s": 3.5,
        "finished": "2026-01-31T12:00:00+00:00",
    }
    return Result(**{**values, **changes})


def test_a_saved_result_is_read_as_it_was(tmp_path: Path) -> None:
    result = make()
    path = result.save(tmp_path / "new" / "run")
    assert path == tmp_path / "new" / "run" / "result.json"
    assert load_result(path) == load_result(path.parent) == result
    assert [p.name for p in path.parent.iterdir()] == ["result.json"]
    assert result.settings["widths"] == [10, 50]


def test_saving_again_replaces(tmp_path: Path) -> None:
    make().save(tmp_path)
    make(wall_s=9).save(tmp_path)
    assert load_result(tmp_path).wall_s == 9


def test_a_result_is_strict_json(tmp_path: Path) -> None:
    """Losses that are not finite become null: other readers of JSON know no NaN."""
    point = {"step": 0, "loss": [math.nan, math.inf], "r2": [0.5, 0.5]}
    path = make(curve=(point,)).save(tmp_path)

    def refuse(text: str) -> None:
        raise AssertionError(text)

    assert json.loads(path.read_text(), parse_constant=refuse)["curve"][0]["loss"] == [None, None]
    assert load_result(path).curve[0] == {"step": 0, "loss": [None, None], "r2": [0.5, 0.5]}


def test_numbers_of_numpy_are_taken() -> None:
    scores = {"r2": tuple(np.array([0.5, 0.25], np.float32))}
    assert make(scores=scores).scores == {"r2": (0.5, 0.25)}
    assert type(make(scores=scores).scores["r2"][0]) is float


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"format": 2}, "format"),
        ({"experiment": "mpl"}, "experiment"),
        ({"row": "2.11"}, "row"),
        ({"preset": "two\nlines"}, "preset"),
        ({"device": ""}, "device"),
        ({"seeds": ()}, "seeds"),
        ({"seeds": (0, 0)}, "seeds"),
        ({"seeds": (0, -1)}, "seeds"),
        ({"seeds": (0, True)}, "seeds"),
        ({"seeds": (0,)}, "r2"),
        ({"scores": {}}, "scores"),
        ({"scores": {"r2": (0.5,)}}, "r2"),
        ({"scores": {"r2": (0.5, math.nan)}}, "r2"),
        ({"scores": {"r2": (0.5, -math.inf)}}, "r2"),
        ({"scores": {"r2": (99.1, 99.2)}}, "percent"),
        ({"per_factor": {"mcc": [[0.5]]}}, "per_factor.mcc"),
        ({"per_factor": {"mcc": [[0.5], [math.nan]]}}, "per_factor.mcc"),
        ({"settings": {"tau": math.inf}}, "settings.tau"),
        ({"settings": {"training": {"rates": [1, {2, 3}]}}}, "settings.training.rates[1]"),
        ({"extra": {"bounds": np.ones(2)}}, "extra.bounds"),
        ({"extra": {3: 1}}, "extra"),
        ({"curve": ({"loss": [1, 2]},)}, "curve[0]"),
        ({"curve": ({"step": 1, "loss": [1, 2, 3]},)}, "curve[0].loss"),
        ({"steps": -1}, "steps"),
        ({"steps": 1.5}, "steps"),
        ({"wall_s": math.nan}, "wall_s"),
        ({"wall_s": -1}, "wall_s"),
        ({"finished": "yesterday"}, "finished"),
        ({"finished": "2026-01-31T12:00:00"}, "finished"),
        ({"finished": "2026-01-31T12:00:00+02:00"}, "finished"),
    ],
    ids=str,
)
def test_what_does_not_fit_together_is_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(SpecError) as caught:
        make(**changes)
    assert named in str(caught.value)


def test_rounding_may_take_a_perfect_score_past_one() -> None:
    assert make(scores={"r2": (1 + 1e-7, 1.0)}).percent("r2") == "100.00±0.00"


def put(key: str, value: object) -> Callable[[dict[str, Any]], object]:
    return lambda data: {**data, key: value}


DAMAGE: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (lambda data: {k: v for k, v in data.items() if k != "seeds"}, "seeds: missing"),
    (lambda data: {k: v for k, v in data.items() if k != "format"}, "format: missing"),
    (put("colour", 1), "colour: unknown key"),
    (put("format", 2), "newer ident3d"),
    (put("format", "1"), "format"),
    (put("format", 0), "format"),
    (put("experiment", "other"), "experiment"),
    (put("seeds", [0, 0.5]), "seeds[1]"),
    (put("scores", {"r2": [0.5, "0.5"]}), "scores.r2[1]"),
    (put("scores", {"r2": [0.5]}), "r2"),
    (put("wall_s", 10**400), "wall_s"),
    (put("curve", [3]), "curve[0]"),
    (put("settings", [1]), "settings"),
    (lambda data: [data], "expected a table"),
    (lambda data: "result", "expected a table"),
    (lambda data: None, "expected a table"),
]


@pytest.mark.parametrize(("change", "named"), DAMAGE)
def test_a_changed_or_foreign_file_is_named(
    change: Callable[[dict[str, Any]], object], named: str, tmp_path: Path
) -> None:
    path = make().save(tmp_path)
    changed = change(json.loads(path.read_text()))
    if not isinstance(changed, dict):
        named = "format: missing"
    path.write_text(json.dumps(changed))
    with pytest.raises(DatasetError) as caught:
        load_result(path)
    assert str(path) in str(caught.value)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff\xfe\x00", b"[" * 100_000, b'{"format": NaN}', b'{"format": ' + b"9" * 5000 + b"}"],
    ids=["empty", "cut", "binary", "deep", "nan", "digits"],
)
def test_a_damaged_file_is_named(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_bytes(content)
    with pytest.raises(DatasetError, match="damaged") as caught:
        load_result(path)
    assert str(path) in str(caught.value)


def test_every_cut_of_a_file_is_refused(tmp_path: Path) -> None:
    path = make().save(tmp_path)
    whole = path.read_bytes()
    for length in range(0, len(whole.rstrip()), 37):
        path.write_bytes(whole[:length])
        with pytest.raises(DatasetError):
            load_result(path)


def test_settings_too_deep_to_be_checked_are_refused(tmp_path: Path) -> None:
    path = make(settings={}).save(tmp_path)
    deep = '{"a": ' * 900 + "1" + "}" * 900
    path.write_text(path.read_text().replace('"settings": {}', f'"settings": {deep}'))
    with pytest.raises(DatasetError, match=r"result\.json"):
        load_result(path)


def test_an_absent_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"absent\.json: cannot be read"):
        load_result(tmp_path / "absent.json")
    with pytest.raises(DatasetError, match=r"result\.json: cannot be read"):
        load_result(tmp_path)


def test_all_results_below_a_folder(tmp_path: Path) -> None:
    names = ["b", "a/deeper", "."]
    for i, name in enumerate(names):
        make(wall_s=i).save(tmp_path / name)
    (tmp_path / "a" / "other.json").write_text("{}")
    (tmp_path / "c" / "result.json").mkdir(parents=True)
    assert [result.wall_s for result in load_results(tmp_path)] == [1, 0, 2]


def test_one_foreign_file_is_not_passed_over(tmp_path: Path) -> None:
    make().save(tmp_path / "a")
    (tmp_path / "result.json").write_text('{"accuracy": 1}')
    with pytest.raises(DatasetError, match="Move it elsewhere"):
        load_results(tmp_path)


def test_folders_without_results_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="not there"):
        load_results(tmp_path / "absent")
    with pytest.raises(DatasetError, match=r"holds no result\.json"):
        load_results(tmp_path)
    path = make().save(tmp_path)
    with pytest.raises(DatasetError, match="a file; give the folder"):
        load_results(path)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(DatasetError, match="taken"):
        make().save(tmp_path / "taken" / "run")


def test_scores_in_percent() -> None:
    two = spread([0.5, 0.7])
    assert two.seeds == 2
    assert two.mean == pytest.approx(60)
    assert two.std == pytest.approx(100 * math.sqrt(2) * 0.1)
    assert str(two) == "60.00±14.14"
    assert spread([0.5]).std is None
    assert str(spread([0.5])) == "50.00"
    assert make().percent("mcc") == "65.00±7.07"
    with pytest.raises(SpecError, match="one of r2, mcc"):
        make().percent("accuracy")


def test_times_are_compared_as_times() -> None:
    early, late = make(finished="2026-01-31T09:00:00Z"), make(finished="2026-01-31T09:00:00.5+00:00")
    assert early.finished_at < late.finished_at


def test_versions_name_no_machine_and_no_folder() -> None:
    found = versions()
    assert found["ident3d"] == __version__
    assert {"python", "torch", "numpy"} <= set(found)
    assert not any("/" in text for text in found.values())
    assert make(versions=found).versions == found


def test_a_result_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        make().steps = 3  # type: ignore[misc]
