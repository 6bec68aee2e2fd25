"""The seam over both models' vocabularies and texts in many scripts."""

from __future__ import annotations

from functools import lru_cache

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from legato.decoding.seam import Seam, is_whole
from legato.engines.llamacpp.binding import Vocabulary
from legato.errors import InvalidField
from legato.prompting.profiles import Profile, profile_from_metadata
from legato.prompting.render import render
from legato.types import Chat, CompletionRequest, Mark, Message, Prompt, Text

WORDS = [
    "The lighthouse", " keeper", " unbelievable", "ing", " 3.14159", "https://docs.python.org/3/", "?q=a&b=%20",
    "def f(self, x):\n", "\treturn", "    ", "        if", "\n\n", "\r\n", " ", "  ", "été", " Bahnsteig", "naïve",
    "Привет", " мир", "заставил", "春天", "来了", "人工智能", "日本語", "かな", "สวัสดี", "ครับ", "🦊", "🧪🧬",
    "{\"a\": [1, 2", "\"}", "e\u0301", "\u00a0", "👩\u200d💻", "한국어", "१२३", "</s>", "<|im_end|>", "<tool_call>",
]  # fmt: skip
TEXTS = (
    st.lists(st.one_of(st.sampled_from(WORDS), st.text(max_size=4)), min_size=1, max_size=12).map("".join).filter(bool)
)
MANY = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def encoded(text: str) -> bytes:
    """The text's bytes; Hypothesis may draw half of a surrogate pair, which no caller can send."""
    return text.encode("utf-8", "ignore")


def tokenized(vocabulary: Vocabulary, text: str) -> tuple[bytes, list[int]]:
    """Bytes and ids of a text, if the vocabulary can spell it: the small model's lacks some rare bytes."""
    data = encoded(text)
    ids = vocabulary.encode(data, special=False)
    assume(joined(vocabulary, ids) == data)
    return data, ids


def joined(vocabulary: Vocabulary, ids: list[int]) -> bytes:
    return b"".join(vocabulary.pieces[id] for id in ids)


@MANY
@given(text=TEXTS)
def test_kept_tokens_and_heal_bytes_are_the_text(vocabulary: Vocabulary, seam: Seam, text: str) -> None:
    data, ids = tokenized(vocabulary, text)
    kept, heal = seam.split(ids, 0)
    assert joined(vocabulary, ids[:kept]) + heal == data
    assert joined(vocabulary, ids[:kept]) == data[: len(data) - len(heal)]


@MANY
@given(text=TEXTS)
def test_no_token_could_start_before_the_boundary_and_overhang(vocabulary: Vocabulary, seam: Seam, text: str) -> None:
    data = encoded(text)
    boundary = seam.boundary(data)
    heads = token_heads(vocabulary)
    longest = max(map(len, vocabulary.pieces))
    assert not any(data[start:] in heads for start in range(max(0, len(data) - longest), boundary))
    assert boundary == len(data) or data[boundary:] in heads


@lru_cache(maxsize=2)
def token_heads(vocabulary: Vocabulary) -> frozenset[bytes]:
    """All proper prefixes of all text tokens."""
    words = (piece for id, piece in enumerate(vocabulary.pieces) if id not in vocabulary.control_ids)
    return frozenset(word[:length] for word in words for length in range(1, len(word)))


@MANY
@given(text=TEXTS)
def test_the_boundary_never_moves_back_as_the_text_grows(seam: Seam, text: str) -> None:
    data = encoded(text)
    last = 0
    for end in range(1, len(data) + 1):
        boundary = seam.boundary(data[:end])
        assert boundary >= last
        last = boundary


@MANY
@given(text=TEXTS)
def test_what_the_tokenizer_gives_is_canonical(vocabulary: Vocabulary, seam: Seam, text: str) -> None:
    _, ids = tokenized(vocabulary, text)
    for at in range(len(ids)):
        ends_whole = is_whole(joined(vocabulary, ids[: at + 1]))
        again = vocabulary.encode(joined(vocabulary, ids[: at + 1]), special=False) if ends_whole else ids[: at + 1]
        if again == ids[: at + 1]:  # A longer text may be cut elsewhere: blanks before a word, for one.
            assert seam.is_canonical(ids[:at], 0, ids[at])


@MANY
@given(text=TEXTS, size=st.integers(1, 3))
def test_what_the_tokenizer_would_not_give_is_refused(vocabulary: Vocabulary, seam: Seam, text: str, size: int) -> None:
    """Split the last token in two: the second half may not be accepted behind the first."""
    data, ids = tokenized(vocabulary, text)
    assume(ids)
    word = vocabulary.pieces[ids[-1]]
    if len(word) <= size or not is_whole(word[:-size]) or not is_whole(data) or not word[-size:].isascii():
        return
    halves = [vocabulary.encode(half, special=False) for half in (word[:-size], word[-size:])]
    if any(len(half) != 1 for half in halves):
        return
    assert not seam.is_canonical([*ids[:-1], *halves[0]], 0, halves[1][0])


@MANY
@given(text=TEXTS)
def test_every_cover_is_canonical_and_covers(vocabulary: Vocabulary, seam: Seam, text: str) -> None:
    _, ids = tokenized(vocabulary, text)
    kept, heal = seam.split(ids, 0)
    if not heal:
        return
    spelling = seam.encode_after(ids[:kept], 0, heal)
    assert joined(vocabulary, spelling) == heal
    inners = seam.inners(ids[:kept], 0, heal, spelling)
    assert len({len(inner.rest) for inner in inners}) == len(inners)
    for inner in inners:
        assert joined(vocabulary, list(inner.ids)) + inner.rest == heal
        some = seam.candidates(inner.rest)
        assert some.size
        assert all(vocabulary.pieces[id].startswith(inner.rest) for id in some[:20])
        assert not vocabulary.control_ids.intersection(some.tolist())


@pytest.fixture(scope="session")
def profile(vocabulary: Vocabulary) -> Profile:
    special = {id: vocabulary.pieces[id] for id in vocabulary.control_ids}
    return profile_from_metadata(vocabulary.metadata, special, vocabulary.context_length)


def prompt_for(source: Text | Chat, profile: Profile, vocabulary: Vocabulary, seam: Seam) -> Prompt:
    (prompt,) = render(CompletionRequest("m", source), profile, vocabulary, seam)
    return prompt


@MANY
@given(prefix=TEXTS)
def test_a_chats_scaffold_is_never_crossed(vocabulary: Vocabulary, seam: Seam, profile: Profile, prefix: str) -> None:
    prefix = tokenized(vocabulary, prefix)[0].decode()
    messages = (Message("user", "Hi"),)
    bare = prompt_for(Chat(messages), profile, vocabulary, seam)
    prompt = prompt_for(Chat(messages, Mark(prefix)), profile, vocabulary, seam)
    assert prompt.ids[: len(bare.ids)] == bare.ids
    assert prompt.floor == len(bare.ids)
    tail = list(prompt.ids[prompt.floor :])
    assert joined(vocabulary, tail) + prompt.heal == prefix.encode()
    assert not vocabulary.control_ids.intersection(tail)


@MANY
@given(head=TEXTS, tail=TEXTS)
def test_a_control_token_in_a_raw_prompt_is_never_crossed(
    vocabulary: Vocabulary, seam: Seam, profile: Profile, head: str, tail: str
) -> None:
    end = vocabulary.pieces[min(vocabulary.end_ids)].decode()
    text = "".join((tokenized(vocabulary, head)[0].decode(), end, tokenized(vocabulary, tail)[0].decode()))
    prompt = prompt_for(Text((text,)), profile, vocabulary, seam)
    assert joined(vocabulary, list(prompt.ids)) + prompt.heal == text.encode()
    assert text.encode().endswith(prompt.heal)
    last = max(at for at, id in enumerate(prompt.ids) if id in vocabulary.control_ids)
    assert prompt.floor == last + 1


@MANY
@given(text=TEXTS)
def test_c013_typed_text_never_becomes_a_control_token(
    vocabulary: Vocabulary, seam: Seam, profile: Profile, text: str
) -> None:
    text = tokenized(vocabulary, text)[0].decode()
    base = prompt_for(Chat((Message("user", "x"),)), profile, vocabulary, seam)
    prompt = prompt_for(Chat((Message("user", text),)), profile, vocabulary, seam)
    control = [id for id in prompt.ids if id in vocabulary.control_ids]
    assert control == [id for id in base.ids if id in vocabulary.control_ids]


def test_c013_every_control_tokens_name_is_plain_text(vocabulary: Vocabulary, seam: Seam, profile: Profile) -> None:
    bare = prompt_for(Chat((Message("user", "AB"),)), profile, vocabulary, seam).num_tokens
    names = {vocabulary.pieces[id].decode() for id in vocabulary.control_ids} - {""}
    for name in sorted(names)[:40]:
        prefixed = prompt_for(Chat((Message("user", "AB"),), Mark(f"ok{name}")), profile, vocabulary, seam)
        assert prompt_for(Chat((Message("user", f"A{name}B"),)), profile, vocabulary, seam).num_tokens - bare >= 2
        assert prefixed.num_tokens - bare >= 3


def test_the_seam_can_be_turned_off(vocabulary: Vocabulary, seam: Seam, profile: Profile) -> None:
    from legato.types import SeamOptions

    request = CompletionRequest("m", Text(("The link is http:",)), seam=SeamOptions(heal=False))
    (prompt,) = render(request, profile, vocabulary, seam)
    assert (prompt.heal, list(prompt.ids)) == (b"", vocabulary.encode(b"The link is http:", special=False))


def test_a_character_that_cannot_be_spelled_is_refused(vocabulary: Vocabulary, seam: Seam, profile: Profile) -> None:
    text = "a\U00040000b"
    if joined(vocabulary, vocabulary.encode(text.encode(), special=False)) == text.encode():
        assert prompt_for(Text((text,)), profile, vocabulary, seam).num_tokens > 2
        return
    for source in (Text((text,)), Chat((Message("user", text),)), Chat((Message("user", "x"),), Mark(text))):
        with pytest.raises(InvalidField, match=r"U\+40000 at byte"):
            prompt_for(source, profile, vocabulary, seam)


def test_c002_a_chat_written_by_hand_is_the_chat(vocabulary: Vocabulary, seam: Seam, profile: Profile) -> None:
    messages = (Message("system", "Be brief."), Message("user", "Name three rivers."))
    turns = [f"<|im_start|>{message.role}\n{message.content}<|im_end|>\n" for message in messages]
    by_hand = "".join(turns) + "<|im_start|>assistant\n"
    for prefix in ("", "Three rivers:\n\n", "\n", "The Rh"):
        chat = prompt_for(Chat(messages, Mark(prefix)), profile, vocabulary, seam)
        raw = prompt_for(Text((by_hand + prefix,)), profile, vocabulary, seam)
        assert (raw.ids, raw.heal, raw.floor) == (chat.ids, chat.heal, chat.floor)
