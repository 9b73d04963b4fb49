"""Latencies and counters that a replica tells, from what vLLM hands its stat loggers."""

from torchrl_vllm_sync.engine.internals import MAX_FIRST_TOKENS, StatsRecorder
from torchrl_vllm_sync.replica import Latency


def test_latencies_are_of_the_last_requests_and_tokens():
    from vllm.v1.metrics.stats import IterationStats

    recorder, step = StatsRecorder(), IterationStats()
    nothing = {"time_to_first_token": None, "inter_token_latency": None}
    assert recorder.latencies() == nothing
    recorder.record(None, step)
    assert recorder.latencies() == nothing
    step.inter_token_latencies_iter = [0.01] * 98 + [0.03, 0.05]
    step.time_to_first_tokens_iter = [9.0]
    recorder.record(None, step)
    told = recorder.latencies()
    assert told["time_to_first_token"] == Latency(p50_s=9.0, p99_s=9.0)
    assert told["inter_token_latency"].p50_s == 0.01
    assert 0.03 <= told["inter_token_latency"].p99_s < 0.05
    step.time_to_first_tokens_iter = [1.0] * MAX_FIRST_TOKENS
    recorder.record(None, step)
    assert recorder.latencies()["time_to_first_token"] == Latency(p50_s=1.0, p99_s=1.0)


def test_preempted_requests_are_counted():
    from vllm.v1.metrics.stats import IterationStats

    recorder, step = StatsRecorder(), IterationStats()
    step.num_preempted_reqs = 2
    recorder.record(None, step)
    recorder.record(None, step)
    assert recorder.counters().num_preempted == 4
