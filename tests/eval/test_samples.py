"""Sampling: reproducible, free of control tokens, whole characters only, a state of the promised size."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moonlet.errors import NonFiniteError
from moonlet.eval.samples import (
    Continuation,
    Sampling,
    choose_token,
    control_ids,
    draw_sample,
    generate,
    parses_as_python,
    uniform,
)
from moonlet.model.state import KDAState, MLAState
from moonlet.text.tokenizer import SPECIAL_TOKENS
from moonlet.text.utf8 import Utf8Stream

WARM = Sampling(temperature=1.0, seed=3)


def _ids(model, tokenizer, prompt: str, **changes) -> list[int]:
    sampling = Sampling(changes.pop("temperature", 1.0), changes.pop("seed", 3))
    return list(generate(model, tokenizer, tokenizer.encode(prompt), sampling, **{"max_tokens": 24} | changes))


def test_the_same_seed_gives_the_same_text(model, tokenizer) -> None:
    first, again, other = (_ids(model, tokenizer, "def ", seed=seed) for seed in (3, 3, 4))
    assert first == again != other


def test_cutting_a_text_into_calls_changes_nothing(model, tokenizer) -> None:
    whole = _ids(model, tokenizer, "def ")
    half = _ids(model, tokenizer, "def ", max_tokens=10)
    rest = list(generate(model, tokenizer, tokenizer.encode("def ") + half, WARM, max_tokens=14))
    assert half + rest == whole


def test_temperature_zero_takes_the_most_probable_token(model, tokenizer) -> None:
    prompt = tokenizer.encode("for word")
    with torch.no_grad():
        logits = model(torch.tensor([prompt]))[0, -1]
    logits[sorted(control_ids(tokenizer))] = -torch.inf
    assert next(generate(model, tokenizer, prompt, Sampling(0, 0), max_tokens=1)) == int(logits.argmax())


def test_control_tokens_are_never_sampled(new_model, tokenizer) -> None:
    model = new_model()
    control = control_ids(tokenizer)
    assert {tokenizer.special_id(name) for name in SPECIAL_TOKENS} <= control
    ordinary = set(range(tokenizer.vocab_size)) - control
    assert set(tokenizer.encode("def add(a, b): 🌙")) <= ordinary
    text = Continuation(model, banned_ids=control)
    text.add(tokenizer.encode("a"))
    assert {text.next_token(Sampling(50.0, seed=0)) for _ in range(60)} <= ordinary


def test_the_end_of_a_document_ends_a_sample(new_model, tokenizer) -> None:
    model = new_model()
    with torch.no_grad():
        # A hidden state has norm about sqrt(D): a column along it wins everywhere.
        hidden = model.hidden(torch.tensor([tokenizer.encode("a")]))[0, -1]
        model.output_weight[tokenizer.special_id("[EOS]")] = 10 * hidden
    assert _ids(model, tokenizer, "a", temperature=0) == []


def test_stop_ids_end_before_themselves(model, tokenizer) -> None:
    whole = _ids(model, tokenizer, "def ")
    assert _ids(model, tokenizer, "def ", stop_ids=[whole[5]]) == whole[: whole.index(whole[5])]


def test_random_numbers_of_positions_are_uniform_and_apart() -> None:
    numbers = torch.tensor([uniform(seed, position) for seed in range(20) for position in range(200)])
    assert len(set(numbers.tolist())) == len(numbers)
    assert numbers.min() >= 0 and numbers.max() < 1
    counts = torch.histc(numbers, 10, 0, 1)
    assert ((counts - 400).abs() < 5 * 19).all()  # five standard deviations


def test_tokens_are_drawn_in_proportion() -> None:
    logits = torch.tensor([0.0, -torch.inf, 1.0, 2.0])
    draws = [choose_token(logits, Sampling(0.5, seed=1), position) for position in range(4000)]
    wanted = torch.softmax(logits / 0.5, dim=0)
    found = torch.bincount(torch.tensor(draws), minlength=4) / 4000
    assert found[1] == 0
    torch.testing.assert_close(found, wanted, atol=0.03, rtol=0)


def test_the_smallest_temperature_is_still_one() -> None:
    assert choose_token(torch.tensor([3.0, 700.0, -9.0]), Sampling(5e-324, seed=1), position=0) == 1


def test_kda_state_is_constant_and_mla_grows_by_one_row_a_token(model, tokenizer) -> None:
    text = Continuation(model)
    text.add(tokenizer.encode("a"))
    sizes = {}
    for length in range(1, 11):
        text.next_token(WARM)
        assert text.state.length == length
    sizes[10] = [(type(layer), layer.num_bytes) for layer in text.state.layers]
    text.add([5] * 984)
    for length in range(995, 1001):
        text.next_token(WARM)
        assert text.state.length == length
    sizes[1000] = [(type(layer), layer.num_bytes) for layer in text.state.layers]
    row = model.config.kv_lora_rank + model.config.qk_rope_head_dim
    for (kind, before), (_, after) in zip(sizes[10], sizes[1000]):
        if kind is KDAState:
            assert before == after
        else:
            assert kind is MLAState and (before, after) == (10 * row * 4, 1000 * row * 4)


def test_pieces_of_a_prompt_give_the_logits_of_the_whole(model) -> None:
    ids = torch.randint(0, 300, (1, 1100), generator=torch.Generator().manual_seed(0))
    text = Continuation(model)
    text.add(ids[0].tolist())
    with torch.no_grad():
        torch.testing.assert_close(text.next_logits(), model(ids)[0, -1], atol=2e-4, rtol=1e-4)


def test_a_continuation_needs_something_to_continue(model) -> None:
    with pytest.raises(ValueError, match="add one"):
        Continuation(model).next_logits()


def test_broken_weights_are_an_error(new_model, tokenizer) -> None:
    model = new_model()
    torch.nn.init.constant_(model.output_weight, torch.nan)
    with pytest.raises(NonFiniteError, match="not finite"):
        _ids(model, tokenizer, "a")


@settings(max_examples=30, deadline=None)
@given(st.text(max_size=30))
def test_characters_come_out_whole(tokenizer, text: str) -> None:
    stream = Utf8Stream(tokenizer)
    pieces = [stream.push(token) for token in tokenizer.encode(text)]
    assert "".join(pieces) == text and stream.flush() == ""
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


def test_half_a_character_is_held_back_and_then_replaced(tokenizer) -> None:
    stream, ids = Utf8Stream(tokenizer), tokenizer.encode("\U0001f98a")
    assert len(ids) > 1
    assert "".join(stream.push(token) for token in ids[:-1]) == ""
    assert stream.flush() == "\ufffd" and stream.push(tokenizer.encode("a")[0]) == "a"


def test_samples_say_whether_they_parse(model, tokenizer) -> None:
    options = {"max_tokens": 5, "sampling": WARM}
    assert draw_sample(model, tokenizer, "def f(:\n", is_python=True, **options).parses is False
    assert draw_sample(model, tokenizer, "x = 1\n", is_python=False, **options).parses is None
    sample = draw_sample(model, tokenizer, "", is_python=True, **options)
    assert sample.prompt == "" and isinstance(sample.text, str)


@pytest.mark.parametrize(
    ("source", "parses"),
    [("x = 1\n", True), ("def f():\n    return '\\d'\n", True), ("def f(:\n", False), ("\0", False), ("\n ", False)],
)
def test_parsing(source: str, parses: bool) -> None:
    assert parses_as_python(source) is parses
