"""Round trips, the pinned special tokens, and control strings that stay text."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonlet.errors import DataError
from moonlet.text.tokenizer import RELEASED_SPECIAL_TOKENS, SPECIAL_TOKENS, Tokenizer, train_tokenizer

TEXTS = [
    "def add(left, right):\n    return left + right\n" * 3,
    "class Shape:\n    def area(self):\n        raise ValueError('no area')\n" * 3,
    "Words, words and 1234567 numbers; naïve café. 漢字かな交じり文 🙂\n",
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(TEXTS, 400)


def test_released_ids_are_pinned():
    """B55: a converted tokenizer shifted these by 1 to 3."""
    assert RELEASED_SPECIAL_TOKENS == {
        "[BOS]": 163584,
        "[EOS]": 163585,
        "<|end_of_msg|>": 163586,
        "<|open|>": 163587,
        "<|close|>": 163588,
        "<|sep|>": 163589,
        "[start_header_id]": 163590,
        "[end_header_id]": 163591,
        "[EOT]": 163593,
        "<|media_begin|>": 163602,
        "<|media_content|>": 163603,
        "<|media_end|>": 163604,
        "<|media_pad|>": 163605,
        "<osagent_mode>": 163649,
        "[UNK]": 163838,
        "[PAD]": 163839,
    }
    assert sorted(RELEASED_SPECIAL_TOKENS, key=RELEASED_SPECIAL_TOKENS.__getitem__) == list(SPECIAL_TOKENS)


def test_specials_are_the_last_ids_in_released_order(tokenizer):
    assert tokenizer.vocab_size == 400
    assert [tokenizer.special_id(name) for name in SPECIAL_TOKENS] == list(range(400 - 16, 400))


def test_too_little_text_leaves_reserved_tokens(tokenizer):
    small = train_tokenizer(["ab"], 300)
    assert small.vocab_size == 300
    assert small.special_id("[PAD]") == 299
    assert small.special_id("<|reserved_token_283|>") == 283


@given(st.text(max_size=200))
@settings(max_examples=200, deadline=None)
def test_round_trip_of_any_text(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode_bytes(ids) == text.encode()
    assert all(0 <= token < 384 for token in ids)


_CONTROL = st.sampled_from([*SPECIAL_TOKENS, "<|reserved_token_7|>"])


@given(st.lists(st.one_of(_CONTROL, st.text(max_size=10)), max_size=8))
@settings(max_examples=100, deadline=None)
def test_control_strings_stay_text(tokenizer, parts):
    """B51: a marker inside text must not become a control id."""
    text = "".join(parts)
    specials = {tokenizer.special_id(name) for name in SPECIAL_TOKENS}
    for ids in (tokenizer.encode(text), tokenizer.encode_batch([text])[0]):
        assert not specials.intersection(ids)
        assert tokenizer.decode(ids) == text


def test_control_ids_decode_literally(tokenizer):
    ids = [tokenizer.special_id("<|open|>"), *tokenizer.encode("think"), tokenizer.special_id("[EOS]")]
    assert tokenizer.decode(ids) == "<|open|>think[EOS]"


@given(st.text(alphabet="ab1.é\n\r \t", max_size=300), st.integers(1, 40))
@settings(max_examples=200, deadline=None)
def test_pieces_give_the_same_ids(tokenizer, text, size):
    pieces = list(tokenizer.encode_pieces(text, size))
    assert [token for piece in pieces for token in piece] == tokenizer.encode(text)


def test_long_text_is_cut_into_pieces(tokenizer):
    assert len(list(tokenizer.encode_pieces(TEXTS[0] * 10, 100))) > 5


def test_batch_equals_single(tokenizer):
    assert tokenizer.encode_batch(TEXTS) == [tokenizer.encode(text) for text in TEXTS]


def test_half_a_character_decodes_to_a_replacement(tokenizer):
    ids = tokenizer.encode("漢")
    assert len(ids) > 1
    assert "\ufffd" in tokenizer.decode(ids[:1])
    assert tokenizer.decode_bytes(ids[:1]) == "漢".encode()[: len(tokenizer.decode_bytes(ids[:1]))]


def test_training_does_not_depend_on_order(tokenizer):
    shuffled = random.Random(1).sample(TEXTS, len(TEXTS))
    assert train_tokenizer(shuffled, 400).hash == tokenizer.hash


def test_save_keeps_hash_and_ids(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "tokenizer.json")
    loaded = Tokenizer.load(tmp_path / "tokenizer.json")
    assert loaded.hash == tokenizer.hash
    assert loaded.encode(TEXTS[2]) == tokenizer.encode(TEXTS[2])
    loaded.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "tokenizer.json").read_bytes()


def test_the_file_is_a_plain_tokenizers_file(tokenizer, tmp_path):
    import tokenizers

    tokenizer.save(tmp_path / "tokenizer.json")
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert library.encode(TEXTS[1]).ids == tokenizer.encode(TEXTS[1])
    assert library.token_to_id("[EOS]") == tokenizer.special_id("[EOS]")
    assert library.encode("a<|sep|>").ids[-1] == tokenizer.special_id("<|sep|>")


@pytest.mark.parametrize("damage", ["half", "not json", "list", "no vocab", "no specials", "not bytes", "bad merges"])
def test_damaged_file_is_one_clear_error(tokenizer, tmp_path, damage):
    path = tmp_path / "tokenizer.json"
    tokenizer.save(path)
    data = path.read_bytes()
    table = json.loads(data)
    match damage:
        case "half":
            data = data[: len(data) // 2]
        case "not json":
            data = b"\x00\xff"
        case "list":
            data = b"[]"
        case "no vocab":
            data = json.dumps({**table, "model": {}}).encode()
        case "no specials":
            data = json.dumps({**table, "added_tokens": table["added_tokens"][:3]}).encode()
        case "not bytes":
            table["model"]["vocab"]["漢"] = 5
            data = json.dumps(table).encode()
        case "bad merges":
            table["model"]["merges"] = [["no", "such"]]
            data = json.dumps(table).encode()
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"tokenizer\.json"):
        Tokenizer.load(path)


def test_missing_file_and_unknown_special(tokenizer, tmp_path):
    with pytest.raises(DataError, match="cannot read"):
        Tokenizer.load(tmp_path / "absent.json")
    with pytest.raises(DataError, match=r"did you mean '<\|open\|>'"):
        tokenizer.special_id("<|opem|>")


def test_half_a_surrogate_pair_is_refused(tokenizer):
    with pytest.raises(DataError, match="character 1"):
        tokenizer.encode("a\ud800")


def test_vocabulary_needs_room():
    with pytest.raises(DataError, match="272"):
        train_tokenizer(TEXTS, 271)


def test_text_room_does_not_load_torch():
    import subprocess
    import sys

    code = "import sys, moonlet.text.tokenizer; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
