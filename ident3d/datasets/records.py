"""The published datasets: where they are, what their files are called, their checksums, and what they become on disk.

The md5s come from third parties that downloaded the files, not from the record itself; where one is None, Zenodo's own
listing is asked at download. Sizes are nobody's word yet: the server states them.
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import quote

from ident3d.errors import DownloadError, SpecError

__all__ = ["RECORDS", "Record", "RemoteFile", "find_record"]

ZENODO = "https://zenodo.org"


@dataclass(frozen=True)
class RemoteFile:
    """A file of a record.

    Attributes:
        name: as the server calls it.
        md5: 32 hexadecimal digits, or None where nobody has told.
        size: in bytes, or None where nobody has told.
        place: the file or folder that it becomes beneath the root; "/" between its parts.
        holds: for an archive, paths in that folder that tell it from others; none for a file used as it is.
        splits: the splits that it brings.
    """

    name: str
    md5: str | None
    size: int | None = None
    place: str = ""
    holds: tuple[str, ...] = ()
    splits: tuple[str, ...] = ()


@dataclass(frozen=True)
class Record:
    """A dataset as published.

    Attributes:
        name: how a user asks for it.
        title: as its paper writes it.
        zenodo: number of its record.
        files: what the record holds of it.
        license: under which terms, as far as is known here.
        citation: the paper to cite.
        host: the server, without a slash at its end.
    """

    name: str
    title: str
    zenodo: int
    files: tuple[RemoteFile, ...]
    license: str
    citation: str
    host: str = ZENODO

    @property
    def page(self) -> str:
        """The record's page for people."""
        return f"{self.host}/records/{self.zenodo}"

    @property
    def api(self) -> str:
        """The record's listing in JSON, with sizes and checksums."""
        return f"{self.host}/api/records/{self.zenodo}"

    def url(self, file: RemoteFile) -> str:
        """Where a file's bytes are."""
        return f"{self.page}/files/{quote(file.name)}?download=1"


_LICENSE = "as stated on the record's page"
# Enough to tell a set from anything else: the readers say what else they miss.
_IDENT = ("images", "raw_latents.npy")
_CAUSAL = ("images_0", "raw_latents_0.npy")
_M3DI = ("train/latents_image.csv", "val/latents_image.csv", "test/latents_image.csv")

_ALL = (
    Record(
        "3dident",
        "3DIdent",
        4502485,
        (
            RemoteFile(
                "3dident_train.tar",
                "df132b4dacf04fa28e1c8ca9d2168634",
                place="3dident/train",
                holds=_IDENT,
                splits=("train",),
            ),
            RemoteFile(
                "3dident_test.tar",
                "35020bca16c9faa80cf0c926d265d678",
                place="3dident/test",
                holds=_IDENT,
                splits=("test",),
            ),
        ),
        _LICENSE,
        "R. S. Zimmermann, Y. Sharma, S. Schneider, M. Bethge, W. Brendel: Contrastive Learning Inverts the Data "
        "Generating Process, ICML 2021",
    ),
    Record(
        "causal3dident",
        "Causal3DIdent",
        4784282,
        (
            RemoteFile(
                "trainset.tar.gz",
                "acd98fda30eee75856dbbc7c54a27e45",
                place="trainset",
                holds=_CAUSAL,
                splits=("train",),
            ),
            RemoteFile(
                "testset.tar.gz",
                "c5d9d32d3737e241a2b12b968275fcb8",
                place="testset",
                holds=_CAUSAL,
                splits=("test",),
            ),
        ),
        _LICENSE,
        "J. von Kügelgen, Y. Sharma, L. Gresele, W. Brendel, B. Schölkopf, M. Besserve, F. Locatello: Self-Supervised "
        "Learning with Data Augmentations Provably Isolates Content from Style, NeurIPS 2021",
    ),
    Record(
        "multimodal3dident",
        "Multimodal3DIdent",
        7678231,
        (
            RemoteFile(
                "m3di.tar.gz",
                None,
                place="m3di",
                holds=_M3DI,
                splits=("train", "val", "test"),
            ),
        ),
        _LICENSE,
        "I. Daunhawer, A. Bizeul, E. Palumbo, A. Marx, J. E. Vogt: Identifiability Results for Multimodal Contrastive "
        "Learning, ICLR 2023",
    ),
    Record(
        "kitti-masks",
        "KITTI Masks",
        3931823,
        (RemoteFile("kitti_peds_v2.pickle", None, place="kitti_peds_v2.pickle"),),
        _LICENSE,
        "D. Klindt, L. Schott, Y. Sharma, I. Ustyuzhaninov, W. Brendel, M. Bethge, D. Paiton: Towards Nonlinear "
        "Disentanglement in Natural Data with Temporal Sparse Coding, ICLR 2021",
    ),
)

RECORDS = {record.name: record for record in _ALL}
"""The sets that can be downloaded, by name."""


def find_record(name: str) -> Record:
    """The record of a set, by its name or its reader's, whatever the case, hyphens, underscores and spaces.

    Raises:
        SpecError: no such set.
        DownloadError: a set that ident3d reads, but knows no record of.
    """
    plain = name.lower().translate(str.maketrans("", "", "-_ "))
    if plain == "temporalcausal3dident":
        raise DownloadError(
            f"{name}: ident3d knows of no files to download for Temporal Causal3DIdent. Its reader expects train.npz, "
            "val.npz and test.npz in one folder: put them there yourself. Its authors (CITRIS, ICML 2022, "
            "https://github.com/phlippe/CITRIS) name https://zenodo.org/records/6637749, which nobody has checked here"
        )
    plain = "3dident" if plain == "threedident" else plain
    for record in RECORDS.values():
        if record.name.replace("-", "") == plain:
            return record
    raise SpecError(f"{name!r}: not a published dataset that can be downloaded; expected one of {', '.join(RECORDS)}")
