"""HTTP to one sglang server: short control calls, and generation with a bounded number of requests in flight."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import httpx

from miles_ext.api_key import VARIABLE, headers
from miles_ext.errors import CapabilityError, EngineError, RequestError


class Client:
    """url: the server's address. router: where `generate` asks instead.
    timeout_s: silence on one call after which the server counts as failed.
    api_key: sent with every call where it is not empty.

    Raises RequestError with the server's own words for HTTP 400, CapabilityError where it refuses the key (401, 403),
    and EngineError for everything else that is no answer: a refused connection, a time-out, HTTP 5xx, a body that is no
    JSON.
    """

    def __init__(self, url: str, timeout_s: float, concurrency: int, api_key: str = "", router: str = "") -> None:
        self._headers = headers(api_key)
        self.url, self._timeout, self._concurrency = url.rstrip("/"), timeout_s, concurrency
        self._router = router.rstrip("/") or self.url
        self.answers = 0  # received by `generate`

    def get(self, path: str) -> Any:
        return self._call("GET", path, None)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        return self._call("POST", path, body)

    def reachable(self) -> bool:
        """Whether the server answers that it is up."""
        try:
            return httpx.get(f"{self.url}/health", timeout=30, headers=self._headers).status_code == 200
        except httpx.HTTPError:
            return False

    def generate(self, bodies: Sequence[dict[str, Any]]) -> list[Any]:
        """Answers of `/generate` in the order of `bodies`. The first failure ends the rest."""
        return asyncio.run(self._generate(bodies))

    async def _generate(self, bodies: Sequence[dict[str, Any]]) -> list[Any]:
        async def one(body: dict[str, Any]) -> Any:
            try:
                answer = self._read("/generate", await http.post("/generate", json=body))
                self.answers += 1
                return answer
            except httpx.HTTPError as error:
                raise self._silent("/generate", error) from error

        limits = httpx.Limits(
            max_connections=self._concurrency, max_keepalive_connections=self._concurrency,
            keepalive_expiry=1.0,  # sglang drops an idle connection after 5 s, with whatever is on its way to it
        )  # fmt: skip
        timeout = httpx.Timeout(self._timeout, pool=None)  # a request may wait for its turn as long as others take
        async with httpx.AsyncClient(
            base_url=self._router, timeout=timeout, limits=limits, headers=self._headers
        ) as http:
            tasks = [asyncio.create_task(one(body)) for body in bodies]
            try:
                return await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    def _call(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
        try:
            answer = httpx.request(method, self.url + path, json=body, timeout=self._timeout, headers=self._headers)
            return self._read(path, answer)
        except httpx.HTTPError as error:
            raise self._silent(path, error) from error

    def _read(self, path: str, answer: httpx.Response) -> Any:
        if answer.status_code == 400:
            raise RequestError(f"{self.url}{path} refuses: {_message(answer)}")
        if answer.status_code in (401, 403):
            raise CapabilityError(
                f"{self.url}{path} refuses our API key: {_message(answer)}; set {VARIABLE} or "
                "rollout.sglang.api_key_file to the server's"
            )
        if answer.status_code != 200:
            raise EngineError(f"{self.url}{path} answers {answer.status_code}: {_message(answer)}")
        try:
            return answer.json() if answer.content else None
        except ValueError as error:
            raise EngineError(f"{self.url}{path} answers no JSON: {answer.text[:200]!r}") from error

    def _silent(self, path: str, error: httpx.HTTPError) -> EngineError:
        return EngineError(f"{self.url}{path} does not answer: {type(error).__name__} {error}")


def _message(answer: httpx.Response) -> str:
    try:
        body = answer.json()
    except ValueError:
        return answer.text[:500]
    if isinstance(body, dict):
        error = body.get("error", body)
        return str(error.get("message", error) if isinstance(error, dict) else error)
    return str(body)
