"""GET /metrics: vLLM's names, filled by what really happened."""

import asyncio
import re
from pathlib import Path

from strata_planner.contract.acceptance import DraftCounts
from strata_planner.contract.frames import LeaderHello
from strata_runtime.gateway.text.tokenizer import Tokenizer
from tests.runtime.gateway.fake_leader import FakeLeader
from tests.runtime.gateway.harness import Harness


async def test_counters_and_latencies(gateway: Harness, tokenizer: Tokenizer) -> None:
    await gateway.complete(prompt="hello", n=2, max_tokens=5)
    assert await gateway.metric("vllm:prompt_tokens_total") == 2 * len(tokenizer.encode("hello"))
    assert await gateway.metric("vllm:generation_tokens_total") == 10
    assert await gateway.metric("vllm:time_to_first_token_seconds_count") == 2
    assert await gateway.metric("vllm:inter_token_latency_seconds_count") == 8
    assert await gateway.metric("vllm:request_time_per_output_token_seconds_count") == 2
    assert await gateway.metric("vllm:e2e_request_latency_seconds_count") == 2
    page = (await gateway.http.get("/metrics")).text
    assert 'vllm:request_success_total{finished_reason="length",model_name="tiny"} 2.0' in page


async def test_prefixes_that_were_found_preemptions_and_drafts(gateway: Harness, leader: FakeLeader) -> None:
    leader.found, leader.counts = 2, (3, 4, 12, 7)
    await gateway.complete(prompt=[5, 6, 7], max_tokens=2)
    assert await gateway.metric("vllm:prefix_cache_queries_total") == 3
    assert await gateway.metric("vllm:prefix_cache_hits_total") == 2
    await gateway.until(lambda: _of_leader(gateway).preemptions == 3)
    assert await gateway.metric("vllm:num_preemptions_total") == 3
    leader.counts = (5, 5, 16, 10)
    await gateway.until(lambda: _of_leader(gateway).preemptions == 5)
    assert await gateway.metric("vllm:num_preemptions_total") == 5
    assert await gateway.metric("vllm:spec_decode_num_drafts_total") == 5
    assert await gateway.metric("vllm:spec_decode_num_draft_tokens_total") == 16
    assert await gateway.metric("vllm:spec_decode_num_accepted_tokens_total") == 10
    assert gateway.dispatcher.status().drafted == DraftCounts(5, 16, 10, tokens=2)


def _of_leader(gateway: Harness) -> LeaderHello:
    (hello,) = gateway.dispatcher._hellos()
    return hello


async def test_gauges_follow_the_leaders(gateway: Harness, leader: FakeLeader) -> None:
    leader.allow(2)
    running = asyncio.create_task(gateway.complete(max_tokens=5))
    await leader.until(lambda: leader.submits)
    await gateway.until(lambda: gateway.dispatcher.load().running == 1)
    assert await gateway.metric("vllm:num_requests_running") == 1
    assert await gateway.metric("vllm:num_requests_waiting") == 0
    assert await gateway.metric("vllm:kv_cache_usage_perc") == 0.5
    assert await gateway.metric("strata_epoch") == 1
    assert await gateway.metric("strata_leaders_connected") == 1
    leader.allow(None)
    await running


async def test_every_name_is_documented(gateway: Harness) -> None:
    page = (await gateway.http.get("/metrics")).text
    told = (Path(__file__).parents[3] / "docs/openai-api.md").read_text()
    families = re.findall(r"^# TYPE ((?:vllm:|strata_)\S+) (\w+)$", page, re.MULTILINE)
    names = {name.removesuffix("_created") for name, _ in families}
    assert len(names) > 15
    assert {
        name for name in names if name.removeprefix("vllm:spec_decode_num_").removesuffix("_total") not in told
    } == set()
