"""The routes that tell about the server: for both dialects, and for those who look after it."""

from __future__ import annotations

import pathlib
import time
from collections.abc import Iterator
from dataclasses import asdict

from fastapi import APIRouter, Request
from fastapi.responses import FileResponse, PlainTextResponse, Response
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric

from ..kernels import ops
from .protocol import problem, reply
from .service import LOGPROBS_MODE, Served, Service

STEP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
PAGE = pathlib.Path(__file__).with_name("page.html")

everybody = APIRouter(tags=["samebits"])
router = APIRouter(tags=["information"])


@everybody.get("/", include_in_schema=False)
async def page() -> Response:
    """The status page."""
    return FileResponse(PAGE, media_type="text/html")


@everybody.get("/docs", include_in_schema=False)
async def docs() -> Response:
    """The routes, from /openapi.json; works without the internet."""
    return FileResponse(PAGE.with_name("docs.html"), media_type="text/html")


@everybody.head("/health", include_in_schema=False)
@everybody.head("/ready", include_in_schema=False)
@everybody.get("/health")
@everybody.get("/ready")
async def health(server: Served) -> Response:
    """200 while the server can compute: not while it sleeps, shuts down, or has no replica that lives."""
    state = server.engine.state.name
    if state in ("stopping", "asleep"):
        return problem(503, f"the server is {state}")
    if not server.stats().kv_blocks_total:
        return problem(503, "no replica serves now")
    return await liveness(server)


@everybody.get("/liveness")
async def liveness(server: Served) -> Response:
    """200 while the engine's thread lives and the engine is not broken for good, whatever the state of the server."""
    engine = server.engine
    if not engine.thread.is_alive() or engine.llm.failure is not None:
        return problem(503, engine.llm.failure or "the engine's thread is dead")
    return reply({"status": "ok"})


class Metrics:
    """The metrics of a service: the engine's thread counts its steps; the rest is collected on demand."""

    def __init__(self, service: Service):
        self.service = service
        self.registry = CollectorRegistry()
        steps = Histogram("samebits_step_seconds", "Time of a step", buckets=STEP_BUCKETS, registry=self.registry)
        service.engine.on_step = steps.observe
        self.registry.register(self)  # type: ignore[arg-type]

    def collect(self) -> Iterator[Metric]:
        """The gauges and counters as of now."""
        stats = self.service.stats()
        engine = self.service.engine
        usage = stats.kv_blocks_used / max(stats.kv_blocks_total, 1)  # 0: no replica serves
        rows = (
            (GaugeMetricFamily, "requests_running", "Sequences that run", stats.num_running),
            (GaugeMetricFamily, "requests_waiting", "Sequences that wait", stats.num_waiting),
            (GaugeMetricFamily, "kv_cache_usage_ratio", "Part of the KV cache in use", usage),
            (GaugeMetricFamily, "weight_version", "Weight updates so far", stats.weight_version),
            (GaugeMetricFamily, "paused", "1 while generation is paused", engine.state.paused),
            (CounterMetricFamily, "prompt_tokens", "Prompt tokens computed", stats.prompt_tokens_computed),
            (CounterMetricFamily, "generation_tokens", "Tokens sampled", stats.generation_tokens),
            (CounterMetricFamily, "prefix_cache_hit_tokens", "Prompt tokens in the cache", stats.prefix_hit_tokens),
            (CounterMetricFamily, "preemptions", "Sequences whose KV was taken for others", stats.preemptions),
        )
        for family, name, text, value in rows:
            yield family(f"samebits_{name}", text, float(value))
        method = (self.service.llm.config.speculative_config or {"method": "none"})["method"]
        method = method if isinstance(method, str) else "callable"
        for family, name, text, label, values in (
            (CounterMetricFamily, "samples_finished", "Samples by finish reason", "reason", engine.finished),
            (CounterMetricFamily, "draft_tokens", "Tokens drafted", "method", {method: stats.draft_tokens}),
            (CounterMetricFamily, "accepted_tokens", "Drafted and sampled", "method", {method: stats.accepted_tokens}),
            (GaugeMetricFamily, "tokens_per_step", "Tokens of a step", "method", {method: stats.tokens_per_step}),
        ):
            labelled = family(f"samebits_{name}", text, labels=[label])
            for kind, value in sorted(values.items()):
                labelled.add_metric([kind], value)
            yield labelled
        labels = {"version": self.service.updates.label, "contract": str(self.service.contract_hash)}
        yield InfoMetricFamily("samebits_weights", "The weights in force, by the client's name", labels)


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(http: Request) -> Response:
    """Counters and gauges in Prometheus' text format."""
    return PlainTextResponse(generate_latest(http.app.state.metrics.registry), media_type="text/plain; version=0.0.4")


@router.get("/v1/contract")
async def contract(server: Served) -> Response:
    """The numerics contract: every choice that decides a bit, and its hash."""
    found = server.llm.contract
    if found is None:
        return problem(404, "this server runs without the exact ops, so it has no contract")
    return reply({"hash": found.hash, "contract": asdict(found)})


@router.get("/weight_info")
async def weight_info(server: Served):
    """The weight version's label, the number of updates, and the groups that could receive weights."""
    groups = [name for name in server.updates.groups if name in server.llm.worker_engine.workers.weight_groups]
    version = {"weight_version": server.updates.label, "updates": server.llm.weight_version}
    return reply(version | {"weight_groups": groups})


@router.get("/weight_version")
@router.get("/get_weight_version")
async def get_weight_version(server: Served):
    """The weight version's label, as slime and Miles ask for it."""
    return reply({"weight_version": server.updates.label})


@router.get("/is_paused")
async def is_paused(server: Served):
    """Say whether generation is paused, and the state of the server."""
    return reply({"is_paused": server.engine.state.paused, "state": server.engine.state.name})


@router.get("/is_sleeping")
async def is_sleeping(server: Served):
    """Say whether weights or KV cache are released."""
    return reply({"is_sleeping": not server.llm.ready})


@router.get("/get_world_size")
async def get_world_size(server: Served, include_dp: bool = True):
    """Ranks that this server takes in a weight group; without include_dp, those of one replica."""
    return reply({"world_size": server.llm.world_size if include_dp else server.llm.config.pipeline_parallel_size})


@router.get("/get_model_info")
@router.get("/model_info")
@router.get("/get_server_info")
@router.get("/server_info")
async def server_info(server: Served):
    """Both dialects' information on model and server, and what log-probs mean here."""
    llm = server.llm
    config = llm.config
    model = {
        "model": server.model_name, "dtype": config.dtype, "max_model_len": llm.max_model_len,
        "logprobs_mode": "processed_logprobs",  # vLLM's word for log-probs of the distribution sampled from
    }  # fmt: skip
    return reply({
        "vllm_config": {"model_config": model, "weight_transfer_config": {"backend": "gloo"}},
        "model_path": str(llm.path), "tokenizer_path": str(llm.path), "served_model_name": server.model_name,
        "model_type": llm.model_config.model_type, "is_generation": True,
        "tp_size": 1, "pp_size": config.pipeline_parallel_size, "dp_size": config.replicas,
        "enable_memory_saver": False,  # slime's external engines must say so
        "enable_return_routed_experts": llm.engine.has_experts,
        "max_total_num_tokens": llm.worker_engine.capacity,
        "max_running_requests": config.max_num_seqs * config.replicas,
        "context_length": llm.max_model_len, "weight_version": server.updates.label, "logprobs_mode": LOGPROBS_MODE,
        "contract": server.contract_hash, "engine": "samebits", "control_port": server.guard.control_port,
        "limits": asdict(server.engine.limits), "stats": asdict(server.stats()),
    })  # fmt: skip


@router.get("/health_generate")
async def health_generate(server: Served):
    """200 when the engine's thread answers and could generate."""
    await server.engine.call(lambda llm: None)
    ready = server.llm.ready
    return reply({"status": "ok" if ready else "the engine sleeps or has no weights"}, 200 if ready else 503)


@router.get("/get_load")
async def load(server: Served):
    """The load now, in SGLang's older form."""
    stats = server.stats()
    tokens = stats.kv_blocks_used * ops.backend(ops.parse_device(server.llm.config.device or "cpu")).BLOCK
    core = {
        "dp_rank": 0, "num_reqs": stats.num_running + stats.num_waiting, "num_waiting_reqs": stats.num_waiting,
        "num_tokens": tokens,
    }  # fmt: skip
    return reply([core])


@router.get("/v1/loads")
async def loads(server: Served):
    """The load now; `include` is taken as "all"."""
    stats = server.stats()
    blocks = max(stats.kv_blocks_total, 1)  # there are none while no replica serves
    core = {
        "dp_rank": 0, "num_running_reqs": stats.num_running, "num_waiting_reqs": stats.num_waiting,
        "num_total_reqs": stats.num_running + stats.num_waiting, "token_usage": stats.kv_blocks_used / blocks,
        "kv_cache_bytes_used": stats.kv_blocks_used * (stats.kv_cache_bytes // blocks),
    }  # fmt: skip
    return reply({"timestamp": time.time(), "loads": [core], **core, "engine": asdict(stats)})


@router.get("/v1/models")
async def models(server: Served):
    """The one model that is served, with its length limit and its contract's hash."""
    card = {
        "id": server.model_name, "object": "model", "created": server.started, "owned_by": "samebits",
        "root": str(server.llm.path), "parent": None, "max_model_len": server.llm.max_model_len,
        "contract": server.contract_hash,
    }  # fmt: skip
    return reply({"object": "list", "data": [card]})
