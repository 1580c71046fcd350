"""Sampling parameters, detokenisation and stops: against brute force, over random tokens, bytes and steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.errors import UsageError
from deepinfer.sampling.params import SamplingParams
from deepinfer.sampling.stop import StopChecker
from deepinfer.sampling.tokenizer import Detokenizer, Tokenizer

tokenizers = pytest.importorskip("tokenizers")

EOS = 1


def save_byte_tokenizer(path: Path) -> None:
    """A `tokenizer.json` whose tokens are three specials, 1 the end of a sequence, and the 256 bytes."""
    specials = ["<pad>", "<eos>", "<bos>"]
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*specials, *letters])}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens([tokenizers.AddedToken(token, special=True) for token in specials])
    made.save(str(path))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Reads back what is saved."""
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    save_byte_tokenizer(path)
    return Tokenizer(path)


# --- sampling parameters --------------------------------------------------------------------------------------------

BAD_PARAMS: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -0.1}, "temperature must be at least 0"),
    ({"temperature": math.nan}, "temperature must be a finite number"),
    ({"temperature": "hot"}, "temperature must be a finite number"),
    ({"top_p": 0.0}, "top_p must lie above 0"),
    ({"top_p": 1.1}, "top_p must lie above 0"),
    ({"top_k": -2}, "top_k must be from -1 to 2147483647"),
    ({"top_k": 1 << 31}, "top_k must be from -1 to 2147483647"),
    ({"top_k": 1.5}, "top_k must be a whole number"),
    ({"max_tokens": 0}, "max_tokens must be at least 1"),
    ({"max_tokens": True}, "max_tokens must be a whole number"),
    ({"min_tokens": 17}, "min_tokens 17 exceeds max_tokens 16"),
    ({"stop": ["a", ""]}, "stop must be strings that are not empty"),
    ({"stop": [3]}, "stop must be strings"),
    ({"stop": 5}, "stop must be a string or a list"),
    ({"stop_token_ids": 5}, "stop_token_ids must be a list"),
    ({"stop_token_ids": [-1]}, "stop_token_ids must be at least 0"),
    ({"seed": 2**63}, "seed must be from 0"),
    ({"logprobs": 1001}, "logprobs must be from 0 to 1000"),
]


@pytest.mark.parametrize(("given_params", "says"), BAD_PARAMS, ids=[str(p) for p, _ in BAD_PARAMS])
def test_a_bad_parameter_is_one_sentence(given_params: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError) as error:
        SamplingParams(**given_params)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_parameters_are_values() -> None:
    stops = ["a", "b"]
    params = SamplingParams(stop=stops, stop_token_ids=[3])
    stops.append("c")
    assert params == SamplingParams(stop=("a", "b"), stop_token_ids=(3,))
    assert hash(params) == hash(replace(params))
    assert SamplingParams(stop="ab").stop_strings == ("ab",)
    assert [SamplingParams(temperature=t).is_greedy for t in (0.0, 9e-6, 1e-5, 1.0)] == [True, True, False, False]


# --- where a request ends, and its text -----------------------------------------------------------------------------


@given(data=st.lists(st.integers(0, 258), max_size=40))
def test_pieces_of_text_join_to_the_whole(tokenizer: Tokenizer, data: list[int]) -> None:
    """Any bytes, broken characters and special tokens among them, in any order."""
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push(token) for token in data]
    assert "".join([*pieces, detokenizer.flush()]) == tokenizer.decode(data)


@given(text=st.text(st.characters(exclude_characters="\ufffd"), max_size=30))
def test_no_piece_breaks_a_character(tokenizer: Tokenizer, text: str) -> None:
    detokenizer = Detokenizer(tokenizer)
    text = text.encode("utf-8", "ignore").decode()
    pieces = [detokenizer.push(token) for token in tokenizer.encode(text)]
    assert "".join(pieces) == text
    assert detokenizer.flush() == ""
    assert max((len(piece) for piece in pieces), default=0) <= 1  # a token is a byte: nothing waits for its neighbour


def first_stop(tokenizer: Tokenizer, tokens: Sequence[int], params: SamplingParams) -> tuple[int, str] | None:
    """By brute force: decode every prefix anew, and look for stop strings in what follows the first `min_tokens`."""
    protected = len(tokenizer.decode(tokens[: params.min_tokens]))
    for count in range(params.min_tokens + 1, len(tokens) + 1):
        if tokens[count - 1] == EOS:
            return count, tokenizer.decode(tokens[: count - 1])
        text = tokenizer.decode(tokens[:count])
        places = [at for stop in params.stop_strings if (at := text.find(stop, protected)) >= 0]
        if places:
            return count, text[: min(places)]
    return None


@given(
    words=st.lists(st.sampled_from(["a", "b", "ab", "é", "€", "<eos>"]), max_size=24),
    stops=st.lists(st.text("abé€", min_size=1, max_size=4), max_size=3),
    min_tokens=st.integers(0, 6),
    seed=st.integers(0, 2**32 - 1),
)
def test_stops_are_found_where_brute_force_finds_them(
    tokenizer: Tokenizer, words: list[str], stops: list[str], min_tokens: int, seed: int
) -> None:
    """Whatever the steps that tokens come in; every byte is a token, so that all stop strings cross boundaries."""
    tokens = [EOS if word == "<eos>" else token for word in words for token in tokenizer.encode(word)]
    params = SamplingParams(max_tokens=99, min_tokens=min_tokens, stop=stops)
    checker = StopChecker(params, (EOS,), Detokenizer(tokenizer))
    rng, at, found = np.random.default_rng(seed), 0, None
    while at < len(tokens) and found is None:
        step = tokens[at : at + int(rng.integers(1, 6))]
        stop = checker.accept(step)
        found = (at + stop.num_tokens, checker.final_text()) if stop else None
        at += len(step)
    expected = first_stop(tokenizer, tokens, params)
    assert found == expected
    if expected is None:
        assert checker.final_text() == tokenizer.decode(tokens)
