"""The Hugging Face Hub: dataset repositories by name, and what its errors mean to a user."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote, unquote

from ident3d.errors import DownloadError, Ident3DError, SpecError
from ident3d.network.http import Broken, Patience, Unusable
from ident3d.network.sources import HttpSource

__all__ = ["HubSource", "as_download_errors", "check_repo", "hub_api", "hub_errors", "import_hub"]

URL = re.compile(r"hf://datasets/([^/@]+/[^/@]+)(?:@(refs/(?:pr|convert)/[^/]+|[^/]+))?((?:/[^/]+)*)")
REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+", re.ASCII)
LOGIN = "log in with `hf auth login`, or set HF_TOKEN"
PASSING = {408, 429, 500, 502, 503, 504}
TRANSPORTS = {"httpx", "httpx2", "httpcore", "httpcore2", "requests", "urllib3"}
"""Packages whose errors huggingface_hub lets through, one or the other by its version."""


def import_hub() -> Any:
    """The package huggingface_hub.

    Raises:
        SpecError: it is not installed.
    """
    try:
        import huggingface_hub
        import huggingface_hub.constants
        import huggingface_hub.errors
        import huggingface_hub.utils
    except ImportError:
        raise SpecError("the Hugging Face Hub needs the package huggingface_hub: pip install 'ident3d[hub]'") from None
    return huggingface_hub


def check_repo(repo: str) -> str:
    """The name of a dataset repository, `user/name`.

    Raises:
        SpecError: another text; huggingface_hub is not installed.
    """
    if not REPO.fullmatch(repo):
        raise SpecError(f"{repo!r}: expected user/name, e.g. ada/teapots")
    hub = import_hub()
    try:
        hub.utils.validate_repo_id(repo)
    except ValueError as error:
        raise SpecError(f"{repo!r}: not the name of a repository: {error}") from None
    return repo


def hub_api() -> Any:
    """A client of the Hub, as HF_ENDPOINT and HF_TOKEN or a login say.

    Raises:
        SpecError: huggingface_hub is not installed.
    """
    from ident3d._version import __version__

    return import_hub().HfApi(library_name="ident3d", library_version=__version__)


@contextmanager
def hub_errors(repo: str) -> Iterator[None]:
    """Tell what goes wrong between here and the Hub in words.

    Args:
        repo: the repository that the block is about, for messages.

    Raises:
        Unusable: no such repository or revision, no leave, no room.
        Broken: no network, or a Hub that is busy.
    """
    hub = import_hub()
    try:
        yield
    except hub.errors.HfHubHTTPError as error:
        raise _understood(error, repo) from error
    except hub.errors.LocalTokenNotFoundError as error:
        raise Unusable(f"{repo}: nobody is logged in: {LOGIN}") from error
    except hub.errors.OfflineModeIsEnabled as error:
        raise Unusable(f"{repo}: HF_HUB_OFFLINE forbids the network") from error
    except Ident3DError:
        raise
    except Exception as error:
        # The package and its threads wrap what the network did in errors of their own.
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, hub.errors.HfHubHTTPError):
                raise _understood(cause, repo) from error
            if type(cause).__module__.partition(".")[0] in TRANSPORTS or isinstance(cause, ConnectionError):
                where = hub.constants.ENDPOINT
                text = f"no connection to {where} ({cause or type(cause).__name__}); is this machine offline?"
                raise Broken(text) from error
            cause = cause.__cause__ or cause.__context__
        if isinstance(error, (ValueError, RuntimeError)):  # what the Hub refused within an answer of 200
            told = " ".join(str(error).split("\n")[:2])  # the same of every file
            why = f" ({error.__cause__})" if error.__cause__ else ""
            raise Unusable(f"{repo}: {told}{why}") from error
        raise


def _understood(error: Any, repo: str) -> Exception:
    """What an answer of the Hub means."""
    hub = import_hub()
    status = getattr(error.response, "status_code", 0)
    told = getattr(error, "server_message", None) or str(error).strip().partition("\n")[0]
    if isinstance(error, hub.errors.GatedRepoError):
        return Unusable(f"{repo}: gated: ask for leave on its page on the Hub, then {LOGIN} ({told})")
    if isinstance(error, hub.errors.RevisionNotFoundError):
        return Unusable(f"{repo}: no such revision ({told})")
    if isinstance(error, hub.errors.RepositoryNotFoundError):
        return Unusable(f"{repo}: no such dataset repository, or a private one: {LOGIN}")
    if status in (401, 403):
        return Unusable(f"{repo}: no leave (HTTP {status}: {told}): {LOGIN}, with a token that may do this")
    if status in (402, 413, 507):
        return Unusable(f"{repo}: the Hub has no room for it (HTTP {status}: {told}); see the account's storage limits")
    if status in (409, 412):
        return Unusable(f"{repo}: somebody else changed it meanwhile (HTTP {status}: {told}); run the same again")
    if status in PASSING:
        return Broken(f"{repo}: HTTP {status}: {told}; try again later")
    return Unusable(f"{repo}: HTTP {status}: {told}")


@contextmanager
def as_download_errors(what: str) -> Iterator[None]:
    """Make of what `hub_errors` raises an error for the user.

    Args:
        what: was being done, and with what.

    Raises:
        DownloadError: in its place.
    """
    try:
        yield
    except (Unusable, Broken) as error:
        raise DownloadError(f"{what}: {error}") from error


class HubSource(HttpSource):
    """A dataset repository on the Hub, or a folder in one.

    Args:
        url: `hf://datasets/user/name[@revision][/folder]`.

    Attributes:
        repo: user/name.
        commit: what `pin` settled on; empty before.

    Raises:
        SpecError: another form, or huggingface_hub is not installed.
    """

    def __init__(self, url: str) -> None:
        match = URL.fullmatch(url)
        if match is None:
            raise SpecError(f"{url!r}: expected hf://datasets/user/name, hf://datasets/user/name@revision, or a folder")
        self.text = url
        self.repo = check_repo(match[1])
        self.revision = unquote(match[2]) if match[2] else None
        self.folder = match[3]
        self.endpoint: str = import_hub().constants.ENDPOINT.rstrip("/")
        self.commit = ""

    @property
    def forbidden(self) -> str:
        """HF_HUB_OFFLINE, where it is set."""
        return "HF_HUB_OFFLINE" if import_hub().constants.HF_HUB_OFFLINE else ""

    def pin(self, patience: Patience) -> None:
        """Settle on the commit that the revision, or else the main branch, is at now."""
        with hub_errors(self.repo):
            info = hub_api().dataset_info(self.repo, revision=self.revision, timeout=patience.connect_s)
        self.commit = info.sha

    def url(self, name: str) -> str:
        """Where the Hub serves a file."""
        revision = quote(self.commit or self.revision or "main", safe="")
        return f"{self.endpoint}/datasets/{self.repo}/resolve/{revision}{quote(self.folder)}/{quote(name)}"

    def address(self, name: str) -> str:
        """As the user wrote it."""
        return f"{self.text}/{name}"

    def headers(self) -> dict[str, str]:
        """The token, where there is one."""
        token = import_hub().get_token()
        return {"Authorization": f"Bearer {token}"} if token else {}

    def explain(self, response: Any) -> None:
        """The Hub says by a header of its own what an answer means."""
        told = response.headers.get("X-Error-Message", "") or response.reason
        if response.status_code in (401, 403):
            raise Unusable(f"absent, private or gated ({told}): {LOGIN}")
        if response.status_code == 404:
            raise Unusable(f"no such file in the repository at {self.commit[:12] or 'this revision'}")
