"""A trainer's side of the HTTP server: the same calls and results as `LLM`, in another process."""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from itertools import islice
from typing import Any

import httpx
from torch import Tensor, nn

from ..engine import Completion, RequestOutput, SamplingParams, VersionSpan
from ..engine.expert_wire import EXPERTS_AS_LOGPROBS, parse_ids
from ..engine.outputs import LOWEST_LOGPROB
from ..engine.weights import TensorSpec, WeightGroup, check_contract, specs_of
from ..engine.weights.group import DEFAULT_GROUP_NAME, listening_store
from ..engine.weights.spec import full_tensors
from ..kernels.contract import Contract
from ..model.adapter import updated_state

BUCKET_BYTES = 64 * 2**20
CALL_SIZE = 2**21  # token ids or characters of a call's prompts, well below what a server reads at once
FIRST_VERSION = "default"  # what a server calls the weights that it started with


class ServerError(RuntimeError):
    """The server refused or failed; `status` is HTTP's."""

    def __init__(self, status: int, message: str):
        super().__init__(f"{message} (HTTP {status})")
        self.status = status


class Client:
    """A client of `samebits serve` at `url`. On its machine, control calls go to its control port, if it has one.

    contract: the numerics that the server must have: a `Contract`, its hash, or None to take the server's. A different
    one is a NumericsError at once. key: the API key, or the admin key where control routes need it. timeout: seconds
    for connecting and for control calls; generation may take as long as it does. context_length: tokens that a sequence
    may have.
    """

    def __init__(
        self, url: str, contract: Contract | str | None = None, key: str | None = None, timeout: float = 300.0
    ):
        self.timeout = timeout
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._http = httpx.Client(base_url=url, headers=headers, timeout=timeout)
        self._group: WeightGroup | None = None
        self._control = self._http
        info = self.get("/server_info")
        self._limits = info["limits"]
        self.context_length = info["context_length"]
        port = info.get("control_port")
        if port is not None and self._http.base_url.host in ("127.0.0.1", "localhost", "::1"):
            self._control = httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=timeout)
        self.contract = Contract(**self.get("/v1/contract")["contract"])
        if contract is not None:
            self.contract.check(contract)

    def get(self, path: str) -> Any:
        """The decoded reply to a GET. Raises ServerError where the server refuses, ConnectionError if there is none."""
        return self._checked(self._sent(self._http, "GET", path))

    def post(self, path: str, body: Any = None) -> Any:
        """The reply's JSON to a control call. Raises ServerError for another status than 200."""
        return self._checked(self._sent(self._control, "POST", path, json=body))

    def _sent(self, http: httpx.Client, method: str, path: str, **options: Any) -> httpx.Response:
        """Return the response. Raises ConnectionError where there is none."""
        try:
            return http.request(method, path, **options)
        except httpx.TransportError as error:
            raise ConnectionError(f"no answer from {http.base_url}: {error}") from error

    def _checked(self, response: httpx.Response) -> Any:
        if response.is_success:
            return response.json()
        try:
            message = response.json()["message"]
        except (ValueError, KeyError, TypeError):
            message = response.text[:1000]
        raise ServerError(response.status_code, message)

    def get_weight_version(self) -> int | str:
        """Ask for the version in force at the server; an int where its label is one."""
        return _version(self.get("/weight_info")["weight_version"])

    def generate(
        self,
        prompts: str | Sequence[int] | Sequence[str | Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Return what `LLM.generate` does, for strings or lists of token ids, one or several, but not of both kinds.

        A log-prob below -9999, which isn't on the wire, is -inf, as that of a token outside the filters. More than the
        server takes in one call becomes several calls, one after another. What comes while others' fill the server's
        queue is sent again, in halves, for `timeout` seconds.
        """
        given: Any = prompts.tolist() if hasattr(prompts, "tolist") else prompts
        one = isinstance(given, str | dict) or (len(given) > 0 and isinstance(given[0], int))
        several = [p.tolist() if hasattr(p, "tolist") else p for p in ([given] if one else given)]
        if len({isinstance(p, str) for p in several}) > 1 or any(isinstance(p, dict) for p in several):
            raise TypeError("prompts over HTTP are strings, or lists of token ids; not both in a call, and no dicts")
        params = SamplingParams() if sampling_params is None else sampling_params
        each = [params] * len(several) if isinstance(params, SamplingParams) else list(params)
        outputs: list[RequestOutput] = []
        for part in self._parts(several, each):
            outputs += self._generate(several[part], each[part])
        return outputs

    def _parts(self, prompts: Sequence[str | Sequence[int]], params: list[SamplingParams]) -> Iterator[slice]:
        """The prompts that fit in a call together: by samples, by the log-probs that they may return, and by size."""
        limits = self._limits
        room = self.context_length
        begin = sequences = values = size = 0
        for i, (prompt, p) in enumerate(zip(prompts, params, strict=True)):
            length = min(room, len(prompt.encode()) + 8) if isinstance(prompt, str) else len(prompt)  # or fewer
            sampled = min(p.max_tokens or room, room)
            tokens = p.n * sampled + length * (p.prompt_logprobs is not None)
            more = tokens * (1 + max(p.logprobs or 0, p.prompt_logprobs or 0))
            more += EXPERTS_AS_LOGPROBS * p.n * min(room, length + sampled) * p.routed_experts
            sequences += p.n
            values += more
            size += len(prompt)
            if i > begin and (sequences > limits["sequences"] or values > limits["values"] or size > CALL_SIZE):
                yield slice(begin, i)
                begin = i
                sequences = p.n
                values = more
                size = len(prompt)
        if prompts:
            yield slice(begin, len(prompts))

    def _generate(self, prompts: Sequence[str | Sequence[int]], each: list[SamplingParams]) -> list[RequestOutput]:
        key = "text" if isinstance(prompts[0], str) else "input_ids"
        body = {
            key: [p if isinstance(p, str) else list(p) for p in prompts], "sampling_params": [_fields(p) for p in each],
            "return_logprob": True, "return_prompt_token_ids": True,
            "top_logprobs_num": [max(p.logprobs or 0, p.prompt_logprobs or 0) for p in each],
            "logprob_start_len": [-1 if p.prompt_logprobs is None else 0 for p in each],
            "return_routed_experts": [p.routed_experts for p in each],
            "routed_experts_start_len": [p.routed_experts_prompt_start for p in each],
        }  # fmt: skip
        patience = time.monotonic() + self.timeout
        while True:
            limit = httpx.Timeout(self.timeout, read=None)
            response = self._sent(self._http, "POST", "/generate", json=body, timeout=limit)
            if response.status_code != 503 or time.monotonic() > patience or not self._is_serving():
                break
            if half := len(prompts) // 2:  # others' requests fill its queue: fewer find room sooner
                return self._generate(prompts[:half], each[:half]) + self._generate(prompts[half:], each[half:])
            time.sleep(1.0)
        found = iter(self._checked(response))
        return [_output(prompt, list(islice(found, p.n)), p) for prompt, p in zip(prompts, each, strict=True)]

    def _is_serving(self) -> bool:
        return self._sent(self._http, "GET", "/health").is_success and self.get("/is_paused")["state"] == "serving"

    def update_weights(
        self,
        source: nn.Module | Mapping[str, Tensor],
        version: int | str | None = None,
        address: str | None = None,
    ) -> int | str:
        """Send weights over a process group and return the version that is then in force.

        source: a module from `exact_model` of the server's contract, or a state dict of any origin; of a module with an
        adapter, the adapter alone is sent. address: where the server reaches this process; by default the interface
        that leads to the server. The first call makes the group. After a failure, or when the server has started a
        replica again, the next makes another. Raises ServerError, TransferError or NumericsError; the server then
        serves the old weights on.
        """
        if isinstance(source, nn.Module):
            check_contract(source, self.contract)
            source = updated_state(source)
        return self.send_weights(specs_of(source), full_tensors(source), version, address)

    def load_weights(self, folder: str | os.PathLike, version: int | str | None = None) -> int | str:
        """Update from a checkpoint directory that the server sees under the same path; return as `update_weights`."""
        body = {"model_path": os.path.abspath(folder), "weight_version": None if version is None else str(version)}
        self.post("/update_weights_from_disk", body)
        return self.get_weight_version()

    def send_weights(
        self,
        specs: Sequence[TensorSpec],
        tensors: Iterable[tuple[str, Tensor]],
        version: int | str | None = None,
        address: str | None = None,
    ) -> int | str:
        """Update by tensors that are made one after another; return as `update_weights`."""
        known = self.get("/weight_info")["weight_groups"]
        if self._group is None or not self._group.usable or DEFAULT_GROUP_NAME not in known:
            self._group = self._join(address or self._own_address())
        body = {
            "names": [s.name for s in specs], "dtypes": [str(s.dtype).removeprefix("torch.") for s in specs],
            "shapes": [list(s.shape) for s in specs], "bucket_bytes": BUCKET_BYTES,
            "weight_version": None if version is None else str(version),
        }  # fmt: skip
        with self._posting("/update_weights_from_distributed", body):
            self._group.send(tensors, specs, BUCKET_BYTES)
        return self.get_weight_version()

    def _own_address(self) -> str:
        url = self._http.base_url
        port = url.port or {"http": 80, "https": 443}[url.scheme]
        with socket.create_connection((url.host, port), self.timeout) as connection:
            return connection.getsockname()[0]

    def _join(self, address: str) -> WeightGroup:
        if self._group is not None:
            self._group.close()
        store = listening_store(address, self.timeout)
        world = 1 + self.get("/get_world_size")["world_size"]
        where = {"master_address": address, "master_port": store.port, "rank_offset": 1, "world_size": world}
        with self._posting("/init_weights_update_group", where | {"backend": "gloo"}):
            return WeightGroup(address, store.port, 0, world, DEFAULT_GROUP_NAME, timeout=self.timeout)

    @contextmanager
    def _posting(self, path: str, body: dict) -> Iterator[None]:
        """Post in another thread while the block runs. The server's error hides the block's, which it explains."""
        with ThreadPoolExecutor(1) as pool:
            reply = pool.submit(self.post, path, body)
            try:
                yield
            finally:
                reply.result()

    def close(self) -> None:
        """Leave the process group and close the connections."""
        if self._group is not None:
            self._group.close()
        self._http.close()
        self._control.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc) -> None:
        self.close()


def _version(label: str) -> int | str:
    return 0 if label == FIRST_VERSION else int(label) if label.isdecimal() else label


def _fields(params: SamplingParams) -> dict:
    if params.raw_logprobs:
        raise ValueError("raw_logprobs aren't on the wire; re-score the tokens instead")
    same = ("n", "temperature", "top_p", "top_k", "min_p", "ignore_eos", "skip_special_tokens")
    return {name: getattr(params, name) for name in same} | {
        "max_new_tokens": params.max_tokens, "min_new_tokens": params.min_tokens, "sampling_seed": params.seed,
        "stop": list(params.stop), "stop_token_ids": list(params.stop_token_ids),
        "no_stop_trim": params.include_stop_str_in_output,
        "structured_outputs": None if params.structured_outputs is None else asdict(params.structured_outputs),
    }  # fmt: skip


def _output(prompt: str | Sequence[int], samples: list[dict], params: SamplingParams) -> RequestOutput:
    meta = samples[0]["meta_info"]
    scored = params.prompt_logprobs is not None
    return RequestOutput(
        request_id=meta["id"], prompt=prompt if isinstance(prompt, str) else None, finished=True,
        prompt_token_ids=samples[0]["prompt_token_ids"],
        completions=[_completion(i, s, params) for i, s in enumerate(samples)],
        prompt_logprobs=[_logprob(entry[0] or 0.0) for entry in meta["input_token_logprobs"]] if scored else None,
        prompt_top_logprobs=_tops(meta.get("input_top_logprobs"), params.prompt_logprobs) if scored else None,
        num_cached_tokens=meta["cached_tokens"], seed=meta["sampling_seed"],
    )  # fmt: skip


def _logprob(found: float) -> float:
    return -math.inf if found == LOWEST_LOGPROB else found


def _tops(rows: list | None, count: int | None) -> list[dict[int, float]] | None:
    return None if rows is None else [{t: _logprob(lp) for lp, t, _ in (row or [])[:count]} for row in rows]


def _completion(index: int, sample: dict, params: SamplingParams) -> Completion:
    meta = sample["meta_info"]
    reason = meta["finish_reason"]
    matched = reason.get("matched")
    experts = meta.get("routed_experts") is not None
    named = isinstance(matched, str) or matched in params.stop_token_ids
    return Completion(
        index=index, token_ids=sample["output_ids"], text=sample["text"] if params.detokenize else None,
        logprobs=[_logprob(entry[0]) for entry in meta["output_token_logprobs"]],
        finish_reason=reason["type"], stop_reason=matched if named else None,
        weight_versions=[VersionSpan(**s | {"version": _version(s["version"])}) for s in meta["weight_versions"]],
        top_logprobs=_tops(meta.get("output_top_logprobs"), params.logprobs) if params.logprobs is not None else None,
        routed_experts=parse_ids(meta["routed_experts"]).reshape(meta["routed_experts_shape"]) if experts else None,
    )  # fmt: skip
