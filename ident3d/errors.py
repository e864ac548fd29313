"""The errors that a user can cause or mend.

Everything that ident3d raises on purpose for a user's input or for the state of a user's files derives from
`Ident3DError`; the command line prints its text and exits with status 2. Any other exception is a defect.
"""

from __future__ import annotations

__all__ = ["BusyError", "DatasetError", "DownloadError", "Ident3DError", "RenderError", "SpecError", "TrainingError"]


class Ident3DError(Exception):
    """Base of all errors whose text says what was given, what was expected and what to do."""


class SpecError(Ident3DError, ValueError):
    """A scene spec, factor name, option or array that cannot be used."""


class DatasetError(Ident3DError):
    """A dataset on disk that is absent, unfinished, damaged or of another format."""


class DownloadError(Ident3DError, RuntimeError):
    """Files that a server, a Hub repository or a mirror did not give, or gave otherwise than their checksums say."""


class RenderError(Ident3DError, RuntimeError):
    """Blender is absent, cannot start, or failed while it rendered."""


class TrainingError(Ident3DError, RuntimeError):
    """A training that cannot go on: a loss or gradient that is not finite, a run's folder that is damaged."""


class BusyError(Ident3DError, RuntimeError):
    """Another process is at work in the same folder."""
