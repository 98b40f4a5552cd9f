"""Ask a running SGLang HTTP server."""

import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from typing import Any


class ServerError(RuntimeError):
    """The server did not come up, ended, or refused; the message carries what it said."""


class Client:
    """A server at `url`, such as http://127.0.0.1:30000."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")

    def get(self, path: str, timeout_s: float = 60.0) -> Any:
        """GET `path`; returns parsed JSON, or None for an empty body."""
        return self._request(urllib.request.Request(self.url + path), timeout_s)

    def post(self, path: str, body: Any, timeout_s: float = 600.0) -> Any:
        """POST `body` as JSON to `path`; returns parsed JSON."""
        return self._request(self._post_request(path, body), timeout_s)

    def generate(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, **extra: Any
    ) -> list[dict[str, Any]]:
        """Greedy tokens of a batch of token-id prompts, with their logprobs."""
        body = _generate_body(prompts, max_new_tokens)
        body |= {"return_logprob": True, "logprob_start_len": -1, **extra}
        return list(self.post("/generate", body))

    def stream(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, timeout_s: float = 600.0
    ) -> list[list[tuple[float, int]]]:
        """When the greedy tokens of a batch of token-id prompts arrive.

        Returns:
            For each prompt its events as (seconds on the monotonic clock, output tokens so far).

        Raises:
            ServerError: the server refused, or ended the stream with an error.
        """
        request = self._post_request(
            "/generate", _generate_body(prompts, max_new_tokens) | {"stream": True}
        )
        arrivals: list[list[tuple[float, int]]] = [[] for _ in prompts]
        for event in self._events(request, timeout_s):
            if "error" in event:
                raise ServerError(f"{request.full_url} ended its stream with {event['error']}")
            num_tokens = int(event["meta_info"]["completion_tokens"])
            arrivals[event.get("index", 0)].append((time.monotonic(), num_tokens))
        return arrivals

    def first_token(
        self, prompt: Sequence[int], timeout_s: float = 600.0
    ) -> tuple[float, dict[str, Any]]:
        """Time to the first token of one token-id prompt, greedily.

        Returns:
            Seconds from sending the request, which has been encoded by then, to the arrival of the
            token; and the token's `meta_info`.

        Raises:
            ServerError: the server refused, or ended the stream with an error or without a token.
        """
        body = _generate_body([prompt], 1) | {"stream": True}
        request = self._post_request("/generate", body)
        began, result = time.monotonic(), None
        for event in self._events(request, timeout_s):
            if "error" in event:
                raise ServerError(f"{request.full_url} ended its stream with {event['error']}")
            result = result or (time.monotonic() - began, dict(event["meta_info"]))
        if result is None:
            raise ServerError(f"{request.full_url} ended its stream without a token")
        return result

    def _post_request(self, path: str, body: Any) -> urllib.request.Request:
        header = {"Content-Type": "application/json"}
        return urllib.request.Request(self.url + path, json.dumps(body).encode(), header)

    def _request(self, request: urllib.request.Request, timeout_s: float) -> Any:
        with _opened(request, timeout_s) as response:
            body = response.read()
        try:
            return json.loads(body) if body else None
        except json.JSONDecodeError:
            return body.decode(errors="replace")

    def _events(
        self, request: urllib.request.Request, timeout_s: float
    ) -> Iterator[dict[str, Any]]:
        """Server-sent events of a streamed answer."""
        with _opened(request, timeout_s) as response:
            for line in response:
                data = line.removeprefix(b"data:").strip()
                if line.startswith(b"data:") and data != b"[DONE]":
                    yield json.loads(data)


def _opened(request: urllib.request.Request, timeout_s: float) -> Any:
    try:
        return urllib.request.urlopen(request, timeout=timeout_s)
    except urllib.error.HTTPError as error:
        text = error.read().decode(errors="replace")
        raise ServerError(f"{request.full_url} answered {error.code}: {text[:500]}") from error


def _generate_body(prompts: Sequence[Sequence[int]], max_new_tokens: int) -> dict[str, Any]:
    params = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True}
    return {"input_ids": [list(p) for p in prompts], "sampling_params": params}
