"""Columns of texts: what they say of equality, groups and numbers is what Python says of each text by itself."""

from __future__ import annotations

import pickle
import re

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from loadmaster.checkpoint import texts as room
from loadmaster.checkpoint.texts import Texts, decimals, groups, words_of

# Few letters and lengths around multiples of 8, so that texts are often equal, and often differ in one place alone.
WORDS = st.one_of(
    st.text("ab", max_size=3),
    st.builds(
        lambda size, at, letter: "a" * (at % (size + 1)) + letter + "a" * size,
        st.integers(0, 26),
        st.integers(0, 26),
        st.sampled_from("ab"),
    ),
    st.text(max_size=20).filter(lambda text: text.isprintable()),
)
LISTS = st.lists(WORDS, max_size=12)


def numbered(rows: list[tuple[str, ...]]) -> list[int]:
    """The number of each row's first place."""
    return [rows.index(row) for row in rows]


@given(words=LISTS)
def test_texts_are_the_strings_that_they_were_made_of(words: list[str]) -> None:
    texts = Texts.of(words)
    assert list(texts) == texts.tolist() == words
    assert [texts[index] for index in range(len(texts))] == words
    assert texts.lengths.tolist() == [len(word.encode()) for word in words]
    assert texts.is_distinct() == (len(set(words)) == len(words))
    assert texts.are_the_same() == (len(set(words)) <= 1)
    assert pickle.loads(pickle.dumps(texts)).tolist() == words
    assert texts.take(np.arange(len(words)) % 2 == 0).tolist() == words[::2]


@given(words=LISTS)
def test_equal_texts_have_one_group_and_one_hash(words: list[str]) -> None:
    number, first = groups(Texts.of(words))
    assert first[number].tolist() == numbered([(word,) for word in words])
    assert len(first) == len(set(words))
    known: dict[str, int] = {}
    for word, value in zip(words, Texts.of(words).hashes.tolist(), strict=True):
        assert known.setdefault(word, value) == value
    assert len(set(known.values())) == len(known)


@given(word=WORDS, others=LISTS)
def test_the_hash_of_a_text_does_not_depend_on_its_company(word: str, others: list[str]) -> None:
    assert Texts.of([word]).hashes[0] == Texts.of([word, *others]).hashes[0]


def test_a_hash_does_not_depend_on_a_long_text_beside_it() -> None:
    assert Texts.of(["x"]).hashes[0] == Texts.of(["x", "a" * 5000]).hashes[0]


def test_names_that_differ_in_two_bytes_have_hashes_of_their_own() -> None:
    letters = [chr(code) for code in range(33, 127)]
    for at in range(8):
        names = ["x" * at + one + "x" * 7 + other + "x" * (15 - at) for one in letters for other in letters]
        assert len(set(Texts.of(names).hashes.tolist())) == len(names)


@given(rows=st.lists(st.tuples(WORDS, WORDS), max_size=12))
def test_rows_are_grouped_by_all_their_texts(rows: list[tuple[str, str]]) -> None:
    number, first = groups(Texts.of(one for one, _ in rows), Texts.of(other for _, other in rows))
    assert first[number].tolist() == numbered(rows)


@given(words=LISTS)
def test_texts_with_one_hash_are_still_told_apart(words: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Texts, "_mixed", lambda self, columns: np.zeros(len(self), np.uint64))
        number, first = groups(Texts.of(words))
        assert Texts.of(words).is_distinct() == (len(set(words)) == len(words))
    assert first[number].tolist() == numbered([(word,) for word in words])


@pytest.mark.parametrize("size", [room._LONG - 1, room._LONG, room._LONG + 1, 5000])
def test_long_texts_are_compared_too(size: int) -> None:
    words = ["a" * size, "a" * size + "b", "b", "a" * size, "a" * (size - 1) + "b"]
    number, first = groups(Texts.of(words))
    assert first[number].tolist() == [0, 1, 2, 0, 4]
    assert not Texts.of(words).is_distinct()
    assert Texts.of(words[1:]).is_distinct()
    assert Texts.of([words[0], words[0]]).are_the_same()
    assert not Texts.of([words[0], words[4]]).are_the_same()


@given(
    numbers=st.lists(
        st.tuples(
            st.one_of(st.from_regex(r"\A[0-9]{0,18}\Z"), st.integers(0, 10**17).map(str)), st.sampled_from(",].:/x\x7f")
        )
    )
)
@example(numbers=[("9" * 15, ","), ("9" * 16, ","), ("0", "]"), ("00", ","), ("", ","), ("12345678", ".")])
def test_decimals_are_those_of_python(numbers: list[tuple[str, str]]) -> None:
    text = "".join(digits + end for digits, end in numbers)
    at = np.cumsum([0, *(len(digits) + 1 for digits, _ in numbers)])[:-1]
    value, behind = decimals(words_of(text.encode()), at)
    for (digits, _), start, found, stop in zip(numbers, at.tolist(), value.tolist(), behind.tolist(), strict=True):
        if re.fullmatch(r"0|[1-9][0-9]{0,14}", digits):
            assert (found, stop) == (int(digits), start + len(digits))
        else:
            assert found == -1


def test_a_number_may_end_the_text() -> None:
    assert [column.tolist() for column in decimals(words_of(b"a12"), np.array([1, 3]))] == [[12, -1], [3, 3]]
