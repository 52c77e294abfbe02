"""Signatures over requests to Bedrock (SigV4), by botocore: with whatever credentials AWS's own tools would use."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from turnmill.protocol.content import ErrorInfo
from turnmill.protocol.errors import ConfigurationError, ErrorKind

from .base import ProviderError
from .format import Endpoint, HttpCall

_SERVICE = "bedrock"
_REGION = re.compile(r"bedrock-runtime(?:-fips)?\.([a-z0-9-]+)\.")


def open_signer(endpoint: Endpoint, environment: Mapping[str, str]) -> BedrockSigner | None:
    """None where a key is there: it goes with the request and nothing is signed."""
    if endpoint.api_key:
        return None
    found = _REGION.search(endpoint.base_url)
    region = found[1] if found else environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION")
    if not region:
        raise ConfigurationError(f"the region of {endpoint.base_url} is not known: set AWS_REGION")
    return BedrockSigner(region)


class BedrockSigner:
    """Signs for one region. Credentials are looked up once and renew themselves."""

    def __init__(self, region: str) -> None:
        self._region = region
        self._credentials: Any = None

    async def sign(self, call: HttpCall) -> HttpCall:
        """Raises `ProviderError` (authentication) where there are no credentials."""
        # In a thread: credentials may come from a file, a program or the network.
        return await asyncio.to_thread(self._sign, call)

    def _sign(self, call: HttpCall) -> HttpCall:
        try:
            from botocore.auth import SigV4Auth
            from botocore.awsrequest import AWSRequest
            from botocore.exceptions import BotoCoreError
        except ImportError as error:
            raise ConfigurationError(f"Bedrock needs `pip install turnmill[bedrock]`: {error}") from error
        try:
            request = AWSRequest(method="POST", url=call.url, data=call.body, headers=dict(call.headers))
            SigV4Auth(self._frozen_credentials(), _SERVICE, self._region).add_auth(request)
        except BotoCoreError as error:
            raise _unsigned(str(error)) from error
        return msgspec.structs.replace(call, headers=dict(request.headers.items()))

    def _frozen_credentials(self) -> Any:
        from botocore.session import Session

        if self._credentials is None:
            self._credentials = Session().get_credentials()
        if self._credentials is None:
            raise _unsigned(
                "no AWS credentials were found: set AWS_BEARER_TOKEN_BEDROCK, or AWS_ACCESS_KEY_ID and its kin"
            )
        return self._credentials.get_frozen_credentials()


def _unsigned(text: str) -> ProviderError:
    return ProviderError(ErrorInfo(kind=ErrorKind.AUTHENTICATION, message=text))
