"""Connections to the user's package sources, made as pip would make them."""

from __future__ import annotations

import re
import warnings
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import requests
import urllib3
from requests.adapters import HTTPAdapter
from requests.utils import get_auth_from_url

from vllm_stack import __version__

if TYPE_CHECKING:
    import ssl
    from collections.abc import Mapping

    from vllm_stack.pip_config import PipConfig

#: What an unreachable or broken source raises.
TRANSFER_ERRORS = (requests.RequestException, urllib3.exceptions.HTTPError, OSError)
#: Answers that another try may change: overload, and gateways between us and the index.
_TRANSIENT = (429, 500, 502, 503, 504, 520, 524, 527)


def redact(text: str) -> str:
    """Return ``text`` (a URL, or a message that holds some) without user names, passwords and queries."""
    without_login = re.sub(r"(?<=://)[^/\s'\"]*@", "", text)
    return re.sub(r"(://[^?\s'\"]*)\?[^\s'\"]*", r"\1", without_login)


def explain(error: BaseException) -> str:
    """Return what went wrong in a transfer in one line, without credentials."""
    if isinstance(error, requests.HTTPError):
        return f"HTTP {error.response.status_code} {error.response.reason}"
    if isinstance(error, FileNotFoundError):
        return "no such file or folder"
    return redact(" ".join(str(error).split())) or type(error).__name__


class _VerifyingAdapter(HTTPAdapter):
    """Trusts the system's certificate authorities besides those of requests, as newer releases of pip do."""

    def init_poolmanager(self, *args: Any, **kwargs: Any) -> Any:
        return super().init_poolmanager(*args, ssl_context=_system_trust(), **kwargs)

    def proxy_manager_for(self, *args: Any, **kwargs: Any) -> Any:
        return super().proxy_manager_for(*args, ssl_context=_system_trust(), **kwargs)


def _system_trust() -> ssl.SSLContext:
    context = urllib3.util.create_urllib3_context()
    context.load_default_certs()
    return context


class _TrustingAdapter(HTTPAdapter):
    """Does not check the certificate: the user named this host as trusted."""

    def send(
        self,
        request: requests.PreparedRequest,
        stream: bool = False,  # noqa: FBT001, FBT002 - the signature that requests calls
        timeout: Any = None,
        verify: bool | str = True,  # noqa: ARG002, FBT001, FBT002
        cert: Any = None,
        proxies: Mapping[str, str] | None = None,
    ) -> requests.Response:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", urllib3.exceptions.InsecureRequestWarning)
            return super().send(
                request, stream=stream, timeout=timeout, verify=False, cert=cert, proxies=proxies
            )


class IndexSession(requests.Session):
    """A requests session that connects as pip would with the same configuration."""

    def __init__(self, config: PipConfig, *, backoff: float = 0.25) -> None:
        super().__init__()
        self._config = config
        self.headers["User-Agent"] = f"vllm-stack/{__version__} {requests.utils.default_user_agent()}"
        self.cert = config.client_cert
        retry = urllib3.Retry(
            total=config.retries,
            backoff_factor=backoff,
            status_forcelist=_TRANSIENT,
            # The last answer is returned, so that its status can be named.
            raise_on_status=False,
            # A server must not be able to make us wait for hours.
            respect_retry_after_header=False,
        )
        self.mount("http://", HTTPAdapter(max_retries=retry))
        # A certificate file of the user's replaces what is trusted otherwise.
        verifying = HTTPAdapter if config.cert else _VerifyingAdapter
        self.mount("https://", verifying(max_retries=retry))
        for host in config.trusted_hosts:
            # With a port, the prefix ends there; without one, any port is trusted.
            for end in ("/",) if ":" in host else ("/", ":"):
                self.mount(f"https://{host}{end}", _TrustingAdapter(max_retries=retry))

    def prepare_request(self, request: requests.Request) -> requests.PreparedRequest:
        """Add the credentials that the configuration has for the request's host.

        requests would let ``.netrc`` win over a URL's own user name, and would not use an index URL's
        credentials for the absolute links on its pages.
        """
        if request.auth is None:
            request.auth = self._credentials(str(request.url))
        return super().prepare_request(request)

    def _credentials(self, url: str) -> tuple[str, str] | None:
        own = get_auth_from_url(url)
        if any(own):
            return own
        for index in (self._config.index_url, *self._config.extra_index_urls, *self._config.find_links):
            login = get_auth_from_url(index) if index else ("", "")
            if index and any(login) and _origin(index) == _origin(url):
                return login
        return None

    def merge_environment_settings(self, *args: Any, **kwargs: Any) -> Any:
        """Let pip's ``cert`` and ``proxy`` win over the variables that requests reads."""
        settings = super().merge_environment_settings(*args, **kwargs)
        if self._config.cert:
            settings["verify"] = self._config.cert
        if self._config.proxy:
            settings["proxies"] = {"http": self._config.proxy, "https": self._config.proxy}
        return settings


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or {"https": 443, "http": 80}.get(parts.scheme)
