"""The engine against one plain forward pass: whatever is cached, cut, shared, preempted or batched."""

from __future__ import annotations

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tiny_engine import BLOCK, PAGE, VOCAB, check_against_plain, check_empty, engine, prompt, tiny_model

from moonlet.errors import EngineBusyError, MoonletError, RequestError
from moonlet.model.k3 import K3
from moonlet.ops.backend import kernels
from moonlet.serve.engine import Collector
from moonlet.serve.sampler import SamplingParams
from moonlet.serve.sequence import Request


@pytest.fixture(scope="module")
def model() -> K3:
    return tiny_model()


@pytest.mark.parametrize(("mode", "atol"), [("replay", 0.0), ("recurrent", 2e-5)])
@pytest.mark.parametrize("batch", [1, 3, 16])
def test_answers_are_those_of_a_plain_forward(model, mode: str, atol: float, batch: int) -> None:
    served = engine(model, mode)
    requests = [Request(prompt(5 + 9 * i, i), SamplingParams(seed=i), max_tokens=20) for i in range(batch)]
    for request, completion in zip(requests, served.generate(requests)):
        assert completion.finish == "length" and len(completion.ids) == 20
        check_against_plain(model, request, completion, atol)
    check_empty(served)


@pytest.mark.parametrize("length", [BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE + 5])
@pytest.mark.parametrize(("mode", "atol"), [("replay", 0.0), ("recurrent", 1e-5)])
def test_a_hit_gives_what_a_cold_start_gives(model, length: int, mode: str, atol: float) -> None:
    """B56: a restored prefix without its KDA state still wrote fluent text."""
    served = engine(model, mode)
    ids = prompt(length)
    request = Request(ids, SamplingParams(seed=1), max_tokens=6)
    cold = served.generate([request])[0]
    warm = served.generate([request])[0]
    assert warm.ids == cold.ids and warm.num_cached == (length - 1) // BLOCK * BLOCK and cold.num_cached == 0
    torch.testing.assert_close(torch.tensor(warm.logprobs), torch.tensor(cold.logprobs), atol=atol, rtol=0)
    check_against_plain(model, request, warm, atol if mode == "recurrent" else 0.0)
    assert (served.cache.num_hits > 0) == (length > BLOCK)


@given(data=st.data())
@settings(max_examples=6, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
def test_shared_prefixes_evictions_and_small_pools_change_nothing(data, model) -> None:
    """Random prompts that share prefixes of random lengths; a pool that is too small for all; checkpoints that go."""
    served = engine(
        model, num_pages=data.draw(st.integers(8, 14)), checkpoint_bytes=data.draw(st.sampled_from([0, 10**6, 10**9]))
    )
    stem, done = prompt(120, 99), 0
    for round_ in range(4):
        lengths = data.draw(st.lists(st.tuples(st.integers(0, 110), st.integers(1, 40)), min_size=1, max_size=5))
        requests = [
            Request(
                [*stem[:shared], *prompt(own, 10 * round_ + i)],
                SamplingParams(seed=i),
                max_tokens=data.draw(st.integers(1, 12)),
            )
            for i, (shared, own) in enumerate(lengths)
        ]
        for request, completion in zip(requests, served.generate(requests)):
            check_against_plain(model, request, completion)
            done += 1
        check_empty(served)
        if data.draw(st.booleans()):
            served.cache.evict()
    assert done >= 4


def test_preempted_requests_go_on_where_they_were(model) -> None:
    served = engine(model, num_pages=9)
    requests = [Request(prompt(40, i), SamplingParams(seed=i), max_tokens=60) for i in range(5)]
    completions = served.generate(requests)
    assert served.counters.num_preempted > 0
    alone = [engine(model).generate([request])[0] for request in requests]
    assert [completion.ids for completion in completions] == [completion.ids for completion in alone]
    for request, completion in zip(requests, completions):
        check_against_plain(model, request, completion)
    check_empty(served)


@pytest.mark.parametrize("mode", ["replay", "recurrent"])
def test_company_does_not_change_an_answer(model, mode: str) -> None:
    request = Request(prompt(30), SamplingParams(seed=5), max_tokens=25)
    alone = engine(model, mode).generate([request])[0]
    crowd = [Request(prompt(3 + 11 * i, i + 1), SamplingParams(seed=i), max_tokens=30) for i in range(9)]
    together = engine(model, mode).generate([*crowd[:4], request, *crowd[4:]])[4]
    assert together.ids == alone.ids and together.logprobs == alone.logprobs


def test_aborts_deadlines_and_stops_leave_nothing_behind(model) -> None:
    served = engine(model)
    collectors = [Collector() for _ in range(4)]
    ids = prompt(50)
    first = served.generate([Request(ids, SamplingParams(seed=3), max_tokens=9)])[0].ids
    assert len(set(first)) > 1
    stop = next(token for token in first[1:] if token != first[0])
    names = [
        served.submit(Request(ids, max_tokens=500), collectors[0]),
        served.submit(Request(ids, max_tokens=500, deadline_s=0.0), collectors[1]),
        served.submit(Request(ids, SamplingParams(seed=3), max_tokens=500, stop_ids=frozenset([stop])), collectors[2]),
        served.submit(
            Request(ids, SamplingParams(seed=3), max_tokens=500, should_stop=lambda token: token == stop), collectors[3]
        ),
    ]
    for _ in range(30):
        served.step()
    assert served.abort(names[0]) and not served.abort(names[0])
    while served.has_work:
        served.step()
    assert [c.events[-1].finish for c in collectors] == ["abort", "deadline", "stop", "stop"]
    assert collectors[1].completion().ids == []
    stopped = collectors[2].completion().ids
    assert stopped == collectors[3].completion().ids == first[: first.index(stop) + 1]
    check_empty(served)


def test_other_weights_never_meet_old_prefixes() -> None:
    """B60: prefixes computed with old weights were reused after an update."""
    old, new = tiny_model(0), tiny_model(1)
    served = engine(tiny_model(0))
    request = Request(prompt(70), SamplingParams(seed=2), max_tokens=5)
    served.generate([request])
    served.update_weights(new.state_dict(), version=7)
    after = served.generate([request])[0]
    assert after.num_cached == 0 and after.versions == [7] * 5
    assert after == engine(new).generate([request])[0].__class__(
        **{**vars(engine(new).generate([request])[0]), "versions": [7] * 5}
    )
    with pytest.raises(MoonletError, match="another model"):
        served.update_weights({"x": torch.zeros(1)}, version=8)
    assert served.generate([request])[0].versions == [7] * 5
    check_against_plain(old, request, engine(old).generate([request])[0])


@pytest.mark.parametrize("keep", [False, True])
def test_an_update_in_mid_answer_is_tagged(model, keep: bool) -> None:
    served = engine(tiny_model(0))
    collector = Collector()
    served.submit(Request(prompt(40), SamplingParams(seed=2), max_tokens=30), collector)
    while sum(event.drawn is not None for event in collector.events) < 5:
        served.step()
    served.update_weights(tiny_model(1).state_dict(), version=1, keep_states=keep)
    while served.has_work:
        served.step()
    completion = collector.completion()
    assert completion.versions == [0] * 5 + [1] * 25
    ids = torch.tensor([[*prompt(40), *completion.ids]])
    logprobs = tiny_model(1)(ids)[0, 39:-1].log_softmax(-1).gather(1, ids[0, 40:, None]).squeeze(1).detach()
    is_new = torch.tensor(completion.logprobs[5:]) == logprobs[5:]
    if kernels() == "native":
        assert bool(is_new.all()) == (not keep)
    # What a kept state was is of two weights: it must never be a prefix for others.
    request = Request(ids[0].tolist(), SamplingParams(seed=9), max_tokens=4)
    after = served.generate([request])[0]
    assert (after.num_cached > 0) == (not keep)
    check_against_plain(tiny_model(1), request, after)
    check_empty(served)


def test_bad_requests_are_refused(model) -> None:
    served = engine(model, schedule={"max_waiting": 2})
    for request, expected in [
        (Request([]), "at least one"),
        (Request([VOCAB]), "not in the vocabulary"),
        (Request([3], max_tokens=0), "max_tokens"),
        (Request(prompt(3000)), "context"),
    ]:
        with pytest.raises(RequestError, match=expected):
            served.submit(request, Collector())
    for _ in range(2):
        served.submit(Request([3], max_tokens=1), Collector())
    with pytest.raises(EngineBusyError):
        served.submit(Request([3], max_tokens=1), Collector())
    with pytest.raises(RequestError, match="top_p"):
        SamplingParams(top_p=2)


def test_a_request_that_may_say_nothing_fails_alone(model) -> None:
    served = engine(model)
    bad = Request([3, 4, 5], banned_ids=frozenset(range(VOCAB)))
    good = Request([3, 4, 5], SamplingParams(seed=1), max_tokens=4)
    failed, fine = served.generate([bad, good])
    assert failed.finish == "error" and "no token" in failed.error
    assert fine.finish == "length" and len(fine.ids) == 4
    check_empty(served)
