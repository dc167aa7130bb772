"""Prefixes through an external store: another engine goes on from them to the bit, and nothing wrong is ever used."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tiny_engine import check_against_plain, check_empty, engine_over, prompt, tiny_model

from moonlet.serve.sampler import SamplingParams
from moonlet.serve.sequence import Request
from moonlet.serve.state_store import StateStore, StoreStats, open_store


class DictStore(StateStore):
    """A store in a dict that loses, damages or refuses what it is told to."""

    def __init__(self) -> None:
        self.items: dict[bytes, bytes] = {}
        self.is_down = False

    def get_many(self, keys, deadline_s):
        return {} if self.is_down else {key: self.items[key] for key in keys if key in self.items}

    def put_many(self, items, deadline_s):
        if not self.is_down:
            self.items.update(items)

    def contains_many(self, keys, deadline_s):
        return {key for key in keys if key in self.items and not self.is_down}

    def delete_many(self, keys, deadline_s):
        for key in keys:
            self.items.pop(key, None)

    def flush(self, deadline_s=None):
        return True

    def close(self):
        self.items.clear()

    def stats(self):
        return StoreStats()


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def _request(length: int, seed: int = 0, max_tokens: int = 5) -> Request:
    return Request(prompt(length, seed), SamplingParams(seed=seed), max_tokens=max_tokens)


def _forget_all(served) -> None:
    while served.cache.nodes:
        served.cache.evict()


@pytest.mark.parametrize("mode", ["replay", "recurrent"])
@pytest.mark.parametrize("length", [9, 33, 70, 130])
def test_another_engine_goes_on_from_what_this_one_forgot(model, mode: str, length: int) -> None:
    store, request = DictStore(), _request(length)
    first = engine_over(model, store, mode)
    cold = first.generate([request])[0]
    _forget_all(first)
    check_empty(first)
    second = engine_over(model, store, mode)
    warm = second.generate([request])[0]
    assert warm.num_cached == (length - 1) // 8 * 8
    assert warm.ids == cold.ids
    if mode == "replay":
        check_against_plain(model, request, warm)
    check_empty(second)


@given(data=st.data())
@settings(max_examples=10, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
def test_losses_damage_and_outages_are_misses(data, model) -> None:
    store = DictStore()
    stem = prompt(90, 7)
    for round_ in range(4):
        served = engine_over(model, store, num_pages=data.draw(st.integers(8, 20)))
        store.is_down = data.draw(st.integers(0, 5)) == 0
        for key in sorted(store.items):
            match data.draw(st.integers(0, 7)):
                case 0:
                    del store.items[key]
                case 1:
                    at = data.draw(st.integers(0, len(store.items[key]) - 1))
                    damaged = bytearray(store.items[key])
                    damaged[at] ^= 1 << data.draw(st.integers(0, 7))
                    store.items[key] = bytes(damaged)
                case 2:
                    store.items[key] = store.items[key][: data.draw(st.integers(0, len(store.items[key])))]
        ids = [*stem[: data.draw(st.integers(0, 90))], *prompt(data.draw(st.integers(1, 20)), round_)]
        request = Request(ids, SamplingParams(seed=round_), max_tokens=4)
        check_against_plain(model, request, served.generate([request])[0])
        store.is_down = False
        _forget_all(served)
        check_empty(served)


def test_records_of_other_weights_or_places_are_not_taken(model) -> None:
    store, request = DictStore(), _request(70)
    first = engine_over(model, store)
    first.generate([request])
    _forget_all(first)
    other = tiny_model(1)
    second = engine_over(other, store)
    assert second.generate([request])[0].num_cached == 0
    keys = sorted(key for key in store.items if key.endswith(b"r"))
    swapped = dict(zip(keys, [store.items[key] for key in [*keys[1:], keys[0]]]))
    store.items.update(swapped)
    third = engine_over(model, store)
    completion = third.generate([request])[0]
    assert completion.num_cached == 0
    check_against_plain(model, request, completion)


def test_a_pool_too_small_for_what_the_store_has_takes_less(model) -> None:
    store, request = DictStore(), _request(200, max_tokens=3)
    first = engine_over(model, store)
    first.generate([request])
    _forget_all(first)
    second = engine_over(model, store, num_pages=8)
    check_against_plain(model, request, second.generate([request])[0])
    check_empty(second)


_ELSEWHERE = """
import sys
sys.path.insert(0, sys.argv[1])
from tiny_engine import engine_over, prompt, tiny_model
from moonlet.serve.sampler import SamplingParams
from moonlet.serve.sequence import Request
from moonlet.serve.state_store import open_store
served = engine_over(tiny_model(), open_store(sys.argv[2]))
done = served.generate([Request(prompt(100), SamplingParams(temperature=0), max_tokens=8)])[0]
print(done.num_cached, done.ids, done.logprobs)
"""


def test_another_process_goes_on_from_a_disk(model, tmp_path) -> None:
    """B58: the hand-over lost 69 of 93 layers and decoded fluent text from zero states."""
    where = f"disk:{tmp_path}"
    request = Request(prompt(100), SamplingParams(temperature=0), max_tokens=8)
    store = open_store(where)
    first = engine_over(model, store)
    local = first.generate([request])[0]
    _forget_all(first)
    store.flush(30.0)
    store.close()
    tests = str(Path(__file__).resolve().parents[1])
    run = subprocess.run([sys.executable, "-c", _ELSEWHERE, tests, where], capture_output=True, text=True)
    assert run.stdout.strip() == f"96 {local.ids} {local.logprobs}", run.stderr
