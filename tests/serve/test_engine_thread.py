"""The engine's thread: answers from many callers, early leavers, pauses, failures of a step."""

from __future__ import annotations

import asyncio
import threading

import pytest
from tiny_engine import check_against_plain, check_empty, engine, prompt, tiny_model

from moonlet.errors import RequestError
from moonlet.serve.engine_thread import EngineStoppedError, EngineThread
from moonlet.serve.sampler import SamplingParams
from moonlet.serve.sequence import Request


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def _request(seed: int, max_tokens: int = 10) -> Request:
    return Request(prompt(20 + seed, seed), SamplingParams(seed=seed), max_tokens=max_tokens)


def test_many_callers_get_their_own_answers(model) -> None:
    requests = [_request(seed) for seed in range(8)]

    async def all_at_once(thread: EngineThread):
        return await asyncio.gather(*(thread.generate(request) for request in requests))

    with EngineThread(engine(model)) as thread:
        completions = asyncio.run(all_at_once(thread))
        assert thread.complete(requests[0]).ids == completions[0].ids
    for request, completion in zip(requests, completions):
        check_against_plain(model, request, completion)
    check_empty(thread.engine)


def test_leaving_a_stream_early_frees_its_place(model) -> None:
    async def leave(thread: EngineThread) -> int:
        count = 0
        async for _ in thread.stream(_request(1, max_tokens=400)):
            count += 1
            if count == 3:
                break
        task = asyncio.create_task(thread.generate(_request(2, max_tokens=400)))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wrap_future(thread.call(lambda engine: None))
        return count

    with EngineThread(engine(model)) as thread:
        assert asyncio.run(leave(thread)) == 3
        assert not thread.call(lambda engine: engine.has_work).result()
    check_empty(thread.engine)


def test_a_pause_holds_and_a_resume_goes_on(model) -> None:
    with EngineThread(engine(model)) as thread:
        thread.pause()
        result = []
        caller = threading.Thread(target=lambda: result.append(thread.complete(_request(3))))
        caller.start()
        while not thread.call(lambda engine: engine.has_work).result():
            pass
        steps = thread.call(lambda engine: engine.counters.num_steps).result()
        assert thread.call(lambda engine: engine.counters.num_steps).result() == steps and not result
        thread.resume()
        caller.join()
        assert len(result[0].ids) == 10


def test_refusals_reach_the_caller_and_a_stopped_engine_says_so(model) -> None:
    with EngineThread(engine(model)) as thread, pytest.raises(RequestError):
        asyncio.run(thread.generate(Request([])))
    with pytest.raises(EngineStoppedError):
        asyncio.run(thread.generate(_request(1)))


def test_stopping_ends_what_runs(model) -> None:
    thread = EngineThread(engine(model)).__enter__()
    events = []
    thread.call(lambda engine: engine.submit(_request(1, max_tokens=1000), events.append)).result()
    thread.stop()
    assert events[-1].finish == "error" and "stopped" in events[-1].error
    check_empty(thread.engine)


def test_a_step_that_fails_ends_its_requests_and_nothing_else(model) -> None:
    def broken_sink(event):
        raise OSError("the caller's side broke")

    with EngineThread(engine(model)) as thread:
        thread.call(lambda engine: engine.submit(_request(1), lambda event: None)).result()
        served = thread.engine
        prefill, served.runner.prefill = served.runner.prefill, broken_sink
        events = []
        thread.call(lambda engine: engine.submit(_request(2), events.append)).result()
        while thread.call(lambda engine: engine.has_work).result():
            pass
        served.runner.prefill = prefill
        assert events[-1].finish == "error"
        assert len(thread.complete(_request(4)).ids) == 10
    check_empty(served)
